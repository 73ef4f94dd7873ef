"""What a job would not get, host memory or nodes, is said before it is submitted."""

from __future__ import annotations

import pytest

from ftdash.engine.plan import Plan
from ftdash.engine.slurm import preflight
from ftdash.engine.slurm.defaults import NodeShape, Site
from ftdash.engine.slurm.options import SlurmOptions
from ftdash.engine.slurm.preflight import memory_findings
from ftdash.tui.launching import SlurmFields, Wanted

GIB = 2**30
PLAN = Plan(model="tiny-qwen3", gpus=16, gpus_per_node=8)
LARGE = NodeShape(nodes=2, cpus=96, memory_mb=200 * 1024, gpus=8)
SMALL = NodeShape(nodes=2, cpus=96, memory_mb=64 * 1024, gpus=8)
PER_CPU = NodeShape(nodes=2, cpus=96, memory_mb=200 * 1024, gpus=8, default_mb_per_cpu=4096)


@pytest.mark.parametrize(
    ("options", "shape", "given"),
    [
        (SlurmOptions(memory="64G"), None, "--memory gives 64 GiB"),
        (SlurmOptions(memory="65536"), LARGE, "--memory gives 64 GiB"),
        (SlurmOptions(directives=("--mem=0.0625T",)), LARGE, "--memory gives 64 GiB"),
        (SlurmOptions(partition="p"), SMALL, "a node of p gives 64 GiB"),
        (SlurmOptions(cpus_per_task=16), PER_CPU, "the partition's default gives 64 GiB"),
    ],
)
def test_a_node_with_too_little_memory_is_named_with_both_figures(
    options: SlurmOptions, shape: NodeShape | None, given: str
) -> None:
    (finding,) = memory_findings(PLAN, 107 * GIB, options, shape)
    assert given in finding.text
    assert "8 ranks on a node need 107 GiB" in finding.text
    if shape is SMALL:
        assert not finding.change
        return
    assert finding.fix == "--memory 107G"
    mended = Wanted(PLAN).changed(finding.change)
    assert (mended.slurm.memory, mended.plan) == ("107G", PLAN)


@pytest.mark.parametrize(
    ("options", "shape"),
    [
        (SlurmOptions(memory="0"), LARGE),  # all that the node has
        (SlurmOptions(memory="110G"), LARGE),
        (SlurmOptions(), LARGE),
        (SlurmOptions(cpus_per_task=32), PER_CPU),
        (SlurmOptions(), None),
    ],
)
def test_enough_memory_or_an_unknown_limit_is_no_finding(
    options: SlurmOptions, shape: NodeShape | None
) -> None:
    assert list(memory_findings(PLAN, 107 * GIB, options, shape)) == []


def test_more_nodes_than_the_partition_has_are_warned_of_and_mended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "known_site", lambda: Site({"p": LARGE}, default="p"))
    wanted = Wanted(PLAN, backend="slurm", nodes=4, device="cpu")
    (finding,) = (found for found in preflight.job_findings(wanted.spec(None)) if found.code == "job-nodes")
    assert "4 nodes, and the default partition has 2" in finding.text
    assert wanted.changed(finding.change).nodes == 2


def test_what_a_job_asked_for_stands_in_the_pane_again_as_it_was_typed() -> None:
    typed = SlurmFields(
        partition="p",
        time="8:00:00",
        cpus_per_task="4",
        container="a b.sqsh",
        container_runtime="apptainer",
        modules="cuda/12.8 gcc",
        directives="--switches=1 '--comment=two words'",
    )
    assert SlurmFields.of(typed.options(2)).options(2) == typed.options(2)
