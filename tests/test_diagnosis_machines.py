"""GPUs, NCCL's RAS and the kernel's log as evidence beside stacks."""

from __future__ import annotations

import os
import socketserver
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from ftdash.monitor.diagnosis import diagnose, gpus, live, ras
from ftdash.monitor.diagnosis.kernel import kernel_lines
from ftdash.monitor.diagnosis.kinds import Kind
from ftdash.monitor.diagnosis.model import ProcessEvidence, RankEvidence, Sample
from ftdash.monitor.records import GpuSample, RankSample
from tests.support.live_runs import make_run, write
from tests.test_diagnosis_motion import ALL_REDUCE, look

HEAD = """NCCL version 2.28.3 compiled with CUDA 13.0
CUDA runtime version 13000, driver version 13000

Job summary
===========

  Nodes  Processes         GPUs  Processes     GPUs
(total)   per node  per process    (total)  (total)
      1          3            1          3        3

Communicators... (0.00s)
=============

Group     Comms     Nodes     Ranks     Ranks     Ranks    Status  Errors
    #  in group  per comm  per node  per comm  in group
    0         1         1         3         3         3   RUNNING  {state}

"""
BEHIND = HEAD.format(state="MISMATCH") + (
    "Errors\n======\n\n\nWarnings\n========\n\n#0-0 (78db921d1c117b4a) MISMATCH\n"
    "  Communicator ranks have different AllReduce operation counts\n"
    "  2 ranks have launched up to operation 64\n"
    "  Rank 2 has launched up to operation 60 -- GPU 2 managed by process 102 on node 10.0.0.7\n"
)
TWO_BEHIND = HEAD.format(state="MISMATCH") + (
    "Warnings\n========\n\n#0-0 (27a079b828ff1a75) MISMATCH\n"
    "  Communicator ranks have different collective operation counts\n"
    "  26 ranks have launched up to operation 6650\n"
    "  2 ranks have launched up to operation 6649\n"
    "  Rank 0 -- GPU 0 managed by process 100 on node 10.0.0.7\n"
    "  Rank 2 -- GPU 2 managed by process 102 on node 10.0.0.7\n"
)
DEAD = HEAD.format(state="INCOMPLETE") + (
    "Errors\n======\n\nDEAD\n  1 job process is considered dead (unreachable via the RAS network)\n"
    "  Process 102 on node 10.0.0.7 managing GPU 2\n"
)


def test_ranks_behind_and_lost_processes_are_read() -> None:
    one = ras.parse(BEHIND)
    assert [(r.rank, r.operations, r.pid, r.node) for r in one.behind] == [(2, 60, 102, "10.0.0.7")]
    assert one.most == 64
    assert [(r.rank, r.operations) for r in ras.parse(TWO_BEHIND).behind] == [(0, 6649), (2, 6649)]
    assert [(p.pid, p.node) for p in ras.parse(DEAD).lost] == [(102, "10.0.0.7")]
    assert ras.parse(HEAD.format(state="OK")) == ras.RasReport()
    assert ras.parse("\0garbage\n#0-0 (zz) MISMATCH\n  Rank x") == ras.RasReport()


@pytest.fixture
def server() -> Iterator[str]:
    """A TCP server that speaks as RAS does: one request line, one report, closed."""

    class Answer(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            if self.rfile.readline() == b"verbose status\n":
                for line in BEHIND.splitlines(keepends=True):
                    self.wfile.write(line.encode())

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Answer) as listening:
        threading.Thread(target=listening.serve_forever, daemon=True).start()
        yield f"127.0.0.1:{listening.server_address[1]}"
        listening.shutdown()


def test_the_first_address_that_answers_is_taken(server: str) -> None:
    report = ras.ask(["nonsense", "127.0.0.1:1", server])
    assert report == ras.parse(BEHIND)
    assert ras.ask(["127.0.0.1:1"]) is None


def waiting(**fields: object) -> list[Sample]:
    ranks = [[look(rank, t, ALL_REDUCE) for rank in range(3)] for t in (0.0, 5.0)]
    last = Sample(t=5.0, ranks=tuple(ranks[1]), expected=frozenset(range(3)), **fields)  # type: ignore[arg-type]
    return [Sample(t=0.0, ranks=tuple(ranks[0]), expected=frozenset(range(3))), last]


def test_a_rank_that_ras_shows_behind_is_named_where_stacks_show_nobody() -> None:
    assert diagnose(waiting()).verdict.kind is Kind.NETWORK
    verdict = diagnose(waiting(ras=ras.parse(BEHIND))).verdict
    assert verdict.kind is Kind.RANK_MISSING
    assert [culprit.rank for culprit in verdict.culprits] == [2]
    assert any("launched 60 operations, others 64" in text for text in verdict.evidence)


def test_busy_gpus_at_little_power_spin_and_an_idle_one_is_pointed_at(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    for rank in range(3):
        uuid = f"GPU-{rank}"
        busy = rank != 1
        write(
            run.node_file("here"),
            RankSample(t=1.0, rank=rank, pid=100 + rank, gpu_uuid=uuid),
            GpuSample(
                t=1.0, index=rank, uuid=uuid, util=100 if busy else 0, power_w=118.0, power_limit_w=700.0
            ),
        )
    samples = waiting()
    gpus.join(run, samples[-1].ranks)
    evidence = diagnose(samples).verdict.evidence
    assert any("rank 0,2: busy at 118 to 118 W" in text for text in evidence)
    assert any("GPU of rank 1 is idle" in text for text in evidence)


def test_gpus_at_full_power_are_said_to_do_nothing_odd(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    sample = GpuSample(t=1.0, index=0, uuid="GPU-0", util=100, power_w=640.0, power_limit_w=700.0)
    write(run.node_file("here"), RankSample(t=1.0, rank=0, pid=100, gpu_uuid="GPU-0"), sample)
    samples = waiting()
    gpus.join(run, samples[-1].ranks)
    assert samples[-1].ranks[0].gpu_power_w == 640.0
    assert gpus.words(samples[-1].ranks) == ()


def test_gpu_faults_of_the_kernel_are_read_as_far_as_they_are_recent(tmp_path: Path) -> None:
    log = tmp_path / "kmsg"
    log.write_text(
        "4,100,1000,-;NVRM: Xid (PCI:0000:1b:00): 48, an old one\n"
        "4,101,9223372036854,-;NVRM: Xid (PCI:0000:3b:00): 79, pid=1, GPU has fallen off the bus.\n"
        "6,102,9223372036854,-;Memory cgroup out of memory: Killed process 811 (python) total-vm:1kB\n"
        "6,103,9223372036854,-;usb 1-1: new device\n broken line\n"
    )
    lines = kernel_lines(10.0, str(log))
    assert len(lines) == 2
    assert "Xid 79 " in lines[0].replace(":", " ")
    assert "3b:00" in lines[0]
    assert "Killed process 811" in lines[1]
    assert kernel_lines(path=str(tmp_path / "missing")) == ()
    verdict = diagnose(waiting(kernel=lines)).verdict
    assert any("Xid 79" in text for text in verdict.evidence)
    assert not any("Killed process" in text for text in verdict.evidence), "another job's, all ranks live"
    alone = waiting(kernel=lines)
    alone[-1] = replace(alone[-1], expected=frozenset(range(4)))
    verdict = diagnose(alone).verdict
    assert verdict.kind is Kind.DEAD_RANK
    assert any("Killed process 811" in text for text in verdict.evidence)


def test_what_the_kernel_killed_before_the_job_began_is_not_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[float] = []
    monkeypatch.setattr(live, "kernel_lines", lambda since_s: asked.append(since_s) or ())
    monkeypatch.setattr(live.ras, "ask", lambda addresses: None)
    process = ProcessEvidence(pid=os.getpid(), rank=0, started=time.time() - 60)
    live.add_rest(Sample(ranks=(RankEvidence(rank=0, process=process),)))
    assert 59 < asked[0] < 120
