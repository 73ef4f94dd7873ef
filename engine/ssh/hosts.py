"""Reads a hosts file and runs commands on its hosts through the user's own ssh client and configuration.

No password is ever handled: BatchMode makes a host that would ask for one an error in one line.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ftdash.monitor.hostname import NODE_NAME_ENV
from ftdash.monitor.rundir import RunDir, write_atomic

STORED = "hosts"
HOST = re.compile(r"^[A-Za-z0-9_.@:\[\]-]+$")
CONNECT_TIMEOUT_S = 10


class HostsError(ValueError):
    """The hosts file or a host cannot be used; one line naming file and line, or the host."""


@dataclass(frozen=True, slots=True)
class Host:
    """One node. `name` is what ssh is given (an alias of the user's configuration is fine);
    `address` is where the other nodes reach it, the name itself unless the file says otherwise."""

    name: str
    address: str
    slots: int | None = None  # ranks on this host, None: as the plan says

    @property
    def node(self) -> str:
        """The name under which the host's agent reports."""
        return self.name.rpartition("@")[2]


def read_hosts(path: Path) -> list[Host]:
    """The hosts of a file: a name a line, `slots=N` and `address=A` may follow, `#` starts a comment.

    The form that DeepSpeed and MPI use (`worker-1 slots=8`) is the same. Raises HostsError.
    """
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise HostsError(f"--hosts {path}: {getattr(error, 'strerror', None) or error}") from None
    hosts: list[Host] = []
    for number, line in enumerate(text.splitlines(), 1):
        words = line.split("#")[0].split()
        if not words:
            continue
        name, settings = words[0], dict(word.partition("=")[::2] for word in words[1:])
        unknown = set(settings) - {"slots", "address"}
        if unknown or not HOST.match(name) or name.startswith("-"):
            what = f"unknown setting {sorted(unknown)[0]!r}" if unknown else f"{name!r} is no host name"
            raise HostsError(f"--hosts {path} line {number}: {what}; a line is NAME [slots=N] [address=A]")
        slots = settings.get("slots")
        if slots is not None and not (slots.isdigit() and int(slots) > 0):
            raise HostsError(f"--hosts {path} line {number}: slots={slots}: a whole number above 0")
        if any(name == other.name for other in hosts):
            raise HostsError(f"--hosts {path} line {number}: {name} stands there twice")
        address = settings.get("address") or name.rpartition("@")[2]
        hosts.append(Host(name, address, int(slots) if slots else None))
    if not hosts:
        raise HostsError(f"--hosts {path}: no host in it")
    return hosts


def store_hosts(run: RunDir, hosts: Sequence[Host]) -> None:
    """Keep the hosts with the run, as a hosts file: the one they came from may change."""
    lines = [
        f"{host.name} address={host.address}" + (f" slots={host.slots}" if host.slots else "")
        for host in hosts
    ]
    write_atomic(hosts_file(run), "".join(f"{line}\n" for line in lines).encode())


def hosts_file(run: RunDir) -> Path:
    """The hosts that the run was started on."""
    return run.config / STORED


def stored_hosts(run: RunDir) -> list[Host]:
    """Raises HostsError."""
    return read_hosts(hosts_file(run))


def ssh_options() -> list[str]:
    """Options for every call: no questions, a short wait, and one shared connection for each host."""
    folder = Path(tempfile.gettempdir()) / f"ftdash-ssh-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.stat().st_uid != os.getuid():
        raise HostsError(f"{folder} belongs to another user: cannot share ssh connections there")
    return [
        *("-o", "BatchMode=yes"),
        *("-o", f"ConnectTimeout={CONNECT_TIMEOUT_S}"),
        *("-o", "ControlMaster=auto"),
        *("-o", f"ControlPath={folder}/%C"),
        *("-o", "ControlPersist=60"),
    ]


def remote_command(
    argv: Sequence[str], environment: dict[str, str] | None = None, cwd: str | None = None
) -> str:
    """`argv` as one line for the shell at the other end, every word quoted."""
    words = [f"{key}={value}" for key, value in (environment or {}).items()]
    line = shlex.join(["env", *words, *argv] if words else list(argv))
    return f"cd {shlex.quote(cwd)} && {line}" if cwd else line


def run_on(
    host: Host, argv: Sequence[str], *, timeout_s: float = 60, environment: dict[str, str] | None = None
) -> str:
    """Standard output of a command on a host. Raises HostsError with ssh's or the command's own words."""
    command = ["ssh", *ssh_options(), host.name, remote_command(argv, environment)]
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=timeout_s, check=False
        )
    except FileNotFoundError:
        raise HostsError("ssh is not installed on this machine") from None
    except subprocess.TimeoutExpired:
        raise HostsError(f"{host.name}: no answer within {timeout_s:.0f} s") from None
    if done.returncode:
        lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
        raise HostsError(f"{host.name}: {lines[-1] if lines else f'exit status {done.returncode}'}")
    return done.stdout


def start_on(
    host: Host, argv: Sequence[str], *, log: Path, environment: dict[str, str] | None = None
) -> None:
    """Start a command on a host in a session of its own: losing the connection ends nothing.

    Raises HostsError.
    """
    shell = 'cd / && exec setsid "$@" </dev/null >>"$0" 2>&1 &'
    run_on(
        host,
        ["sh", "-c", shell, str(log), *argv],
        environment={NODE_NAME_ENV: host.node, **(environment or {})},
    )
