"""How a run ended, from what was left behind: exit status, torch elastic's report and error files, logs."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import msgspec

from ftdash.monitor.procs import signal_name
from ftdash.monitor.rundir import Manifest, RankExit, RunDir, decode_json

_LOG_TAIL_BYTES = 256 << 10
_STDERR_TAIL_BYTES = 64 << 10

# torch/distributed/elastic/multiprocessing/errors: the summary that torchrun prints when a worker fails.
_ROOT_CAUSE = "Root Cause (first observed failure):"
_ROOT_RANK = re.compile(r"^\s*rank\s+: (\d+) ", re.MULTILINE)
_ROOT_CODE = re.compile(r"^\s*exitcode\s+: (-?\d+) ", re.MULTILINE)
_REPORT_CHARS = 4096
_EXCEPTION_LINE = re.compile(
    r"^(?:\[rank\d+\]: )?(?P<text>(?:\w+\.)*\w*(?:Error|Exception|Interrupt|Exit|Refused)\b.*)$"
)

# What a rank says when another one went away: never the first cause.
_PEER_LOST = re.compile(
    r"connection (?:closed|reset) by peer|broken pipe|connection refused|connection aborted"
    r"|socket timeout|remote process exited|recvvalue failed|failed to recv|ncclremoteerror",
    re.IGNORECASE,
)


@dataclass(frozen=True, slots=True)
class Failure:
    """One rank that failed: when it ended or reported (UTC seconds), how, and what it said."""

    rank: int
    code: int | None
    t: float
    text: str = ""


def launcher_exit(run: RunDir) -> int | None:
    """The launcher's exit code from its marker (negative for a signal); None while it has none."""
    try:
        status = int(run.exit_marker.read_text().strip())
    except (OSError, ValueError):
        return None
    return 128 - status if 128 < status < 128 + 65 else status


def elastic_root_cause(run: RunDir) -> tuple[int, int] | None:
    """(rank, exit code) of the first failure as torch elastic reported it in the launcher's log."""
    log = _tail(run.launcher_log, _LOG_TAIL_BYTES)
    start = log.rfind(_ROOT_CAUSE)
    if start < 0:
        return None
    report = log[start : start + _REPORT_CHARS]
    rank, code = _ROOT_RANK.search(report), _ROOT_CODE.search(report)
    return (int(rank[1]), int(code[1])) if rank and code else None


class _ErrorMessage(msgspec.Struct):
    message: str = ""


class _ErrorFile(msgspec.Struct):
    message: str | _ErrorMessage = ""


def error_file(run: RunDir, rank: int) -> tuple[float, str] | None:
    """(time, first line) of the error file that torch elastic keeps beside this rank's log.

    The time is the file's own: the stamp inside has whole seconds only.
    """
    path = Path(os.path.realpath(run.rank_log(rank, "stderr"))).parent / "error.json"
    try:
        message = decode_json(path.read_bytes(), _ErrorFile).message
        written = path.stat().st_mtime
    except (OSError, msgspec.MsgspecError, ValueError):
        return None
    text = message if isinstance(message, str) else message.message
    return written, text.splitlines()[0] if text else ""


def complete(run: RunDir, manifest: Manifest, known: Iterable[RankExit]) -> Manifest:
    """The manifest with its end filled in from what is left behind, when no agent lived to do it.

    `known` are exits that an agent did see. The state is not changed; nothing is written.
    """
    ends = {end.rank: end for end in [*manifest.exits, *known]}
    code = launcher_exit(run)
    first = first_failure(failures(run, ends.values()))
    rank = first.rank if first else None
    if rank is None and code != 0 and (reported := elastic_root_cause(run)):
        rank = reported[0]
        ends[rank] = RankExit(rank, reported[1], 0.0)
    return msgspec.structs.replace(
        manifest,
        exits=list(ends.values()),
        exit_code=manifest.exit_code if manifest.exit_code is not None else code,
        first_failing_rank=manifest.first_failing_rank if manifest.first_failing_rank is not None else rank,
    )


def reason(run: RunDir, manifest: Manifest) -> str:
    """One line that says why a run failed: the first failing rank, how it ended, and its own last words."""
    rank = manifest.first_failing_rank
    ended = next((end for end in manifest.exits if end.rank == rank and rank is not None), None)
    if ended is None:
        if manifest.exit_code is None:
            return "the launcher is gone and left no exit status"
        words = last_error_in(run.launcher_log)
        return f"launcher: {signal_name(manifest.exit_code)}" + (f": {words}" if words else "")
    words = last_error_line(run, ended.rank) if ended.code > 0 and ended.rank is not None else ""
    return f"rank {rank}: {signal_name(ended.code)}" + (f": {words}" if words else "")


def last_error_line(run: RunDir, rank: int) -> str:
    """The exception that this rank's stderr ends with; empty when there is none."""
    return last_error_in(run.rank_log(rank, "stderr"))


def last_error_in(path: Path) -> str:
    """The last line of a log that names an exception; empty when there is none."""
    text = _tail(path, _STDERR_TAIL_BYTES)
    for line in reversed(text.splitlines()):
        if match := _EXCEPTION_LINE.match(line.strip()[:2000]):
            return match["text"][:500]
    return ""


def first_failure(failures: Iterable[Failure]) -> Failure | None:
    """The one that began it: the earliest, but a rank that only lost its peer never goes before others.

    Ranks ended by SIGTERM after the first failure are the launcher's doing.
    """
    failed = [failure for failure in failures if failure.code != 0]
    if not failed:
        return None
    return min(failed, key=lambda f: (bool(_PEER_LOST.search(f.text)), f.code == -15, f.t, f.rank))


def failures(run: RunDir, exits: Iterable[RankExit]) -> list[Failure]:
    """Every rank that ended badly, with its own words; an error file is written before the process ends."""
    found = []
    for ended in exits:
        if ended.rank is None or ended.code == 0:
            continue
        reported = error_file(run, ended.rank)
        text = (reported[1] if reported else "") or last_error_line(run, ended.rank)
        t = reported[0] if reported and reported[0] else ended.t
        found.append(Failure(rank=ended.rank, code=ended.code, t=t, text=text))
    return found


def _tail(path: Path, size: int) -> str:
    try:
        with open(path, "rb") as handle:
            end = handle.seek(0, os.SEEK_END)
            handle.seek(max(0, end - size))
            return handle.read(size).decode(errors="replace")
    except OSError:
        return ""
