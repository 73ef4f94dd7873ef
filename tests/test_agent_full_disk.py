"""A disk that fills while a run goes on: nothing crashes, the end is still true, and the loss is told."""

from __future__ import annotations

import contextlib
import errno
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from ftdash.engine.launch import checks
from ftdash.monitor.agent.sample import NodeFile
from ftdash.monitor.beat import read_beat
from ftdash.monitor.reader import RunReader
from ftdash.monitor.records import Event, Node, Step, decode_lines, decoder
from ftdash.monitor.rundir import RunDir, RunError, write_atomic
from ftdash.monitor.state import RunPhase
from ftdash.monitor.stop import stop_run
from ftdash.tui.cli import guarded
from tests.support.live_runs import make_run, processes_of, start_run, wait_for, wait_until

ENDED = (RunPhase.FINISHED, RunPhase.FAILED, RunPhase.STOPPED)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of one MiB."""
    place = tmp_path / "small"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m,mode=700", "tmpfs", str(place)]
    try:
        done = subprocess.run(mount, capture_output=True)
    except OSError:
        pytest.skip("no mount here")
    if done.returncode:
        pytest.skip("a small file system can only be mounted by root")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


def fill(place: Path) -> Path:
    filler = place / "filler"
    with open(filler, "wb", buffering=0) as handle, contextlib.suppress(OSError):
        while True:
            handle.write(b"x" * 4096)
    assert shutil.disk_usage(place).free < 4096
    return filler


def test_a_run_on_a_disk_that_fills_up_still_ends_with_the_truth(
    small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checks, "FREE_BYTES", 0)
    run = start_run(small_disk, 2, "--steps", "120", "--fail", "1:100:exit")
    wait_for(run, lambda state: len(state.ranks) == 2 and all(rank.step > 2 for rank in state.ranks))
    fill(small_disk)
    state = wait_for(run, lambda state: state.state in ENDED)
    assert state.state is RunPhase.FAILED
    assert state.manifest.first_failing_rank == 1
    wait_until(lambda: not processes_of(run))


def test_a_file_system_that_refuses_for_a_while_costs_no_step(
    small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checks, "FREE_BYTES", 0)
    run = start_run(small_disk, 2, "--steps", "400", "--step-s", "0.02")
    wait_for(run, lambda state: len(state.ranks) == 2 and all(rank.step > 2 for rank in state.ranks))
    filler = fill(small_disk)
    # the heartbeat is mapped memory and goes on where the file cannot grow (but for its last page)
    wait_until(lambda: read_beat(run.beat_file(0)).step > steps_of(run, 0)[-1] + 30)
    filler.unlink()
    state = wait_for(run, lambda state: state.state in ENDED)
    assert state.state is RunPhase.FINISHED
    for rank in (0, 1):
        assert steps_of(run, rank) == list(range(1, 401))


def test_a_run_is_stopped_where_no_request_can_be_written(
    small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checks, "FREE_BYTES", 0)
    run = start_run(small_disk, 2, "--steps", "4000", "--step-s", "0.05")
    wait_for(run, lambda state: len(state.ranks) == 2 and all(rank.step > 2 for rank in state.ranks))
    fill(small_disk)
    with pytest.raises(RunError, match=r"cannot write a request .*No space left on device"):
        stop_run(run, save=True)
    assert len(processes_of(run)) > 2
    assert stop_run(run, grace_s=0.5) == set()
    wait_until(lambda: not processes_of(run))
    assert RunPhase(run.read_manifest().state) in ENDED


def test_what_finds_no_room_is_named(small_disk: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(small_disk)
    fill(small_disk)
    target = small_disk / "steps.csv"
    said = f"ftdash: --out {target}: No space left on device\n"
    assert guarded(["export", str(run.path), "--openmetrics", "--out", str(target)]) == 2
    assert capsys.readouterr().err == said
    with pytest.raises(OSError) as caught:
        write_atomic(target, b"x" * 8192)
    assert (caught.value.filename, caught.value.errno) == (str(target), errno.ENOSPC)
    assert [path.name for path in small_disk.iterdir() if path.name.startswith(".")] == []


def steps_of(run: RunDir, rank: int) -> list[int]:
    records, _ = decode_lines(decoder, run.rank_file(rank).read_bytes())
    return [record.step for record in records if isinstance(record, Step)]


def test_node_samples_that_found_no_room_are_written_later(small_disk: Path) -> None:
    run = make_run(small_disk)
    file = NodeFile(run.node_file("h"))
    filler = fill(small_disk)
    for t in range(200):
        file.write([Node(t=float(t), host="h", agent_pid=1)])
    filler.unlink()
    file.write([Node(t=200.0, host="h", agent_pid=1)])
    file.close()
    records, garbage = decode_lines(decoder, run.node_file("h").read_bytes())
    assert [record.t for record in records] == [float(t) for t in range(201)]
    assert garbage <= 1


def test_node_samples_that_were_lost_are_told_when_there_is_room(
    small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ftdash.monitor.agent.sample.KEPT_LINES", 10)
    run = make_run(small_disk)
    file = NodeFile(run.node_file("h"))
    file.write([Node(t=1.0, host="h", agent_pid=1)])
    filler = fill(small_disk)
    for t in range(200):
        file.write([Node(t=float(t), host="h", agent_pid=1)])
    assert file.dropped > 0
    filler.unlink()
    file.write([Node(t=300.0, host="h", agent_pid=1)])
    file.close()
    records, garbage = decode_lines(decoder, run.node_file("h").read_bytes())
    assert garbage <= 1
    assert records[-2].t == 300.0
    assert isinstance(records[-1], Event)
    assert records[-1].code == "telemetry-dropped"


def test_a_node_file_is_begun_anew_before_it_is_large_and_keeps_events(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ftdash.monitor.agent.sample.ROTATE_BYTES", 20_000)
    run = make_run(tmp_path, state="running", agent_pids={"far": 1})
    file = NodeFile(run.node_file("far"))
    reader = RunReader(run)
    file.write([Event(t=0.5, severity="note", code="begin", text="once")])
    for t in range(2000):
        file.write([Node(t=float(t), host="far", agent_pid=1)])
        if t % 50 == 0:
            reader.poll()
    file.close()
    for _ in range(10):
        reader.poll()
    assert run.node_file("far").stat().st_size <= 21_000
    assert reader.summary.nodes["far"].last_t == 1999.0
    assert run.node_file("far").read_bytes().count(b'"begin"') == 1
    reader.close()
