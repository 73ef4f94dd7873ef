"""Read by Python itself at its start, from PYTHONPATH: arms ftdash's telemetry, then hands on to the
sitecustomize that would have been read without it. Nothing here may stop or slow the program that starts."""

import importlib
import os
import sys

_HERE = os.path.dirname(os.path.abspath(__file__))


def _arm():
    if not os.environ.get("FTDASH_RUN_DIR"):
        return
    try:
        _find_ftdash(os.path.dirname(os.path.dirname(_HERE)))
        from ftdash.monitor.inject import own

        own.arm()
    except Exception as error:  # an old Python, a broken install: the program is not ours to stop
        if os.environ.get("RANK", "0") == "0":
            sys.stderr.write(f"ftdash: no telemetry from {sys.executable}: {type(error).__name__}: {error}\n")


def _find_ftdash(monitor):
    """Make `ftdash.monitor` importable from where it lies, in an environment that has no ftdash."""
    import importlib.util

    try:
        found = importlib.util.find_spec("ftdash.monitor") is not None
    except ImportError:
        found = False
    if found:
        return
    import types

    package = types.ModuleType("ftdash")
    package.__path__ = []
    sys.modules["ftdash"] = package
    spec = importlib.util.spec_from_file_location(
        "ftdash.monitor", os.path.join(monitor, "__init__.py"), submodule_search_locations=[monitor]
    )
    if spec is None or spec.loader is None:
        raise ImportError(f"no package in {monitor}")
    module = importlib.util.module_from_spec(spec)
    sys.modules["ftdash.monitor"] = module
    spec.loader.exec_module(module)
    setattr(package, "monitor", module)  # noqa: B010, as an import statement would do


def _hand_on():
    """Import the sitecustomize that stands behind this one, if there is any."""
    sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry or ".") != _HERE]
    own = sys.modules.pop("sitecustomize", None)
    importlib.invalidate_caches()
    try:
        importlib.import_module("sitecustomize")
    except ImportError as error:
        if error.name != "sitecustomize":
            raise
    finally:
        if own is not None:
            sys.modules.setdefault("sitecustomize", own)


_arm()
_hand_on()
