"""Scripts that know nothing of ftdash report steps, loss and tokens when it launches them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from ftdash.engine.launch.local import launch
from ftdash.engine.launch.spec import LaunchSpec
from ftdash.monitor import records
from ftdash.monitor.inject import own
from ftdash.monitor.inject.roots import Roots
from ftdash.monitor.rundir import RunDir
from tests.support.train import free_port
from tests.support.zoo import eventually

SCRIPTS = Path(__file__).parent / "own_scripts"


def bare(
    folder: Path, code: str, *, search: Sequence[Path] = (), **variables: str
) -> subprocess.CompletedProcess:
    """Run code in the interpreter below this environment, which has none of its packages, armed."""
    path = own.python_path(os.pathsep.join(map(str, search)))
    interpreter = Path(sys.base_prefix, "bin", f"python{sys.version_info.major}.{sys.version_info.minor}")
    env = {"PATH": os.environ["PATH"], "PYTHONPATH": path, **variables}
    return subprocess.run(
        [interpreter, "-c", code],
        env=env,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_the_sitecustomize_that_was_there_is_read_all_the_same(tmp_path):
    (tmp_path / "sitecustomize.py").write_text("import builtins; builtins.seen = 'theirs'")
    done = bare(tmp_path, "print(seen)", search=[tmp_path], FTDASH_RUN_DIR=str(tmp_path))
    assert (done.stdout, done.stderr) == ("theirs\n", "")


def test_an_error_in_the_sitecustomize_that_was_there_is_told_by_python_as_ever(tmp_path):
    (tmp_path / "sitecustomize.py").write_text("import not_installed_anywhere")
    done = bare(tmp_path, "print('runs')", search=[tmp_path], FTDASH_RUN_DIR=str(tmp_path))
    assert done.stdout == "runs\n"
    assert "not_installed_anywhere" in done.stderr


def test_an_environment_without_ftdash_finds_the_hook_where_it_lies(tmp_path):
    code = "import sys; from ftdash.monitor.hook.core import Hook; print(sys.meta_path[0].__class__.__name__)"
    done = bare(tmp_path, code, FTDASH_RUN_DIR=str(tmp_path))
    assert (done.stdout, done.stderr) == ("AfterImport\n", "")


def test_nothing_is_armed_outside_a_run(tmp_path):
    done = bare(tmp_path, "import sys; print('ftdash' in sys.modules)")
    assert (done.stdout, done.stderr) == ("False\n", "")


def run_to_end(*command: str) -> RunDir:
    run = launch(LaunchSpec(command=command))
    ended = eventually(run.read_manifest, lambda manifest: bool(manifest.ended), within_s=200)
    assert ended.exit_code == 0, run.launcher_log.read_text()[-3000:]
    return run


def told(run: RunDir, rank: int) -> tuple[records.Meta, list[records.Step]]:
    lines = (run.telemetry / f"rank-{rank}.jsonl").read_bytes().splitlines()
    found = [records.decoder.decode(line) for line in lines]
    assert not [record for record in found if isinstance(record, records.Event)]
    (meta,) = [record for record in found if isinstance(record, records.Meta)]
    return meta, [record for record in found if isinstance(record, records.Step)]


def torchrun(*words: str) -> list[str]:
    return [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", *words]


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_plain_loop_reports_every_optimizer_step():
    run = run_to_end(*torchrun(str(free_port()), str(SCRIPTS / "plain_loop.py")))
    for rank in (0, 1):
        meta, steps = told(run, rank)
        assert (meta.wrapped_class, meta.world_size, meta.rank) == ("DistributedDataParallel", 2, rank)
        assert [step.step for step in steps] == [1, 2, 3, 4, 5]
        assert all(4 < step.loss < 6 and step.lr == 1e-3 for step in steps)
        assert all(step.tokens == 2 * 2 * 10 for step in steps[1:])  # the model is found after the first
        assert all(step.forward_s > 0 and step.backward_s > 0 and step.optimizer_s > 0 for step in steps[1:])
    assert sorted(path.name for path in run.telemetry.glob("rank-*.jsonl")) == [
        "rank-0.jsonl",
        "rank-1.jsonl",
    ]


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_script_on_the_trainer_gets_the_callback(tmp_path):
    run = run_to_end(*torchrun(str(free_port()), str(SCRIPTS / "trainer.py"), str(tmp_path / "out")))
    for rank in (0, 1):
        meta, steps = told(run, rank)
        assert (meta.distributed_type, meta.max_steps, meta.micro_batch) == ("MULTI_CPU", 6, 2)
        assert [step.step for step in steps] == [1, 2, 3, 4, 5, 6]
        assert all(step.tokens == 2 * 16 for step in steps)
        assert [step.loss is not None for step in steps] == [step.step % 2 == 0 for step in steps]


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_deepspeed_loop_reports_one_step_for_all_parts_of_its_optimizer():
    run = run_to_end(*torchrun(str(free_port()), str(SCRIPTS / "deepspeed_loop.py")))
    meta, steps = told(run, 0)
    assert meta.wrapped_class == "DeepSpeedEngine"
    assert [step.step for step in steps] == [1, 2, 3, 4, 5]
    assert all(4 < step.loss < 6 and step.tokens == 2 * 2 * 16 for step in steps[1:])


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize("script", ["criterion_loop.py", "functional_loop.py"])
def test_a_loss_beside_the_model_is_told_from_the_first_step(script):
    run = run_to_end(sys.executable, str(SCRIPTS / script))
    _, steps = told(run, 0)
    assert [step.step for step in steps] == [1, 2, 3, 4]
    assert all(3.9 < step.loss < 4.6 for step in steps)  # log(64) is 4.16
    assert all(step.tokens == 2 * 2 * 8 for step in steps[1:])


@pytest.fixture
def roots():
    """What hears backward, put around torch's own and taken away again."""
    import torch

    heard, backward, scale = Roots(), torch.autograd.backward, torch.amp.GradScaler.scale
    heard.listen(torch.autograd)
    heard.listen_to_scaler(torch.amp.grad_scaler)
    yield heard
    torch.autograd.backward, torch.amp.GradScaler.scale = backward, scale


@pytest.mark.parametrize(
    "part",
    [
        lambda loss, _: loss,
        lambda loss, _: loss / 2,
        lambda loss, _: loss * 0.5,
        lambda loss, _: loss * 65536.0,
        lambda loss, scaler: scaler.scale(loss),
    ],
    ids=["whole", "divided", "halved", "scaled", "scaler"],
)
def test_the_loss_is_the_mean_of_the_micro_batches_whatever_part_backward_got(roots, part):
    import torch

    weight = torch.ones(1, requires_grad=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for value in (3.0, 5.0):
        part((weight * value).sum(), scaler).backward()
        weight.grad = None
    assert float(roots.take()) == 4.0
    assert roots.take() is None


def test_backward_inside_backward_and_of_several_values_is_no_loss(roots):
    import torch
    from torch.utils.checkpoint import checkpoint

    weight = torch.ones(3, requires_grad=True)
    (checkpoint(torch.square, weight, use_reentrant=True).sum() + 1).backward()
    assert (roots.count, float(roots.take())) == (1, 4.0)
    torch.autograd.backward(weight * 2, torch.ones(3))
    torch.autograd.backward([weight.sum(), (weight * 2).sum()])
    with pytest.raises(RuntimeError, match="scalar"):
        (weight * 2).backward()
    assert roots.take() is None
