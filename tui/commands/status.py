"""`ftdash status`: one run, its ranks and alerts, now."""

from __future__ import annotations

import argparse

from ftdash.monitor.logs.lines import strip_ansi
from ftdash.monitor.rundir import find_run
from ftdash.monitor.state import RankState, RunState
from ftdash.tui import format as fmt
from ftdash.tui.commands.run_json import print_json, progress_line, read_once, status_json


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "run", nargs="?", default="last", metavar="RUN", help="id, part of it, or folder (last)"
    )
    parser.add_argument("--runs", metavar="DIR", help="where run directories live ($FTDASH_HOME/runs)")
    parser.add_argument("--json", action="store_true")


def run(args: argparse.Namespace) -> int:
    state = read_once(find_run(args.run, args.runs))
    if args.json:
        print_json(status_json(state))
    else:
        print("\n".join(status_lines(state)))
    return 0


def status_lines(state: RunState) -> list[str]:
    lines = [state.run, progress_line(state)]
    if state.manifest.reason:
        lines.append(f"reason: {state.manifest.reason}")
    lines += [_rank_line(rank) for rank in state.ranks]
    lines += [f"{alert.severity}: {alert.text}" for alert in state.alerts]
    lines += [f"note: {notice}" for notice in state.notices]
    return [_plain(line) for line in lines]


def _plain(line: str) -> str:
    """One line without control characters: reasons and alerts quote logs, which may steer a terminal."""
    return "".join(char for char in strip_ansi(" ".join(line.splitlines())) if char.isprintable())


def _rank_line(rank: RankState) -> str:
    loss = f"{rank.loss:.4f}" if rank.loss is not None else "-"
    rate = f"{rank.tokens_per_s:,.0f}" if rank.tokens_per_s is not None else "-"
    memory = fmt.size(rank.memory_used) if rank.memory_used is not None else "-"
    age = f"{fmt.duration(rank.heartbeat_age_s)} ago" if rank.heartbeat_age_s is not None else "never heard"
    return (
        f"  rank {rank.rank:>4}  {rank.host or '-'}  pid {rank.pid or '-'}  step {rank.step:,}  loss {loss}  "
        f"{rate} tokens/s  {memory}  {rank.state}, {age}"
    )
