"""Ranks in several process groups: the flight recorder tells who is missing where, stacks who waits."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from ftdash.monitor.diagnosis import diagnose
from ftdash.monitor.diagnosis.flight import read_dump
from ftdash.monitor.diagnosis.model import (
    FlightDump,
    Frame,
    ProcessEvidence,
    ProcState,
    RankEvidence,
    Sample,
    Thread,
    Verdict,
)

C10D = "torch/distributed/distributed_c10d.py"
SITE = "/env/lib/python3.11/site-packages/"
BACKWARD = Frame("_engine_run_backward", "torch/autograd/graph.py", 979)
JOB = "/home/me/stages.py"
MAIN, WORKER, ENGINE = "1", "2", "pt_autograd_0"
Call = tuple[str, int, str, str]  # group, sequence, operation, thread


def rank(number: int, *threads: list[Frame]) -> RankEvidence:
    named = [
        Thread("MainThread" if n == 0 else f"metrics_{n}", 10 * number + n, frames=frames)
        for n, frames in enumerate(threads)
    ]
    state = ProcState(state="S", cpu_s=1.0, threads=1, syscall=202)
    process = ProcessEvidence(pid=100 + number, rank=number, proc=state, threads=named, source="py-spy")
    return RankEvidence(rank=number, process=process)


def recorder(number: int, done: list[Call], held: list[Call]) -> FlightDump:
    """What gloo records: no members, the state scheduled also of calls that have ended."""
    entries = [
        {
            "process_group": [group, "default_pg" if group == "0" else "undefined"],
            "collective_seq_id": seq,
            "profiling_name": f"gloo:{op}",
            "input_sizes": [[4]],
            "output_sizes": [[4]],
            "state": "scheduled",
            "retired": position < len(done),
            "is_p2p": False,
            "time_created_ns": 1000 + position,
            "thread_id": "7" if thread == ENGINE else thread,
            "thread_name": thread if thread == ENGINE else "python",
        }
        for position, (group, seq, op, thread) in enumerate([*done, *held])
    ]
    return read_dump({"entries": entries, "pg_config": {"": {"ranks": "[]"}}}, number)


def verdict_on(ranks: list[RankEvidence], dumps: list[FlightDump]) -> Verdict:
    expected = frozenset(range(len(ranks)))
    looks = [
        Sample(t=t, ranks=tuple(ranks), expected=expected, world_size=len(ranks), flight=tuple(dumps))
        for t in (0.0, 5.0)
    ]
    return diagnose(looks).verdict


def in_call(op: str, *own: tuple[str, int], full: bool = False) -> list[Frame]:
    """A collective below the user's lines, with library files as old or new py-spy prints them."""
    return [Frame(op, f"{SITE if full else ''}{C10D}", 3000), *(Frame(name, JOB, line) for name, line in own)]


@pytest.mark.parametrize("full", [False, True], ids=["short files", "full files"])
def test_of_two_ranks_in_one_line_the_one_in_another_group_is_named(full: bool) -> None:
    """Two stages: rank 3 reduces over the world where rank 2 waits for it in their stage's group."""
    stacks = [in_call("barrier", ("meet", 22), ("train", 31), full=full)] * 2
    stacks += [in_call("all_reduce", ("clip", 37), ("train", 27), full=full)] * 2
    done = [[("0", 1, "barrier", MAIN), (group, 5, "all_reduce", MAIN)] for group in ("1", "1", "2", "2")]
    held: list[Call] = [("0", 2, "barrier", MAIN)] * 2
    held += [("2", 6, "all_reduce", MAIN), ("0", 2, "all_reduce", MAIN)]
    dumps = [recorder(number, done[number], [held[number]]) for number in range(4)]
    ranks = [rank(number, stack) for number, stack in enumerate(stacks)]
    assert {culprit.rank for culprit in verdict_on(ranks, []).culprits} != {3}  # stacks cannot tell
    verdict = verdict_on(ranks, dumps)
    assert [(culprit.rank, culprit.frame) for culprit in verdict.culprits] == [(3, f"clip ({JOB}:37)")]
    assert verdict.kind == "collective-mismatch"
    assert "rank 2 waits" in verdict.culprits[0].why
    assert "wrong process group" in verdict.culprits[0].why


def test_two_ranks_at_odds_in_one_group_are_told_apart_by_their_stacks(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("for x in data:\n    reduce(x)\nbarrier()\n")
    ranks = [
        rank(0, [Frame("all_reduce", C10D, 3000), Frame("<module>", str(script), 2)]),
        rank(1, [Frame("barrier", C10D, 5000), Frame("<module>", str(script), 3)]),
    ]
    dumps = [
        recorder(0, [("0", 1, "all_reduce", MAIN)], [("0", 2, "all_reduce", MAIN)]),
        recorder(1, [("0", 1, "all_reduce", MAIN)], [("0", 2, "barrier", MAIN)]),
    ]
    alone, both = verdict_on(ranks, []), verdict_on(ranks, dumps)
    assert {culprit.rank for culprit in alone.culprits} == {culprit.rank for culprit in both.culprits} == {1}
    assert both.confidence > alone.confidence
    assert not both.against


@pytest.mark.parametrize("full", [False, True], ids=["short files", "full files"])
def test_a_thread_that_never_gathers_is_found_behind_the_rank_that_waits_for_its_own(full: bool) -> None:
    """Rank 0 waits for its thread, which waits in a group of its own for the thread of rank 1: that idles."""
    futures = f"{'/usr/lib/python3.11/' if full else ''}concurrent/futures/_base.py"
    waits = [Frame("Future.result", futures, 451), Frame("flush", JOB, 26), Frame("main", JOB, 47)]
    gathers = in_call("all_gather", ("collect", 19), full=full)
    steps = [BACKWARD, Frame("main", JOB, 39)]
    ranks = [rank(0, waits, gathers), rank(1, steps), rank(2, steps, gathers)]
    done: list[Call] = [("0", 18, "all_reduce", ENGINE), ("0", 17, "broadcast", MAIN)]
    done += [("1", 24, "all_gather", WORKER)]
    reduces, collects = ("0", 19, "all_reduce", ENGINE), ("1", 25, "all_gather", WORKER)
    dumps = [
        recorder(0, [done[1], done[0], done[2]], [collects]),
        recorder(1, [done[1], done[0], done[2]], [reduces]),
        recorder(2, [done[1], done[0], done[2]], [collects, reduces]),
    ]
    verdict = verdict_on(ranks, dumps)
    assert [culprit.rank for culprit in verdict.culprits] == [1]
    assert verdict.kind == "rank-missing"
    assert verdict.culprits[0].frame == f"main ({JOB}:39); the others are at collect ({JOB}:19)"


@pytest.mark.parametrize("full", [False, True], ids=["short files", "full files"])
def test_two_threads_of_each_rank_in_collectives_at_once_are_told(full: bool) -> None:
    """An asynchronous checkpoint beside a barrier, all ranks alike: nobody differs, and it is no network."""
    prefix = SITE if full else ""
    saves = [
        Frame("all_gather", f"{prefix}{C10D}", 4287),
        Frame("gather_object", f"{prefix}{C10D}", 3631),
        Frame("_save_state_dict", f"{prefix}torch/distributed/checkpoint/state_dict_saver.py", 487),
        Frame("save_wrapper", f"{prefix}torch/distributed/checkpoint/_async_thread_executor.py", 30),
        Frame("_worker", "/usr/lib/python3.11/concurrent/futures/thread.py", 83),
        Frame("Thread.run", "/usr/lib/python3.11/threading.py", 982),
    ]
    stack = in_call("barrier", ("save", 24), ("main", 52), full=full)
    verdict = verdict_on([rank(number, stack, saves) for number in range(2)], [])
    assert verdict.kind == "order-mismatch"
    assert {culprit.rank for culprit in verdict.culprits} == {0, 1}
    assert f"save ({JOB}:24)" in verdict.culprits[0].frame
    assert "metrics_1" in verdict.culprits[0].why
    assert "new_group" in verdict.fix


def test_a_rank_past_a_call_that_a_library_makes_for_the_others_is_shown_their_line() -> None:
    """A reward function that returns early on one rank: its own line is only the trainer's start."""
    trainer = [Frame("_calculate_rewards", "trl/trainer/grpo_trainer.py", 1626), Frame("main", JOB, 27)]
    inside = [*in_call("all_reduce", ("reward", 23)), *trainer]
    past = [Frame("all_gather", C10D, 4287), Frame("gather", "accelerate/utils/operations.py", 439), *trainer]
    verdict = verdict_on([rank(0, inside), rank(1, inside), rank(2, past)], [])
    assert [culprit.rank for culprit in verdict.culprits] == [2]
    assert verdict.culprits[0].frame.startswith(f"main ({JOB}:27)")
    assert f"reward ({JOB}:23)" in verdict.culprits[0].frame


def test_a_recorder_without_calls_is_no_absent_one() -> None:
    """Torch leaves the list of entries out where a rank has made no call yet."""
    told = {
        "comm_lib_version": "",
        "nccl_comm_state": {},
        "pg_config": {},
        "pg_status": {},
        "version": "2.10",
    }
    assert read_dump(told, 0).entries == []


def test_a_recorder_that_does_not_answer_says_nothing_of_a_rank_whose_stack_was_read() -> None:
    stacks = [in_call("all_reduce", ("main", 5)), in_call("all_reduce", ("main", 5))]
    ranks = [rank(number, stack) for number, stack in enumerate(stacks)]
    verdict = verdict_on(ranks, [recorder(0, [], [("0", 1, "all_reduce", MAIN)])])
    assert (verdict.kind, verdict.culprits) == ("network-or-hardware", ())
    assert not any("no-dump" in text for text in verdict.evidence)


LAZY_GROUP = """class Exporter:
    def group(self, ranks):
        if self._group is None:
            self._group = dist.new_group(ranks=ranks)
        return self._group

    def collect(self):
        ranks = [0, 1]
        if dist.get_rank() not in ranks:
            return None
        dist.all_gather(parts, scales, group=self.group(ranks))

def main():
    exporter.collect()
    dist.new_group()"""
EARLY_RETURN = """def head(rank):
    if rank != 0:
        return None
    return dist.new_group([0])

def main():
    head(rank)
    dist.new_group()"""


@pytest.mark.parametrize(
    ("body", "line", "odd", "did"),
    [(LAZY_GROUP, 15, {2}, "has not made"), (EARLY_RETURN, 8, {0}, "has made")],
)
def test_a_group_made_by_some_ranks_is_found_behind_a_call_that_only_they_make(
    body: str, line: int, odd: set[int], did: str, tmp_path: Path
) -> None:
    script = tmp_path / "export.py"
    script.write_text(body)
    making = [Frame("_new_process_group_helper", C10D, 2100), Frame("new_group", C10D, 5500)]
    stack = [*making, Frame("main", str(script), line)]
    verdict = verdict_on([rank(number, stack) for number in range(3)], [])
    assert {culprit.rank for culprit in verdict.culprits} == odd
    assert did in verdict.culprits[0].why


@pytest.mark.parametrize("traced", [False, True], ids=["calls alone", "with their lines"])
@pytest.mark.parametrize("full", [False, True], ids=["short files", "full files"])
def test_a_call_in_another_group_than_ever_before_is_named(full: bool, traced: bool) -> None:
    """Rows {0, 1}, {2, 3} and columns {0, 2}, {1, 3}: rank 1 reduces in its row, then nobody gets on."""
    reduce, alive = (("sync", 35), ("step", 42)), (("step", 46),)
    stacks = [in_call("all_reduce", *own, full=full) for own in (alive, reduce, alive, reduce)]
    rows, columns = ("1", "1", "2", "2"), ("3", "4", "3", "4")
    dumps = []
    for number in range(4):
        steps: list[Call] = []
        own: list[tuple[tuple[str, int], ...]] = []
        for seq in range(1, 5):
            steps += [
                (rows[number], seq, "all_gather", MAIN),
                (columns[number], seq, "all_reduce", MAIN),
                ("0", seq, "all_reduce", MAIN),
            ]
            own += [(("forward", 21),), reduce, alive]
        if number in (1, 3):  # hold their reduction, rank 1 in its row
            del steps[-1], own[-1]
        if number == 1:
            steps[-1] = (rows[1], 5, "all_reduce", MAIN)
        dump = recorder(number, steps[:-1], steps[-1:])
        entries = [
            msgspec.structs.replace(
                entry,
                frames=tuple(in_call(entry.op, *lines, full=full)) if traced else (),
                input_sizes=((1,),) if lines is alive else ((8, 16),),
            )
            for entry, lines in zip(dump.entries, own, strict=True)
        ]
        dumps.append(msgspec.structs.replace(dump, entries=entries))
    verdict = verdict_on([rank(number, stack) for number, stack in enumerate(stacks)], dumps)
    assert [(culprit.rank, culprit.frame) for culprit in verdict.culprits] == [(1, f"sync ({JOB}:35)")]
    assert verdict.kind == "collective-mismatch"
    assert "wrong process group; rank 3 waits for its call in group 4" in verdict.culprits[0].why
