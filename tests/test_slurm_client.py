"""Slurm's answers, in every shape that is in use, become the same values."""

from __future__ import annotations

import json
import shutil
import stat
import subprocess
from pathlib import Path

import pytest

from ftdash.engine.slurm import client, remote, requeue
from ftdash.engine.slurm.options import SlurmOptionError, SlurmOptions
from ftdash.engine.slurm.remote import PIECE_BYTES, by_task
from ftdash.engine.slurm.script import batch_script, directives
from ftdash.engine.slurm.watch import describe
from ftdash.monitor.rundir import Manifest, RunDir

DATA = Path(__file__).parent / "data" / "slurm"


def wrapped(value: int) -> dict[str, object]:
    return {"set": True, "infinite": False, "number": value}


def newer(job: dict[str, object]) -> dict[str, object]:
    """The same job as Slurm 23.02 and later write it."""
    changed = dict(job)
    changed["job_state"] = [job["job_state"]]
    for key in ("start_time", "submit_time", "end_time", "time_limit", "node_count"):
        changed[key] = wrapped(job[key])  # type: ignore[arg-type]
    changed["exit_code"] = {"status": ["SUCCESS"], "return_code": wrapped(0), "signal": {"id": wrapped(0)}}
    return changed


def test_old_and_new_json_give_the_same_jobs() -> None:
    old = json.loads((DATA / "squeue-22.05.json").read_text())
    new = {**old, "jobs": [newer(job) for job in old["jobs"]]}
    first = client.parse_jobs(json.dumps(old))
    assert first == client.parse_jobs(json.dumps(new))
    running, pending = first
    assert (running.state, running.nodes, running.node_count) == ("RUNNING", "node[0-1]", 2)
    assert running.name == 'sft "x" $(id)'
    assert (pending.state, pending.reason) == ("PENDING", "Resources")
    assert pending.started > pending.submitted


def test_scontrol_gives_the_same_job_as_squeue() -> None:
    jobs = client.parse_jobs((DATA / "squeue-22.05.json").read_bytes())
    records = client.parse_scontrol((DATA / "scontrol-job.txt").read_text())
    for job, record in zip(jobs, records, strict=True):
        other = client.job_from_scontrol(record)
        assert (other.id, other.name, other.state, other.nodes) == (job.id, job.name, job.state, job.nodes)
        assert (other.user, other.partition, other.reason) == (job.user, job.partition, job.reason)
        assert other.node_count == job.node_count


def test_a_job_name_or_path_cannot_pose_as_a_state() -> None:
    line = (
        "JobId=7 JobName=x JobState=FAILED y UserId=me(1) JobState=RUNNING NodeList=node0 "
        "Command=/a JobState=CANCELLED WorkDir=/b NodeList=elsewhere"
    )
    job = client.job_from_scontrol(client.parse_scontrol(line)[0])
    assert (job.state, job.nodes) == ("RUNNING", "node0")


def test_a_line_break_in_a_job_name_begins_no_record() -> None:
    text = (
        "JobId=7 JobName=two\nlines JobState=x UserId=me(1) JobState=CANCELLED WorkDir=/a\nb\n"
        "JobId=8 JobName=y UserId=me(1) JobState=RUNNING WorkDir=/c\n"
    )
    jobs = [client.job_from_scontrol(record) for record in client.parse_scontrol(text)]
    assert [(job.id, job.state) for job in jobs] == [("7", "CANCELLED"), ("8", "RUNNING")]


@pytest.mark.parametrize(
    ("value", "code"),
    [(0, 0), (1792, 7), (9, -9), ({"return_code": wrapped(7)}, 7), (wrapped(1792), 7), (None, None)],
)
def test_exit_codes_of_both_shapes(value: object, code: int | None) -> None:
    assert client.exit_code(value) == code


def test_old_and_new_sinfo_give_nodes_with_addresses_and_partitions() -> None:
    old = client.parse_nodes((DATA / "sinfo-22.05.json").read_bytes())
    assert [node.name for node in old] == ["node0", "node1"]
    assert all(node.address.startswith("10.") and node.partitions == ("main",) for node in old)
    group = {
        "node": {"state": ["IDLE"]},
        "nodes": {"nodes": ["a", "b"], "addresses": ["10.0.0.1", "10.0.0.2"], "total": 2},
        "cpus": {"maximum": 64},
        "memory": {"maximum": 512000},
        "gres": {"total": "gpu:h100:8"},
        "partition": {"name": "gpu"},
    }
    also = {**group, "partition": {"name": "all"}}
    nodes = client.parse_nodes(json.dumps({"sinfo": [group, also]}))
    assert [(node.name, node.address, node.state, node.partitions) for node in nodes] == [
        ("a", "10.0.0.1", "idle", ("gpu", "all")),
        ("b", "10.0.0.2", "idle", ("gpu", "all")),
    ]
    assert [(part.name, part.states) for part in client.partitions(nodes)] == [
        ("gpu", {"idle": 2}),
        ("all", {"idle": 2}),
    ]


@pytest.mark.parametrize(
    ("state", "flags", "said"),
    [
        ("idle", ["DRAIN"], "drained"),
        (["IDLE", "DRAIN"], None, "drained"),
        (["ALLOCATED", "DRAIN"], None, "draining"),
        (["IDLE", "NOT_RESPONDING"], None, "idle, not responding"),
        (["MIXED", "PLANNED"], None, "mixed, planned"),
        (["DOWN", "DRAIN"], None, "down, drained"),
        ("allocated", [], "allocated"),
        (None, None, ""),
    ],
)
def test_a_node_that_takes_no_job_is_not_called_idle(state: object, flags: object, said: str) -> None:
    assert client.node_state(state, flags) == said
    old = {"nodes": [{"name": "a", "state": state, "state_flags": flags, "partitions": ["p"]}]}
    assert client.parse_nodes(json.dumps(old))[0].state == said


def test_jobs_of_a_release_between_the_two_shapes_are_read() -> None:
    entry = {
        "job_id": 7,
        "job_state": ["CANCELLED", "COMPLETING"],
        "start_time": 1701983394,
        "submit_time": {"set": True, "infinite": False, "number": 1701982989},
        "time_limit": {"set": False, "infinite": True, "number": 0},
        "node_count": {"set": True, "infinite": False, "number": 4},
        "exit_code": {"return_code": 3, "status": "ERROR"},
        "state_reason": "None",
        "tres_alloc_str": "cpu=8,gres/gpu=32,gres/gpu:h100=32",
        "restart_cnt": 2,
    }
    (job,) = client.parse_jobs(json.dumps({"jobs": [entry]}))
    assert (job.state, job.is_over, job.started, job.submitted) == ("CANCELLED", True, 1701983394, 1701982989)
    assert (job.time_limit_min, job.node_count, job.exit_code, job.gpus) == (None, 4, 3, 32)
    assert (job.reason, job.restarts) == ("", 2)


def test_a_controller_that_does_not_answer_is_an_error_after_the_timeout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = tmp_path / "squeue"
    fake.write_text("#!/bin/sh\nexec sleep 60\n")
    fake.chmod(fake.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    with pytest.raises(client.SlurmError, match="no answer within"):
        client.call("squeue", "--json", timeout_s=0.2)


def test_the_job_around_us_does_not_change_what_slurm_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SLURM_CONF", "SLURM_MEM_PER_CPU", "SLURM_JOB_ID", "SLURM_TIME_FORMAT", "SQUEUE_STATES"):
        monkeypatch.setenv(name, "1")
    said = client.call("env").splitlines()
    assert [line for line in said if line.startswith(("SLURM", "SQUEUE"))] == ["SLURM_CONF=1"]


def test_slurms_own_message_is_kept_for_a_refused_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = tmp_path / "sbatch"
    fake.write_text("#!/bin/sh\necho 'sbatch: error: invalid partition specified: nope' >&2\nexit 1\n")
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    with pytest.raises(client.SlurmError, match="invalid partition specified: nope"):
        client.call("sbatch", "x.sh")


@pytest.mark.parametrize(
    ("options", "flag"),
    [
        ({"nodes": 0}, "--nodes"),
        ({"time": "soon"}, "--time"),
        ({"memory": "lots"}, "--memory"),
        ({"cpus_per_task": 0}, "--cpus-per-task"),
        ({"signal_lead_s": 0}, "--signal-lead"),
        ({"directives": ("rm -rf",)}, "--directive"),
        ({"directives": ("--array=0-3",)}, "--directive"),
        ({"directives": ("-N4",)}, "--directive"),
        ({"modules": ("a; rm",)}, "--module"),
    ],
)
def test_an_option_that_slurm_cannot_take_is_refused_by_its_flag(options: dict, flag: str) -> None:
    with pytest.raises(SlurmOptionError, match=f"^{flag}"):
        SlurmOptions(**options)


def test_values_with_spaces_go_to_sbatch_and_not_into_the_script() -> None:
    plain, other = directives(SlurmOptions(nodes=2, account="my lab", partition="gpu"))
    assert "--account=my lab" in other
    assert "--partition=gpu" in plain
    assert not set(plain) & set(other)


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="shellcheck is not installed")
@pytest.mark.parametrize(
    "name", ["run", "two words", "quo'te\"s", "$(touch x)", "new\nline", "`id`", "-dash"]
)
def test_the_script_is_clean_and_a_hostile_path_arrives_as_text(name: str, tmp_path: Path) -> None:
    run = tmp_path / name
    options = SlurmOptions(
        nodes=2, cpus_per_task=4, modules=("cuda/12.8",), container="img.sqsh", account="a b"
    )
    script = batch_script(run, options, python="/opt/py thon/bin/python")
    path = tmp_path / "job.sh"
    path.write_text(script)
    checked = subprocess.run(["shellcheck", str(path)], capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stdout
    head = script.split("\nmodule load")[0] + '\nprintf %s "$run"\n'
    shown = subprocess.run(["bash", "-c", head], capture_output=True, text=True, check=True, cwd=tmp_path)
    assert shown.stdout == str(run)
    assert not (tmp_path / "x").exists()


def test_no_gpus_are_asked_for_on_cpu() -> None:
    assert not [word for word in SlurmOptions(gpus_per_node=0).arguments() if "gpus" in word]
    assert "--gpus-per-node=8" in SlurmOptions(gpus_per_node=8).arguments()


@pytest.mark.parametrize(
    ("state", "requeued"), [("RUNNING", True), ("COMPLETING", False), ("CANCELLED", False)]
)
def test_a_job_that_a_person_cancels_is_not_put_back_into_the_queue(
    state: str, requeued: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[str, ...]] = []
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setattr(client, "call", lambda *argv, **_: calls.append(argv) or "")
    monkeypatch.setattr(client, "job", lambda number: client.Job(id=number, state=state))
    monkeypatch.setattr(requeue, "last_whole_checkpoint", lambda out: tmp_path)
    run = RunDir.create(Manifest(run="r", state="stopped", output_dir=str(tmp_path)), tmp_path)
    assert requeue.main([str(run.path)]) == (0 if requeued else 1)
    assert calls == ([("scontrol", "requeue", "7")] if requeued else [])


def test_a_job_that_the_controller_forgot_is_known_by_accounting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fakes = {
        "scontrol": "echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1",
        "sacct": 'case "$*" in *--completion*) cat answer;; *) echo no accounting >&2; exit 1;; esac',
    }
    for name, body in fakes.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{body}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.chdir(tmp_path)
    Path("answer").write_text(
        "7|FAILED|1:0|node0|2026-11-29T10:00:00|2026-11-29T10:01:00\n"
        "7.batch|FAILED|9:0|node0|2026-11-29T10:00:00|2026-11-29T10:01:00\n"
        "7|CANCELLED by 1000|0:15|node[0-1]|2026-11-29T11:00:00|2026-11-29T12:01:00\n"
    )
    job = client.job("7")
    assert job is not None
    assert (job.state, job.exit_code, job.nodes, job.elapsed_s) == ("CANCELLED", -15, "node[0-1]", 3660)
    assert describe(job) == "job 7 cancelled by signal 15 after 3,660 s on node[0-1]"
    Path("answer").write_text("")
    assert client.job("7") is None


def test_tasks_of_a_job_array_are_shown_as_squeue_shows_them() -> None:
    entries = [
        {"job_id": 2, "array_job_id": 2, "array_task_id": None, "array_task_string": "0-2%1"},
        {"job_id": 3, "array_job_id": wrapped(2), "array_task_id": wrapped(0), "array_task_string": ""},
        {"job_id": 4, "array_job_id": 0, "array_task_id": None, "array_task_string": ""},
    ]
    jobs = client.parse_jobs(json.dumps({"jobs": entries}))
    assert [job.shown_id for job in jobs] == ["2_[0-2%1]", "2_0", ""]


def test_long_lines_that_srun_tore_are_whole_again() -> None:
    lines = ["x" * 3000, "y" * 1024, "short: line"]
    torn = []
    for task in ("0", " 1"):
        for line in lines:
            starts = range(0, len(line) + 1, PIECE_BYTES)
            torn += [f"{task}: {line[start : start + PIECE_BYTES]}" for start in starts]
    assert by_task("\n".join(torn)) == {"0": lines, "1": lines}


@pytest.mark.parametrize(
    ("told", "gpus"),
    [
        ("TRES=cpu=2,gres/gpu=16,gres/gpu:h100=16 JOB_GRES=gpu:h100:16", 16),
        ("TRES=cpu=2 JOB_GRES=gpu:4", 4),  # a site that does not account for GPUs
        ("TRES=cpu=2 JOB_GRES=nic:1,gpu:a100:8(IDX:0-7)", 8),
        ("TRES=cpu=2 JOB_GRES=(null)", 0),
    ],
)
def test_gpus_of_a_job_are_counted_whatever_the_site_accounts_for(told: str, gpus: int) -> None:
    assert client.job_from_scontrol(client.parse_scontrol(f"JobId=7 {told}")[0]).gpus == gpus


def test_a_node_whose_output_srun_dropped_is_asked_again_and_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """srun that ends before it has passed everything on: what came from one node of two is lost, once."""
    srun = tmp_path / "srun"
    srun.write_text(
        f"#!/bin/sh\nprintf '%s\\n' \"$*\" >> {tmp_path}/asked\n"
        'echo "0: ftdash-node gpu1"; echo "0: rank 0"\n'
        f"[ $(wc -l < {tmp_path}/asked) = 1 ] && exit 0\n"
        'echo "1: ftdash-node gpu2"; echo "1: rank 8"\n'
    )
    srun.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setattr(remote, "nodes_of", lambda job_id: ["gpu1", "gpu2"])
    assert remote.on_nodes("7", ["dump"]) == {"gpu1": ["rank 0"], "gpu2": ["rank 8"]}
    first, second = (tmp_path / "asked").read_text().splitlines()
    for line in (first, second):
        assert {"--overlap", "--gres=none"} <= set(line.split())
    assert "--nodelist=gpu1,gpu2" in first
    assert "--nodelist=gpu2" in second


def test_a_node_that_stays_silent_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    srun = tmp_path / "srun"
    srun.write_text('#!/bin/sh\necho "0: ftdash-node gpu1"; echo "0: rank 0"\n')
    srun.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setattr(remote, "nodes_of", lambda job_id: ["gpu1", "gpu2"])
    with pytest.raises(client.SlurmError, match="job 7: no answer from gpu2"):
        remote.on_nodes("7", ["dump"])
