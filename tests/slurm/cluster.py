"""A real Slurm on one machine: munged, slurmctld and one slurmd a node, all children of the test.

Where the machine allows it (root and iproute2) every node is a network namespace with its own address,
host name and process table; otherwise all slurmd share the host. No systemd, no cgroups, no slurmdbd:
clients find the cluster through SLURM_CONF in `Cluster.env`.
"""

from __future__ import annotations

import contextlib
import getpass
import os
import secrets
import shutil
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from tests.support.namespaces import Namespaces, allowed

CONFIG = """\
ClusterName=ftdash
SlurmctldHost={host}({address})
SlurmctldPort={port}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={base}/munge.socket
CredType=cred/munge
StateSaveLocation={base}/state
SlurmdSpoolDir={base}/spool-%n
SlurmctldPidFile={base}/slurmctld.pid
SlurmdPidFile={base}/slurmd-%n.pid
SlurmctldLogFile={base}/log/slurmctld.log
SlurmdLogFile={base}/log/slurmd-%n.log
SlurmdParameters=config_overrides
SlurmdTimeout={slurmd_timeout}
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/filetxt
JobCompLoc={base}/jobcomp.txt
MpiDefault=none
SwitchType=switch/none
ReturnToService=2
SchedulerType=sched/backfill
SchedulerParameters=bf_interval=1,sched_interval=1,batch_sched_delay=0
MinJobAge=300
KillWait=5
InactiveLimit=0
JobRequeue=1
"""


def why_not() -> str:
    """Why a real Slurm cannot be started here; empty when it can."""
    missing = [name for name in ("munged", "slurmctld", "slurmd", "sbatch") if shutil.which(name) is None]
    return f"not installed: {', '.join(missing)}" if missing else ""


class Cluster:
    """`with Cluster(folder) as cluster:` starts it, leaving ends every job and daemon."""

    def __init__(self, base: Path, *, nodes: int = 2, cpus: int = 4, namespaces: bool | None = None) -> None:
        self.base = base.resolve()
        self.names = [f"node{index}" for index in range(nodes)]
        self.host = socket.gethostname().split(".")[0]
        wanted = allowed() if namespaces is None else namespaces
        self.hosts = Namespaces(self.names, 0, self.host) if wanted else None
        self.address = self.hosts.own_address if self.hosts else "127.0.0.1"
        self.addresses = self.hosts.addresses if self.hosts else dict.fromkeys(self.names, "127.0.0.1")
        self.daemons: dict[str, subprocess.Popen[bytes]] = {}
        for folder in ("log", "state", *(f"spool-{name}" for name in self.names)):
            (self.base / folder).mkdir(parents=True, exist_ok=True)
        self.base.chmod(0o755)
        self._write_config(cpus)
        self.env = {
            key: value
            for key, value in os.environ.items()
            if not key.startswith(("SLURM", "SBATCH_", "SQUEUE_", "SRUN_"))
        }
        self.env["SLURM_CONF"] = str(self.base / "slurm.conf")

    def _write_config(self, cpus: int) -> None:
        ports = [_free_port() for _ in range(len(self.names) + 1)]
        text = CONFIG.format(
            host=self.host,
            address=self.address,
            port=ports[0],
            user=getpass.getuser(),
            base=self.base,
            slurmd_timeout=10,
        )
        for name, port in zip(self.names, ports[1:], strict=True):
            node_host = name if self.hosts else self.host
            text += (
                f"NodeName={name} NodeHostname={node_host} NodeAddr={self.addresses[name]} Port={port}"
                f" CPUs={cpus} Boards=1 SocketsPerBoard=1 CoresPerSocket={cpus} ThreadsPerCore=1"
                " RealMemory=8192 State=UNKNOWN\n"
            )
        text += f"PartitionName=main Nodes={','.join(self.names)} Default=YES MaxTime=INFINITE State=UP\n"
        (self.base / "slurm.conf").write_text(text)
        # without this slurmd looks at what is mounted on /sys/fs/cgroup and ends where nothing is
        (self.base / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\nCgroupAutomount=no\n")

    def __enter__(self) -> Cluster:
        try:
            self.start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self, timeout_s: float = 30) -> None:
        if self.hosts:
            self.hosts.up()
        munge = self.base / "munge"
        munge.mkdir(mode=0o700, exist_ok=True)
        key = munge / "munge.key"
        key.touch(0o600)
        key.write_bytes(secrets.token_bytes(128))
        self._spawn(
            "munged",
            *("munged", "-F", f"--key-file={key}", f"--socket={self.base}/munge.socket"),
            *(f"--pid-file={self.base}/munged.pid", f"--log-file={munge}/munged.log"),
            *(f"--seed-file={munge}/munged.seed", "--num-threads=2"),
        )
        self.wait("munge", (self.base / "munge.socket").exists, timeout_s)
        self.start_controller(timeout_s, clean=True)
        for name in self.names:
            self.start_node(name)
        self.wait("idle nodes", lambda: self.node_states() == ["idle"] * len(self.names), timeout_s)

    def start_controller(self, timeout_s: float = 30, *, clean: bool = False) -> None:
        config = self.env["SLURM_CONF"]
        self._spawn("slurmctld", "slurmctld", "-D", *(["-c"] if clean else []), "-f", config)
        self.wait("slurmctld", lambda: "is UP" in self.run("scontrol", "ping", check=False).stdout, timeout_s)

    def stop_controller(self) -> None:
        self._end("slurmctld")

    def start_node(self, name: str) -> None:
        argv = ["slurmd", "-D", "-f", self.env["SLURM_CONF"], "-N", name]
        if self.hosts:
            argv = self.hosts.inside(name, argv)
        self._spawn(name, *argv)

    def kill_node(self, name: str) -> None:
        """The node dies: slurmd and, where it has a process table of its own, everything on it."""
        daemon = self.daemons.pop(name)
        daemon.kill()
        daemon.wait()

    def node_states(self) -> list[str]:
        return self.run("sinfo", "-h", "-N", "-o", "%T", check=False).stdout.split()

    def run(self, *argv: str, check: bool = True, timeout_s: float = 60) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            argv,
            env=self.env,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
        if check and done.returncode:
            raise RuntimeError(f"{argv} exited {done.returncode}\n{done.stdout}{done.stderr}")
        return done

    def job_state(self, job: str) -> str:
        return self.run("squeue", "-h", "-t", "all", "-j", job, "-o", "%T", check=False).stdout.strip()

    def wait_job(self, job: str, *states: str, timeout_s: float = 60) -> None:
        self.wait(f"job {job} in {states}", lambda: self.job_state(job) in states, timeout_s)

    def wait(self, what: str, ready: Callable[[], bool], timeout_s: float) -> None:
        end = time.monotonic() + timeout_s
        while not ready():
            for name, daemon in self.daemons.items():
                if daemon.poll() is not None:
                    raise RuntimeError(f"{name} exited {daemon.returncode}; see {self.base}/log")
            if time.monotonic() > end:
                raise TimeoutError(f"{what} not within {timeout_s} s")
            time.sleep(0.05)

    def stop(self) -> None:
        """End jobs first (a slurmstepd outlives its slurmd), then nodes, controller, munge."""
        if "slurmctld" in self.daemons and self.daemons["slurmctld"].poll() is None:
            with contextlib.suppress(Exception):
                self.run(
                    "scancel", "--full", "--signal=KILL", "-u", getpass.getuser(), check=False, timeout_s=5
                )
                self.run("scancel", "-u", getpass.getuser(), check=False, timeout_s=5)
                self.wait("an empty queue", lambda: not self.run("squeue", "-h").stdout.strip(), 10)
        for name in [*self.names, "slurmctld", "munged"]:
            self._end(name, kill=self.hosts is not None and name in self.names)
        if self.hosts:
            self.hosts.down()

    def _spawn(self, name: str, *argv: str) -> None:
        with (self.base / "log" / f"{name}.out").open("ab") as out:
            self.daemons[name] = subprocess.Popen(
                argv, env=self.env, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True
            )

    def _end(self, name: str, *, kill: bool = False) -> None:
        daemon = self.daemons.pop(name, None)
        if daemon is None or daemon.poll() is not None:
            return
        # unshare --fork passes no SIGTERM on, but its own death takes the node's processes along
        daemon.kill() if kill else daemon.terminate()
        try:
            daemon.wait(10)
        except subprocess.TimeoutExpired:
            daemon.kill()
            daemon.wait()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
