"""Routers of every kind: totals are tokens × k × layers whatever their output, or it is said why not."""

from __future__ import annotations

import importlib
import inspect
from pathlib import Path

import pytest

from ftdash.monitor import records
from ftdash.monitor.hook import Hook

torch = pytest.importorskip("torch")

EXPERTS, TOP_K, BATCH, LENGTH, LAYERS = 8, 2, 2, 10, 3

FAMILIES = (
    "afmoe",
    "aria",
    "cohere2_moe",
    "deepseek_v3",
    "deepseek_v4",
    "ernie4_5_moe",
    "exaone_moe",
    "flex_olmo",
    "glm4_moe",
    "glm4_moe_lite",
    "gpt_oss",
    "granitemoe",
    "jetmoe",
    "kimi_linear",
    "llama4",
    "minimax_m2",
    "mixtral",
    "olmoe",
    "phimoe",
    "qwen2_moe",
    "qwen3_moe",
    "qwen3_next",
)

TINY = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 16,
    "intermediate_size_mlp": 16,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_experts": EXPERTS,
    "n_routed_experts": EXPERTS,
    "num_local_experts": EXPERTS,
    "moe_num_experts": EXPERTS,
    "num_experts_per_tok": TOP_K,
    "num_experts_per_token": TOP_K,
    "moe_k": TOP_K,
    "first_k_dense_replace": 0,
    "num_dense_layers": 0,
    "moe_layer_start_index": 0,
    "interleave_moe_layer_step": 1,
    "mlp_only_layers": [],
    "n_group": 1,
    "topk_group": 1,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "n_shared_experts": 1,
    "num_shared_experts": 1,
    "max_position_embeddings": 64,
    "sliding_window": 16,
    "pad_token_id": 0,
    "use_cache": False,
}


def read(run_dir: Path) -> list[records.AnyRecord]:
    lines = (run_dir / "telemetry" / "rank-0.jsonl").read_bytes().splitlines()
    return [records.decoder.decode(line) for line in lines]


def tiny(family: str) -> torch.nn.Module:
    """The family's causal language model, every layer a mixture of experts."""
    module = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    model_class = next(
        value
        for name, value in vars(module).items()
        if inspect.isclass(value) and name.endswith("ForCausalLM") and value.__module__ == module.__name__
    )
    default = model_class.config_class()
    wanted = {key: value for key, value in TINY.items() if getattr(default, key, None) is not None}
    if hasattr(default, "qk_rope_head_dim"):
        wanted |= {"head_dim": 8, "num_key_value_heads": 4}
    for key in ("layer_types", "mlp_layer_types"):
        if kinds := getattr(default, key, None):
            wanted[key] = [kinds[-1]] * LAYERS
    return model_class(model_class.config_class(**wanted)).train()


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_of_mixtures_is_counted_whole(family: str, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    model = tiny(family)
    hook = Hook.start(tmp_path, 0, model=model, expert_every=1)
    for _ in range(2):
        model(input_ids=torch.randint(1, 60, (BATCH, LENGTH)))
        hook.step(tokens=BATCH * LENGTH)
    hook.close()
    found: dict[int, int] = {}
    for record in read(tmp_path):
        if isinstance(record, records.Experts):
            assert len(record.counts) == EXPERTS
            found[record.layer] = found.get(record.layer, 0) + sum(record.counts)
    assert found == dict.fromkeys(range(LAYERS), 2 * BATCH * LENGTH * TOP_K)


class AnyRouter(torch.nn.Module):
    """Chooses experts as told and answers in the form that is asked for."""

    num_experts, top_k = EXPERTS, TOP_K

    def __init__(self, form: str) -> None:
        super().__init__()
        self.form = form

    def forward(self, logits: torch.Tensor) -> object:
        weights, indices = logits.topk(TOP_K, dim=-1)
        order = logits.argsort().reshape(-1)  # whole numbers too, but no choice
        return {
            "indices, weights": (indices, weights),
            "weights, indices": (weights, indices),
            "logits, weights, indices": (logits, weights, indices),
            "indices of 32 bits": (weights, indices.int()),
            "logits": logits,
            "logits among others": (order, logits),
            "nothing": weights.sum(),
        }[self.form]


class AnyMoe(torch.nn.Module):
    def __init__(self, form: str) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(AnyRouter(form) for _ in range(LAYERS))

    def forward(self, logits: torch.Tensor) -> None:
        for layer in self.layers:
            layer(logits)


FORMS = (
    "indices, weights",
    "weights, indices",
    "logits, weights, indices",
    "indices of 32 bits",
    "logits",
    "logits among others",
)


@pytest.mark.parametrize("form", FORMS)
def test_the_choice_is_found_in_any_form_of_output(form: str, tmp_path: Path) -> None:
    model, logits = AnyMoe(form).train(), torch.randn(20, EXPERTS)
    wanted = torch.bincount(logits.topk(TOP_K, dim=-1).indices.reshape(-1), minlength=EXPERTS).tolist()
    hook = Hook.start(tmp_path, 0, model=model, expert_every=1)
    model(logits)
    hook.step()
    hook.close()
    found = [record.counts for record in read(tmp_path) if isinstance(record, records.Experts)]
    assert found == [wanted] * LAYERS


def test_what_cannot_be_counted_is_told_once_and_never_guessed(tmp_path: Path) -> None:
    silent, biased = AnyMoe("nothing").train(), AnyMoe("logits").train()
    for layer in biased.layers:
        layer.e_score_correction_bias = torch.zeros(EXPERTS)
    for number, model in enumerate((silent, biased)):
        hook = Hook.start(tmp_path / str(number), 0, model=model, expert_every=1)
        for _ in range(3):
            model(torch.randn(20, EXPERTS))
            hook.step()
        hook.close()
        found = read(tmp_path / str(number))
        assert not [record for record in found if isinstance(record, records.Experts)]
        told = [record for record in found if isinstance(record, records.Event)]
        assert [event.code for event in told] == ["experts-uncounted"]
        assert "AnyRouter" in told[0].text


def test_a_mixture_without_a_known_router_is_told(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 2)
    model.config = type("Config", (), {"num_experts": 16})()
    hook = Hook.start(tmp_path, 0, model=model)
    hook.step()
    hook.close()
    told = [record.text for record in read(tmp_path) if isinstance(record, records.Event)]
    assert len(told) == 1
    assert "16 experts" in told[0]


def test_an_expert_number_beyond_the_last_ends_no_training_and_counts_for_no_other(tmp_path: Path) -> None:
    model = AnyMoe("indices, weights").train()
    for layer in model.layers:
        layer.num_experts = EXPERTS // 2  # as where a router has experts that it does not speak of
    hook = Hook.start(tmp_path, 0, model=model, expert_every=1)
    logits = torch.randn(40, EXPERTS)
    model(logits)
    hook.step()
    hook.close()
    whole = torch.bincount(logits.topk(TOP_K, dim=-1).indices.reshape(-1), minlength=EXPERTS).tolist()
    found = [record.counts for record in read(tmp_path) if isinstance(record, records.Experts)]
    assert found == [whole[: EXPERTS // 2]] * LAYERS
