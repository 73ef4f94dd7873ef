"""A window above a pane: the pane keys work through it, and close it."""

from __future__ import annotations

from typing import ClassVar, TypeVar

from textual.binding import Binding
from textual.screen import ModalScreen

from ftdash.tui.splash import PANES

Answer = TypeVar("Answer")


class Overlay(ModalScreen[Answer]):
    """Textual stops keys at a modal screen, so that the keys of the whole program are repeated here."""

    HELP = ""
    ALWAYS = "1-4 panes  ? help  esc back"  # what the bottom line names while the window is open

    BINDINGS: ClassVar = [
        *(
            Binding(f"{number},f{number},alt+{number}", f"app.pane('{name.lower()}')", name, show=False)
            for number, name in enumerate(PANES, 1)
        ),
        Binding("question_mark,f5", "app.help", "Help", show=False),
    ]
