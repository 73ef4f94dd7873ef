"""How flight recorder dumps of many ranks are laid side by side: by process group and sequence number.

For each group the first call that is not finished everywhere is found, and who is missing there, or
calls something else. A missing rank that itself waits in another group passes the blame on; the front
of that wave is the suspect.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from ftdash.monitor.diagnosis.flight import AUTOGRAD
from ftdash.monitor.diagnosis.model import FlightDump, FlightEntry

DEFAULT_GROUP_DESC = "default_pg"


class Fault(StrEnum):
    MISSING = "missing"  # ranks have not made the call that the others wait in
    TYPE = "type"
    ORDER = "order"
    SIZE = "size"
    DTYPE = "dtype"
    NO_DUMP = "no-dump"  # everybody who has a dump agrees; somebody has none
    EQUAL = "equal"  # everybody made the same call, and it does not end
    NONE = "none"  # nothing is unfinished


@dataclass(frozen=True, slots=True)
class GroupFault:
    """What is wrong in one process group at `seq`. Ranks are global."""

    group: str
    desc: str
    members: frozenset[int]
    seq: int
    op: str
    fault: Fault
    culprits: frozenset[int] = frozenset()
    waiting: frozenset[int] = frozenset()
    found: tuple[tuple[int, str], ...] = ()  # (rank, what it calls) of culprits with another call
    usual: str = ""  # what the others call, where they agree
    tied: bool = False
    since_ns: int = 0  # when the first rank made the call

    @property
    def title(self) -> str:
        name = f"{self.group} ({self.desc})" if self.desc else self.group or "default"
        return f"group {name}, sequence {self.seq}, {self.op}"


@dataclass(frozen=True, slots=True)
class Alignment:
    """All groups' faults, and the front of the wave."""

    faults: tuple[GroupFault, ...]
    fault: Fault
    culprits: frozenset[int]
    decisive: GroupFault | None
    absent: frozenset[int]
    chain: tuple[str, ...] = ()
    ring: bool = False  # the groups wait for one another: any side may be the odd one
    strayed: GroupFault | None = None  # where the culprit calls instead, from a line that has not before

    @property
    def tells_apart(self) -> bool:
        """Whether the dumps show what stacks cannot: ranks wait in several groups, and who is at fault."""
        live = [fault for fault in self.faults if fault.fault is not Fault.NONE]
        several = len({(fault.group, fault.members) for fault in live}) > 1
        return several and bool(self.culprits) and not self.suspects

    @property
    def suspects(self) -> frozenset[int]:
        """The ranks of which the dumps leave open who is at fault; empty where they tell."""
        if not self.ring and not (self.decisive is not None and self.decisive.tied):
            return frozenset()
        return frozenset(rank for fault in self.faults for rank in fault.culprits)


def finished(entry: FlightEntry, dump: FlightDump) -> bool:
    """Whether a call ended. gloo leaves `state` at scheduled: `retired` says it there."""
    if entry.retired or entry.state == "completed":
        return True
    status = dump.groups.get(entry.group)
    return bool(
        status and not entry.p2p and entry.state != "scheduled" and 0 <= entry.seq <= status.last_completed
    )


def _members(name: str, dumps: Mapping[int, FlightDump], world: frozenset[int]) -> dict[int, frozenset[int]]:
    """Members of the group `name` as each rank knows it: split groups share a name across ranks."""
    using = {rank for rank, dump in dumps.items() if any(entry.group == name for entry in dump.entries)}
    desc = next(
        (entry.group_desc for rank in using for entry in dumps[rank].entries if entry.group == name), ""
    )
    found = {}
    for rank in using:
        status = dumps[rank].groups.get(name)
        found[rank] = frozenset(status.ranks) if status and status.ranks else frozenset()
    default = desc == DEFAULT_GROUP_DESC or name in ("", "0")
    inferred = world | frozenset(using) if default else frozenset(using)
    return {rank: members or inferred for rank, members in found.items()}


def _shape(entry: FlightEntry) -> tuple[object, ...]:
    """What must be equal on all ranks of a group, by operation."""
    if entry.op in ("all_to_all", "barrier", "coalesced"):
        return ()
    if entry.op in ("gather",):
        return (entry.input_sizes,)
    if entry.op in ("scatter",):
        return (entry.output_sizes,)
    return (entry.input_sizes, entry.output_sizes)


def _dtypes(entry: FlightEntry) -> tuple[object, ...]:
    return () if entry.op in ("barrier", "gather", "scatter", "all_to_all") else (entry.input_dtypes,)


def describe(entry: FlightEntry, *, dtype: bool = False) -> str:
    sizes = entry.input_sizes or entry.output_sizes
    call = f"{entry.op} {[list(shape) for shape in sizes[:2]]}" if sizes else entry.op
    return f"{call} of {', '.join(entry.input_dtypes[:2])}" if dtype and entry.input_dtypes else call


def _minority(values: Mapping[int, object]) -> tuple[frozenset[int], bool]:
    """Ranks whose value differs from the most frequent one, and whether the vote was a tie."""
    counts = Counter(values.values()).most_common()
    if len(counts) < 2:
        return frozenset(), False
    tied = counts[0][1] == counts[1][1]
    if tied:
        return frozenset(values), True
    return frozenset(rank for rank, value in values.items() if value != counts[0][0]), False


def _swapped(first: int, seqs: Mapping[int, Mapping[int, FlightEntry]], culprits: frozenset[int]) -> bool:
    """Whether a culprit makes the others' call a little later: the same calls in another order."""
    others = [rank for rank in seqs if rank not in culprits] or [min(seqs)]
    reference = seqs[others[0]].get(first)
    if reference is None:
        return False
    for rank in culprits:
        mine = seqs[rank].get(first)
        theirs = [seqs[others[0]].get(first + step) for step in (1, 2)]
        ahead = [seqs[rank].get(first + step) for step in (1, 2)]
        if mine and any(entry and entry.op == mine.op and _shape(entry) == _shape(mine) for entry in theirs):
            return True
        if any(entry and entry.op == reference.op and _shape(entry) == _shape(reference) for entry in ahead):
            return mine is not None and mine.op != reference.op
    return False


def _group_fault(
    name: str, members: frozenset[int], dumps: Mapping[int, FlightDump], world: frozenset[int]
) -> GroupFault:
    present = sorted(members & dumps.keys())
    seqs: dict[int, dict[int, FlightEntry]] = {}
    desc = ""
    for rank in present:
        own: dict[int, FlightEntry] = {}
        for entry in dumps[rank].entries:
            if entry.group == name and not entry.p2p and entry.seq >= 0:
                own.setdefault(entry.seq, entry)
                desc = desc or entry.group_desc
        seqs[rank] = own
    absent = (members & world) - dumps.keys() if world else members - dumps.keys()
    start = max((min(own) for own in seqs.values() if own), default=0)
    every = sorted({seq for own in seqs.values() for seq in own if seq >= start})
    for seq in every:
        here = {rank: own[seq] for rank, own in seqs.items() if seq in own}
        open_ranks = frozenset(rank for rank, entry in here.items() if not finished(entry, dumps[rank]))
        lead = Counter(entry.op for entry in here.values()).most_common(1)[0][0]

        def fault(
            kind: Fault,
            culprits: frozenset[int],
            tied: bool = False,
            *,
            at: int = seq,
            calls: Mapping[int, FlightEntry] = here,
            op: str = lead,
        ) -> GroupFault:
            told = {rank: describe(entry, dtype=kind is Fault.DTYPE) for rank, entry in calls.items()}
            found = tuple((rank, told[rank]) for rank in sorted(culprits) if rank in told)
            waiting = frozenset(calls) - (frozenset() if tied else culprits)
            others = {told[rank] for rank in waiting}
            return GroupFault(
                group=name,
                desc=desc,
                members=members,
                seq=at,
                op=op,
                fault=kind,
                culprits=culprits,
                waiting=waiting,
                found=found,
                usual=others.pop() if len(others) == 1 and not tied else "",
                tied=tied,
                since_ns=min(entry.created_ns for entry in calls.values()),
            )

        types, tied = _minority({rank: entry.op for rank, entry in here.items()})
        if types:
            kind = Fault.ORDER if _swapped(seq, seqs, types) else Fault.TYPE
            return fault(kind, types, tied)
        missing = frozenset(
            rank for rank, own in seqs.items() if seq not in own and max(own, default=-1) < seq
        )
        if missing and open_ranks:
            return fault(Fault.MISSING, missing)
        sizes, tied = _minority({rank: _shape(entry) for rank, entry in here.items()})
        if sizes:
            return fault(Fault.SIZE, sizes, tied)
        kinds, tied = _minority({rank: _dtypes(entry) for rank, entry in here.items()})
        if kinds:
            return fault(Fault.DTYPE, kinds, tied)
        if open_ranks and len(members) > 1:  # of one rank's calls alone it is not known whom they are with
            if absent:
                return fault(Fault.NO_DUMP, frozenset(absent))
            return fault(Fault.EQUAL, frozenset())
    return GroupFault(name, desc, members, every[-1] if every else -1, "", Fault.NONE)


def _p2p_faults(dumps: Mapping[int, FlightDump], members: Mapping[str, frozenset[int]]) -> list[GroupFault]:
    """Sends and receives that wait for a partner who has not made its call."""
    found = []
    for rank, dump in dumps.items():
        for entry in dump.entries:
            if not entry.p2p or entry.src < 0 or finished(entry, dump):
                continue
            order = sorted(members.get(entry.group, frozenset()))
            peer_in_group = entry.src if entry.op == "recv" else entry.dst
            peer = order[peer_in_group] if peer_in_group < len(order) else peer_in_group
            wanted = "send" if entry.op == "recv" else "recv"
            partner = dumps.get(peer)
            meets = partner is not None and any(
                other.p2p
                and other.op == wanted
                and (other.src, other.dst) == (entry.src, entry.dst)
                and other.group == entry.group
                and not finished(other, partner)
                for other in partner.entries
            )
            kind = Fault.EQUAL if meets else Fault.MISSING if partner else Fault.NO_DUMP
            culprits = frozenset() if meets else frozenset({peer})
            label = f"{entry.op} {entry.src}->{entry.dst}"
            found.append(
                GroupFault(
                    entry.group,
                    entry.group_desc,
                    frozenset({rank, peer}),
                    entry.seq,
                    label,
                    kind,
                    culprits,
                    frozenset({rank}),
                )
            )
            break
    return found


def _by_one_thread(dump: FlightDump, missed: GroupFault, waiting: GroupFault) -> bool:
    """Whether the thread that waits may be the one that calls in the group where the rank is missing."""
    first = next((entry.thread for entry in dump.entries if entry.thread != AUTOGRAD), "")
    calling = {entry.thread or first for entry in dump.entries if entry.group == missed.group}
    held = {
        entry.thread for entry in dump.entries if (entry.group, entry.seq) == (waiting.group, waiting.seq)
    }
    calls, holds = ({first if name == AUTOGRAD else name for name in names} for names in (calling, held))
    return not (calls - {""}) or not (holds - {""}) or bool(calls & holds)


def _strayed(dump: FlightDump, waiting: GroupFault) -> frozenset[str]:
    """Where a rank made a call of its kind before, if it now waits with it in a group in which it never did.

    Alike are calls of one operation, size and type and, where the recorder was told to keep them (gloo's
    keeps none), from the same lines.
    """
    calls = [entry for entry in dump.entries if not entry.p2p]
    held = next((e for e in calls if (e.group, e.seq) == (waiting.group, waiting.seq)), None)
    if held is None:
        return frozenset()
    before = [e.group for e in calls if _kind_of_call(e) == _kind_of_call(held) and e is not held]
    return frozenset(before) if len(before) >= _A_HABIT and held.group not in before else frozenset()


def _kind_of_call(entry: FlightEntry) -> tuple[object, ...]:
    return entry.op, entry.input_sizes, entry.input_dtypes, entry.frames


_A_HABIT = 2  # calls of a kind
_ROOT_FAULTS = (Fault.TYPE, Fault.ORDER, Fault.SIZE, Fault.DTYPE)


def align(
    dumps: Sequence[FlightDump],
    expected: frozenset[int] = frozenset(),
    joined: frozenset[int] = frozenset(),
) -> Alignment:
    """Lay the dumps side by side. `expected` are the ranks of the job where that is known.

    `joined` are ranks whose main thread is known to wait for the one that is in a collective.
    """
    by_rank = {dump.rank: dump for dump in dumps}
    said = frozenset(rank for dump in dumps for status in dump.groups.values() for rank in status.ranks)
    world = expected | said | frozenset(by_rank)
    faults: list[GroupFault] = []
    group_members: dict[str, frozenset[int]] = {}
    for name in sorted({entry.group for dump in dumps for entry in dump.entries}):
        per_rank = _members(name, by_rank, world)
        for members in sorted(set(per_rank.values()), key=sorted):
            group_members[name] = members
            faults.append(_group_fault(name, members, by_rank, world))
    faults += _p2p_faults(by_rank, group_members)
    absent = frozenset(world - by_rank.keys())
    live = [fault for fault in faults if fault.fault is not Fault.NONE]
    # Sequence numbers count within a group: between groups, time tells which fault came first.
    for fault in sorted(live, key=lambda item: (item.since_ns, item.seq)):
        if fault.fault in _ROOT_FAULTS:
            return Alignment(tuple(faults), fault.fault, fault.culprits, fault, absent)
    return _front(live, tuple(faults), absent, by_rank, joined)


def _front(
    live: Sequence[GroupFault],
    faults: tuple[GroupFault, ...],
    absent: frozenset[int],
    dumps: Mapping[int, FlightDump],
    joined: frozenset[int],
) -> Alignment:
    """The missing ranks that do not themselves wait for others, by the thread that would make the call."""
    blamed: dict[int, GroupFault] = {}
    waits: dict[int, GroupFault] = {}
    for fault in live:
        for rank in fault.culprits:
            blamed.setdefault(rank, fault)
    for fault in live:
        for rank in fault.waiting if fault.fault in (Fault.MISSING, Fault.NO_DUMP) else ():
            missed = blamed.get(rank)
            if missed is None or rank in joined or _by_one_thread(dumps[rank], missed, fault):
                waits.setdefault(rank, fault)
    roots = {rank for rank in blamed if rank not in waits}
    chain = tuple(
        f"rank {rank} is missing in {blamed[rank].title}, and itself waits in {waits[rank].title}"
        for rank in sorted(blamed.keys() & waits.keys())
    )
    if roots:
        decisive = blamed[min(roots)]
        kind = Fault.MISSING if any(blamed[rank].fault is Fault.MISSING for rank in roots) else decisive.fault
        if kind is Fault.MISSING:
            roots = {rank for rank in roots if blamed[rank].fault is Fault.MISSING}
            decisive = blamed[min(roots)]
        return Alignment(faults, kind, frozenset(roots), decisive, absent, chain)
    if blamed:
        usual = {rank: groups for rank in blamed if (groups := _strayed(dumps[rank], waits[rank]))}
        if len(usual) == 1:
            rank, groups = usual.popitem()
            there = (fault for fault in live if rank in fault.culprits and fault.group in groups)
            meant = next(there, blamed[rank])
            return Alignment(faults, Fault.TYPE, frozenset({rank}), meant, absent, chain, strayed=waits[rank])
        sizes = Counter(id(waits[rank]) for rank in waits)
        fewest = min(sizes.values())
        smallest = {rank for rank in blamed if sizes[id(waits[rank])] == fewest}
        decisive = blamed[min(smallest)]
        return Alignment(faults, Fault.ORDER, frozenset(smallest), decisive, absent, chain, ring=True)
    if live:
        return Alignment(faults, Fault.EQUAL, frozenset(), live[0], absent)
    return Alignment(faults, Fault.NONE, frozenset(), None, absent)
