"""Runs after they ended: exported as CSV and OpenMetrics, and played again with seek."""

from __future__ import annotations

import csv
import io
import os
import re
import subprocess
import sys

import pytest

from ftdash.monitor.export import COLUMNS, openmetrics, rank_files, write_csv
from ftdash.monitor.replay import Replay
from ftdash.monitor.rundir import RunDir, RunError
from ftdash.monitor.state import RunPhase
from tests.support.cluster import START_T, Cluster
from tests.support.runs import run_state, with_rank

CLI = [sys.executable, "-c", "from ftdash.tui.cli import main; main()"]


@pytest.fixture
def run(ftdash_home) -> RunDir:
    return Cluster(8, per_node=4, experts=4).create(
        ftdash_home / "runs", "20260101-000000-synthetic-0000", state="finished", steps=80
    )


def test_csv_has_a_row_for_every_step_of_every_rank(run):
    out = io.StringIO()
    done = write_csv(run, out)
    rows = list(csv.DictReader(io.StringIO(out.getvalue())))
    assert (done.rows, done.skipped) == (8 * 80, 0)
    assert len(rows) == 8 * 80
    assert tuple(rows[0]) == COLUMNS
    assert [row["rank"] for row in rows[::80]] == [str(i) for i in range(8)]
    assert rows[-1]["step"] == "80"
    assert rows[-1]["host"] == "node0001"
    assert float(rows[0]["step_s"]) == 1.0


def test_csv_survives_garbage_nan_and_a_half_written_line(run):
    with run.rank_file(0).open("ab") as handle:
        handle.write(b'{"kind":"step","t":1.0,"step":81,"loss":"nan"}\n')
        handle.write(b"\x00\xff garbage\n")
        handle.write(b'{"kind":"step","t":1.0,"st')
    out = io.StringIO()
    done = write_csv(run, out)
    rows = [row for row in csv.DictReader(io.StringIO(out.getvalue())) if row["rank"] == "0"]
    assert rows[-1]["step"] == "81"
    assert rows[-1]["loss"] == "nan"
    assert rows[-1]["lr"] == ""
    assert done.skipped == 1


VALUE = r'"(?:[^"\\\n]|\\["\\n])*"'
LINE = re.compile(
    r"^(?:# (?:TYPE|HELP) ftdash_\w+ .+"
    rf"|ftdash_\w+\{{\w+={VALUE}(?:,\w+={VALUE})*\}} (?:NaN|[+-]Inf|[-+0-9.e]+))$"
)


def test_csv_leaves_out_what_is_no_file_of_a_rank(run):
    os.mkfifo(run.telemetry / "rank-77.jsonl")
    (run.telemetry / "rank-\N{SUPERSCRIPT TWO}.jsonl").write_bytes(b"{}\n")
    (run.telemetry / "rank-78.jsonl").symlink_to("/dev/zero")
    assert [rank for rank, _ in rank_files(run)] == list(range(8))


def test_openmetrics_is_well_formed_whatever_the_names_are():
    state = with_rank(run_state(2), 1, host='we"ird\\host\n', loss=float("nan"), memory_used=123)
    text = openmetrics(state)
    *lines, last, empty = text.split("\n")
    assert (last, empty) == ("# EOF", "")
    for line in lines:
        assert LINE.match(line), line
    families = [line.split()[2] for line in lines if line.startswith("# TYPE")]
    assert len(families) == len(set(families))
    assert 'ftdash_rank_loss{run="r",rank="1",host="we\\"ird\\\\host\\n"} NaN' in lines
    assert 'ftdash_rank_up{run="r",rank="0",host="gpu-a"} 1' in lines


def test_the_command_writes_both_forms_and_replaces_files_whole(run, tmp_path):
    target = tmp_path / "ftdash.prom"
    target.write_text("old")
    done = subprocess.run(
        [*CLI, "export", "last", "--openmetrics", "--out", str(target)], capture_output=True
    )
    assert done.returncode == 0, done.stderr
    assert target.read_text().endswith("# EOF\n")
    assert [path.name for path in tmp_path.iterdir()] == ["ftdash.prom"]
    done = subprocess.run([*CLI, "export", str(run.path), "--csv"], capture_output=True, text=True)
    assert done.stdout.count("\n") == 8 * 80 + 1


def test_an_export_without_a_form_and_into_nowhere_says_so_in_one_line(run):
    for arguments, word in (
        (["export", "last"], "--csv or --openmetrics"),
        (["export", "last", "--csv", "--out", "/nonexistent/x.csv"], "--out /nonexistent/x.csv"),
    ):
        done = subprocess.run([*CLI, *arguments], capture_output=True, text=True)
        assert done.returncode == 2
        assert word in done.stderr
        assert done.stderr.count("\n") == 1


def test_replay_shows_the_run_as_it_was(run):
    replay = Replay(run)
    assert (replay.start, replay.end) == (START_T, START_T + 80)
    middle = replay.seek(START_T + 40)
    assert (middle.step, middle.state) == (40, RunPhase.RUNNING)
    assert len(middle.ranks) == 8
    later = replay.seek(START_T + 79)
    assert later.step == 79
    back = replay.seek(START_T + 40)
    assert (back.step, back.loss) == (middle.step, middle.loss)
    assert [rank.loss for rank in back.ranks] == [rank.loss for rank in middle.ranks]


def test_replay_raises_the_alerts_of_the_moment(run):
    replay = Replay(run)
    before = {alert.code for alert in replay.seek(START_T + 9).alerts}
    assert "straggler" not in before
    straggler = [alert for alert in replay.seek(START_T + 22).alerts if alert.code == "straggler"]
    assert [alert.ranks for alert in straggler] == [(3,)]
    assert "gpu-lost" in {alert.code for alert in replay.seek(START_T + 60).alerts}


def test_play_goes_at_the_speed_that_was_asked_for(run):
    now = [0.0]
    waited: list[float] = []

    def sleep(seconds: float) -> None:
        waited.append(seconds)
        now[0] += seconds

    states = list(Replay(run).play(speed=10.0, interval_s=1.0, clock=lambda: now[0], sleep=sleep))
    assert [state.step for state in states] == [0, 10, 20, 30, 40, 50, 60, 70, 80]
    assert waited == [1.0] * 8
    with pytest.raises(ValueError, match="positive"):
        next(Replay(run).play(speed=0))


def test_a_run_without_records_or_manifest_is_no_crash(ftdash_home):
    run = Cluster(0).create(ftdash_home / "runs", "empty")
    assert Replay(run).seek(START_T).ranks == ()
    with pytest.raises(RunError):
        Replay(RunDir(ftdash_home / "nothing"))


def test_a_line_without_an_end_is_skipped_in_bounded_memory(run):
    good = run.rank_file(0).read_bytes()
    with run.rank_file(0).open("wb") as handle:
        for _ in range(20):
            handle.write(b"x" * (1 << 20))
        handle.write(b"\n" + good)
    assert Replay(run).seek(START_T + 80).ranks[0].step == 80
    out = io.StringIO()
    assert write_csv(run, out).rows == 8 * 80


def test_garbage_and_a_clock_that_goes_back_are_survived(run):
    with run.rank_file(0).open("ab") as handle:
        handle.write(b"\xff\xfe\n")
        handle.write(b'{"kind":"step","t":5.0,"step":81,"loss":1.0}\n')
    state = Replay(run).seek(START_T + 1000)
    assert state.ranks[0].step == 81
