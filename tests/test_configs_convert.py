"""An inherited FSDP1 file becomes FSDP2 with nothing lost in silence."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from ftdash.engine.configs import ConfigError
from ftdash.engine.configs.debug_switches import SWITCHES, environment
from ftdash.engine.configs.fsdp1 import convert_fsdp1, convert_fsdp1_file

FSDP1 = {
    "distributed_type": "FSDP",
    "num_machines": 2,
    "num_processes": 16,
    "mixed_precision": "bf16",
    "fsdp_config": {
        "fsdp_sharding_strategy": "FULL_SHARD",
        "fsdp_use_orig_params": True,
        "fsdp_backward_prefetch": "BACKWARD_PRE",
        "fsdp_forward_prefetch": False,
        "fsdp_sync_module_states": True,
        "fsdp_cpu_ram_efficient_loading": True,
        "fsdp_state_dict_type": "SHARDED_STATE_DICT",
        "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "fsdp_transformer_layer_cls_to_wrap": "LlamaDecoderLayer",
    },
}


def with_strategy(value: object, **top: object) -> dict:
    return {**FSDP1, **top, "fsdp_config": {**FSDP1["fsdp_config"], "fsdp_sharding_strategy": value}}


@pytest.mark.parametrize(
    ("strategy", "reshard"), [("FULL_SHARD", True), (1, True), ("SHARD_GRAD_OP", False), ("2", False)]
)
def test_sharding_strategy_becomes_reshard_after_forward(strategy, reshard):
    section = yaml.safe_load(convert_fsdp1(with_strategy(strategy)).text)["fsdp_config"]
    assert section["fsdp_version"] == 2
    assert section["fsdp_reshard_after_forward"] is reshard
    assert "fsdp_sharding_strategy" not in section


def test_every_dropped_flag_is_named():
    converted = convert_fsdp1(FSDP1)
    named = {line.split(":")[0] for line in converted.dropped}
    kept = set(yaml.safe_load(converted.text)["fsdp_config"])
    assert named == {
        "fsdp_use_orig_params",
        "fsdp_backward_prefetch",
        "fsdp_forward_prefetch",
        "fsdp_sync_module_states",
    }
    assert set(FSDP1["fsdp_config"]) == named | (kept & set(FSDP1["fsdp_config"])) | {
        "fsdp_sharding_strategy"
    }


def test_hybrid_shard_becomes_a_mesh_where_accelerate_loses_it():
    from accelerate.commands.to_fsdp2 import convert_config_to_fsdp2

    ours = yaml.safe_load(convert_fsdp1(with_strategy("HYBRID_SHARD")).text)
    mesh = ours["parallelism_config"]
    assert mesh == {"parallelism_config_dp_replicate_size": 2, "parallelism_config_dp_shard_size": 8}
    theirs = convert_config_to_fsdp2(with_strategy("HYBRID_SHARD"))
    assert "parallelism_config" not in theirs


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (with_strategy("HYBRID_SHARD", num_machines=1), "one machine"),
        (with_strategy("NO_SHARD"), "MULTI_GPU"),
        (with_strategy("SOMETIMES"), "one of FULL_SHARD"),
        ({**FSDP1, "fsdp_config": {"fsdp_version": 2}}, "2 already"),
    ],
)
def test_what_has_no_counterpart_is_refused(config, reason):
    with pytest.raises(ConfigError, match=reason):
        convert_fsdp1(config)


def test_a_file_of_another_kind_is_one_line(tmp_path: Path):
    path = tmp_path / "x.yaml"
    path.write_text("a: [1\n")
    with pytest.raises(ConfigError, match="not YAML"):
        convert_fsdp1_file(path)
    path.write_text("a: 1\n")
    with pytest.raises(ConfigError, match="no fsdp_config"):
        convert_fsdp1_file(path)


def test_the_converted_file_makes_an_fsdp2_plugin(tmp_path, monkeypatch):
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser
    from accelerate.utils import FullyShardedDataParallelPlugin
    from accelerate.utils.launch import prepare_multi_gpu_env

    path = tmp_path / "fsdp2.yaml"
    path.write_text(convert_fsdp1(with_strategy("SHARD_GRAD_OP", num_machines=1)).text)
    args, _, _ = _validate_launch_command(
        launch_command_parser().parse_args(["--config_file", str(path), "x.py"])
    )
    for key, value in prepare_multi_gpu_env(args).items():
        if key.startswith("FSDP_"):
            monkeypatch.setenv(key, value)
    plugin = FullyShardedDataParallelPlugin()
    assert (plugin.fsdp_version, plugin.reshard_after_forward) == (2, False)


def test_every_debug_switch_has_a_price_and_a_default():
    assert all(switch.price and switch.default and switch.variables for switch in SWITCHES)
    assert "NCCL_P2P_DISABLE=1" in environment(["no-p2p", "nccl-info"])
    names = dict(line.split("=", 1) for line in environment(["flight-recorder"]))
    assert names["TORCH_FR_BUFFER_SIZE"] == names["TORCH_NCCL_TRACE_BUFFER_SIZE"]
    with pytest.raises(ConfigError, match="one of nccl-info"):
        environment(["nccl-inof"])
    with pytest.raises(ConfigError, match="TORCH_DISTRIBUTED_DEBUG"):
        environment(["torch-detail", "torch-info"])
