"""Runs that died, by what their launchers and process groups leave: who failed, where, and what helps."""

from __future__ import annotations

from pathlib import Path

import pytest

from ftdash.monitor.diagnosis import diagnose
from ftdash.monitor.diagnosis.logs import LogReader, read_logs
from ftdash.monitor.diagnosis.model import Sample, Verdict
from ftdash.monitor.diagnosis.report import as_text
from ftdash.monitor.diagnosis.rundata import sample_run
from tests.support.live_runs import make_run

TORCH = "/opt/venv/lib/python3.11/site-packages/torch"
LOST = (
    "RuntimeError: [/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer "
    "[127.0.0.1]:62360. This is typically caused by a remote worker crashing."
)
LATE = (
    "RuntimeError: [/pytorch/third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting "
    "15000ms for recv operation to complete"
)


def traced(rank: int, error: str, line: int = 40, call: str = "all_reduce", name: str = "step") -> str:
    """A traceback as torch's excepthook prints it; without a call the user's own line raised."""
    below = [
        f'  File "{TORCH}/distributed/c10d_logger.py", line 83, in wrapper',
        "    return func(*args, **kwargs)",
        f'  File "{TORCH}/distributed/distributed_c10d.py", line 3252, in {call}',
        "    work.wait()",
    ]
    lines = [
        "Traceback (most recent call last):",
        f'  File "/home/u/job/train.py", line {line}, in {name}',
        "    work()",
        *(below if call else []),
        error,
    ]
    return "".join(f"[rank{rank}]: {text}\n" for text in lines)


def torchrun(root: tuple[int, int], *others: tuple[int, int]) -> str:
    """torchrun's last words on (rank, exit code): the first that it saw fail, and the others."""

    def item(number: int, rank: int, code: int) -> str:
        return (
            f"[{number}]:\n  time      : 2026-03-01_12:00:0{number}\n  host      : gpu07\n"
            f"  rank      : {rank} (local_rank: {rank})\n  exitcode  : {code} (pid: 4{rank})\n"
            "  error_file: <N/A>\n  traceback : To enable traceback see: https://pytorch.org/docs\n"
        )

    failures = "".join(item(number, *one) for number, one in enumerate(others, 1))
    return (
        f"E0301 12:00:00.433000 11290 torch/distributed/elastic/multiprocessing/api.py:1002] failed "
        f"(exitcode: {root[1]}) local_rank: {root[0]} (pid: 4{root[0]}) of binary: /usr/bin/python3\n"
        "Traceback (most recent call last):\n"
        f'  File "{TORCH}/distributed/launcher/api.py", line 383, in launch_agent\n'
        "    raise ChildFailedError(\n"
        "torch.distributed.elastic.multiprocessing.errors.ChildFailedError: \n"
        f"{'=' * 60}\ntrain.py FAILED\n{'-' * 60}\nFailures:\n{failures or '  <NO_OTHER_FAILURES>'}\n"
        f"{'-' * 60}\nRoot Cause (first observed failure):\n{item(0, *root)}{'=' * 60}\n"
    )


def verdict_of(text: str, folder) -> Verdict:
    (folder / "train.log").write_text(text)
    return diagnose([Sample(logs=read_logs(folder))]).verdict


def ranks_of(verdict: Verdict) -> list[int]:
    return [culprit.rank for culprit in verdict.culprits]


def test_a_rank_that_ended_with_its_own_code_is_first_and_the_others_say_where_they_stood(tmp_path):
    text = traced(2, LOST) + traced(0, LOST) + torchrun((1, 3), (0, -15), (2, 1))
    verdict = verdict_of(text, tmp_path)
    assert (verdict.kind, ranks_of(verdict), verdict.culprits[0].host) == ("crash", [1], "gpu07")
    assert "exit code 3" in verdict.culprits[0].why
    assert any("ranks 0, 2 stood in all_reduce at step" in line for line in verdict.evidence)


@pytest.mark.parametrize(
    ("code", "word", "fix"),
    [(-11, "SIGSEGV", "PYTHONFAULTHANDLER"), (-7, "SIGBUS", "/dev/shm"), (-6, "SIGABRT", "what()")],
)
def test_a_signal_is_named_with_what_helps_against_it(code, word, fix, tmp_path):
    verdict = verdict_of(traced(0, LOST) + torchrun((1, code), (0, 1)), tmp_path)
    assert (verdict.kind, ranks_of(verdict)) == ("crash", [1])
    assert word in verdict.reason
    assert fix in verdict.fix


def test_a_rank_that_never_came_is_named_by_those_that_timed_out(tmp_path):
    text = traced(0, LATE) + traced(2, LATE) + torchrun((0, 1), (1, -15), (2, 1))
    verdict = verdict_of(text, tmp_path)
    assert (verdict.kind, ranks_of(verdict)) == ("rank-missing", [1])
    assert "all_reduce at step (/home/u/job/train.py:40)" in verdict.reason


def test_a_rank_that_had_ended_normally_is_named_by_those_that_lost_it(tmp_path):
    text = traced(0, LOST) + traced(2, LOST) + torchrun((2, 1), (0, -15))
    verdict = verdict_of(text, tmp_path)
    assert (verdict.kind, ranks_of(verdict)) == ("dead-rank", [1])
    assert "decide together" in verdict.fix


def test_ranks_that_timed_out_in_different_calls_are_at_odds(tmp_path):
    text = traced(0, LATE) + traced(1, LATE, 31, "broadcast") + traced(2, LATE)
    verdict = verdict_of(text + torchrun((0, 1), (1, 1), (2, 1)), tmp_path)
    assert (verdict.kind, ranks_of(verdict)) == ("collective-mismatch", [1])
    assert verdict.culprits[0].frame == "step (/home/u/job/train.py:31)"


def test_a_rank_alone_in_its_call_when_all_others_had_ended_is_out_of_step(tmp_path):
    verdict = verdict_of(traced(1, LOST) + torchrun((1, 1)), tmp_path)
    assert (verdict.kind, ranks_of(verdict)) == ("collective-mismatch", [1])
    assert verdict.culprits[0].frame.endswith("train.py:40)")


def test_all_ranks_that_timed_out_in_one_call_blame_the_network(tmp_path):
    verdict = verdict_of(traced(0, LATE) + traced(1, LATE) + torchrun((0, 1), (1, 1)), tmp_path)
    assert (verdict.kind, ranks_of(verdict)) == ("network-or-hardware", [])


def test_gloos_size_check_is_a_size_mismatch(tmp_path):
    text = (
        "terminate called after throwing an instance of 'gloo::EnforceNotMet'\n"
        "  what():  [enforce fail at ../third_party/gloo/gloo/transport/tcp/pair.cc:454] "
        "op.preamble.length <= op.nbytes. 8192 vs 4096\n"
    )
    verdict = verdict_of(text + traced(0, LOST) + torchrun((1, -6), (0, 1)), tmp_path)
    assert (verdict.kind, ranks_of(verdict)) == ("size-mismatch", [1])
    assert "8192 bytes came where its tensor has 4096" in verdict.reason
    assert any("rank 0 stood in all_reduce" in line for line in verdict.evidence)
    assert "pad" in verdict.fix


def test_nccls_truncated_message_is_a_size_mismatch(tmp_path):
    line = "gpu07:212:455 [1] NCCL WARN Message truncated : received 1024 bytes instead of 512\n"
    assert verdict_of(line + traced(0, LOST), tmp_path).kind == "size-mismatch"


def test_fingerprints_name_the_rank_whose_call_differs(tmp_path):
    def print_of(rank, op, shape):
        return (
            f"Rank {rank} is running collective: CollectiveFingerPrint(SequenceNumber=7, OpType={op}, "
            f"TensorShape=[{shape}], TensorDtypes=Float)"
        )

    def error(one, other):
        return f"RuntimeError: Detected mismatch between collectives on ranks. {one}, but {other}."

    sizes = error(print_of(0, "ALLREDUCE", "4"), print_of(2, "ALLREDUCE", "6"))
    third = error(print_of(1, "ALLREDUCE", "4"), print_of(2, "ALLREDUCE", "6"))
    verdict = verdict_of(traced(0, sizes) + traced(1, third), tmp_path)
    assert (verdict.kind, ranks_of(verdict)) == ("size-mismatch", [2])
    other = verdict_of(
        traced(0, sizes.replace("ALLREDUCE, TensorShape=[6]", "BROADCAST, TensorShape=[4]")), tmp_path
    )
    assert (other.kind, ranks_of(other)) == ("collective-mismatch", [0, 2])


def test_a_monitored_barrier_names_who_did_not_come(tmp_path):
    told = "RuntimeError: [Rank 0]: Rank 1 failed to pass monitoredBarrier in 4000 ms"
    other = (
        "RuntimeError: Rank 2 successfully reached monitoredBarrier, but received errors while waiting for "
        "send/recv from rank 0. Please check rank 0 logs for faulty rank."
    )
    text = traced(2, other, call="monitored_barrier") + traced(0, told, call="monitored_barrier")
    verdict = verdict_of(text, tmp_path)
    assert (verdict.kind, ranks_of(verdict)) == ("rank-missing", [1])


def test_the_error_of_a_loaders_worker_is_told_with_its_own_line(tmp_path):
    text = traced(2, "KeyError: Caught KeyError in DataLoader worker process 0.", call="")
    text += (
        "[rank2]: Original Traceback (most recent call last):\n"
        f'[rank2]:   File "{TORCH}/utils/data/_utils/worker.py", line 374, in _worker_loop\n'
        '[rank2]:   File "/home/u/job/data.py", line 24, in collate\n'
        "[rank2]: KeyError: 'label'\n"
    )
    verdict = verdict_of(text + traced(0, LOST), tmp_path)
    assert (verdict.kind, ranks_of(verdict)) == ("crash", [2])
    assert "KeyError: 'label'" in verdict.reason
    assert verdict.culprits[0].frame == "collate (/home/u/job/data.py:24)"


def test_a_kernels_assertion_gets_the_line_of_its_ranks_traceback(tmp_path):
    text = (
        "[rank1]: /pytorch/aten/src/ATen/native/cuda/Indexing.cu:1553: indexSelectLargeIndex: block: [7,0,0]"
        ", thread: [4,0,0] Assertion `srcIndex < srcSelectDimSize` failed.\n"
    )
    text += traced(1, "RuntimeError: CUDA error: device-side assert triggered", 19, "", "forward")
    verdict = verdict_of(text, tmp_path)
    assert verdict.culprits[0].frame == "forward (/home/u/job/train.py:19)"
    assert "resize_token_embeddings" in verdict.fix


def test_every_rank_that_failed_alike_is_named_and_none_was_first(tmp_path):
    error = "ModuleNotFoundError: No module named 'flash_attn'"
    text = "".join(traced(rank, error, 2, "", "<module>") for rank in (1, 0)) + torchrun((0, 1), (1, 1))
    verdict = verdict_of(text, tmp_path)
    assert (verdict.kind, ranks_of(verdict)) == ("crash", [0, 1])
    assert verdict.reason.startswith("every rank failed alike")
    assert "install it" in verdict.fix


TO_TORCHRUN = """\
W0301 12:00:00.1 1 torch/distributed/elastic/agent/server/api.py:739] Received 15 death signal, shutting down
Traceback (most recent call last):
  File "/usr/bin/torchrun", line 6, in <module>
torch.distributed.elastic.multiprocessing.api.SignalException: Process 129 got signal: 15
"""
INTERRUPT = """\
Traceback (most recent call last):
  File "/home/u/job/train.py", line 3, in main
KeyboardInterrupt
"""


@pytest.mark.parametrize(
    "text",
    [
        TO_TORCHRUN,
        "slurmstepd: error: *** JOB 812 ON gpu03 CANCELLED AT 2026-03-01T04:00:12 ***\n",
        "slurmstepd: error: *** STEP 81.0 ON gpu3 CANCELLED AT 2026-03-01T04:00:12 DUE TO TIME LIMIT ***\n",
        INTERRUPT,
    ],
    ids=["signal to torchrun", "scancel", "time limit", "interrupt"],
)
def test_an_end_from_outside_is_nobodys_fault(text, tmp_path):
    verdict = verdict_of(f"step 3 loss 1.0\n{text}", tmp_path)
    assert (verdict.kind, ranks_of(verdict)) == ("stopped-from-outside", [])
    assert verdict.fix


def test_slurms_cancelling_of_a_step_is_the_cascade_of_a_failed_task(tmp_path):
    text = (
        "3: Traceback (most recent call last):\n"
        '3:   File "/home/u/job/train.py", line 9, in step\n'
        "3: ValueError: bad shard\n"
        "srun: error: gpu07: task 3: Exited with exit code 1\n"
        "slurmstepd: error: *** STEP 81.0 ON gpu06 CANCELLED AT 2026-03-01T04:00:12 ***\n"
        "srun: error: gpu06: tasks 0-2: Terminated\n"
    )
    verdict = verdict_of(text, tmp_path)
    assert (verdict.kind, ranks_of(verdict)) == ("crash", [3])
    assert "bad shard" in verdict.reason


LAUNCH = (
    "subprocess.CalledProcessError: Command '['/usr/bin/python3', '-u', 'train.py', '--local_rank=7', "
    "'--lr', '3']' died with <Signals.SIGSEGV: 11>."
)
DEEPSPEED = (
    "[2026-03-01 12:00:00,000] [ERROR] [launch.py:325:sigkill_handler] ['/usr/bin/python3', '-u', "
    "'train.py', '--local_rank=1'] exits with return code = 3"
)


@pytest.mark.parametrize(
    ("line", "kind", "rank"),
    [
        ("srun: error: gpu07: task 5: Out Of Memory", "host-out-of-memory", 5),
        ("srun: error: gpu07: task 5: Killed", "host-out-of-memory", 5),
        ("srun: error: gpu07: task 5: Segmentation fault (core dumped)", "crash", 5),
        (DEEPSPEED, "crash", 1),
        (LAUNCH, "crash", 7),
        (
            "torch.multiprocessing.spawn.ProcessExitedException: process 1 terminated with exit code 3",
            "crash",
            1,
        ),
    ],
    ids=["srun memory", "srun killed", "srun signal", "deepspeed", "launch", "mp.spawn"],
)
def test_launchers_words_on_a_process_that_left_no_error(line, kind, rank, tmp_path):
    verdict = verdict_of(f"step 3 loss 1.0\n{line}\n", tmp_path)
    assert (verdict.kind, ranks_of(verdict)) == (kind, [rank])


def test_a_traceback_that_spawn_prints_belongs_to_the_process_it_names(tmp_path):
    text = (
        "Traceback (most recent call last):\n"
        '  File "/home/u/job/main.py", line 30, in <module>\n'
        f'  File "{TORCH}/multiprocessing/spawn.py", line 340, in spawn\n'
        "torch.multiprocessing.spawn.ProcessRaisedException: \n\n"
        "-- Process 1 terminated with the following error:\n"
        "Traceback (most recent call last):\n"
        '  File "/home/u/job/main.py", line 10, in tokenize\n'
        "MemoryError: Unable to allocate 12.5 GiB for an array\n"
    )
    verdict = verdict_of(text, tmp_path)
    assert (verdict.kind, ranks_of(verdict)) == ("host-out-of-memory", [1])
    assert verdict.culprits[0].frame == "tokenize (/home/u/job/main.py:10)"
    assert "SIGKILL" not in verdict.reason


def test_a_fatal_error_is_told_with_the_line_of_the_thread_that_met_it(tmp_path):
    text = (
        "[rank1]: Fatal Python error: Segmentation fault\n[rank1]: \n"
        "[rank1]: Thread 0x00007f11 (most recent call first):\n"
        '[rank1]:   File "/usr/lib/python3.11/threading.py", line 324 in wait\n[rank1]: \n'
        "[rank1]: Current thread 0x00007f22 (most recent call first):\n"
        '[rank1]:   File "/home/u/job/ops.py", line 11 in fused_norm\n'
        '[rank1]:   File "/home/u/job/train.py", line 40 in step\n'
    )
    verdict = verdict_of(text + traced(0, LOST) + torchrun((1, -11), (0, 1)), tmp_path)
    assert (verdict.kind, ranks_of(verdict)) == ("crash", [1])
    assert verdict.culprits[0].frame == "fused_norm (/home/u/job/ops.py:11)"


def test_an_error_after_which_the_job_trained_on_is_not_the_failure(tmp_path):
    steps = "".join(f"step {number} loss 1.0\n" for number in range(40))
    caught = traced(0, "ConnectionError: upload of metrics failed", 90, "")
    verdict = verdict_of(caught + steps + traced(1, "ValueError: bad row", 12, ""), tmp_path)
    assert (verdict.kind, ranks_of(verdict)) == ("crash", [1])


def test_a_hub_that_closes_the_connection_is_the_users_own_error(tmp_path):
    error = "ConnectionResetError: [Errno 104] Connection reset by peer"
    verdict = verdict_of(traced(1, error, 7, "", "download") + traced(0, LOST), tmp_path)
    assert (verdict.kind, ranks_of(verdict)) == ("crash", [1])


def test_nobody_at_the_rendezvous_is_told_with_its_address(tmp_path):
    line = (
        "torch.distributed.DistNetworkError: The client socket has timed out after 60000ms while trying to "
        "connect to (gpu01, 29500)."
    )
    verdict = verdict_of(
        f'Traceback (most recent call last):\n  File "/usr/bin/x", line 1, in f\n{line}\n', tmp_path
    )
    assert verdict.kind == "rendezvous"
    assert "gpu01:29500" in verdict.reason


def watchdog(rank: int, seq: int, op: str, numel: int, group: str = "0(default_pg)") -> str:
    return (
        f"[rank{rank}]:[E301 10:00:00.1 ProcessGroupNCCL.cpp:632] [Rank {rank}] "
        f"[PG ID 0 PG GUID {group} Rank {rank}] Watchdog caught collective operation timeout: "
        f"WorkNCCL(SeqNum={seq}, OpType={op}, NumelIn={numel}, NumelOut={numel}, Timeout(ms)=600000) "
        "ran for 600029 milliseconds before timing out.\n"
    )


def test_two_ranks_in_different_calls_are_never_said_to_be_alike(tmp_path):
    text = watchdog(0, 1516, "ALLREDUCE", 25_427_968) + watchdog(1, 1517, "ALLREDUCE", 1)
    verdict = verdict_of(text, tmp_path)
    assert (verdict.kind, ranks_of(verdict)) == ("collective-mismatch", [0, 1])
    assert any("25,427,968 elements at sequence 1516" in line for line in verdict.evidence)
    sizes = watchdog(0, 3497, "_ALLGATHER_BASE", 1_572_864) + watchdog(1, 3497, "_ALLGATHER_BASE", 512)
    verdict = verdict_of(sizes, tmp_path)
    assert (verdict.kind, ranks_of(verdict)) == ("size-mismatch", [0, 1])
    assert "other modules" in verdict.fix


def test_one_rank_of_many_that_reports_a_timeout_is_a_witness(tmp_path):
    text = watchdog(13, 87, "ALLTOALL_BASE", 4096, "12(mesh_ep)")
    text += "".join(f"[rank{rank}]: got a dump signal\n" for rank in range(16))
    verdict = verdict_of(text, tmp_path)
    assert (verdict.kind, ranks_of(verdict)) == ("rank-missing", [])
    assert "rank 13 waited" in verdict.reason
    assert "mesh_ep" in verdict.reason
    assert any("--flight" in line for line in verdict.next)


@pytest.mark.parametrize(
    ("name", "file", "word"),
    [
        ("step", f"{TORCH}/optim/adamw.py", "8-bit optimizer"),
        ("from_pretrained", "/v/site-packages/transformers/modeling_utils.py", "meta device"),
        ("forward", "/home/u/job/train.py", "micro-batch"),
    ],
)
def test_memory_that_ran_out_gets_remedies_of_its_phase(name, file, word, tmp_path):
    text = f'[rank2]: Traceback (most recent call last):\n[rank2]:   File "{file}", line 3, in {name}\n'
    text += "[rank2]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.32 GiB.\n"
    verdict = verdict_of(text, tmp_path)
    assert (verdict.kind, ranks_of(verdict)) == ("out-of-memory", [2])
    assert word in verdict.fix


def test_torchruns_log_folder_names_no_host(tmp_path):
    folder = tmp_path / "b7ea382c-e753-4699-871a-1dfe07b6a80f_x13" / "attempt_0" / "2"
    folder.mkdir(parents=True)
    (folder / "stderr.log").write_text(traced(2, "ValueError: bad row", 12, ""))
    verdict = diagnose([Sample(logs=read_logs(tmp_path))]).verdict
    assert (ranks_of(verdict), verdict.culprits[0].host) == ([2], "")


def test_an_empty_folder_says_which_names_are_read(tmp_path):
    (tmp_path / "notes.md").write_text("nothing")
    assert any("no logs in it" in notice for notice in read_logs(tmp_path).notices)


def test_a_report_passes_no_escape_sequence_of_a_log_on(tmp_path):
    (tmp_path / "train.log").write_text(traced(0, "ValueError: \x1b[2Jbad \u202erow\x07", 12, ""))
    text = as_text(diagnose([Sample(logs=read_logs(tmp_path))]))
    assert "bad" in text
    assert not {"\x1b", "\x07", "\u202e"} & set(text)


def test_ordinary_lines_are_not_looked_at_closely(monkeypatch):
    looked = []
    monkeypatch.setattr(LogReader, "_notable", lambda self, text, *rest: looked.append(text))
    reader = LogReader()
    reader.read(b"step 3 loss 1.0\n" * 3000 + b"RuntimeError: bad\n")
    assert looked == ["RuntimeError: bad"]
    assert reader.evidence.trained == {"": 3000}


def test_a_fatal_error_without_a_current_thread_is_told_with_the_first_one(tmp_path):
    text = (
        "1: Fatal Python error: Segmentation fault\n1: \n"
        "1: Thread 0x00007f11 (most recent call first):\n"
        f'1:   File "{TORCH}/distributed/distributed_c10d.py", line 3938 in barrier\n'
        '1:   File "/home/u/job/train.py", line 11 in main\n'
    )
    verdict = verdict_of(text, tmp_path)
    assert verdict.culprits[0].frame == "main (/home/u/job/train.py:11)"
    assert "compiled extensions" in verdict.fix


def test_a_chain_of_errors_in_a_library_gets_the_users_line_from_its_last(tmp_path):
    text = (
        "[rank0]: Traceback (most recent call last):\n"
        f'[rank0]:   File "{TORCH}/serialization.py", line 866, in _save\n'
        "[rank0]: RuntimeError: [enforce fail at inline_container.cc:778] . PytorchStreamWriter failed "
        "writing file data.pkl: file write failed\n\n"
        "[rank0]: During handling of the above exception, another exception occurred:\n\n"
        "[rank0]: Traceback (most recent call last):\n"
        '[rank0]:   File "/home/u/job/train.py", line 147, in keep\n'
        f'[rank0]:   File "{TORCH}/serialization.py", line 651, in save\n'
        "[rank0]: RuntimeError: [enforce fail at inline_container.cc:603] . unexpected pos 64 vs 0\n"
    )
    verdict = verdict_of(text, tmp_path)
    assert (verdict.kind, ranks_of(verdict), verdict.culprits[0].host) == ("crash", [0], "")
    assert verdict.culprits[0].frame == "keep (/home/u/job/train.py:147)"
    assert "df -h" in verdict.fix


def test_a_checkpoint_error_is_of_the_rank_that_it_names(tmp_path):
    text = traced(
        6, "torch.distributed.checkpoint.api.CheckpointException: CheckpointException ranks:[2]", 61
    )
    text += (
        "[rank6]: Traceback (most recent call last): (RANK 2)\n"
        f'[rank6]:   File "{TORCH}/distributed/checkpoint/filesystem.py", line 9, in write\n'
        "[rank6]: OSError: [Errno 28] No space left on device: '/ckpt/__2_0.distcp'\n"
    )
    verdict = verdict_of(text, tmp_path)
    assert (verdict.kind, ranks_of(verdict)) == ("crash", [2])
    assert "df -h" in verdict.fix


def test_a_threads_lost_connection_is_the_cascade_of_a_ranks_own_error(tmp_path):
    text = (
        "Exception in thread Thread-4 (_pin_memory_loop):\nTraceback (most recent call last):\n"
        '  File "/usr/lib/python3.11/threading.py", line 1045, in _bootstrap_inner\n'
        f'  File "{TORCH}/utils/data/_utils/pin_memory.py", line 52, in _pin_memory_loop\n'
        "ConnectionResetError: [Errno 104] Connection reset by peer\n"
    )
    error = "PIL.UnidentifiedImageError: cannot identify image file '/data/991.jpg'"
    verdict = verdict_of(text + traced(1, error, 101, "") + traced(0, LOST), tmp_path)
    assert (verdict.kind, ranks_of(verdict)) == ("crash", [1])
    assert "broken" in " ".join(verdict.evidence)


def test_lines_of_several_workers_are_not_of_the_rank_in_the_files_name(tmp_path):
    (tmp_path / "other.log").write_text("x\n")
    lines = [
        "Traceback (most recent call last):",
        '  File "/home/u/job/actor.py", line 377, in update',
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 18.56 GiB. GPU 2 has a total",
    ]
    (tmp_path / "worker-0.log").write_text("".join(f"(WorkerDict pid=5306) {line}\n" for line in lines))
    verdict = diagnose([Sample(logs=read_logs(tmp_path))]).verdict
    assert (verdict.kind, ranks_of(verdict)) == ("out-of-memory", [])


def test_tracebacks_without_prefixes_that_run_into_one_another_are_of_several_ranks(tmp_path):
    lines = ["Traceback (most recent call last):", '  File "/home/u/job/clm.py", line 412, in main']
    error = "OSError: Can't load tokenizer for '/data/tok-v3'."
    mixed = "".join(f"{line}\n{line}\n" for line in [*lines, error])
    verdict = verdict_of(mixed + DEEPSPEED + "\n", tmp_path)
    assert (verdict.kind, ranks_of(verdict)) == ("crash", [])
    assert any("2 processes raised it at once" in line for line in verdict.evidence)


def test_a_failed_node_is_named_with_what_keeps_it_out(tmp_path):
    text = (
        "srun: error: Node failure on gpu05\n"
        "slurmstepd: error: *** JOB 3 ON gpu04 CANCELLED AT 2026-03-01T12:57:26 DUE TO NODE FAILURE ***\n"
    )
    verdict = verdict_of(text, tmp_path)
    assert verdict.kind == "stopped-from-outside"
    assert "gpu05" in verdict.reason
    assert "--exclude=gpu05" in verdict.fix


def test_below_torchrun_a_task_of_srun_is_a_node_and_no_rank(tmp_path):
    text = (
        "slurmstepd: error: Detected 1 oom_kill event in StepId=11.0. Some tasks have been OOM Killed.\n"
        "srun: error: gpu014: task 1: Out Of Memory\n"
    )
    verdict = verdict_of(text + TO_TORCHRUN, tmp_path)
    assert (verdict.kind, ranks_of(verdict)) == ("host-out-of-memory", [])
    assert "gpu014" in verdict.reason


def test_a_line_glued_behind_a_progress_bar_is_read(tmp_path):
    text = "step 1569 loss 1.2345 tokens/s " + traced(3, "IndexError: list index out of range", 12, "")
    verdict = verdict_of(text, tmp_path)
    assert (verdict.kind, ranks_of(verdict)) == ("crash", [3])


def test_a_workers_bus_error_is_shared_memory_though_the_rank_says_only_that_it_died(tmp_path):
    text = "ERROR: Unexpected bus error encountered in worker. Perhaps insufficient shared memory (shm)\n"
    text += traced(1, "RuntimeError: DataLoader worker (pid(s) 18821) exited unexpectedly", 131, "")
    verdict = verdict_of(text, tmp_path)
    assert ranks_of(verdict) == [1]
    assert "/dev/shm" in verdict.fix


def test_torchs_marks_before_an_error_are_left_out(tmp_path):
    line = (
        "[rank5]:[E917 03:12:40.12 ProcessGroupNCCL.cpp:2090] [PG ID 0 PG GUID 0(default_pg) Rank 5] Process "
        "group watchdog thread terminated with exception: CUDA error: uncorrectable ECC error encountered\n"
    )
    verdict = verdict_of(line, tmp_path)
    assert verdict.culprits[0].why == "it raised first: CUDA error: uncorrectable ECC error encountered"


def test_ranks_that_did_not_join_the_store_are_counted(tmp_path):
    error = (
        "torch.distributed.DistStoreError: Timed out after 9 seconds waiting for clients. 1/3 clients joined"
    )
    verdict = verdict_of(traced(0, error, 88, "init_process_group"), tmp_path)
    assert verdict.kind == "rendezvous"
    assert "2 ranks of 3 never joined" in verdict.reason
    assert any("train.py:88" in line for line in verdict.evidence)


def test_an_error_that_explains_nothing_is_still_told(tmp_path):
    verdict = verdict_of(traced(0, LOST).replace("[rank0]: ", ""), tmp_path)
    assert (verdict.kind, ranks_of(verdict)) == ("crash", [])
    assert verdict.confidence <= 0.5
    assert "Connection closed by peer" in verdict.reason


def test_what_a_stream_says_of_a_full_disk_is_known(tmp_path):
    verdict = verdict_of(traced(0, "RuntimeError: basic_ios::clear: iostream error", 9, "", "keep"), tmp_path)
    assert "df -h" in verdict.fix


@pytest.mark.parametrize(
    "prefix",
    ["trainer-5  | ", "2026-03-01T12:00:0{}.12Z stderr F ", "ERROR 03-01 12:00:0{} [core.py:70{}] "],
    ids=["compose", "container", "logger"],
)
def test_what_stands_before_every_line_of_a_traceback_is_taken_off(prefix, tmp_path):
    error = traced(0, "ValueError: bad row", 12, "").replace("[rank0]: ", "").splitlines()
    text = "".join(f"{prefix.replace('{}', str(number))}{line}\n" for number, line in enumerate(error))
    verdict = verdict_of(text + "trainer-4  | step 3\n", tmp_path)
    assert verdict.kind == "crash"
    assert "ValueError: bad row" in verdict.reason
    assert any("train.py:12" in line for line in verdict.evidence)


def test_a_progress_bar_before_a_traceback_is_no_prefix(tmp_path):
    text = " 15%|1| 3/20" + traced(0, "ValueError: bad row", 12, "").replace("[rank0]: ", "")
    assert "bad row" in verdict_of(text, tmp_path).reason


def test_a_child_of_lightning_names_its_rank(tmp_path):
    text = "[rank: 3] Child process with PID 4321 terminated with code 1. Forcefully terminating all others\n"
    error = traced(0, "KeyError: 'feat'", 61, "").replace("[rank0]: ", "")
    verdict = verdict_of(error + text, tmp_path)
    assert (verdict.kind, ranks_of(verdict)) == ("crash", [3])
    assert verdict.culprits[0].frame.endswith("train.py:61)")


def test_an_error_that_points_to_a_root_cause_above_is_its_cascade(tmp_path):
    logger = "(EngineCore_DP0 pid=2214) ERROR 03-01 12:00:01 [core.py:708] "
    lines = ["Traceback (most recent call last):", '  File "/home/u/job/engine.py", line 7, in start']
    lines.append(
        "ValueError: Free memory on device (10/79 GiB) is less than desired GPU memory utilization (0.9)"
    )
    text = "".join(f"{logger}{line}\n" for line in lines)
    text += traced(0, "RuntimeError: Engine core initialization failed. See root cause above.", 58, "")
    verdict = verdict_of(text, tmp_path)
    assert "desired GPU memory utilization" in verdict.reason
    assert "gpu_memory_utilization" in verdict.fix


def test_a_launcher_that_refuses_its_flags_gets_no_line_of_its_own(tmp_path):
    text = (
        'Traceback (most recent call last):\n  File "/opt/venv/bin/accelerate", line 6, in <module>\n'
        '  File "/opt/venv/lib/python3.11/site-packages/accelerate/commands/launch.py", line 9, in launch\n'
        "ValueError: You can only use one of `--cpu`, `--multi_gpu` at a time.\n"
    )
    verdict = verdict_of(text, tmp_path)
    assert (verdict.kind, ranks_of(verdict), verdict.fix) == ("crash", [], "")
    assert not any("bin/accelerate" in line for line in verdict.evidence)


@pytest.mark.parametrize("code", [-15, -9, None])
def test_a_run_that_somebody_stopped_has_no_failure(code: int | None, tmp_path: Path) -> None:
    run = make_run(tmp_path, state="stopped", reason="stopped on request", world_size=2)
    run.logs.mkdir(exist_ok=True)
    closed = "[rank1]: RuntimeError: [gloo/transport/tcp/pair.cc:547] Connection closed by peer\n"
    (run.logs / "rank-1.log").write_text(closed)
    if code is not None:
        (run.logs / "launcher.log").write_text(f"failed (exitcode: {code}) local_rank: 0 (pid: 77)\n")
    verdict = diagnose(sample_run(run, quick=True)).verdict
    assert (verdict.kind, verdict.culprits) == ("stopped-from-outside", ())
    assert verdict.reason == "stopped on request; no rank had failed before"
