"""Made-up runs for the screens: states of any size, with a straggler or hostile text on demand."""

from __future__ import annotations

import contextlib
import math
import random
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path

from msgspec import structs
from textual.app import App
from textual.geometry import Size
from textual.pilot import Pilot

from ftdash.monitor.rundir import Manifest, RunDir
from ftdash.monitor.state import (
    Alert,
    ExpertLayer,
    GpuState,
    Point,
    RankPhase,
    RankState,
    RunPhase,
    RunState,
)
from ftdash.tui.cockpit import Cockpit

HOSTILE = ("[/usr/bin/x]", "[rank0]", "[node_modules]", "[bold red]loud[/]", "[link=x", "\x1b[31mred\x1b[0m")
NOW = 1_800_000_000.0


def rank_state(rank: int, *, step: int = 120, on_gpu: bool = True, per_node: int = 8) -> RankState:
    """One healthy rank; the figures differ a little from rank to rank."""
    jitter = random.Random(rank * 7919 + step).uniform(-0.02, 0.02)
    host = f"gpu-{rank // per_node:03d}"
    gpu = GpuState(
        index=rank % per_node,
        uuid=f"GPU-{rank:04d}",
        name="H100 SXM",
        host=host,
        memory_used=int(71.2e9 * (1 + jitter)),
        memory_total=int(80e9),
        util=97 + rank % 3,
        power_w=402 * (1 + jitter),
        power_limit_w=700,
        temp_c=61 + rank % 9,
    )
    return RankState(
        rank=rank,
        host=host,
        pid=4000 + rank,
        device=f"cuda:{rank % per_node}" if on_gpu else "cpu",
        step=step,
        epoch=step / 600,
        loss=1.182 + jitter,
        aux_loss=0.0213,
        lr=2e-4,
        grad_norm=0.9 + jitter,
        tokens=step * 4000,
        tokens_per_s=2140 * (1 + jitter) if on_gpu else 310 * (1 + jitter),
        step_s=0.47 * (1 + jitter),
        data_s=0.009,
        forward_s=0.15,
        backward_s=0.28,
        optimizer_s=0.03,
        memory_used=gpu.memory_used if on_gpu else int(0.62e9),
        memory_total=gpu.memory_total if on_gpu else int(25.3e9),
        allocated=int(62e9) if on_gpu else None,
        reserved=int(69e9) if on_gpu else None,
        peak=int(66e9) if on_gpu else None,
        cpu=98.0,
        process_state="R",
        heartbeat_age_s=0.4,
        phase="backward",
        state=RankPhase.COMPUTE,
        gpu=gpu if on_gpu else None,
    )


def expert_layers(layers: int, experts: int, *, seed: int = 0) -> tuple[ExpertLayer, ...]:
    """A lively map: uneven loads, one hot expert, a few dead ones."""
    chance = random.Random(seed)
    result = []
    for layer in range(layers):
        counts = [int(max(0, chance.gauss(1000, 350))) for _ in range(experts)]
        if layer == layers // 3:
            counts[experts // 3] = 6300
        if layer % 7 == 3:
            counts[chance.randrange(experts)] = 0
        result.append(ExpertLayer(layer, tuple(counts)))
    return tuple(result)


def points(steps: int, speed: float) -> tuple[Point, ...]:
    """A falling loss and a nearly steady speed."""
    chance = random.Random(3)
    return tuple(
        Point(
            step=step,
            t=NOW - (steps - step),
            loss=1.1 + 2.2 * math.exp(-step / 60) + chance.uniform(-0.06, 0.06),
            tokens_per_s=speed * (1 + chance.uniform(-0.08, 0.05)),
            memory_used=int(71.2e9),
            grad_norm=1.0,
            tokens=step * 32_000,
        )
        for step in range(1, steps + 1)
    )


def run_state(ranks: int = 8, *, step: int = 120, on_gpu: bool = True, moe: bool = True) -> RunState:
    """A healthy running run."""
    members = tuple(rank_state(rank, step=step, on_gpu=on_gpu) for rank in range(ranks))
    speed = sum(rank.tokens_per_s or 0.0 for rank in members)
    manifest = Manifest(
        run="20261129-141502-qwen-moe-lora-3f2a",
        name="qwen-moe-lora",
        created=NOW - 400,
        started=NOW - 390,
        state="running",
        world_size=ranks,
        max_steps=6000,
        plan={"strategy": "fsdp", "method": "lora"},
        predicted={
            "memory": {"device": int(72.7e9)},
            "time": {"tokens_per_s_per_gpu": 2400.0},
        },
    )
    return RunState(
        run=manifest.run,
        path="/runs/x",
        manifest=manifest,
        state=RunPhase.RUNNING,
        now=NOW,
        step=step,
        max_steps=6000,
        loss=1.182,
        tokens_per_s=speed,
        eta_s=5 * 3600 + 12 * 60,
        ranks=members,
        gpus=tuple(rank.gpu for rank in members if rank.gpu is not None),
        experts=expert_layers(48, 128) if moe else (),
        points=points(step, speed),
        batch=ranks,
        tokens_per_step=ranks * 4001.0,
    )


def with_straggler(state: RunState, rank: int = 5) -> RunState:
    """One rank runs at three quarters of the pace, because of its power cap."""
    members = list(state.ranks)
    gpu = members[rank].gpu
    if gpu is not None:
        gpu = structs.replace(gpu, power_w=188.0, util=61, throttle=("power cap",))
    members[rank] = structs.replace(members[rank], tokens_per_s=1240.0, step_s=0.63, gpu=gpu)
    alert = Alert("slow-rank", "warning", f"rank {rank} slow: power cap", (rank,), NOW - 30)
    return replace(state, ranks=tuple(members), alerts=(*state.alerts, alert))


def with_hostile_text(state: RunState) -> RunState:
    """Everything that comes from outside is written to break a screen."""
    members = tuple(
        structs.replace(rank, host=HOSTILE[rank.rank % len(HOSTILE)], phase=HOSTILE[-2], device=HOSTILE[0])
        for rank in state.ranks
    )
    alerts = tuple(Alert(f"h{index}", "error", text, (index,), NOW) for index, text in enumerate(HOSTILE))
    return replace(state, ranks=members, alerts=alerts, notices=HOSTILE)


class StillFeed:
    """A feed that shows one state and reads nothing."""

    hangs = False

    def __init__(self, state: RunState | None, run: RunDir, trouble: str = "") -> None:
        self.state, self.run, self.trouble = state, run, trouble

    def peek(self) -> RunState | None:
        return self.state

    def take(self) -> RunState | None:
        return self.state

    def watch(self, visible: bool) -> None:
        """Nothing is read, so nothing is paused."""

    def attend(self, ranks: object) -> None:
        """Nothing is read, so nothing is read oftener."""

    def close(self) -> None:
        """Nothing is open."""


def screen_text(app: App[None]) -> str:
    """What stands on the screen now, line by line, without styles."""
    width, height = app.size
    strips = app.screen._compositor.render_strips(Size(width, height))
    return "\n".join("".join(segment.text for segment in strip) for strip in strips)


@contextlib.asynccontextmanager
async def cockpit(
    tmp_path: Path,
    *,
    pane: str = "monitor",
    size: tuple[int, int] = (120, 40),
    state: RunState | None = None,
    run: RunDir | None = None,
) -> AsyncIterator[tuple[Cockpit, Pilot[None]]]:
    """The cockpit without a terminal, on an empty folder of runs, showing `state` where given."""
    app = Cockpit(run=run, pane=pane, runs_root=str(tmp_path / "runs"))
    async with app.run_test(size=size, notifications=True) as pilot:
        await pilot.pause()
        if state is not None:
            app.feed = StillFeed(state, run or RunDir(tmp_path / "nowhere"))  # type: ignore[assignment]
            for name in app.visible_panes():
                app.show_newest(app.panes[name])
            await pilot.pause()
        yield app, pilot


async def until(pilot: Pilot[None], holds: Callable[[], bool], patience_s: float = 10.0) -> None:
    """Wait for a condition; the screen's text comes with the failure."""
    deadline = time.monotonic() + patience_s
    while not holds():
        assert time.monotonic() < deadline, screen_text(pilot.app)
        await pilot.pause(0.02)
