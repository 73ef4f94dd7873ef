"""What the bottom line and the help screen say is true of the keys, and reads well at any width."""

from __future__ import annotations

import importlib
import io
import pkgutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console
from textual.screen import Screen
from textual.widget import Widget

import ftdash.tui.panes
import ftdash.tui.widgets
from ftdash.tui.cockpit import Cockpit
from ftdash.tui.panes.base import Pane
from ftdash.tui.panes.help import HelpScreen, entries, help_text
from tests.support import screens
from tests.support.screens import cockpit, screen_text, until

KEY_NAMES = {
    "↑↓": ("up", "down"),
    "←→": ("left", "right"),
    "⇧": ("shift+left", "shift+right"),
    "arrows": ("up", "down", "left", "right"),
    "esc": ("escape",),
    "/": ("slash",),
    "?": ("question_mark",),
    "[": ("left_square_bracket",),
    "]": ("right_square_bracket",),
    "^s": ("ctrl+s",),
    "^o": ("ctrl+o",),
    "0-9": (),  # digits are read by the slider itself
}


def speaking_classes() -> Iterator[type]:
    """Every pane, window and widget of the screen."""
    for package in (ftdash.tui.panes, ftdash.tui.widgets):
        for module in pkgutil.iter_modules(package.__path__, f"{package.__name__}."):
            for thing in vars(importlib.import_module(module.name)).values():
                if isinstance(thing, type) and thing.__module__ == module.name and issubclass(thing, Widget):
                    yield thing


def bound(cls: type) -> set[str]:
    return {
        key
        for base in cls.__mro__
        for binding in vars(base).get("BINDINGS", ())
        for key in binding.key.split(",")
    }


HINTED = [cls for cls in speaking_classes() if getattr(cls, "HINTS", "")]


@pytest.mark.parametrize("cls", HINTED, ids=lambda cls: cls.__name__)
def test_every_key_that_a_hint_names_is_bound(cls: type) -> None:
    around = set(bound(Cockpit))
    for other in speaking_classes():
        if issubclass(other, Pane | Screen):
            around |= bound(other)
    for hint in cls.HINTS.split("  "):  # type: ignore[attr-defined]
        keys, _, words = hint.partition(" ")
        if keys == "[":
            keys, words = "]", "file"
        assert words, hint
        assert set(KEY_NAMES.get(keys, (keys,))) <= bound(cls) | around, hint


def test_no_help_text_is_broken_by_hand() -> None:
    """A line that goes on in the next one would wrap twice in a narrow window."""
    texts = {cls.__name__: cls.HELP for cls in speaking_classes() if getattr(cls, "HELP", "")}
    assert len(texts) > 30
    for name, text in texts.items():
        for keys, words in entries(text):
            if not keys:
                assert words.rstrip().endswith((".", "!", "?")), f"{name}: {words}"
            assert len(keys) <= 10, f"{name}: {keys}"


def test_words_stay_in_their_column_in_a_narrow_window() -> None:
    console = Console(width=30, file=io.StringIO())
    console.print(help_text([("Here", "Prose of a sentence.\ne  shows all evidence for the verdict of it")]))
    lines = [line.rstrip() for line in console.file.getvalue().splitlines()]  # type: ignore[attr-defined]
    assert lines == ["Here", "Prose of a sentence.", "e  shows all evidence for the", "   verdict of it"]


async def test_a_help_longer_than_the_terminal_is_scrolled(tmp_path: Path) -> None:
    async with cockpit(tmp_path, pane="diagnose", size=(80, 24), state=screens.run_state(4)) as (app, pilot):
        await pilot.press("question_mark")
        await pilot.pause()
        assert isinstance(app.screen, HelpScreen)
        assert "leaves; runs go on" not in screen_text(app)
        await pilot.press("end")
        await until(pilot, lambda: "leaves; runs go on" in screen_text(app))


async def test_the_bottom_line_offers_only_keys_that_work_now(tmp_path: Path) -> None:
    async with cockpit(tmp_path, pane="monitor", state=screens.run_state(4)) as (app, pilot):

        def bottom() -> str:
            return screen_text(app).splitlines()[-1]

        assert "q quit" in bottom()
        await pilot.press("enter")
        await pilot.pause()
        assert "q quit" not in bottom()
        assert "dump stacks" not in bottom()
        assert "esc back" in bottom()
        await pilot.press("escape", "slash")
        await pilot.pause()
        assert "q quit" not in screen_text(app)
        assert "? help" not in screen_text(app)
        assert "F5 help" in screen_text(app)
        await pilot.press("escape")
        await pilot.pause()
        assert "q quit" in bottom()
