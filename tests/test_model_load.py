"""Models by preset, config file and bare count; what cannot be read is said in one line."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ftdash.engine.model.load import (
    ModelError,
    from_config,
    from_params,
    load_config_file,
    load_preset,
    preset_names,
    resolve,
)
from ftdash.engine.model.shape import Role
from ftdash.engine.plan import Method, Plan, Strategy
from ftdash.engine.planner import evaluate

PUBLISHED = {
    "llama-2-7b": 6_738_415_616,
    "llama-2-70b": 68_976_648_192,
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.1-405b": 405_853_388_800,
    "qwen2.5-0.5b": 494_032_768,
    "qwen3-8b": 8_190_735_360,
    "qwen3-32b": 32_762_123_264,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-235b-a22b": 235_093_634_560,
    "mistral-7b": 7_241_732_096,
    "mixtral-8x7b": 46_702_792_704,
    "gemma-2-9b": 9_241_705_984,
    "gemma-3-1b": 999_885_952,
    "phi-4": 14_659_507_200,
    "deepseek-v2-lite": 15_706_484_224,
    "deepseek-v3": 671_026_404_352,
    "gpt-oss-20b": 20_914_757_184,
    "gpt-oss-120b": 116_829_156_672,
    "pythia-6.9b": 6_857_302_016,
    "gpt-j-6b": 6_050_882_784,
    "falcon-7b": 6_921_720_704,
    "mpt-7b": 6_649_286_656,
    "olmoe-1b-7b": 6_919_161_856,
    "dbrx": 131_596_523_520,
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_presets_have_the_published_parameter_counts(name: str) -> None:
    assert load_preset(name).total_params == PUBLISHED[name]


def test_active_parameters_of_a_mixture_count_only_the_chosen_experts() -> None:
    shape = load_preset("qwen3-30b-a3b")
    assert shape.active_params == 3_353_032_704
    assert load_preset("qwen3-8b").active_params == load_preset("qwen3-8b").total_params


def test_every_preset_names_its_source_and_is_wrapped_by_a_known_block() -> None:
    for name in preset_names():
        shape = load_preset(name)
        assert shape.source, name
        assert shape.layer_class or shape.model_type in ("internlm2", "qwen", "kimi_k2"), name


@pytest.mark.parametrize(
    ("given_name", "preset"),
    [
        ("Qwen/Qwen3-8B", "qwen3-8b"),
        ("meta-llama/Llama-2-7b-hf", "llama-2-7b"),
        ("Meta-Llama-3-8B-Instruct", "llama-3-8b"),
        ("gemma-3-4b-it", "gemma-3-4b"),
        ("microsoft/phi-1_5", "phi-1.5"),
    ],
)
def test_full_hub_names_find_their_preset(given_name: str, preset: str) -> None:
    assert load_preset(given_name).name == preset


def test_an_unknown_preset_is_answered_with_close_ones() -> None:
    with pytest.raises(ModelError, match=r"--model qwen3-9b.*qwen3-8b"):
        load_preset("qwen3-9b")


@settings(deadline=None)
@given(st.integers(min_value=100_000, max_value=10**14))
def test_a_bare_count_becomes_a_plausible_model_of_exactly_that_size(count: int) -> None:
    shape = from_params(float(count)) if count < 2**53 else from_params(count)
    layer = shape.groups[0].layer
    assert shape.total_params == count
    assert layer.attention.heads % layer.attention.kv_heads == 0
    assert layer.ffn_width > 0
    assert 0 <= shape.other_params - shape.hidden <= max(0.01 * count, 4096)


def test_a_bare_8b_looks_like_an_8b() -> None:
    shape = from_params(8.03e9)
    assert (shape.layers, shape.hidden) == (32, 4096)
    assert 12_000 < shape.groups[0].layer.ffn_width < 16_000


@pytest.mark.parametrize("count", [0, -1, 7.5, 1e20, math.nan, math.inf, -math.inf])
def test_an_impossible_count_names_the_flag_and_the_range(count: float) -> None:
    with pytest.raises(ModelError, match=r"--params .* from 100000 to 1e\+14"):
        from_params(count)


LLAMA = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 100,
}


def test_a_config_file_or_its_folder_is_read(tmp_path: Path) -> None:
    folder = tmp_path / "my-model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(LLAMA))
    shape = load_config_file(folder / "config.json")
    assert shape.name == "my-model"
    assert load_config_file(folder).total_params == shape.total_params
    assert resolve(Plan(config=str(folder / "config.json"))).total_params == shape.total_params


def test_a_config_file_that_changes_is_read_again(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(LLAMA))
    before = resolve(Plan(config=str(file))).total_params
    file.write_text(json.dumps(LLAMA | {"vocab_size": 2000}))
    assert resolve(Plan(config=str(file))).total_params == before + 2 * 64 * 1900


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("{", "not JSON"),
        ("[1]", "not a JSON object"),
        ("{}", "'model_type' is missing"),
        ('{"model_type": "wavelet"}', "model_type 'wavelet' cannot be placed"),
        ('{"model_type": "mamba2"}', "model_type 'mamba2' cannot be placed"),
        (
            '{"model_type": "llama", "num_attention_heads": 32, "num_key_value_heads": 7}',
            "'num_key_value_heads' is 7: must divide the 32 heads",
        ),
    ],
)
def test_a_broken_config_file_is_one_line_naming_it(tmp_path: Path, content: str, said: str) -> None:
    file = tmp_path / "config.json"
    file.write_text(content)
    with pytest.raises(ModelError) as caught:
        load_config_file(file)
    assert str(file) in str(caught.value)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_missing_config_file_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"--config .*nowhere.json: No such file"):
        load_config_file(tmp_path / "nowhere.json")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("hidden_size", 0),
        ("hidden_size", -64),
        ("num_hidden_layers", 10**7),
        ("vocab_size", "many"),
        ("vocab_size", 10**12),
        ("intermediate_size", True),
        ("num_attention_heads", 1.5),
        ("attention_bias", "yes"),
        ("layer_types", ["full_attention"]),
    ],
)
def test_an_impossible_key_is_named_with_what_is_valid(key: str, value: object) -> None:
    with pytest.raises(ModelError, match=key):
        from_config(LLAMA | {key: value}, "x")


def test_absent_keys_take_the_defaults_of_the_class() -> None:
    shape = from_config({"model_type": "qwen2"}, "x")
    assert (shape.hidden, shape.layers, shape.vocab) == (4096, 32, 151936)


def test_old_keys_of_mpt_and_falcon_are_read() -> None:
    mpt = from_config(
        {"model_type": "mpt", "d_model": 64, "n_layers": 3, "n_heads": 4, "vocab_size": 100}, "x"
    )
    assert (mpt.hidden, mpt.layers) == (64, 3)
    old = {"model_type": "RefinedWebModel", "hidden_size": 64, "n_layer": 2, "n_head": 4, "multi_query": True}
    new = {"model_type": "falcon", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    assert from_config(old, "x").total_params == from_config(new, "x").total_params


def test_state_space_mixers_are_named_and_counted_but_not_placed() -> None:
    shape = load_preset("nemotron-3-nano-30b-a3b")
    assert shape.unplaced_params == 891_070_784
    assert "23 Mamba-2 mixers, 891,070,784 parameters, cannot be placed" in shape.unplaced
    assert shape.total_params + shape.unplaced_params == 31_577_937_344


def test_a_vision_tower_is_named_and_estimated() -> None:
    config = {
        "model_type": "gemma3",
        "text_config": LLAMA | {"model_type": "gemma3_text"},
        "vision_config": {"hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 27},
    }
    shape = from_config(config, "x")
    assert shape.total_params == from_config(LLAMA | {"model_type": "gemma3_text"}, "x").total_params
    assert shape.unplaced == ("vision tower, about 411 million parameters, cannot be placed",)
    assert shape.unplaced_params == pytest.approx(411e6, rel=0.01)


def test_latent_attention_and_shared_experts_are_placed() -> None:
    shape = load_preset("deepseek-v3")
    dense, sparse = shape.groups
    assert (dense.count, sparse.count) == (3, 58)
    assert sparse.layer.attention.is_mla
    assert sparse.layer.moe is not None
    assert sparse.layer.moe.shared_width == 2048
    assert {linear.role for linear in sparse.layer.linears} == {
        Role.ATTENTION, Role.ROUTER, Role.EXPERT, Role.SHARED_EXPERT,
    }  # fmt: skip


def test_sliding_windows_alternate_as_the_family_says() -> None:
    windows = {group.layer.attention.window: group.count for group in load_preset("gemma-3-1b").groups}
    assert windows == {512: 22, None: 4}


def test_loading_a_model_needs_no_training_library() -> None:
    code = (
        "import sys; from ftdash.engine.model.load import load_preset; load_preset('qwen3-30b-a3b');"
        "print([m for m in ('torch', 'transformers', 'numpy', 'yaml') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_blooms_old_width_is_read_and_a_byte_order_mark_ignored(tmp_path: Path) -> None:
    path = tmp_path / "bloom-7b1.json"
    config = {
        "model_type": "bloom",
        "n_embed": 4096,
        "n_layer": 30,
        "num_attention_heads": 32,
        "vocab_size": 250880,
    }
    path.write_bytes(b"\xef\xbb\xbf" + json.dumps(config).encode())
    assert load_config_file(path).total_params == 7_069_016_064


def test_a_config_nested_without_end_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text('{"a":' * 100_000)
    with pytest.raises(ModelError, match="nested too deeply"):
        load_config_file(path)


def test_a_quantised_checkpoint_is_known_as_one(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    llama = {"model_type": "llama", "hidden_size": 1024, "intermediate_size": 2048, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 2, "vocab_size": 1000}
    for method, words in (("gptq", "--quant gptq4"), ("awq", "dequantise it while loading"), ("fp8", "fp8")):
        config.write_text(json.dumps(llama | heads | {"quantization_config": {"quant_method": method}}))
        plan = Plan(config=str(config), strategy=Strategy.NONE, method=Method.LORA)
        advice = next(a for a in evaluate(plan).advice if a.code == "stored-quantised")
        assert words in advice.text
    packed = Plan(config=str(config), strategy=Strategy.NONE, method=Method.QLORA)
    assert "stored-quantised" not in {a.code for a in evaluate(packed).advice}


def test_a_vision_tower_is_counted_by_its_own_width() -> None:
    """Qwen2-VL's tower: 32 blocks of 1,280, whose outputs are as wide as the text."""
    vision = {"depth": 32, "embed_dim": 1280, "hidden_size": 3584, "num_heads": 16, "mlp_ratio": 4}
    text = {"model_type": "qwen2_vl_text", "hidden_size": 3584, "num_hidden_layers": 2}
    shape = from_config({"model_type": "qwen2_vl", "text_config": text, "vision_config": vision}, "vl")
    assert shape.unplaced_params == 32 * 12 * 1280 * 1280
