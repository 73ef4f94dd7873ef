"""The commands around a run as a script calls them: exact JSON, one line for bad input, true exit codes."""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ftdash.monitor.hostname import node_name
from ftdash.monitor.records import Experts, Meta, Step
from ftdash.monitor.rundir import RankExit
from ftdash.monitor.state import RunPhase
from ftdash.tui.cli import EXAMPLES, guarded, main
from ftdash.tui.cli import run as run_line
from tests.support.live_runs import LAUNCHER, make_run, processes_of, start_run, wait_for, wait_until, write

FTDASH = str(Path(sys.executable).with_name("ftdash"))
RANK_KEYS = {
    "rank",
    "host",
    "pid",
    "device",
    "step",
    "loss",
    "tokens_per_s",
    "memory_used",
    "memory_total",
    "heartbeat_age_s",
    "state",
    "descendants",
}
STATUS_KEYS = {"state", "step", "tokens_per_s", "ranks", "experts", "alerts", "predicted", "measured"}


def ftdash(*args: str, **more: object) -> subprocess.CompletedProcess[str]:
    command = [FTDASH, *args]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, **more)  # type: ignore[call-overload]


def json_of(*args: str) -> object:
    done = ftdash(*args)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_status_json_has_the_fixed_shape_and_plain_numbers(tmp_path: Path) -> None:
    ends = [RankExit(0, 0, 2.0), RankExit(1, 0, 2.0)]
    run = make_run(
        tmp_path,
        state="finished",
        exit_code=0,
        exits=ends,
        max_steps=9,
        predicted={"memory": {"allocated": 5}},
    )
    for rank, loss in ((0, 1.5), (1, "nan")):
        meta = Meta(t=1, rank=rank, local_rank=rank, world_size=2, host="far", pid=9, device="cpu")
        write(run.rank_file(rank), meta, Step(t=2, step=9, loss=loss, tokens=10, step_s=0.5))
    write(run.rank_file(0), Experts(t=2, step=9, layer=1, counts=[6, 2]))
    status = json_of("status", run.run_id, "--runs", str(tmp_path), "--json")
    assert isinstance(status, dict)
    assert set(status) >= STATUS_KEYS
    assert (status["state"], status["step"], status["tokens_per_s"]) == ("finished", 9, 40.0)
    assert all(set(rank) >= RANK_KEYS for rank in status["ranks"])
    assert [rank["loss"] for rank in status["ranks"]] == [1.5, "nan"]
    assert status["experts"] == [{"layer": 1, "counts": [6, 2], "imbalance": 1.5}]
    assert status["predicted"] == {"memory": {"allocated": 5}}
    assert status["exit_codes"] == {"0": 0, "1": 0, "launcher": 0}
    assert all(set(alert) == {"code", "severity", "ranks", "text"} for alert in status["alerts"])


def test_runs_lists_the_newest_first_and_tells_of_broken_ones(tmp_path: Path) -> None:
    for name in ("20250101-a", "20250102-b", "20250103-c"):
        run = make_run(tmp_path, "x", state="failed")
        run.path.rename(tmp_path / name)
    (tmp_path / "20250102-b" / "run.json").write_text("{")
    done = ftdash("runs", "--runs", str(tmp_path), "--json")
    rows = json.loads(done.stdout)
    assert [Path(row["dir"]).name for row in rows] == ["20250103-c", "20250101-a"]
    assert rows[0]["state"] == "failed"
    assert "20250102-b" in done.stderr
    assert ftdash("runs", "--runs", str(tmp_path)).stdout.count(" 1 rank  ") == 2


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--pane", "nowhere"], "--pane takes one of plan, launch, monitor, diagnose"),
        (["--run"], "--run a run"),
        (["status", "nothing"], "no runs in"),
        (["watch", "--interval", "soon"], "--interval soon"),
        (["stop", "--grace", "-1"], "--grace -1"),
        (["runs", "--limit", "many"], "--limit many"),
        (["launch"], "name the model"),
        (["launch", "--model", "tiny-moe", "--steps", "0"], "--steps 0"),
        (["launch", "--model", "tiny-moe", "--device", "tpu"], "--device tpu: one of auto, cpu, cuda"),
        (["launch", "--model", "no-such-model", "--device", "cpu"], "--model no-such-model"),
        (["launch", "--", "no-such-program-here"], "no such program"),
        (["launch", "--model", "tiny-moe", "--device", "cpu", "--data", "/nowhere.jsonl"], "/nowhere.jsonl"),
        (["demo", "--steps", "x"], "--steps x"),
        (["plan", "--seq", "4096"], "unknown flag --seq; near: --seq-len"),
        (["plan", "--lora-r=8"], "unknown flag --lora-r; near: --lora-rank"),
        (["plan", "--qqq"], "unknown flag --qqq; ftdash plan --help lists what there is"),
        (["plan", "--params", "-7e9"], "--params -7e9: must be a whole number from"),
        (["agent"], "no launcher command"),
        (["agent", "--adopt", "nothing"], "no runs in"),
    ],
)
def test_bad_input_is_one_line_and_exit_status_2(
    args: list[str], words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["ftdash", *args])
    with pytest.raises(SystemExit) as ended:
        main()
    told = capsys.readouterr()
    assert ended.value.code == 2, told.err
    assert words in told.err
    assert told.err.count("\n") == 1
    assert told.out == ""


@pytest.mark.parametrize("line", [line for lines in EXAMPLES.values() for line in lines])
def test_the_examples_of_the_help_are_understood(line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name, *words = line.split()
    asked: list[object] = []
    module = importlib.import_module(f"ftdash.tui.commands.{name}")
    monkeypatch.setattr(module, "run", asked.append)
    assert run_line([name, *words]) == 0
    assert len(asked) == 1


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a folder to somebody else")
@pytest.mark.parametrize("command", ["status", "watch", "stop", "diagnose"])
def test_a_run_of_another_user_is_refused(
    tmp_path: Path, command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run(tmp_path)
    os.chown(run.path, 65534, 65534)
    monkeypatch.setattr(sys, "argv", ["ftdash", command, run.run_id, "--runs", str(tmp_path)])
    with pytest.raises(SystemExit) as ended:
        main()
    told = capsys.readouterr().err
    assert (ended.value.code, told.count("\n"), "another user" in told) == (2, 1, True)


def test_launch_watch_and_stop_a_command_of_ones_own(tmp_path: Path) -> None:
    command = [sys.executable, str(LAUNCHER), "2", "--steps", "4000"]
    launched = json_of("launch", "--runs", str(tmp_path), "--json", "--", *command)
    assert isinstance(launched, dict)
    assert set(launched) == {"run", "dir", "state"}
    assert launched["state"] in ("starting", "running")
    status = {}
    deadline = time.monotonic() + 60
    while not status or len(status["ranks"]) < 2 or min(rank["step"] for rank in status["ranks"]) < 3:
        assert time.monotonic() < deadline, status
        status = json_of("status", launched["run"], "--runs", str(tmp_path), "--json")  # type: ignore[assignment]
    assert status["state"] == "running"
    assert all(os.path.exists(f"/proc/{rank['pid']}") for rank in status["ranks"])
    stopped = json_of("stop", launched["run"], "--runs", str(tmp_path), "--json")
    assert isinstance(stopped, dict)
    assert stopped["state"] == "stopped"
    assert set(stopped) == {"run", "state", "exit_codes"}
    assert {stopped["exit_codes"]["0"], stopped["exit_codes"]["1"]} == {-15}
    assert not any(os.path.exists(f"/proc/{rank['pid']}") for rank in status["ranks"])
    watched = ftdash("watch", launched["run"], "--runs", str(tmp_path))
    assert watched.returncode == 0
    assert "stopped" in watched.stdout.splitlines()[-1]


def test_watch_of_a_failing_run_ends_with_status_1_and_the_reason(tmp_path: Path) -> None:
    run = start_run(tmp_path, 2, "--steps", "400", "--fail", "1:4:raise")
    done = ftdash("watch", run.run_id, "--runs", str(tmp_path), "--interval", "0.2")
    assert done.returncode == 1
    assert "rank 1: exit code 1: ValueError: loss went to the moon [/usr/bin/x]" in done.stdout
    wait_until(lambda: not processes_of(run))


@pytest.mark.slow
def test_the_terminal_may_go_and_training_stays(tmp_path: Path) -> None:
    """The launching process has a session of its own, which is killed as a lost SSH line kills it."""
    command = [FTDASH, "launch", "--runs", str(tmp_path), "--"]
    script = f"{' '.join(command)} {sys.executable} {LAUNCHER} 1 --steps 4000; sleep 600"
    with subprocess.Popen(
        ["/bin/sh", "-c", script], start_new_session=True, stdout=subprocess.DEVNULL
    ) as shell:
        wait_until(lambda: any(path.name == "run.json" for path in tmp_path.glob("*/run.json")))
        from ftdash.monitor.rundir import list_runs

        run = list_runs(tmp_path)[0]
        wait_for(run, lambda state: bool(state.ranks) and state.ranks[0].step > 0)
        os.killpg(shell.pid, signal.SIGHUP)
        os.killpg(shell.pid, signal.SIGKILL)
        shell.wait()
    state = wait_for(run, lambda state: state.ranks[0].step > 20)
    assert state.state is RunPhase.RUNNING
    assert json_of("stop", "last", "--runs", str(tmp_path), "--json")["state"] == "stopped"  # type: ignore[index]
    assert not processes_of(run)


@pytest.mark.slow
def test_an_agent_in_the_foreground_passes_signals_on_and_returns_the_code(tmp_path: Path) -> None:
    command = [FTDASH, "agent", "--runs", str(tmp_path), "--"]
    launcher = [sys.executable, str(LAUNCHER), "1", "--steps", "4000"]
    with subprocess.Popen([*command, *launcher], start_new_session=True) as agent:
        wait_until(lambda: any(tmp_path.glob("*/run.json")))
        from ftdash.monitor.rundir import list_runs

        run = list_runs(tmp_path)[0]
        wait_for(run, lambda state: bool(state.ranks) and state.ranks[0].step > 0)
        agent.send_signal(signal.SIGTERM)
        assert agent.wait(30) == 1
    manifest = run.read_manifest()
    assert (manifest.state, manifest.reason) == ("stopped", "stopped by SIGTERM")
    assert not processes_of(run)


def test_hostile_records_of_a_run_lose_nothing_else(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("FTDASH_HOME", str(tmp_path))
    folder = tmp_path / "runs" / "r"
    (folder / "telemetry").mkdir(parents=True)
    manifest = {"run": "r", "state": "failed", "reason": "\x1b[2Jboom\nagain [/x]", "command": ["x"]}
    (folder / "run.json").write_text(json.dumps(manifest))
    records = [
        {"v": 1, "t": 1.0, "kind": "experts", "rank": 0, "step": 1, "layer": 0, "counts": [0, 0, -1, 10]},
        {"v": 1, "t": 1.0, "kind": "step", "rank": 0, "step": 7, "loss": 2.0, "tokens": 9, "step_s": 0.5},
    ]
    lines = "".join(json.dumps(record) + "\n" for record in records)
    (folder / "telemetry" / "rank-0.jsonl").write_text(lines)
    assert guarded(["status", "r"]) == 0
    shown = capsys.readouterr().out
    assert "boom again [/x]" in shown
    assert "\x1b" not in shown
    assert guarded(["status", "r", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["ranks"][0]["step"] == 7


def test_a_list_flag_that_was_not_given_is_no_missing_value(capsys):
    assert guarded(["launch", "--json"]) == 2
    assert "name the model" in capsys.readouterr().err


def test_a_run_whose_processes_are_all_gone_is_not_said_to_train_on(tmp_path, capsys):
    run = make_run(tmp_path, state="running", agent_pids={node_name(): 4_000_000})
    meta = Meta(t=1, rank=0, local_rank=0, world_size=1, host=node_name(), pid=4_000_001, device="cpu")
    write(run.rank_file(0), meta)
    assert guarded(["status", run.run_id, "--runs", str(tmp_path)]) == 0
    assert "training goes on" not in capsys.readouterr().out
    assert guarded(["diagnose", run.run_id, "--runs", str(tmp_path), "--quick"]) == 0
    assert "the run has ended: its processes are gone" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "stdout", "status", "said"),
    [
        (["--help"], "gone", 0, ""),
        (["plan", "--model", "qwen3-8b", "--gpus", "8"], "gone", 0, ""),  # a table of Rich's
        (["runs", "--json"], "gone", 0, ""),
        (["--help"], "full", 2, "ftdash: standard output: No space left on device\n"),
        (["runs", "--json"], "full", 2, "ftdash: standard output: No space left on device\n"),
        (["plan", "--model", "qwen3-8b", "--gpus", "8"], "closed", 0, ""),
    ],
)
def test_output_that_nobody_takes_ends_the_command_without_a_traceback(argv, stdout, status, said):
    if stdout == "gone":
        reader, out = os.pipe()
        os.close(reader)
    else:
        out = os.open("/dev/full" if stdout == "full" else os.devnull, os.O_WRONLY)
    command = [sys.executable, "-m", "ftdash.tui.cli", *argv]
    if stdout == "closed":
        command = ["sh", "-c", 'exec "$@" >&-', "sh", *command]
    try:
        done = subprocess.run(command, stdout=out, stderr=subprocess.PIPE, text=True, check=False)
    finally:
        os.close(out)
    assert (done.returncode, done.stderr) == (status, said)
