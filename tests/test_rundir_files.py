"""The run directory itself: names, owners, what may be written into it, and what is found again."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from ftdash.monitor.rundir import (
    Manifest,
    RunDir,
    RunError,
    find_run,
    list_runs,
    new_run_id,
    safe_name,
    stored_env,
    write_atomic,
)
from tests.support.live_runs import make_run


def test_only_its_owner_can_look_into_a_run(tmp_path: Path) -> None:
    run = make_run(tmp_path / "runs")
    for path in (run.path, *run.path.iterdir()):
        mode = stat.S_IMODE(path.stat().st_mode)
        assert mode & 0o077 == 0, path


@pytest.mark.parametrize(
    "name", ["../../etc/passwd", "-rf", "a b\nc", "[red]x[/]", "", "." * 9, "é" * 300, "\x1b[31m"]
)
def test_hostile_names_stay_inside_the_folder(tmp_path: Path, name: str) -> None:
    run = make_run(tmp_path, name)
    assert run.path.parent == tmp_path
    assert not run.run_id.startswith((".", "-"))
    assert len(safe_name(name)) <= 40
    assert list_runs(tmp_path)[0].run_id == run.run_id
    assert run.node_file(name).parent == run.telemetry


def test_only_allow_listed_environment_is_stored() -> None:
    environ = {
        "NCCL_DEBUG": "INFO",
        "CUDA_VISIBLE_DEVICES": "0,1",
        "MASTER_PORT": "29500",
        "HF_TOKEN": "hf_x",
        "WANDB_API_KEY": "w",
        "NCCL_SECRET_THING": "s",
        "ACCELERATE_TOKEN": "t",
        "PATH": "/bin",
        "HOME": "/root",
    }
    assert set(stored_env(environ)) == {"NCCL_DEBUG", "CUDA_VISIBLE_DEVICES", "MASTER_PORT"}


def test_runs_are_found_by_id_part_folder_and_as_the_last(tmp_path: Path) -> None:
    first = make_run(tmp_path, "alpha")
    second = RunDir.create(Manifest(run="99999999-beta-1"), tmp_path)
    assert find_run("last", tmp_path).run_id == second.run_id
    assert find_run(first.run_id, tmp_path).run_id == first.run_id
    assert find_run("alpha", tmp_path).run_id == first.run_id
    assert find_run(str(first.path)).run_id == first.run_id
    with pytest.raises(RunError, match="no run named 'gamma'"):
        find_run("gamma", tmp_path)
    make_run(tmp_path, "alpha")
    with pytest.raises(RunError, match="names 2 runs"):
        find_run("alpha", tmp_path)


def test_folders_that_are_no_runs_are_left_out(tmp_path: Path) -> None:
    (tmp_path / "notes").mkdir()
    (tmp_path / "file").write_text("x")
    run = make_run(tmp_path)
    assert [found.run_id for found in list_runs(tmp_path)] == [run.run_id]
    with pytest.raises(RunError, match="no runs in"):
        find_run("last", tmp_path / "notes")


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a folder to somebody else")
def test_a_run_of_another_user_is_refused_in_one_line(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    os.chown(run.path, 65534, 65534)
    with pytest.raises(RunError, match="belongs to another user") as refused:
        run.check_owner()
    assert str(run.path) in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_replaced_file_is_old_or_new_never_a_part(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    write_atomic(path, b"old")
    with pytest.raises(TypeError):
        write_atomic(path, "not bytes")  # type: ignore[arg-type]
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["run.json"]


def test_an_unwritable_place_is_told_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(RunError, match="cannot create run directory"):
        RunDir.create(Manifest(run=new_run_id("x")), tmp_path / "file")


def test_a_manifest_survives_its_own_format(tmp_path: Path) -> None:
    run = make_run(
        tmp_path, state="failed", reason="[/usr/bin/x] says no", first_failing_rank=3, exit_code=-9
    )
    read = run.read_manifest()
    assert (read.state, read.reason, read.first_failing_rank, read.exit_code) == (
        "failed",
        "[/usr/bin/x] says no",
        3,
        -9,
    )


def test_of_ten_thousand_runs_only_the_newest_are_looked_at(tmp_path: Path, monkeypatch) -> None:
    for number in range(10_000):
        (tmp_path / f"20260101-{number:05d}").mkdir()
    for number in (3, 9_000, 9_997, 9_999):
        (tmp_path / f"20260101-{number:05d}" / "run.json").write_text("{}")
    looked = []
    real = os.path.isfile
    monkeypatch.setattr(os.path, "isfile", lambda path: looked.append(path) or real(path))
    assert [run.run_id[-5:] for run in list_runs(tmp_path, newest=2)] == ["09997", "09999"]
    assert len(looked) == 3
    assert [run.run_id[-5:] for run in list_runs(tmp_path)] == ["00003", "09000", "09997", "09999"]


@pytest.mark.parametrize("data", [b'{"a":' * 100_000, b"[" * 100_000, b"", b"5", b"\xff\xfe"])
def test_a_manifest_that_is_none_is_told_by_its_file(tmp_path: Path, data: bytes) -> None:
    run = make_run(tmp_path)
    run.manifest_path.write_bytes(data)
    with pytest.raises(RunError, match=r"run\.json is broken: "):
        run.read_manifest()
