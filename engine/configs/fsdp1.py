"""An inherited FSDP1 accelerate file as FSDP2, with every dropped flag named and hybrid sharding kept."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from ftdash.engine.configs.types import ConfigError

# FSDP1's strategies (accelerate names and torch's numbers) as (reshard after forward, replicas).
_STRATEGIES = {
    "FULL_SHARD": (True, False),
    "SHARD_GRAD_OP": (False, False),
    "NO_SHARD": (None, False),
    "HYBRID_SHARD": (True, True),
    "HYBRID_SHARD_ZERO2": (False, True),
}
_BY_NUMBER = {
    "1": "FULL_SHARD",
    "2": "SHARD_GRAD_OP",
    "3": "NO_SHARD",
    "4": "HYBRID_SHARD",
    "5": "HYBRID_SHARD_ZERO2",
}
_DROPPED = {
    "fsdp_use_orig_params": "FSDP2 always keeps the original parameters",
    "fsdp_sync_module_states": "FSDP2 needs no such switch",
    "fsdp_backward_prefetch": "FSDP2 always prefetches like BACKWARD_PRE",
    "fsdp_backward_prefetch_policy": "FSDP2 always prefetches like BACKWARD_PRE",
    "fsdp_forward_prefetch": "accelerate has none under FSDP2",
    "fsdp_limit_all_gathers": "FSDP2 always limits them",
}


@dataclass(frozen=True, slots=True)
class ConvertedConfig:
    text: str
    changed: tuple[str, ...]
    dropped: tuple[str, ...]


def convert_fsdp1_file(path: Path) -> ConvertedConfig:
    """Raises ConfigError, naming the file, when it is no FSDP1 accelerate config."""
    try:
        config = yaml.safe_load(path.read_text())
    except OSError as error:
        raise ConfigError(f"--convert {path}: {error.strerror or error}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"--convert {path}: not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(config, dict) or not isinstance(config.get("fsdp_config"), dict):
        raise ConfigError(f"--convert {path}: no fsdp_config in it; give an accelerate YAML of FSDP1")
    try:
        return convert_fsdp1(config)
    except ConfigError as error:
        raise ConfigError(f"--convert {path}: {error}") from None


def convert_fsdp1(config: dict[str, Any]) -> ConvertedConfig:
    """`config` is the parsed accelerate file. Raises ConfigError where FSDP2 offers nothing like it."""
    old = {
        key if key.startswith("fsdp_") else f"fsdp_{key}": value
        for key, value in config["fsdp_config"].items()
    }
    if str(old.get("fsdp_version")) == "2":
        raise ConfigError("fsdp_version is 2 already")
    new: dict[str, Any] = {"fsdp_version": 2}
    changed, dropped = ["fsdp_version: 2 (it was 1, accelerate's default)"], []
    strategy = _strategy(old)
    reshard, hybrid = _STRATEGIES[strategy]
    if reshard is None:
        raise ConfigError("NO_SHARD is plain DDP: use distributed_type MULTI_GPU instead")
    new["fsdp_reshard_after_forward"] = reshard
    changed.append(f"{strategy} became fsdp_reshard_after_forward: {str(reshard).lower()}")
    for key, value in old.items():
        if key in ("fsdp_version", "fsdp_sharding_strategy", "fsdp_reshard_after_forward"):
            continue
        if key in _DROPPED:
            dropped.append(f"{key}: {value} dropped: {_DROPPED[key]}")
        else:
            new[key] = value
    if str(new.get("fsdp_state_dict_type")).upper() == "LOCAL_STATE_DICT":
        new["fsdp_state_dict_type"] = "SHARDED_STATE_DICT"
        changed.append("LOCAL_STATE_DICT became SHARDED_STATE_DICT: FSDP2 has no local one")
    result = {**config, "fsdp_config": new}
    if hybrid:
        replicas, ranks = _hybrid_mesh(config)
        result["parallelism_config"] = {
            "parallelism_config_dp_replicate_size": replicas,
            "parallelism_config_dp_shard_size": ranks,
        }
        changed.append(
            f"{strategy} became a mesh of {replicas} replicas x {ranks} shards, one replica a machine"
        )
    text = yaml.safe_dump(result, sort_keys=False)
    return ConvertedConfig(text, tuple(changed), tuple(dropped))


def _strategy(old: dict[str, Any]) -> str:
    value = old.get("fsdp_sharding_strategy", old.get("fsdp_reshard_after_forward", "FULL_SHARD"))
    if isinstance(value, bool):
        return "FULL_SHARD" if value else "SHARD_GRAD_OP"
    name = _BY_NUMBER.get(str(value), str(value).upper())
    if name not in _STRATEGIES:
        raise ConfigError(f"fsdp_sharding_strategy {value}: one of {', '.join(_STRATEGIES)}")
    return name


def _hybrid_mesh(config: dict[str, Any]) -> tuple[int, int]:
    """Replicas and shards: FSDP1 shards inside a machine and replicates across machines."""
    machines, processes = int(config.get("num_machines") or 1), int(config.get("num_processes") or 0)
    if machines < 2:
        raise ConfigError(
            "HYBRID_SHARD on one machine has no second axis: num_machines says how many replicas"
        )
    if processes < machines or processes % machines:
        raise ConfigError(f"num_processes {processes} does not divide by num_machines {machines}")
    return machines, processes // machines
