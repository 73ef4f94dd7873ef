"""nccl-tests is run where it is installed, and what it measured replaces the planner's assumption."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from msgspec.structs import replace

from ftdash.engine import links
from ftdash.engine.plan import Plan, Strategy
from ftdash.engine.planner import evaluate
from ftdash.tui import cli

# The layout of nccl-tests 2.13 and newer: eight columns of figures behind size, count, type, redop, root.
HEAD = """\
# nThread 1 nGpus 8 minBytes 67108864 maxBytes 1073741824 step: 2(factor) warmup iters: 5 iters: 20
#
# Using devices
"""
COLUMNS = """\
#
#                                                              out-of-place                       in-place
#       size         count      type   redop    root     time   algbw   busbw #wrong     (the same in place)
#        (B)    (elements)                               (us)  (GB/s)  (GB/s)            (us)  (GB/s)  (GB/s)
"""
TAIL = "# Out of bounds values : 0 OK\n# Avg bus bandwidth    : 300.000\n#\n"


def output(
    *,
    hosts: tuple[str, ...] = ("gpu-a",),
    ranks: int = 8,
    product: str = "NVIDIA H100 80GB HBM3",
    busbw: tuple[float, ...] = (310.0, 350.0, 360.0),
    wrong: str = "0",
) -> str:
    """What all_reduce_perf prints for `ranks` GPUs of each host, with a small message first."""
    lines = [
        f"#  Rank {rank:>2} Group  0 Pid {4000 + rank} on {hosts[rank // ranks]:>10} "
        f"device {rank % ranks:>2} [0x{rank + 16:02x}] {product}\n"
        for rank in range(ranks * len(hosts))
    ]
    rows = [(1024, 0.05), *((64 << (20 + index), rate) for index, rate in enumerate(busbw))]
    for size, rate in rows:
        figures = f"{size / max(rate, 0.01) / 1e3:10.1f} {rate * 0.571:7.2f} {rate:7.2f} {wrong:>6}"
        lines.append(f"{size:>12} {size // 4:>13}     float     sum      -1 {figures} {figures}\n")
    return HEAD + "".join(lines[: ranks * len(hosts)]) + COLUMNS + "".join(lines[ranks * len(hosts) :]) + TAIL


@pytest.fixture(autouse=True)
def forget() -> None:
    links._stored.cache_clear()


def test_the_median_of_large_messages_is_one_gpus_rate() -> None:
    rate = links.parse(output())
    assert (rate.gpu, rate.link, rate.ranks) == ("h100-sxm-80g", "nvlink", 8)
    assert rate.bytes_per_s == 350e9


def test_over_several_hosts_each_gpu_has_its_share_of_the_adapters() -> None:
    rate = links.parse(output(hosts=("a", "b"), busbw=(320.0, 320.0)))
    assert (rate.link, rate.ranks, rate.ranks_per_node) == ("network", 16, 8)
    assert rate.bytes_per_s == 40e9


def test_lines_that_mpirun_marked_are_read_as_well() -> None:
    marked = "".join(f"[1,0]<stdout>:{line}" for line in output().splitlines(keepends=True))
    assert links.parse(marked) == links.parse(output())


def test_an_older_layout_without_a_root_column_is_read() -> None:
    assert links.parse(output().replace("     -1 ", "")) == links.parse(output())


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "no row of all_reduce_perf"),
        (output(busbw=()), "no row of all_reduce_perf"),
        (output(busbw=(0.0, 0.0)), "one rank measures no link"),
        (output(wrong="37"), "37 wrong values in 1024 bytes"),
        (output(product="NVIDIA Imaginary 9"), "--gpu NAME"),
        (output().replace("Rank", "Bank"), "no list of devices"),
    ],
    ids=["empty", "small", "one-rank", "corrupt", "unknown-gpu", "no-devices"],
)
def test_an_output_that_measures_nothing_is_one_line(text: str, words: str) -> None:
    with pytest.raises(links.LinksError, match=words) as told:
        links.parse(text)
    assert "\n" not in str(told.value)


def test_a_gpu_of_no_known_product_is_named_as_in_a_plan(tmp_path: Path) -> None:
    recorded = tmp_path / "recorded"
    recorded.write_text(output(product="NVIDIA Imaginary 9"))
    assert cli.run(["calibrate", "--nccl-output", str(recorded), "--gpu", "l40s"]) == 0
    assert [rate.link for rate in links.rates_of("l40s-48g")] == ["pcie"]
    with pytest.raises(cli.UserError, match="--gpu h100: one of h100-"):
        cli.run(["calibrate", "--nccl-output", str(recorded), "--gpu", "h100"])
    with pytest.raises(cli.UserError, match="--nccl-tests or --nccl-output"):
        cli.run(["calibrate", "--gpu", "l40s"])


def test_a_measured_link_replaces_the_assumed_one_for_its_gpu_alone() -> None:
    plan = Plan(model="qwen3-8b", gpus=8, strategy=Strategy.FSDP, gpu="h100-sxm-80g")
    other = replace(plan, gpu="a100-80g")
    before, others = evaluate(plan).time, evaluate(other).time
    links.save(links.parse(output(busbw=(225.0,))))  # half of NVLink's nominal 450 GB/s
    after = evaluate(plan).time
    assert after.communication_s == pytest.approx(2 * before.communication_s, rel=0.02)
    assert evaluate(other).time == others


def stand_in(folder: Path, text: str, code: int = 0) -> str:
    """A program of that name that checks how it is started and prints what was recorded."""
    (folder / "recorded").write_text(text)
    program = folder / "all_reduce_perf"
    program.write_text(
        f"#!{sys.executable}\nimport os, pathlib, sys\n"
        "assert os.environ['NCCL_ALGO'] == 'Ring', 'not a ring'\n"
        "assert sys.argv[-2:] == ['-g', '8'], sys.argv\n"
        f"sys.stdout.write(pathlib.Path({str(folder / 'recorded')!r}).read_text())\nsys.exit({code})\n"
    )
    program.chmod(0o755)
    return str(program)


def test_the_installed_program_is_run_on_all_gpus_and_its_rate_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("ftdash.tui.commands.calibrate.gpu_count", lambda: 8)
    program = stand_in(tmp_path, output())
    assert cli.run(["calibrate", "--nccl-tests", program]) == 0
    assert "h100-sxm-80g nvlink: 350.0 GB/s" in capsys.readouterr().out
    (found,) = links.rates_of("h100-sxm-80g")
    assert (found.link, found.bytes_per_s) == ("nvlink", 350e9)


@pytest.mark.parametrize(
    ("gpus", "code", "words"),
    [(0, 0, "0 GPUs here"), (8, 3, "ended with 3"), (4, 0, "ended with 1")],
)
def test_a_program_that_cannot_measure_is_one_line(
    gpus: int, code: int, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ftdash.tui.commands.calibrate.gpu_count", lambda: gpus)
    program = stand_in(tmp_path, output(), code)
    with pytest.raises(cli.UserError, match=words):
        cli.run(["calibrate", "--nccl-tests", program])
    assert links.rates_of("h100-sxm-80g") == ()
