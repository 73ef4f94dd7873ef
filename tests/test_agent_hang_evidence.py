"""The agent takes evidence by itself when its ranks stop moving; what is left of it when they are gone."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from ftdash.monitor import liveness
from ftdash.monitor.agent.evidence import HangWatch
from ftdash.monitor.agent.vigil import BEFORE_TIMEOUT, Vigil
from ftdash.monitor.diagnosis import incident, live
from ftdash.monitor.diagnosis.kinds import Kind
from ftdash.monitor.diagnosis.model import (
    FlightDump,
    FlightEntry,
    ProcessEvidence,
    RankEvidence,
    Verdict,
    encode_rank,
)
from ftdash.monitor.diagnosis.ras import RasLost, RasReport
from ftdash.monitor.records import HANG_CODE, HANG_OVER_CODE, Event, RankSample
from ftdash.monitor.rundir import RunDir
from ftdash.monitor.state import RunPhase
from ftdash.monitor.stop import stop_run
from tests.support.live_runs import make_run, processes_of, wait_for, wait_until

HANGING = Path(__file__).parent / "support" / "hanging_train.py"


def sample(rank: int, beat_t: float, step: int, phase: str = "forward", **more: object) -> RankSample:
    return RankSample(
        t=beat_t, rank=rank, pid=100 + rank, beat_t=beat_t, beat_step=step, beat_phase=phase, **more
    )


class Played:
    """A vigil that is shown two ranks once a second, without real time passing."""

    def __init__(self) -> None:
        self.vigil = Vigil()
        self.now = 1000.0
        self.step = 0
        self.timeout_s = 0.0
        self.called: list[float] = []
        self.frozen: list[RankSample] = []

    def show(self, samples: Iterable[RankSample], after_s: float = 1.0) -> None:
        self.now += after_s
        quiet_s = self.vigil.look(list(samples), self.now, self.timeout_s)
        if quiet_s is not None:
            self.called.append(quiet_s)

    def train(self, seconds: int, steps_per_s: float = 1.0, phase: str = "forward") -> None:
        self.frozen = []
        for second in range(seconds):
            step = self.step + int((second + 1) * steps_per_s)
            self.show(sample(rank, 5000 + self.now, step, phase) for rank in (0, 1))
        self.step += int(seconds * steps_per_s)

    def stand(self, seconds: int, phase: str = "forward") -> None:
        """No beat changes for so long, nor since the last time it stood."""
        self.frozen = self.frozen or [sample(rank, 5000 + self.now, self.step, phase) for rank in (0, 1)]
        for _ in range(seconds):
            self.show(self.frozen)


@pytest.fixture
def played() -> Played:
    return Played()


def test_a_hang_calls_for_evidence_once(played: Played) -> None:
    played.train(60)
    played.stand(600)
    assert len(played.called) == 1
    assert liveness.STALL_FLOOR_S < played.called[0] < liveness.STALL_FLOOR_S + 5


def test_after_it_moved_again_the_next_hang_calls_again(played: Played) -> None:
    played.train(60)
    played.stand(50)
    played.train(60)
    played.stand(105)
    assert len(played.called) == 2


@pytest.mark.parametrize("phase", ["save", "eval", "start"])
def test_pauses_have_the_patience_of_pauses(played: Played, phase: str) -> None:
    played.train(60)
    played.stand(int(liveness.PAUSE_S) - 10, phase)
    assert not played.called
    played.stand(20, phase)
    assert len(played.called) == 1


def test_the_first_step_has_the_patience_of_a_pause(played: Played) -> None:
    played.show([sample(rank, 1.0, 0, "start") for rank in (0, 1)])
    played.stand(int(liveness.PAUSE_S) - 20)
    assert not played.called


def test_slow_steps_are_measured_by_themselves(played: Played) -> None:
    played.train(600, steps_per_s=0.1)
    played.stand(95)
    assert not played.called
    played.stand(30)
    assert len(played.called) == 1


def test_a_pause_that_has_been_as_long_before_is_no_hang(played: Played) -> None:
    played.train(30)
    played.stand(29)
    played.train(30)
    played.stand(55)
    assert not played.called


def test_one_rank_that_moves_is_enough(played: Played) -> None:
    played.train(60)
    for second in range(300):
        played.show([sample(0, 1.0, 60), sample(1, 5000 + played.now, 60 + second)])
    assert not played.called


def test_a_rank_without_a_hook_says_nothing_and_so_nothing_is_concluded(played: Played) -> None:
    for _ in range(400):
        played.show([sample(0, 1.0, 60), RankSample(t=1.0, rank=1, pid=101)])
    assert not played.called


def test_a_clock_that_jumps_adds_nothing(played: Played) -> None:
    played.train(60)
    for _ in range(25):
        played.show([sample(rank, 90000.0, 60, "forward") for rank in (0, 1)])
    assert not played.called


def test_an_agent_that_was_stopped_itself_concludes_nothing(played: Played) -> None:
    played.train(60)
    frozen = [sample(rank, 1.0, 60) for rank in (0, 1)]
    played.show(frozen)
    played.show(frozen, after_s=3600.0)
    assert not played.called


def test_a_known_timeout_brings_the_look_forward(played: Played) -> None:
    played.timeout_s = 100.0
    played.train(900, steps_per_s=0.1)
    played.stand(int(100 * BEFORE_TIMEOUT) + 3)
    assert len(played.called) == 1
    save = Played()
    save.timeout_s = 100.0
    save.train(60)
    save.stand(int(100 * BEFORE_TIMEOUT) + 3, "save")
    assert len(save.called) == 1


def test_when_somebody_was_at_work_the_next_look_comes_later(played: Played) -> None:
    played.train(60)
    played.stand(35)
    played.vigil.be_patient()
    played.stand(20)
    assert len(played.called) == 1
    played.stand(10)
    assert len(played.called) == 2


class Looked:
    """Stands in for the dumps: two looks that say what the test wants, written as the real ones are."""

    def __init__(self, kind: Kind) -> None:
        self.kind = kind
        self.ranks: list[list[tuple[int, int]]] = []

    def __call__(
        self, run: RunDir, ranks: list[tuple[int, int]], *, host: str, quiet_s: float, timeout_s: float
    ) -> tuple[Path, Verdict]:
        self.ranks.append(ranks)
        folder = run.stacks / f"watch-20260101-00000{len(self.ranks)}-{host}"
        for name in ("first", "second"):
            (folder / name).mkdir(parents=True)
            for rank, pid in ranks:
                process = ProcessEvidence(pid=pid, host=host, t=time.time(), rank=rank)
                evidence = RankEvidence(rank=rank, host=host, t=time.time(), process=process)
                (folder / name / f"rank-{rank}.json").write_bytes(encode_rank(evidence))
        note = incident.Incident(t=time.time(), host=host, quiet_s=quiet_s, kind=str(self.kind))
        (folder / "incident.json").write_bytes(msgspec.json.encode(note))
        return folder, Verdict(self.kind, reason="as the test wants")


class Node:
    """One node's hang watch over two ranks, its clock in the test's hands."""

    def __init__(self, run: RunDir, host: str, ranks: tuple[int, ...], *, alone: bool = True) -> None:
        self.watch = HangWatch(run, host, alone=alone)
        self.ranks = ranks
        self.now = 0.0
        self.beat_t = 1.0

    def pass_s(self, seconds: int, *, moving: bool) -> list[Event]:
        events: list[Event] = []
        for _ in range(seconds):
            self.now += 1.0
            self.beat_t += float(moving)
            samples = [sample(rank, self.beat_t, int(self.beat_t)) for rank in self.ranks]
            events += self.watch.look(samples, self.now)
            if self.watch._thread is not None:
                self.watch._thread.join()
        return events


def test_a_hang_is_told_and_so_is_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make_run(tmp_path)
    looked = Looked(Kind.OUTSIDE)
    monkeypatch.setattr(incident, "take", looked)
    node = Node(run, "a", (0, 1))
    assert node.pass_s(60, moving=True) == []
    (event,) = node.pass_s(60, moving=False)
    assert (event.code, event.severity) == (HANG_CODE, "error")
    assert "rank-outside-collective" in event.text
    assert looked.ranks == [[(0, 100), (1, 101)]]
    assert incident.kept(run) is not None
    (over,) = node.pass_s(10, moving=True)
    assert over.code == HANG_OVER_CODE
    assert incident.kept(run) is None


def test_a_run_that_is_at_work_leaves_no_evidence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make_run(tmp_path)
    looked = Looked(Kind.SLOW)
    monkeypatch.setattr(incident, "take", looked)
    node = Node(run, "a", (0, 1))
    node.pass_s(60, moving=True)
    events = node.pass_s(70, moving=False)
    assert [(event.code, event.severity) for event in events] == [("slow", "note")] * 2
    assert len(looked.ranks) == 2  # again after twice the time
    assert list(run.stacks.iterdir()) == []


def test_the_evidence_of_two_nodes_is_joined(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make_run(tmp_path, world_size=4)
    for host, ranks, kind in (("a", (0, 1), Kind.NETWORK), ("b", (2, 3), Kind.OUTSIDE)):
        monkeypatch.setattr(incident, "take", Looked(kind))
        node = Node(run, host, ranks, alone=False)
        node.pass_s(60, moving=True)
        node.pass_s(60, moving=False)
    kept = incident.kept(run)
    assert kept is not None
    assert [[evidence.rank for evidence in sample] for sample in kept.samples] == [[0, 1, 2, 3]] * 2
    assert incident.kept(run, since=time.time() + 60) is None


def test_an_agent_that_cannot_take_evidence_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **more: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(incident, "take", refuse)
    node = Node(make_run(tmp_path), "a", (0, 1))
    node.pass_s(60, moving=True)
    (event,) = node.pass_s(60, moving=False)
    assert "No space left" in event.text


def test_what_else_was_known_then_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make_run(tmp_path)
    report = RasReport(lost=(RasLost(7, "here"),))
    dump = FlightDump(rank=0, entries=[FlightEntry(group="0", seq=3, op="all_reduce")])
    monkeypatch.setattr(
        live, "add_rest", lambda one: replace(one, ras=report, kernel=("kernel: Xid 79",), flight=(dump,))
    )
    monkeypatch.setattr(incident, "dump_ranks", lambda ranks: [RankEvidence(rank=r, t=1.0) for r, _ in ranks])
    folder, _ = incident.take(
        run, [(0, 1), (1, 2)], host="here", quiet_s=40.0, timeout_s=60.0, interval_s=0.0
    )
    kept = incident.kept(run)
    assert kept is not None
    last = kept.samples[-1]
    assert (last.ras, last.kernel) == (report, ("kernel: Xid 79",))
    assert [entry.seq for entry in last.flight[0].entries] == [3]
    (folder / "flight.json").write_bytes(b"{broken")
    assert incident.kept(run).samples[-1].flight == ()  # type: ignore[union-attr]


@pytest.fixture
def hung(tmp_path: Path) -> Iterator[RunDir]:
    """A real job of gloo ranks in which rank 1 falls asleep; nobody but the agent looks at it."""
    from ftdash.engine.launch.local import launch
    from ftdash.engine.launch.spec import LaunchSpec

    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    run = launch(LaunchSpec(command=(*command, str(HANGING), "40", "20"), name="hung", runs=tmp_path))
    yield run
    stop_run(run, grace_s=0.5)


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_a_hang_that_nobody_asked_about_is_explained_after_the_watchdog_ended_it(hung: RunDir) -> None:
    state = wait_for(hung, lambda state: any(alert.code == HANG_CODE for alert in state.alerts), 90)
    assert state.state is RunPhase.STALLED
    hang = next(alert for alert in state.alerts if alert.code == HANG_CODE)
    assert "rank 1 is outside of any collective" in hang.text
    stalled = next(alert for alert in state.alerts if alert.code == "stalled")
    assert "of the 40 s that a collective may take" in stalled.text
    wait_for(hung, lambda state: state.state is RunPhase.FAILED, 90)
    wait_until(lambda: not processes_of(hung))
    assert len(incident.incidents(hung)) == 1
    command = [sys.executable, "-m", "ftdash.tui.cli", "diagnose", str(hung.path), "--json"]
    answer = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    (culprit,) = answer["verdict"]["culprits"]
    assert culprit["rank"] == 1
    assert "score (" in culprit["frame"]
    assert "hanging_train.py" in culprit["frame"]
    assert not any("s left of" in text for text in answer["verdict"]["evidence"])  # the run is over
    assert any("evidence taken at" in text for text in answer["verdict"]["evidence"])
    assert time.time() - incident.incidents(hung)[0][1].t < 180
