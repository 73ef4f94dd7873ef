"""Which GPU a rank runs on, by its environment."""

from __future__ import annotations

import os
import subprocess
import sys

from ftdash.monitor.nvml.mapping import (
    gpu_of_process,
    gpu_of_rank,
    hidden_processes,
    pids_by_namespace,
    visible_devices,
)
from ftdash.monitor.reader import RunReader
from ftdash.monitor.records import GpuProcess, GpuSample, Meta, RankSample, Record, encode_line
from ftdash.monitor.rundir import Manifest, RunDir
from ftdash.monitor.state import RankState


def gpu(index: int, name: str = "H100", **more) -> GpuSample:
    return GpuSample(t=0.0, index=index, uuid=f"GPU-{index:04x}-aaaa", name=name, **more)


ALIKE = [gpu(i) for i in range(4)]
MIXED = [gpu(0, "GTX 1080"), gpu(1, "RTX 4090"), gpu(2, "GTX 1080")]


def test_alike_cards_are_counted_as_the_driver_counts_them():
    found = gpu_of_rank({"LOCAL_RANK": "2"}, ALIKE)
    assert (found.uuid, found.sure) == ("GPU-0002-aaaa", True)


def test_visible_devices_are_counted_from_zero_inside_a_rank():
    found = gpu_of_rank({"CUDA_VISIBLE_DEVICES": "3,1", "LOCAL_RANK": "0"}, ALIKE)
    assert (found.uuid, found.sure) == ("GPU-0003-aaaa", True)


def test_a_rank_that_sees_one_gpu_runs_on_it_whatever_its_local_rank():
    found = gpu_of_rank({"CUDA_VISIBLE_DEVICES": "2", "LOCAL_RANK": "5"}, ALIKE)
    assert (found.uuid, found.sure) == ("GPU-0002-aaaa", True)


def test_uuids_and_their_beginnings_name_gpus_on_mixed_cards_too():
    for token in ("GPU-0001-aaaa", "GPU-0001"):
        found = gpu_of_rank({"CUDA_VISIBLE_DEVICES": token}, MIXED)
        assert (found.uuid, found.sure) == ("GPU-0001-aaaa", True), token


def test_a_beginning_that_fits_two_gpus_names_none():
    assert visible_devices({"CUDA_VISIBLE_DEVICES": "GPU-000"}, ALIKE)[0] == []


def test_numbers_on_mixed_cards_are_unsure_unless_cuda_counts_by_bus():
    unsure = gpu_of_rank({"CUDA_VISIBLE_DEVICES": "1", "LOCAL_RANK": "0"}, MIXED)
    assert not unsure.sure
    assert "mapping unsure" in unsure.why
    sure = gpu_of_rank({"CUDA_VISIBLE_DEVICES": "1", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}, MIXED)
    assert (sure.uuid, sure.sure) == ("GPU-0001-aaaa", True)


def test_what_the_rank_reports_itself_wins():
    found = gpu_of_rank({"LOCAL_RANK": "0"}, MIXED, device="cuda:0", device_uuid="0002-aaaa")
    assert (found.uuid, found.sure) == ("GPU-0002-aaaa", True)


def test_the_list_ends_at_the_first_entry_that_names_nothing():
    assert [d.index for d in visible_devices({"CUDA_VISIBLE_DEVICES": "1,9,2"}, ALIKE)[0]] == [1]
    assert visible_devices({"CUDA_VISIBLE_DEVICES": "-1"}, ALIKE)[0] == []
    assert visible_devices({"CUDA_VISIBLE_DEVICES": ""}, ALIKE)[0] == []


def test_a_gpu_named_twice_hides_all():
    devices, _, why = visible_devices({"CUDA_VISIBLE_DEVICES": "1,1"}, ALIKE)
    assert devices == []
    assert "twice" in why


def test_no_visible_gpu_is_an_answer():
    found = gpu_of_rank({"CUDA_VISIBLE_DEVICES": "", "LOCAL_RANK": "0"}, ALIKE)
    assert found.uuid is None
    assert gpu_of_rank({}, ALIKE, device="cpu").uuid is None


def test_more_local_ranks_than_gpus_is_unsure():
    found = gpu_of_rank({"CUDA_VISIBLE_DEVICES": "0,1", "LOCAL_RANK": "3"}, ALIKE)
    assert found.uuid is None
    assert not found.sure


def mig() -> list[GpuSample]:
    parent = gpu(0, mig=True)
    return [
        parent,
        *(
            GpuSample(
                t=0.0,
                index=0,
                uuid=f"MIG-{i:04x}-bbbb",
                name="H100 MIG",
                mig_index=i,
                gpu_instance=i + 7,
                parent_uuid=parent.uuid,
            )
            for i in range(2)
        ),
    ]


def test_mig_instances_are_found_by_both_forms_of_their_name():
    for token in ("MIG-0001-bbbb", "MIG-0001", "MIG-GPU-0000-aaaa/8/0"):
        found = gpu_of_rank({"CUDA_VISIBLE_DEVICES": token, "LOCAL_RANK": "0"}, mig())
        assert (found.uuid, found.sure) == ("MIG-0001-bbbb", True), token


def test_a_split_gpu_without_a_named_instance_is_unsure():
    assert not gpu_of_rank({"LOCAL_RANK": "0"}, mig()).sure


def test_the_environment_of_a_living_process_is_read():
    child = subprocess.Popen(
        [sys.executable, "-c", "print('runs', flush=True); input()"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "GPU-0003", "LOCAL_RANK": "1", "RANK": "1"},
    )
    assert child.stdout is not None
    child.stdout.readline()  # between fork and exec there is no environment to be read
    try:
        assert gpu_of_process(child.pid, ALIKE).uuid == "GPU-0003-aaaa"
        assert pids_by_namespace(child.pid)[0] == child.pid
    finally:
        child.communicate(b"\n")
    gone = gpu_of_process(child.pid, ALIKE)
    assert gone.uuid is None
    assert not gone.sure


def test_processes_hidden_by_the_namespace_are_said():
    sample = gpu(0, processes=[GpuProcess(5, None, visible=False), GpuProcess(6, None)])
    assert hidden_processes([sample]).startswith("1 GPU process")
    assert hidden_processes([gpu(0)]) == ""


def run_with(root, device: str, device_uuid: str = "", unsure: str = "") -> RankState:
    """The state of rank 0 of a run whose agent saw two GPUs and took the second for the rank's."""
    run = RunDir.create(Manifest(run="r", state="running"), root)
    meta = Meta(
        t=1.0, rank=0, local_rank=0, world_size=1, host="n", pid=1, device=device, device_uuid=device_uuid
    )
    run.rank_file(0).write_bytes(encode_line(meta))
    samples: list[Record] = [gpu(0, memory_used=10), gpu(1, memory_used=20)]
    samples.append(RankSample(t=1.0, rank=0, pid=1, rss=5, gpu_uuid="GPU-0001-aaaa", gpu_unsure=unsure))
    run.node_file("n").write_bytes(b"".join(encode_line(sample) for sample in samples))
    reader = RunReader(run)
    state = reader.poll()
    reader.close()
    return state.ranks[0]


def test_a_screen_shows_the_gpu_that_the_rank_reported_over_what_the_agent_concluded(tmp_path):
    reported = run_with(tmp_path / "a", "cuda:0", "GPU-0000-aaaa", unsure="mapping unsure: x")
    assert reported.gpu is not None
    assert (reported.gpu.index, reported.memory_used, reported.gpu_unsure) == (0, 10, "")
    concluded = run_with(tmp_path / "b", "cuda:0", unsure="mapping unsure: x")
    assert concluded.gpu is not None
    assert (concluded.gpu.index, concluded.gpu_unsure) == (1, "mapping unsure: x")


def test_a_rank_on_the_cpu_of_a_gpu_machine_has_no_gpu(tmp_path):
    rank = run_with(tmp_path, "cpu")
    assert rank.gpu is None
    assert rank.memory_used == 5
