"""What NCCL's own RAS subsystem says of a job: ranks whose operation counts lag, processes it has lost.

Since NCCL 2.24 every process of a job answers `verbose status` on a TCP port with the same text about the
whole job (NVIDIA's NCCL user guide, "Troubleshooting, RAS"). Ranks in it are ranks of a communicator.
"""

from __future__ import annotations

import re
import socket
import time
from collections.abc import Iterable

import msgspec

PORT = 28028
ADDRESS_ENV = "NCCL_RAS_ADDR"
_LIMIT_BYTES = 4 << 20
_GROUP = re.compile(r"^#(?P<group>\d+-\d+) \((?P<hash>[0-9a-f]+)\) (?P<what>[A-Z]+)")
_COUNT = re.compile(r"^\s*\d+ ranks have launched up to operation (?P<op>\d+)")
_NONE = re.compile(r"^\s*\d+ ranks have not launched any operations")
_RANK = re.compile(
    r"^\s*Rank (?P<rank>\d+)"
    r"(?: has launched up to operation (?P<op>\d+)| (?P<none>has not launched any operations))?"
    r" -- GPU \S+ managed by process (?P<pid>\d+) on node (?P<node>\S+)"
)
_LOST = re.compile(r"^\s*Process (?P<pid>\d+) on node (?P<node>\S+) managing GPU")


class RasRank(msgspec.Struct, frozen=True, omit_defaults=True):
    """One rank of one communicator that stands out. `operations` is how many it has launched."""

    communicator: str
    rank: int
    operations: int
    pid: int
    node: str


class RasLost(msgspec.Struct, frozen=True, omit_defaults=True):
    """A process that RAS cannot reach."""

    pid: int
    node: str


class RasReport(msgspec.Struct, frozen=True, omit_defaults=True):
    """`behind` are ranks that have launched fewer operations than others of their communicator."""

    behind: tuple[RasRank, ...] = ()
    lost: tuple[RasLost, ...] = ()
    most: int = 0  # operations that the others have launched, of the first communicator that differs

    @property
    def words(self) -> tuple[str, ...]:
        """Sentences for the evidence list."""
        said = [
            f"NCCL RAS: rank {one.rank} of communicator {one.communicator} (pid {one.pid} on {one.node}) has "
            f"launched {one.operations} operations, others {self.most}"
            for one in self.behind[:4]
        ]
        return (*said, *(f"NCCL RAS: no answer of process {one.pid} on {one.node}" for one in self.lost[:4]))


def parse(text: str) -> RasReport:
    """The report in the words of any NCCL since 2.24; lines of other kinds are skipped."""
    listed: list[RasRank] = []
    counts: dict[str, set[int]] = {}
    lost = []
    communicator, operations = "", 0
    for line in text.splitlines():
        if match := _GROUP.match(line):
            communicator, operations = f"#{match['group']}", 0
        elif match := _COUNT.match(line):
            operations = int(match["op"])
            counts.setdefault(communicator, set()).add(operations)
        elif _NONE.match(line):
            operations = 0
            counts.setdefault(communicator, set()).add(0)
        elif match := _RANK.match(line):
            own = 0 if match["none"] else int(match["op"] or operations)
            counts.setdefault(communicator, set()).add(own)
            listed.append(RasRank(communicator, int(match["rank"]), own, int(match["pid"]), match["node"]))
        elif match := _LOST.match(line):
            lost.append(RasLost(int(match["pid"]), match["node"]))
    behind = tuple(one for one in listed if one.operations < max(counts[one.communicator]))
    most = max(counts[behind[0].communicator]) if behind else 0
    return RasReport(behind, tuple(dict.fromkeys(lost)), most)


def ask(addresses: Iterable[str], timeout_s: float = 2.0) -> RasReport | None:
    """The report of the first "host:port" that answers; None where none does."""
    for address in dict.fromkeys(addresses):
        host, _, port = address.rpartition(":")
        if not port.isdigit():
            continue
        try:
            return parse(_read((host.strip("[]") or "localhost", int(port)), timeout_s))
        except OSError:
            continue
    return None


def _read(address: tuple[str, int], timeout_s: float) -> str:
    deadline = time.monotonic() + timeout_s
    received = b""
    with socket.create_connection(address, timeout=min(0.5, timeout_s)) as connection:
        connection.sendall(b"verbose status\n")
        while len(received) < _LIMIT_BYTES and (left_s := deadline - time.monotonic()) > 0:
            connection.settimeout(left_s)
            try:
                part = connection.recv(65536)
            except TimeoutError:
                break
            if not part:
                break
            received += part
    return received.decode("utf-8", "replace")
