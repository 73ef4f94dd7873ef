"""What every test gets: a home of its own, quiet libraries, no network, and no process left behind."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

os.environ.update(
    OMP_NUM_THREADS="1",
    TOKENIZERS_PARALLELISM="false",
    HF_HUB_OFFLINE="1",
    HF_DATASETS_OFFLINE="1",
    WANDB_DISABLED="true",
)
for name in (
    "FTDASH_RUN_DIR",
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "RUST_BACKTRACE",
):
    os.environ.pop(name, None)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests of one group share a Slurm or an sshd and may not run beside each other.

    pytest-xdist 3.8 marks them in a way that pytest 9.2 no longer sees, and spreads them without a word.
    """
    if getattr(config.option, "loadgroup", False):
        alone = [item for item in items if item.get_closest_marker("xdist_group") and "@" not in item.nodeid]
        if alone:
            raise pytest.UsageError(
                f"this pytest {pytest.__version__} and pytest-xdist do not keep groups of tests together "
                f"({alone[0].nodeid}): install the versions of constraints.txt"
            )


@pytest.fixture(autouse=True)
def ftdash_home(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """$FTDASH_HOME for this test alone."""
    home = tmp_path_factory.mktemp("home")
    monkeypatch.setenv("FTDASH_HOME", str(home))
    return home


@pytest.fixture(scope="session", autouse=True)
def no_process_left(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Fails the session when a process that was started for a run of these tests outlives them."""
    yield
    base = str(tmp_path_factory.getbasetemp())
    left = []
    for process in psutil.process_iter(["pid", "cmdline"]):
        try:
            run = process.environ().get("FTDASH_RUN_DIR", "")
        except (psutil.Error, OSError):
            continue
        if run.startswith(base) and process.pid != os.getpid():
            left.append(f"{process.pid} {' '.join(process.info['cmdline'] or [])[:120]}")
            process.kill()
    assert not left, "processes left behind:\n" + "\n".join(left)
