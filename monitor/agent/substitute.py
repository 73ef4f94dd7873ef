"""Does an agent's work once, on a node whose agent is dead: started there by srun or ssh.

    python -m ftdash.monitor.agent.substitute dump RUN_DIR FOLDER
    python -m ftdash.monitor.agent.substitute end RUN_DIR GRACE_S [save]

Prints one word for whoever asked: how many ranks were dumped, or the processes that would not end.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

from ftdash.monitor import procs
from ftdash.monitor.agent.end import SAVE_WAIT_S, end_here
from ftdash.monitor.hostname import node_name
from ftdash.monitor.records import Exit, encode_line
from ftdash.monitor.rundir import RunDir, RunError

NOTHING_LEFT = "-"


def main(argv: list[str]) -> int:
    """Exit status 1 with one line when the run directory is not ours or cannot be written."""
    action, path, value = argv[:3]
    run = RunDir(path)
    try:
        run.check_owner()
        if action == "dump":
            print(dump(run, Path(value)))
        else:
            left = end(run, float(value), save="save" in argv[3:])
            print(",".join(map(str, sorted(left))) or NOTHING_LEFT)
    except (RunError, OSError) as error:
        sys.stderr.write(f"ftdash: {node_name()}: {error}\n")
        return 1
    return 0


def dump(run: RunDir, folder: Path) -> int:
    """The stacks of this node's ranks, each into its file; how many there were."""
    from ftdash.monitor.diagnosis.collect import dump_ranks, save_ranks

    ranks = [(rank.rank, rank.pid) for rank in procs.find_ranks(procs.pids_of_run(run.path)).values()]
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    save_ranks(folder, dump_ranks(ranks))
    return len(ranks)


def end(run: RunDir, grace_s: float, *, save: bool) -> set[int]:
    """End the run on this node and tell it in the dead agent's file; processes that would not go."""
    if save:
        (run.control / "save-and-stop").touch(mode=0o600)
        deadline = time.monotonic() + SAVE_WAIT_S
        while procs.pids_of_run(run.path) and time.monotonic() < deadline:
            time.sleep(0.2)
    left = end_here(run, grace_s)
    ended = Exit(t=time.time(), rank=None, pid=0, code=None, host=node_name())
    with open(run.node_file(node_name()), "ab", buffering=0) as file:
        file.write(b"\n" + encode_line(ended))  # the agent may have died within a line
    return left


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
