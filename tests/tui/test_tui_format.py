"""Figures and foreign text on the screen."""

from __future__ import annotations

import math

import pytest
from rich.cells import cell_len

from ftdash.tui import format as fmt


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "·"), (0.62e9, "0.62"), (7.64e9, "7.64"), (71.23e9, "71.2"), (212e9, "212"), (1.9e12, "1,900")],
)
def test_sizes_in_gb_keep_three_figures(value: float | None, text: str) -> None:
    assert fmt.gb(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.84, "0.8"),
        (412.4, "412"),
        (2140, "2,140"),
        (17_130, "17.1k"),
        (1_204_000, "1.20M"),
        (math.nan, "nan"),
    ],
)
def test_speeds_are_short(value: float, text: str) -> None:
    assert fmt.rate(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (48, "48 s"),
        (252, "4 m 12 s"),
        (18_720, "5 h 12 m"),
        (273_600, "3 d 4 h"),
        (math.inf, "·"),
        (None, "·"),
    ],
)
def test_spans_of_time_name_two_units(value: float | None, text: str) -> None:
    assert fmt.duration(value) == text


def test_ranks_fold_into_ranges() -> None:
    assert fmt.ranks([7, 0, 1, 2, 4, 6]) == "0-2, 4, 6-7"
    assert fmt.ranks([]) == ""


def test_nan_and_infinite_losses_are_shown_as_such() -> None:
    assert (fmt.loss(math.nan), fmt.loss(-math.inf), fmt.loss(1.1824)) == ("nan", "-inf", "1.182")


@pytest.mark.parametrize("text", ["[/usr/bin/x]", "[rank0]", "[bold]x[/bold]", "[link=x"])
def test_cleaning_keeps_brackets(text: str) -> None:
    assert fmt.clean(text) == text


def test_cleaning_takes_escapes_and_controls_out() -> None:
    hostile = "\x1b[31mred\x1b[0m \x1b]0;title\x07a\tb\x00\x9b2J\r\nnext"
    cleaned = fmt.clean(hostile)
    assert cleaned.startswith("red a")
    assert all(char.isprintable() for char in cleaned)


@pytest.mark.parametrize("width", [1, 2, 5, 9, 20])
@pytest.mark.parametrize("text", ["", "short", "a long text that does not fit", "日本語のホスト名"])
def test_fitted_text_has_exactly_the_asked_width(text: str, width: int) -> None:
    assert cell_len(fmt.fit(text, width)) == width
    assert cell_len(fmt.fit(text, width, right=True)) == width


def test_a_bar_is_full_at_one_and_empty_at_zero() -> None:
    assert (fmt.bar(0, 8), fmt.bar(1, 8), fmt.bar(7, 8)) == (" " * 8, "█" * 8, "█" * 8)
