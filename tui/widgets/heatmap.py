"""The expert heat map: layers down, experts across, each cell the load over the ideal (mean) load.

Too large for the screen, it shows the loudest of neighbouring cells; zoomed in, one cell an expert.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from rich.style import Style
from textual import events
from textual.binding import Binding

from ftdash.monitor.state import ExpertLayer, RoutingPoint
from ftdash.tui import format as fmt
from ftdash.tui import theme
from ftdash.tui.widgets.chart import resample
from ftdash.tui.widgets.lines import Line, LineWidget, Part

DEAD = 0.02  # below this share of the ideal load an expert counts as dead
HOT = 3.0
WIDEST = 4  # columns of a cell where there is room
STEPS = (0.25, 0.6, 0.9, 1.15, 1.6, 2.2, HOT)  # upper edges of the shades; above the last one: hot


@dataclass(frozen=True, slots=True)
class Load:
    """One expert: its layer, its number, its tokens and their ratio to the layer's mean."""

    layer: int
    expert: int
    tokens: int
    ratio: float


@dataclass(frozen=True, slots=True)
class ExpertSummary:
    """What the whole map says: worst imbalance, dead experts, hottest and coldest."""

    imbalance: float
    dead: int
    experts: int
    hottest: tuple[Load, ...]
    coldest: tuple[Load, ...]


def ratios(layer: ExpertLayer) -> list[float]:
    """Load over ideal of each expert; zeros for a layer without tokens."""
    total = sum(layer.counts)
    return (
        [count * len(layer.counts) / total for count in layer.counts] if total else [0.0] * len(layer.counts)
    )


def summarise(layers: Sequence[ExpertLayer], top: int = 5) -> ExpertSummary:
    """Top and bottom experts over all layers that saw tokens."""
    seen = [(layer, ratios(layer)) for layer in layers if sum(layer.counts)]
    dead = sum(sum(ratio < DEAD for ratio in row) for _, row in seen if min(row) < DEAD)
    # Only the extremes of a layer can be among the extremes of all.
    ends: list[tuple[float, int, ExpertLayer]] = []
    for layer, row in seen:
        order = sorted(range(len(row)), key=row.__getitem__) if top > 1 else _ends(row)
        ends += [(row[expert], expert, layer) for expert in {*order[:top], *order[-top:]}]
    ends.sort(key=lambda end: (end[0], end[2].layer, end[1]))
    loads = [Load(layer.layer, expert, layer.counts[expert], ratio) for ratio, expert, layer in ends]
    return ExpertSummary(
        imbalance=loads[-1].ratio if loads else 0.0,
        dead=dead,
        experts=sum(len(row) for _, row in seen),
        hottest=tuple(reversed(loads[-top:])),
        coldest=tuple(loads[:top]),
    )


def _ends(row: Sequence[float]) -> list[int]:
    """Where the lowest and the highest value stand."""
    return [row.index(min(row)), row.index(max(row))]


def pooled(values: Sequence[float], columns: int) -> list[float]:
    """At most `columns` values: of each stretch the one farthest from the ideal 1."""
    if len(values) <= columns:
        return list(values)
    result = []
    for column in range(columns):
        stretch = values[column * len(values) // columns : (column + 1) * len(values) // columns]
        result.append(farthest(stretch))
    return result


def farthest(loads: Sequence[float]) -> float:
    """The ratio farthest from 1, a half being as far as a double."""
    high, low = max(loads), min(loads)
    return high if high * max(low, 1e-3) >= 1 else low


def shade(ratio: float) -> Part:
    """The cell of one ratio: a height and a colour; dead experts are a letter, not a colour alone."""
    if ratio < DEAD:
        return ("x" if theme.GLYPHS.ascii else theme.GLYPHS.times), theme.BAD
    level = next((index for index, edge in enumerate(STEPS) if ratio < edge), len(STEPS))
    return theme.GLYPHS.levels[min(level + 1, 8)], theme.HEAT_STYLES[min(level, len(theme.HEAT_STYLES) - 1)]


class ExpertHeatmap(LineWidget, can_focus=True):
    """Layers × experts, load over ideal."""

    HELP = (
        "Each cell is one expert: its tokens over the layer's mean (1.0 is even). The taller and warmer, the "
        "hotter; × is dead: below 2 % of its share.\n"
        "arrows  move\n"
        "z  zooms between the whole map and one cell an expert\n"
        "t  lists the hottest and the coldest"
    )
    HINTS = "arrows move  z zoom  t top and bottom"

    BINDINGS: ClassVar = [
        Binding("left", "move(0,-1)", "Left", show=False),
        Binding("right", "move(0,1)", "Right", show=False),
        Binding("up", "move(-1,0)", "Up", show=False),
        Binding("down", "move(1,0)", "Down", show=False),
        Binding("home", "edge(0)", "First", show=False),
        Binding("end", "edge(1)", "Last", show=False),
        Binding("z,enter", "zoom", "Zoom", show=False),
        Binding("t", "extremes", "Top and bottom", show=False),
    ]

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self.loads: tuple[ExpertLayer, ...] = ()
        self.aux_loss: float | None = None
        self.routing: tuple[RoutingPoint, ...] = ()
        self.zoomed = False
        self.extremes = False
        self.row = self.column = 0
        self._ratios: list[list[float]] = []
        self._summary = summarise(())
        self._pooled: tuple[int, int, list[list[float]]] = (0, 0, [])  # layers a line, experts a cell, ratios
        self.border_title = "Experts: load over ideal"

    def lines_for(self, layers: Sequence[ExpertLayer]) -> int:
        """Lines that the whole map would like: two a layer where its figures fit below."""
        wide = max((len(layer.counts) for layer in layers), default=1) * WIDEST <= self.size.width - 4
        return len(layers) * (2 if wide else 1)

    def show(
        self,
        layers: tuple[ExpertLayer, ...],
        aux_loss: float | None = None,
        routing: tuple[RoutingPoint, ...] = (),
    ) -> None:
        """`routing`: how even it was over the run, shown below the map."""
        if layers is self.loads and aux_loss == self.aux_loss and routing is self.routing:
            return
        self.loads, self.aux_loss, self.routing = layers, aux_loss, routing
        self._ratios = [ratios(layer) for layer in layers]
        self._summary = summarise(layers, 1)
        self._pooled = (0, 0, [])
        self.row = min(self.row, max(0, len(layers) - 1))
        self._retitle()
        self.redraw()

    def _retitle(self) -> None:
        if not self.loads:
            title = "Experts"
        else:
            summary = self._summary
            words = [f"Experts: load over ideal  imbalance {summary.imbalance:.1f}"]
            words.append(f"dead {summary.dead} of {summary.experts:,}")
            if summary.hottest and summary.imbalance > 1.6:
                hot = summary.hottest[0]
                words.append(f"hot L{hot.layer}/E{hot.expert} {hot.ratio:.1f}{theme.GLYPHS.times}")
            if self.aux_loss is not None:
                words.append(f"aux {fmt.loss(self.aux_loss)}")
            title = "  ".join(words)
        self.retitle(title)
        subtitle = (self._cell_words() if self.has_focus else self._routing_words()) if self.loads else ""
        if subtitle != (self.border_subtitle or ""):
            self.border_subtitle = subtitle

    def _routing_words(self) -> str:
        """The coefficient of variation and the entropy over the run, each on the scale that it can have."""
        if not self.routing:
            return ""
        newest, room = self.routing[-1], 24 if self.size.width >= 90 else 8
        variations = resample([point.variation for point in self.routing], min(room, len(self.routing)))
        entropies = resample([point.entropy for point in self.routing], min(room, len(self.routing)))
        most = max(1.0, *(point.variation for point in self.routing))
        levels = theme.GLYPHS.levels
        return (
            f"CV {newest.variation:.2f} {fmt.spark(variations, room, levels, (0.0, most))}"
            f"  entropy {newest.entropy:.2f} {fmt.spark(entropies, room, levels, (0.0, 1.0))}"
        )

    def _cell_words(self) -> str:
        layer = self.loads[self.row]
        expert = min(self.column, len(layer.counts) - 1)
        ratio = self._ratios[self.row][expert]
        words = f"{ratio:.2f}{theme.GLYPHS.times} ideal, {layer.counts[expert]:,} tokens"
        return f"L{layer.layer} E{expert}: {words}"

    def draw(self, width: int, height: int) -> list[Line]:
        if not self.loads:
            return [(("no experts: a dense model, or no counts yet", theme.DIM),)]
        if self.extremes:
            return self._extreme_lines(width, height)
        gutter = len(f"L{self.loads[-1].layer}") + 1
        field = max(1, width - gutter)
        experts = max(len(row) for row in self._ratios)
        if self.zoomed:
            left = self._window(self.column, field, experts)
            top = self._window(self.row, height, len(self.loads))
            rows = range(top, min(len(self.loads), top + height))
            return [
                self._map_line(
                    row,
                    gutter,
                    self._ratios[row][left : left + field],
                    1,
                    self._focus(row, self.column - left),
                )
                for row in rows
            ]
        stretch = max(1, min(WIDEST, field // experts)) if experts * 2 <= field else 1
        layers_a_line = max(1, -(-len(self.loads) // max(1, height)))
        lines = []
        for index, values in enumerate(self._pool(layers_a_line, max(1, -(-experts // field)))):
            first = index * layers_a_line
            here = first <= self.row < first + layers_a_line
            focus = self._focus(self.row, self.column * len(values) // experts) if here else -1
            lines.append(self._map_line(first, gutter, values, stretch, focus))
            if stretch == WIDEST and height >= 2 * len(self.loads):
                figures = "".join(fmt.fit(f"{ratio:.1f}", stretch) for ratio in values)
                lines.append(((" " * gutter + figures, theme.DIM),))
        return lines

    def _pool(self, layers_a_line: int, experts_a_cell: int) -> list[list[float]]:
        """The whole map with neighbours merged, kept until the counts or the size change."""
        if self._pooled[:2] != (layers_a_line, experts_a_cell):
            pooled_rows = []
            for first in range(0, len(self._ratios), layers_a_line):
                members = self._ratios[first : first + layers_a_line]
                row = members[0] if len(members) == 1 else list(map(farthest, zip(*members, strict=False)))
                pooled_rows.append(pooled(row, -(-len(row) // experts_a_cell)))
            self._pooled = (layers_a_line, experts_a_cell, pooled_rows)
        return self._pooled[2]

    def _focus(self, row: int, cell: int) -> int:
        return cell if self.has_focus and row == self.row else -1

    def _map_line(self, row: int, gutter: int, values: Sequence[float], stretch: int, focus: int) -> Line:
        label = fmt.fit(f"L{self.loads[row].layer}", gutter)
        return ((label, theme.DIM), *self._cells(values, stretch, focus))

    @staticmethod
    def _cells(values: Sequence[float], stretch: int, focus: int) -> list[Part]:
        parts: list[Part] = []
        for index, ratio in enumerate(values):
            char, style = shade(ratio)
            text = char * stretch if stretch < 3 else char * (stretch - 1) + " "
            if index == focus:
                parts.append((text, style + Style(reverse=True)))
            elif parts and parts[-1][1] is style:
                parts[-1] = (parts[-1][0] + text, style)
            else:
                parts.append((text, style))
        return parts

    @staticmethod
    def _window(position: int, room: int, total: int) -> int:
        return max(0, min(position - room // 2, total - room))

    def _extreme_lines(self, width: int, height: int) -> list[Line]:
        summary = summarise(self.loads, max(1, height - 1))
        half = max(20, width // 2)
        head: Line = ((fmt.fit("hottest", half), theme.DIM), ("coldest", theme.DIM))
        lines: list[Line] = [head]
        for hot, cold in zip(summary.hottest, summary.coldest, strict=True):
            lines.append((*self._load_parts(hot, half), *self._load_parts(cold, half)))
        return lines

    @staticmethod
    def _load_parts(load: Load, width: int) -> tuple[Part, ...]:
        char, style = shade(load.ratio)
        name = fmt.fit(f"L{load.layer}/E{load.expert}", 10)
        text = fmt.fit(f"{load.ratio:5.2f}{theme.GLYPHS.times}  {load.tokens:,} tokens", width - 12)
        return ((char + " ", style), (name, theme.TEXT), (text, theme.TEXT))

    def action_move(self, rows: int, columns: int) -> None:
        if self.loads:
            self.row = max(0, min(self.row + rows, len(self.loads) - 1))
            self.column = max(0, min(self.column + columns, len(self.loads[self.row].counts) - 1))
            self._retitle()
            self.redraw()

    def action_edge(self, end: int) -> None:
        if self.loads:
            self.action_move(0, len(self.loads[self.row].counts) * (1 if end else -1))

    def action_zoom(self) -> None:
        self.zoomed, self.extremes = not self.zoomed, False
        self.redraw()

    def action_extremes(self) -> None:
        self.extremes = not self.extremes
        self.redraw()

    def on_focus(self) -> None:
        self._retitle()
        self.redraw()

    def on_blur(self) -> None:
        self._retitle()
        self.redraw()

    def on_mouse_scroll_down(self, event: events.MouseScrollDown) -> None:
        if self.zoomed:
            event.stop()
            self.action_move(3, 0)

    def on_mouse_scroll_up(self, event: events.MouseScrollUp) -> None:
        if self.zoomed:
            event.stop()
            self.action_move(-3, 0)
