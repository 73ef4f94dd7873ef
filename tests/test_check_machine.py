"""What depends on the machine at hand, on checkpoints that lie on it, and on how a file is written."""

from __future__ import annotations

import json
import pickle
import resource
import socket
import zipfile
from pathlib import Path

import pytest
import yaml

from ftdash.engine.check import rules_host, rules_machine
from ftdash.engine.check.findings import Finding, Severity
from ftdash.engine.check.registry import check_files
from tests.support.check import written

PLAN = {"model": "qwen3-8b", "strategy": "fsdp", "gpus": 8}


def test_what_this_machine_lacks_is_a_note(tmp_path):
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        path = tmp_path / "a.yaml"
        path.write_text(
            yaml.safe_dump({"distributed_type": "MULTI_GPU", "main_process_port": listener.getsockname()[1]})
        )
        taken = [finding for finding in check_files([path]) if finding.code == "port-taken"]
    assert [finding.severity for finding in taken] == [Severity.NOTE]


def test_a_large_offload_is_a_note_on_a_small_host(tmp_path, monkeypatch):
    monkeypatch.setattr(rules_machine, "available_bytes", lambda: 2**34)
    (tmp_path / "d.json").write_text(
        json.dumps({"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}})
    )
    (tmp_path / "t.py").write_text("m = AutoModelForCausalLM.from_pretrained('Qwen/Qwen3-32B')\n")
    found = [f for f in check_files([tmp_path / "d.json", tmp_path / "t.py"]) if f.code == "host-memory"]
    assert [finding.severity for finding in found] == [Severity.NOTE]
    assert "488 GiB" in found[0].text


def deepspeed_checkpoint(folder: Path, ranks: range, of: int, model_ranks: int = 1) -> Path:
    tag = folder / "global_step10"
    tag.mkdir(parents=True)
    (folder / "latest").write_text("global_step10")
    for mp in range(model_ranks):
        for rank in ranks:
            (tag / f"bf16_zero_pp_rank_{rank}_mp_rank_{mp:02d}_optim_states.pt").write_bytes(b"x")
        for rank in range(of):
            (tag / f"zero_pp_rank_{rank}_mp_rank_{mp:02d}_model_states.pt").write_bytes(b"x")
    return folder


def world_findings(*paths: Path) -> list[Finding]:
    return [finding for finding in check_files(list(paths)) if finding.code == "checkpoint-world-size"]


@pytest.mark.parametrize(
    ("data", "model", "gpus", "options", "fits"),
    [
        (4, 2, 8, "", True),
        (4, 2, 16, "", False),
        (4, 2, 4, "", False),
        (2, 4, 8, "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2", True),
        (4, 2, 8, "--tensor-model-parallel-size 4", False),
        (4, 4, 16, "--tensor-model-parallel-size 2", True),
        (8, 1, 8, "--tensor-model-parallel-size 1", True),
        (4, 1, 8, "--tensor-model-parallel-size=2", False),
        (3, 6, 18, "--tensor-parallel-size 2 --pipeline-parallel-size 3", True),
    ],
)
def test_shards_are_counted_by_data_parallel_rank_and_by_model_parallel_rank(
    data, model, gpus, options, fits, tmp_path
):
    checkpoint = deepspeed_checkpoint(tmp_path / "checkpoint-10", range(data), data, model)
    launch = tmp_path / "run.sh"
    launch.write_text(f"torchrun --nproc_per_node {gpus} pretrain.py {options}\n")
    assert [finding.severity for finding in world_findings(checkpoint, launch)] == (
        [] if fits else [Severity.ERROR]
    )


def test_tensor_parallelism_in_the_deepspeed_config_divides_the_world(tmp_path):
    checkpoint = deepspeed_checkpoint(tmp_path / "checkpoint-10", range(4), 4, 2)
    config, launch = tmp_path / "d.json", tmp_path / "run.sh"
    launch.write_text("deepspeed --num_gpus 8 train.py --deepspeed d.json\n")
    base = {"zero_optimization": {"stage": 3}, "train_batch_size": "auto"}
    config.write_text(json.dumps({**base, "tensor_parallel": {"autotp_size": 2}}))
    assert not world_findings(checkpoint, config, launch)
    config.write_text(json.dumps({**base, "tensor_parallel": {"autotp_size": 4}}))
    (found,) = world_findings(checkpoint, config, launch)
    assert "mp_rank_NN" in found.text
    assert "4 to a model (d.json" in found.text


def test_shard_groups_of_mics_tell_no_world(tmp_path):
    checkpoint = deepspeed_checkpoint(tmp_path / "checkpoint-10", range(4), 4)
    config, launch = tmp_path / "d.json", tmp_path / "run.sh"
    launch.write_text("deepspeed --num_gpus 8 train.py --deepspeed d.json\n")
    config.write_text(json.dumps({"zero_optimization": {"stage": 3, "mics_shard_size": 4}}))
    assert not world_findings(checkpoint, config, launch)


def test_dcp_shards_resume_on_any_number_of_ranks(tmp_path):
    shards = tmp_path / "checkpoint-10" / "pytorch_model_fsdp_0"
    shards.mkdir(parents=True)
    names = [f"__{rank}_0.distcp" for rank in range(4)]
    for name in names:
        (shards / name).write_bytes(b"x")
    (shards / ".metadata").write_bytes(pickle.dumps({"files": names}))
    launch = tmp_path / "run.sh"
    launch.write_text("torchrun --nproc_per_node 6 train.py\n")
    assert not check_files([shards.parent, launch])


def test_shards_of_another_world_size_are_an_error_unless_universal(tmp_path):
    checkpoint = deepspeed_checkpoint(tmp_path / "checkpoint-10", range(8), 8)
    launch = tmp_path / "run.sh"
    launch.write_text("torchrun --nproc_per_node 16 train.py\n")
    codes = {finding.code for finding in check_files([checkpoint, launch])}
    assert "checkpoint-world-size" in codes
    launch.write_text("torchrun --nproc_per_node 8 train.py\n")
    assert "checkpoint-world-size" not in {finding.code for finding in check_files([checkpoint, launch])}


def test_a_half_written_checkpoint_is_named(tmp_path):
    checkpoint = deepspeed_checkpoint(tmp_path / "checkpoint-10", range(7), 8)
    (found,) = [finding for finding in check_files([checkpoint]) if finding.code == "checkpoint-incomplete"]
    assert "7" in found.text


def found_in(path: Path, data: object) -> dict[str, Finding]:
    path.write_text(json.dumps(data))
    return {finding.code: finding for finding in check_files([path])}


def test_checkpoints_are_held_against_the_free_disk(tmp_path, monkeypatch):
    usage = rules_host.shutil.disk_usage(tmp_path)
    monkeypatch.setattr(rules_host.shutil, "disk_usage", lambda path: usage._replace(free=100 * 2**30))
    found = found_in(tmp_path / "p.json", PLAN)["disk-space"]
    assert found.severity is Severity.NOTE
    # 8.19e9 parameters: 12 bytes each in a checkpoint, 4 in the final model
    assert "one checkpoint of 91.5 GiB" in found.text
    assert "need 122 GiB" in found.text
    assert "disk-space" not in found_in(tmp_path / "p.json", {**PLAN, "method": "lora"})


def test_every_checkpoint_that_is_kept_counts(tmp_path, monkeypatch):
    usage = rules_host.shutil.disk_usage(tmp_path)
    monkeypatch.setattr(rules_host.shutil, "disk_usage", lambda path: usage._replace(free=400 * 2**30))
    plan = rules_host.Plan.from_dict(PLAN)
    few = rules_host.host_findings(plan, "plan", tmp_path, steps=1000, save_steps=500)
    many = rules_host.host_findings(plan, "plan", tmp_path, steps=1000, save_steps=100)
    assert "disk-space" not in {finding.code for finding in few}
    assert any("10 checkpoints" in finding.text for finding in many)


def test_host_memory_is_held_against_what_is_free_here(tmp_path, monkeypatch):
    monkeypatch.setattr(rules_host, "available_bytes", lambda: 16 * 2**30)
    found = found_in(tmp_path / "p.json", {**PLAN, "strategy": "zero3", "offload": "all"})["host-memory"]
    assert found.severity is Severity.NOTE
    assert "16 GiB free" in found.text
    monkeypatch.setattr(rules_host, "available_bytes", lambda: 2**42)
    assert "host-memory" not in found_in(tmp_path / "p.json", PLAN)


@pytest.mark.parametrize(
    ("gpus", "limit", "told"),
    [(16, 65536, True), (16, resource.RLIM_INFINITY, False), (8, 65536, False)],
    ids=["two-nodes", "unlimited", "one-node"],
)
def test_locked_memory_matters_where_nodes_are_joined(gpus, limit, told, tmp_path, monkeypatch):
    monkeypatch.setattr(rules_host.resource, "getrlimit", lambda which: (limit, limit))
    found = found_in(tmp_path / "p.json", {**PLAN, "gpus": gpus})
    assert ("locked-memory" in found) is told
    if told:
        assert "ulimit -l is 64 KiB" in found["locked-memory"].text


def test_a_saved_plan_is_checked_as_a_plan(tmp_path):
    refused = {"plan": {**PLAN, "strategy": "zero2", "offload": "all"}, "note": "of Tuesday"}
    found = found_in(tmp_path / "saved.plan", refused)["plan-refused"]
    assert found.severity is Severity.ERROR
    assert found.fix == "--offload optimizer"


def test_a_json_key_said_twice_is_named_and_the_rest_still_checked(tmp_path):
    path = tmp_path / "ds.json"
    path.write_text(
        '{"zero_optimization": {"stage": 2, "stage": 3, "offload_parm": {}}, "train_batch_size": "auto"}'
    )
    found = {finding.code: finding for finding in check_files([path])}
    assert found["repeated-key"].severity is Severity.ERROR
    assert 'the key "stage" stands there twice, as 2 and 3' in found["repeated-key"].text
    assert "zero-unknown-key" in found


def test_a_checkpoint_to_resume_from_that_is_not_there_names_the_last_whole_one(tmp_path):
    (tmp_path / "out").mkdir()
    shards = tmp_path / "out" / "checkpoint-40"
    shards.mkdir()
    for rank in range(2):
        with zipfile.ZipFile(shards / f"pytorch_model_fsdp_rank{rank}.bin", "w") as archive:
            archive.writestr("archive/data/0", bytes(16))
    command = "torchrun --nproc_per_node 4 train.py --resume_from_checkpoint out/checkpoint-{}\n"
    (missing,) = check_files(written(tmp_path, {"r.sh": command.format(50)}))
    assert (missing.code, missing.severity) == ("resume-missing", Severity.WARNING)
    assert "checkpoint-40" in missing.fix
    (found,) = check_files(written(tmp_path, {"r.sh": command.format(40)}))
    assert (found.code, found.severity) == ("checkpoint-world-size", Severity.ERROR)
    assert "LOCAL_STATE_DICT of 2 ranks" in found.text
    assert not check_files(written(tmp_path, {"r.sh": command.format(40).replace("node 4", "node 2")}))
