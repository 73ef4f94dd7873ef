"""The rank table shows what differs, keeps its cursor, and repaints only lines that changed."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest
from msgspec import structs
from rich.style import Style
from textual.app import App, ComposeResult

from ftdash.monitor.state import Alert, RankPhase
from ftdash.tui.widgets.alerts import AlertList
from ftdash.tui.widgets.grid import Column, Grid, fit_columns
from ftdash.tui.widgets.lines import Line, plain
from ftdash.tui.widgets.node_grid import NodeGrid
from ftdash.tui.widgets.rank_rows import FoldedRow, GroupRow, RankRow, Sort, arrange
from ftdash.tui.widgets.rank_table import RankTable
from tests.support import screens


class Hosted(App[None]):
    def __init__(self, widget: Grid | NodeGrid) -> None:
        super().__init__()
        self.widget = widget

    def compose(self) -> ComposeResult:
        yield self.widget


def test_equal_ranks_fold_and_the_straggler_stays() -> None:
    state = screens.with_straggler(screens.run_state(16), 5)
    rows = arrange(state.ranks, state.alerts, fold=True)
    loud = [row for row in rows if isinstance(row, RankRow)]
    folded = [row for row in rows if isinstance(row, FoldedRow)]
    assert [row.state.rank for row in loud] == [5]
    assert loud[0].slow
    assert [len(row.ranks) for row in folded] == [15]


@pytest.mark.parametrize("condition", [RankPhase.DEAD, RankPhase.STALLED, RankPhase.DATA, RankPhase.SAVING])
def test_a_rank_in_another_state_is_never_folded(condition: RankPhase) -> None:
    ranks = list(screens.run_state(16).ranks)
    ranks[9] = structs.replace(ranks[9], state=condition)
    rows = arrange(ranks, fold=True)
    assert [row.state.rank for row in rows if isinstance(row, RankRow)] == [9]


def test_the_filter_takes_every_word_from_any_column() -> None:
    state = screens.with_straggler(screens.run_state(16), 5)
    assert [r.state.rank for r in arrange(state.ranks, state.alerts, needle="gpu-000 slow")] == [5]  # type: ignore[union-attr]
    assert arrange(state.ranks, needle="no such rank") == []


@pytest.mark.parametrize("sort", list(Sort))
def test_every_sorting_keeps_all_ranks(sort: Sort) -> None:
    state = screens.with_straggler(screens.run_state(16), 5)
    rows = arrange(state.ranks, sort=sort, descending=True)
    assert sorted(row.state.rank for row in rows if isinstance(row, RankRow)) == list(range(16))
    if sort is Sort.STEP_TIME:
        assert isinstance(rows[0], RankRow)
        assert rows[0].state.rank == 5


def test_grouping_by_node_counts_what_differs() -> None:
    state = screens.with_straggler(screens.run_state(16), 5)
    headings = [row for row in arrange(state.ranks, state.alerts, group="node") if isinstance(row, GroupRow)]
    assert [(row.title, row.count, row.differing) for row in headings] == [
        ("gpu-000", 8, 1),
        ("gpu-001", 8, 0),
    ]


def test_columns_give_way_in_their_order_and_the_last_one_grows() -> None:
    columns = [
        Column("a", "a", 10),
        Column("b", "b", 10, drop=1),
        Column("c", "c", 10, drop=2, grow=False),
        Column("d", "d", 5, grow=True),
    ]
    assert [column.key for column in fit_columns(columns, 30)] == ["a", "b", "d"]
    wide = fit_columns(columns, 60)
    assert [column.key for column in wide] == ["a", "b", "c", "d"]
    assert sum(column.width + 1 for column in wide) == 60


async def test_only_lines_that_changed_are_painted_again() -> None:
    table = RankTable()
    async with Hosted(table).run_test(size=(110, 30)) as pilot:
        state = screens.run_state(8)
        table.show(state.ranks)
        await pilot.pause()
        painted: list[int] = []
        table._repaint = painted.append  # type: ignore[method-assign]
        table.show(state.ranks)
        assert painted == []
        ranks = list(state.ranks)
        ranks[3] = structs.replace(ranks[3], step=121)
        table.show(tuple(ranks))
        assert painted == [3]


async def test_the_cursor_stays_on_its_rank_when_the_order_changes() -> None:
    table = RankTable()
    async with Hosted(table).run_test(size=(110, 30)) as pilot:
        state = screens.with_straggler(screens.run_state(8), 5)
        table.show(state.ranks)
        table.focus()
        await pilot.press("down", "down", "down", "down", "down")
        assert table.selected_rank() is state.ranks[5]
        await pilot.press("s", "s", "s")
        assert table.sort is Sort.STEP_TIME
        assert table.selected_rank() is state.ranks[5]


async def test_a_thousand_ranks_fold_to_the_ones_that_differ() -> None:
    table = RankTable()
    async with Hosted(table).run_test(size=(120, 30)):
        state = screens.with_straggler(screens.run_state(1024, moe=False), 333)
        table.show(state.ranks, state.alerts)
        assert len(table.items) == 2
        assert "1,023 ranks as the median" in plain([table._line(1)])


async def test_a_thousand_ranks_fit_on_one_screen_as_cells() -> None:
    grid = NodeGrid()
    async with Hosted(grid).run_test(size=(100, 30)):
        state = screens.with_straggler(screens.run_state(1024, moe=False), 333)
        grid.show(state.ranks, state.alerts)
        text = plain(grid.draw(96, 24))
        assert text.count("■") == 1023
        assert text.count("▲") == 1


async def test_where_ranks_have_no_room_a_node_is_its_worst_rank() -> None:
    grid = NodeGrid()
    async with Hosted(grid).run_test(size=(80, 6)) as pilot:
        state = screens.with_straggler(screens.run_state(1024, moe=False), 333)
        ranks = list(state.ranks)
        ranks[1000] = structs.replace(ranks[1000], state=RankPhase.DEAD)
        grid.show(ranks, state.alerts)
        text = plain(grid.draw(78, 4))
        assert (text.count("■"), text.count("▲"), text.count("✗")) == (126, 1, 1)
        assert not grid.pooled(100, 24)
        grid.focus()
        await pilot.press("down", "right")
        assert grid.cursor == grid.per_line(*grid.size) + 1
        await pilot.click(grid, offset=(12 + 2 * 3, 2))
        assert grid.cursor == 2 * grid.per_line(*grid.size) + 3


async def test_dead_and_lost_ranks_have_a_symbol_of_their_own() -> None:
    grid = NodeGrid()
    async with Hosted(grid).run_test(size=(100, 30)):
        ranks = list(screens.run_state(8).ranks)
        ranks[1] = structs.replace(ranks[1], state=RankPhase.DEAD)
        gpu = ranks[2].gpu
        assert gpu is not None
        ranks[2] = structs.replace(ranks[2], gpu=structs.replace(gpu, state="lost"))
        ranks[3] = structs.replace(ranks[3], state=RankPhase.STALLED)
        grid.show(ranks)
        assert "■✗✗‖■■■■" in plain(grid.draw(96, 5))


async def test_an_alert_is_acknowledged_by_a_key_and_comes_back_on_demand() -> None:
    alerts = AlertList()
    async with Hosted(alerts).run_test(size=(80, 12)) as pilot:
        alerts.show([Alert("a", "warning", "first", (0,), 10.0), Alert("b", "error", "second", (1,), 5.0)])
        alerts.focus()
        assert [alert.text for alert in alerts.alerts] == ["second", "first"]
        await pilot.press("a")
        assert [alert.text for alert in alerts.alerts] == ["first"]
        alerts.show([Alert("a", "warning", "first", (0,), 10.0), Alert("b", "error", "second", (1,), 5.0)])
        assert [alert.text for alert in alerts.alerts] == ["first"]
        await pilot.press("A")
        assert len(alerts.alerts) == 2


def test_folded_ranks_of_a_group_show_medians_of_their_own() -> None:
    ranks = screens.run_state(16).ranks
    ranks = tuple(
        structs.replace(rank, host="ab"[rank.rank // 8], tokens_per_s=100.0 + rank.rank // 8)
        for rank in ranks
    )
    folded = [row for row in arrange(ranks, fold=True, group="node") if isinstance(row, FoldedRow)]
    assert [row.medians.tokens_per_s for row in folded] == [100.0, 101.0]


def test_ranks_of_a_large_run_may_be_as_far_apart_as_their_turns() -> None:
    ranks = [
        structs.replace(rank, step=120 + rank.rank % 4, step_s=1.0) for rank in screens.run_state(1024).ranks
    ]
    assert [type(row) for row in arrange(ranks, fold=True)] == [FoldedRow]
    ranks[700] = structs.replace(ranks[700], step=100)
    assert [row.state.rank for row in arrange(ranks, fold=True) if isinstance(row, RankRow)] == [700]


class Numbers(Grid):
    DEFAULT_CSS = "Numbers { height: 10; overflow-y: auto; }"

    def columns(self) -> list[Column]:
        return [Column("number", "number", 8)]

    def cells(self, item: int, columns: Sequence[Column]) -> Line:
        return [(str(item), Style())]


async def test_rows_that_come_and_go_move_the_end_without_a_new_layout(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    grid, laid_out = Numbers(), []
    async with Hosted(grid).run_test(size=(40, 20)) as pilot:
        grid.set_items(range(100))
        laid_out_once = asyncio.Event()  # the new layout that the scrollbar asks for is over
        await pilot.pause()
        grid.call_after_refresh(laid_out_once.set)
        await laid_out_once.wait()
        assert grid.max_scroll_y == 100 + 1 - 10
        whole = grid.screen._refresh_layout
        monkeypatch.setattr(
            grid.screen, "_refresh_layout", lambda *a, **k: (laid_out.append(1), whole(*a, **k))
        )
        grid.set_items(range(120))
        await pilot.pause()
        assert (grid.max_scroll_y, grid.vertical_scrollbar.window_virtual_size) == (120 + 1 - 10, 121)
        grid.scroll_to(y=grid.max_scroll_y, animate=False)
        grid.set_items(range(30))
        await pilot.pause()
        assert grid.scroll_offset.y == 30 + 1 - 10
        assert not laid_out
        grid.set_items(range(5))
        await pilot.pause()
        assert laid_out
        assert (grid.scroll_offset.y, grid.show_vertical_scrollbar) == (0, False)
