"""Starts a run on hosts that share a file system: one agent a host, through ssh."""

from __future__ import annotations

import os
import sys
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from ftdash.engine.launch.job import job_of, spec_plan, write_job
from ftdash.engine.launch.local import prepare
from ftdash.engine.launch.spec import LaunchError, LaunchSpec
from ftdash.engine.ssh.hosts import Host, HostsError, read_hosts, run_on, start_on, store_hosts
from ftdash.monitor.rundir import RunDir
from ftdash.monitor.state import RunPhase

CHECK_S = 20.0
PASSED_ON = ("OMP_NUM_THREADS", "HF_HOME", "HF_HUB_OFFLINE", "FTDASH_HOME")


def launch(spec: LaunchSpec) -> RunDir:
    """Check every host, write the run directory, start the agents. Raises LaunchError in one line."""
    if spec.hosts is None:
        raise LaunchError(
            "--backend ssh needs --hosts FILE: a line for each host, NAME [slots=N] [address=A]"
        )
    run: RunDir | None = None
    try:
        hosts = read_hosts(spec.hosts)
        if spec.nodes > len(hosts):
            raise LaunchError(f"--nodes {spec.nodes}: {spec.hosts} names {len(hosts)} hosts")
        hosts = hosts[: spec.nodes] if spec.nodes > 1 else hosts
        spec = replace(spec, nodes=len(hosts))
        if spec.plan is not None:
            spec = replace(spec, plan=spec_plan(spec.plan, len(hosts)))
        _check_slots(spec, hosts)
        prepared = prepare(spec)
        run = made = prepared.run
        write_job(made, job_of(prepared, spec, len(hosts)))
        store_hosts(made, hosts)
        _everywhere(hosts, lambda host, rank: _check(host, made))
        attempt = uuid.uuid4().hex
        _everywhere(hosts, lambda host, rank: _start(host, rank, made, hosts[0].address, attempt))
    except HostsError as error:
        if run is not None:
            manifest = run.read_manifest()
            manifest.state, manifest.reason = RunPhase.FAILED, str(error)
            run.write_manifest(manifest)
        raise LaunchError(str(error)) from None
    return made


def _check_slots(spec: LaunchSpec, hosts: list[Host]) -> None:
    if spec.plan is None:
        return
    for host in hosts:
        if host.slots is not None and host.slots < spec.plan.gpus_per_node:
            raise LaunchError(
                f"--gpus {spec.plan.gpus}: {spec.plan.gpus_per_node} ranks a host, "
                f"but {host.name} has slots={host.slots}"
            )


def _everywhere(hosts: list[Host], work: Callable[[Host, int], None]) -> None:
    """`work(host, node_rank)` on all hosts at once; the first HostsError is raised after all have ended."""
    with ThreadPoolExecutor(max_workers=min(32, len(hosts))) as pool:
        jobs = [pool.submit(work, host, rank) for rank, host in enumerate(hosts)]
    for job in jobs:
        job.result()


def _check(host: Host, run: RunDir) -> None:
    """The host sees the run directory and this very Python."""
    unseen = 'test -f "$1/run.json" || { echo "does not see $1: no shared file system?" >&2; exit 1; }'
    script = f'{unseen}; test -x "$2"'
    try:
        run_on(host, ["sh", "-c", script, "sh", str(run.path), sys.executable], timeout_s=CHECK_S)
    except HostsError as error:
        if "exit status" in str(error):
            raise HostsError(f"{host.name}: no {sys.executable} there") from None
        raise


def _start(host: Host, node_rank: int, run: RunDir, address: str, attempt: str) -> None:
    argv = [sys.executable, "-m", "ftdash.engine.ssh.node", str(run.path), str(node_rank), address, attempt]
    environment = {name: os.environ[name] for name in PASSED_ON if name in os.environ}
    start_on(host, argv, log=RunDir(run.path, node_rank).agent_log, environment=environment)
