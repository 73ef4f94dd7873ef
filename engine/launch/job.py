"""What a node of a multi-node run needs to start its part: the stored job, and where the ranks meet.

The first node works out the meeting (its address, a free port, the checkpoint to go on from) once for
each start of the job, writes the configs with it, and leaves `config/meeting.json`; the others wait for it.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import time
import zlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NoReturn

import msgspec
from msgspec import structs

from ftdash.engine.configs import Generated, Rendezvous, TrainArgs, generate
from ftdash.engine.launch.local import Prepared
from ftdash.engine.launch.resume import last_whole_checkpoint
from ftdash.engine.launch.spec import LaunchError, LaunchSpec
from ftdash.engine.model.load import resolve
from ftdash.engine.plan import Plan
from ftdash.monitor.agent.launcher import INJECT_ENV
from ftdash.monitor.rundir import NODES_ENV, RUN_DIR_ENV, RunDir, RunError, decode_json, write_atomic

MEETING_WAIT_S = 300.0
PORTS = range(20_000, 32_000)
PORTS_A_JOB = 7  # to be tried before the next job's first one


class Job(msgspec.Struct, omit_defaults=True, kw_only=True):
    """config/job.json: how to make the launcher's command on any node, from `plan` or `command`."""

    nodes: int
    plan: Plan | None = None
    train: TrainArgs | None = None
    launcher: str = ""  # empty: the plan's preferred one
    command: list[str] = []
    directory: str = ""  # where the command was given
    env: dict[str, str] = {}  # added to the ranks' environment


class Meeting(msgspec.Struct, kw_only=True):
    """config/meeting.json. `attempt` tells one start of the job from the next."""

    attempt: str
    address: str
    port: int
    resume: str = ""


def spec_plan(plan: Plan, nodes: int) -> Plan:
    """The plan with its ranks spread evenly over `nodes`. Raises LaunchError when they do not go up."""
    if plan.gpus % nodes:
        raise LaunchError(
            f"--gpus {plan.gpus} cannot be spread evenly over {nodes} nodes; it must be a multiple of {nodes}"
        )
    return structs.replace(plan, gpus_per_node=plan.gpus // nodes)


def job_of(prepared: Prepared, spec: LaunchSpec, nodes: int) -> Job:
    """What each node needs to know of the run."""
    if prepared.train is None:
        return Job(nodes=nodes, command=list(spec.command), directory=os.getcwd(), env=dict(spec.env))
    return Job(nodes=nodes, plan=spec.plan, train=prepared.train, env=dict(spec.env))


def write_job(run: RunDir, job: Job) -> None:
    write_atomic(run.config / "job.json", msgspec.json.format(msgspec.json.encode(job), indent=2))


def read_job(run: RunDir) -> Job:
    """Raises RunError, naming the file."""
    path = run.config / "job.json"
    try:
        return decode_json(path.read_bytes(), Job)
    except OSError as error:
        raise RunError(f"cannot read {path}: {error.strerror or error}") from None
    except msgspec.DecodeError as error:
        raise RunError(f"{path} is broken: {error}") from None


@dataclass(frozen=True, slots=True)
class NodeStart:
    """How to start the launcher on one node: argv, what its environment gains, and where it starts."""

    command: tuple[str, ...]
    env: dict[str, str]
    directory: str = ""


def node_start(run: RunDir, *, node_rank: int, address: str, attempt: str) -> NodeStart:
    """What this node has to start. Raises RunError.

    `address` is the first node's, as the others reach it; `attempt` is the same on all nodes.
    """
    job = read_job(run)
    meeting = _arrange(run, job, address, attempt) if node_rank == 0 else _await(run, attempt)
    environment = {
        **job.env,
        "MASTER_ADDR": meeting.address,
        "MASTER_PORT": str(meeting.port),
        "NODE_RANK": str(node_rank),
        "NNODES": str(job.nodes),
        NODES_ENV: str(job.nodes),
    }
    if job.plan is None or job.train is None:
        environment[INJECT_ENV] = "1"
        command = tuple(_filled(word, environment) for word in job.command)
        return NodeStart(command, environment, job.directory)
    generated = _generate(run, job, meeting)
    chosen = generated.command(job.launcher) if job.launcher else generated.preferred
    return NodeStart(chosen.nodes[node_rank], environment)


def start_agent_here(
    run: RunDir,
    *,
    node_rank: int,
    address: str,
    attempt: str,
    detached: bool = False,
    kept: bool = False,
) -> NoReturn:
    """Replace this process by the agent of this node. Raises RunError and OSError before that.

    `kept`: by a process above the agent that stays as long as training does, for schedulers that watch it.
    """
    start = node_start(run, node_rank=node_rank, address=address, attempt=attempt)
    if start.directory:
        os.chdir(start.directory)
    keeper = ["-m", "ftdash.monitor.agent.keep", str(run.path), str(node_rank), "--", sys.executable]
    agent = ["-m", "ftdash.monitor.agent", "--run", str(run.path), "--node-rank", str(node_rank)]
    agent += ["--detached"] * detached
    environment = {**os.environ, **start.env}
    environment.pop(RUN_DIR_ENV, None)  # names a process as one of the run's, to be ended with it
    words = [*(keeper if kept else []), *agent, "--", *start.command]
    os.execve(sys.executable, [sys.executable, *words], environment)


def _generate(run: RunDir, job: Job, meeting: Meeting) -> Generated:
    assert job.plan is not None
    assert job.train is not None
    train = replace(job.train, resume=meeting.resume) if meeting.resume else job.train
    return generate(
        job.plan,
        shape=resolve(job.plan),
        train_args=train,
        config_dir=str(run.config),
        python=sys.executable,
        log_dir=str(run.logs),
        rendezvous=Rendezvous(address=meeting.address, port=meeting.port),
    )


def _arrange(run: RunDir, job: Job, address: str, attempt: str) -> Meeting:
    """The first node's part. Requests to an earlier start of the job are taken away with it."""
    for request in run.control.iterdir():
        request.unlink(missing_ok=True)
    checkpoint = last_whole_checkpoint(Path(job.train.output_dir)) if job.train else None
    meeting = Meeting(
        attempt=attempt,
        address=address,
        port=_free_port(attempt),
        resume=str(checkpoint) if checkpoint else "",
    )
    if job.plan is not None:
        for name, text in _generate(run, job, meeting).files.items():
            write_atomic(run.config / name, text.encode())
    write_atomic(run.config / "meeting.json", msgspec.json.encode(meeting))
    return meeting


def _await(run: RunDir, attempt: str) -> Meeting:
    """Another node's part: the meeting of this very attempt, as soon as the shared file system shows it."""
    path = run.config / "meeting.json"
    deadline = time.monotonic() + MEETING_WAIT_S
    while time.monotonic() < deadline:
        try:
            meeting = decode_json(path.read_bytes(), Meeting)
            if meeting.attempt == attempt:
                return meeting
        except (OSError, msgspec.DecodeError):
            pass
        os.stat(run.config)  # asks a network file system for the folder anew
        time.sleep(0.1)
    raise RunError(
        f"the first node left no {path} within {MEETING_WAIT_S:.0f} s: is {run.path} on a file system "
        "that all nodes share?"
    )


def _free_port(attempt: str) -> int:
    """A port that nobody on this node listens on, and that no other job's first node tries at the same time.

    Below the ports that the kernel gives to outgoing connections (ip_local_port_range begins at 32768), so
    none of those takes it before the launcher does. Jobs begin to look at different places: by their number
    under Slurm, by chance elsewhere.
    """
    number = attempt.partition(".")[0]
    first = int(number) * PORTS_A_JOB if number.isdigit() else zlib.crc32(attempt.encode())
    for offset in range(len(PORTS)):
        port = PORTS[(first + offset) % len(PORTS)]
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("", port))
            return port
    raise RunError(f"no free port from {PORTS[0]} to {PORTS[-1]} on this node")


def _filled(word: str, environment: dict[str, str]) -> str:
    """`{master_addr}`, `{master_port}`, `{node_rank}` and `{nnodes}` in a person's own command."""
    for name, value in environment.items():
        word = word.replace("{" + name.lower() + "}", value)
    return word
