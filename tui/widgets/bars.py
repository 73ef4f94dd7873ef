"""The one-line bars of the frame: pane tabs at the top, context hints at the bottom."""

from __future__ import annotations

from textual import events
from textual.message import Message

from ftdash.tui import format as fmt
from ftdash.tui import theme
from ftdash.tui.splash import PANES
from ftdash.tui.widgets.lines import Line, LineWidget, Part


class TabBar(LineWidget):
    """Program name, the four panes with their keys, and where we are."""

    class Picked(Message):
        """A tab was clicked; `pane` is its lower-case name."""

        def __init__(self, pane: str) -> None:
            super().__init__()
            self.pane = pane

    def __init__(self) -> None:
        super().__init__(id="tabs")
        self.active = "plan"
        self.badges: dict[str, str] = {}
        self.place = ""

    def show(self, *, active: str | None = None, place: str | None = None, **badges: str) -> None:
        """Change the active pane, the place line, or a pane's badge such as ●2."""
        self.active = active or self.active
        self.place = self.place if place is None else place
        self.badges.update(badges)
        self.redraw()

    def draw(self, width: int, height: int) -> list[Line]:
        separator: Part = (f" {theme.GLYPHS.separator} ", theme.FAINT)
        parts: list[Part] = [(" ftdash", theme.ACCENT_BOLD)]
        for number, name in enumerate(PANES, 1):
            badge = self.badges.get(name.lower(), "")
            text = f"{number} {name}{' ' + badge if badge else ''}"
            style = theme.BOLD + theme.ACCENT_BOLD if name.lower() == self.active else theme.DIM
            if name.lower() == self.active and self.app.no_color:
                text = f"[{text}]"
            parts += [separator, (text, style)]
        used = sum(len(text) for text, _ in parts)
        place = fmt.clean(self.place)
        if place and width - used > 8:
            parts.append(("  " + fmt.fit(place + " ", width - used - 2, right=True), theme.DIM))
        return [tuple(parts)]

    def on_click(self, event: events.Click) -> None:
        position = 7
        for number, name in enumerate(PANES, 1):
            badge = self.badges.get(name.lower(), "")
            position += 3 + len(f"{number} {name}{' ' + badge if badge else ''}")
            if event.x < position:
                self.post_message(self.Picked(name.lower()))
                return


class HintBar(LineWidget):
    """What the keys do here: at the left those of the focus, at the right those that work everywhere."""

    ALWAYS = "1-4 panes  ? help  q quit"

    def __init__(self) -> None:
        super().__init__(id="hints")
        self.hints = ""
        self.always = self.ALWAYS

    def show(self, hints: str, always: str = ALWAYS) -> None:
        self.hints, self.always = hints, always
        self.redraw()

    def draw(self, width: int, height: int) -> list[Line]:
        parts: list[Part] = [(" ", theme.DIM)]
        room = width - len(self.always) - 3
        left: list[Part] = []
        for hint in self.hints.split("  ") if self.hints else []:
            key, _, words = hint.partition(" ")
            needed = sum(len(text) for text, _ in left) + len(hint) + 2
            if needed > room:
                break
            left += [(key, theme.ACCENT), (f" {words}  ", theme.DIM)]
        parts += left
        used = sum(len(text) for text, _ in parts)
        parts.append((fmt.fit(self.always, max(0, width - used - 1), right=True), theme.DIM))
        return [tuple(parts)]
