"""The demo, for real: two ranks under FSDP2 on this CPU, from the command line to the last process."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ftdash.engine.launch.demo import doubts
from ftdash.monitor import control
from ftdash.monitor.diagnosis.model import decode_rank
from ftdash.monitor.reader import RunReader
from ftdash.monitor.records import Experts, Meta, Step
from ftdash.monitor.rundir import RunDir, find_run
from ftdash.monitor.state import RunPhase
from tests.support.live_runs import make_run, processes_of, wait_for, wait_until, write

FTDASH = str(Path(sys.executable).with_name("ftdash"))


def ftdash(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([FTDASH, *args], capture_output=True, text=True, timeout=280)


def doubts_of(run: RunDir, steps: int) -> list[str]:
    reader = RunReader(run)
    try:
        return doubts(reader.poll(), reader.summary.ranks, steps)
    finally:
        reader.close()


def made_demo(
    root: Path, *, ranks: int = 2, world: int = 2, kind: str = "FSDP", last: int = 20, sharded: int = 9
) -> RunDir:
    run = make_run(root, state="finished", world_size=world)
    for rank in range(ranks):
        who = {"local_rank": rank, "host": "h", "pid": 1, "device": "cpu", "dtensor_params": sharded}
        meta = Meta(t=1, rank=rank, world_size=world, distributed_type=kind, **who)  # type: ignore[arg-type]
        experts = Experts(t=1, step=last, layer=0, counts=[1, 2])
        write(run.rank_file(rank), meta, Step(t=2, step=last, loss=2.0, tokens=5, step_s=0.1), experts)
    return run


def test_a_demo_that_trained_as_asked_is_not_doubted(tmp_path: Path) -> None:
    assert doubts_of(made_demo(tmp_path), 20) == []


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"ranks": 1}, "telemetry of ranks"),
        ({"world": 1}, "in a world of 1"),
        ({"kind": "MULTI_CPU"}, "not FSDP2"),
        ({"sharded": 0}, "not FSDP2"),
        ({"last": 19}, "19 of 20 steps"),
    ],
)
def test_a_silent_fallback_is_doubted_though_the_exit_code_is_zero(
    tmp_path: Path, changes: dict, words: str
) -> None:
    assert any(words in doubt for doubt in doubts_of(made_demo(tmp_path, **changes), 20))


@pytest.mark.slow
def test_the_headless_demo_trains_and_says_so_truthfully(tmp_path: Path) -> None:
    done = ftdash("demo", "--steps", "12", "--runs", str(tmp_path), "--json")
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert (told["state"], told["step"], told["trained"], told["doubts"]) == ("finished", 12, True, [])
    status = json.loads(ftdash("status", "--runs", str(tmp_path), "--json").stdout)
    assert [rank["step"] for rank in status["ranks"]] == [12, 12]
    assert status["exit_codes"] == {"0": 0, "1": 0, "launcher": 0}
    assert all(math.isfinite(rank["loss"]) for rank in status["ranks"])
    assert all(100 << 20 < rank["memory_used"] < 4 << 30 for rank in status["ranks"])
    run = find_run("last", tmp_path)
    for rank in (0, 1):
        assert run.rank_log(rank, "stdout").read_text()
    experts = {layer["layer"]: sum(layer["counts"]) for layer in status["experts"]}
    assert len(experts) == 4
    assert len(set(experts.values())) == 1
    assert "HF_TOKEN" not in "".join(p.read_text(errors="replace") for p in run.path.rglob("*.json"))
    wait_until(lambda: not processes_of(run))


@pytest.mark.slow
def test_the_detached_demo_is_found_dumped_and_stopped(tmp_path: Path) -> None:
    launched = json.loads(
        ftdash("demo", "--steps", "4000", "--runs", str(tmp_path), "--detach", "--json").stdout
    )
    assert set(launched) == {"run", "dir", "state"}
    run = find_run(launched["run"], tmp_path)
    state = wait_for(
        run, lambda s: len(s.ranks) == 2 and all(rank.step > 2 for rank in s.ranks), timeout_s=200
    )
    assert state.state is RunPhase.RUNNING
    folder = control.request_dump(run)
    wait_until(lambda: all((folder / f"rank-{rank}.json").exists() for rank in (0, 1)))
    assert all(decode_rank((folder / f"rank-{rank}.json").read_bytes()).process.threads for rank in (0, 1))
    stopped = json.loads(ftdash("stop", launched["run"], "--runs", str(tmp_path), "--json").stdout)
    assert stopped["state"] == "stopped"
    assert not processes_of(run)


@pytest.mark.slow
def test_a_killed_rank_of_the_demo_is_named_and_nothing_is_left(tmp_path: Path) -> None:
    launched = json.loads(
        ftdash("demo", "--steps", "4000", "--runs", str(tmp_path), "--detach", "--json").stdout
    )
    run = find_run(launched["run"], tmp_path)
    state = wait_for(
        run, lambda s: len(s.ranks) == 2 and all(rank.step > 2 for rank in s.ranks), timeout_s=200
    )
    os.kill(state.ranks[1].pid, signal.SIGKILL)
    state = wait_for(run, lambda s: s.state not in (RunPhase.RUNNING, RunPhase.STALLED), timeout_s=100)
    assert (state.state, state.manifest.first_failing_rank) == (RunPhase.FAILED, 1)
    assert state.manifest.reason == "rank 1: killed by SIGKILL"
    wait_until(lambda: not processes_of(run))


@pytest.mark.slow
def test_save_and_stop_leaves_a_model_behind(tmp_path: Path) -> None:
    launched = json.loads(
        ftdash("demo", "--steps", "4000", "--runs", str(tmp_path), "--detach", "--json").stdout
    )
    run = find_run(launched["run"], tmp_path)
    wait_for(run, lambda s: len(s.ranks) == 2 and all(rank.step > 2 for rank in s.ranks), timeout_s=200)
    stopped = json.loads(ftdash("stop", launched["run"], "--save", "--runs", str(tmp_path), "--json").stdout)
    assert stopped["state"] == "stopped"
    assert stopped["exit_codes"]["launcher"] == 0
    assert list(Path(run.read_manifest().output_dir).rglob("*.safetensors"))


@pytest.mark.slow
def test_torchrun_itself_is_understood_when_a_rank_raises(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import os, time\nrank = int(os.environ['RANK'])\ntime.sleep(1)\n"
        "if rank == 1: raise RuntimeError('bad batch [/x]')\ntime.sleep(600)\n"
    )
    torchrun = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        str(script),
    ]
    launched = json.loads(ftdash("launch", "--runs", str(tmp_path / "r"), "--json", "--", *torchrun).stdout)
    run = find_run(launched["run"], tmp_path / "r")
    state = wait_for(run, lambda s: s.state is RunPhase.FAILED, timeout_s=120)
    assert state.manifest.first_failing_rank == 1
    assert state.manifest.reason == "rank 1: exit code 1: RuntimeError: bad batch [/x]"
    assert "bad batch" in run.rank_log(1, "stderr").read_text()
    assert time.time() - state.manifest.ended < 60
