"""Flight recorder dumps: read safely, aligned by group and sequence, in agreement with PyTorch's analyser."""

from __future__ import annotations

import argparse
import copy
import os
import pickle

import pytest

from ftdash.monitor.diagnosis import diagnose
from ftdash.monitor.diagnosis.align import Fault, align
from ftdash.monitor.diagnosis.flight import FlightError, load_plain_pickle, read_dump, read_flight
from ftdash.monitor.diagnosis.model import Sample
from tests.diagnosis import flightdumps as made


def verdict_of(folder):
    dumps, notices = read_flight(folder)
    return diagnose([Sample(flight=tuple(dumps), notices=tuple(notices))]).verdict


def ranks_of(verdict):
    return {culprit.rank for culprit in verdict.culprits}


@pytest.mark.parametrize("as_json", [False, True], ids=["pickle", "json"])
@pytest.mark.parametrize("naming", made.NAMINGS)
def test_missing_rank_is_named_whatever_the_files_are_called(naming, as_json, tmp_path):
    made.write(tmp_path, made.missing(4, 2), naming, as_json)
    verdict = verdict_of(tmp_path)
    assert (verdict.kind, ranks_of(verdict)) == ("rank-missing", {2})
    assert verdict.culprits[0].frame == "train (/home/user/train.py:15)"
    if naming == "host in the name":
        assert verdict.culprits[0].host == "container-node01"


@pytest.mark.parametrize(
    ("dumps", "kind", "culprits"),
    [
        (made.other_type(4, 1), "collective-mismatch", {1}),
        (made.other_size(4, 3), "size-mismatch", {3}),
        (made.equal(4), "network-or-hardware", set()),
        (made.missing(2, 1), "rank-missing", {1}),
    ],
)
def test_what_differs_is_told_apart(dumps, kind, culprits, tmp_path):
    made.write(tmp_path, dumps)
    verdict = verdict_of(tmp_path)
    assert (verdict.kind, ranks_of(verdict)) == (kind, culprits)


def test_rank_without_a_dump_is_the_suspect_when_all_others_agree(tmp_path):
    dumps = made.equal(4)
    del dumps[3]
    made.write(tmp_path, dumps)
    verdict = verdict_of(tmp_path)
    assert (verdict.kind, ranks_of(verdict)) == ("undumpable", {3})
    assert verdict.confidence < 0.8


def test_a_mismatch_weighs_more_than_an_absent_dump(tmp_path):
    dumps = made.missing(4, 1)
    del dumps[3]
    made.write(tmp_path, dumps)
    assert ranks_of(verdict_of(tmp_path)) == {1}


def test_ring_buffers_that_start_at_different_numbers_are_aligned(tmp_path):
    dumps = made.missing(4, 2)
    dumps[0]["entries"] = dumps[0]["entries"][3:]
    dumps[3]["entries"] = dumps[3]["entries"][2:]
    made.write(tmp_path, dumps)
    assert ranks_of(verdict_of(tmp_path)) == {2}


def test_rank_that_recorded_nothing_is_missing(tmp_path):
    dumps = made.equal(3)
    dumps[1]["entries"] = []
    made.write(tmp_path, dumps)
    verdict = verdict_of(tmp_path)
    assert (verdict.kind, ranks_of(verdict)) == ("rank-missing", {1})


def test_blame_passes_along_the_groups_to_the_front_of_the_wave():
    """Rank 1 is missing in the world group because it waits in the pair group for rank 2."""
    world, pair = ("default_pg", [0, 1, 2]), ("pair", [1, 2])
    groups = {"0": world, "1": pair}
    waits_world = made.entry(1, 2, made.REDUCE, done=False)
    waits_pair = made.entry(1, 1, made.REDUCE, group="1", desc="pair", done=False)
    first = made.entry(0, 1, made.REDUCE)
    values = {0: [first, waits_world], 1: [first, waits_pair], 2: [first]}
    dumps = [read_dump(made.dump(entries, groups), rank) for rank, entries in values.items()]
    found = align(dumps)
    assert found.fault is Fault.MISSING
    assert found.culprits == {2}
    assert any("rank 1" in text for text in found.chain)


def test_dumps_of_gloo_say_neither_members_nor_state():
    dumps = []
    for rank, value in made.missing(3, 1).items():
        value["pg_config"] = {"": {"name": "", "desc": "", "ranks": "[]"}}
        for item in value["entries"]:
            item["profiling_name"] = item["profiling_name"].replace("nccl:", "gloo:")
            item["state"] = "scheduled"
        dumps.append(read_dump(value, rank))
    found = align(dumps)
    assert (found.fault, found.culprits) == (Fault.MISSING, {1})


def test_two_calls_in_another_order_are_an_order_mismatch():
    def calls(rank, seq):
        pair = (made.GATHER, made.REDUCE) if rank == 1 else (made.REDUCE, made.GATHER)
        return pair[seq - 5] if seq >= 5 else made.usual(rank, seq)

    dumps = [read_dump(value, rank) for rank, value in made.world(4, calls).items()]
    found = align(dumps)
    assert found.fault is Fault.ORDER
    assert found.culprits == {1}


@pytest.mark.parametrize(
    ("value", "culprits", "kind"),
    [
        (made.missing(4, 2), {2}, "missing"),
        (made.missing(3, 1), {1}, "missing"),
        (made.other_type(4, 2), {2}, "COLLECTIVE_TYPE_MISMATCH"),
        (made.other_size(4, 1), {1}, "SIZE_OR_SYNTAX_MISMATCH"),
    ],
)
def test_pytorchs_own_analyser_agrees(value, culprits, kind):
    from torch.distributed.flight_recorder.components.builder import build_db

    details = {
        f"rank{rank}": {"rank": rank, "host_name": f"h{rank}", **copy.deepcopy(dump)}
        for rank, dump in value.items()
    }
    arguments = argparse.Namespace(
        verbose=False, just_print_entries=False, allow_incomplete_ranks=False, mismatch_cap=10
    )
    database = build_db(details, arguments, "2.10")
    wrong = next(call for call in database.collectives if not call.pass_check or call.missing_ranks)
    if kind == "missing":
        theirs = set(wrong.missing_ranks)
    else:
        theirs = set(wrong.mismatch_collectives)
        assert {c.type_of_mismatch.state.name for c in wrong.mismatch_collectives.values()} == {kind}
    ours = align([read_dump(dump, rank) for rank, dump in value.items()])
    assert ours.culprits == theirs == culprits
    assert ours.decisive.seq == wrong.collective_seq_id


class Evil:
    def __reduce__(self):
        return (os.system, ("touch /tmp/never",))


@pytest.mark.parametrize(
    "data",
    [
        pickle.dumps(Evil()),
        pickle.dumps({"entries": [Evil()], "version": "2.10"}),
        b"\x80\x04\x95",
        b"not a pickle at all",
        b"cos\nsystem\n(S'true'\ntR.",
    ],
)
def test_a_pickle_that_refers_to_code_is_refused(data, tmp_path):
    with pytest.raises(FlightError):
        load_plain_pickle(data)
    (tmp_path / "rank_0").write_bytes(data)
    dumps, notices = read_flight(tmp_path)
    assert dumps == []
    assert len(notices) == 1


def test_loops_and_nonsense_give_a_notice_only(tmp_path):
    loop: dict = {"version": "2.10", "entries": []}
    loop["entries"].append(loop)
    loop["pg_config"] = loop
    (tmp_path / "rank_0").write_bytes(pickle.dumps(loop))
    (tmp_path / "rank_1").write_bytes(b"[" * 100_000)
    (tmp_path / "rank_2").write_bytes(b'{"entries": 5}')
    (tmp_path / "rank_3").write_bytes(b"")
    dumps, notices = read_flight(tmp_path)
    assert {dump.rank for dump in dumps} <= {0}
    assert len(notices) >= 3


def test_a_huge_file_is_left_out_without_reading_it(tmp_path):
    made.write(tmp_path, made.missing(3, 1))
    with open(tmp_path / "nccl_trace_rank_9", "wb") as handle:
        handle.write(b"{")
        handle.truncate(100 << 20)
    verdict = verdict_of(tmp_path)
    assert ranks_of(verdict) == {1}


def test_a_file_that_the_kernel_makes_up_is_left_out_without_reading_it(tmp_path):
    """/proc/kmsg is a regular file of no size whose reading never ends."""
    (tmp_path / "rank-0.json").symlink_to("/proc/kmsg")
    dumps, notices = read_flight(tmp_path)
    assert dumps == []
    assert notices


def test_another_dtype_is_told_with_both_types_and_how_to_mend_it(tmp_path):
    dumps = made.equal(4)
    for rank, dump in dumps.items():
        dump["entries"][-1]["input_dtypes"] = ["Float" if rank == 1 else "BFloat16"]
    made.write(tmp_path, dumps)
    verdict = verdict_of(tmp_path)
    assert (verdict.kind, ranks_of(verdict)) == ("size-mismatch", {1})
    assert "of Float at" in verdict.culprits[0].why
    assert "ranks 0, 2-3 call all_reduce [[8]] of BFloat16" in verdict.culprits[0].why
    assert verdict.fix.startswith("cast to one dtype")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("profiling_name", 9),
        ("profiling_name", ""),
        ("profiling_name", None),
        ("collective_seq_id", -4),
        ("collective_seq_id", "no"),
    ],
)
def test_broken_entries_are_left_out_with_a_notice_and_blame_nobody(name, value, tmp_path):
    dumps = made.missing(4, 2)
    for rank in (0, 3):
        broken = copy.deepcopy(dumps[rank]["entries"][-1])
        broken[name] = value
        dumps[rank]["entries"].append(broken)
    dumps[1]["pg_config"]["0"]["ranks"] = [0, 1, 2, 3, -1, 10**9, 10**20]
    made.write(tmp_path, dumps)
    read, notices = read_flight(tmp_path)
    assert notices == [f"nccl_trace_rank_{rank}: 1 of 7 entries are broken and left out" for rank in (0, 3)]
    assert ranks_of(diagnose([Sample(flight=tuple(read))]).verdict) == {2}


def test_dump_of_an_impossible_rank_or_without_any_whole_entry_is_none(tmp_path):
    dumps = made.equal(3)
    dumps[1]["rank"] = 10**20
    dumps[2]["entries"] = [{"profiling_name": 3}, "text"]
    made.write(tmp_path, dumps)
    read, notices = read_flight(tmp_path)
    assert [dump.rank for dump in read] == [0]
    assert len(notices) == 2
