"""A rehearsal in a process of its own: its outcome is a file, and ending the process ends its ranks."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path
from types import FrameType
from typing import NoReturn

import msgspec

from ftdash.engine.plan import Plan, PlanError
from ftdash.monitor.rundir import write_atomic

OUTCOME, PLAN, LOG = "outcome.json", "rehearsed.plan", "rehearsal.log"


class Outcome(msgspec.Struct, frozen=True):
    """What was proved, what only the real machine can show, and the one line of a failure."""

    proved: tuple[str, ...] = ()
    not_proved: tuple[str, ...] = ()
    failure: str = ""
    seconds: float = 0.0


def start(plan: Plan, work: Path) -> subprocess.Popen[bytes]:
    """Start rehearsing `plan` in the new folder `work`."""
    work.mkdir(parents=True, mode=0o700)
    (work / PLAN).write_bytes(msgspec.json.encode(plan.to_dict()))
    with (work / LOG).open("wb") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "ftdash.tui.rehearsing", str(work)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )


def outcome(work: Path, exit_code: int) -> Outcome:
    """What the ended process left; a process that left nothing failed with its last words."""
    try:
        return msgspec.json.decode((work / OUTCOME).read_bytes(), type=Outcome)
    except (OSError, msgspec.DecodeError):
        words = last_line(work / LOG) or "no output"
        return Outcome(failure=f"the rehearsal ended with {exit_code}: {words}")


def stage(work: Path) -> tuple[str, str]:
    """The training run in progress, by its folder's name, and its last line; empty before the first."""
    logs = [(path.stat().st_mtime, path) for path in work.glob("*/run/logs/launcher.log")]
    if not logs:
        return "", ""
    newest = max(logs)[1]
    return newest.parents[2].name, last_line(newest)


def last_line(path: Path, most: int = 4096) -> str:
    """The last line with text among the last `most` bytes of a file; empty when there is none."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - most))
            lines = file.read(most).decode(errors="replace").splitlines()
    except OSError:
        return ""
    return next((line.strip() for line in reversed(lines) if line.strip()), "")


def main(argv: list[str]) -> int:
    """Rehearse the plan that lies in a folder and write the outcome beside it."""
    from ftdash.engine.rehearse import RehearsalError, rehearse

    def end(_signal: int, _frame: FrameType | None) -> NoReturn:
        raise SystemExit(143)  # unwinds, so that the training processes are killed on the way

    signal.signal(signal.SIGTERM, end)
    work, started = Path(argv[0]), time.monotonic()
    try:
        plan = Plan.from_dict(msgspec.json.decode((work / PLAN).read_bytes()))
        found = rehearse(plan, work=work)
        told = Outcome(found.proved, found.not_proved, seconds=found.seconds)
    except RehearsalError as error:
        told = Outcome(error.proved, failure=_one_line(error), seconds=time.monotonic() - started)
    except PlanError as error:
        told = Outcome(failure=_one_line(error))
    write_atomic(work / OUTCOME, msgspec.json.encode(told))
    return 1 if told.failure else 0


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
