"""Writes the stacks of training processes on this machine that ftdash did not start.

    python -m ftdash.monitor.attach.dump [--slurm JOB] FOLDER

prints how many ranks it dumped; `ftdash diagnose --stacks FOLDER` reads them.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from ftdash.monitor.attach.find import find_jobs
from ftdash.monitor.diagnosis.collect import dump_ranks, save_ranks


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m ftdash.monitor.attach.dump", allow_abbrev=False)
    parser.add_argument("--slurm", metavar="JOB", help="only ranks of this Slurm job")
    parser.add_argument("folder", type=Path)
    args = parser.parse_args(argv)
    ranks = [
        (rank.rank, rank.pid)
        for job in find_jobs()
        if args.slurm in (None, job.slurm_job_id)
        for rank in job.ranks
    ]
    args.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    save_ranks(args.folder, dump_ranks(ranks))
    print(len(ranks))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
