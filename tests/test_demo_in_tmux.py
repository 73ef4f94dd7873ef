"""The real program in a real terminal: start the demo, quit, find the run again, dump stacks, stop it."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from ftdash.monitor.rundir import list_runs
from ftdash.monitor.stop import stop_run

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(400),
    pytest.mark.skipif(shutil.which("tmux") is None, reason="tmux is not installed"),
]
FTDASH = f"{shlex.quote(sys.executable)} -m ftdash.tui.cli"


class Terminal:
    """A tmux server of its own with one pane of 120 x 40 that runs a shell."""

    def __init__(self, home: Path) -> None:
        self._socket = f"ftdash-{uuid.uuid4().hex[:8]}"
        environment = {**os.environ, "FTDASH_HOME": str(home), "TERM": "xterm-256color", "PS1": "$ "}
        environment.pop("TMUX", None)
        self._tmux("new-session", "-d", "-x", "120", "-y", "40", "sh", env=environment)

    def _tmux(self, *words: str, env: dict[str, str] | None = None) -> str:
        done = subprocess.run(
            ["tmux", "-L", self._socket, "-f", "/dev/null", *words],
            env=env,
            capture_output=True,
            text=True,
            check=True,
        )
        return done.stdout

    def type(self, *keys: str) -> None:
        self._tmux("send-keys", *keys)

    def run(self, line: str) -> None:
        self._tmux("send-keys", "-l", line)
        self.type("Enter")

    def screen(self) -> str:
        return self._tmux("capture-pane", "-p")

    def wait(self, what: str, ready: Callable[[str], object], timeout_s: float = 120) -> str:
        end = time.monotonic() + timeout_s
        while not ready(shown := self.screen()):
            assert time.monotonic() < end, (
                f"{what} not seen within {timeout_s:.0f} s; the screen was:\n{shown}"
            )
            time.sleep(0.3)
        return shown

    def close(self) -> None:
        subprocess.run(["tmux", "-L", self._socket, "kill-server"], capture_output=True, check=False)


@pytest.fixture
def terminal(ftdash_home: Path) -> Iterator[Terminal]:
    terminal = Terminal(ftdash_home)
    yield terminal
    terminal.close()
    for run in list_runs(ftdash_home / "runs"):
        stop_run(run, grace_s=1.0)


def status(home: Path) -> dict:
    done = subprocess.run(
        [sys.executable, "-m", "ftdash.tui.cli", "status", "--json"],
        env={**os.environ, "FTDASH_HOME": str(home)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def step_on(screen: str) -> int:
    found = re.search(r"step ([\d,]+) of", screen)
    return int(found[1].replace(",", "")) if found else -1


def test_a_demo_outlives_its_screen_and_is_found_dumped_and_stopped(
    terminal: Terminal, ftdash_home: Path
) -> None:
    terminal.run(f"{FTDASH} demo --steps 5000")
    terminal.wait("training on the screen", lambda screen: step_on(screen) >= 3, 200)
    terminal.wait("loss and experts", lambda screen: "Loss" in screen and "Experts: load" in screen)
    both = status(ftdash_home)
    assert len(both["ranks"]) == 2
    assert all(rank["step"] >= 3 for rank in both["ranks"])

    terminal.type("q")
    left = terminal.wait("the shell's prompt after quitting", lambda screen: "ftdash │" not in screen)
    assert "goes on: ftdash shows it again" in left
    after_quit = status(ftdash_home)
    assert after_quit["state"] == "running"

    terminal.run(FTDASH)
    terminal.wait("the app", lambda screen: "1 Plan" in screen)
    terminal.type("3")
    before = after_quit["step"]
    terminal.wait("the same run, further on", lambda screen: step_on(screen) > before)

    run = Path(after_quit["dir"])
    terminal.type("d")
    dumped = lambda screen: len(list(run.glob("stacks/*/rank-*.json"))) > 0  # noqa: E731
    terminal.wait("a stack dump", dumped, 60)
    terminal.wait("the stack on the screen", lambda screen: "py-spy" in screen, 60)

    # one after the other: a terminal sends Alt+q as Escape, q
    terminal.type("Escape")
    terminal.wait("the box's end", lambda screen: "py-spy" not in screen)
    terminal.type("q")
    terminal.wait("the prompt", lambda screen: "ftdash │" not in screen)
    terminal.run(f"{FTDASH} stop --grace 5 --json > /dev/null; echo stopped-$?")
    terminal.wait("the end", lambda screen: "stopped-0" in screen)
    assert status(ftdash_home)["state"] == "stopped"
    left = [
        process.pid
        for process in psutil.process_iter()
        if _environment(process).get("FTDASH_RUN_DIR") == str(run) or str(run) in " ".join(_words(process))
    ]
    assert left == []


def _environment(process: psutil.Process) -> dict[str, str]:
    try:
        return process.environ()
    except (psutil.Error, OSError):
        return {}


def _words(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except (psutil.Error, OSError):
        return []
