"""A rank without torch: writes the telemetry that a hooked rank writes, and misbehaves as it is told."""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from ftdash.monitor.beat import BeatWriter
from ftdash.monitor.hook.writer import LineWriter


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--step-s", type=float, default=0.05)
    parser.add_argument("--fail", default="::", help="RANK:STEP:HOW, where HOW is raise, exit or kill")
    parser.add_argument("--ignore-term", action="store_true")
    parser.add_argument("--escape", action="store_true", help="leave a child in a session of its own")
    parser.add_argument("--hang-at", type=int, default=0)
    args = parser.parse_args()
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    telemetry = Path(os.environ["FTDASH_RUN_DIR"]) / "telemetry"
    writer = LineWriter(telemetry / f"rank-{rank}.jsonl", period_s=0.05)
    beat = BeatWriter(telemetry / f"rank-{rank}.beat")
    if args.ignore_term:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if args.escape:
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    beat.beat(0, "start")
    head = {"v": 1, "t": time.time()}
    who = {
        "rank": rank,
        "local_rank": rank,
        "world_size": world,
        "host": os.uname().nodename,
        "pid": os.getpid(),
    }
    writer.put({"kind": "meta", **head, **who, "device": "cpu", "max_steps": args.steps, "micro_batch": 2})
    fail_rank, fail_step, how = args.fail.split(":")
    for step in range(1, args.steps + 1):
        beat.beat(step - 1, "forward")
        if step == args.hang_at:
            time.sleep(600)
        if fail_rank == str(rank) and fail_step == str(step):
            writer.close()
            fail(how)
        time.sleep(args.step_s)
        record = {"kind": "step", "v": 1, "t": time.time(), "step": step, "loss": 4.0 / step, "tokens": 100}
        writer.put({**record, "step_s": args.step_s, "tokens_per_s": 100 / args.step_s})
    writer.put(
        {"kind": "experts", "v": 1, "t": time.time(), "step": args.steps, "layer": 0, "counts": [3, 1]}
    )
    beat.beat(args.steps, "end")
    writer.close()
    beat.close()


def fail(how: str) -> None:
    if how == "raise":
        raise ValueError("loss went to the moon [/usr/bin/x]")
    if how == "exit":
        sys.exit(7)
    os.kill(os.getpid(), signal.SIGKILL)


main()
