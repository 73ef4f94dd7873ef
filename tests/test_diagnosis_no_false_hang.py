"""Running jobs of many kinds are looked at over and over at random distances: none may be called a hang."""

from __future__ import annotations

import random
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from ftdash.monitor.diagnosis import diagnose, live, procfs
from ftdash.monitor.diagnosis.kinds import Kind
from ftdash.monitor.diagnosis.model import Frame, ProcState, Sample, Thread
from ftdash.monitor.diagnosis.processes import find_trainers
from tests.support import zoo
from tests.support.stacks import stack_of

CALM = {Kind.SLOW, Kind.HEALTHY}
JOBS = (
    "trains",
    "trains_unevenly",
    "saves_in_a_thread",
    "finds_a_learning_rate",
    "slow_torch_save",
    "long_evaluation",
    "compiles",
    "slow_loading",
    "slow_map",
    "slow_preprocessing",
    "generates_on_one",
    "waits_for_slow_loader",
    "long_compute_on_one",
)
AT_ONCE = 3
DUMPS = 16  # of each job


def watch(folder: Path, case: str, seed: int) -> list[tuple[str, str]]:
    """(job, what was wrongly said) for each dump, "" where it was right."""
    folder.mkdir()
    chance = random.Random(seed)
    said = []
    with zoo.job(folder, "near_hangs.py", case, 2, settle=False) as pids:
        trainers = find_trainers(pids)
        before = live.take_sample(trainers)
        for _ in range(DUMPS):
            time.sleep(chance.uniform(0.4, 1.4))
            now = live.take_sample(trainers)
            verdict = diagnose([before, now]).verdict
            wrong = bool(verdict.culprits) or verdict.kind not in CALM
            said.append((case, f"{verdict.kind} {verdict.confidence}: {verdict.reason}" if wrong else ""))
            before = now
    return said


def looks(
    stacks: dict[int, list[Frame]], counters: Callable[[int, float], ProcState], apart_s: float = 5.0
) -> list[Sample]:
    """Two looks at ranks that stand still; `counters` tells what /proc said of a rank at each."""
    samples = []
    for t in (1000.0, 1000.0 + apart_s):
        ranks = [stack_of(rank, frames) for rank, frames in stacks.items()]
        for one in ranks:
            assert one.process is not None
            one.t, one.process.proc = t, counters(one.rank, t)
        samples.append(Sample(t=t, ranks=tuple(ranks), expected=frozenset(stacks), world_size=len(stacks)))
    return samples


SITE = "/opt/env/site-packages"
MINE = Frame("tokenise_in_turn", "/home/me/prepare.py", 20)
IN_BARRIER = [Frame("barrier", f"{SITE}/torch/distributed/distributed_c10d.py", 5356), MINE]
TOKENISES = [Frame("TokenizersBackend._encode_plus", f"{SITE}/transformers/tokenization_utils.py", 9), MINE]
AT_FILE_LOCK = [
    Frame("LockAcquisition._poll_until_acquired", f"{SITE}/filelock/_core/_acquire.py", 177),
    Frame("BaseFileLock.__enter__", f"{SITE}/filelock/_api.py", 60),
    MINE,
]


@pytest.mark.parametrize("works", [True, False])
def test_a_rank_at_a_file_lock_waits_for_the_one_that_works(works: bool) -> None:
    def counters(rank: int, t: float) -> ProcState:
        busy_s = t if rank == 1 and works else 1.0
        return ProcState(state="S", threads=1, cpu_s=busy_s, main_wanted_s=busy_s)

    verdict = diagnose(looks({0: IN_BARRIER, 1: TOKENISES, 2: AT_FILE_LOCK}, counters)).verdict
    assert (verdict.kind is Kind.SLOW) == works
    assert bool(verdict.culprits) == (not works)
    assert ("rank 1 is" in verdict.reason) == works


@pytest.mark.parametrize(
    ("line", "apart_s", "kind"),
    [
        ("        time.sleep(1.5)  # the node is throttled", 0.5, Kind.SLOW),
        ("        time.sleep(1.5)  # the node is throttled", 5.0, Kind.OUTSIDE),
        ("        time.sleep(3600)", 0.5, Kind.OUTSIDE),
        ("        while True: time.sleep(1.5)", 0.5, Kind.OUTSIDE),
    ],
)
def test_a_short_sleep_seen_for_less_than_it_lasts_holds_nobody_up(
    tmp_path: Path, line: str, apart_s: float, kind: Kind
) -> None:
    script = tmp_path / "steps.py"
    script.write_text(f"def step(model):\n    for batch in model:\n{line}\n        reduce(batch)\n")
    stacks = {0: IN_BARRIER, 1: [Frame("step", str(script), 3), MINE]}

    def counters(rank: int, t: float) -> ProcState:
        return ProcState(state="S", threads=1, cpu_s=1.0, syscall=230 if rank else 202)

    verdict = diagnose(looks(stacks, counters, apart_s)).verdict
    assert verdict.kind is kind
    assert [culprit.rank for culprit in verdict.culprits] == ([] if kind is Kind.SLOW else [1])


def test_what_a_slow_receiver_has_not_taken_yet_is_counted() -> None:
    """A sender wakes up only when a third of its buffer is free: until then nothing else of it moves."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        code = f"import socket; socket.create_connection(('127.0.0.1', {port})).sendall(bytes(1 << 26))"
        with subprocess.Popen([sys.executable, "-c", code]) as sender:
            try:
                receiver, _ = server.accept()

                def unsent(known: int = 0) -> int:
                    return zoo.eventually(
                        lambda: procfs.proc_state(sender.pid).unsent, lambda n: n > 0 and n != known
                    )

                with receiver:
                    before = unsent()
                    for _ in range(40):
                        receiver.recv(1 << 16)
                    assert 0 < unsent(before) != before
            finally:
                sender.kill()


@pytest.mark.parametrize(("later", "kind"), [(90_000, Kind.SLOW), (120_000, Kind.OUTSIDE)])
def test_a_rank_whose_bytes_are_taken_slowly_is_not_stuck(later: int, kind: Kind) -> None:
    def counters(rank: int, t: float) -> ProcState:
        return ProcState(state="S", threads=1, cpu_s=1.0, unsent=(120_000 if t == 1000.0 else later) * rank)

    uploads = [Frame("upload", "/home/me/upload.py", 7), MINE]
    assert diagnose(looks({0: IN_BARRIER, 1: uploads}, counters)).verdict.kind is kind


@pytest.mark.parametrize(("wanted_s", "kind"), [(2.5, Kind.SLOW), (0.01, Kind.OUTSIDE)])
def test_a_rank_that_makes_a_pool_in_every_round_works_in_its_newest(wanted_s: float, kind: Kind) -> None:
    waits = [
        Frame("Condition.wait", "/usr/lib/python3.11/threading.py", 327),
        Frame("Future.result", "/usr/lib/python3.11/concurrent/futures/_base.py", 451),
        Frame("dedup", "/home/me/prepare.py", 31),
    ]
    works = [
        Frame("svd", f"{SITE}/numpy/linalg/_linalg.py", 1681),
        Frame("sign", "/home/me/prepare.py", 11),
        Frame("_WorkItem.run", "/usr/lib/python3.11/concurrent/futures/thread.py", 58),
        Frame("_worker", "/usr/lib/python3.11/concurrent/futures/thread.py", 83),
    ]
    samples = looks(
        {0: IN_BARRIER, 1: waits}, lambda rank, t: ProcState(state="S", threads=2, cpu_s=1.0, syscall=202)
    )
    for number, sample in enumerate(samples):
        process = sample.ranks[1].process
        assert process is not None
        process.threads.append(Thread("ThreadPoolExecutor", 7000 + number, frames=works, wanted_s=wanted_s))
    assert diagnose(samples).verdict.kind is kind


@pytest.mark.parametrize(("share", "kind"), [(0.9, Kind.HEALTHY), (0.1, Kind.NETWORK)])
def test_a_collective_whose_transport_works_is_not_stuck(share: float, kind: Kind) -> None:
    def counters(rank: int, t: float) -> ProcState:
        return ProcState(state="S", threads=3, cpu_s=1.0, transport_wanted_s=share * t)

    assert diagnose(looks({0: IN_BARRIER, 1: IN_BARRIER}, counters)).verdict.kind is kind


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_no_running_job_is_called_a_hang_in_two_hundred_dumps(
    tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    seed = random.SystemRandom().randrange(1 << 30)
    record_property("seed", seed)
    with ThreadPoolExecutor(AT_ONCE) as pool:
        answers = pool.map(lambda item: watch(tmp_path / item[1], item[1], seed + item[0]), enumerate(JOBS))
        said = [answer for job in answers for answer in job]
    record_property("dumps", len(said))
    assert len(said) >= 200
    assert len(Counter(job for job, _ in said)) >= 10
    wrong = [f"{job}: {text}" for job, text in said if text]
    assert not wrong, f"seed {seed}: {len(wrong)} of {len(said)}: {wrong}"
