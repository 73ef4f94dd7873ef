"""Whatever stands in an option of a job arrives at Slurm and at the step as text, and at no shell as code."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from ftdash.engine.launch.job import PORTS, _free_port
from ftdash.engine.launch.spec import Backend, LaunchError, LaunchSpec
from ftdash.engine.slurm import client, submit
from ftdash.engine.slurm.client import Node
from ftdash.engine.slurm.defaults import NodeShape, in_words, shape_of, with_defaults
from ftdash.engine.slurm.options import ContainerRuntime, SlurmOptionError, SlurmOptions
from ftdash.engine.slurm.script import batch_script, directives
from ftdash.engine.slurm.submitted import stored_options
from ftdash.monitor.rundir import Manifest, RunDir

# In the place of srun, python and apptainer: says what it was called with, one word a NUL.
SAY = '#!/bin/sh\nprintf "%s\\0" "$0" "$@" >>"$SAID"\n'

words = st.text(
    st.characters(codec="utf-8", exclude_characters="\0/", exclude_categories=("Cs",)),
    min_size=1,
    max_size=12,
)
hostile = st.one_of(
    words,
    st.sampled_from(
        ["two words", "it's", 'a"b', "$(touch evil)", "`touch evil`", "a\nb", "; touch evil", "\\"]
    ),
)


def options(**changes: object) -> SlurmOptions:
    return SlurmOptions(nodes=2, **changes)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def tools(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tools")
    for name in ("srun", "apptainer"):
        (folder / name).write_text(SAY)
        (folder / name).chmod(0o755)
    return folder


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(run=hostile, value=hostile, container=hostile, runtime=st.sampled_from(ContainerRuntime))
@example(run="new\nline", value="#SBATCH --exclusive", container="-x", runtime=ContainerRuntime.APPTAINER)
def test_hostile_values_reach_the_step_as_text(
    tools: Path,
    tmp_path_factory: pytest.TempPathFactory,
    run: str,
    value: str,
    container: str,
    runtime: ContainerRuntime,
) -> None:
    place = tmp_path_factory.mktemp("place")
    asked = options(
        account=value,
        partition=value,
        exclude=value,
        reservation=value,
        container=container,
        container_runtime=runtime,
    )
    path = Path("/shared") / run
    script = place / "job.sbatch"
    script.write_bytes(os.fsencode(batch_script(path, asked, python=sys.executable)))
    environment = {"PATH": f"{tools}:/usr/bin:/bin", "SAID": str(place / "said")}
    subprocess.run(["bash", str(script)], env=environment, cwd=place, check=True, capture_output=True)
    said = (place / "said").read_bytes().decode().split("\0")
    assert said[-2] == str(path)
    if runtime is ContainerRuntime.PYXIS:
        assert f"--container-image={container}" in said
    else:
        assert container in said
    assert sorted(os.listdir(place)) == ["job.sbatch", "said"]
    # sbatch reads its lines itself, up to the first that is no comment: none of these came from a value
    head = script.read_bytes().decode().partition("\nset -uo pipefail\n")[0].split("\n")
    assert all(line.startswith("#") for line in head)
    _, arguments = directives(asked)
    shown = [line for line in head if line.startswith("#SBATCH")]
    assert len(shown) + len(arguments) == len(asked.arguments())


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="shellcheck is not installed")
def test_scripts_of_hostile_values_are_clean(tmp_path: Path) -> None:
    values = ["two words", "it's", 'a"b', "$(touch evil)", "`id`", "a\nb", "\\", "*", "~", "ä", "-x", "#"]
    for number, value in enumerate(values):
        for runtime in ContainerRuntime:
            asked = options(
                account=value,
                container=value,
                container_runtime=runtime,
                cpus_per_task=4,
                modules=("cuda/12",),
            )
            text = batch_script(Path("/shared") / value, asked, python="/opt/py thon's/python")
            (tmp_path / f"{number}-{runtime}.sh").write_text(text)
    files = sorted(map(str, tmp_path.iterdir()))
    checked = subprocess.run(["shellcheck", *files], capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stdout


def test_a_nul_character_is_refused() -> None:
    with pytest.raises(SlurmOptionError, match="NUL"):
        options(account="a\0b")


def test_every_field_of_the_options_reaches_sbatch_or_the_step() -> None:
    plain = batch_script(Path("/r"), options(), python="/p")
    for change in (
        {"gpus_per_node": 4},
        {"cpus_per_task": 7},
        {"partition": "x"},
        {"account": "x"},
        {"qos": "x"},
        {"memory": "3G"},
        {"time": "7"},
        {"constraint": "x"},
        {"exclude": "x"},
        {"reservation": "x"},
        {"container": "x"},
        {"modules": ("x",)},
        {"directives": ("--switches=1",)},
        {"signal_lead_s": 61},
        {"requeue": False},
    ):
        assert batch_script(Path("/r"), options(**change), python="/p") != plain, change


def node(name: str, cpus: int, gres: str) -> Node:
    return Node(name, name, "idle", ("gpu",), cpus, 500_000, gres)


def test_cpus_come_with_the_gpus_of_the_weakest_node() -> None:
    nodes = [
        node("a", 96, "gpu:h100:8(S:0-1)"),
        node("b", 64, "gpu:h100:8"),
        Node("c", "c", "idle", ("cpu",), 4),
    ]
    shape = shape_of("gpu", nodes)
    assert shape == NodeShape(2, 64, 500_000, 8, "h100")
    assert in_words("gpu", shape) == "gpu · 2 nodes, each 8 h100, 64 CPUs, 500 GB"
    assert with_defaults(options(gpus_per_node=4), 4, shape).cpus_per_task == 32
    assert with_defaults(options(gpus_per_node=4, cpus_per_task=5), 4, shape).cpus_per_task == 5
    assert with_defaults(options(gpus_per_node=0), 3, shape).cpus_per_task == 3
    assert with_defaults(options(gpus_per_node=4), 4, shape_of("none", nodes)).cpus_per_task is None
    mixed = [node("a", 8, "gpu:a100:2,gpu:t4:1,nic:2"), node("b", 8, "gpu:2")]
    assert shape_of("gpu", mixed) == NodeShape(2, 8, 500_000, 2)


def test_jobs_that_begin_together_on_one_node_look_for_ports_apart() -> None:
    ports = {_free_port(f"{job}.0.0") for job in range(4100, 4200)}
    assert len(ports) == 100
    assert all(port in PORTS for port in ports)
    import socket

    with socket.socket() as taken:
        first = _free_port("77.0.0")
        taken.bind(("", first))
        taken.listen()
        assert _free_port("77.0.0") == first + 1


def test_a_run_is_submitted_again_without_the_node_that_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[str, ...]] = []

    def call(*argv: str, **_: object) -> str:
        calls.append(argv)
        return f"{len(calls)}\n"

    monkeypatch.setattr(client, "available", lambda: True)
    monkeypatch.setattr(client, "call", call)
    asked = SlurmOptions(nodes=2, partition="gpu", exclude="old", directives=("--switches=1",))
    spec = LaunchSpec(
        command=("torchrun", "--node-rank={node_rank}", "x.py"),
        backend=Backend.SLURM,
        nodes=2,
        slurm=asked,
        name="mine",
        runs=tmp_path,
    )
    first = submit.submit(spec)
    again = submit.resubmit(first, exclude=["node7", "old"])
    assert again.path != first.path
    assert stored_options(again) == replace(asked, exclude="old,node7")
    script = (again.config / "job.sbatch").read_text()
    assert "#SBATCH --exclude=old,node7\n" in script
    assert "#SBATCH --partition=gpu\n" in script
    assert submit.read_job(again).command[:2] == ["env", "-C"]
    assert submit.read_job(again).command[-1] == "x.py"
    assert [argv[0] for argv in calls] == ["sbatch", "sbatch"]
    with pytest.raises(LaunchError, match="not submitted to Slurm"):
        submit.resubmit(RunDir.create(Manifest(run="r"), tmp_path))
