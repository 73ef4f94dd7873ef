"""Of ranks that all wait: who went astray, by where their programs part; and whom a rank waits for itself."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest

from ftdash.monitor.diagnosis import diagnose
from ftdash.monitor.diagnosis.model import (
    Diagnosis,
    Frame,
    LogEvidence,
    LogFinding,
    LogKind,
    ProcessEvidence,
    ProcState,
    RankEvidence,
    Sample,
    Thread,
)

RETRY = """for go in range(3):
    try:
        reduce()
        break
    except OSError:
        log()
barrier()"""
DDP = "torch/nn/parallel/distributed.py"
TRAINER = "transformers/trainer.py"
C10D = "torch/distributed/distributed_c10d.py"
FUTURE = "/usr/lib/python3.11/concurrent/futures/_base.py"
READ, FUTEX = 0, 202


def rank(number: int, main: list[Frame], *others: list[Frame], syscall: int = FUTEX) -> RankEvidence:
    threads = [Thread(name="MainThread", frames=main)]
    threads += [Thread(name=f"thread-{n}", os_tid=n, frames=frames) for n, frames in enumerate(others, 1)]
    process = ProcessEvidence(
        pid=100 + number,
        rank=number,
        proc=ProcState(state="S", cpu_s=1.0, threads=1, syscall=syscall),
        threads=threads,
        source="py-spy",
    )
    return RankEvidence(rank=number, process=process)


def verdict_on(*ranks: RankEvidence, over: bool = False) -> Diagnosis:
    samples = [Sample(t=t, ranks=ranks, expected=frozenset(range(len(ranks))), over=over) for t in (0.0, 5.0)]
    return diagnose(samples)


def named(diagnosis: Diagnosis) -> set[int]:
    return {culprit.rank for culprit in diagnosis.verdict.culprits}


def in_call(op: str, script: Path, *places: tuple[str, int]) -> list[Frame]:
    """A stack in a collective, below the user's functions at their lines, innermost first."""
    return [Frame(op, C10D, 3000), *(Frame(name, str(script), line) for name, line in places)]


@pytest.mark.parametrize(
    ("body", "one", "two", "culprit"),
    [
        ("for x in data:\n    if bad(x):\n        break\n    reduce(x)\nbarrier()", 5, 6, 1),
        ("for x in data:\n    reduce(x)\nbarrier()", 3, 4, 1),
        ("for x in data:\n    gather(x)\n    if bad(x):\n        continue\n    reduce(x)", 3, 6, 0),
        ("try:\n    train()\nexcept ValueError:\n    log()\nbarrier()", 3, 6, 1),
        ("try:\n    train()\nexcept ValueError:\n    log()\n    raise\nbarrier()", 3, 7, 0),
        ("try:\n    train()\nexcept ValueError:\n    barrier()\nsave()", 3, 5, 1),
        ("reduce(x)\nbarrier()", 2, 3, 0),
        ("for x in data:\n    reduce(x)\n    if full():\n        barrier()", 3, 5, 1),
        ("for x in data:\n    if full():\n        reduce(x)\n    barrier()", 4, 5, 0),
        (RETRY, 4, 8, 0),
        ("for x in data:\n    reduce(x)\n    barrier()", 3, 4, 0),
    ],
)
def test_of_two_ranks_the_one_that_left_the_others_way_is_named(
    body: str, one: int, two: int, culprit: int, tmp_path: Path
) -> None:
    script = tmp_path / "job.py"
    script.write_text("def step():\n" + textwrap.indent(body, "    ") + "\n")
    behind = rank(0, in_call("all_reduce", script, ("step", one)))
    ahead = rank(1, in_call("barrier", script, ("step", two)))
    assert named(verdict_on(behind, ahead)) == {culprit}


def test_ranks_part_at_their_outermost_line_that_differs(tmp_path: Path) -> None:
    script = tmp_path / "job.py"
    script.write_text(
        "def sync(x):\n    reduce(x)\n\n"
        "def steps():\n    sync(1)\n    if rank == 1:\n        sync(2)\n    sync(3)\n"
    )
    one = rank(0, in_call("all_reduce", script, ("sync", 2), ("steps", 8)))
    two = rank(1, in_call("all_reduce", script, ("sync", 2), ("steps", 7)))
    diagnosis = verdict_on(one, two)
    assert named(diagnosis) == {1}
    assert f"called by steps ({script}:7)" in diagnosis.verdict.culprits[0].frame


@pytest.mark.parametrize(("owner", "culprit"), [("rank == owner", 3), ("step % 5 == 0", 2), ("spiky(x)", 3)])
def test_who_reaches_the_others_call_by_a_way_of_its_own_is_named(
    owner: str, culprit: int, tmp_path: Path
) -> None:
    script = tmp_path / "job.py"
    script.write_text(
        "def report(x):\n    reduce(x)\n\n"
        f"def steps():\n    if {owner}:\n        report(x)\n    norm(x, tensor_group)\n"
        "    if rank != owner:\n        report(x)\n"
    )
    usual = in_call("all_reduce", script, ("report", 2), ("steps", 9))
    ranks = [
        rank(0, usual),
        rank(1, usual),
        rank(2, in_call("all_reduce", script, ("steps", 7))),
        rank(3, in_call("all_reduce", script, ("report", 2), ("steps", 6))),
    ]
    assert named(verdict_on(*ranks)) == {culprit}


def test_a_rank_that_returned_early_from_a_function_left_the_other_in_it(tmp_path: Path) -> None:
    script = tmp_path / "job.py"
    script.write_text(
        "def sync(x):\n    if x is None:\n        return\n    reduce(x)\n\n"
        "def steps():\n    for x in data:\n        sync(x)\n        broadcast(x)\n"
    )
    inside = rank(0, in_call("all_reduce", script, ("sync", 4), ("steps", 8)))
    past = rank(1, in_call("barrier", script, ("steps", 9)))
    assert named(verdict_on(inside, past)) == {1}


def test_a_rank_is_judged_by_the_thread_that_its_library_waits_for() -> None:
    waits = [
        Frame("wait", "/usr/lib/python3.11/threading.py", 320),
        Frame("result", FUTURE, 450),
        Frame("score_all", "trl/trainer/grpo_trainer.py", 100),
        Frame("train", "/home/u/train.py", 30),
    ]
    reads = [
        Frame("readinto", "/usr/lib/python3.11/socket.py", 706),
        Frame("fetch", "/home/u/data.py", 12),
        Frame("_bootstrap", "/usr/lib/python3.11/threading.py", 1000),
    ]
    reduces = [Frame("all_reduce", C10D, 3000), Frame("train", "/home/u/train.py", 31)]
    verdict = verdict_on(rank(0, waits, reads), rank(1, reduces), rank(2, reduces)).verdict
    assert {culprit.rank for culprit in verdict.culprits} == {0}
    assert verdict.kind == "rank-outside-collective"
    assert "fetch (/home/u/data.py:12)" in verdict.culprits[0].frame


def test_a_collective_in_a_librarys_thread_is_where_the_rank_is() -> None:
    waits = [Frame("result", FUTURE, 450), Frame("train", "/home/u/train.py", 30)]
    gathers = [
        Frame("gather_object", C10D, 3000),
        Frame("save", "torch/distributed/checkpoint/state_dict_saver.py", 100),
        Frame("_bootstrap", "/usr/lib/python3.11/threading.py", 1000),
    ]
    opens = [Frame("write_data", "/home/u/writer.py", 9), *gathers[1:]]
    verdict = verdict_on(rank(0, waits, gathers), rank(1, waits, opens), rank(2, waits, gathers)).verdict
    assert {culprit.rank for culprit in verdict.culprits} == {1}
    assert "write_data (/home/u/writer.py:9)" in verdict.culprits[0].frame


@pytest.mark.parametrize(
    ("syscall", "kind"), [(READ, "rank-outside-collective"), (FUTEX, "collective-mismatch")]
)
def test_a_rank_in_a_call_on_a_file_is_in_no_collective(syscall: int, kind: str, tmp_path: Path) -> None:
    script = tmp_path / "job.py"
    script.write_text("def show(x):\n    print(x.tolist())\n    reduce(x)\n")
    prints = rank(0, [Frame("show", str(script), 2)], syscall=syscall)
    others = [rank(n, in_call("all_reduce", script, ("show", 3))) for n in (1, 2)]
    diagnosis = verdict_on(prints, *others)
    assert (diagnosis.verdict.kind, named(diagnosis)) == (kind, {0})


def test_most_ranks_at_a_key_of_the_store_wait_for_the_one_in_a_barrier(tmp_path: Path) -> None:
    script = tmp_path / "job.py"
    script.write_text("def share():\n    barrier()\n    store.set('k', 1)\n    store.get('k')\n")
    first = rank(0, in_call("barrier", script, ("share", 2)))
    others = [rank(n, [Frame("share", str(script), 4)], syscall=45) for n in (1, 2)]
    diagnosis = verdict_on(first, *others)
    assert (diagnosis.verdict.kind, named(diagnosis)) == ("store", {0})


def test_a_run_that_is_over_is_not_to_be_dumped() -> None:
    sleeps = rank(0, [Frame("score", "/home/u/train.py", 20)], syscall=230)
    others = [
        rank(n, [Frame("all_reduce", C10D, 3000), Frame("step", "/home/u/train.py", 9)]) for n in (1, 2)
    ]
    alive, dead = (verdict_on(sleeps, *others, over=over).verdict for over in (False, True))
    assert any("--pid 100" in step for step in alive.next)
    assert dead.culprits == alive.culprits
    assert dead.next
    assert not any("pid" in step or "kill" in step for step in dead.next)


def test_a_run_that_is_over_and_left_no_fault_says_so() -> None:
    assert "is over" in verdict_on(over=True).verdict.reason
    assert "is over" not in verdict_on().verdict.reason


def test_of_two_ranks_at_one_line_of_the_user_the_librarys_source_tells_who_left_its_loop(
    tmp_path: Path,
) -> None:
    library = tmp_path / "site-packages" / "trainer" / "loop.py"
    library.parent.mkdir(parents=True)
    library.write_text(
        "def train():\n    for x in data:\n        forward(x)\n"
        "        if stop:\n            break\n    log()\n"
    )
    user = Frame("main", "/home/u/job.py", 25)
    inside = rank(
        0, [Frame("broadcast", C10D, 9), Frame("forward", DDP, 1), Frame("train", str(library), 3), user]
    )
    past = rank(1, [Frame("all_gather", C10D, 9), Frame("train", str(library), 6), user])
    assert named(verdict_on(inside, past)) == {1}


def test_of_two_ranks_the_one_in_a_save_is_named_when_the_other_is_in_a_step() -> None:
    user = Frame("main", "/home/u/job.py", 25)
    saves = rank(0, [Frame("barrier", C10D, 9), Frame("_save_checkpoint", TRAINER, 7), user])
    steps = rank(1, [Frame("all_reduce", C10D, 9), Frame("forward", DDP, 1), user])
    diagnosis = verdict_on(saves, steps)
    assert (diagnosis.verdict.kind, named(diagnosis)) == ("save-on-one-rank", {0})


def test_a_rank_in_teardown_is_shown_with_the_line_that_raised_in_its_log() -> None:
    leaves = rank(1, [Frame("_shutdown", "/usr/lib/python3.11/threading.py", 1590)])
    waits = rank(0, [Frame("all_reduce", C10D, 9), Frame("main", "/home/u/job.py", 43)])
    raised = LogFinding(
        kind=LogKind.EXCEPTION,
        text="IndexError: index out of range",
        rank=1,
        frames=[Frame("embedding", "torch/nn/functional.py", 2), Frame("main", "/home/u/job.py", 42)],
    )
    samples = [
        Sample(t=t, ranks=(waits, leaves), expected=frozenset({0, 1}), logs=LogEvidence(findings=[raised]))
        for t in (0.0, 5.0)
    ]
    verdict = diagnose(samples).verdict
    assert verdict.kind == "teardown"
    assert verdict.culprits[0].frame.startswith("main (/home/u/job.py:42); now in _shutdown")
    assert "IndexError" in verdict.culprits[0].why


LOST_IN_A_TRY = """def step(x):
    try:
        backward(x)
    except RuntimeError:
        return None

def main():
    for x in data:
        step(x)
        reduce(x)"""
FEWER_TURNS = """def push(shards):
    for shard in shards:
        reduce(shard)

def main():
    while True:
        push(mine)
        broadcast(weights)"""
NEXT_EPOCH = """def epoch(e):
    broadcast(seed)
    for x in loader:
        model(x).backward()

def main():
    for e in range(5):
        epoch(e)"""
ENGINE = [Frame("_engine_run_backward", "torch/autograd/graph.py", 979)]


@pytest.mark.parametrize(
    ("body", "inside", "other"),
    [
        (LOST_IN_A_TRY, [("step", 3), ("main", 9)], [("main", 10)]),
        (FEWER_TURNS, [("push", 3), ("main", 7)], [("main", 8)]),
    ],
)
def test_who_left_a_call_without_what_the_other_waits_in_there_is_named(
    body: str, inside: list[tuple[str, int]], other: list[tuple[str, int]], tmp_path: Path
) -> None:
    script = tmp_path / "job.py"
    script.write_text(body)
    ranks = rank(0, in_call("all_reduce", script, *inside)), rank(1, in_call("broadcast", script, *other))
    assert named(verdict_on(*ranks)) == {1}


def test_a_rank_at_the_start_of_the_next_epoch_is_named_not_the_one_in_a_known_phase(tmp_path: Path) -> None:
    script = tmp_path / "job.py"
    script.write_text(NEXT_EPOCH)
    again = rank(0, in_call("broadcast", script, ("epoch", 2), ("main", 8)))
    inside = rank(1, [*ENGINE, Frame("epoch", str(script), 4), Frame("main", str(script), 8)])
    assert named(verdict_on(again, inside)) == {0}


@pytest.mark.parametrize(("guard", "culprit"), [("", 1), ("if retry:\n            ", 0)])
def test_a_rank_past_the_backward_that_another_communicates_in_left_that_call_out(
    guard: str, culprit: int, tmp_path: Path
) -> None:
    """A rank whose experts had no token has no exchange in its graph; not so where the backward is extra."""
    script = tmp_path / "job.py"
    script.write_text(
        "class Exchange:\n    def backward(ctx, grad):\n        all_to_all(grad)\n\n"
        f"def main():\n    for x in data:\n        {guard}loss(x).backward()\n        reduce(x)\n"
    )
    line = 8 if guard else 7
    exchange = [Frame("all_to_all_single", C10D, 5140), Frame("Exchange.backward", str(script), 3)]
    inside = rank(0, [*exchange, *ENGINE, Frame("main", str(script), line)])
    past = rank(1, in_call("all_reduce", script, ("main", line + 1)))
    assert named(verdict_on(inside, past)) == {culprit}


GENERATED = """def batches():
    for name in files:
        if broken(name):
            gather(name)
        yield load(name)

def main():
    for x in batches():
        reduce(x)"""


def test_a_call_under_a_condition_of_a_loop_is_an_extra_one_not_a_turn_that_the_other_left(
    tmp_path: Path,
) -> None:
    script = tmp_path / "job.py"
    script.write_text(GENERATED)
    extra = rank(0, in_call("all_gather", script, ("batches", 4), ("main", 8)))
    usual = rank(1, in_call("all_reduce", script, ("main", 9)))
    assert named(verdict_on(extra, usual)) == {0}


CROSSWISE = """def flush(self):
    with self.index:
        with self.cache:
            write()

def read(self):
    with self.cache, self.index:
        look_up()

def main(self):
    x = self.queue.get()
    reduce(x)"""


@pytest.mark.parametrize("waits_in", ["queue", "lock"])
def test_threads_that_took_two_locks_crosswise_are_both_named(waits_in: str, tmp_path: Path) -> None:
    script = tmp_path / "job.py"
    script.write_text(CROSSWISE)
    started = [Frame("_bootstrap", "/usr/lib/python3.11/threading.py", 1000)]
    flushes, reads = (
        [Frame(name, str(script), line), *started] for name, line in (("flush", 3), ("read", 7))
    )
    in_queue = [
        Frame("wait", "/usr/lib/python3.11/threading.py", 320),
        Frame("get", "/usr/lib/python3.11/queue.py", 171),
        Frame("main", str(script), 11),
    ]
    held = rank(0, in_queue, flushes, reads) if waits_in == "queue" else rank(0, reads[:1], flushes)
    others = [rank(n, in_call("all_reduce", script, ("main", 12))) for n in (1, 2)]
    verdict = verdict_on(held, *others).verdict
    assert (verdict.kind, {culprit.rank for culprit in verdict.culprits}) == ("lock", {0})
    assert f"flush ({script}:3)" in verdict.culprits[0].frame
    assert f"read ({script}:7)" in verdict.culprits[0].frame


@pytest.mark.parametrize(("asked", "culprit"), [("clock() - self.last > 30", 0), ("step % 50 == 0", 1)])
def test_an_extra_call_which_one_rank_was_led_to_by_its_data_is_named(
    asked: str, culprit: int, tmp_path: Path
) -> None:
    script = tmp_path / "job.py"
    script.write_text(
        f"def tick(self):\n    if {asked}:\n        self.total()\n\ndef total(self):\n    reduce(self.x)\n\n"
        "def main():\n    for x in data:\n        gather(x)\n        log.tick()\n"
    )
    extra = rank(0, in_call("all_reduce", script, ("total", 6), ("tick", 3), ("main", 11)))
    usual = rank(1, in_call("all_gather", script, ("main", 10)))
    assert named(verdict_on(extra, usual)) == {culprit}


ZERO = "deepspeed/runtime/zero/stage3.py"


@pytest.mark.parametrize("reducing", [{1}, {0, 2}])
def test_of_ranks_without_tokens_for_an_expert_the_few_are_named(reducing: set[int]) -> None:
    """A rank without tokens makes fewer calls: it is ahead in the reduction, or past the others'."""
    user = Frame("main", "/home/u/job.py", 25)
    reduces = [Frame("reduce_scatter_fn", "deepspeed/comm/comm.py", 9), Frame("__avg_scatter_grads", ZERO, 7)]
    gathers = [Frame("all_gather_into_tensor", C10D, 9), Frame("fetch_sub_module", ZERO, 5)]
    ranks = [rank(n, [*(reduces if n in reducing else gathers), *ENGINE, user]) for n in range(3)]
    diagnosis = verdict_on(*ranks)
    assert (diagnosis.verdict.kind, named(diagnosis)) == ("collective-mismatch", {1})


def test_a_rank_that_joins_its_forked_child_waits_for_no_thread_of_its_own() -> None:
    """A child forked while a thread held a lock: the lock's holder does not exist in it."""
    joining = [
        Frame("Popen.wait", "multiprocessing/popen_fork.py", 43),
        Frame("BaseProcess.join", "multiprocessing/process.py", 149),
        Frame("settle", "/home/me/snapshot.py", 27),
    ]
    writer = [Frame("wait", "threading.py", 320), Frame("write", "/home/me/ledger.py", 26)]
    held = rank(2, joining, writer)
    assert held.process is not None
    locked = [Frame("__enter__", "threading.py", 100), Frame("total", "/home/me/ledger.py", 29)]
    held.process.children.append(
        ProcessEvidence(
            pid=900,
            proc=ProcState(state="S", syscall=FUTEX),
            threads=[Thread("MainThread", 1, frames=locked)],
        )
    )
    reducing = [Frame("all_reduce", C10D, 3000), Frame("step", "/home/me/run.py", 21)]
    verdict = verdict_on(rank(0, reducing), rank(1, reducing), held).verdict
    assert (verdict.kind, [culprit.rank for culprit in verdict.culprits]) == ("lock", [2])
    assert (
        verdict.culprits[0].why
        == "its worker waits for a lock or a thread that does not exist after the fork"
    )
    assert "settle (/home/me/snapshot.py:27); worker 900: total" in verdict.culprits[0].frame
