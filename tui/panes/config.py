"""The config preview: the files and commands that a plan becomes, as they would be written."""

from __future__ import annotations

from typing import ClassVar

from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding
from textual.containers import VerticalScroll
from textual.widgets import Static

from ftdash.engine.configs import ConfigError, TrainArgs, generate
from ftdash.engine.model.shape import ModelShape
from ftdash.engine.plan import Plan, PlanError
from ftdash.tui import format as fmt
from ftdash.tui import theme
from ftdash.tui.panes.overlay import Overlay

LONGEST_FILE = 20_000  # characters shown of one file


def config_text(plan: Plan, shape: ModelShape, train_args: TrainArgs) -> Text:
    """Command, files and notes; a refused plan is its one line."""
    text = Text()
    try:
        generated = generate(plan, shape=shape, train_args=train_args)
    except (ConfigError, PlanError) as error:
        text.append(f"{theme.GLYPHS.no} {fmt.clean(str(error))}\n", theme.BAD)
        return text
    text.append("command\n", theme.ACCENT_BOLD)
    argv = generated.preferred.nodes[0]
    text.append(fmt.clean(" ".join(argv)) + "\n", theme.BOLD)
    if len(generated.preferred.nodes) > 1:
        text.append(f"and the like on {len(generated.preferred.nodes) - 1} more nodes\n", theme.DIM)
    for name, content in generated.files.items():
        text.append(f"\n{name}\n", theme.ACCENT_BOLD)
        for line in content[:LONGEST_FILE].splitlines():
            code, mark, comment = line.partition("#")
            text.append(fmt.clean(code), theme.TEXT)
            text.append(fmt.clean(mark + comment) + "\n", theme.DIM)
    for note in generated.notes:
        text.append(f"\n{theme.GLYPHS.dot} {fmt.clean(note)}", theme.WARN)
    return text


def plan_text(plan: Plan, shape: ModelShape) -> Text:
    """What a plan becomes while nothing else about the run is chosen."""
    return config_text(plan, shape, TrainArgs(model=plan.model or "MODEL", output_dir="out"))


class ConfigScreen(Overlay[None]):
    """Read only; `ftdash configs` writes the same files."""

    HELP = "The files of this plan, as `ftdash configs --out DIR` writes them."
    BINDINGS: ClassVar = [Binding("escape,q,c,v,enter", "close", "Back", show=False)]

    def __init__(self, text: Text, title: str = "What this plan becomes") -> None:
        super().__init__()
        self._text, self._title = text, title

    def compose(self) -> ComposeResult:
        with VerticalScroll(id="config-box") as box:
            box.border_title = self._title
            box.border_subtitle = "↑↓ scroll  esc back"
            yield Static(self._text)

    def on_mount(self) -> None:
        self.query_one("#config-box").focus()

    def action_close(self) -> None:
        self.dismiss(None)
