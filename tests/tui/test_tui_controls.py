"""Sliders and choices answer to keys, typed values and the mouse."""

from __future__ import annotations

from itertools import pairwise

import pytest
from textual.app import App, ComposeResult

from ftdash.tui import format as fmt
from ftdash.tui.messages import Changed
from ftdash.tui.widgets.choice import Choice, Picker
from ftdash.tui.widgets.lines import plain
from ftdash.tui.widgets.slider import Slider, geometric, parse_amount


class Controls(App[None]):
    CSS = ".control { height: 1; width: 60; }"

    def __init__(self, *controls: Slider | Choice | Picker) -> None:
        super().__init__()
        self.controls = controls
        self.told: list[tuple[str, float | str]] = []

    def compose(self) -> ComposeResult:
        yield from self.controls

    def on_changed(self, event: Changed) -> None:
        self.told.append((event.name, event.value))


def gpus_slider(value: float = 8) -> Slider:
    return Slider("gpus", "GPUs", (1, 2, 4, 8, 16, 32), value, fmt=lambda v: f"{v:.0f}", log=True)


async def test_arrows_go_from_stop_to_stop_and_stay_within_the_ends() -> None:
    slider = gpus_slider()
    async with Controls(slider).run_test() as pilot:
        slider.focus()
        await pilot.press("right")
        assert slider.value == 16
        await pilot.press("right", "right", "right")
        assert slider.value == 32
        await pilot.press("home")
        assert slider.value == 1
        await pilot.press("left", "end")
        assert slider.value == 32
        assert pilot.app.told == [("gpus", 16.0), ("gpus", 32.0), ("gpus", 1.0), ("gpus", 32.0)]  # type: ignore[attr-defined]


async def test_a_typed_value_may_lie_between_the_stops() -> None:
    slider = gpus_slider()
    async with Controls(slider).run_test() as pilot:
        slider.focus()
        await pilot.press("1", "2")
        assert slider.value == 8
        assert "12" in plain(slider.draw(60, 1))
        await pilot.press("enter")
        assert slider.value == 12
        await pilot.press("right")
        assert slider.value == 16


async def test_escape_and_values_outside_the_ends_leave_the_slider_where_it_was() -> None:
    slider = gpus_slider()
    async with Controls(slider).run_test() as pilot:
        slider.focus()
        await pilot.press("5", "escape")
        assert (slider.value, slider.typed) == (8, "")
        await pilot.press("9", "9", "9", "enter")
        assert slider.value == 8


async def test_a_click_and_a_drag_move_the_knob() -> None:
    slider = gpus_slider()
    async with Controls(slider).run_test() as pilot:
        await pilot.pause()
        left, track = slider._track
        await pilot.click(slider, offset=(left + track - 1, 0))
        assert slider.value == 32
        await pilot.mouse_down(slider, offset=(left + track - 1, 0))
        await pilot.hover(slider, offset=(left, 0))
        await pilot.mouse_up(slider, offset=(left, 0))
        assert slider.value == 1


@pytest.mark.parametrize(
    ("typed", "amount"),
    [
        ("16", 16),
        ("8.2e9", 8.2e9),
        ("30.5b", 30.5e9),
        ("4k", 4000),
        ("4,096", 4096),
        ("", None),
        ("4x", None),
        ("-", None),
    ],
)
def test_typed_amounts_are_read_as_people_write_them(typed: str, amount: float | None) -> None:
    assert parse_amount(typed) == amount


def test_geometric_stops_rise_and_reach_both_ends() -> None:
    stops = geometric(1e8, 2e12, 24)
    assert (stops[0], stops[-1]) == (1e8, 2e12)
    assert all(a < b for a, b in pairwise(stops))


@pytest.mark.parametrize("value", [1, 3, 8, 32])
@pytest.mark.parametrize("width", [30, 44, 80])
def test_a_slider_fills_its_line_and_shows_its_value(value: float, width: int) -> None:
    line = plain(gpus_slider(value).draw(width, 1))
    assert line.endswith(f"{value}")
    assert len(line) == width


async def test_a_choice_moves_by_key_and_click_and_shows_the_chosen_in_brackets() -> None:
    choice = Choice("stage", "Stage", [("ddp", "ddp"), ("zero1", "z1"), ("zero3", "z3")], "ddp")
    async with Controls(choice).run_test() as pilot:
        choice.focus()
        await pilot.press("right")
        assert choice.value == "zero1"
        assert "[z1]" in plain(choice.draw(60, 1))
        await pilot.press("end", "right")
        assert choice.value == "zero3"
        left, _, _ = choice._spans[0]
        await pilot.click(choice, offset=(left + 1, 0))
        assert choice.value == "ddp"


def test_a_choice_keeps_the_chosen_option_on_a_narrow_line() -> None:
    names = [(f"option{n}", f"option{n}") for n in range(9)]
    assert "[option8]" in plain(Choice("x", "X", names, "option8").draw(30, 1))


async def test_a_picker_steps_and_its_list_filters_while_typing() -> None:
    picker = Picker("model", "Model", ["llama-3.1-8b", "qwen3-8b", "qwen3-30b-a3b"], "qwen3-8b")
    async with Controls(picker).run_test() as pilot:
        picker.focus()
        await pilot.press("right")
        assert picker.value == "qwen3-30b-a3b"
        await pilot.press("enter", "l", "l", "a", "m", "a", "enter")
        await pilot.pause()
        assert picker.value == "llama-3.1-8b"


def test_parameter_counts_read_like_model_names() -> None:
    assert [fmt.count(n) for n in (812, 14.2e6, 8.19e9, 671e9)] == ["812", "14.2 M", "8.19 B", "671 B"]


def test_a_logarithmic_track_may_begin_at_zero() -> None:
    slider = Slider("n", "N", (0.0, 10.0, 100.0, 1000.0), 0.0, fmt=str, log=True)
    shares = []
    for stop in slider.stops:
        slider.value = stop
        shares.append(slider.share())
        assert slider.at(slider.share()) == stop
    assert shares[0] == 0
    assert shares[-1] == 1
    assert all(later - earlier > 0.2 for earlier, later in pairwise(shares))
