"""Several hosts on one machine: network namespaces with an address, a name and a process table each."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

HOSTS = Path("/etc/hosts")


def allowed() -> bool:
    """Whether this user may make network namespaces here."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        return False
    made = _ip("netns", "add", "ftdash-probe", check=False)
    _ip("netns", "del", "ftdash-probe", check=False)
    return made


def _ip(*words: str, check: bool = True) -> bool:
    return subprocess.run(["ip", *words], check=check, capture_output=True).returncode == 0


class Namespaces:
    """Hosts `names` on the net 10.77.`net`.0; this machine is .1 there. `up` and `down` are idempotent."""

    def __init__(self, names: list[str], net: int, own_name: str) -> None:
        self.names = names
        self.own_address = f"10.77.{net}.1"
        self.addresses = {name: f"10.77.{net}.{11 + index}" for index, name in enumerate(names)}
        self._own_name = own_name
        self._bridge = f"ftdash{net}"
        self._mark = f"# ftdash tests {net}"

    def up(self) -> None:
        self.down()
        _ip("link", "add", self._bridge, "type", "bridge")
        _ip("addr", "add", f"{self.own_address}/24", "dev", self._bridge)
        _ip("link", "set", self._bridge, "up")
        lines = "".join(f"{address} {name}\n" for name, address in self.addresses.items())
        for index, name in enumerate(self.names):
            space = self._space(name)
            etc = Path("/etc/netns") / space
            etc.mkdir(parents=True, exist_ok=True)
            (etc / "hosts").write_text(f"127.0.0.1 localhost\n{self.own_address} {self._own_name}\n{lines}")
            (etc / "hostname").write_text(f"{name}\n")
            (etc / "resolv.conf").write_text("")  # no name server answers here: ask none
            (etc / "nsswitch.conf").write_text("passwd: files\ngroup: files\nhosts: files\n")
            cable = f"{self._bridge}v{index}"
            _ip("netns", "add", space)
            _ip("link", "add", cable, "type", "veth", "peer", "name", "eth0", "netns", space)
            _ip("link", "set", cable, "master", self._bridge, "up")
            _ip("-n", space, "link", "set", "lo", "up")
            _ip("-n", space, "addr", "add", f"{self.addresses[name]}/24", "dev", "eth0")
            _ip("-n", space, "link", "set", "eth0", "up")
            _ip("-n", space, "route", "add", "default", "via", self.own_address)
        marked = "".join(f"{line}  {self._mark}\n" for line in lines.splitlines())
        HOSTS.write_text(HOSTS.read_text() + marked)

    def down(self) -> None:
        for index, name in enumerate(self.names):
            _ip("netns", "del", self._space(name), check=False)
            _ip("link", "del", f"{self._bridge}v{index}", check=False)
            shutil.rmtree(f"/etc/netns/{self._space(name)}", ignore_errors=True)
        _ip("link", "del", self._bridge, check=False)
        text = HOSTS.read_text()
        if self._mark in text:
            HOSTS.write_text("".join(line for line in text.splitlines(True) if self._mark not in line))

    def inside(self, name: str, argv: list[str]) -> list[str]:
        """`argv` run on that host; killing what is started ends every process of the host."""
        shell = 'hostname "$0"; exec "$@"'
        own_table = ["unshare", "-u", "-p", "--fork", "--kill-child=KILL", "--mount-proc"]
        return ["ip", "netns", "exec", self._space(name), *own_table, "sh", "-c", shell, name, *argv]

    def _space(self, name: str) -> str:
        return f"{self._bridge}-{name}"
