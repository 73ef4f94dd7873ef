"""A launcher as torchrun is one: starts the ranks, ends all of them when one fails, passes signals on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import FrameType

RANK = Path(__file__).with_name("fake_rank.py")


def main() -> int:
    world = int(sys.argv[1])
    ranks = []
    for rank in range(world):
        numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
        env = {**os.environ, **{name: str(value) for name, value in numbers.items()}}
        logs = Path(os.environ["FTDASH_RUN_DIR"]) / "logs"
        with open(logs / f"r{rank}.out", "wb") as out, open(logs / f"r{rank}.err", "wb") as err:
            command = [sys.executable, str(RANK), *sys.argv[2:]]
            ranks.append(subprocess.Popen(command, env=env, stdout=out, stderr=err, start_new_session=True))

    def stop(number: int, frame: FrameType | None) -> None:
        for process in ranks:
            process.send_signal(number)
        for process in ranks:
            process.wait()
        raise SystemExit(1)

    signal.signal(signal.SIGTERM, stop)
    while None in (codes := [process.poll() for process in ranks]):
        if any(codes):
            for process in ranks:
                process.terminate()
            for process in ranks:
                process.wait()
            return 1
        time.sleep(0.05)
    return 0 if all(process.returncode == 0 for process in ranks) else 1


sys.exit(main())
