"""Lines of a log: carriage returns, caps, escape sequences."""

import pickle

import pytest

from ftdash.monitor.logs.lines import LineSplitter, is_progress, strip_ansi


def bar(done: int) -> bytes:
    return f" {done}%|{'█' * (done // 10)}   | {done}/100 [00:{done % 60:02d}<01:20,  1.21it/s]".encode()


def test_a_progress_bar_gives_only_its_last_frame():
    splitter = LineSplitter()
    lines = splitter.feed(b"\r".join(bar(i) for i in range(101)) + b"\ndone\n")
    assert len(lines) == 2
    assert "100/100" in lines[0]
    assert lines[1] == "done"
    assert splitter.overwritten >= 99


def test_text_between_carriage_returns_is_kept_when_it_is_no_bar():
    splitter = LineSplitter()
    lines = splitter.feed(b"\r" + bar(3) + b"\rRuntimeError: CUDA out of memory\r" + bar(4) + b"\n")
    assert "RuntimeError: CUDA out of memory" in lines


def test_what_is_printed_behind_a_bar_is_kept():
    splitter = LineSplitter()
    lines = splitter.feed(b"\r" + bar(5) + b"{'loss': '1.5'}\n\r" + bar(6) + b"\n")
    assert lines[0].endswith("{'loss': '1.5'}")
    assert len(lines) == 2


@pytest.mark.parametrize("megabytes", [5, pytest.param(50, marks=pytest.mark.slow)])
def test_megabytes_of_carriage_returns_cost_no_memory(megabytes):
    splitter = LineSplitter()
    chunk = b"\r".join(bar(i % 101) for i in range(700)) + b"\r"
    rounds = megabytes * 1_000_000 // len(chunk) + 1
    assert all(splitter.feed(chunk) == [] for _ in range(rounds))
    assert is_progress(splitter.tail)
    assert splitter.overwritten > 700 * (rounds - 1)
    assert len(pickle.dumps(splitter)) < 2 * splitter.max_line_bytes


def test_fifty_megabytes_on_one_line_are_capped_and_counted():
    splitter = LineSplitter()
    total = 0
    for _ in range(800):
        assert splitter.feed(b"x" * 65536) == []
        total += 65536
    [line] = splitter.feed(b"\n")
    assert len(line) == splitter.max_line_bytes
    assert splitter.dropped == total - splitter.max_line_bytes


def test_a_line_end_cut_in_two_is_one_line_end():
    splitter = LineSplitter()
    assert splitter.feed(b"one\r") + splitter.feed(b"\ntwo\r\n") == ["one", "two"]


def test_the_unfinished_line_is_the_tail():
    splitter = LineSplitter()
    splitter.feed(b"a\nTraceb")
    assert splitter.tail == "Traceb"
    assert splitter.finish() == ["Traceb"]
    assert splitter.finish() == []


def test_pieces_of_any_size_give_the_same_lines():
    data = bar(1) + b"\r" + bar(2) + "\nüber\r\n\x1b[31mred\x1b[0m\nlast".encode()
    whole = LineSplitter()
    expected = whole.feed(data) + whole.finish()
    for size in (1, 2, 3, 7):
        splitter = LineSplitter()
        lines = [line for i in range(0, len(data), size) for line in splitter.feed(data[i : i + size])]
        assert lines + splitter.finish() == expected


def test_escape_sequences_and_control_characters_are_stripped():
    text = "\x1b[1;31mred\x1b[0m \x1b]8;;http://x\x07link\x1b]8;;\x07 a\tb\x00\x08"
    assert strip_ansi(text) == "red link a\tb"


def test_markup_like_text_survives():
    for text in ("[/usr/bin/x]", "[rank0]: [node_modules]", "[4, 178, -1]"):
        assert LineSplitter().feed(text.encode() + b"\n") == [text]
