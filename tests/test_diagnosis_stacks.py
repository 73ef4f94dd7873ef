"""Recorded dumps: names of files, styles of tools, several samples, workers, and what progress looks like."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ftdash import monitor
from ftdash.monitor.diagnosis import diagnose
from ftdash.monitor.diagnosis.frames import Wait, read_frames, read_threads
from ftdash.monitor.diagnosis.knowledge import Phase
from ftdash.monitor.diagnosis.model import Beat, Frame, ProcessEvidence, RankEvidence, Thread, encode_rank
from ftdash.monitor.diagnosis.names import FileName, assign_ranks, read_name
from ftdash.monitor.diagnosis.stacks import read_stacks
from tests.diagnosis import table


def row(name):
    return next(item for item in table.ROWS if item.name == name)


RETRIED = row("out of memory retried on one rank")


def ranks_of(verdict):
    return {culprit.rank for culprit in verdict.culprits}


@pytest.mark.parametrize(
    ("path", "rank", "local_rank", "host"),
    [
        ("rank-3.json", 3, None, ""),
        ("rank_003.txt", 3, None, ""),
        ("py-spy-node02-3.txt", 3, None, "node02"),
        ("node01/rank3.txt", 3, None, "node01"),
        ("host1-gpu3.txt", None, 3, "host1"),
        ("node02_local_rank1.txt", None, 1, "node02"),
        ("attempt_0/3/stderr.log", None, 3, ""),
        ("nccl_trace_rank_container-node02_5", 5, None, "container-node02"),
        ("trace_gpu-a17_3", 3, None, "gpu-a17"),
        ("nccl_trace_rank_worker-gpu00_2", 2, None, "worker-gpu00"),
        ("trace_worker-4_12", 12, None, "worker-4"),
        ("ip-10-0-0-12_rank4.txt", 4, None, "ip-10-0-0-12"),
        ("stacks_host-a_pid1234_rank12.txt", 12, None, "host-a"),
        ("dump_r5.txt", 5, None, ""),
        ("3.json", 3, None, ""),
    ],
)
def test_file_names_tell_rank_and_host(path, rank, local_rank, host):
    found = read_name(path)
    assert (found.rank, found.local_rank, found.host) == (rank, local_rank, host)


def test_local_ranks_count_on_over_hosts_in_natural_order():
    names = [FileName(local_rank=local, host=host) for host in ("node10", "node2") for local in (0, 1)]
    assert assign_ranks(names) == [2, 3, 0, 1]


def test_labels_of_srun_before_every_line_are_taken_apart(tmp_path):
    lines = [
        f"{rank}: {line}"
        for rank, dump in RETRIED.ranks.items()
        for line in table.as_text(dump, 100 + rank, True).splitlines()
    ]
    (tmp_path / "dump.txt").write_text("\n".join(lines))
    assert ranks_of(diagnose(read_stacks(tmp_path)).verdict) == {1}


def test_ranks_in_one_json_object(tmp_path):
    value = {
        str(rank): {"host": "n1", "threads": json.loads(table.as_json(dump, 100 + rank, False))}
        for rank, dump in RETRIED.ranks.items()
    }
    (tmp_path / "all.json").write_text(json.dumps(value))
    verdict = diagnose(read_stacks(tmp_path)).verdict
    assert ranks_of(verdict) == {1}
    assert verdict.culprits[0].host == "n1"


def test_faulthandler_of_python_3_14_and_tracebacks_the_other_way_round(tmp_path):
    (tmp_path / "rank0.txt").write_text(
        "Thread 0x00007f0000000001 [MainThread] (most recent call first):\n"
        '  File "/usr/lib/python3.14/threading.py", line 373 in wait\n'
        '  File "/home/user/train.py", line 9 in wait_for_flag\n'
        '  File "/home/user/train.py", line 20 in <module>\n'
    )
    barrier = "/opt/venv/lib/python3.14/site-packages/torch/distributed/distributed_c10d.py"
    for rank in (1, 2):
        (tmp_path / f"rank{rank}.txt").write_text(
            "Stack (most recent call last):\n"
            '  File "/home/user/train.py", line 21, in <module>\n    sync()\n'
            f'  File "{barrier}", line 5000, in barrier\n    work.wait()\n'
        )
    verdict = diagnose(read_stacks(tmp_path)).verdict
    assert ranks_of(verdict) == {0}
    assert verdict.culprits[0].frame == "wait_for_flag (/home/user/train.py:9)"


def test_a_forked_worker_in_the_dump_belongs_to_the_rank_before_it(tmp_path):
    loader = ("_try_get_data@" + table.LOADER, "_next_data@" + table.LOADER, "train@train.py", table.MODULE)
    worker = ("__getitem__@data.py", "_worker_loop@torch/utils/data/_utils/worker.py", table.MODULE)
    text = (
        table.as_text(table.Dump((loader,)), 10, True) + "\n" + table.as_text(table.Dump((worker,)), 11, True)
    )
    (tmp_path / "rank0.txt").write_text(text)
    for rank in (1, 2):
        (tmp_path / f"rank{rank}.txt").write_text(
            table.as_text(table.Dump(((table.BARRIER, table.MODULE),)), rank, True)
        )
    sample = read_stacks(tmp_path)[0]
    assert [evidence.rank for evidence in sample.ranks] == [0, 1, 2]
    verdict = diagnose([sample]).verdict
    assert (verdict.kind, ranks_of(verdict)) == ("data-loader", {0})
    assert "__getitem__ (data.py:10)" in verdict.culprits[0].frame


@pytest.mark.parametrize("old", [True, False])
def test_a_finalizer_in_a_forked_loader_worker_is_a_lock_of_the_rank_that_waits_for_it(old, tmp_path):
    loader = ("_try_get_data@" + table.LOADER, "_next_data@" + table.LOADER, "train@train.py", table.MODULE)
    worker = (
        "Future.result@concurrent/futures/_base.py",
        "AsyncioManager.run@wandb/sdk/lib/asyncio_manager.py",
        "ServiceConnection.api_cleanup_request@wandb/sdk/lib/service/service_connection.py",
        "finalize.__call__@weakref.py",
        "__getitem__@data.py",
        "_worker_loop@torch/utils/data/_utils/worker.py",
        "Popen._launch@multiprocessing/popen_fork.py",
        table.MODULE,
    )
    texts = [table.as_text(table.Dump((frames,)), pid, old) for pid, frames in ((10, loader), (11, worker))]
    (tmp_path / "rank0.txt").write_text("\n".join(texts))
    waiting = table.Dump(((table.ALL_REDUCE, "step@train.py", table.MODULE),), active=True)
    for rank in (1, 2):
        (tmp_path / f"rank{rank}.txt").write_text(table.as_text(waiting, 20 + rank, old))
    verdict = diagnose(read_stacks(tmp_path)).verdict
    assert (verdict.kind, ranks_of(verdict)) == ("lock", {0})
    assert "__getitem__ (data.py:" in verdict.culprits[0].frame
    assert "forkserver" in verdict.fix


def test_two_folders_with_the_same_ranks_are_two_samples(tmp_path):
    for number in range(2):
        folder = tmp_path / f"2026112{number}-120000"
        folder.mkdir()
        for rank in range(3):
            frames = (f"layer{number + rank}@model.py", "train@train.py", table.MODULE)
            (folder / f"rank-{rank}.txt").write_text(
                table.as_text(table.Dump((frames,), active=True), rank, True)
            )
    samples = read_stacks(tmp_path)
    assert len(samples) == 2
    assert diagnose(samples).verdict.kind == "healthy"


def test_our_own_format_is_read_back(tmp_path):
    for rank in range(3):
        frames = [Frame("barrier", table.SITE + table.C10D, 5), Frame("main", "/home/user/train.py", 7)]
        if rank == 2:
            frames = [Frame("look_up", "/home/user/train.py", 30)]
        process = ProcessEvidence(
            pid=rank + 1, threads=[Thread(name="MainThread", frames=frames)], source="py-spy"
        )
        evidence = RankEvidence(
            rank=rank, host="h", process=process, beat=Beat(t=1.0, step=5, phase="forward")
        )
        (tmp_path / f"rank-{rank}.json").write_bytes(encode_rank(evidence))
    verdict = diagnose(read_stacks(tmp_path)).verdict
    assert ranks_of(verdict) == {2}
    assert (verdict.culprits[0].host, verdict.culprits[0].pid) == ("h", 3)


def frames_of(*specs):
    return [Frame(spec.rpartition("@")[0], table.full_path(spec.rpartition("@")[2]), 1) for spec in specs]


@pytest.mark.parametrize(
    ("specs", "wait", "phase"),
    [
        ((table.ALL_REDUCE, "train@train.py"), Wait.COLLECTIVE, Phase.TRAIN),
        (("Queue.get@queue.py", "all_reduce@train.py"), Wait.OWN, Phase.UNKNOWN),
        (("recv@multiprocessing/connection.py", "fetch@train.py"), Wait.OWN, Phase.UNKNOWN),
        ((*table.BACKWARD, "train@train.py"), Wait.IMPLICIT, Phase.BACKWARD),
        ((f"init_process_group@{table.C10D}", "main@train.py"), Wait.RENDEZVOUS, Phase.INIT),
        ((f"destroy_process_group@{table.C10D}", "main@train.py"), Wait.TEARDOWN, Phase.TEARDOWN),
        (("compile_fx_inner@torch/_inductor/compile_fx.py", "main@train.py"), Wait.COMPILE, Phase.COMPILE),
        (("_save@torch/serialization.py", "main@train.py"), Wait.SAVE_IO, Phase.SAVE),
    ],
)
def test_the_deepest_telling_frame_decides_what_a_thread_waits_for(specs, wait, phase):
    reading = read_frames(frames_of(*specs))
    assert (reading.wait, reading.phase) == (wait, phase)


def test_figures_that_are_written_or_gathered_are_no_checkpoint():
    for name in ("write_summary", "dump_metrics", "Logger.log_scalars"):
        spec = f"{name}@train.py"
        assert read_frames(frames_of(*table.ALL_REDUCE, spec, "train@train.py")).context is not Phase.SAVE
    full = ("full_tensor@torch/distributed/tensor/_api.py", "norm@train.py", "train@train.py")
    assert read_frames(frames_of(*table.ALL_REDUCE, *full)).context is not Phase.SAVE
    kept = (*full[:1], "save_weights@train.py")
    assert read_frames(frames_of(*table.ALL_REDUCE, *kept)).context is Phase.SAVE


def test_own_line_is_the_innermost_frame_in_neither_library_nor_stdlib():
    reading = read_frames(
        frames_of("Condition.wait@threading.py", "helper@lib.py", "map@datasets/a.py", "main@train.py")
    )
    assert reading.own.name == "helper"


@pytest.mark.parametrize("package", ["hook", "inject"])
def test_what_ftdash_put_into_the_rank_is_nobodys_own_line(package):
    inside = Path(monitor.__file__).parent / package
    frames = frames_of(
        "Work.wait@torch/distributed/distributed_c10d.py", f"step@{inside}/x.py", "main@train.py"
    )
    assert read_frames(frames).own.name == "main"


def test_autograd_thread_is_joined_with_the_backward_of_the_main_thread():
    dump = row("collective on an autograd thread, everybody alike").ranks[0]
    threads = [
        Thread(name="MainThread" if n == 0 else "", frames=frames_of(*t)) for n, t in enumerate(dump.threads)
    ]
    reading = read_threads(threads[::-1])
    assert (reading.wait, reading.op, reading.phase) == (Wait.COLLECTIVE, "all_gather", Phase.BACKWARD)


CALM = {
    "loading": ("safe_open@safetensors/__init__.py", "from_pretrained@transformers/modeling_utils.py"),
    "compiling": (
        "compile_fx_inner@torch/_inductor/compile_fx.py",
        "_compile@torch/_dynamo/convert_frame.py",
    ),
    "tokenizing": ("encode@tokenizers/x.py", "_map_single@datasets/arrow_dataset.py"),
    "evaluating": ("linear@torch/nn/functional.py", "prediction_step@transformers/trainer.py"),
    "importing": ("_find_and_load@<frozen importlib._bootstrap>", "<module>@transformers/__init__.py"),
    "saving": ("save@torch/serialization.py", "_save_checkpoint@transformers/trainer.py"),
    "forward": ("linear@torch/nn/functional.py", "training_step@transformers/trainer.py"),
    "optimizer": ("step@torch/optim/adamw.py", "train@transformers/trainer.py"),
}


@pytest.mark.parametrize("style", table.STYLES)
@pytest.mark.parametrize("activity", CALM)
def test_one_look_at_a_working_rank_is_no_hang(activity, style, tmp_path):
    ranks = {
        **table.same((0,), *CALM[activity], "main@train.py", table.MODULE, active=True),
        **table.same((1, 2), table.BARRIER, table.WRAP, "main@train.py", table.MODULE),
    }
    table.write(tmp_path, table.Row("calm", ranks, frozenset(), frozenset()), style)
    verdict = diagnose(read_stacks(tmp_path)).verdict
    assert verdict.culprits == (), verdict.reason
    assert verdict.kind in ("slow", "healthy")
