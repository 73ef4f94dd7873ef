"""The two-node run without a scheduler: two sshd, one a host, and the user's own ssh client."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from ftdash.monitor import procs
from ftdash.tui.panes.launch import LaunchPane
from tests.support.namespaces import Namespaces, allowed
from tests.support.operate import go_on, press_on, start_and_watch, stop, type_into
from tests.support.screens import cockpit, screen_text, until

SSHD = shutil.which("sshd") or "/usr/sbin/sshd"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(400),
    pytest.mark.xdist_group("ssh"),
    pytest.mark.skipif(not Path(SSHD).exists(), reason="sshd is not installed"),
    pytest.mark.skipif(not allowed(), reason="no network namespaces for this user"),
]
HOSTS = ["alpha", "beta"]


class Hosts:
    """Two hosts with an sshd each; `env` finds an ssh that knows them by name."""

    def __init__(self, base: Path) -> None:
        self.base = base
        self.network = Namespaces(HOSTS, 1, socket.gethostname())
        self.daemons: list[subprocess.Popen[bytes]] = []
        self.env = {**os.environ, "FTDASH_HOME": str(base / "home"), "OMP_NUM_THREADS": "1"}
        self.env["PATH"] = f"{base}/bin:{self.env['PATH']}"

    def start(self) -> None:
        self.network.up()
        Path("/run/sshd").mkdir(exist_ok=True)
        for name in ("host_key", "user_key"):
            subprocess.run(
                ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(self.base / name)], check=True
            )
        shutil.copy(self.base / "user_key.pub", self.base / "authorized")
        (self.base / "authorized").chmod(0o600)
        (self.base / "sshd_config").write_text(
            f"Port 2222\nHostKey {self.base}/host_key\nAuthorizedKeysFile {self.base}/authorized\n"
            "PasswordAuthentication yes\nPermitRootLogin yes\nStrictModes no\nUsePAM no\nPidFile none\n"
        )
        (self.base / "ssh_config").write_text(
            "Host locked\n  HostName alpha\n  User nobody\n  PubkeyAuthentication no\n"
            f"Host *\n  Port 2222\n  IdentityFile {self.base}/user_key\n  IdentitiesOnly yes\n"
            f"  UserKnownHostsFile {self.base}/known\n  StrictHostKeyChecking accept-new\n"
        )
        (self.base / "bin").mkdir()
        wrapper = self.base / "bin" / "ssh"
        wrapper.write_text(f'#!/bin/sh\nexec {shutil.which("ssh")} -F {self.base}/ssh_config "$@"\n')
        wrapper.chmod(0o755)
        for name in HOSTS:
            argv = self.network.inside(name, [SSHD, "-D", "-e", "-f", str(self.base / "sshd_config")])
            with (self.base / f"sshd-{name}.log").open("wb") as log:
                self.daemons.append(subprocess.Popen(argv, stdout=log, stderr=log, start_new_session=True))
        for name in HOSTS:
            self._wait_for(name)
        (self.base / "hosts").write_text(
            "".join(f"{name} slots=1 address={self.network.addresses[name]}\n" for name in HOSTS)
        )

    def _wait_for(self, name: str) -> None:
        end = time.monotonic() + 20
        while True:
            try:
                socket.create_connection((self.network.addresses[name], 2222), timeout=1).close()
                return
            except OSError:
                assert time.monotonic() < end, (self.base / f"sshd-{name}.log").read_text()
                time.sleep(0.1)

    def cut_the_line(self) -> None:
        """End the shared connections, as a lost network would."""
        path = f"{tempfile.gettempdir()}/ftdash-ssh-{os.getuid()}/%C"
        for name in HOSTS:
            command = ["ssh", "-O", "exit", "-o", f"ControlPath={path}", name]
            subprocess.run(command, env=self.env, capture_output=True, check=False)

    def stop(self) -> None:
        self.cut_the_line()
        for daemon in self.daemons:
            daemon.kill()
            daemon.wait()
        self.network.down()

    def ftdash(self, *words: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            [sys.executable, "-m", "ftdash.tui.cli", *words],
            env=self.env,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0 or not check, (
            f"{words} exited {done.returncode}\n{done.stdout}{done.stderr}"
        )
        return done

    def status(self, run: str) -> dict:
        return json.loads(self.ftdash("status", run, "--json").stdout)


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    with tempfile.TemporaryDirectory(prefix="ftdash-ssh-") as name:
        hosts = Hosts(Path(name))
        try:
            hosts.start()
            yield hosts
        finally:
            hosts.stop()


LAUNCH = ["launch", "--model", "tiny-qwen3", "--gpus", "2", "--strategy", "ddp", "--seq-len", "128"]


def test_two_hosts_train_are_dumped_outlive_a_cut_line_and_a_killed_agent_and_are_stopped(
    hosts: Hosts,
) -> None:
    where = ["--backend", "ssh", "--hosts", str(hosts.base / "hosts"), "--device", "cpu", "--steps", "100000"]
    started = json.loads(hosts.ftdash(*LAUNCH, *where, "--json").stdout)
    run, folder = started["run"], Path(started["dir"])
    end = time.monotonic() + 180
    status = hosts.status(run)
    while len(status["ranks"]) < 2 or min(rank["step"] for rank in status["ranks"]) < 3:
        words = "\n".join(
            path.read_text(errors="replace")[-1500:] for path in (folder / "logs").glob("*.log")
        )
        assert time.monotonic() < end, f"{status}\n{words}"
        assert status["state"] != "failed", f"{status}\n{words}"
        time.sleep(0.5)
        status = hosts.status(run)
    assert sorted(rank["host"] for rank in status["ranks"]) == HOSTS
    hosts.ftdash("diagnose", run, "--quick", "--json")
    assert sorted({path.name for path in folder.glob("stacks/*/rank-*.json")}) == [
        "rank-0.json",
        "rank-1.json",
    ]

    hosts.cut_the_line()
    before = hosts.status(run)["step"]
    while (status := hosts.status(run))["step"] < before + 3:
        assert time.monotonic() < end, status
        time.sleep(0.5)
    for rank in (0, 1):
        lines = (folder / "telemetry" / f"rank-{rank}.jsonl").read_text().splitlines()
        steps = [record["step"] for line in lines if (record := json.loads(line))["kind"] == "step"]
        assert steps == list(range(1, len(steps) + 1))

    agents = {
        procs.environ(pid)["FTDASH_NODE_NAME"]: pid for pid in procs.pids_of_run(folder, procs.AGENT_ENV)
    }
    assert sorted(agents) == HOSTS
    os.kill(agents["alpha"], signal.SIGKILL)
    verdict = json.loads(hosts.ftdash("diagnose", run, "--json").stdout)
    assert "no answer from the agent on alpha: stacks taken without it" in " ".join(
        verdict["verdict"]["evidence"]
    )
    assert sorted(rank for group in verdict["groups"] for rank in group["ranks"]) == [0, 1]
    command = [sys.executable, "-m", "ftdash.tui.cli", "watch", run, "--json"]
    with subprocess.Popen(command, env=hosts.env, stdout=subprocess.PIPE) as watch:
        assert watch.stdout is not None
        for line in watch.stdout:
            if "the agent on alpha was gone: another is beside the ranks" in json.loads(line)["notices"]:
                watch.kill()
    again = [procs.environ(pid)["FTDASH_NODE_NAME"] for pid in procs.pids_of_run(folder, procs.AGENT_ENV)]
    assert sorted(again) == HOSTS
    stopped = json.loads(hosts.ftdash("stop", run, "--grace", "5", "--json").stdout)
    assert stopped["state"] == "stopped"
    assert stopped["exit_codes"]["launcher"] is not None
    assert not procs.pids_of_run(folder)


async def test_a_run_is_started_watched_on_both_hosts_saved_and_gone_on_with_by_keys_alone(
    hosts: Hosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("PATH", "FTDASH_HOME"):
        monkeypatch.setenv(name, hosts.env[name])
    async with cockpit(hosts.base / "home", pane="launch") as (app, pilot):
        await press_on(app, pilot, "backend", "right", "right")
        await press_on(app, pilot, "steps", "end")
        await type_into(app, pilot, "hosts", str(hosts.base / "hosts"))
        await until(pilot, lambda: "start over ssh: 2 ranks" in screen_text(app))
        await start_and_watch(app, pilot, HOSTS)
        run = app.feed.run
        await stop(app, pilot, "save")
        assert not procs.pids_of_run(run.path)
        await go_on(app, pilot)
        await until(pilot, lambda: "start over ssh: 2 ranks" in screen_text(app))
        wanted = app.query_one(LaunchPane).wanted
        assert wanted.hosts == str(run.config / "hosts")
        await start_and_watch(app, pilot, HOSTS)
        again = app.feed.run
        await stop(app, pilot)
    saved = int(wanted.resume.rpartition("-")[2])
    for rank in (0, 1):
        lines = (again.telemetry / f"rank-{rank}.jsonl").read_text().splitlines()
        steps = [record["step"] for line in lines if (record := json.loads(line))["kind"] == "step"]
        assert steps[0] == saved + 1
    assert not procs.pids_of_run(again.path)
    for ended in (run.read_manifest(), again.read_manifest()):
        assert (ended.state, ended.exit_code is not None) == ("stopped", True)


@pytest.mark.parametrize("name", ["nowhere.invalid", "locked"])
def test_a_host_that_is_not_there_or_asks_for_a_password_is_one_line_with_its_name(
    name: str, hosts: Hosts, tmp_path: Path
) -> None:
    file = tmp_path / "hosts"
    file.write_text(f"alpha\n{name}\n")
    where = ["--backend", "ssh", "--hosts", str(file), "--device", "cpu", "--json"]
    done = hosts.ftdash(*LAUNCH, *where, check=False)
    assert done.returncode == 2
    assert name in done.stderr
    assert done.stderr.count("\n") == 1
