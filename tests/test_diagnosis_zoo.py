"""Real hangs and near-hangs of gloo ranks: who is named, as what, at which line; and who is left in peace."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

from ftdash.monitor.diagnosis import diagnose, live
from ftdash.monitor.diagnosis.model import Diagnosis
from tests.support import zoo

INTERVAL_S = 1.5  # between the samples; the command takes 5 s
AT_ONCE = 4  # most of a case is waiting


@dataclass(frozen=True)
class Case:
    name: str
    kinds: str
    culprits: frozenset[int] = frozenset()
    script: str = "hangs.py"
    ranks: int = 3
    world: int | None = None
    named: bool = True  # the case marks the lines that a culprit's frame must show
    quick: bool = False


def hang(name: str, kinds: str, *culprits: int, **more: object) -> Case:
    return Case(name, kinds, frozenset(culprits), **more)  # type: ignore[arg-type]


def library(name: str, kinds: str, *culprits: int, **more: object) -> Case:
    return hang(name, kinds, *culprits, script="libraries.py", **more)


def field(name: str, kinds: str, *culprits: int, **more: object) -> Case:
    return hang(name, kinds, *culprits, script="field.py", **more)


def apart(name: str, kinds: str, *culprits: int, **more: object) -> Case:
    return hang(name, kinds, *culprits, script="apart.py", **more)


def calm(name: str, kinds: str, ranks: int = 2, **more: object) -> Case:
    return Case(name, kinds, script="near_hangs.py", ranks=ranks, named=False, **more)  # type: ignore[arg-type]


CASES = [
    hang("reward_sleeps", "rank-outside-collective", 1, quick=True),
    hang("spins", "rank-outside-collective", 1),
    hang("polls_a_file", "rank-outside-collective", 0),
    hang("loader_worker_stuck", "data-loader", 1, ranks=2),
    hang("lock_across_fork", "lock", 1, ranks=2),
    hang("lock_held", "lock", 2),
    hang("queue_never_filled", "rank-outside-collective", 0),
    hang("child_process_never_ends", "rank-outside-collective", 0),
    hang("reads_standard_input", "rank-outside-collective", 1),
    hang("other_collective", "collective-mismatch", 2, quick=True),
    hang("other_order", "order-mismatch", 1),
    hang("other_group", "order-mismatch", 1),
    hang("one_in_barrier", "collective-mismatch", 0),
    hang("early_break", "collective-mismatch", 1),
    hang("uneven_batches", "phase-mismatch", 2),
    hang("out_of_memory_retried", "collective-mismatch", 1),
    hang("reward_gathers", "collective-mismatch phase-mismatch", 0),
    hang("async_receive", "collective-mismatch", 1),
    hang("store_key_never_set", "store", 1),
    hang("stopped", "stopped-rank", 1, quick=True),
    hang("uninterruptible", "d-state", 0),
    hang("killed", "dead-rank", 1, named=False),
    hang("teardown_after_exception", "teardown", 1),
    hang("joins_thread_at_exit", "teardown", 1, named=False),
    hang("evaluates_on_main_only", "eval-on-one-rank", 0),
    hang("never_started", "rendezvous", 2, ranks=2, world=3, named=False),
    hang("all_equal", "network-or-hardware", named=False),
    library("fsdp2_save_under_is_main", "save-on-one-rank", 0, ranks=2),
    library("fsdp2_conditional_submodule", "collective-mismatch", 1),
    library("zero3_save_under_is_main", "save-on-one-rank", 0, ranks=2),
    library("zero3_expert_without_tokens", "collective-mismatch", 1),
    library("accelerate_evaluates_on_main_only", "eval-on-one-rank", 0, ranks=2),
    library("accelerate_waits_for_a_rank_that_broke_out", "phase-mismatch", 2),
    field("subgroup_on_some", "collective-mismatch", 2),
    field("map_workers_deadlock", "lock data-loader", 0),
    field("load_with_file_lock", "lock", 1),
    field("generate_on_server_that_refuses", "rank-outside-collective external-peer", 0),
    field("load_polls_in_a_helper", "rank-outside-collective", 2),
    field("producer_thread_died", "rank-outside-collective", 1),
    field("collectives_in_a_thread", "rank-outside-collective", 1),
    field("both_receive_first", "order-mismatch", 0, 1),
    field("left_in_the_debugger", "rank-outside-collective", 1),
    field("tells_the_others_through_the_store", "rank-outside-collective store", 0),
    apart("pool_reads_dead_storage", "rank-outside-collective storage", 1),
    apart("helpers_of_two", "collective-mismatch", 1, ranks=2),
    apart("skips_an_overflowed_step", "collective-mismatch", 1, ranks=2),
    apart("swallows_a_bad_batch", "collective-mismatch", 0, ranks=2),
    apart("one_has_fewer_batches", "collective-mismatch", 1, ranks=2),
    apart("stage_sends_nothing", "collective-mismatch", 1, ranks=4),
    apart("logger_thread_holds_its_lock", "lock", 1),
    apart("stale_build_lock", "lock", 0),
    apart("loader_worker_stopped", "data-loader", 1),
    apart("reads_a_pipe_into_a_tensor", "rank-outside-collective", 1),
    apart("two_hang_apart", "lock rank-outside-collective", 1, 4, ranks=6),
    apart("one_stuck_beside_one_slow", "lock rank-outside-collective", 2, ranks=4),
    apart("group_member_skips", "collective-mismatch", 3, ranks=4),
    apart("evaluates_with_fewer_batches", "phase-mismatch", 3, ranks=4),
    calm("slow_preprocessing", "slow"),
    calm("slow_map", "slow"),
    calm("slow_save", "slow", quick=True),
    calm("slow_torch_save", "slow"),
    calm("long_evaluation", "slow"),
    calm("long_compute_on_one", "slow"),
    calm("slow_loading", "slow"),
    calm("generates_on_one", "slow"),
    calm("compiles", "slow"),
    calm("waits_for_slow_loader", "slow healthy"),
    calm("works_through_a_queue", "slow"),
    calm("counts_in_python", "slow"),
    calm("waits_for_a_compiler", "slow"),
    calm("receives_slowly", "slow"),
    calm("awaits_one_score_after_another", "slow"),
    calm("thread_computes", "slow"),
    calm("uploads_in_a_pool", "slow"),
    calm("accumulates_gradients", "slow healthy"),
    calm("trains", "healthy", quick=True),
    calm("trains_unevenly", "healthy slow"),
]


def _look(case: Case, folder: Path) -> Diagnosis:
    folder.mkdir()
    settle = case.script != "near_hangs.py"
    with zoo.job(folder, case.script, case.name, case.ranks, world=case.world, settle=settle) as pids:
        return diagnose(live.sample_processes(pids, interval_s=INTERVAL_S))


@pytest.fixture(scope="module")
def looks(request, tmp_path_factory) -> Iterator[dict[str, Future[Diagnosis]]]:
    """The diagnoses of all selected cases, made some at a time."""
    root = tmp_path_factory.mktemp("zoo")
    wanted = {
        item.callspec.params["case"].name: item.callspec.params["case"]
        for item in request.session.items
        if item.fspath == request.fspath and hasattr(item, "callspec") and "case" in item.callspec.params
    }
    with ThreadPoolExecutor(AT_ONCE) as pool:
        yield {name: pool.submit(_look, case, root / name) for name, case in wanted.items()}


def _parameters() -> list[object]:
    return [pytest.param(case, id=case.name, marks=() if case.quick else pytest.mark.slow) for case in CASES]


@pytest.mark.timeout(1200)
@pytest.mark.xdist_group("hang-zoo")
@pytest.mark.parametrize("case", _parameters())
def test_verdict_on_live_ranks(case, looks):
    verdict = looks[case.name].result().verdict
    told = f"{verdict.kind}: {verdict.reason} {verdict.evidence}"
    assert {culprit.rank for culprit in verdict.culprits} == case.culprits, told
    assert verdict.kind in case.kinds.split(), told
    if case.named:
        marked = zoo.named_lines(case.script, case.name)
        for culprit in verdict.culprits:
            shown = {int(line) for line in re.findall(re.escape(case.script) + r":(\d+)", culprit.frame)}
            assert marked & shown, culprit.frame


@pytest.mark.slow
def test_launcher_that_waits_for_another_node_is_a_rendezvous(tmp_path):
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "2"),
        *("--node-rank", "0", "--rdzv-backend", "c10d", "--rdzv-endpoint", f"localhost:{zoo.free_port()}"),
        str(zoo.ZOO / "hangs.py"),
        "all_equal",
    ]
    process = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    )
    try:
        verdict = zoo.eventually(
            lambda: diagnose(live.sample_processes([process.pid], interval_s=0.2)).verdict,
            lambda verdict: verdict.kind == "rendezvous",
        )
    finally:
        os.killpg(process.pid, 9)
        process.wait()
    assert verdict.kind == "rendezvous", verdict.reason
    assert {culprit.rank for culprit in verdict.culprits} == {2, 3}


@pytest.mark.slow
def test_ranks_are_found_below_shell_and_launcher(tmp_path):
    environ = {**os.environ, "ZOO_DIR": str(tmp_path), "OMP_NUM_THREADS": "1"}
    launcher = f"{sys.executable} -m torch.distributed.run --standalone --nproc-per-node 2"
    command = ["bash", "-c", f"{launcher} {zoo.ZOO / 'hangs.py'} reward_sleeps & wait"]
    process = subprocess.Popen(
        command, env=environ, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    )
    try:
        zoo.eventually(
            lambda: sorted(p.name for p in tmp_path.glob("ready-*")), lambda found: len(found) == 2
        )
        sample = live.sample_processes([process.pid], interval_s=0.5)[-1]
    finally:
        # stopped first, the launcher cannot end its ranks while they are being ended here
        for pid in [process.pid, *live.procfs.descendants(process.pid)]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGSTOP)
        for pid in [*live.procfs.descendants(process.pid), process.pid]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait()
    assert [evidence.rank for evidence in sample.ranks] == [0, 1]
    assert sample.world_size == 2
    for evidence in sample.ranks:
        assert evidence.process.threads, evidence.process.failure_text
