"""After the fact: the first failure is told apart from the cascade, whatever the lines look like."""

from __future__ import annotations

import json

import pytest

from ftdash.monitor.diagnosis import diagnose
from ftdash.monitor.diagnosis.logs import LogReader, kind_of, read_logs, wanted_bytes
from ftdash.monitor.diagnosis.logverdict import implied_tokens
from ftdash.monitor.diagnosis.model import LogKind, Sample


def verdict_of(folder):
    return diagnose([Sample(logs=read_logs(folder))]).verdict


def ranks_of(verdict):
    return {culprit.rank for culprit in verdict.culprits}


def trace(prefix, error, line=12, file="/home/user/train.py"):
    body = ["Traceback (most recent call last):", f'  File "{file}", line {line}, in step', "    boom(batch)"]
    return "\n".join(f"{prefix}{text}" for text in [*body, error]) + "\n"


PEER = (
    "torch.distributed.DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:2093, remote process exited or "
    "there was a network error"
)


def test_one_file_a_rank_the_exception_is_first_and_closed_connections_are_the_cascade(tmp_path):
    for rank in range(4):
        error = "ValueError: bad batch 17" if rank == 2 else PEER
        (tmp_path / f"rank-{rank}.log").write_text(f"step 5 loss 1.0\n{trace('', error)}")
    verdict = verdict_of(tmp_path)
    assert (verdict.kind, ranks_of(verdict)) == ("crash", {2})
    assert verdict.culprits[0].frame == "step (/home/user/train.py:12)"
    assert "bad batch 17" in verdict.reason
    assert any("cascade" in line for line in verdict.evidence)


@pytest.mark.parametrize(
    "prefix",
    [
        lambda rank: f"[rank{rank}]: ",
        lambda rank: f"[default{rank}]:",
        lambda rank: f"{rank}: ",
        lambda rank: f"{rank}: [rank{rank}]: ",
        lambda rank: f"10.0.0.{rank + 1}: [rank{rank}]: ",
        lambda rank: f"[{1800 + rank}] [rank{rank}]: ",
        lambda rank: f"(RayWorkerWrapper rank={rank} pid={4000 + rank}) ",
    ],
    ids=["torch", "tee", "srun", "srun and torch", "pdsh and torch", "pid and torch", "ray"],
)
def test_one_interleaved_stream_is_taken_apart_by_its_prefixes(prefix, tmp_path):
    lines = {
        rank: trace(prefix(rank), "ValueError: bad batch" if rank == 1 else PEER).splitlines()
        for rank in range(3)
    }
    order = [1, 0, 2]
    mixed = [lines[rank][number] for number in range(4) for rank in order]
    (tmp_path / "job.out").write_text("\n".join(mixed) + "\n")
    verdict = verdict_of(tmp_path)
    assert (verdict.kind, ranks_of(verdict)) == ("crash", {1})
    assert verdict.culprits[0].frame == "step (/home/user/train.py:12)"


def test_lines_glued_together_and_progress_bars_are_split(tmp_path):
    text = "  5%|5 | 1/20\r 10%|1 | 2/20\r 15%|" + trace("[rank3]: ", "KeyError: 'labels'").replace(
        "\n", "", 1
    )
    glued = text.replace("last):[rank3]", "last):[rank3]")
    (tmp_path / "train.log").write_text(glued)
    verdict = verdict_of(tmp_path)
    assert (verdict.kind, ranks_of(verdict)) == ("crash", {3})


def test_failed_logits_allocation_tells_its_tokens(tmp_path):
    error = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 49.02 GiB. GPU 0 has 79.15 GiB"
    head = "vocab_size: 151936\nmax_length=32768\n"
    (tmp_path / "rank-0.log").write_text(head + trace("", PEER))
    (tmp_path / "rank-5.log").write_text(
        head + trace("", error).replace("boom(batch)", "logits = logits.float()")
    )
    verdict = verdict_of(tmp_path)
    assert (verdict.kind, ranks_of(verdict)) == ("out-of-memory", {5})
    told = next(line for line in verdict.evidence if "tokens" in line)
    assert "86.6k tokens" in told
    assert "2.6x the configured 32,768" in told


def test_tokens_of_an_allocation_are_bytes_over_vocabulary_and_element():
    assert implied_tokens(32768 * 151936 * 4, 151936) == 32768
    assert wanted_bytes("Tried to allocate 20.00 MiB.") == 20 << 20
    assert wanted_bytes("Tried to allocate 1.50 GiB") == 3 << 29


def test_sigkill_while_loading_is_the_hosts_memory(tmp_path):
    (tmp_path / "rank-1.log").write_text("Loading checkpoint shards:  33%|3 | 2/6\n")
    (tmp_path / "launcher.log").write_text(
        "E1129 10:00:00.000 1 torch/distributed/elastic/multiprocessing/api.py:882] failed (exitcode: -9) "
        "local_rank: 1 (pid: 4711) of binary: /usr/bin/python3\n"
        "Root Cause (first observed failure):\n[0]:\n"
        "  time      : 2026-11-29_10:00:00\n  host      : node07\n"
        "  rank      : 1 (local_rank: 1)\n  exitcode  : -9 (pid: 4711)\n  error_file: <N/A>\n"
        "  traceback : Signal 9 (SIGKILL) received by PID 4711\n============\n"
    )
    verdict = verdict_of(tmp_path)
    assert (verdict.kind, ranks_of(verdict)) == ("host-out-of-memory", {1})
    assert verdict.culprits[0].host == "node07"
    assert any("loading the model" in line for line in verdict.evidence)


def test_watchdog_lines_name_the_rank_that_calls_something_else(tmp_path):
    def watchdog(rank, seq, op, numel):
        return (
            f"[rank{rank}]:[E1129 10:00:00.1 ProcessGroupNCCL.cpp:632] [Rank {rank}] Watchdog caught "
            f"collective operation timeout: WorkNCCL(SeqNum={seq}, OpType={op}, NumelIn={numel}, "
            f"NumelOut={numel}, "
            "Timeout(ms)=600000) ran for 600029 milliseconds before timing out.\n"
        )

    calls = [watchdog(rank, 54, "ALLGATHER" if rank == 2 else "ALLREDUCE", 1) for rank in range(4)]
    (tmp_path / "all.log").write_text("".join(calls))
    verdict = verdict_of(tmp_path)
    assert (verdict.kind, ranks_of(verdict)) == ("collective-mismatch", {2})
    (tmp_path / "all.log").write_text(
        "world_size=4\n" + "".join(calls[:2] + calls[3:]).replace("ALLGATHER", "ALLREDUCE")
    )
    verdict = verdict_of(tmp_path)
    assert (verdict.kind, ranks_of(verdict)) == ("rank-missing", {2})


def test_taken_port_is_recognised(tmp_path):
    error = (
        "torch.distributed.DistNetworkError: The server socket has failed to listen on any local network. "
        "port: 29500, useIpv6: false, code: -98, name: EADDRINUSE, message: address already in use"
    )
    (tmp_path / "rank-0.log").write_text(trace("", error))
    (tmp_path / "rank-1.log").write_text(
        trace("", "torch.distributed.DistStoreError: Timed out after 60 seconds")
    )
    verdict = verdict_of(tmp_path)
    assert (verdict.kind, ranks_of(verdict)) == ("address-in-use", {0})


def test_store_barrier_lines_tell_who_has_not_joined(tmp_path):
    line = (
        "Waiting in store based barrier to initialize process group for 10 seconds, rank: {rank}, key: "
        "store_based_barrier_key:1 (world_size=4, worker_count=3, timeout=0:30:00)\n"
    )
    for rank in (0, 1, 3):
        (tmp_path / f"rank{rank}.log").write_text(line.format(rank=rank))
    verdict = verdict_of(tmp_path)
    assert (verdict.kind, ranks_of(verdict)) == ("rendezvous", {2})
    assert "3 of 4" in verdict.reason


def test_elastic_error_files_are_read(tmp_path):
    stack = 'Traceback (most recent call last):\n  File "/home/user/train.py", line 40, in main\n    step()\n'
    message = {
        "message": "RuntimeError: shapes differ",
        "extraInfo": {"py_callstack": stack, "timestamp": "1764400000"},
    }
    folder = tmp_path / "attempt_0" / "1"
    folder.mkdir(parents=True)
    (folder / "error.json").write_text(json.dumps({"message": message}))
    verdict = verdict_of(tmp_path)
    assert (verdict.kind, ranks_of(verdict)) == ("crash", {1})
    assert "train.py:40" in verdict.culprits[0].frame


def test_quiet_logs_say_nothing(tmp_path):
    (tmp_path / "rank-0.log").write_text("step 1 loss 2.0\nstep 2 loss 1.9\n")
    verdict = verdict_of(tmp_path)
    assert verdict.culprits == ()
    assert verdict.kind == "no-evidence"


def test_hostile_lines_are_cut_and_survive():
    reader = LogReader()
    reader.read(
        b"\x00\xff" * 1000
        + b"\n"
        + b"x" * 10_000_000
        + b"\nTraceback (most recent call last):\n"
        + b"[" * 5000
    )
    assert reader.evidence.findings == []


@pytest.mark.parametrize(
    ("line", "kind"),
    [
        ("torch.cuda.OutOfMemoryError: CUDA out of memory.", LogKind.OOM),
        ("slurmstepd: error: Detected 1 oom_kill event in StepId=1.0", LogKind.HOST_OOM),
        ("OSError: [Errno 98] Address already in use", LogKind.ADDRESS_IN_USE),
        ("RuntimeError: Connection closed by peer [127.0.0.1]:4242", LogKind.PEER_CLOSED),
        ("step 5 loss 1.0", None),
    ],
)
def test_lines_are_recognised(line, kind):
    assert kind_of(line) == kind
