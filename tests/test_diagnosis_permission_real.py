"""Real refusals: another user, no right to trace, another namespace, an interpreter that cannot be opened."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from ftdash.monitor.diagnosis import procfs
from ftdash.monitor.diagnosis.model import DumpFailure

OWNER, STRANGER = 61001, 61002

BECOME = """
import ctypes, os, sys
def become(uid, dumpable):
    if uid:
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
    ctypes.CDLL(None).prctl(4, dumpable, 0, 0, 0)
"""
TARGET = BECOME + "become(int(sys.argv[1]), 1); import time; print('ready', flush=True); time.sleep(600)"
# Imported while the interpreter's own files can still be opened.
VIEWER = (
    "from ftdash.monitor.diagnosis import collect, stacks, workerserver\ncollect.pyspy_version()\n"
    + BECOME
    + "become(int(sys.argv[2]), 1)\nseen = collect.dump_process(int(sys.argv[1]))\n"
    + "print(seen.failure or 'seen', seen.failure_text, seen.remedy, sep='|')"
)


def can_become_others() -> bool:
    if os.geteuid() != 0:
        return False
    ways = (["setpriv", "--bounding-set=-sys_ptrace", "true"], ["unshare", "-U", "-r", "true"])
    with contextlib.suppress(FileNotFoundError):
        return all(subprocess.run(way, capture_output=True).returncode == 0 for way in ways)
    return False


pytestmark = pytest.mark.skipif(not can_become_others(), reason="only root can be several users")


@contextlib.contextmanager
def process_of(uid: int, *before: str) -> Iterator[int]:
    """A Python process of this user, ready; its pid."""
    command = [*before, sys.executable, "-c", TARGET, str(uid)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        yield process.pid
    finally:
        process.kill()
        process.wait()
        process.stdout.close()  # type: ignore[union-attr]


def looked_at(pid: int, uid: int, *before: str) -> tuple[str, str, str]:
    """What this user is told when it looks at the process: kind, cause, remedy."""
    command = [*before, sys.executable, "-c", VIEWER, str(pid), str(uid)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    kind, text, remedy = done.stdout.strip().split("|")
    return kind, text, remedy


def test_a_process_of_another_user_is_told_with_both_users() -> None:
    with process_of(OWNER) as pid:
        kind, text, remedy = looked_at(pid, STRANGER)
    assert kind == DumpFailure.OTHER_USER
    assert text == f"the process belongs to uid {OWNER}, you are uid {STRANGER}"
    assert f"sudo -u '#{OWNER}'" in remedy


def test_root_without_the_right_to_trace_is_told_to_add_it() -> None:
    with process_of(OWNER) as pid:
        kind, _, remedy = looked_at(pid, 0, "setpriv", "--bounding-set=-sys_ptrace")
    assert kind == DumpFailure.NO_PTRACE
    assert "--cap-add=SYS_PTRACE" in remedy


def test_from_inside_a_container_a_process_outside_is_in_another_namespace() -> None:
    with process_of(0) as pid:
        kind, text, remedy = looked_at(pid, 0, "unshare", "-U", "-r")
    assert kind == DumpFailure.OTHER_NAMESPACE
    assert "the process outside of it" in text
    assert remedy == "run ftdash outside of this container"


def test_a_container_of_another_user_is_another_namespace_before_it_is_another_user() -> None:
    with process_of(0, "unshare", "-U", "-r", "-p", "--fork", "--kill-child") as shell:
        pid = procfs.descendants(shell)[0]
        kind, _, remedy = looked_at(pid, STRANGER)
    assert kind == DumpFailure.OTHER_NAMESPACE
    assert "inside that container" in remedy


def test_an_interpreter_that_cannot_be_opened_is_no_lack_of_a_right() -> None:
    """Python below a home directory that is closed to others may be traced, but not read."""
    if can_read(os.path.realpath(sys.executable)):
        pytest.skip("this interpreter can be read by everybody")
    with process_of(OWNER) as pid:
        kind, _, remedy = looked_at(pid, OWNER)
    assert kind == DumpFailure.UNREADABLE
    assert "make its interpreter and libraries readable" in remedy


def can_read(path: str) -> bool:
    """Whether a stranger may open the file."""
    command = ["setpriv", f"--reuid={STRANGER}", f"--regid={STRANGER}", "--clear-groups", "test", "-r", path]
    return subprocess.run(command, capture_output=True).returncode == 0
