"""Running jobs of many kinds are looked at over and over at random distances: none may be called a hang."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from ftdash.monitor.diagnosis import diagnose, live
from ftdash.monitor.diagnosis.kinds import Kind
from ftdash.monitor.diagnosis.processes import find_trainers
from tests.support import zoo

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
