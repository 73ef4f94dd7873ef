"""Checks of a batch script as bash and Slurm read it: environment variables, directives, continuations."""

from __future__ import annotations

import re
from collections.abc import Iterator

from ftdash.engine.check.bundle import Bundle
from ftdash.engine.check.documents import Document, Kind
from ftdash.engine.check.findings import Finding, error, note, warning
from ftdash.engine.check.registry import check
from ftdash.engine.check.shell import Launch, Shell

_FIRST_NODE = 'MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)'
_DEBUG_LEVELS = ("VERSION", "WARN", "INFO", "ABORT", "TRACE", "NONE")
# Switches that a search for a fault leaves behind, and what each costs or hides.
_LEFT_ON = {
    "NCCL_P2P_DISABLE": ("1", "GPUs of a node talk through host memory"),
    "NCCL_IB_DISABLE": ("1", "nodes talk over TCP instead of InfiniBand"),
    "NCCL_SHM_DISABLE": ("1", "processes of a node talk over the network"),
    "CUDA_LAUNCH_BLOCKING": ("1", "every kernel is waited for"),
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": ("0", "a rank that fails leaves the others waiting for ever"),
    "NCCL_ASYNC_ERROR_HANDLING": ("0", "a rank that fails leaves the others waiting for ever"),
}


def _shells(bundle: Bundle) -> Iterator[tuple[Document, Shell]]:
    for document in bundle.of(Kind.SHELL):
        yield document, bundle.shells[document.path]


def _nodes(shell: Shell) -> int:
    own = [shell.number(launch.option("--nnodes", "--num_machines")) or 1 for launch in shell.launches]
    return max([shell.nodes or 1, *own])


@check
def node_list_as_address(bundle: Bundle) -> Iterator[Finding]:
    """A node list such as node[01-04] names no host."""
    for document, shell in _shells(bundle):
        if _nodes(shell) < 2:
            continue
        for name in ("MASTER_ADDR", "MAIN_PROCESS_IP", "HEAD_NODE", "head_node"):
            word, line = shell.variables.get(name, (None, 0))
            if word and re.fullmatch(r"\$\{?SLURM_(JOB_)?NODELIST\}?", word.text.strip("\"'")):
                yield error(
                    "node-list-as-address",
                    document.at(line),
                    f"{name}={word.text} is the whole list of nodes, such as node[01-04]: no host has that "
                    "name",
                    _FIRST_NODE,
                )


@check
def loopback_interface(bundle: Bundle) -> Iterator[Finding]:
    for document, shell in _shells(bundle):
        for name in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
            word, line = shell.variables.get(name, (None, 0))
            if word and word.text.lstrip("=") == "lo" and _nodes(shell) > 1:
                yield error(
                    "loopback-interface",
                    document.at(line),
                    f"{name}=lo on {_nodes(shell)} nodes: each reaches itself only",
                    f"the interface between the nodes, as ip addr names it, or {name}=^lo,docker0",
                )


@check
def debug_level(bundle: Bundle) -> Iterator[Finding]:
    for document, shell in _shells(bundle):
        word, line = shell.variables.get("NCCL_DEBUG", (None, 0))
        if word and "$" not in word.text and word.text.upper() not in _DEBUG_LEVELS:
            yield warning(
                "nccl-debug-level",
                document.at(line),
                f"NCCL_DEBUG={word.text} is no level: NCCL prints nothing",
                "WARN, INFO or TRACE",
            )


@check
def switches_left_on(bundle: Bundle) -> Iterator[Finding]:
    for document, shell in _shells(bundle):
        for name, (value, price) in _LEFT_ON.items():
            word, line = shell.variables.get(name, (None, 0))
            if word and word.text == value and shell.launches:
                hides = value == "0"
                yield (warning if hides else note)(
                    "debug-switch-left-on",
                    document.at(line),
                    f"{name}={value}: {price}",
                    f"unset {name} once the fault is found",
                )


@check
def visible_devices(bundle: Bundle) -> Iterator[Finding]:
    for document, shell in _shells(bundle):
        for launch in shell.launches:
            visible = shell.environment(launch, "CUDA_VISIBLE_DEVICES")
            if not re.fullmatch(r"\d+(,\d+)*", visible):
                continue
            count = len(visible.split(","))
            wanted = shell.number(launch.option("--nproc_per_node", "--num_gpus"))
            if wanted is None and (total := shell.number(launch.option("--num_processes"))):
                wanted = total // (shell.number(launch.option("--num_machines")) or 1)
            if wanted and wanted > count:
                yield error(
                    "more-processes-than-gpus",
                    document.at(launch.line),
                    f"{wanted} processes on each node, and CUDA_VISIBLE_DEVICES={visible} shows {count} GPUs",
                    f"{count} processes, or show {wanted} GPUs",
                )


@check
def nodes_of_launcher_and_job(bundle: Bundle) -> Iterator[Finding]:
    for document, shell in _shells(bundle):
        for launch in shell.launches:
            named = launch.option("--nnodes", "--num_machines")
            own, step = (
                shell.number(named),
                shell.number(launch.srun.option("--nodes", "-N")) if launch.srun else None,
            )
            nodes = step or shell.nodes
            if launch.srun and own and nodes and own != nodes and nodes > 1:
                yield error(
                    "nodes-disagree",
                    document.at(launch.line),
                    f"{named} nodes for {launch.launcher}, and srun starts it on {nodes}: "
                    + (
                        "each node trains its own model"
                        if own == 1
                        else "it waits for nodes that never come"
                        if own > nodes
                        else "the others are turned away"
                    ),
                    "--nnodes $SLURM_NNODES",
                )
            yield from _static_rank(document, shell, launch)


def _static_rank(document: Document, shell: Shell, launch: Launch) -> Iterator[Finding]:
    """torchrun's static rendezvous numbers nodes by --node_rank, 0 by default."""
    if launch.launcher != "torchrun" or _nodes(shell) < 2 or launch.has("--standalone"):
        return
    static = launch.option("--rdzv_backend") in (None, "static")
    if static and launch.srun and not launch.has("--node_rank"):
        yield error(
            "node-rank-missing",
            document.at(launch.line),
            f"static rendezvous on {_nodes(shell)} nodes without --node_rank: every node takes itself for "
            "the first",
            "--rdzv_backend c10d, or --node_rank $SLURM_NODEID in srun bash -c '...'",
        )


@check
def local_rank_over_nodes(bundle: Bundle) -> Iterator[Finding]:
    for document, shell in _shells(bundle):
        found = re.search(r"\bLOCAL_RANK=\"?\\?\$\{?SLURM_PROCID\b(?!\s*%)", shell.text)
        if found and _nodes(shell) > 1:
            yield error(
                "local-rank-is-global",
                document.at(shell.text.count("\n", 0, found.start()) + 1),
                f"LOCAL_RANK is SLURM_PROCID on {_nodes(shell)} nodes: on the second it names GPUs that "
                "are not "
                "there",
                "LOCAL_RANK=$SLURM_LOCALID",
            )


@check
def cores_for_processes(bundle: Bundle) -> Iterator[Finding]:
    for document, shell in _shells(bundle):
        cores = shell.sbatch_number("--cpus-per-task")
        tasks = shell.tasks_per_node or 1
        for launch in shell.launches:
            count = shell.number(launch.option("--nproc_per_node"))
            if cores and count and tasks == 1 and cores < count:
                yield warning(
                    "cores-for-processes",
                    document.at(shell.sbatch["--cpus-per-task"][1]),
                    f"{cores} cores for {count} processes and their data loaders: GPUs wait for the CPU",
                    f"--cpus-per-task={count * 8}, or what a node has",
                )


@check
def directives(bundle: Bundle) -> Iterator[Finding]:
    """sbatch reads lines that begin with #SBATCH, up to the first command."""
    for document, shell in _shells(bundle):
        if not shell.sbatch:
            continue
        begun = 0
        for number, line in enumerate(shell.text.splitlines(), 1):
            if line.startswith("#SBATCH"):
                if begun:
                    yield warning(
                        "directive-after-command",
                        document.at(number),
                        f"{line.strip()[:60]} stands after a command (line {begun}): sbatch does not read it",
                        "move it above the first command",
                    )
            elif re.match(r"^\s*#\s+SBATCH\s+-|^\s+#SBATCH\s+-", line) and not begun:
                yield warning(
                    "directive-not-read",
                    document.at(number),
                    f"{line.strip()[:60]} is a comment for sbatch: a directive begins with #SBATCH, at the "
                    "first "
                    "column",
                    "#SBATCH without the space, or ##SBATCH to leave it out on purpose",
                )
            elif line.strip() and not line.lstrip().startswith("#"):
                begun = begun or number


@check
def time_limit(bundle: Bundle) -> Iterator[Finding]:
    """A number alone is minutes (sbatch's manual)."""
    for document, shell in _shells(bundle):
        value, line = shell.sbatch.get("--time", ("", 0))
        if value.isdigit() and 0 < int(value) <= 72 and shell.launches:
            yield warning(
                "time-in-minutes",
                document.at(line),
                f"--time={value} is {value} minutes",
                f"--time={int(value):02d}:00:00 for hours",
            )


@check
def lines_of_the_shell(bundle: Bundle) -> Iterator[Finding]:
    for document, shell in _shells(bundle):
        lines = shell.text.splitlines()
        for number, line in enumerate(lines, 1):
            follows = lines[number].strip() if number < len(lines) else ""
            if (
                re.search(r"\S\s+\\[ \t]+$", line)
                and follows.startswith("-")
                and not line.lstrip().startswith("#")
            ):
                yield error(
                    "space-after-backslash",
                    document.at(number),
                    f"a space stands after the backslash: the command ends here, and {follows[:40]} is one "
                    "of its own",
                    "remove what stands after the backslash",
                )
        yield from _open_here_document(document, lines)


def _open_here_document(document: Document, lines: list[str]) -> Iterator[Finding]:
    ends: tuple[str, bool, int] | None = None
    for number, line in enumerate(lines, 1):
        if ends is None:
            found = re.search(r"(?<!<)<<(-?)\s*[\"']?(\w+)[\"']?", line)
            if found and not line.lstrip().startswith("#") and "((" not in line:
                ends = found.group(2), bool(found.group(1)), number
        elif (line.lstrip("\t") if ends[1] else line) == ends[0]:
            ends = None
    if ends is not None:
        yield error(
            "here-document-open",
            document.at(ends[2]),
            f"the here-document never ends: no line is {ends[0]} alone, and everything below it is text",
            f"{ends[0]} on a line of its own, with nothing before or after it",
        )


_TIME = re.compile(r"\d+|\d+:\d+(:\d+)?|\d+-\d+(:\d+){0,2}|infinite|unlimited", re.I)


@check
def directive_forms(bundle: Bundle) -> Iterator[Finding]:
    """Values that sbatch refuses or reads otherwise than meant (sbatch's manual)."""
    for document, shell in _shells(bundle):
        if not shell.sbatch:
            continue
        if not shell.text.startswith("#!"):
            yield error(
                "no-interpreter",
                document.at(1),
                "the first line names no interpreter: sbatch refuses the script",
                "#!/bin/bash as the very first line",
            )
        value, line = shell.sbatch.get("--time", ("", 0))
        if value and re.match(r"\d", value) and not _TIME.fullmatch(value):
            yield error(
                "directive-form",
                document.at(line),
                f"--time={value} is no time for sbatch",
                "24:00:00, or 1-00:00:00",
            )
        value, line = shell.sbatch.get("--gres", ("", 0))
        if value.isdigit():
            yield error(
                "directive-form",
                document.at(line),
                f"--gres={value} names no resource",
                f"--gres=gpu:{value}",
            )
        value, line = shell.sbatch.get("--mem", ("", 0))
        if value.isdigit() and 0 < int(value) < 4096:
            yield warning(
                "directive-form",
                document.at(line),
                f"--mem={value} is {value} MB",
                f"--mem={value}G, or --mem=0 for all",
            )


@check
def launcher_values(bundle: Bundle) -> Iterator[Finding]:
    for document, shell in _shells(bundle):
        for launch in shell.launches:
            count = shell.expand(launch.option("--nproc_per_node") or "")
            word = launch.launcher == "torchrun" and re.fullmatch(r"[a-zA-Z]+", count)
            if word and count not in ("gpu", "cpu", "auto", "xpu"):
                yield error(
                    "value-unknown",
                    document.at(launch.line),
                    f"--nproc-per-node {count}: a number, or one of auto, cpu, gpu, xpu",
                    "--nproc-per-node gpu",
                )
            for option in ("--master_port", "--main_process_port", "--rdzv_endpoint"):
                port = shell.expand(launch.option(option) or "").rsplit(":", 1)[-1]
                if port.isdigit() and int(port) > 65535:
                    yield error(
                        "port-range",
                        document.at(launch.line),
                        f"{option}: port {port}: ports end at 65535",
                        "a free port",
                    )
