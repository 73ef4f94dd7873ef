"""Asks Slurm, through its own commands, and turns the answers into typed values.

Slurm's JSON has two shapes: until 22.05 plain strings and numbers, since 23.02 lists of states and numbers
wrapped as {"set", "infinite", "number"}. Both are read; where --json is missing, `scontrol show -o` serves.
No command waits longer than its timeout, so a controller that does not answer cannot freeze a screen.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

import msgspec

TIMEOUT_S = 10.0


class SlurmError(Exception):
    """Slurm refused or did not answer; the text is Slurm's own message, in one line."""


@dataclass(frozen=True, slots=True)
class Job:
    """One job as the queue shows it. Times are UTC seconds, 0 when unknown."""

    id: str
    name: str = ""
    user: str = ""
    partition: str = ""
    state: str = ""  # PENDING, RUNNING, COMPLETED, FAILED, CANCELLED, TIMEOUT, NODE_FAIL, ...
    reason: str = ""
    nodes: str = ""  # node list in Slurm's bracket form
    node_count: int = 0
    gpus: int = 0
    submitted: int = 0
    started: int = 0  # of a pending job: the expected start
    ends: int = 0
    time_limit_min: int | None = None
    exit_code: int | None = None
    restarts: int = 0
    elapsed_s: int | None = None  # of a job that is over, where accounting tells
    output: str = ""  # where the batch script's standard output goes
    shown_id: str = ""  # of a job array's task: 7_3, or 7_[0-9%2] while its tasks wait

    @property
    def is_over(self) -> bool:
        return self.state not in (
            "PENDING",
            "RUNNING",
            "CONFIGURING",
            "COMPLETING",
            "SUSPENDED",
            "REQUEUED",
            "",
        )


@dataclass(frozen=True, slots=True)
class Node:
    name: str
    address: str
    state: str  # idle, mixed, allocated, down, drained, ...
    partitions: tuple[str, ...] = ()
    cpus: int = 0
    memory_mb: int = 0
    gres: str = ""
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Partition:
    """A partition's nodes by state, such as {"idle": 3, "mixed": 1}."""

    name: str
    states: dict[str, int] = field(default_factory=dict)
    gres: str = ""


def available() -> bool:
    """Whether Slurm's client commands are on the PATH."""
    return shutil.which("sbatch") is not None and shutil.which("scontrol") is not None


def environment() -> dict[str, str]:
    """Ours without what changes Slurm's commands: formats and filters, and the options of a job around us."""
    kept = ("SLURM_CONF", "SLURM_CLUSTERS")
    ours = re.compile(r"(SLURM|SBATCH|SALLOC|SRUN|SQUEUE|SINFO|SACCT|SCONTROL)_")
    return {key: value for key, value in os.environ.items() if key in kept or not ours.match(key)}


def call(*argv: str, timeout_s: float = TIMEOUT_S, stdin: str | None = None) -> str:
    """Standard output of a Slurm command. Raises SlurmError with Slurm's own words."""
    try:
        done = subprocess.run(
            argv,
            input=stdin or "",
            capture_output=True,
            text=True,
            errors="replace",  # a job's name may be any bytes
            timeout=timeout_s,
            check=False,
            env=environment(),
            # All files here are closed on exec. Closed one by one before it, a file whose file system hangs
            # would hold up this whole program, which waits with the interpreter's lock for the child.
            close_fds=False,
        )
    except FileNotFoundError:
        raise SlurmError(f"{argv[0]} is not installed on this machine") from None
    except subprocess.TimeoutExpired:
        raise SlurmError(
            f"{argv[0]} gave no answer within {timeout_s:.0f} s: the controller may be down"
        ) from None
    if done.returncode:
        lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
        raise SlurmError("; ".join(lines) or f"{argv[0]} exited {done.returncode}")
    return done.stdout


def number(value: Any) -> int | None:
    """A number in either shape; None when unset or infinite."""
    if isinstance(value, dict):
        if not value.get("set", True) or value.get("infinite", False):
            return None
        value = value.get("number")
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return int(value)


def word(value: Any) -> str:
    """A state in either shape: the first of a list, or the string itself."""
    if isinstance(value, list):
        value = value[0] if value else ""
    return str(value or "")


def node_state(state: Any, flags: Any = None) -> str:
    """A node's state in one or two words. Newer Slurm lists flags behind the state, older ones beside it.

    A node that is idle and drains is drained: it takes no job.
    """
    words = [str(part).lower() for part in [*_as_list(state), *_as_list(flags)] if part]
    base, more = (words[0], words[1:]) if words else ("", [])
    if "drain" in more:
        return "drained" if base == "idle" else "down, drained" if base == "down" else "draining"
    if more and more[0] in ("not_responding", "no_respond"):
        return f"{base}, not responding"
    for flag in ("reserved", "maintenance", "planned", "completing", "powered_down", "powering_up"):
        if flag in more:
            return f"{base}, {flag.replace('_', ' ')}"
    return base


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [] if value is None else [value]


def exit_code(value: Any) -> int | None:
    """A job's exit code: a raw wait status until 22.05, an object with return_code later."""
    if isinstance(value, dict):
        if "return_code" in value:
            return number(value["return_code"])
        value = number(value)
    if not isinstance(value, int):
        return None
    return value >> 8 if value > 255 else -value if value else 0


def parse_jobs(text: str | bytes) -> list[Job]:
    """The jobs of `squeue --json` (22.05 to today)."""
    data = _decode(text, "squeue")
    return [_job(entry) for entry in data.get("jobs", []) if isinstance(entry, dict)]


def _job(entry: dict[str, Any]) -> Job:
    gpus = re.search(r"gres/gpu=(\d+)", str(entry.get("tres_alloc_str") or entry.get("tres_req_str") or ""))
    reason = word(entry.get("state_reason"))
    return Job(
        id=str(entry.get("job_id", "")),
        name=str(entry.get("name") or ""),
        user=str(entry.get("user_name") or ""),
        partition=str(entry.get("partition") or ""),
        state=word(entry.get("job_state")).upper(),
        reason="" if reason == "None" else reason,
        nodes=str(entry.get("nodes") or ""),
        node_count=number(entry.get("node_count")) or 0,
        gpus=int(gpus.group(1)) if gpus else 0,
        submitted=number(entry.get("submit_time")) or 0,
        started=number(entry.get("start_time")) or 0,
        ends=number(entry.get("end_time")) or 0,
        time_limit_min=number(entry.get("time_limit")),
        exit_code=exit_code(entry.get("exit_code")),
        restarts=number(entry.get("restart_cnt")) or 0,
        output=str(entry.get("standard_output") or ""),
        shown_id=_array_id(
            number(entry.get("array_job_id")) or 0,
            number(entry.get("array_task_id")),
            str(entry.get("array_task_string") or ""),
        ),
    )


def _array_id(array: int, task: int | None, waiting: str) -> str:
    """As squeue shows a job array's tasks; empty for a job that is none."""
    if not array or (task is None and not waiting):
        return ""
    return f"{array}_{task}" if task is not None else f"{array}_[{waiting}]"


def parse_nodes(text: str | bytes) -> list[Node]:
    """The nodes of `sinfo --json`: a list of nodes until 22.05, groups of nodes in a partition later."""
    data = _decode(text, "sinfo")
    if "sinfo" not in data:
        return [_node(entry) for entry in data.get("nodes", []) if isinstance(entry, dict)]
    seen: dict[str, Node] = {}
    for group in data["sinfo"]:
        nodes = group.get("nodes") or {}
        names = nodes.get("nodes") or nodes.get("hostnames") or []
        addresses = nodes.get("addresses") or []
        partition = str((group.get("partition") or {}).get("name") or "")
        for index, name in enumerate(names):
            before = seen.get(name)
            seen[name] = Node(
                name=name,
                address=addresses[index] if len(addresses) == len(names) else name,
                state=node_state((group.get("node") or {}).get("state")),
                partitions=tuple(dict.fromkeys((*(before.partitions if before else ()), partition))),
                cpus=number((group.get("cpus") or {}).get("maximum")) or 0,
                memory_mb=number((group.get("memory") or {}).get("maximum")) or 0,
                gres=str((group.get("gres") or {}).get("total") or ""),
                reason=str((group.get("reason") or {}).get("description") or ""),
            )
    return list(seen.values())


def _node(entry: dict[str, Any]) -> Node:
    return Node(
        name=str(entry.get("name") or ""),
        address=str(entry.get("address") or entry.get("name") or ""),
        state=node_state(entry.get("state"), entry.get("state_flags")),
        partitions=tuple(entry.get("partitions") or ()),
        cpus=number(entry.get("cpus")) or 0,
        memory_mb=number(entry.get("real_memory")) or 0,
        gres=str(entry.get("gres") or ""),
        reason=str(entry.get("reason") or ""),
    )


_RECORD_BEGINS = re.compile(r"\n(?=JobId=\d+ |NodeName=|PartitionName=)")


def parse_scontrol(text: str) -> list[dict[str, str]]:
    """Records of `scontrol show job|node|partition -o`: one a line, Key=Value; a value runs to the next key.

    A job's name stands before its state and its paths behind it, and both are a user's text: words in
    the name are overwritten by the real keys that follow, nothing after a path overwrites them, and a
    line that begins no record goes on with the name or path before it.
    """
    records = []
    for line in _RECORD_BEGINS.split(text):
        keys = list(re.finditer(r"(?:^|\s)([A-Z][\w/:]*)=", line))
        if not keys:
            continue
        record: dict[str, str] = {}
        in_paths = False
        for match, after in zip(keys, [*keys[1:], None], strict=True):
            key = match.group(1)
            in_paths = in_paths or key in ("Command", "WorkDir", "Comment")
            if not (in_paths and key in record):
                record[key] = line[match.end() : after.start() if after else len(line)].strip()
        records.append(record)
    return records


def job_from_scontrol(record: dict[str, str]) -> Job:
    """A job from one record of `scontrol show job -o`."""
    gpus = re.search(r"gres/gpu=(\d+)", record.get("TRES", "") + record.get("AllocTRES", "")) or re.search(
        r"(?:^|,)gpu(?::[^:,(]+)?:(\d+)", record.get("JOB_GRES", "")
    )
    nodes = record.get("NodeList", "")
    reason = record.get("Reason", "")
    return Job(
        id=record.get("JobId", ""),
        name=record.get("JobName", ""),
        user=record.get("UserId", "").split("(")[0],
        partition=record.get("Partition", ""),
        state=record.get("JobState", ""),
        reason="" if reason == "None" else reason,
        nodes="" if nodes == "(null)" else nodes,
        node_count=int(re.sub(r"\D.*", "", record.get("NumNodes", "0")) or 0),
        gpus=int(gpus.group(1)) if gpus else 0,
        started=_time(record.get("StartTime", "")),
        exit_code=_exit_pair(record.get("ExitCode", "0:0")),
        restarts=int(record.get("Restarts", "0") or 0),
        output=record.get("StdOut", ""),
        shown_id="_".join(filter(None, (record.get("ArrayJobId"), record.get("ArrayTaskId")))),
    )


def _exit_pair(text: str) -> int | None:
    """Slurm's CODE:SIGNAL as one number, negative for a signal."""
    code, _, signal = text.partition(":")
    if not code.isdigit() or not (signal or "0").isdigit():
        return None
    return int(code) or -int(signal or 0)


def _time(text: str) -> int:
    """A local time as Slurm prints it, in UTC seconds; 0 for Unknown and N/A."""
    try:
        return int(datetime.fromisoformat(text).timestamp())
    except ValueError:
        return 0


def job(job_id: str, timeout_s: float = TIMEOUT_S) -> Job | None:
    """One job by id, as accounting knows it when the controller no longer does; None when nobody does."""
    return next(iter(tasks(job_id, timeout_s)), None)


def tasks(job_id: str, timeout_s: float = TIMEOUT_S) -> list[Job]:
    """A job by id, or a job array's tasks; empty when neither the controller nor accounting knows it."""
    try:
        records = parse_scontrol(call("scontrol", "show", "job", "-d", "-o", job_id, timeout_s=timeout_s))
    except SlurmError as error:
        if "Invalid job id" not in str(error):
            raise
        accounted = _accounted(job_id, timeout_s)
        return [accounted] if accounted is not None else []
    return [job_from_scontrol(record) for record in records]


ACCOUNTED = ("JobID", "State", "ExitCode", "NodeList", "Start", "End")  # what jobcomp/filetxt knows too


def _accounted(job_id: str, timeout_s: float) -> Job | None:
    """A job that is over, by sacct: from slurmdbd, else from the completion log of a site without one."""
    for source in ([], ["--completion"]):
        ask = ["sacct", *source, "--jobs", job_id, "--parsable2", "--noheader"]
        try:
            answer = call(*ask, f"--format={','.join(ACCOUNTED)}", timeout_s=timeout_s)
        except SlurmError:
            continue
        if found := parse_sacct(answer, job_id):
            return found
    return None


def parse_sacct(text: str, job_id: str) -> Job | None:
    """A job's last record in `sacct --parsable2` with the fields ACCOUNTED; its steps are passed over."""
    found = None
    for line in text.splitlines():
        fields = line.split("|")
        if len(fields) != len(ACCOUNTED) or fields[0] != job_id:
            continue
        _, state, code, nodes, start, end = fields
        started, ended = _time(start), _time(end)
        found = Job(
            id=job_id,
            state=state.split(" ")[0],  # CANCELLED by 1000
            nodes="" if nodes == "None assigned" else nodes,
            started=started,
            ends=ended,
            exit_code=_exit_pair(code),
            elapsed_s=ended - started if started and ended >= started else None,
        )
    return found


def jobs(user: str | None = None) -> list[Job]:
    """The queue, of one user or of all. 22.05 ignores filters with --json, so they are applied here."""
    try:
        found = parse_jobs(call("squeue", "--json"))
    except SlurmError as error:
        if "json" not in str(error).lower() and "unrecognized option" not in str(error):
            raise
        found = [
            job_from_scontrol(record) for record in parse_scontrol(call("scontrol", "show", "job", "-o"))
        ]
    return [entry for entry in found if user is None or entry.user == user]


def nodes() -> list[Node]:
    """All nodes with their addresses."""
    try:
        return parse_nodes(call("sinfo", "--json"))
    except SlurmError as error:
        if "json" not in str(error).lower() and "unrecognized option" not in str(error):
            raise
    return [
        Node(
            name=record.get("NodeName", ""),
            address=record.get("NodeAddr", ""),
            state=node_state(record.get("State", "").rstrip("*").split("+")),
            partitions=tuple(filter(None, record.get("Partitions", "").split(","))),
            cpus=int(record.get("CPUTot", "0") or 0),
            memory_mb=int(record.get("RealMemory", "0") or 0),
            gres=record.get("Gres", ""),
            reason=record.get("Reason", ""),
        )
        for record in parse_scontrol(call("scontrol", "show", "node", "-o"))
    ]


def default_partition() -> str:
    """The partition of jobs that name none; empty when there is no such."""
    for line in call("sinfo", "--noheader", "--format=%P").splitlines():
        if line.strip().endswith("*"):
            return line.strip()[:-1]
    return ""


def default_memory() -> dict[str, tuple[int, int]]:
    """By partition, the MB of a job that names no memory: (on a node, for each CPU); 0 without a limit."""
    records = parse_scontrol(call("scontrol", "show", "partition", "-o"))
    return {
        record.get("PartitionName", ""): (
            _megabytes(record.get("DefMemPerNode", "")),
            _megabytes(record.get("DefMemPerCPU", "")),
        )
        for record in records
    }


def _megabytes(text: str) -> int:
    return int(text) if text.isdigit() else 0


def partitions(found: list[Node]) -> list[Partition]:
    """The partitions of these nodes with their nodes counted by state."""
    names = dict.fromkeys(name for node in found for name in node.partitions if name)
    result = []
    for name in names:
        members = [node for node in found if name in node.partitions]
        states: dict[str, int] = {}
        for node in members:
            states[node.state] = states.get(node.state, 0) + 1
        result.append(Partition(name, states, next((node.gres for node in members if node.gres), "")))
    return result


def hostnames(node_list: str) -> list[str]:
    """A node list in bracket form, expanded by Slurm itself."""
    return call("scontrol", "show", "hostnames", node_list).split() if node_list else []


def node_address(name: str) -> str:
    """The address by which a node is reached, which need not be its host name."""
    records = parse_scontrol(call("scontrol", "show", "node", "-o", name))
    return (records[0].get("NodeAddr") if records else "") or name


def _decode(text: str | bytes, command: str) -> dict[str, Any]:
    try:
        data = msgspec.json.decode(text)
    except msgspec.DecodeError as error:
        raise SlurmError(f"{command} --json gave no readable JSON: {error}") from None
    if not isinstance(data, dict):
        raise SlurmError(f"{command} --json gave no object")
    return data
