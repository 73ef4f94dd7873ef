"""The batch script: one agent a node, the rendezvous worked out inside the step, save before the limit."""

from __future__ import annotations

import shlex
from pathlib import Path

from ftdash.engine.slurm.options import ContainerRuntime, SlurmOptions

# Option values that sbatch reads the same way from a #SBATCH line as from its own arguments.
PLAIN = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_=.,:@/+*[]&|()!")

BODY = """\
set -uo pipefail
run={run}
{modules}
# The limit (or a preemption) is near: ask every node's agent to save and stop. A file reaches ranks that a
# signal does not, since launchers swallow SIGUSR1.
near_the_limit=
# shellcheck disable=SC2317  # reached through the trap
save_and_stop() {{
  near_the_limit=1
  {python} -m ftdash.monitor.control save-and-stop "$run"
}}
trap save_and_stop USR1 TERM

# Host, port and node rank are worked out by ftdash.engine.slurm.step inside the step, once for each node:
# expanded here they would be the same on all of them.
srun {srun} \\
  {step} &
step=$!
# a trapped signal ends `wait` early, so it is waited for until the step is gone
while kill -0 "$step" 2>/dev/null; do wait "$step"; done
wait "$step"
code=$?
{requeue}exit "$code"
"""

REQUEUE = """\
if [ -n "$near_the_limit" ]; then
  {python} -m ftdash.engine.slurm.requeue "$run" && exit 0
fi
"""


def directives(options: SlurmOptions) -> tuple[list[str], list[str]]:
    """The sbatch options as (lines for the script's head, arguments for sbatch itself).

    A #SBATCH line is split at spaces and knows its own quoting, so only plain values stand there.
    """
    plain: list[str] = []
    other: list[str] = []
    for argument in options.arguments():
        (plain if set(argument) <= PLAIN else other).append(argument)
    return plain, other


def batch_script(run: Path, options: SlurmOptions, *, python: str) -> str:
    """The script for sbatch."""
    head, _ = directives(options)
    srun = ["--kill-on-bad-exit=1", "--ntasks-per-node=1", f"--nodes={options.nodes}"]
    if options.cpus_per_task:
        # since 22.05 srun no longer takes this from sbatch, and ranks would share one core
        srun.append(f"--cpus-per-task={options.cpus_per_task}")
    step = [python, "-m", "ftdash.engine.slurm.step"]
    if options.container and options.container_runtime is ContainerRuntime.PYXIS:
        srun += [f"--container-image={options.container}", f"--container-mounts={run}:{run}"]
    elif options.container:
        gpu = [] if options.gpus_per_node == 0 else ["--nv"]
        step = ["apptainer", "exec", *gpu, "--bind", str(run), options.container, *step]
    modules = "".join(f"module load {shlex.quote(module)}\n" for module in options.modules)
    body = BODY.format(
        run=shlex.quote(str(run)),
        modules=modules,
        python=shlex.quote(python),
        srun=" ".join(map(shlex.quote, srun)),
        step=" ".join(map(shlex.quote, step)) + ' "$run"',
        requeue=REQUEUE.format(python=shlex.quote(python)) if options.requeue else "",
    )
    lines = [
        "#!/bin/bash",
        "# shellcheck disable=SC1003,SC2016  # paths are meant as they stand",
        *(f"#SBATCH {argument}" for argument in head),
    ]
    return "\n".join(lines) + "\n" + body
