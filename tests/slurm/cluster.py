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
MARK = "# ftdash test cluster"
BRIDGE = "ftdash0"


def why_not() -> str:
    """Why a real Slurm cannot be started here; empty when it can."""
    missing = [name for name in ("munged", "slurmctld", "slurmd", "sbatch") if shutil.which(name) is None]
    return f"not installed: {', '.join(missing)}" if missing else ""


def namespaces_allowed() -> bool:
    """Whether this user may make network namespaces here."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        return False
    made = (
        subprocess.run(["ip", "netns", "add", "ftdash-probe"], capture_output=True, check=False).returncode
        == 0
    )
    subprocess.run(["ip", "netns", "del", "ftdash-probe"], capture_output=True, check=False)
    return made


def _ip(*words: str, check: bool = True) -> None:
    subprocess.run(["ip", *words], check=check, capture_output=True, text=True)


class Cluster:
    """`with Cluster(folder) as cluster:` starts it, leaving ends every job and daemon."""

    def __init__(self, base: Path, *, nodes: int = 2, cpus: int = 4, namespaces: bool | None = None) -> None:
        self.base = base.resolve()
        self.names = [f"node{index}" for index in range(nodes)]
        self.namespaces = namespaces_allowed() if namespaces is None else namespaces
        self.host = socket.gethostname().split(".")[0]
        self.address = "10.77.0.1" if self.namespaces else "127.0.0.1"
        self.addresses = {
            name: f"10.77.0.{11 + index}" if self.namespaces else "127.0.0.1"
            for index, name in enumerate(self.names)
        }
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
            node_host = name if self.namespaces else self.host
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
        if self.namespaces:
            self._network_up()
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
        if self.namespaces:
            shell = 'hostname "$0"; exec "$@"'
            inside = [
                "unshare",
                "-u",
                "-p",
                "--fork",
                "--kill-child=KILL",
                "--mount-proc",
                "sh",
                "-c",
                shell,
                name,
            ]
            argv = ["ip", "netns", "exec", f"ftdash-{name}", *inside, *argv]
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
            self._end(name, kill=self.namespaces and name in self.names)
        if self.namespaces:
            self._network_down()

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

    def _network_up(self) -> None:
        self._network_down()
        _ip("link", "add", BRIDGE, "type", "bridge")
        _ip("addr", "add", f"{self.address}/24", "dev", BRIDGE)
        _ip("link", "set", BRIDGE, "up")
        lines = "".join(f"{address} {name}\n" for name, address in self.addresses.items())
        for index, name in enumerate(self.names):
            space = f"ftdash-{name}"
            etc = Path("/etc/netns") / space
            etc.mkdir(parents=True, exist_ok=True)
            (etc / "hosts").write_text(f"127.0.0.1 localhost\n{self.address} {self.host}\n{lines}")
            (etc / "hostname").write_text(f"{name}\n")
            (etc / "resolv.conf").write_text("")  # no name server answers here: ask none
            (etc / "nsswitch.conf").write_text("passwd: files\ngroup: files\nhosts: files\n")
            _ip("netns", "add", space)
            _ip("link", "add", f"ftdash0v{index}", "type", "veth", "peer", "name", "eth0", "netns", space)
            _ip("link", "set", f"ftdash0v{index}", "master", BRIDGE, "up")
            _ip("-n", space, "link", "set", "lo", "up")
            _ip("-n", space, "addr", "add", f"{self.addresses[name]}/24", "dev", "eth0")
            _ip("-n", space, "link", "set", "eth0", "up")
            _ip("-n", space, "route", "add", "default", "via", self.address)
        hosts = Path("/etc/hosts")
        hosts.write_text(hosts.read_text() + "".join(f"{line}  {MARK}\n" for line in lines.splitlines()))

    def _network_down(self) -> None:
        for index, name in enumerate(self.names):
            _ip("netns", "del", f"ftdash-{name}", check=False)
            _ip("link", "del", f"ftdash0v{index}", check=False)
            shutil.rmtree(f"/etc/netns/ftdash-{name}", ignore_errors=True)
        _ip("link", "del", BRIDGE, check=False)
        hosts = Path("/etc/hosts")
        text = hosts.read_text()
        if MARK in text:
            hosts.write_text("".join(line for line in text.splitlines(True) if MARK not in line))


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
