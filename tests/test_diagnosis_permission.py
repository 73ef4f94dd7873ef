"""Why a process gives no stack: each cause is told apart, with the one remedy that fits."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from ftdash.monitor.diagnosis import collect, permission, procfs
from ftdash.monitor.diagnosis.model import DumpFailure, decode_rank, encode_rank
from ftdash.monitor.diagnosis.permission import Access

USUAL = Access(
    own_uid=1000,
    target_uid=1000,
    yama_scope=None,
    has_cap=False,
    in_container=False,
    same_pid_namespace=True,
    same_user_namespace=True,
)


def changed(**fields: object) -> Access:
    from dataclasses import replace

    return replace(USUAL, **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("access", "kind", "word"),
    [
        (changed(yama_scope=1), DumpFailure.YAMA, "kernel.yama.ptrace_scope=0"),
        (changed(yama_scope=2), DumpFailure.YAMA, "sudo"),
        (changed(yama_scope=3), DumpFailure.YAMA, "SIGUSR2"),
        (changed(target_uid=1001), DumpFailure.OTHER_USER, "1001"),
        (changed(own_uid=0, target_uid=1001, in_container=True), DumpFailure.NO_PTRACE, "SYS_PTRACE"),
        (changed(same_pid_namespace=False), DumpFailure.OTHER_NAMESPACE, "nsenter"),
        (changed(yama_scope=0), DumpFailure.NO_PTRACE, "SYS_PTRACE"),
    ],
)
def test_permission_denied_has_one_cause_and_one_remedy(access, kind, word):
    failure = permission.explain_denied(access)
    assert failure.kind is kind
    assert word in failure.remedy + failure.text


@pytest.fixture
def sleeper():
    """A Python process with 200 threads, ready."""
    code = (
        "import threading, time, sys\n"
        "for _ in range(200): threading.Thread(target=time.sleep, args=(600,), daemon=True).start()\n"
        "print('ready', flush=True)\n"
        "time.sleep(600)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert process.stdout.readline() == b"ready\n"
    seen = None
    while seen is None or seen.state != "S" or seen != procfs.proc_state(process.pid):
        time.sleep(0.1)
        seen = procfs.proc_state(process.pid)
    yield process
    process.kill()
    process.wait()
    process.stdout.close()


def test_missing_zombie_and_foreign_processes_are_told_apart():
    dead = subprocess.Popen([sys.executable, "-c", ""])
    other = subprocess.Popen(["sleep", "600"])
    try:
        while procfs.state_letter(dead.pid) != "Z":
            time.sleep(0.01)
        assert collect.dump_process(dead.pid).failure is DumpFailure.ZOMBIE
        while procfs.command_line(other.pid)[:1] != ["sleep"]:
            time.sleep(0.01)
        assert collect.dump_process(other.pid).failure is DumpFailure.NOT_PYTHON
    finally:
        other.kill()
        other.wait()
        dead.wait()
    assert collect.dump_process(dead.pid).failure is DumpFailure.GONE


def test_unsupported_python_is_named(sleeper):
    failure = permission.explain(
        sleeper.pid, "Error: Failed to find python version from target process", "0.4.1"
    )
    assert failure.kind is DumpFailure.UNSUPPORTED_PYTHON
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    assert failure.text == f"py-spy 0.4.1 does not know Python {version}"


def test_a_dump_of_many_threads_leaves_the_process_as_it_was(sleeper):
    before = procfs.proc_state(sleeper.pid)
    evidence = collect.dump_process(sleeper.pid)
    after = procfs.proc_state(sleeper.pid)
    assert evidence.failure is None
    assert evidence.moved == ""
    assert len(evidence.threads) == 201
    assert (before.state, before.main_sleeps) == (after.state, after.main_sleeps)


def test_a_process_left_stopped_by_a_dump_is_continued(sleeper):
    os.kill(sleeper.pid, signal.SIGSTOP)
    while procfs.state_letter(sleeper.pid) != "T":
        time.sleep(0.01)
    assert "continued" in collect._undo_stop(sleeper.pid, "S")
    while procfs.state_letter(sleeper.pid) == "T":
        time.sleep(0.01)


def test_a_process_that_was_stopped_before_stays_stopped(sleeper):
    os.kill(sleeper.pid, signal.SIGSTOP)
    while procfs.state_letter(sleeper.pid) != "T":
        time.sleep(0.01)
    evidence = collect.dump_process(sleeper.pid)
    assert evidence.proc.state == "T"
    assert evidence.threads
    assert procfs.state_letter(sleeper.pid) == "T"


def test_the_hook_is_asked_where_py_spy_may_not_look(tmp_path, monkeypatch):
    stacks = tmp_path / "stacks"
    stacks.mkdir()
    code = (
        "import faulthandler, signal, sys, time\n"
        "faulthandler.register(signal.SIGUSR2, file=open(sys.argv[1], 'a'), all_threads=True)\n"
        "def wait_here():\n    print('ready', flush=True)\n    time.sleep(600)\n"
        "wait_here()\n"
    )
    script = tmp_path / "train.py"
    script.write_text(code)
    monkeypatch.setattr(collect, "pyspy_path", lambda: None)
    environ = {**os.environ, "FTDASH_RUN_DIR": str(tmp_path), "RANK": "2"}
    command = [sys.executable, str(script), str(stacks / "faulthandler-rank-2.txt")]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, env=environ)
    try:
        assert process.stdout.readline() == b"ready\n"
        evidence = collect.dump_process(process.pid)
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
    assert (evidence.source, evidence.failure) == ("faulthandler", None)
    assert [frame.name for frame in evidence.threads[0].frames][-2:] == ["wait_here", "<module>"]
    assert "SIGUSR2" in evidence.moved


def test_a_process_without_the_hook_is_never_signalled(sleeper, monkeypatch):
    monkeypatch.setattr(collect, "pyspy_path", lambda: None)
    evidence = collect.dump_process(sleeper.pid)
    assert evidence.failure is DumpFailure.NO_PYSPY
    assert procfs.state_letter(sleeper.pid) in ("S", "R")


def test_stored_evidence_reads_back_the_same(sleeper):
    evidence = collect.rank_evidence(sleeper.pid, rank=3)
    assert decode_rank(encode_rank(evidence)) == evidence
    assert evidence.rank == 3


def test_a_dump_that_is_killed_half_way_leaves_no_process_stopped(sleeper, tmp_path, monkeypatch):
    tool = tmp_path / "py-spy"
    tool.write_text(
        '#!/bin/sh\n[ "$1" = --version ] && exec echo py-spy 0.4.1\nfor pid; do :; done\nkill -STOP "$pid"\n'
        'until grep -q "^State:.T" /proc/"$pid"/status; do :; done\nkill -KILL $$\n'
    )
    tool.chmod(0o755)
    monkeypatch.setattr(collect, "pyspy_path", lambda: str(tool))
    evidence = collect.dump_process(sleeper.pid)
    assert not evidence.threads
    while procfs.state_letter(sleeper.pid) == "T":
        time.sleep(0.01)
