"""LoRA counts, to the digit where they are published and by formula everywhere else."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ftdash.engine.model.load import ModelError, from_config, load_preset
from ftdash.engine.model.lora import expert_rank, lora_params
from ftdash.engine.plan import ExpertLora

TOY = {
    "model_type": "qwen3_moe",
    "hidden_size": 8,
    "intermediate_size": 16,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "vocab_size": 32,
}


def test_all_linear_on_qwen3_8b() -> None:
    assert lora_params(load_preset("qwen3-8b"), 16).total == 43_646_976


def test_expert_adapters_on_qwen3_30b_a3b() -> None:
    shape = load_preset("qwen3-30b-a3b")
    assert lora_params(shape, 16, expert_lora=ExpertLora.FULL).expert == 830_472_192
    assert lora_params(shape, 16, expert_lora=ExpertLora.SCALED).expert == 51_904_512
    assert lora_params(shape, 16).expert == 0


def test_expert_adapters_of_a_toy() -> None:
    assert lora_params(from_config(TOY, "toy"), 2, expert_lora=ExpertLora.FULL).expert == 576


@given(
    layers=st.integers(1, 6), experts=st.integers(2, 32), width=st.integers(1, 64), rank=st.integers(1, 64)
)
def test_expert_adapters_follow_the_formula(layers: int, experts: int, width: int, rank: int) -> None:
    config = TOY | {"num_hidden_layers": layers, "num_experts": experts, "moe_intermediate_size": width}
    shape = from_config(config, "x")
    full = lora_params(shape, rank, expert_lora=ExpertLora.FULL).expert
    scaled = lora_params(shape, rank, expert_lora=ExpertLora.SCALED).expert
    assert full == layers * experts * 3 * rank * (8 + width)
    assert scaled == layers * experts * 3 * max(1, rank // experts) * (8 + width)


def test_the_rank_of_an_expert_never_falls_below_one() -> None:
    assert expert_rank(16, 128, ExpertLora.SCALED) == 1
    assert expert_rank(16, 4, ExpertLora.SCALED) == 4
    assert expert_rank(16, 4, ExpertLora.FULL) == 16
    assert expert_rank(16, 4, ExpertLora.NONE) == 0


def test_targets_select_projections_by_group_and_by_name() -> None:
    shape = load_preset("llama-2-7b")
    attention = lora_params(shape, 8, ("attention",))
    assert attention.mlp == 0
    assert attention.total == 32 * 4 * 8 * 2 * 4096
    assert lora_params(shape, 8, ("q_proj", "v_proj")).total == attention.total // 2
    assert lora_params(shape, 8, ("attention+mlp",)).total == lora_params(shape, 8).total


def test_dora_adds_one_magnitude_per_output() -> None:
    shape = load_preset("qwen3-8b")
    outputs = sum(linear.d_out for linear in shape.groups[0].layer.linears) * shape.layers
    assert lora_params(shape, 16, dora=True).total - lora_params(shape, 16).total == outputs


def test_saved_modules_are_trained_whole_even_when_tied() -> None:
    shape = load_preset("gemma-3-270m")
    assert lora_params(shape, 8, modules_to_save=("embed_tokens",)).modules_to_save == 262_144 * 640
    assert lora_params(shape, 8, modules_to_save=("lm_head",)).modules_to_save == 262_144 * 640


@pytest.mark.parametrize(
    ("arguments", "flag"),
    [
        ({"rank": 0}, "--lora-rank"),
        ({"rank": 8, "targets": ("w_proj",)}, "--lora-targets w_proj"),
        ({"rank": 8, "modules_to_save": ("classifier",)}, "--modules-to-save classifier"),
    ],
)
def test_impossible_adapters_name_their_flag(arguments: dict, flag: str) -> None:
    with pytest.raises(ModelError, match=flag):
        lora_params(load_preset("qwen3-8b"), **arguments)
