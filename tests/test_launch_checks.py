"""What is told before any process is started."""

from __future__ import annotations

import json
import os
import socket
import sys
from pathlib import Path

import pytest

from ftdash.engine.launch import checks
from ftdash.engine.launch.local import launch, prepare
from ftdash.engine.launch.spec import Backend, Device, LaunchError, LaunchSpec
from ftdash.engine.plan import Plan, Strategy
from ftdash.monitor.redact import redact_command


def tiny(gpus: int = 2, **more: object) -> Plan:
    fields = {
        "model": "tiny-moe",
        "gpus": gpus,
        "gpus_per_node": gpus,
        "strategy": Strategy.FSDP,
        "seq_len": 128,
    }
    return Plan(**{**fields, **more})  # type: ignore[arg-type]


def rows(path: Path, count: int) -> Path:
    row = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]}
    path.write_text("".join(json.dumps(row) + "\n" for _ in range(count)))
    return path


def test_more_ranks_than_rows_is_told(tmp_path: Path) -> None:
    data = rows(tmp_path / "d.jsonl", 3)
    with pytest.raises(LaunchError, match=r"--data .*d\.jsonl: 3 rows for 4 ranks"):
        launch(LaunchSpec(plan=tiny(4), data=str(data), device=Device.CPU, runs=tmp_path / "runs"))
    assert not list((tmp_path / "runs").glob("*")) if (tmp_path / "runs").exists() else True


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{oops\n", "line 1"),
        ('{"messages": []}\n', "line 1: no messages"),
        ('\n{"messages": [{"role": "user"}]}\n', "line 2"),
        ('{"text": "x"}\n', "line 1"),
        ("[" * 9000 + "\n", "line 1"),
        ("", "0 rows for 2 ranks"),
    ],
)
def test_a_broken_data_file_is_named_with_its_line(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "d.jsonl").write_text(text)
    with pytest.raises(LaunchError, match=words) as told:
        checks.data_rows(tmp_path / "d.jsonl", 2)
    assert "d.jsonl" in str(told.value)


def test_a_missing_data_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match=r"--data .*nowhere\.jsonl: No such file"):
        launch(
            LaunchSpec(plan=tiny(), data=str(tmp_path / "nowhere.jsonl"), device=Device.CPU, runs=tmp_path)
        )


def test_a_taken_port_is_told_and_a_free_one_is_not(tmp_path: Path) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        command = (sys.executable, "-m", "torch.distributed.run", f"--master_port={port}", "x.py")
        with pytest.raises(LaunchError, match=f"--master_port {port}: the port is taken"):
            launch(LaunchSpec(command=command, runs=tmp_path))
    checks.port_is_free(port, "--master_port")


@pytest.mark.parametrize(
    ("command", "port"),
    [
        ("torchrun --nproc_per_node 2 x.py", 29500),
        ("torchrun --standalone --nproc_per_node 2 x.py", None),
        ("torchrun --master-port 4000 x.py", 4000),
        ("torchrun --rdzv_endpoint=localhost:4001 x.py", 4001),
        ("torchrun --rdzv_endpoint=head:4001 x.py", None),
        ("accelerate launch --main_process_port=0 x.py", None),
        ("/opt/bin/accelerate launch --main_process_port 4002 x.py", 4002),
        ("python -m torch.distributed.run x.py", 29500),
        ("python train.py --port 4003", None),
    ],
)
def test_the_port_that_a_launcher_will_use_is_read_from_its_command(command: str, port: int | None) -> None:
    found = checks.rendezvous_port(command.split(), {})
    assert (found[0] if found else None) == port


def test_places_that_cannot_be_written_are_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(LaunchError, match=r"--out .*file.* is not a folder"):
        launch(LaunchSpec(plan=tiny(), out=tmp_path / "file" / "out", device=Device.CPU, runs=tmp_path / "r"))


def test_a_full_disk_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import shutil

    usage = shutil.disk_usage(tmp_path)._replace(free=1 << 20)
    monkeypatch.setattr(checks.shutil, "disk_usage", lambda path: usage)
    with pytest.raises(LaunchError, match="the disk is full, 1 MiB left"):
        launch(LaunchSpec(plan=tiny(), device=Device.CPU, runs=tmp_path))


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        (LaunchSpec(plan=tiny(model="qwen9-1t"), device=Device.CPU), "--model qwen9-1t"),
        (LaunchSpec(plan=tiny(model=None, params=1e9), device=Device.CPU), "--params"),
        (LaunchSpec(plan=tiny(), backend=Backend.LOCAL, nodes=2), "--nodes 2"),
        (LaunchSpec(command=("no-such-launcher-anywhere", "x")), "no such program"),
        (LaunchSpec(), "nothing to launch"),
        (LaunchSpec(plan=tiny(2, pp=2), device=Device.CPU), "--pp"),
    ],
)
def test_what_cannot_run_here_is_refused_in_one_line(tmp_path: Path, spec: LaunchSpec, words: str) -> None:
    from dataclasses import replace

    with pytest.raises(LaunchError, match=words) as told:
        launch(replace(spec, runs=tmp_path / "runs"))
    assert "\n" not in str(told.value)


@pytest.mark.skipif(os.path.exists("/dev/nvidia0"), reason="there is a GPU here")
def test_cuda_without_a_gpu_is_refused_and_auto_means_cpu() -> None:
    assert checks.device(Device.AUTO, 2) == "cpu"
    with pytest.raises(LaunchError, match="--device cuda: no NVIDIA GPU"):
        checks.device(Device.CUDA, 2)


def test_a_prepared_plan_has_its_configs_prediction_and_versions_on_disk(tmp_path: Path) -> None:
    prepared = prepare(LaunchSpec(plan=tiny(), steps=5, device=Device.CPU, runs=tmp_path))
    manifest = prepared.run.read_manifest()
    assert (manifest.world_size, manifest.max_steps, manifest.state) == (2, 5, "starting")
    assert manifest.plan is not None
    assert Plan.from_dict(manifest.plan) == tiny()
    assert manifest.predicted is not None
    assert manifest.predicted["memory"]["model_states"]["optimizer"] > 0
    assert manifest.versions["torch"]
    assert "fsdp_version: 2" in (prepared.run.config / "fsdp.yaml").read_text()
    assert prepared.command[:3] == (sys.executable, "-m", "accelerate.commands.launch")
    assert str(prepared.run.config / "fsdp.yaml") in prepared.command
    assert manifest.agent_pids == {}


def test_secrets_never_reach_the_run_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    secrets = ["hf_abcdefghijklmnopqrstuv", "topsecretvalue1", "w" * 40, "hunter2hunter2"]
    monkeypatch.setenv("HF_TOKEN", secrets[0])
    monkeypatch.setenv("MY_SERVICE_PASSWORD", secrets[3])
    command = (
        sys.executable,
        "t.py",
        f"--hub_token={secrets[0]}",
        "--api-key",
        secrets[1],
        f"--wandb_key={secrets[2]}",
    )
    prepared = prepare(LaunchSpec(command=(*command, f"--url=http://me:{secrets[3]}@host/"), runs=tmp_path))
    assert secrets[1] in prepared.command
    written = b"".join(path.read_bytes() for path in prepared.run.path.rglob("*") if path.is_file())
    for secret in secrets:
        assert secret.encode() not in written


@pytest.mark.parametrize(
    ("command", "shown"),
    [
        ("t.py --token abc --lr 1", "t.py --token *** --lr 1"),
        ("t.py --hub_token=abc", "t.py --hub_token=***"),
        ("env WANDB_API_KEY=abc t.py", "env WANDB_API_KEY=*** t.py"),
        (
            "t.py --max_tokens 512 --eos_token <s> --tokenizer x",
            "t.py --max_tokens 512 --eos_token <s> --tokenizer x",
        ),
        ("t.py --push hf_aaaaaaaaaaaaaaaaaaaa", "t.py --push ***"),
        ("git clone https://me:pw12@host/x", "git clone https://***@host/x"),
        ("t.py --password --verbose", "t.py --password --verbose"),
        ('t.py {"token":"abc","lr":1}', 't.py {"token":"***","lr":1}'),
    ],
)
def test_a_command_is_shown_without_its_secrets(command: str, shown: str) -> None:
    assert redact_command(command.split(" "), {}) == shown.split(" ")
