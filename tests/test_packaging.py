"""The distribution says what the folders hold."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("engine", "monitor", "presets", "tui")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_every_package_folder_is_listed_in_pyproject() -> None:
    found = {
        "ftdash." + ".".join(path.parent.relative_to(ROOT).parts)
        for folder in FOLDERS
        for path in (ROOT / folder).rglob("*.*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert found == set(PROJECT["tool"]["setuptools"]["packages"])


def test_no_folder_with_modules_lacks_an_init_file() -> None:
    bare = [
        str(path.parent.relative_to(ROOT))
        for folder in FOLDERS
        for path in (ROOT / folder).rglob("*.py")
        if not (path.parent / "__init__.py").exists()
    ]
    assert bare == []


def test_constraints_pin_torch_first_and_everything_that_the_project_names() -> None:
    pins = [line.split("==") for line in (ROOT / "constraints.txt").read_text().split() if "==" in line]
    assert pins[0][0] == "torch"
    names = {name.lower() for name, _ in pins}
    wanted = set(PROJECT["project"]["dependencies"])
    for extra in PROJECT["project"]["optional-dependencies"].values():
        wanted |= set(extra)
    required = {requirement.split(">=")[0].split(",")[0].lower() for requirement in wanted}
    assert required <= names, f"not pinned: {sorted(required - names)}"


@pytest.mark.parametrize("module", ["ftdash.tui.cli", "ftdash.tui.app", "ftdash.engine.planner"])
def test_the_screen_and_the_planner_load_no_heavy_library(module: str) -> None:
    code = (
        f"import sys, {module}\n"
        "heavy = {'torch', 'numpy', 'pandas', 'transformers', 'accelerate'} & set(sys.modules)\n"
        "sys.exit(f'loaded {sorted(heavy)}' if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_imports_point_down() -> None:
    """tui → engine → monitor; presets is data."""
    allowed = {"presets": set(), "monitor": {"monitor"}, "engine": {"engine", "monitor", "presets"}}
    wrong = []
    for folder, targets in allowed.items():
        for path in (ROOT / folder).rglob("*.py"):
            for number, line in enumerate(path.read_text().splitlines(), 1):
                words = line.strip().split()
                if len(words) > 1 and words[0] in ("from", "import") and words[1].startswith("ftdash."):
                    target = words[1].split(".")[1]
                    if target not in targets:
                        wrong.append(f"{path.relative_to(ROOT)}:{number}: {line.strip()}")
    assert wrong == []


def test_bad_input_is_one_line_and_exit_status_2() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "ftdash.tui.cli", "no-such-command"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "no-such-command" in done.stderr
    assert done.stdout == ""
