"""GPU samples through the real ctypes path: what the driver says, and how it may fail."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.support.nvml import STEADY, Stub, compile_stub

MIB = 1 << 20


@pytest.fixture(scope="session")
def stub_library(tmp_path_factory):
    return compile_stub(tmp_path_factory.mktemp("nvml-lib"))


@pytest.fixture
def stub(stub_library, tmp_path):
    return Stub(stub_library, tmp_path / "state.txt")


def test_a_sample_has_what_the_driver_says(stub):
    samples = stub.sample(f"gpus 8\n{STEADY}gpu 3 throttle 0x24\ngpu 2 nvlink_down_mask 0x3\n")
    assert [sample["index"] for sample in samples] == list(range(8))
    first = samples[0]
    assert first["memory_used"] == 61234 * MIB
    assert first["memory_reserved"] == 551 * MIB
    assert first["memory_total"] == 81559 * MIB
    assert (first["util"], first["util_memory"], first["temp_c"], first["sm_mhz"]) == (93, 41, 63, 1755)
    assert (first["power_w"], first["power_limit_w"]) == (612.0, 700.0)
    assert (first["pcie_gen"], first["pcie_width"], first["pcie_tx_bytes_s"]) == (5, 16, 4_000_000_000)
    assert samples[3]["throttle"] == ["power cap", "thermal (software)"]
    assert (samples[2]["nvlinks"], samples[2]["nvlinks_up"]) == (18, 16)
    assert "unavailable" not in first


NVITOP = """
import json
from nvitop import Device

def known(value):
    return None if value == "N/A" else value

def in_units(value, factor):
    return None if value is None else value * factor

def reading(device):
    return dict(
        uuid=device.uuid(), name=device.name(), bus_id=device.bus_id(),
        gpu_instance=known(device.gpu_instance_id()) if device.is_mig_device() else None,
        memory_used=device.memory_used(), memory_total=device.memory_total(),
        util=known(device.gpu_utilization()), util_memory=known(device.memory_utilization()),
        power_w=in_units(known(device.power_usage()), 1e-3),
        power_limit_w=in_units(known(device.power_limit()), 1e-3),
        temp_c=known(device.temperature()), sm_mhz=known(device.sm_clock()),
        # in KiB/s of what NVML counts in thousands of bytes
        pcie_tx_bytes_s=in_units(known(device.pcie_tx_throughput()), 1000),
        pcie_rx_bytes_s=in_units(known(device.pcie_rx_throughput()), 1000),
        processes=sorted((pid, known(p.gpu_memory())) for pid, p in device.processes().items()),
    )

print(json.dumps([reading(one) for gpu in Device.all() for one in (gpu, *gpu.mig_devices())]))
"""


@pytest.mark.parametrize(
    ("gpus", "sliced"),
    [(8, {}), (16, {}), (8, {1: 3, 5: 7}), (4, {0: 1, 1: 2, 2: 7, 3: 4})],
    ids=["8", "16", "2-of-8-sliced", "all-sliced"],
)
def test_readings_equal_nvitops_on_the_same_driver(stub, gpus, sliced):
    """Every GPU and every MIG instance, in the same order; what it has no figure for, we have none for."""
    text = f"gpus {gpus}\n{STEADY}" + "".join(
        f"gpu {i} mem_used_mib {1000 + 37 * i}\ngpu {i} util_gpu {i}\ngpu {i} power_w {100 + i}\n"
        f"gpu {i} temp {40 + i}\n"
        for i in range(gpus)
    )
    text += "".join(f"gpu {i} mig_mode 1\ngpu {i} mig_devices {count}\n" for i, count in sliced.items())
    text += f"gpu 0 proc {os.getpid()} 512 C gi=1\ngpu {gpus - 1} proc {os.getpid()} 700 C gi=4\n"
    ours = stub.sample(text)
    theirs = stub.python(NVITOP)
    assert len(ours) == len(theirs) == gpus + sum(sliced.values())
    assert sum(len(other["processes"]) for other in theirs) >= 2
    assert sum(sample.get("mig_index") is not None for sample in ours) == sum(sliced.values())
    for mine, other in zip(ours, theirs, strict=True):
        processes = sorted([p["pid"], p["memory"]] for p in mine.get("processes", []))
        assert {name: mine.get(name) for name in other} | {"processes": processes} == other, mine


def test_what_one_gpu_does_not_support_is_missing_there_alone(stub):
    samples = stub.sample(
        f"gpus 3\n{STEADY}gpu 1 fail nvmlDeviceGetPowerUsage NOT_SUPPORTED\ngpu 1 util_gpu na\n"
    )
    assert "power_w" not in samples[1]
    assert "util" not in samples[1]
    assert samples[1]["unavailable"] == {"power": "not supported", "utilisation": "not supported"}
    assert samples[1]["memory_used"] == 61234 * MIB
    assert samples[0]["power_w"] == samples[2]["power_w"] == 612.0


def test_missing_permission_is_not_called_unsupported(stub):
    samples = stub.sample(f"gpus 2\n{STEADY}gpu 1 fail nvmlDeviceGet*RunningProcesses* NO_PERMISSION\n")
    assert samples[1]["unavailable"] == {"processes": "no permission"}
    assert "unavailable" not in samples[0]


def test_a_lost_gpu_is_one_row_and_the_others_live(stub):
    samples = stub.sample(f"gpus 4\n{STEADY}gpu 2 lost\n")
    assert [sample.get("state", "ok") for sample in samples] == ["ok", "ok", "lost", "ok"]
    assert "memory_used" not in samples[2]
    assert "lost" in samples[2]["error"].lower()


def test_a_gpu_that_gets_lost_keeps_its_name_and_its_handle_is_not_used_again(stub, tmp_path):
    log = tmp_path / "calls"
    stub.set(f"gpus 2\n{STEADY}")
    found = stub.python(
        "import json, os, sys, time, msgspec\n"
        "from ftdash.monitor.nvml.sampler import GpuSampler\n"
        "sampler = GpuSampler(deadline_s=2.0)\n"
        "before = sampler.sample()\n"
        "path = os.environ['NVML_STUB_STATE']\n"
        "text = open(path).read() + 'gpu 1 lost\\n'\n"
        "open(path + '.n', 'w').write(text); os.replace(path + '.n', path)\n"
        "time.sleep(0.05)\n"
        "after = [sampler.sample() for _ in range(5)]\n"
        "print(json.dumps([msgspec.to_builtins(before), msgspec.to_builtins(after)]))\n",
        NVML_STUB_LOG=str(log),
    )
    before, after = found
    assert before[1].get("state", "ok") == "ok"
    for samples in after:
        assert samples[0].get("state", "ok") == "ok"
        assert samples[1]["state"] == "lost"
        assert samples[1]["uuid"] == before[1]["uuid"]
        assert samples[1]["name"] == before[1]["name"]
    lines = [line.split() for line in log.read_text().splitlines()]
    # "no event yet" is answered with a timeout
    errors = sum(int(failed) for name, _, failed in lines if name != "nvmlEventSetWait_v2")
    assert errors == 1  # the call that said so was the last one for that GPU


def test_an_unknown_error_now_and_then_loses_only_that_value(stub):
    samples = stub.sample(f"gpus 1\n{STEADY}gpu 0 fail nvmlDeviceGetUtilizationRates UNKNOWN p=1\n", rounds=3)
    assert samples[0].get("state", "ok") == "ok"
    assert "util" not in samples[0]
    assert samples[0]["temp_c"] == 63


def test_an_unknown_error_for_every_call_is_a_gpu_in_error(stub):
    samples = stub.sample(f"gpus 2\n{STEADY}gpu 0 fail * UNKNOWN\n")
    assert samples[0]["state"] == "error"
    assert samples[0]["error"]
    assert samples[1].get("state", "ok") == "ok"


@pytest.mark.parametrize("missing", ["_v3", "_v[23]"])
def test_an_old_driver_lists_processes_by_an_older_call(stub, missing):
    samples = stub.sample(
        f"gpus 1\n{STEADY}gpu 0 proc 4242 1024 C\n"
        f"gpu 0 fail nvmlDeviceGetComputeRunningProcesses{missing} FUNCTION_NOT_FOUND\n"
    )
    assert [(p["pid"], p["memory"]) for p in samples[0]["processes"]] == [(4242, 1024 * MIB)]
    assert "unavailable" not in samples[0]


def test_an_old_driver_gives_memory_by_the_older_call(stub):
    samples = stub.sample(f"gpus 1\n{STEADY}fail nvmlDeviceGetMemoryInfo_v2 FUNCTION_NOT_FOUND\n")
    assert samples[0]["memory_used"] == (61234 + 551) * MIB  # v1 counts the driver's own part as used
    assert "memory_reserved" not in samples[0]
    assert "unavailable" not in samples[0]


def test_unified_memory_is_neither_zero_nor_a_capacity(stub):
    samples = stub.sample(
        "gpus 1\ngpu 0 name NVIDIA GB10\ngpu 0 mem_used_mib na\n"
        "gpu 0 proc 999999 2048 C\ngpu 0 proc 999998 1024 C\n"
    )
    [sample] = samples
    assert sample["unified"] is True
    assert "memory_total" not in sample
    assert sample["memory_used"] == 3072 * MIB
    assert sample["memory_available"] > 0
    assert sample["unavailable"]["memory"] == "unified: shared with the CPU"


def test_misleading_totals_of_a_unified_gpu_are_not_shown(stub):
    [sample] = stub.sample("gpus 1\ngpu 0 name NVIDIA GB10\ngpu 0 mem_total_mib 122880\n")
    assert sample["unified"] is True
    assert "memory_total" not in sample
    assert "memory_used" not in sample


def test_mig_instances_are_devices_and_together_no_larger_than_their_gpu(stub):
    samples = stub.sample(
        f"gpus 4\n{STEADY}gpu 1 mig_mode 1\ngpu 1 mig_devices 3\ngpu 1 proc 999999 512 C gi=2\n"
    )
    assert [(s["index"], s.get("mig_index")) for s in samples] == [
        (0, None),
        (1, None),
        (1, 0),
        (1, 1),
        (1, 2),
        (2, None),
        (3, None),
    ]
    parent, *instances = samples[1:5]
    assert parent["mig"] is True
    assert "util" not in parent
    for instance in instances:
        assert instance["uuid"].startswith("MIG-")
        assert instance["parent_uuid"] == parent["uuid"]
        assert "util" not in instance
        assert instance["unavailable"]["utilisation"] == "not supported for a MIG instance"
    assert len({instance["uuid"] for instance in instances}) == 3
    assert sum(instance["memory_total"] for instance in instances) <= parent["memory_total"]
    assert [len(instance.get("processes", [])) for instance in instances] == [0, 1, 0]


def test_processes_of_another_namespace_are_marked(stub):
    [sample] = stub.sample(f"gpus 1\n{STEADY}gpu 0 proc 4000000 1024 C\n")
    assert sample["processes"] == [{"pid": 4000000, "memory": 1024 * MIB, "visible": False}]


def test_a_slow_gpu_does_not_delay_the_others(stub):
    stub.set(f"gpus 3\n{STEADY}gpu 1 latency * 400\n")
    found = stub.python(
        "import json, time, msgspec\n"
        "from ftdash.monitor.nvml.sampler import GpuSampler\n"
        "sampler = GpuSampler(deadline_s=0.2)\n"
        "sampler.sample()\n"
        "samples = sampler.sample()\n"
        "print(json.dumps([msgspec.to_builtins(samples)]))\n"
    )
    [samples] = found
    assert [s.get("state", "ok") for s in samples] == ["ok", "error", "ok"]
    assert "has not answered" in samples[1]["error"]
    assert samples[0]["temp_c"] == samples[2]["temp_c"] == 63


def test_a_slow_gpu_shows_its_older_values_with_their_age(stub):
    stub.set(f"gpus 1\n{STEADY}")
    [samples] = stub.python(
        "import json, os, time, msgspec\n"
        "from ftdash.monitor.nvml.sampler import GpuSampler\n"
        "sampler = GpuSampler(deadline_s=0.2)\n"
        "sampler.sample()\n"
        "path = os.environ['NVML_STUB_STATE']\n"
        "text = open(path).read() + 'gpu 0 latency * 3000\\n'\n"
        "open(path + '.n', 'w').write(text); os.replace(path + '.n', path)\n"
        "time.sleep(0.05)\n"
        "print(json.dumps([msgspec.to_builtins(sampler.sample())]))\n"
    )
    assert samples[0]["temp_c"] == 63
    assert samples[0].get("state", "ok") == "ok"
    assert "older values" in samples[0]["error"]


def test_a_driver_that_starts_slowly_does_not_hold_the_caller(stub):
    stub.set("gpus 1\nlatency nvmlInit* 8000\n")
    found = stub.python(
        "import json, os, time\n"
        "from ftdash.monitor.nvml import library\n"
        "lib = library.Library()\n"
        "ready = lib.start(0.1)\n"
        "print(json.dumps([ready, lib.reason]), flush=True)\n"
        "os._exit(0)\n"
    )
    assert found == [False, "NVML is still starting"]


@pytest.mark.parametrize(
    ("state", "words"),
    [
        ("fail nvmlInit* DRIVER_NOT_LOADED\n", "not loaded"),
        ("fail nvmlInit* LIB_RM_VERSION_MISMATCH\n", "differ in version"),
        ("fail nvmlInit* NO_PERMISSION\n", "permission"),
        ("gpus 0\n", "shows no GPU"),
    ],
)
def test_why_there_is_no_gpu_is_one_sentence(stub, state, words):
    stub.set(state)
    samples, reason = stub.python(
        "import json\n"
        "from ftdash.monitor.nvml import sample_gpus, sampler\n"
        "print(json.dumps([[s.index for s in sample_gpus()], sampler().reason]))\n"
    )
    assert samples == []
    assert words in reason
    assert "\n" not in reason


def test_a_machine_without_the_library_is_a_normal_machine():
    code = (
        "from ftdash.monitor.nvml import sample_gpus, sampler\n"
        "assert sample_gpus() == []\n"
        "print(sampler().reason)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={"PATH": "/usr/bin", "LD_LIBRARY_PATH": "/nonexistent"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip()
    assert done.stderr == ""


def test_slow_fields_are_not_asked_in_every_sample(stub, tmp_path):
    log = tmp_path / "calls"
    stub.sample(f"gpus 1\n{STEADY}", rounds=20, NVML_STUB_LOG=str(log))
    calls = {line.split()[0]: int(line.split()[1]) for line in log.read_text().splitlines()}
    assert calls["nvmlDeviceGetUtilizationRates"] == 20
    assert calls["nvmlDeviceGetPcieThroughput"] == 2  # one read of both directions
    assert calls["nvmlDeviceGetUUID"] == 1


def test_what_is_not_supported_is_not_asked_again_at_once(stub, tmp_path):
    log = tmp_path / "calls"
    stub.sample(f"gpus 1\n{STEADY}gpu 0 util_gpu na\n", rounds=20, NVML_STUB_LOG=str(log))
    calls = {line.split()[0]: int(line.split()[1]) for line in log.read_text().splitlines()}
    assert calls["nvmlDeviceGetUtilizationRates"] == 1


def test_xid_events_are_kept_in_order(stub):
    stub.set(f"gpus 2\n{STEADY}gpu 1 xid 31\n")
    first, second = stub.python(
        "import json, os, time, msgspec\n"
        "from ftdash.monitor.nvml.sampler import GpuSampler\n"
        "sampler = GpuSampler(deadline_s=2.0)\n"
        "sampler.sample()\n"
        "first = [s.xids for s in sampler.sample()]\n"
        "path = os.environ['NVML_STUB_STATE']\n"
        "text = open(path).read() + 'gpu 1 xid 79\\n'\n"
        "open(path + '.n', 'w').write(text); os.replace(path + '.n', path)\n"
        "time.sleep(0.05)\n"
        "print(json.dumps([first, [s.xids for s in sampler.sample()]]))\n"
    )
    assert first == [[], [31]]
    assert second == [[], [31, 79]]


def test_a_driver_without_events_is_asked_for_them_once(stub, tmp_path):
    log = tmp_path / "calls"
    [sample] = stub.sample(
        f"gpus 1\n{STEADY}fail nvmlEventSetCreate NOT_SUPPORTED\n", rounds=5, NVML_STUB_LOG=str(log)
    )
    assert sample["unavailable"] == {"xid events": "not supported"}
    calls = {line.split()[0]: int(line.split()[1]) for line in log.read_text().splitlines()}
    assert calls["nvmlEventSetCreate"] == 1


def topology(stub, text: str):
    stub.set(text)
    return stub.python(
        "import json, msgspec\n"
        "from ftdash.monitor.nvml.topology import read_topology\n"
        "print(json.dumps(msgspec.to_builtins(read_topology())))\n"
    )


def test_a_switch_joins_all_pairs_by_nvlink(stub):
    found = topology(stub, "gpus 4\ngpu 2 nvlink_down_mask 0x3\n")
    assert {pair["join"] for pair in found["pairs"]} == {"nvlink"}
    assert len(found["pairs"]) == 6
    links = {(pair["a"], pair["b"]): pair["nvlinks"] for pair in found["pairs"]}
    assert links[(0, 1)] == 18
    assert links[(1, 2)] == 16


def test_cards_without_nvlink_are_joined_by_pcie_and_lost_ones_left_out(stub):
    found = topology(stub, "gpus 4\ngpu * nvlinks 0\ngpu 3 lost\n")
    assert [gpu["index"] for gpu in found["gpus"]] == [0, 1, 2]
    assert [(pair["a"], pair["b"], pair["join"]) for pair in found["pairs"]] == [
        (0, 1, "node"),
        (0, 2, "sys"),
        (1, 2, "sys"),
    ]


def test_memory_errors_and_waiting_rows_are_reported(stub):
    samples = stub.sample(
        "gpus 2\ngpu 1 ecc_uncorr_vol 3\ngpu 1 remap_uncorr 2\ngpu 1 remap_pending 1\ngpu 1 pcie_width 8\n"
    )
    assert (samples[1]["ecc_uncorrected"], samples[1]["remapped_rows"]) == (3, 2)
    assert samples[1]["remap_pending"] is True
    assert (samples[1]["pcie_width"], samples[1]["pcie_width_max"]) == (8, 16)
    assert samples[0]["ecc_uncorrected"] == 0
