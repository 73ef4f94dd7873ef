"""Inputs of the Launch pane that depend on the backend, and what they become: job script, exports, diff."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from rich.text import Text
from textual.widget import Widget

from ftdash.engine.launch.spec import Backend, Device, LaunchError
from ftdash.engine.recipes import load_recipe, recipe_names
from ftdash.tui import format as fmt
from ftdash.tui import theme
from ftdash.tui.launching import Differed, SiteSeen, SlurmFields, Wanted
from ftdash.tui.widgets.choice import Choice, Picker
from ftdash.tui.widgets.slider import Slider, geometric
from ftdash.tui.widgets.text_field import TextField

SLURM_FIELDS = tuple(field.name for field in fields(SlurmFields))
NO_RECIPE = "none: the plan"
WHOLE = ("steps", "nodes", "save_steps")
NODE_STOPS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)
LABELS = {"cpus_per_task": "CPUs a node", "qos": "QOS", "container_runtime": "Runtime"}
EXAMPLES = {
    "time": "the partition's limit, or 8:00:00, 1-12",
    "memory": "the partition's, or 200G a node",
    "cpus_per_task": "the cluster's",
    "container": "none, or an image",
    "container_runtime": "pyxis, or apptainer",
    "modules": "none, or cuda/12.8 …",
    "directives": "none, or --switches=1 …",
}


def run_controls(wanted: Wanted) -> Iterator[Widget]:
    """What every run has, whatever carries it."""
    yield Picker("recipe", "Recipe", recipe_options(), wanted.recipe or NO_RECIPE)
    yield TextField("data", "Data", wanted.data, empty="the small chat set that ships")
    steps = geometric(10, 100_000, 8)
    yield Slider("steps", "Steps", steps, wanted.steps, fmt=fmt.number, log=True)
    yield Slider("save_steps", "Save every", (0.0, *steps), wanted.save_steps, fmt=_saves, log=True)
    yield TextField("resume", "Go on from", wanted.resume, empty="the first step, or a checkpoint folder")
    yield TextField("out", "Output", wanted.out, empty="below the run directory")
    yield Choice("device", "Device", [(kind.value, kind.value) for kind in Device], wanted.device)
    yield TextField("name", "Name", wanted.name, empty="from the model")


def recipe_options() -> tuple[str, ...]:
    """No recipe, then every recipe, each followed by its variants."""
    options = [NO_RECIPE]
    for name in recipe_names():
        options += [name, *(f"{name}:{variant}" for variant, _ in load_recipe(name).variants)]
    return tuple(options)


def _saves(steps: float) -> str:
    return fmt.number(steps) if steps else "never"


def show_values(pane: Widget, wanted: Wanted) -> None:
    """Every control gets the value that `wanted` has for it, and tells nobody."""
    for control in pane.query(".control").results():
        name = control.name or ""
        if isinstance(control, Slider):
            control.set_value(float(getattr(wanted, name)), tell=False)
        elif isinstance(control, Picker):
            control.set_value(wanted.recipe or NO_RECIPE, tell=False)
        elif isinstance(control, Choice | TextField):
            source = wanted.slurm if name in SLURM_FIELDS else wanted
            control.set_value(getattr(source, name), tell=False)


def backend_controls(wanted: Wanted) -> Iterator[Widget]:
    """The backend, then the fields of each; the pane's class shows those of the chosen one."""
    yield Choice("backend", "Backend", [(kind.value, kind.value) for kind in Backend], wanted.backend)
    nodes = Slider("nodes", "Nodes", NODE_STOPS, wanted.nodes, fmt=fmt.number, log=True)
    nodes.add_class("of-slurm", "of-ssh")
    yield nodes
    hosts = TextField("hosts", "Hosts file", wanted.hosts, empty="needed: NAME [slots=N] a line")
    hosts.add_class("of-ssh")
    yield hosts
    for name in SLURM_FIELDS:
        field = TextField(
            name,
            LABELS.get(name, name.capitalize()),
            getattr(wanted.slurm, name),
            empty=EXAMPLES.get(name, "the cluster's default"),
        )
        field.add_class("of-slurm")
        yield field


def with_value(wanted: Wanted, name: str, value: float | str) -> Wanted:
    """`wanted` with one input changed."""
    if name in SLURM_FIELDS:
        typed: dict[str, Any] = {name: str(value)}
        return replace(wanted, slurm=replace(wanted.slurm, **typed))
    changed: dict[str, Any] = {name: int(value) if name in WHOLE else str(value)}
    return replace(wanted, **changed)


def show_site(pane: Widget, seen: SiteSeen) -> None:
    """The partition's own values stand in the fields that are left empty."""
    site = seen.site
    if site is None:
        return
    others = ", ".join(name for name in site.shapes if name != site.default)
    partition = pane.query_one("#in-partition", TextField)
    partition.empty = fmt.clean(
        f"{site.default}, the default" if site.default else "none is the default: name one"
    )
    if others:
        partition.empty += f"; also {fmt.clean(others)}"
    partition.redraw()


def job_text(wanted: Wanted, seen: SiteSeen | None = None) -> Text:
    """The batch script as it would be submitted; an option Slurm could not take is its one line."""
    from ftdash.engine.slurm.defaults import in_words
    from ftdash.engine.slurm.script import batch_script, directives
    from ftdash.engine.slurm.submit import completed, spread

    try:
        spec, options = spread(wanted.spec(None))
    except LaunchError as error:
        return Text(f"{theme.GLYPHS.no} {fmt.clean(str(error))}\n", theme.BAD)
    text = Text()
    if seen is not None and seen.site is not None:
        partition = options.partition or seen.site.default
        shape = seen.site.shape(partition)
        options = completed(spec, options, seen.site)
        words = (
            in_words(partition, shape) if shape else f"sinfo knows no partition {partition or '(default)'}"
        )
        text.append(f"{fmt.clean(words)}\n", theme.DIM if shape else theme.WARN)
    elif seen is not None and seen.trouble:
        text.append(f"{theme.GLYPHS.no} {fmt.clean(seen.trouble)}\n", theme.BAD)
    text.append("job.sbatch\n", theme.ACCENT_BOLD)
    for line in batch_script(Path("RUN"), options, python=sys.executable).splitlines():
        comment = theme.BOLD if line.startswith("#SBATCH") else theme.DIM
        text.append(fmt.clean(line) + "\n", comment if line.startswith("#") else theme.TEXT)
    _, arguments = directives(options)
    if arguments:
        text.append("given to sbatch itself: ", theme.DIM)
        text.append(fmt.clean(" ".join(arguments)) + "\n", theme.TEXT)
    return text


def switches_text(names: tuple[str, ...]) -> Text:
    """The exports of the chosen debug switches, each with its price."""
    from ftdash.engine.configs.debug_switches import SWITCHES

    text = Text()
    text.append("debug switches\n", theme.ACCENT_BOLD)
    for switch in SWITCHES:
        if switch.name in names:
            text.append(switch.assignment, theme.BOLD)
            text.append(f"  price: {switch.price}\n", theme.WARN)
    return text


def diff_text(found: Differed) -> Text:
    """The diff in colours; without a difference, a sentence."""
    if found.trouble:
        return Text(fmt.clean(found.trouble), theme.WARN)
    if not found.lines:
        return Text(f"{theme.GLYPHS.fits} the same files as {fmt.clean(found.run)}", theme.OK)
    text = Text()
    for line in found.lines:
        mark = line[:1]
        style = {"+": theme.OK, "-": theme.BAD, "@": theme.ACCENT}.get(mark, theme.DIM)
        text.append(fmt.clean(line) + "\n", style)
    return text
