"""Checks of batch scripts: rendezvous, early expansion, task counts, GPU and CPU binding, signals."""

from __future__ import annotations

import re
from collections.abc import Iterator

from ftdash.engine.check.bundle import Bundle
from ftdash.engine.check.documents import Document
from ftdash.engine.check.findings import Finding, error, warning
from ftdash.engine.check.registry import check
from ftdash.engine.check.shell import Launch, Shell

_TASK_VARIABLES = ("SLURM_PROCID", "SLURM_NODEID", "SLURM_LOCALID")
_LOCAL = re.compile(r"^(localhost|127\.0\.0\.1|0\.0\.0\.0|::1)(:|$)")
_SERVES = re.compile(r"\b(vllm|sglang|lmdeploy|ray)\b")
_MULTI = ("torchrun", "accelerate", "deepspeed")


def _batches(bundle: Bundle) -> Iterator[tuple[Document, Shell]]:
    for document in bundle.documents:
        shell = bundle.shells.get(document.path)
        if shell is not None and shell.is_batch:
            yield document, shell


def _several_nodes(shell: Shell, launch: Launch | None = None) -> bool:
    if launch is not None:
        count = launch.option("--nnodes", "--num_machines", "--num_nodes")
        if count and shell.number(count) != 1:
            return True
    return (shell.nodes or 1) > 1


def _per_node(shell: Shell, launch: Launch) -> int | None:
    """Processes that one launcher starts on its node."""
    if (count := launch.option("--nproc_per_node", "--num_gpus")) is not None:
        if shell.expand(count) in ("gpu", "auto"):
            return shell.gpus_per_node
        return shell.number(count)
    total = shell.number(launch.option("--num_processes"))
    return total // _nodes(shell, launch) if total else None


def _nodes(shell: Shell, launch: Launch) -> int:
    """Nodes that this launch spreads over: its own count, its srun's, the job's."""
    own = shell.number(launch.option("--num_machines", "--nnodes"))
    step = shell.number(launch.srun.option("--nodes", "-N")) if launch.srun else None
    return own or step or shell.nodes or 1


def _tasks_per_node(shell: Shell, launch: Launch) -> int:
    """Launcher tasks on each node: srun's own options first, then the job's."""
    if launch.srun is None:
        return 1
    if (own := shell.number(launch.srun.option("--ntasks-per-node"))) is not None:
        return own
    own = shell.number(launch.srun.option("--ntasks", "-n"))
    if own is not None:
        return max(1, own // (shell.number(launch.srun.option("--nodes", "-N")) or shell.nodes or 1))
    return shell.tasks_per_node or 1


@check
def rendezvous_address(bundle: Bundle) -> Iterator[Finding]:
    """Every node must look for the same first node (pytorch/pytorch#76069)."""
    fix = 'MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1), once in the batch script'
    for document, shell in _batches(bundle):
        several = _several_nodes(shell) or any(_several_nodes(shell, launch) for launch in shell.launches)
        for name in ("MASTER_ADDR", "MAIN_PROCESS_IP", "MASTER_IP", "HEAD_NODE", "head_node_ip"):
            if name not in shell.variables:
                continue
            word, line = shell.variables[name]
            if several and _LOCAL.match(word.text):
                yield error(
                    "rendezvous-localhost",
                    document.at(line),
                    f"{name}={word.text} on {shell.nodes or 'several'} nodes: each waits for itself",
                    fix,
                )
            elif "SLURM_LAUNCH_NODE_IPADDR" in word.expanded:
                yield warning(
                    "rendezvous-launch-node",
                    document.at(line),
                    f"{name} from SLURM_LAUNCH_NODE_IPADDR: that is the node srun was called on, not the "
                    "first one",
                    fix,
                )
        for launch in shell.launches:
            if not _several_nodes(shell, launch):
                continue
            for option in ("--rdzv_endpoint", "--master_addr", "--main_process_ip"):
                value = launch.option(option)
                if value is None:
                    continue
                if _LOCAL.match(shell.expand(value)):
                    yield error(
                        "rendezvous-localhost",
                        document.at(launch.line),
                        f"{option} {value} on several nodes: each waits for itself",
                        fix,
                    )
                elif launch.deferred and re.search(
                    r"\$\(hostname|`hostname|\$HOSTNAME|\$SLURMD_NODENAME", value
                ):
                    yield error(
                        "rendezvous-own-host",
                        document.at(launch.line),
                        f"{option} {value} is evaluated by each task: every node names itself",
                        fix,
                    )
                elif "SLURM_LAUNCH_NODE_IPADDR" in shell.expand(value):
                    yield warning(
                        "rendezvous-launch-node",
                        document.at(launch.line),
                        f"{option} from SLURM_LAUNCH_NODE_IPADDR: that is the node srun was called on",
                        fix,
                    )


@check
def rendezvous_port(bundle: Bundle) -> Iterator[Finding]:
    """Two jobs on one node with one fixed port stop each other (pytorch/pytorch#116974)."""
    for document, shell in _batches(bundle):
        if "--exclusive" in shell.sbatch:
            continue
        fix = "MASTER_PORT=$((10000 + SLURM_JOB_ID % 50000)), or --standalone on one node"
        seen = False
        for name in ("MASTER_PORT", "MAIN_PROCESS_PORT", "PORT"):
            found = shell.variables.get(name)
            if found and found[0].text.isdigit() and found[0].text != "0" and shell.launches:
                seen = True
                yield warning(
                    "fixed-port",
                    document.at(found[1]),
                    f"{name}={found[0].text} is the same for every job: two on one node collide",
                    fix,
                )
        for launch in shell.launches:
            for option in ("--master_port", "--main_process_port", "--rdzv_endpoint"):
                value = launch.option(option)
                port = (value or "").rsplit(":", 1)[-1]
                if value and not seen and port.isdigit() and port != "0" and len(port) >= 4:
                    seen = True
                    yield warning(
                        "fixed-port",
                        document.at(launch.line),
                        f"{option} {value} is the same for every job: two on one node collide",
                        fix,
                    )
            chosen = launch.option("--master_port", "--main_process_port", "--rdzv_endpoint") or ""
            if launch.deferred and re.search(r"RANDOM|shuf|get_free_port|comm -23", chosen) and launch.srun:
                yield error(
                    "port-per-task",
                    document.at(launch.line),
                    f"{chosen} is evaluated by each task: every node chooses a port of its own",
                    "choose the port once in the batch script and export it",
                )


@check
def early_expansion(bundle: Bundle) -> Iterator[Finding]:
    """The batch shell replaces $SLURM_PROCID before srun starts: every task gets the first task's value."""
    for document, shell in _batches(bundle):
        if not any(command.program == "srun" for command in shell.commands):
            continue
        for launch in shell.launches:
            if launch.srun is None:
                continue
            for name in _TASK_VARIABLES:
                if name in launch.expanded:
                    # With c10d the agents agree on their ranks by themselves.
                    agreed = launch.option("--rdzv_backend") == "c10d"
                    yield (warning if agreed else error)(
                        "early-expansion",
                        document.at(launch.line),
                        f"${name} is replaced by the batch shell before srun starts: every task gets its "
                        "value, 0",
                        f"srun bash -c '... ${name} ...' in single quotes, or \\${name} in double quotes",
                    )
        for variable, (word, line) in shell.variables.items():
            for name in _TASK_VARIABLES:
                if name in word.expanded and variable in shell.exported and not word.single:
                    # A launch command in a variable: with c10d the agents agree on their ranks by themselves.
                    agreed = bool(re.search(r"rdzv_backend[= ]c10d", word.text))
                    yield (warning if agreed else error)(
                        "early-expansion",
                        document.at(line),
                        f"{variable}=${name} in the batch script: it is 0 there, and srun hands that to "
                        "every task",
                        f"read {name} in each task: srun bash -c 'export {variable}=${name}; ...'",
                    )


@check
def tasks_and_processes(bundle: Bundle) -> Iterator[Finding]:
    """One launcher per node; it starts one process per GPU (NVIDIA/Megatron-LM#1371, accelerate#2246)."""
    for document, shell in _batches(bundle):
        for launch in shell.launches:
            where = document.at(launch.line)
            tasks, gpus = _tasks_per_node(shell, launch), shell.gpus_per_node
            if launch.launcher in _MULTI:
                yield from _launcher_tasks(shell, launch, where, tasks, gpus)
            elif launch.launcher == "python" and launch.srun and (gpus or 0) > 1 and tasks == 1:
                if _SERVES.search(" ".join(launch.argv)):
                    continue  # an inference engine starts its own workers
                yield warning(
                    "one-task-many-gpus",
                    where,
                    f"srun starts one python on each node for {gpus} GPUs: the others idle",
                    f"torchrun --nproc-per-node {gpus}, or --ntasks-per-node={gpus}",
                )


def _launcher_tasks(
    shell: Shell, launch: Launch, where: str, tasks: int, gpus: int | None
) -> Iterator[Finding]:
    processes = _per_node(shell, launch)
    if tasks > 1 and (processes or gpus or 2) > 1:
        each = f"{processes} processes" if processes else "a process per GPU"
        yield error(
            "tasks-times-processes",
            where,
            f"{tasks} tasks on each node start {launch.launcher}, and each of them starts {each}",
            "#SBATCH --ntasks-per-node=1: one launcher per node",
        )
    if processes and gpus and processes > gpus:
        yield error(
            "more-processes-than-gpus",
            where,
            f"{processes} processes on each node for {gpus} GPUs",
            f"{gpus} processes per node",
        )
    elif processes and gpus and processes < gpus:
        yield warning(
            "idle-gpus",
            where,
            f"{processes} processes on each node for {gpus} GPUs: {gpus - processes} idle",
            f"{gpus} processes per node, or ask for {processes} GPUs",
        )
    several = (shell.nodes or 1) > 1
    if (
        several
        and launch.srun is None
        and launch.launcher != "deepspeed"
        and not _started_elsewhere(shell, launch)
    ):
        yield error(
            "launcher-on-one-node",
            where,
            f"{launch.launcher} is started without srun: it runs on the first of {shell.nodes} nodes only",
            f"srun --ntasks-per-node=1 {launch.launcher} ...",
        )
    if (
        several
        and launch.launcher == "torchrun"
        and launch.srun
        and (not launch.has("--nnodes") or launch.has("--standalone"))
    ):
        yield error(
            "nnodes-missing",
            where,
            f"{shell.nodes} nodes, and torchrun is told of one: each node trains its own model",
            "--nnodes $SLURM_NNODES --rdzv_backend c10d --rdzv_endpoint $MASTER_ADDR:$MASTER_PORT",
        )


def _started_elsewhere(shell: Shell, launch: Launch) -> bool:
    """Whether other means than srun reach the nodes: ssh, pdsh, mpirun, a loop over hosts."""
    return bool(re.search(r"\b(ssh|pdsh|mpirun|mpiexec|clush)\b", shell.text))


@check
def gpu_binding(bundle: Bundle) -> Iterator[Finding]:
    """One GPU per task makes every rank's GPU number 0: local rank 1 names no device (mace#435)."""
    for document, shell in _batches(bundle):
        for name in ("--gpus-per-task", "--gpu-bind"):
            options = [(shell.sbatch[name][0], shell.sbatch[name][1])] if name in shell.sbatch else []
            options += [
                (value, command.line)
                for command in shell.commands
                if command.program == "srun" and (value := command.option(name))
            ]
            for value, line in options:
                one = (
                    re.fullmatch(r"(\w+:)?1", value)
                    if name == "--gpus-per-task"
                    else re.search(r"(single|per_task):1", value)
                )
                tasks = (shell.tasks_per_node or 0) > 1
                launched = any(launch.launcher in _MULTI for launch in shell.launches)
                if one and (tasks or launched):
                    yield warning(
                        "one-gpu-per-task",
                        document.at(line),
                        f"{name}={value}: each task sees one GPU, numbered 0, so local rank 1 names a "
                        "device that "
                        "is not there",
                        "--gpus-per-node, and let each rank take its local rank; or device = local_rank % "
                        "device_count",
                    )


@check
def cpus_per_task(bundle: Bundle) -> Iterator[Finding]:
    """srun does not inherit --cpus-per-task from sbatch since Slurm 22.05."""
    for document, shell in _batches(bundle):
        asked = shell.sbatch_number("--cpus-per-task")
        if not asked or asked < 2:
            continue
        if {"SRUN_CPUS_PER_TASK", "SLURM_CPUS_PER_TASK"} & set(shell.variables):
            continue
        for command in shell.commands:
            if (
                command.program == "srun"
                and any(launch.srun is command for launch in shell.launches)
                and command.option("--cpus-per-task", "-c") is None
                and not _short_cpus(command.texts)
            ):
                yield warning(
                    "srun-cpus-per-task",
                    document.at(command.line),
                    "srun names no --cpus-per-task: since Slurm 22.05 it does not inherit sbatch's "
                    f"{asked}, "
                    "and ranks may share one core",
                    "export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK, or srun "
                    "--cpus-per-task=$SLURM_CPUS_PER_TASK",
                )
                break


def _short_cpus(texts: list[str]) -> bool:
    return any(re.fullmatch(r"-c\d*", text) for text in texts)


@check
def signals(bundle: Bundle) -> Iterator[Finding]:
    """B: reaches the batch shell alone; torchrun swallows USR signals (facebookincubator/submitit#1615)."""
    for document, shell in _batches(bundle):
        found = shell.sbatch.get("--signal")
        if found is None:
            continue
        value, line = found
        trap = next((command for command in shell.commands if command.program == "trap"), None)
        name = re.sub(r"^[A-Z]*:", "", value).split("@")[0]
        if value.startswith(("B:", "BR:", "RB:")):
            if trap is None:
                yield warning(
                    "signal-batch-only",
                    document.at(line),
                    f"--signal={value} reaches the batch shell only, which traps nothing: training never "
                    "hears of it",
                    f"trap a save request on {name} in the script, or drop the B: and signal the step",
                )
            elif not any(launch.background for launch in shell.launches) and not re.search(
                r"^\s*wait\b", shell.text, re.M
            ):
                yield warning(
                    "signal-trap-waits",
                    document.at(trap.line),
                    f"bash runs the trap only after the foreground command ends: {name} comes too late",
                    "start srun with & and wait for it",
                )
        elif (
            any(launch.launcher in ("torchrun", "accelerate") for launch in shell.launches)
            and "TERM" not in name
        ):
            yield warning(
                "signal-launcher",
                document.at(line),
                f"--signal={value} goes to the launcher, and torchrun's agent does not pass {name} to "
                "the ranks",
                "send it to the batch shell (B:) and trap it there: a trigger file, or scancel --signal "
                "to the step",
            )
