"""What the kernel's log says of sick GPUs and of processes it killed, where this user may read it."""

from __future__ import annotations

import os
import re
import time

from ftdash.monitor.logs.hardware import gpu_fault

_DEVICE = "/dev/kmsg"
_MOST_BYTES = 8 << 20
RECENT_S = 3600.0
_KILLED = re.compile(r"(?:Memory cgroup out of memory|Out of memory): Killed process (?P<pid>\d+) .*")


def killed_pid(line: str) -> int | None:
    """The process that a line of `kernel_lines` says was killed for memory, None for other lines."""
    match = _KILLED.search(line)
    return int(match["pid"]) if match else None


def kernel_lines(since_s: float = RECENT_S, path: str = _DEVICE) -> tuple[str, ...]:
    """Lines on GPU faults (XID) and processes killed for memory in the last `since_s` seconds, oldest first.

    Empty where the kernel's log may not be read. A record is "priority,sequence,microseconds,flags;text".
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return ()
    oldest = time.clock_gettime(time.CLOCK_MONOTONIC) - since_s
    found: dict[str, None] = {}
    read = 0
    try:
        while read < _MOST_BYTES:
            try:
                data = os.read(fd, 8192)
            except BlockingIOError:
                break
            except BrokenPipeError:
                continue  # the record was overwritten: the next read goes on with the oldest one
            if not data:
                break
            read += len(data)
            for record in data.decode("utf-8", "replace").splitlines():
                head, _, text = record.partition(";")
                stamp = head.split(",")[2:3]
                if not stamp or not stamp[0].isdigit() or int(stamp[0]) / 1e6 < oldest:
                    continue
                if fault := gpu_fault(text):
                    where = f" (PCI {fault.bus})" if fault.bus else ""
                    found[f"kernel: {fault.text}{where}"] = None
                elif match := _KILLED.search(text):
                    found[f"kernel: {match[0][:160]}"] = None
    except OSError:
        pass
    finally:
        os.close(fd)
    return tuple(found)
