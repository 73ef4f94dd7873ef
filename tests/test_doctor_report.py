"""What the doctor reports of this machine, of GPUs of the stand-in, and of trouble that it is shown."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from ftdash.monitor import machine
from ftdash.monitor.rundir import Manifest, RunDir
from tests.support.nvml import STEADY, Stub, compile_stub

RUN = [sys.executable, "-c", "from ftdash.tui.cli import main; main()", "doctor"]


@pytest.fixture(scope="session")
def stub_library(tmp_path_factory):
    return compile_stub(tmp_path_factory.mktemp("nvml-lib"))


def doctor(**env: str) -> dict:
    done = subprocess.run([*RUN, "--json"], capture_output=True, text=True, env={**os.environ, **env})
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def found_codes(findings) -> set[str]:
    return {finding["code"] for finding in findings}


def test_a_machine_without_gpus_is_reported_and_not_an_error():
    report = doctor(LD_LIBRARY_PATH="/nonexistent")
    assert report["gpus"] == []
    assert report["gpu_reason"]
    assert not [finding for finding in report["findings"] if finding["severity"] == "error"]
    for finding in report["findings"]:
        assert set(finding) == {"code", "severity", "where", "text", "fix"}


def test_gpus_are_reported_with_what_is_wrong_with_them(stub_library, tmp_path):
    stub = Stub(stub_library, tmp_path / "state")
    stub.set(
        f"gpus 4\n{STEADY}gpu 1 lost\ngpu 2 fail nvmlDeviceGetPowerUsage NOT_SUPPORTED\n"
        "gpu 3 mig_mode 1\ngpu 3 mig_devices 2\n"
    )
    report = doctor(**stub.env())
    assert [(gpu["index"], gpu["mig_index"], gpu["state"]) for gpu in report["gpus"]] == [
        (0, None, "ok"),
        (1, None, "lost"),
        (2, None, "ok"),
        (3, None, "ok"),
        (3, 0, "ok"),
        (3, 1, "ok"),
    ]
    assert report["gpus"][0]["memory_used"] == 61234 << 20
    assert report["gpus"][2]["power_w"] is None
    assert report["gpus"][2]["unavailable"] == {"power": "not supported"}
    assert report["gpus"][4]["util"] is None
    assert (report["driver"], report["cuda"]) == ("570.86.15", "12.8")
    assert "gpu-lost" in found_codes(report["findings"])
    assert "gpu-order" not in found_codes(report["findings"])


def test_mixed_cards_are_warned_about(stub_library, tmp_path):
    stub = Stub(stub_library, tmp_path / "state")
    stub.set("gpus 2\ngpu 1 name NVIDIA GeForce GTX 1080\n")
    assert "gpu-order" in found_codes(doctor(**stub.env(CUDA_DEVICE_ORDER=""))["findings"])
    sure = doctor(**stub.env(CUDA_DEVICE_ORDER="PCI_BUS_ID"))
    assert "gpu-order" not in found_codes(sure["findings"])


def test_the_text_says_lost_and_unified_in_words(stub_library, tmp_path):
    stub = Stub(stub_library, tmp_path / "state")
    stub.set("gpus 2\ngpu 0 lost\ngpu 1 name NVIDIA GB10\ngpu 1 mem_used_mib na\n")
    done = subprocess.run(RUN, capture_output=True, text=True, env=stub.env(), check=True)
    assert "LOST" in done.stdout
    assert "memory n/a (unified" in done.stdout
    assert "0 MiB of 0" not in done.stdout


def test_reporting_loads_no_training_library():
    code = (
        "import sys\n"
        "from ftdash.tui.cli import run\n"
        "run(['doctor', '--json'])\n"
        "heavy = {'torch', 'transformers', 'numpy', 'pandas', 'textual'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


def test_a_run_stored_as_running_without_a_process_is_stale(ftdash_home):
    RunDir.create(Manifest(run="20260101-000000-dead-0000", state="running"))
    RunDir.create(Manifest(run="20260101-000001-done-0000", state="finished"))
    [finding] = [f for f in doctor()["findings"] if f["code"] == "run-stale"]
    assert finding["where"] == "20260101-000000-dead-0000"


def test_a_live_run_is_not_stale(ftdash_home):
    run = RunDir.create(Manifest(run="20260101-000000-live-0000", state="running"))
    child = subprocess.Popen(
        [sys.executable, "-c", "print(flush=True); input()"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "FTDASH_RUN_DIR": str(run.path)},
    )
    try:
        assert child.stdout is not None
        child.stdout.readline()
        assert "run-stale" not in found_codes(doctor()["findings"])
    finally:
        child.communicate(b"\n")


def test_a_broken_manifest_is_a_finding_and_not_an_end(ftdash_home):
    run = RunDir.create(Manifest(run="20260101-000000-broken-0000"))
    run.manifest_path.write_text("{")
    assert "run-broken" in found_codes(doctor()["findings"])


def test_py_spy_is_tried_and_its_absence_told(monkeypatch):
    [works] = list(machine._pyspy())
    assert works.code in ("pyspy", "stacks-denied")
    monkeypatch.setattr(machine, "pyspy_path", lambda: None)
    [missing] = list(machine._pyspy())
    assert (missing.code, missing.fix) == ("pyspy-missing", "pip install py-spy")


def test_a_py_spy_that_is_denied_gives_the_remedy(monkeypatch, tmp_path):
    fake = tmp_path / "py-spy"
    fake.write_text("#!/bin/sh\necho 'Error: Permission denied (os error 13)' >&2\nexit 1\n")
    fake.chmod(0o755)
    monkeypatch.setattr(machine, "pyspy_path", lambda: str(fake))
    [denied] = list(machine._pyspy())
    assert denied.code == "stacks-denied"
    assert denied.fix


def test_small_shared_memory_is_warned_about(monkeypatch):
    monkeypatch.setattr(machine, "_usage", lambda path: (60 << 20, 64 << 20))
    [finding] = list(machine._shared_memory())
    assert (finding.code, finding.severity) == ("shm", "warning")
    assert "--ipc=host" in finding.fix


def test_a_full_disk_and_a_folder_that_cannot_be_written_are_told(monkeypatch, tmp_path):
    monkeypatch.setattr(machine, "_usage", lambda path: (1 << 20, 1 << 40))
    assert [finding.code for finding in machine._runs_folder()] == ["disk"]
    monkeypatch.setattr(machine.os, "access", lambda path, mode: False)
    assert [finding.severity for finding in machine._runs_folder()] == ["error"]


def test_the_tried_versions_are_those_of_the_constraints():
    text = (Path(__file__).parents[1] / "constraints.txt").read_text()
    pinned = dict(re.findall(r"^([\w-]+)==(\S+)$", text, re.M))
    assert {name: pinned[name] for name in machine.TRIED} == machine.TRIED
