"""Following one file of lines, whatever happens to it."""

from __future__ import annotations

import os
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from ftdash.monitor.tail import IDLE_READS_PER_STAT, MAX_LINE_BYTES, Tail


def drain(tail: Tail) -> bytes:
    data = b""
    while piece := tail.read():
        data += piece
    return data


def test_a_missing_file_is_empty_and_read_once_it_is_there(tmp_path: Path) -> None:
    tail = Tail(tmp_path / "a.jsonl")
    assert tail.read() == b""
    tail.path.write_bytes(b"one\n")
    assert tail.read() == b"one\n"


def test_a_half_written_line_waits_for_its_end(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"a":1}\n{"b"')
    tail = Tail(path)
    assert drain(tail) == b'{"a":1}\n'
    with open(path, "ab") as handle:
        handle.write(b":2}\n")
    assert drain(tail) == b'{"b":2}\n'


def test_a_truncated_file_is_read_from_its_beginning(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"first\nsecond\n")
    tail = Tail(path)
    drain(tail)
    path.write_bytes(b"new\n")
    assert drain(tail) + drain(tail) == b"new\n"
    assert tail.restarts == 1


def test_a_replaced_file_is_found_by_its_name_again(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"first\n")
    tail = Tail(path)
    drain(tail)
    (tmp_path / "b").write_bytes(b"other\nfile\n")
    os.replace(tmp_path / "b", path)
    found = b"".join(tail.read() for _ in range(IDLE_READS_PER_STAT + 2))
    assert found == b"other\nfile\n"


def test_a_line_without_end_is_skipped_and_memory_stays_bounded(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    with open(path, "wb") as handle:
        handle.write(b"before\n")
        for _ in range(12):
            handle.write(b"x" * MAX_LINE_BYTES)
        handle.write(b"\nafter\n")
    tail = Tail(path)
    pieces = []
    while piece := tail.read():
        pieces.append(piece)
    assert b"".join(pieces) == b"before\nafter\n"
    assert max(map(len, pieces)) <= MAX_LINE_BYTES
    assert tail.skipped == 1


def test_skipping_to_the_middle_begins_with_the_next_whole_line(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"aaaa\nbbbb\ncccc\n")
    for offset, expected in (
        (5, b"bbbb\ncccc\n"),
        (6, b"cccc\n"),
        (9, b"cccc\n"),
        (10, b"cccc\n"),
        (15, b""),
    ):
        tail = Tail(path)
        tail.skip_to(offset)
        assert drain(tail) == expected, offset


def test_files_need_not_stay_open(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"one\n")
    before = len(os.listdir("/proc/self/fd"))
    tail = Tail(path, keep_open=False)
    assert tail.read() == b"one\n"
    assert len(os.listdir("/proc/self/fd")) == before
    with open(path, "ab") as handle:
        handle.write(b"two\n")
    assert tail.read() == b"two\n"


def test_what_is_no_regular_file_is_told_and_not_read(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "zeros").symlink_to("/dev/zero")
    for name in ("pipe", "zeros"):
        tail = Tail(tmp_path / name)
        assert tail.read() == b""
        assert "not a regular file" in tail.error


@settings(max_examples=60, deadline=None)
@given(
    lines=st.lists(st.binary(max_size=40).map(lambda b: b.replace(b"\n", b"")), max_size=30),
    cuts=st.lists(st.integers(1, 200), max_size=8),
    limit=st.integers(1, 64),
)
def test_lines_come_out_as_they_went_in_however_writes_and_reads_are_cut(
    tmp_path_factory, lines: list[bytes], cuts: list[int], limit: int
) -> None:
    path = tmp_path_factory.mktemp("tail") / "a"
    whole = b"".join(line + b"\n" for line in lines)
    tail = Tail(path)
    found = b""
    with open(path, "wb", buffering=0) as handle:
        rest = whole
        for cut in cuts:
            handle.write(rest[:cut])
            rest = rest[cut:]
            found += tail.read(limit)
        handle.write(rest)
    while piece := tail.read(limit):
        found += piece
    assert found == whole
