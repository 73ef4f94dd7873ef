"""The Textual app: four panes, the keys between them, the watched run, and what stands above a pane."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import signal
import socket
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, ClassVar

from textual import on
from textual.app import App, ComposeResult, SystemCommand
from textual.binding import Binding
from textual.filter import ANSIToTruecolor, LineFilter
from textual.screen import Screen

from ftdash.tui import format as fmt
from ftdash.tui import theme
from ftdash.tui.messages import PlanHandedOver, RunChosen, RunUpdated
from ftdash.tui.panes.base import Pane
from ftdash.tui.plain_terminal import AsciiFilter
from ftdash.tui.widgets.bars import HintBar, TabBar
from ftdash.tui.widgets.lines import Box, KeptLines

if TYPE_CHECKING:
    from ftdash.monitor.rundir import RunDir
    from ftdash.tui.feed import RunFeed

ORDER = ("plan", "launch", "monitor", "diagnose")
PAIRS = {"plan": "launch", "launch": "plan", "monitor": "diagnose", "diagnose": "monitor"}
WIDE = 170  # columns from which two panes stand side by side
SHARES = {"plan": 3, "launch": 2, "monitor": 3, "diagnose": 2}  # fifths of the width then
BARS = 2  # lines above and below the panes
LIVE_RUNS_LOOKED_AT = 20  # newest runs whose state the tab's badge counts
HANG_LOOK_S = 2.0  # between looks whether the reader waits for its file system
LIVE_EVERY_S = 5.0


def make_pane(name: str) -> Pane:
    """A new pane; its module is loaded only now, so that the first pane is soon on the screen."""
    match name:
        case "plan":
            from ftdash.tui.panes.plan import PlanPane

            return PlanPane()
        case "launch":
            from ftdash.tui.panes.launch import LaunchPane

            return LaunchPane()
        case "monitor":
            from ftdash.tui.panes.monitor import MonitorPane

            return MonitorPane()
        case _:
            from ftdash.tui.panes.diagnose import DiagnosePane

            return DiagnosePane()


class Stage(KeptLines, Screen[None]):
    """The screen below all panes."""


class Cockpit(App[None]):
    """ftdash on the screen."""

    TITLE = "ftdash"
    CSS_PATH = "ftdash.tcss"
    AUTO_FOCUS = None
    ENABLE_COMMAND_PALETTE = True

    BINDINGS: ClassVar = [
        *(
            Binding(f"{number},f{number},alt+{number}", f"pane('{name}')", name.title())
            for number, name in enumerate(ORDER, 1)
        ),
        Binding("q", "quit", "Quit"),
        Binding("question_mark,f5", "help", "Help"),
        Binding("slash", "find", "Filter or search"),
        Binding("R", "runs", "Choose a run"),
        Binding("escape", "leave", "Back", show=False),
        Binding("ctrl+z", "suspend_process", "To the background", show=False),
    ]

    def __init__(self, run: RunDir | None = None, pane: str = "plan", runs_root: str | None = None) -> None:
        super().__init__()
        self.runs_root = runs_root
        self.active = pane
        self.feed: RunFeed | None = None
        self.panes: dict[str, Pane] = {}
        self._first_run = run
        self._ended = threading.Event()
        self._ascii = AsciiFilter()
        self.register_theme(theme.textual_theme())
        self.theme = "ftdash"

    def get_default_screen(self) -> Screen:
        return Stage(id="_default")

    def get_line_filters(self) -> Sequence[LineFilter]:
        """All colours are true ones: nothing is to be turned into such, line by line."""
        filters = [one for one in super().get_line_filters() if not isinstance(one, ANSIToTruecolor)]
        return [*filters, self._ascii] if theme.GLYPHS.ascii else filters

    def refresh_css(self, animate: bool = True) -> None:
        """Before there is a screen a theme only sets its variables: what is parsed then is parsed again."""
        if self.screen_stack:
            super().refresh_css(animate)
        else:
            self.stylesheet.set_variables(self.get_css_variables())

    def compose(self) -> ComposeResult:
        yield TabBar()
        yield Box(id="body")
        yield HintBar()

    async def on_mount(self) -> None:
        if not self.is_headless:
            for number in (signal.SIGTERM, signal.SIGHUP):  # the terminal is given back all the same
                asyncio.get_running_loop().add_signal_handler(number, self.exit, None, 128 + number)
        self.query_one(TabBar).show(active=self.active, place=socket.gethostname())
        await self._show_panes()
        self.watch(self.screen, "focused", self._focus_moved, init=False)
        self.screen_change_signal.subscribe(self, lambda _: self._show_hints())
        self.app_resume_signal.subscribe(self, lambda _: self.refresh(layout=True))  # after fg
        self.call_after_refresh(self._after_first_paint)

    def _after_first_paint(self) -> None:
        # What lives now lives long: keeping it out of later collections halves the slowest key presses.
        gc.freeze()
        gc.enable()
        if self._first_run is not None:
            self.follow(self._first_run)
        self.set_interval(HANG_LOOK_S, self._show_hang)
        threading.Thread(target=self._look_for_runs, name="run-finder", daemon=True).start()

    def on_unmount(self) -> None:
        self._ended.set()
        if self.feed is not None:
            self.feed.close()

    # Panes

    @property
    def wide(self) -> bool:
        return self.size.width >= WIDE

    def visible_panes(self) -> tuple[str, ...]:
        """Names of the panes on the screen, in their order."""
        if not self.wide:
            return (self.active,)
        return tuple(sorted((self.active, PAIRS[self.active]), key=ORDER.index))

    async def _show_panes(self) -> None:
        wanted = self.visible_panes()
        with self.batch_update():  # nobody sees the one squeezed by the other
            for name, pane in self.panes.items():
                pane.display = name in wanted
            for name in wanted:
                if name not in self.panes:
                    await self._mount(name)
        for name in wanted:
            self.show_newest(self.panes[name])
        self.query_one(TabBar).show(active=self.active)
        if self.feed is not None:
            self.feed.watch(any(name != "plan" for name in wanted))
        self._focus_active()

    async def _mount(self, name: str) -> None:
        """Make a pane in its place among the others, laid out for the room that it will have."""
        body, pane = self.query_one("#body"), make_pane(name)
        share = SHARES[name] / 5 if self.wide else 1
        pane.lay_out_for(round(self.size.width * share), self.size.height - BARS)
        before = [other for other in self.panes if ORDER.index(other) < ORDER.index(name)]
        self.panes[name] = pane
        if before:
            await body.mount(pane, after=self.panes[max(before, key=ORDER.index)])
        else:
            await body.mount(pane, before=0 if body.children else None)

    def _focus_active(self) -> None:
        pane = self.panes[self.active]
        focused = self.screen.focused
        if focused is None or pane not in focused.ancestors:
            target = pane.first_focus()
            if target is not None:
                target.focus(scroll_visible=False)
        self._focus_moved()

    async def action_pane(self, name: str) -> None:
        while len(self.screen_stack) > 1:
            self.pop_screen()
        self.active = name
        await self._show_panes()

    @on(TabBar.Picked)
    async def _tab_picked(self, event: TabBar.Picked) -> None:
        await self.action_pane(event.pane)

    async def on_resize(self) -> None:
        if self.panes and set(self.visible_panes()) != {n for n, pane in self.panes.items() if pane.display}:
            await self._show_panes()

    def _focus_moved(self) -> None:
        focused = self.screen.focused
        for widget in focused.ancestors if focused is not None else ():
            if isinstance(widget, Pane) and widget.id in ORDER and widget.id != self.active:
                self.active = widget.id
                self.query_one(TabBar).show(active=self.active)
        self._show_hints()

    def _show_hints(self) -> None:
        """Only keys that work now: those of what stands above the panes, or of the focus and its pane."""
        if not self.screen_stack or not (bars := self.screen_stack[0].query(HintBar)):  # the app is ending
            return
        focused = self.screen.focused if self.screen is self.screen_stack[0] else None
        speaking = [self.screen] if focused is None else [focused, *focused.ancestors]
        # The widget's own use of a key comes before the pane's.
        parts = [hint for widget in speaking for hint in getattr(widget, "HINTS", "").split("  ") if hint]
        by_key = {hint.split(" ")[0]: hint for hint in reversed(parts)}
        always = next((widget.ALWAYS for widget in speaking if hasattr(widget, "ALWAYS")), HintBar.ALWAYS)
        bars.first().show("  ".join(reversed(by_key.values())), always)

    # The watched run

    def follow(self, run: RunDir, *, again: bool = False) -> None:
        """Watch this run from now on, as it is, or played `again` from its beginning."""
        from ftdash.tui.feed import RunFeed
        from ftdash.tui.replaying import ReplayFeed

        if self.feed is not None:
            self.feed.close()
        self.feed = (ReplayFeed if again else RunFeed)(run, lambda: self.post_message(RunUpdated()))
        self.feed.watch(any(name != "plan" for name in self.visible_panes()))
        self.feed.start()

    @on(RunUpdated)
    def _run_updated(self) -> None:
        from ftdash.monitor.state import RunPhase

        if self.feed is None:
            return
        state = self.feed.take()
        stuck = state is not None and state.state is RunPhase.STALLED
        for tabs in self.screen_stack[0].query(TabBar):  # below whatever stands above the panes
            tabs.show(diagnose=theme.GLYPHS.stalled if stuck else "")
        for name in self.visible_panes():
            if name in self.panes:
                self.show_newest(self.panes[name])

    def _show_hang(self) -> None:
        """A reader that waits for its file system delivers nothing, and says so only when it is asked."""
        if self.feed is not None and self.feed.hangs:
            self._run_updated()

    def show_newest(self, pane: Pane) -> None:
        """Hand the newest state to one pane."""
        if self.feed is None or not pane.is_mounted:
            return
        try:
            pane.show_run(self.feed.peek(), self.feed.trouble)
        except Exception as error:  # one state that cannot be drawn is a notice; the next one may be drawn
            self.log.error(error)
            self.notice(
                f"{pane.TITLE} cannot show this state: {type(error).__name__}: {error}", severity="error"
            )

    @on(RunChosen)
    async def _run_chosen(self, event: RunChosen) -> None:
        self.follow(event.run)
        if event.pane:
            await self.action_pane(event.pane)

    @on(PlanHandedOver)
    async def _plan_handed_over(self, event: PlanHandedOver) -> None:
        await self.action_pane("launch")
        self.panes["launch"].take_plan(event.plan)  # type: ignore[attr-defined]

    def _look_for_runs(self) -> None:
        """In a thread: counts live runs for the tab, and offers the newest run when none is watched."""
        from ftdash.monitor.rundir import RunError, list_runs

        while not self._ended.is_set():
            live: list[RunDir] = []
            newest: RunDir | None = None
            try:
                runs = list_runs(self.runs_root, newest=LIVE_RUNS_LOOKED_AT)
            except RunError:
                runs = []
            for run in reversed(runs):
                try:
                    manifest = run.read_manifest()
                except RunError:
                    continue
                newest = newest or run
                if manifest.state in ("starting", "running"):
                    live.append(run)
            if self._ended.is_set():
                return
            with contextlib.suppress(RuntimeError):
                self.call_from_thread(self._runs_seen, live, newest)
            self._ended.wait(LIVE_EVERY_S)

    def _runs_seen(self, live: list[RunDir], newest: RunDir | None) -> None:
        if not (tabs := self.query(TabBar)):  # the screen is closing
            return
        tabs.first().show(monitor=f"{theme.GLYPHS.live}{len(live)}" if live else "")
        if self.feed is None and (found := live[0] if live else newest) is not None:
            self.follow(found)

    def parting_words(self) -> str:
        """For the shell, once the screen is gone: that a run goes on, and how to see or end it."""
        state = self.feed.peek() if self.feed is not None else None
        if state is None or state.manifest.state not in ("starting", "running"):
            return ""
        return f"{state.run} goes on: ftdash shows it again, ftdash stop {state.run} ends it"

    # Above a pane

    def notice(self, sentence: str, *, severity: str = "information") -> None:
        """One line that goes away by itself. The text may be anybody's: it is never markup."""
        self.notify(
            fmt.clean(sentence),
            severity=severity,  # type: ignore[arg-type]
            timeout=6,
            markup=False,
        )

    def ask(
        self,
        label: str,
        value: str,
        on_submit: Callable[[str], None],
        on_change: Callable[[str], None] | None = None,
    ) -> None:
        """A one-line question in the footer's place; esc gives the old value back to `on_change`."""
        from ftdash.tui.widgets.prompt import Prompt

        for old in self.query(Prompt):
            old.remove()
        self.screen.mount(Prompt(label, value, on_submit, on_change, back_to=self.screen.focused))

    def action_find(self) -> None:
        target = self.panes[self.active].needle_target() if self.active in self.panes else None
        if target is None or len(self.screen_stack) > 1:
            return
        set_needle: Callable[[str], None] = target.set_needle  # type: ignore[attr-defined]
        self.ask("/", getattr(target, "needle", ""), set_needle, set_needle)

    def action_help(self) -> None:
        from ftdash.tui.panes.help import HelpScreen

        if not isinstance(self.screen, HelpScreen):
            self.push_screen(HelpScreen(self.screen.focused, self.panes.get(self.active), self.screen))

    def action_runs(self) -> None:
        from ftdash.tui.panes.runs import RunsScreen

        if len(self.screen_stack) == 1:
            self.push_screen(RunsScreen(self.runs_root))

    def action_leave(self) -> None:
        pane = self.panes.get(self.active)
        target = pane.first_focus() if pane is not None else None
        if target is not None and len(self.screen_stack) == 1:
            target.focus()

    def get_system_commands(self, screen: Screen) -> Iterable[SystemCommand]:
        for number, name in enumerate(ORDER, 1):
            yield SystemCommand(
                f"{number} {name.title()}",
                f"Go to the {name} pane",
                lambda n=name: self.call_later(self.action_pane, n),
            )
        yield SystemCommand("Runs", "Choose a run to watch", self.action_runs)
        yield SystemCommand("Help", "Keys of what has the focus", self.action_help)
        yield SystemCommand(
            "Screenshot", "Save the screen as SVG", lambda: self.notice(self.save_screenshot())
        )
        yield SystemCommand("Quit", "Leave ftdash; runs go on", self.exit)
