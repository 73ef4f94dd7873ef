"""Who wrote which line, alike tracebacks, the first failing rank."""

from ftdash.monitor.logs.demux import Demultiplexer, Origin
from ftdash.monitor.logs.tracebacks import ElasticReport, TracebackCollector, first_failure, time_of


def collect(text: str, **options) -> TracebackCollector:
    demux, collector = Demultiplexer(**options), TracebackCollector()
    for line in text.splitlines():
        for origin, rest in demux.lines(line):
            collector.feed(origin, rest)
    return collector


def test_every_known_prefix_tells_its_origin():
    demux = Demultiplexer(hosts=["gpu-b", "gpu-b12"])
    cases = {
        "[rank1]: boom": (Origin(rank=1), "boom"),
        "[rank1]:[E602 10:11:12.500000 x.cpp:616] timeout": (
            Origin(rank=1),
            "[E602 10:11:12.500000 x.cpp:616] timeout",
        ),
        "[default0]:step 3": (Origin(local_rank=0), "step 3"),
        "[trainer12]: step": (Origin(local_rank=12), "step"),
        "192.168.1.51: hello": (Origin(host="192.168.1.51"), "hello"),
        "192.168.1.51: [rank3]: hello": (Origin(rank=3, host="192.168.1.51"), "hello"),
        "[1803] [rank1] text": (Origin(rank=1, pid=1803), "text"),
        "(RayWorkerWrapper pid=4009) text": (Origin(pid=4009, actor="RayWorkerWrapper"), "text"),
        "(WorkerDict pid=12, ip=10.0.0.2) text": (
            Origin(pid=12, actor="WorkerDict", host="10.0.0.2"),
            "text",
        ),
        "[1,3]<stdout>: text": (Origin(rank=3), "text"),
        "[Rank 5] text": (Origin(rank=5), "text"),
        "gpu-b12: text": (Origin(host="gpu-b12"), "text"),
    }
    for line, expected in cases.items():
        assert demux.origin(line) == expected, line


def test_lines_that_only_look_like_prefixes_stay_whole():
    demux = Demultiplexer()
    for line in (
        "[INFO] starting",
        "ValueError: x",
        "[/usr/bin/x] y",
        "[4, 178, -1]",
        "3: three",
        "[2024-05-01 12:00:00,123] [INFO] [logging.py:96:log_dist] [Rank 0] step=10",
        "{'loss': 1.0}",
    ):
        assert demux.origin(line) == (Origin(), line), line


def test_srun_labels_are_ranks_only_when_asked_for():
    assert Demultiplexer(labelled=True).origin(" 3: x"[1:]) == (Origin(rank=3), "x")


def test_glued_lines_are_taken_apart():
    demux = Demultiplexer()
    assert demux.lines("[rank0]: first[rank1]: second") == [
        (Origin(rank=0), "first"),
        (Origin(rank=1), "second"),
    ]
    pieces = demux.lines(" 3%|▎  | 3/100 [00:03<01:37, 1.0it/s]Traceback (most recent call last):")
    assert pieces[-1] == (Origin(), "Traceback (most recent call last):")


INTERLEAVED = """\
[rank0]: Traceback (most recent call last):
[rank2]: Traceback (most recent call last):
[rank0]:   File "/a/train.py", line 10, in main
[rank2]:   File "/a/train.py", line 12, in main
[rank0]:     loss.backward()
[rank2]:     x = rewards[7]
[rank0]: torch.distributed.DistBackendError: connection closed by peer 10.0.0.3:1234
[rank2]:         ~~~~~~~^^^
[rank2]: IndexError: list index out of range
[rank1]: Traceback (most recent call last):
[rank1]:   File "/a/train.py", line 10, in main
[rank1]: torch.distributed.DistBackendError: connection closed by peer 10.0.0.4:4321
a line of nobody
"""


def test_interleaved_tracebacks_are_collected_by_rank_and_alike_ones_grouped():
    collector = collect(INTERLEAVED)
    groups = list(collector.groups.values())
    assert [(group.count, group.ranks) for group in groups] == [(2, [0, 1]), (1, [2])]
    assert groups[1].first.frames[-1].line == 12


def test_the_first_failing_rank_is_not_the_one_whose_peer_died():
    first = collect(INTERLEAVED).first_failure()
    assert first is not None
    assert first.origin.rank == 2
    assert first.exception == "IndexError"


def test_time_stamps_decide_over_the_order_of_lines():
    text = """\
[rank3]: 2026-11-29 10:00:09,500 ERROR failed
[rank3]: Traceback (most recent call last):
[rank3]:   File "x.py", line 1, in f
[rank3]: ValueError: late
[rank1]: 2026-11-29 10:00:01,000 ERROR failed
[rank1]: Traceback (most recent call last):
[rank1]:   File "x.py", line 2, in f
[rank1]: KeyError: 'early'
"""
    first = collect(text).first_failure()
    assert first is not None
    assert (first.origin.rank, first.exception) == (1, "KeyError")


def test_only_consequences_still_name_the_earliest():
    text = """\
[rank0]: Traceback (most recent call last):
[rank0]:   File "x.py", line 1, in f
[rank0]: RuntimeError: Connection closed by peer
"""
    first = collect(text).first_failure()
    assert first is not None
    assert first.origin.rank == 0
    assert first.consequence
    assert first_failure([]) is None


def test_chained_exceptions_are_two_tracebacks_and_the_cause_comes_first():
    text = """\
[rank1]: Traceback (most recent call last):
[rank1]:   File "x.py", line 1, in f
[rank1]: KeyError: 'a'
[rank1]:
[rank1]: During handling of the above exception, another exception occurred:
[rank1]:
[rank1]: Traceback (most recent call last):
[rank1]:   File "x.py", line 3, in g
[rank1]: RuntimeError: wrapped
"""
    collector = collect(text)
    assert len(collector.groups) == 2
    first = collector.first_failure()
    assert first is not None
    assert first.exception == "KeyError"


def test_an_exception_without_a_message_and_with_a_dotted_name_is_read():
    collector = collect('Traceback (most recent call last):\n  File "x.py", line 1\ntorch.OutOfMemoryError\n')
    [group] = collector.groups.values()
    assert (group.first.exception, group.first.text) == ("torch.OutOfMemoryError", "")


ELASTIC = """\
============================================================
train.py FAILED
------------------------------------------------------------
Failures:
[1]:
  time      : 2026-11-29_17:41:30
  host      : gpu-b
  rank      : 1 (local_rank: 1)
  exitcode  : -6 (pid: 4243)
  error_file: <N/A>
------------------------------------------------------------
Root Cause (first observed failure):
[0]:
  time      : 2026-11-29_17:41:28
  host      : gpu-a
  rank      : 3 (local_rank: 3)
  exitcode  : 1 (pid: 4242)
  error_file: <N/A>
============================================================
"""


def test_the_root_cause_of_torchruns_report_is_read():
    report = ElasticReport()
    for line in ELASTIC.splitlines():
        report.feed(line)
    root = report.root_cause()
    assert root is not None
    assert (root.rank, root.host, root.exit_code, root.pid) == (3, "gpu-a", 1, 4242)
    assert [failure.rank for failure in report.failures] == [1, 3]


def test_glog_times_take_the_year_of_the_time_seen_last():
    newest = time_of("2026-06-02 10:00:00", 0.0)
    assert newest is not None
    assert time_of("[E602 10:11:12.500000 x.cpp:1] y", newest) is None  # not glog: the month has one digit
    assert time_of("[E0602 10:11:12.500000 x.cpp:1] y", newest) == newest + 672.5
