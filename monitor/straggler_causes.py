"""Why a rank is slow: what its process, its batches, its GPU or its host show where its peers show none."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import median

from ftdash.monitor.state import RankState
from ftdash.monitor.stragglers import SLOWDOWN, Straggler


def explain(
    straggler: Straggler,
    ranks: Mapping[int, RankState],
    tokens: Mapping[int, float],
    states: Sequence[str] = (),
) -> Straggler:
    """The straggler with the cause that its rank, process and GPU show where its peers show none.

    `states` are the newest states of its process: a limiter that stops and continues it is caught by several.
    """
    own = ranks.get(straggler.rank)
    if own is None:
        return straggler
    peers = [rank for number, rank in ranks.items() if number != straggler.rank]
    cause = (
        _stopped(own, states)
        or _more_tokens(straggler, tokens)
        or (straggler.phase == "data" and _data_wait(own))
        or _gpu_cause(own, peers)
        or _cpu_share(own, peers)
        or ""
    )
    return replace(straggler, cause=cause or "no cause visible from here", host=own.host)


def slow_hosts(stragglers: Sequence[Straggler], ranks: Mapping[int, RankState]) -> dict[str, list[Straggler]]:
    """Hosts most of whose ranks, and at least two, are slow while other hosts are not: the host is why."""
    sizes: dict[str, int] = {}
    for rank in ranks.values():
        sizes[rank.host] = sizes.get(rank.host, 0) + 1
    by_host: dict[str, list[Straggler]] = {}
    for straggler in stragglers:
        by_host.setdefault(straggler.host, []).append(straggler)
    if len(sizes) < 2 or len(by_host) == len(sizes):
        return {}
    return {
        host: slow for host, slow in by_host.items() if len(slow) >= 2 and 2 * len(slow) > sizes.get(host, 0)
    }


def _stopped(own: RankState, states: Sequence[str]) -> str:
    seen = [*states, own.process_state]
    stopped = sum(state in ("T", "t") for state in seen)
    if stopped >= 2 or own.process_state in ("T", "t"):
        return "its process is being stopped (state T: SIGSTOP, a debugger or a CPU limiter)"
    if own.process_state == "D":
        return "its process waits in the kernel (state D: disk, network file system or driver)"
    return ""


def _more_tokens(straggler: Straggler, tokens: Mapping[int, float]) -> str:
    others = [count for rank, count in tokens.items() if rank != straggler.rank and count > 0]
    mine = tokens.get(straggler.rank, 0.0)
    if not others or straggler.phase == "data" or mine < median(others) * min(SLOWDOWN, straggler.slowdown):
        return ""
    return f"its batches are larger: {mine:,.0f} tokens a step against {median(others):,.0f}"


def _data_wait(own: RankState) -> str:
    return (
        "waiting for data: its loader delivers late"
        if own.process_state != "R"
        else "busy making its own data"
    )


def _gpu_cause(own: RankState, peers: Sequence[RankState]) -> str:
    gpu = own.gpu
    if gpu is None:
        return ""
    if gpu.state != "ok":
        return f"its GPU is {gpu.state}" + (f": {gpu.error}" if gpu.error else "")
    others = [peer.gpu for peer in peers if peer.gpu is not None and peer.gpu.state == "ok"]
    shared = {
        reason
        for reason in gpu.throttle
        if others and 2 * sum(reason in other.throttle for other in others) >= len(others)
    }
    own_reasons = [reason for reason in gpu.throttle if reason not in shared]
    clocks = [other.sm_mhz for other in others if other.sm_mhz]
    clock = ""
    if gpu.sm_mhz and clocks and gpu.sm_mhz < 0.93 * median(clocks):
        clock = f"its GPU runs at {gpu.sm_mhz} MHz, its peers at {median(clocks):.0f}"
    if own_reasons:
        return f"its GPU is throttled: {', '.join(own_reasons)}" + (f" ({clock})" if clock else "")
    if clock:
        return clock
    widths = [other.pcie_width for other in others if other.pcie_width]
    if gpu.pcie_width and widths and gpu.pcie_width < median(widths):
        return f"its GPU has PCIe x{gpu.pcie_width}, its peers x{median(widths):.0f}"
    return ""


def _cpu_share(own: RankState, peers: Sequence[RankState]) -> str:
    shares = [peer.cpu for peer in peers if peer.cpu]
    if own.cpu is None or not shares or own.cpu >= 0.75 * median(shares):
        return ""
    return f"its process gets {own.cpu:.0f}% of a core, its peers {median(shares):.0f}%"
