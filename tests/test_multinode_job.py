"""What a node of a multi-node job starts, and what it goes on from."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace

from ftdash.engine.configs import TrainArgs
from ftdash.engine.launch.job import Job, NodeStart, node_start, write_job
from ftdash.engine.launch.resume import is_whole, last_whole_checkpoint
from ftdash.engine.plan import Plan, Strategy
from ftdash.monitor.clockskew import SkewMeter
from ftdash.monitor.rundir import Manifest, RunDir, RunError

PLAN = Plan(model="tiny-qwen3", gpus=4, gpus_per_node=2, strategy=Strategy.FSDP)


def make_run(tmp_path: Path) -> RunDir:
    return RunDir.create(Manifest(run="r"), tmp_path)


def plan_job(run: RunDir, out: Path) -> None:
    write_job(
        run, Job(nodes=2, plan=PLAN, train=TrainArgs(model="tiny-qwen3", output_dir=str(out), device="cpu"))
    )


def both_nodes(run: RunDir, attempt: str = "1.0.0") -> list[NodeStart]:
    """Node 1 asks first and waits for node 0, as it may happen on a cluster."""
    found: dict[int, NodeStart] = {}

    def ask(rank: int) -> None:
        found[rank] = node_start(run, node_rank=rank, address="10.0.0.7", attempt=attempt)

    threads = [threading.Thread(target=ask, args=(rank,)) for rank in (1, 0)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return [found[0], found[1]]


def test_all_nodes_meet_at_the_first_ones_address_and_one_port(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    plan_job(run, tmp_path / "out")
    first, second = both_nodes(run)
    assert first.env["MASTER_PORT"] == second.env["MASTER_PORT"]
    assert (first.env["NODE_RANK"], second.env["NODE_RANK"]) == ("0", "1")
    words = [list(start.command) for start in (first, second)]
    assert [line[line.index("--machine_rank") + 1] for line in words] == ["0", "1"]
    written = (run.config / "fsdp.yaml").read_text()
    assert "main_process_ip: 10.0.0.7" in written
    assert f"main_process_port: {first.env['MASTER_PORT']}" in written


def test_a_new_start_of_the_job_does_not_take_the_meeting_of_the_last(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    plan_job(run, tmp_path / "out")
    both_nodes(run, "1.0.0")
    (run.control / "old-stop.json").write_text("{}")
    both_nodes(run, "1.1.0")
    assert json.loads((run.config / "meeting.json").read_text())["attempt"] == "1.1.0"
    assert list(run.control.iterdir()) == []


def test_a_node_that_waits_in_vain_says_what_it_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(tmp_path)
    plan_job(run, tmp_path / "out")
    monkeypatch.setattr("ftdash.engine.launch.job.MEETING_WAIT_S", 0.2)
    with pytest.raises(RunError, match="a file system that all nodes share"):
        node_start(run, node_rank=1, address="10.0.0.7", attempt="1.0.0")


def test_a_persons_own_command_gets_the_meeting_in_words_and_environment(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    command = [
        "torchrun",
        "--nnodes={nnodes}",
        "--node-rank={node_rank}",
        "--master-addr={master_addr}",
        "a b.py",
    ]
    write_job(run, Job(nodes=2, command=command, directory="/"))
    _, second = both_nodes(run)
    assert second.command == ("torchrun", "--nnodes=2", "--node-rank=1", "--master-addr=10.0.0.7", "a b.py")
    assert second.env["MASTER_ADDR"] == "10.0.0.7"
    assert second.directory == "/"


def checkpoint(out: Path, step: int, *, state: bool = True) -> Path:
    folder = out / f"checkpoint-{step}"
    (folder / "pytorch_model_fsdp_0").mkdir(parents=True)
    (folder / "pytorch_model_fsdp_0" / "__0_0.distcp").write_bytes(b"x")
    (folder / "pytorch_model_fsdp_0" / ".metadata").write_bytes(b"x")
    if state:
        (folder / "trainer_state.json").write_text("{}")
    return folder


def test_a_half_written_checkpoint_is_passed_over_for_the_last_whole_one(tmp_path: Path) -> None:
    whole = checkpoint(tmp_path, 9)
    checkpoint(tmp_path, 20, state=False)
    torn = checkpoint(tmp_path, 30)
    (torn / "pytorch_model_fsdp_0" / ".metadata").unlink()
    deepspeed = checkpoint(tmp_path, 40)
    (deepspeed / "global_step40").mkdir()
    assert last_whole_checkpoint(tmp_path) == whole
    (deepspeed / "latest").write_text("global_step40")
    assert is_whole(deepspeed)
    assert last_whole_checkpoint(tmp_path) == deepspeed
    assert last_whole_checkpoint(tmp_path / "none") is None


def test_a_restart_resumes_from_the_checkpoint_that_is_whole(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    plan_job(run, tmp_path / "out")
    folder = checkpoint(tmp_path / "out", 12)
    for start in both_nodes(run):
        words = list(start.command)
        assert words[words.index("--resume") + 1] == str(folder)


def test_plan_and_arguments_survive_the_job_file(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    train = TrainArgs(model="m", output_dir="/o", extra=("--x", "a b"))
    write_job(run, Job(nodes=2, plan=replace(PLAN, lora_rank=64), train=train))
    job = msgspec.json.decode((run.config / "job.json").read_bytes(), type=Job)
    assert job.plan == replace(PLAN, lora_rank=64)
    assert job.train == train


@pytest.mark.parametrize(("skew_s", "shown_s"), [(120.0, 120.0), (-45.0, -45.0), (0.0, 0.0), (1.0, 0.0)])
def test_a_clock_that_is_off_is_measured_by_the_quickest_arrival(skew_s: float, shown_s: float) -> None:
    meter, now = SkewMeter(), time.time()
    for delay_s in (0.9, 0.2, 1.4, 30.0):
        meter.observe(now + delay_s, now - skew_s)
    assert meter.skew_s == pytest.approx(shown_s, abs=0.3)


def test_two_arrivals_are_no_proof_of_a_skew() -> None:
    meter = SkewMeter()
    meter.observe(1000.0, 0.0)
    meter.observe(2000.0, 0.0)
    assert meter.skew_s == 0.0
