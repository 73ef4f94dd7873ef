"""Real training over two nodes of a real Slurm: submitted, watched, dumped, stopped, requeued."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

import pytest

from ftdash.monitor import procs
from ftdash.monitor.reader import RunReader
from ftdash.monitor.rundir import RunDir, find_run
from tests.slurm.conftest import Site
from tests.support.screens import cockpit, screen_text, until

pytestmark = [
    pytest.mark.slow,
    pytest.mark.slurm,
    pytest.mark.timeout(600),
    pytest.mark.xdist_group("slurm"),
]


def test_two_nodes_are_watched_and_dumped_and_a_killed_agent_ends_no_training_until_both_are_stopped(
    site: Site,
) -> None:
    run, folder = site.launch("--steps", "100000", "--no-requeue")
    status = site.both_at_step(run, 3)
    assert status["state"] == "running"
    assert sorted(rank["host"] for rank in status["ranks"]) == ["node0", "node1"]
    assert all(rank["memory_used"] > 50_000_000 for rank in status["ranks"])

    site.ftdash("diagnose", run, "--quick", "--json")
    dumps = list(folder.glob("stacks/*/rank-*.json"))
    assert sorted({path.name for path in dumps}) == ["rank-0.json", "rank-1.json"]
    assert all(
        "ftdash/engine/train" in path.read_text() or "engine/train" in path.read_text() for path in dumps
    )

    os.kill(_agent_on(folder, "node0"), signal.SIGKILL)
    verdict = json.loads(site.ftdash("diagnose", run, "--json").stdout)
    assert "no answer from the agent on node0: stacks taken without it" in " ".join(
        verdict["verdict"]["evidence"]
    )
    assert sorted(rank for group in verdict["groups"] for rank in group["ranks"]) == [0, 1]
    without = set(folder.glob("stacks/*/rank-*.json")) - set(dumps)
    hosts = {json.loads(path.read_text())["process"]["host"] for path in without}
    assert hosts == {"node0", "node1"}

    with site.start("watch", run, "--json") as watch:
        notices: list[str] = []
        while "the agent on node0 was gone: another is beside the ranks" not in notices:
            assert watch.stdout is not None
            notices = json.loads(watch.stdout.readline())["notices"]
        watch.kill()
    samples = (folder / "telemetry" / "node-node0.jsonl").read_text()
    assert _agent_on(folder, "node0")
    step = site.status(run)["step"]
    status = site.both_at_step(run, step + 2)
    assert "node-silent" not in [alert["code"] for alert in status["alerts"]]
    assert len((folder / "telemetry" / "node-node0.jsonl").read_text()) > len(samples)

    os.kill(_agent_on(folder, "node1"), signal.SIGKILL)
    job = json.loads((folder / "config" / "slurm.json").read_text())["job_id"]
    stopped = json.loads(site.ftdash("stop", run, "--grace", "5", "--json").stdout)
    assert stopped["state"] == "stopped"
    assert not procs.pids_of_run(folder)
    site.cluster.wait(
        "the job's end", lambda: site.cluster.job_state(job) not in ("RUNNING", "COMPLETING"), 60
    )


def test_a_lost_controller_costs_no_telemetry_and_the_time_limits_signal_saves_for_the_requeued_job(
    site: Site,
) -> None:
    run, folder = site.launch("--steps", "100000")
    before = site.both_at_step(run, 3)
    site.cluster.stop_controller()
    try:
        status = site.status(run)
        assert status["state"] == "running"
        assert any("Slurm" in notice for notice in status["notices"])
        later = site.wait(run, "steps meanwhile", lambda status: status["step"] > before["step"] + 2)
        assert later["state"] == "running"
    finally:
        site.cluster.start_controller()
    assert site.both_at_step(run, later["step"] + 1)["state"] == "running"

    job = json.loads((folder / "config" / "slurm.json").read_text())["job_id"]
    # what slurmctld sends before the limit: --signal=B:USR1@…
    site.cluster.run("scancel", "--batch", "--signal=USR1", job)
    site.cluster.wait("a restart", lambda: "Restarts=1" in _job_line(site, job), 120)
    checkpoint = max((folder / "out").glob("checkpoint-*"), key=lambda path: int(path.name.split("-")[1]))
    saved = int(checkpoint.name.split("-")[1])
    assert saved >= 3
    site.cluster.wait("the requeued job in the queue", lambda: site.cluster.job_state(job) == "PENDING", 60)
    assert site.status(run)["state"] == "starting"
    # Slurm holds a requeued job back for two minutes; a person may start it at once, as we do here
    site.cluster.run("scontrol", "update", f"JobId={job}", "StartTime=now")
    status = site.wait(
        run,
        "steps after the resume",
        lambda status: status["state"] == "running" and len(status["ranks"]) == 2 and status["step"] > saved,
    )
    meeting = json.loads((folder / "config" / "meeting.json").read_text())
    assert meeting["resume"] == str(checkpoint)
    first_steps = [
        record["step"]
        for line in (folder / "telemetry" / "rank-0.jsonl").read_text().splitlines()
        if (record := json.loads(line))["kind"] == "step" and record["t"] > _restarted(folder)
    ]
    assert first_steps[0] == saved + 1
    assert status["ranks"][0]["step"] > saved
    site.ftdash("stop", run, "--grace", "5")


def test_a_node_that_dies_is_named_within_twenty_seconds(site: Site) -> None:
    run, folder = site.launch("--steps", "100000", "--no-requeue")
    site.both_at_step(run, 2)
    reader = RunReader(RunDir(folder))
    reader.poll()
    site.cluster.kill_node("node1")
    killed = time.monotonic()
    try:
        while not (named := [a for a in reader.poll().alerts if "node1" in a.text]):
            assert time.monotonic() - killed < 20
            time.sleep(0.2)
        assert time.monotonic() - killed < 20
        assert [rank.host for rank in reader.poll().ranks if rank.rank in named[0].ranks] == ["node1"]
        ended = _until_over(site, run)
        assert ended["state"] == "failed"
    finally:
        reader.close()
        site.ftdash("stop", run, "--grace", "2", check=False)
        site.cluster.start_node("node1")
        site.cluster.run("scontrol", "update", "NodeName=node1", "State=RESUME", check=False)
        site.cluster.wait("node1", lambda: site.cluster.node_states() == ["idle", "idle"], 60)


async def test_a_job_that_a_plain_script_started_is_watched_and_dumped_and_left_alone(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("SLURM_CONF", "FTDASH_HOME"):
        monkeypatch.setenv(name, site.env[name])
    base = site.home.parent / "plain"
    base.mkdir()
    (base / "train.py").write_text(PLAIN_TRAINING)
    script = base / "job.sh"
    script.write_text(
        "#!/bin/bash\n#SBATCH --nodes=2 --ntasks-per-node=1\n"
        "srun bash -c 'RANK=$SLURM_PROCID WORLD_SIZE=2 LOCAL_RANK=0 MASTER_ADDR=node0 MASTER_PORT=29611 "
        f"exec {sys.executable} train.py'\n"
    )
    submit = ["sbatch", "--parsable", f"--chdir={base}", "--output=out.log", "--job-name=[a] job's"]
    job = site.cluster.run(*submit, str(script)).stdout.strip()
    try:
        site.cluster.wait_job(job, "RUNNING")
        site.cluster.wait("ranks that log", lambda: "'step': 3" in _text(base / "out.log"), 90)
        seen = json.loads(site.ftdash("attach", "--slurm", job, "--once", "--json").stdout)["jobs"][0]
        assert [(rank["rank"], rank["host"]) for rank in seen["ranks"]] == [(0, "node0"), (1, "node1")]
        assert all(rank["memory_used"] > 10_000_000 for rank in seen["ranks"])
        assert (seen["log"], seen["step"] >= 3, seen["loss"] > 0) == (str(base / "out.log"), True, True)
        site.ftdash("attach", "--slurm", job, "--stacks", str(base / "stacks"))
        verdict = json.loads(site.ftdash("diagnose", "--stacks", str(base / "stacks"), "--json").stdout)
        assert sorted(rank for group in verdict["groups"] for rank in group["ranks"]) == [0, 1]

        with site.start("attach", "--slurm", job, "--json", "--interval", "1") as attached:
            assert attached.stdout is not None
            looks = [json.loads(attached.stdout.readline())["jobs"][0] for _ in range(3)]
            assert looks[-1]["step"] > looks[0]["step"]
            assert all(rank["cpu"] is not None for rank in looks[-1]["ranks"])
            run = find_run("last", site.home / "runs")
            refused = site.ftdash("stop", run.run_id, check=False)
            assert "somebody else's job, only watched here" in refused.stderr
            async with cockpit(site.home, pane="monitor", run=run) as (app, pilot):
                await until(pilot, lambda: {"node0", "node1"} <= set(screen_text(app).split()))
                state = app.feed.peek()
                assert state.state == "running"
                assert all(rank.memory_used > 10_000_000 for rank in state.ranks)
                assert state.ranks[0].loss > 0
            site.ftdash("diagnose", run.run_id, "--quick")
            dumped = {path.name for path in run.path.glob("stacks/*/rank-*.json")}
            assert dumped == {"rank-0.json", "rank-1.json"}
            attached.terminate()
        assert run.read_manifest().reason == "no longer watched; the job goes on"
        assert site.cluster.job_state(job) == "RUNNING"
        steps = site.cluster.run("squeue", "-s", "-h", "-j", job, "-o", "%i").stdout.split()
        assert sorted(steps) == [f"{job}.0", f"{job}.batch"]
    finally:
        site.cluster.run("scancel", "--full", job, check=False)


def test_a_hostile_name_arrives_as_text(site: Site) -> None:
    name = "two words, quo'te\"s, $(touch /tmp/ftdash-evil), `touch /tmp/ftdash-evil`, a new\nline, [/red]"
    run, folder = site.launch("--steps", "100000", "--name", name)
    job = json.loads((folder / "config" / "slurm.json").read_text())["job_id"]
    try:
        shown = site.cluster.run("squeue", "-h", "-j", job, "-o", "%j").stdout.rstrip("\n")
        assert shown == name
        assert not Path("/tmp/ftdash-evil").exists()
    finally:
        site.ftdash("stop", run, "--grace", "1", check=False)
    assert site.status(run)["state"] == "stopped"


def test_slurms_own_message_is_shown_for_a_bad_directive(site: Site) -> None:
    done = site.ftdash(
        *("launch", "--model", "tiny-qwen3", "--gpus", "2", "--nodes", "2", "--device", "cpu"),
        *("--backend", "slurm", "--partition", "no-such-partition", "--json"),
        check=False,
    )
    assert done.returncode == 2
    assert "invalid partition" in done.stderr.lower()
    assert done.stderr.count("\n") == 1


PLAIN_TRAINING = """
import time
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
for step in range(100000):
    value = torch.ones(4)
    dist.all_reduce(value)
    if dist.get_rank() == 0:
        print({"loss": 2.0 / (step + 1), "step": step}, flush=True)
    time.sleep(0.2)
"""


def _agent_on(folder: Path, node: str) -> int:
    """The agent's pid as this machine sees it, whatever its own process table says."""
    found = [
        pid
        for pid in procs.pids_of_run(folder, procs.AGENT_ENV)
        if procs.environ(pid).get("SLURMD_NODENAME") == node
    ]
    assert len(found) == 1
    return found[0]


def _job_line(site: Site, job: str) -> str:
    return site.cluster.run("scontrol", "show", "job", "-o", job, check=False).stdout


def _text(path: Path) -> str:
    return path.read_text() if path.exists() else ""


def _restarted(folder: Path) -> float:
    return json.loads((folder / "run.json").read_text())["started"]


def _until_over(site: Site, run: str) -> dict:
    end = time.monotonic() + 120
    while (status := site.status(run))["state"] in ("running", "starting", "stalled"):
        assert time.monotonic() < end, status
        time.sleep(1)
    return status
