"""What a person should know about a run now: each alert names ranks and the figures that it rests on.

Codes, stable for scripts:

    loss-nan            a rank's loss is NaN or infinite
    grad-nan            the gradient norm is NaN or infinite, whatever the logged loss says
    loss-zero           the loss is exactly zero, step after step
    loss-repeated       the logged loss repeats to the last digit
    grad-spike          the gradient norm is ten times its median
    loss-not-falling    the loss is where it was at the start
    loss-jump           the loss is far above what its own noise explains
    memory-creep        memory grows step after step
    memory-near-limit   a GPU is nearly full
    memory-fragmented   the allocator holds far more than was ever used
    heartbeat-late      a rank shows no progress
    rank-dead           a rank's process is gone while the run goes on
    straggler           a rank is slower than its peers, with the phase and the cause
    host-slow           most ranks of one host are slower than those of the others
    run-slower          the whole run is slower than it was
    near-hang           steps stand still for as long as a collective's timeout and go on, again and again
    tokens-uneven       ranks train on different numbers of tokens
    expert-dead         experts get no tokens
    expert-hot          experts carry several times the ideal load
    router-collapse     routing narrows to a few experts
    gpu-lost            a GPU is lost or in error
    gpu-xid             the driver reported an Xid error that is not the program's own fault
    gpu-throttled       a GPU slows down by heat, power brake or hardware
    gpu-ecc             uncorrected memory errors, or rows that wait for or failed remapping
    pcie-degraded       a PCIe link is narrower than it should be, or slower under load
    nvlink-down         NVLinks are down
    disk-filling        the disk that the run writes to is full or will be soon
    cpus-crowded        a rank's workers and threads share too few processors
    checkpoint-old      the newest checkpoint is older than wanted
    plan-missed         measured memory or speed is off the plan by more than a set share
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import correlation, median

from ftdash.monitor.alerts_gpu import gpu_alerts
from ftdash.monitor.alerts_host import processor_alerts
from ftdash.monitor.alerts_loss import loss_alerts
from ftdash.monitor.alerts_pace import near_hangs
from ftdash.monitor.experts import ADVICE, expert_parallel_cost
from ftdash.monitor.history import RankPast, RunHistory
from ftdash.monitor.state import Alert, RankPhase, RankState, RunPhase, RunState
from ftdash.monitor.straggler_causes import explain, slow_hosts
from ftdash.monitor.stragglers import Straggler
from ftdash.monitor.wording import duration, gib, plural, rank_list

MIB = 1 << 20
MEMORY_VALUES = 24


@dataclass(frozen=True, slots=True)
class AlertLimits:
    """From where on something is worth an alert. Times in seconds, shares as fractions."""

    heartbeat_s: float = 60.0
    heartbeat_steps: float = 5.0  # or this many of the rank's own steps, whichever is longer
    heartbeat_error_s: float = 300.0
    near_full: float = 0.95
    fragmented: float = 1.3  # reserved over peak allocated
    tokens_uneven: float = 1.3  # largest over smallest mean
    disk_free: float = 0.03
    disk_hours: float = 1.0
    checkpoint_s: float = 2 * 3600.0  # where the run's own pace of saving is not known
    checkpoint_late_s: float = 900.0  # where it is, at the earliest
    plan_missed: float = 0.2
    slower: float = 1.3


DEFAULT_LIMITS = AlertLimits()


def find_alerts(
    state: RunState, history: RunHistory, limits: AlertLimits = DEFAULT_LIMITS
) -> tuple[Alert, ...]:
    """All alerts that hold now, errors first. Pure: the same state and history give the same alerts."""
    live = state.state in (RunPhase.STARTING, RunPhase.RUNNING, RunPhase.STALLED)
    rules: list[Callable[[RunState, RunHistory, AlertLimits], Iterable[Alert]]] = [
        loss_alerts,
        _memory,
        _tokens,
        _experts,
        _stragglers,
        _plan,
    ]
    if live:
        rules += [_heartbeats, _run_slower, near_hangs, _files, gpu_alerts, processor_alerts]
    found = [alert for rule in rules for alert in rule(state, history, limits)]
    order = {"error": 0, "warning": 1, "note": 2}
    found.sort(key=lambda alert: order.get(alert.severity, 3))
    return tuple(replace(alert, t=state.now) for alert in found)


@dataclass(slots=True)
class Entry:
    """An alert in the book: when it began, when it ended (None: it holds), whether it was acknowledged."""

    alert: Alert
    since: float
    until: float | None = None
    acknowledged: bool = False


class AlertBook:
    """Each alert once: an alert that holds over many polls is one entry, its text the newest.

    Entries are told apart by code and by ranks. When it ends and comes back within `quiet_s` the old entry
    goes on, acknowledged or not; later it is a new one. At most `limit` ended entries are kept.
    """

    def __init__(self, quiet_s: float = 120.0, limit: int = 200) -> None:
        self.quiet_s = quiet_s
        self.limit = limit
        self._entries: list[Entry] = []
        self._current: dict[tuple[str, tuple[int, ...]], Entry] = {}

    def update(self, alerts: Sequence[Alert], now: float) -> list[Alert]:
        """Take the alerts that hold at `now`; returns those that are new."""
        new = []
        seen = set()
        for alert in alerts:
            key = (alert.code, alert.ranks)
            seen.add(key)
            entry = self._current.get(key) or self._grown(alert, seen)
            if entry is None or (entry.until is not None and now - entry.until > self.quiet_s):
                entry = Entry(alert, since=now)
                self._entries.append(entry)
                new.append(alert)
            entry.alert, entry.until = alert, None
            self._current[key] = entry
        for key, entry in list(self._current.items()):
            if key in seen:
                continue
            if entry.until is None and not any(self._current[other] is entry for other in seen):
                entry.until = now
            if entry.until is None or now - entry.until > self.quiet_s:
                del self._current[key]
        ended = [entry for entry in self._entries if entry.until is not None]
        for entry in ended[: max(0, len(ended) - self.limit)]:
            self._entries.remove(entry)
        return new

    def _grown(self, alert: Alert, seen: set[tuple[str, tuple[int, ...]]]) -> Entry | None:
        """The same alert about other ranks of which some were named before."""
        for (code, ranks), entry in self._current.items():
            if code == alert.code and set(ranks) & set(alert.ranks) and (code, ranks) not in seen:
                return entry
        return None

    def acknowledge(self, code: str | None = None) -> int:
        """Acknowledge all open alerts, or those of one code; returns how many were not yet."""
        count = 0
        for entry in self._entries:
            if not entry.acknowledged and (code is None or entry.alert.code == code):
                entry.acknowledged = True
                count += 1
        return count

    def open(self) -> list[Entry]:
        """Entries that hold now and that nobody has acknowledged, the newest first."""
        return [entry for entry in reversed(self._entries) if entry.until is None and not entry.acknowledged]

    def entries(self) -> list[Entry]:
        """All entries kept, the newest first."""
        return self._entries[::-1]


def _memory(state: RunState, history: RunHistory, limits: AlertLimits) -> Iterator[Alert]:
    creeping: list[tuple[RankState, float]] = []
    full: list[RankState] = []
    split: list[RankState] = []
    for rank in state.ranks:
        past = history.ranks.get(rank.rank)
        if past is not None and (rate := growth_per_step(past)) > 0:
            creeping.append((rank, rate))
        on_gpu = rank.device.startswith("cuda")
        unified = rank.gpu is not None and rank.gpu.unified
        used, total = rank.memory_used or 0, rank.memory_total or 0
        if on_gpu and not unified and total and used >= limits.near_full * total:
            full.append(rank)
        reserved, peak = rank.reserved or 0, rank.peak or 0
        if on_gpu and peak and reserved > limits.fragmented * peak and reserved - peak > 2 << 30:
            split.append(rank)
    if creeping:
        worst, rate = max(creeping, key=lambda item: item[1])
        text = f"memory grows by {rate / MIB:.1f} MiB a step on {rank_list([r.rank for r, _ in creeping])}"
        if worst.memory_used and worst.memory_total and worst.memory_total > worst.memory_used:
            left = worst.memory_total - worst.memory_used
            text += f": rank {worst.rank} has {gib(left)} left, full in about {left / rate:,.0f} steps"
        yield Alert("memory-creep", "warning", text, tuple(sorted(r.rank for r, _ in creeping)))
    if full:
        tightest = min(full, key=lambda r: (r.memory_total or 0) - (r.memory_used or 0))
        left = (tightest.memory_total or 0) - (tightest.memory_used or 0)
        text = (
            f"{rank_list([r.rank for r in full])} above {limits.near_full:.0%} of the GPU's memory: rank"
            f" {tightest.rank} has {gib(left)} left of {gib(tightest.memory_total or 0)}"
        )
        yield Alert("memory-near-limit", "warning", text, tuple(sorted(r.rank for r in full)))
    if split:
        worst = max(split, key=lambda r: (r.reserved or 0) - (r.peak or 0))
        text = (
            f"the allocator holds {gib(worst.reserved or 0)} on rank {worst.rank}, at most"
            f" {gib(worst.peak or 0)} was in use: fragmented; try"
            " PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"
        )
        yield Alert("memory-fragmented", "warning", text, tuple(sorted(r.rank for r in split)))


def growth_per_step(past: RankPast) -> float:
    """Steady growth of a rank's memory in bytes a step; 0.0 when it does not grow steadily.

    Steady: over the newest 24 to 48 values, cut into six parts, the median rises from each part to the next
    by at least a third of the average rise, in all by 2 % and 32 MiB, and a straight line fits (r of 0.9).
    Caches that fill, memory that steps up once, and memory that swings do not pass.
    """
    values = past.memory
    if len(values) < MEMORY_VALUES:
        return 0.0
    (first_step, first), (last_step, last) = values[0], values[-1]
    enough = max(0.02 * last, 32 * MIB)
    if last - first < enough or last_step <= first_step:
        return 0.0
    sizes = [size for _, size in values]
    part = len(sizes) // 6
    levels = [median(sizes[i * part : (i + 1) * part]) for i in range(6)]
    rises = [after - before for before, after in pairwise(levels)]
    total = levels[-1] - levels[0]
    if total < enough * 0.8 or min(rises) < total / len(rises) / 3:
        return 0.0
    steps = [step for step, _ in values]
    if correlation(steps, sizes) < 0.9:
        return 0.0
    return total / (median(steps[5 * part : 6 * part]) - median(steps[:part]))


def _heartbeats(state: RunState, history: RunHistory, limits: AlertLimits) -> Iterator[Alert]:
    late = []
    dead = []
    for rank in state.ranks:
        if rank.state is RankPhase.DEAD:
            if rank.phase != "end":  # the hook closed: gone after its last step, its exit not yet told
                dead.append(rank)
        elif rank.heartbeat_age_s is not None and rank.state is not RankPhase.FINISHED:
            allowed = max(limits.heartbeat_s, limits.heartbeat_steps * (rank.step_s or 0.0))
            if rank.heartbeat_age_s > allowed:
                late.append(rank)
    if dead:
        text = f"{rank_list([r.rank for r in dead])} died at step {dead[0].step} while the run goes on"
        yield Alert("rank-dead", "error", text, tuple(r.rank for r in dead))
    if late:
        oldest = max(late, key=lambda r: r.heartbeat_age_s or 0.0)
        age = oldest.heartbeat_age_s or 0.0
        text = f"no progress on {rank_list([r.rank for r in late])}: rank {oldest.rank} for {duration(age)}"
        if oldest.phase:
            text += f", last in {oldest.phase}"
        severity = "error" if age > limits.heartbeat_error_s else "warning"
        yield Alert("heartbeat-late", severity, text, tuple(r.rank for r in late))


def _stragglers(state: RunState, history: RunHistory, limits: AlertLimits) -> Iterator[Alert]:
    found = history.stragglers.found
    if not found:
        return
    ranks = {rank.rank: rank for rank in state.ranks}
    tokens = history.stragglers.tokens_per_step()
    states = {entry.rank: tuple(history.ranks[entry.rank].states) for entry in found}
    explained = [explain(entry, ranks, tokens, states[entry.rank]) for entry in found]
    hosts = slow_hosts(explained, ranks)
    for host, slow in hosts.items():
        worst = max(slow, key=lambda entry: entry.slowdown)
        text = (
            f"host {host} is slow: {len(slow)} of its ranks, {worst.slowdown:.2f} × their peers in"
            f" {worst.phase}; {worst.cause}"
        )
        yield Alert("host-slow", "warning", text, tuple(sorted(entry.rank for entry in slow)))
    for entry in explained:
        if entry.host not in hosts:
            yield Alert("straggler", "warning", straggler_text(entry), (entry.rank,))


def straggler_text(entry: Straggler) -> str:
    """One line: who, in which phase, by how much, since when, why."""
    where = f" on {entry.host}" if entry.host else ""
    phase = "loading data" if entry.phase == "data" else entry.phase
    since = f"step {entry.since_step}" + (" or earlier" if entry.or_earlier else "")
    return (
        f"rank {entry.rank}{where} is slow in {phase}: {entry.slowdown:.2f} × its peers, costs"
        f" {entry.excess_s * 1000:,.0f} ms a step since {since}; {entry.cause}"
    )


def _run_slower(state: RunState, history: RunHistory, limits: AlertLimits) -> Iterator[Alert]:
    rates = history.rates()
    if len(rates) < 60:
        return
    newest, before = rates[-12:], rates[:-24]
    usual = median(before)
    spread = 1.4826 * median(abs(rate - usual) for rate in before)
    now = median(newest)
    if now * limits.slower < usual and usual - now > 4 * spread:
        text = f"the run does {now:,.0f} tokens/s, it did {usual:,.0f}"
        yield Alert("run-slower", "warning", text)


def _tokens(state: RunState, history: RunHistory, limits: AlertLimits) -> Iterator[Alert]:
    means = history.stragglers.tokens_per_step()
    if len(means) < 2 or min(means.values()) < 0 or not max(means.values()):
        return
    most, least = max(means, key=means.__getitem__), min(means, key=means.__getitem__)
    if means[most] < limits.tokens_uneven * max(means[least], 1.0):
        return
    text = (
        f"ranks train on unequal numbers of tokens: rank {most} {means[most]:,.0f} a step, rank {least}"
        f" {means[least]:,.0f}; pack or group by length, and average over tokens of all devices"
    )
    severity = "warning" if means[most] >= 2 * means[least] else "note"
    yield Alert("tokens-uneven", severity, text, (least, most))


def _experts(state: RunState, history: RunHistory, limits: AlertLimits) -> Iterator[Alert]:
    if any(rank.loss is not None and not math.isfinite(rank.loss) for rank in state.ranks):
        return  # a router of NaN sends all tokens one way: the NaN is what to tell
    dead = history.experts.dead()
    if dead:
        text = f"no tokens go to {plural(len(dead), 'expert')}: {_experts_list(dead)}; {ADVICE}"
        yield Alert("expert-dead", "warning", text)
    hot = history.experts.hot()
    if hot:
        layer, expert, load = hot[0]
        text = f"expert {expert} of layer {layer} carries {load:.1f} × the ideal load"
        if len(hot) > 1:
            text += f", {len(hot)} experts are hot"
        text += _cost(state, layer)
        yield Alert("expert-hot", "warning", f"{text}; {ADVICE}")
    collapsed = history.experts.collapsed()
    if collapsed:
        layer, start, now = min(collapsed, key=lambda item: item[2])
        text = (
            f"routing narrows in {plural(len(collapsed), 'layer')}: entropy of layer {layer} fell from"
            f" {start:.2f} to {now:.2f} of its maximum; {ADVICE}"
        )
        yield Alert("router-collapse", "warning", text)


def _experts_list(experts: Sequence[tuple[int, int]], limit: int = 6) -> str:
    shown = ", ".join(f"L{layer}/E{expert}" for layer, expert in experts[:limit])
    return shown + (f" and {len(experts) - limit} more" if len(experts) > limit else "")


def _cost(state: RunState, layer: int) -> str:
    """Under expert parallelism: which rank of the group hosts the load and what it costs."""
    ep = (state.manifest.plan or {}).get("ep", 1)
    counts = next((entry.counts for entry in state.experts if entry.layer == layer), ())
    if not isinstance(ep, int) or ep < 2 or not counts or len(counts) % ep:
        return ""
    fullest, load = expert_parallel_cost(counts, ep)
    return f"; expert-parallel rank {fullest} has {load:.2f} × the mean load, and all wait for it"


def _files(state: RunState, history: RunHistory, limits: AlertLimits) -> Iterator[Alert]:
    look = history.look
    if look is None:
        return
    if look.disk_total and look.disk_free < limits.disk_free * look.disk_total:
        text = f"{gib(look.disk_free)} free of {gib(look.disk_total)} on the disk of {look.disk_path}"
        yield Alert("disk-filling", "error" if look.disk_free < 1 << 30 else "warning", text)
    elif len(history.disk) >= 3:
        (then, free_then), (now, free_now) = history.disk[0], history.disk[-1]
        rate = (free_then - free_now) / (now - then) if now > then else 0.0
        if rate > 0 and free_now / rate < limits.disk_hours * 3600:
            text = (
                f"{gib(free_now)} free on the disk of {look.disk_path}, full in {duration(free_now / rate)}"
            )
            yield Alert("disk-filling", "warning", text)
    if look.checkpoint_t is None:
        return
    # One that was there before the run, which goes on from it, is as old as the run.
    age = state.now - max(look.checkpoint_t, state.manifest.started)
    every = look.checkpoint_every_s
    wanted = limits.checkpoint_s if every is None else max(limits.checkpoint_late_s, 1.5 * every)
    if age > wanted:
        text = f"the newest checkpoint is {duration(age)} old"
        if every is not None:
            text += f"; those before it came {duration(every)} apart at most"
        yield Alert("checkpoint-old", "warning", text)


def _plan(state: RunState, history: RunHistory, limits: AlertLimits) -> Iterator[Alert]:
    """Predictions are for the planned GPU: a run on CPU is not held to them."""
    predicted = state.manifest.predicted or {}
    if not state.ranks or not all(rank.device.startswith("cuda") for rank in state.ranks):
        return
    memory, speed = predicted.get("memory") or {}, predicted.get("time") or {}
    pairs = (
        ("reserved memory", memory.get("reserved"), max((r.reserved or 0) for r in state.ranks), True),
        (
            "tokens/s per GPU",
            speed.get("tokens_per_s_per_gpu"),
            (state.tokens_per_s or 0) / len(state.ranks),
            False,
        ),
    )
    for what, planned, measured, more_is_worse in pairs:
        if not isinstance(planned, int | float) or planned <= 0 or not measured or state.step < 10:
            continue
        off = measured / planned - 1.0
        if (off if more_is_worse else -off) > limits.plan_missed:
            shown = [gib(int(v)) if more_is_worse else f"{v:,.0f}" for v in (measured, planned)]
            yield Alert("plan-missed", "warning", f"{what} {shown[0]}, planned {shown[1]} ({off:+.0%})")
