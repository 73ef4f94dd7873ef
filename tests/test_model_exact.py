"""Every count of the planner equals what the transformers class allocates on the meta device."""

from __future__ import annotations

import json
import random

import pytest

from ftdash import presets
from ftdash.engine.model.config import known_types
from ftdash.engine.model.families import BUILDERS
from ftdash.engine.model.load import from_config, load_preset, preset_names
from ftdash.engine.model.lora import lora_params
from ftdash.engine.plan import ExpertLora
from tests.support.model_configs import random_config, real_count, real_model

# Classes that live with their weights on the hub, not in transformers.
OUTSIDE = {"internlm", "internlm2", "qwen", "RefinedWeb", "RefinedWebModel", "kimi_k2", "minimax_text_01"}
FAMILIES = sorted(
    set(BUILDERS) & set(known_types()) - {name for name in BUILDERS if name.endswith("vl_text")}
)
QUICK = ("llama", "qwen2_moe", "qwen3_moe", "gemma3_text", "deepseek_v3", "gpt_oss", "falcon", "opt", "jamba")


def counts_of(model_type: str, samples: int) -> tuple[int, list[str]]:
    """How many random configs the real class accepted, and those whose counts differ."""
    rng = random.Random(model_type)
    accepted, wrong = 0, []
    for _ in range(samples):
        config = random_config(model_type, rng)
        try:
            real = real_count(config)
        except Exception:
            continue
        accepted += 1
        shape = from_config(config, model_type)
        if shape.total_params + shape.unplaced_params != real:
            wrong.append(f"{shape.total_params} + {shape.unplaced_params} != {real}: {json.dumps(config)}")
    return accepted, wrong


@pytest.mark.parametrize("model_type", QUICK)
def test_random_configs_count_like_transformers(model_type: str) -> None:
    accepted, wrong = counts_of(model_type, 3)
    assert accepted >= 2
    assert not wrong


@pytest.mark.slow
@pytest.mark.parametrize(
    "model_type", [name for name in FAMILIES if not name.startswith(("glm4v", "qwen3_vl"))]
)
def test_random_configs_of_every_family_count_like_transformers(model_type: str) -> None:
    accepted, wrong = counts_of(model_type, 8)
    assert accepted >= 3
    assert not wrong


def preset_config(name: str) -> dict[str, object]:
    return json.loads((presets.FOLDER / "models" / f"{name}.json").read_text())


@pytest.mark.parametrize("name", ["qwen3-30b-a3b", "llama-2-7b", "deepseek-v2-lite", "tiny-moe"])
def test_presets_count_like_transformers(name: str) -> None:
    assert load_preset(name).total_params == real_count(preset_config(name))


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [n for n in preset_names() if preset_config(n)["model_type"] not in OUTSIDE - {"kimi_k2"}]
)
def test_every_preset_counts_like_transformers(name: str) -> None:
    shape = load_preset(name)
    assert shape.total_params + shape.unplaced_params == real_count(preset_config(name))


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["tiny-qwen3", "tiny-moe", "qwen3-0.6b", "phi-4-mini", "pythia-70m", "gemma-3-270m"]
)
@pytest.mark.parametrize("dora", [False, True])
def test_lora_counts_like_peft(name: str, dora: bool) -> None:
    from peft import LoraConfig, get_peft_model

    config = preset_config(name)
    shape = load_preset(name)
    names = {linear.name for layer in lora_params(shape, 4).layers for linear in layer.adapted}
    targets = sorted(names) if shape.is_moe else "all-linear"
    model = get_peft_model(
        real_model(config), LoraConfig(r=4, target_modules=targets, use_dora=dora, task_type="CAUSAL_LM")
    )
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert lora_params(shape, 4, dora=dora).total == trained


@pytest.mark.slow
def test_a_saved_embedding_counts_like_peft() -> None:
    from peft import LoraConfig, get_peft_model

    lora = LoraConfig(
        r=8, target_modules="all-linear", modules_to_save=["embed_tokens"], task_type="CAUSAL_LM"
    )
    model = get_peft_model(real_model(preset_config("tiny-qwen3")), lora)
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert lora_params(load_preset("tiny-qwen3"), 8, modules_to_save=("embed_tokens",)).total == trained


@pytest.mark.slow
def test_expert_adapters_on_the_fused_stacks_count_like_peft() -> None:
    from peft import LoraConfig, get_peft_model

    stacks = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    lora = LoraConfig(r=2, target_modules=[], target_parameters=stacks, task_type="CAUSAL_LM")
    model = get_peft_model(real_model(preset_config("tiny-moe")), lora)
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    shape = load_preset("tiny-moe")
    fused = lora_params(shape, 2, ("attention",), ExpertLora.FULL, fused_experts=True)
    assert fused.expert == trained


@pytest.mark.slow
def test_the_defaults_table_is_that_of_the_installed_transformers() -> None:
    from tests.tools.make_model_defaults import table

    stored = json.loads((presets.FOLDER / "model_defaults.json").read_text())["types"]
    now = json.loads(json.dumps(table()))
    assert {name: now.get(name) for name in BUILDERS if name in stored} == {
        name: stored[name] for name in BUILDERS if name in stored
    }
