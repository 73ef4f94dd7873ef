"""Makes the RunState that screens draw: from the manifest, the summary and what processes there are."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from statistics import median

import msgspec

from ftdash.monitor import liveness
from ftdash.monitor.beat import Beat
from ftdash.monitor.liveness import FINAL, Signs
from ftdash.monitor.nvml.shown import gpu_state
from ftdash.monitor.records import HANG_CODE, HANG_OVER_CODE, Step, to_float
from ftdash.monitor.rundir import Manifest, RunDir
from ftdash.monitor.state import Alert, ExpertLayer, GpuState, RankState, RunPhase, RunState
from ftdash.monitor.summary import NodeSummary, RankSummary, Summary
from ftdash.monitor.wording import duration

MOST_SILENT_NAMED = 3
ASKED_RANKS = 64  # ranks of one run take their steps together: so many tell how long these last
GONE_AFTER_S = 5.0  # an agent that is alive and has not listed a rank for so long has seen it go


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What a reader found out besides the telemetry files."""

    now: float  # UTC seconds
    agents: Collection[str]  # hosts with a living agent
    processes: int | None  # of this run on this machine; None: not counted
    launcher_code: int | None
    beats: Mapping[int, Beat]  # read from the beat files themselves
    dead_pids: Collection[int]  # processes of this machine that are known to be gone
    notices: tuple[str, ...] = ()
    silent: Mapping[str, float] = field(default_factory=dict)  # seconds without a word, by host


@dataclass(slots=True)
class Shown:
    """What was made of each rank last. Ranks that are not `due` are shown as they were; None: all are due."""

    due: Collection[int] | None = None
    sums_due: bool = True  # whether experts and what is compared with the plan are taken over all ranks, too
    signs: dict[int, Signs] = field(default_factory=dict)
    states: dict[int, RankState] = field(default_factory=dict)
    measured: dict[str, float] = field(default_factory=dict)
    experts: tuple[ExpertLayer, ...] = ()
    step_s: float | None = None
    gpus: dict[str, tuple[float, list[GpuState]]] = field(default_factory=dict)  # by host, with its time
    gpu_of_uuid: dict[str, GpuState] = field(default_factory=dict)

    def is_due(self, rank: int) -> bool:
        return self.due is None or rank in self.due or rank not in self.states

    def gpus_of(self, node: NodeSummary) -> list[GpuState]:
        """The node's GPUs; the same objects until its agent reports again."""
        known = self.gpus.get(node.host)
        if known is None or known[0] != node.last_t:
            known = self.gpus[node.host] = (node.last_t, _gpus(node))
            self.gpu_of_uuid.update((gpu.uuid, gpu) for gpu in known[1] if gpu.uuid)
        return known[1]


_HANG_CODES = frozenset({HANG_CODE, HANG_OVER_CODE})


def build_state(
    run: RunDir, manifest: Manifest, summary: Summary, around: Surroundings, shown: Shown | None = None
) -> RunState:
    """The run as it is now. `shown` is what the last call with it made, and is brought up to date."""
    shown = Shown() if shown is None else shown
    ranks = [summary.ranks[rank] for rank in sorted(summary.ranks)]
    ended = {end.rank: end.code for end in manifest.exits if end.rank is not None}
    final = RunPhase(manifest.state) in FINAL
    due = [rank for rank in ranks if shown.is_due(rank.rank)]
    signs = shown.signs
    signs.update((rank.rank, _signs(rank, ended, summary.nodes, around)) for rank in due)
    if manifest.attached:  # a log tells of steps at intervals of its own: silence there is no sign of a hang
        signs = {rank: msgspec.structs.replace(seen, beat_age_s=None) for rank, seen in signs.items()}
    outcome = liveness.run_phase(
        manifest,
        list(signs.values()),
        agents=around.agents,
        processes=around.processes,
        launcher_code=around.launcher_code,
        now=around.now,
    )
    gpus = [gpu for host in sorted(summary.nodes) for gpu in shown.gpus_of(summary.nodes[host])]
    # the end of a watch is not that of the ranks
    phase = RunPhase.RUNNING if manifest.attached and outcome.phase is RunPhase.STOPPED else outcome.phase
    shown.states.update(
        (rank.rank, _rank_state(rank, signs[rank.rank], phase, summary.nodes, shown.gpu_of_uuid))
        for rank in (ranks if phase in FINAL else due)
    )
    states = tuple([shown.states[rank.rank] for rank in ranks])
    lasts = [rank.last for rank in ranks if rank.last]
    step = min([last.step for last in lasts], default=0)
    max_steps = manifest.max_steps or max((rank.meta.max_steps for rank in ranks if rank.meta), default=0)
    tokens_per_s = _throughput(states, outcome.phase)
    if shown.sums_due:
        shown.step_s = _typical_step_s(ranks)
        shown.measured = _measured(ranks, lasts, states, tokens_per_s, shown.step_s)
        shown.experts = summary.expert_layers()
    step_s = shown.step_s
    running, stalled = outcome.phase is RunPhase.RUNNING, outcome.phase is RunPhase.STALLED
    points = summary.points()
    losses = [loss for last in lasts if last.step == step and (loss := to_float(last.loss)) is not None]
    return RunState(
        run=manifest.run,
        path=str(run.path),
        manifest=manifest,
        state=outcome.phase,
        now=around.now,
        step=step,
        max_steps=max_steps,
        loss=sum(losses) / len(losses) if losses else None,
        tokens_per_s=tokens_per_s,
        eta_s=(max_steps - step) * step_s if running and step_s and step and max_steps >= step else None,
        ranks=states,
        gpus=tuple(gpus),
        experts=shown.experts,
        points=points,
        routing=summary.routing.points(),
        alerts=_silent_nodes(around, states)
        + _own_alerts(outcome, around.now, states, ranks, signs)
        + _hang_alerts(summary, outcome),
        notices=around.notices + ((outcome.reason,) if outcome.reason and not (final or stalled) else ()),
        batch=_batch(manifest, ranks),
        tokens_per_step=summary.tokens_per_step(len(lasts)),
        measured=shown.measured,
    )


def _signs(
    rank: RankSummary, ended: Mapping[int, int], nodes: Mapping[str, NodeSummary], around: Surroundings
) -> Signs:
    sample, last = rank.sample, rank.last
    if (beat := around.beats.get(rank.rank)) is not None:
        beat_t, beat_step, phase = beat
    elif sample is not None and sample.beat_t > 0:
        beat_t, beat_step, phase = sample.beat_t, sample.beat_step, sample.beat_phase
    else:
        beat_t, beat_step, phase = 0.0, 0, ""
    code = ended.get(rank.rank, rank.exit.code if rank.exit else None)
    pid = sample.pid if sample else rank.meta.pid if rank.meta else 0
    gone = rank.rank in ended or rank.exit is not None or pid in around.dead_pids
    node = nodes.get(rank.sample_host)
    if not gone and sample is not None and node is not None and rank.sample_host in around.agents:
        gone = node.last_t - sample.t > GONE_AFTER_S
    step, last_t = (last.step, last.t) if last is not None else (0, 0.0)
    if beat_t > last_t:
        last_t = beat_t
    age_s = None
    if last_t > 0:
        age_s = max(0.0, around.now - last_t - (node.skew.skew_s if node is not None else 0.0))
    return Signs(  # by position, as RankState below
        age_s,
        phase,
        beat_step if beat_step > step else step,
        sample.state if sample and not gone else "",
        gone,
        code,
        liveness.stall_after_s(rank, phase, age_s),
    )


_FIGURES = ("step", "epoch", "lr", "step_s", "data_s", "forward_s", "backward_s", "optimizer_s")
_figures = attrgetter(*_FIGURES)
_NO_FIGURES = (0, 0.0, None, None, None, None, None, None)
assert RankState.__struct_fields__[4 : 4 + len(_FIGURES)] == _FIGURES


def _rank_state(
    rank: RankSummary,
    signs: Signs,
    run: RunPhase,
    nodes: Mapping[str, NodeSummary],
    gpus: Mapping[str, GpuState],
) -> RankState:
    """By position: a thousand a second are made, and thirty keywords cost six times as much."""
    meta, last, sample = rank.meta, rank.last, rank.sample
    device = meta.device if meta else ""
    gpu = None if device.startswith("cpu") else gpus.get(_gpu_uuid(rank))
    host = rank.sample_host or (meta.host if meta else "")
    if gpu is not None:
        memory_used, memory_total = gpu.memory_used, gpu.memory_total
    else:
        node = nodes.get(host)
        memory_used = sample.rss if sample and sample.rss else None
        memory_total = node.node.memory_total or None if node and node.node else None
    there = sample if sample and not signs.gone else None
    return RankState(  # type: ignore[call-arg]  # mypy counts a tuple of any length as too many
        rank.rank,
        host,
        sample.pid if sample else meta.pid if meta else 0,
        device,
        *(_figures(last) if last else _NO_FIGURES),
        to_float(last.loss) if last else None,
        to_float(last.aux_loss) if last else None,
        to_float(last.grad_norm) if last else None,
        rank.tokens,
        rank.tokens_per_s(),
        memory_used,
        memory_total,
        last.allocated or None if last else None,
        last.reserved or None if last else None,
        last.peak or None if last else None,
        there.cpu if there else None,
        signs.process_state,
        signs.beat_age_s,
        signs.phase,
        liveness.rank_phase(signs, run),
        tuple(there.descendants) if there else (),
        sample.cpus_allowed if sample else 0,
        there.loader_workers if there else 0,
        sample.omp_threads if sample else 0,
        gpu,
        sample.gpu_unsure if sample and gpu and not (meta and meta.device_uuid) else "",
    )


def _gpu_uuid(rank: RankSummary) -> str:
    """What the rank itself reported, else what its agent concluded from its environment."""
    if rank.meta and rank.meta.device_uuid:
        uuid = rank.meta.device_uuid
        return uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}"
    return rank.sample.gpu_uuid if rank.sample else ""


def _gpus(node: NodeSummary) -> list[GpuState]:
    return [gpu_state(gpu, node.host) for _, gpu in sorted(node.gpus.items())]


def _typical_step_s(ranks: Sequence[RankSummary]) -> float | None:
    """Median over ranks of each rank's own median step time, seconds. Of many ranks, some are asked."""
    asked = ranks[:: max(1, len(ranks) // ASKED_RANKS)]
    medians = [step_s for rank in asked if (step_s := rank.median_step_s()) is not None]
    return median(medians) if medians else None


def _throughput(states: tuple[RankState, ...], phase: RunPhase) -> float | None:
    """Label tokens per second of all ranks over their newest steps; nothing flows in a stalled run."""
    rates = [state.tokens_per_s for state in states if state.tokens_per_s is not None]
    if not rates:
        return None
    return 0.0 if phase is RunPhase.STALLED else sum(rates)


def _batch(manifest: Manifest, ranks: list[RankSummary]) -> int | None:
    """Sequences in one optimizer step: micro-batch times accumulation, over the data-parallel ranks."""
    meta = next((rank.meta for rank in ranks if rank.meta and rank.meta.micro_batch), None)
    if meta is None:
        return None
    plan = manifest.plan or {}
    model_parallel = 1
    for axis in ("tp", "cp", "pp"):
        size = plan.get(axis, 1)
        model_parallel *= size if isinstance(size, int) and size > 0 else 1
    return meta.micro_batch * max(1, meta.grad_accum) * max(1, meta.world_size // model_parallel)


def _measured(
    ranks: list[RankSummary],
    lasts: list[Step],
    states: tuple[RankState, ...],
    tokens_per_s: float | None,
    step_s: float | None,
) -> dict[str, float]:
    """What the plan predicted, as measured: bytes are the largest rank's, seconds the median rank's."""
    found: dict[str, float] = {}

    def put(name: str, value: float | None) -> None:
        if value:
            found[name] = value

    put("between_steps", max([last.allocated for last in lasts], default=0))
    put("allocated", max([last.peak or last.allocated for last in lasts], default=0))
    put("reserved", max([last.peak_reserved or last.reserved for last in lasts], default=0))
    put("device", max([state.gpu.memory_used or 0 for state in states if state.gpu], default=0))
    put("rss", max([rank.sample.rss for rank in ranks if rank.sample], default=0))
    put("step_s", step_s)
    put("data_s", median([last.data_s for last in lasts]) if lasts else None)
    put("tokens_per_s", tokens_per_s)
    put("tokens_per_s_per_gpu", tokens_per_s / len(ranks) if tokens_per_s and ranks else None)
    return found


def _silent_nodes(around: Surroundings, states: tuple[RankState, ...]) -> tuple[Alert, ...]:
    """One alert a node; a single one where many fall silent at once, as when their file system does."""
    why = "node, network or file system"
    hosts = sorted(around.silent)
    if len(hosts) <= MOST_SILENT_NAMED:
        groups = [({host}, f"no word from {host} for {around.silent[host]:.0f} s: {why}") for host in hosts]
    else:
        named = ", ".join(hosts[:MOST_SILENT_NAMED])
        least_s = min(around.silent.values())
        text = f"no word from {len(hosts)} nodes for {least_s:.0f} s and more: {why}; {named} and others"
        groups = [(set(hosts), text)]
    return tuple(
        Alert(
            "node-silent",
            "error",
            text,
            tuple([state.rank for state in states if state.host in members]),
            around.now,
        )
        for members, text in groups
    )


def _timeout_left_s(ranks: list[RankSummary], signs: Mapping[int, Signs]) -> tuple[float, float] | None:
    """(seconds left, timeout) of the collective that the first silent rank may wait in, where it is known."""
    found = []
    for rank in ranks:
        limit_s = rank.meta.collective_timeout_s if rank.meta else 0.0
        age_s = signs[rank.rank].beat_age_s
        if limit_s > 0 and age_s is not None and not signs[rank.rank].gone:
            found.append((limit_s - age_s, limit_s))
    return min(found, default=None)


def _hang_alerts(summary: Summary, outcome: liveness.Outcome) -> tuple[Alert, ...]:
    """What the agents found by themselves when ranks stopped moving, unless they moved again."""
    if outcome.phase in (RunPhase.FINISHED, RunPhase.STOPPED):
        return ()
    latest = next((event for event in reversed(summary.events) if event.code in _HANG_CODES), None)
    if latest is None or latest.code != HANG_CODE:
        return ()
    return (Alert(HANG_CODE, latest.severity, latest.text, (), latest.t),)


def _own_alerts(
    outcome: liveness.Outcome,
    now: float,
    states: tuple[RankState, ...],
    summaries: list[RankSummary],
    signs: Mapping[int, Signs],
) -> tuple[Alert, ...]:
    """What follows from the run's state alone: it stalled, or it failed."""
    if outcome.phase is RunPhase.STALLED:
        ranks = tuple(state.rank for state in states if state.process_state == "T")
        who = f"; stopped (state T): rank {', '.join(map(str, ranks))}" if ranks else ""
        if (left := _timeout_left_s(summaries, signs)) is not None:
            who += (
                f"; {duration(max(0.0, left[0]))} left of the {duration(left[1])} that a collective may take"
            )
        return (Alert("stalled", "error", outcome.reason + who, ranks, now),)
    if outcome.phase is RunPhase.FAILED and outcome.reason:
        return (Alert("failed", "error", outcome.reason, (), now),)
    return ()
