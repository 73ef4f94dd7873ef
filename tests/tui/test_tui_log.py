"""The log view reads any file: carriage returns, escapes, many ranks, megabyte lines, replaced files."""

from __future__ import annotations

from pathlib import Path

import pytest
from textual.app import App, ComposeResult

from ftdash.tui.log_index import LONGEST, LogFilter, LogIndex
from ftdash.tui.widgets.log_view import LogView
from tests.support.screens import HOSTILE, screen_text, until


class Hosted(App[None]):
    CSS = "LogView { height: 100%; border: round white; }"

    def __init__(self) -> None:
        super().__init__()
        self.view = LogView()

    def compose(self) -> ComposeResult:
        yield self.view


def indexed(path: Path, content: bytes) -> LogIndex:
    path.write_bytes(content)
    index = LogIndex(path)
    index.poll()
    return index


def test_lines_are_counted_with_and_without_a_last_line_end(tmp_path: Path) -> None:
    assert indexed(tmp_path / "a", b"").count == 0
    assert indexed(tmp_path / "b", b"one\n").count == 1
    assert indexed(tmp_path / "c", b"one\ntwo").count == 2


def test_only_the_last_frame_of_a_progress_bar_is_shown(tmp_path: Path) -> None:
    index = indexed(tmp_path / "log", b"  0%|  | 0/9\r 50%|# | 5/9\r100%|##| 9/9\nnext\r\n")
    assert [index.text(0), index.text(1)] == ["100%|##| 9/9", "next"]


def test_a_line_of_many_megabytes_is_cut_in_the_middle(tmp_path: Path) -> None:
    index = indexed(tmp_path / "log", b"begin" + b"x" * 20_000_000 + b"end\nafter\n")
    index.poll(64 << 20)
    assert index.count == 2
    assert len(index.text(0)) <= LONGEST + 8
    assert index.text(0).startswith("begin")
    assert index.text(0).endswith("end")
    assert index.text(1) == "after"


def test_growth_is_read_on_and_a_replaced_file_anew(tmp_path: Path) -> None:
    path = tmp_path / "log"
    index = indexed(path, b"one\ntw")
    with path.open("ab") as handle:
        handle.write(b"o\nthree\n")
    assert index.poll()
    assert [index.text(n) for n in range(index.count)] == ["one", "two", "three"]
    path.write_bytes(b"new\n")
    assert index.poll()
    assert [index.text(n) for n in range(index.count)] == ["new"]
    assert not index.poll()


def test_a_missing_file_is_an_empty_one(tmp_path: Path) -> None:
    index = LogIndex(tmp_path / "none")
    assert not index.poll()
    assert (index.count, index.trouble) == (0, "")


@pytest.mark.parametrize("rank", [0, 1])
def test_lines_of_one_rank_are_picked_out_of_the_others(tmp_path: Path, rank: int) -> None:
    index = indexed(tmp_path / "log", b"[rank0]: zero\n[default1]:one\nplain\n[rank1]: again\n")
    only = LogFilter(rank=rank)
    only.extend(index)
    assert [index.text(line) for line in only.lines] == (
        ["[rank0]: zero"] if rank == 0 else ["[default1]:one", "[rank1]: again"]
    )


async def test_hostile_lines_are_shown_as_they_are(tmp_path: Path) -> None:
    path = tmp_path / "launcher.log"
    path.write_text("\n".join(f"x {text}" for text in HOSTILE))
    async with Hosted().run_test(size=(80, 20)) as pilot:
        view: LogView = pilot.app.view  # type: ignore[attr-defined]
        view.open([path])
        await until(pilot, lambda: view.line_count() == len(HOSTILE))
        text = screen_text(pilot.app)
        for shown in ("[/usr/bin/x]", "[rank0]", "[node_modules]", "[bold red]loud[/]", "[link=x", "x red"):
            assert shown in text


async def test_the_view_follows_the_end_until_one_scrolls_up(tmp_path: Path) -> None:
    path = tmp_path / "launcher.log"
    path.write_text("".join(f"line {n}\n" for n in range(500)))
    async with Hosted().run_test(size=(80, 20)) as pilot:
        view: LogView = pilot.app.view  # type: ignore[attr-defined]
        view.open([path])
        view.focus()
        await until(pilot, lambda: "line 499" in screen_text(pilot.app))
        await pilot.press("up", "up")
        assert not view.following
        with path.open("a") as handle:
            handle.write("line 500\n")
        await until(pilot, lambda: view.line_count() == 501)
        assert "line 500" not in screen_text(pilot.app)
        await pilot.press("end")
        await until(pilot, lambda: "line 500" in screen_text(pilot.app))


async def test_a_search_shows_only_lines_with_the_text(tmp_path: Path) -> None:
    path = tmp_path / "launcher.log"
    path.write_text("".join(f"step {n} loss [rank{n % 3}]\n" for n in range(30)) + "Traceback here\n")
    async with Hosted().run_test(size=(80, 20)) as pilot:
        view: LogView = pilot.app.view  # type: ignore[attr-defined]
        view.open([path])
        await until(pilot, lambda: view.line_count() == 31)
        view.set_needle("traceback")
        await until(pilot, lambda: view.line_count() == 1)
        assert "Traceback here" in screen_text(pilot.app)
        view.set_needle("")
        assert view.line_count() == 31
