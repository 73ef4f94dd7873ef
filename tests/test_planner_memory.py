"""How memory moves with each choice: the phases, the terms, the limits that public reports ran into."""

from __future__ import annotations

from pathlib import Path

import pytest

from ftdash.engine.plan import Plan
from ftdash.engine.planner import Verdict, evaluate
from ftdash.engine.planner.activations import saved_without_checkpointing
from ftdash.engine.planner.result import Memory, PhaseName, Prediction
from ftdash.engine.planner.setting import setting_of

GIB = 2**30


def plan(**fields: object) -> Prediction:
    return evaluate(Plan.from_dict(fields))


def memory(**fields: object) -> Memory:
    return plan(**fields).memory


LLAMA = {
    "model_type": "llama",
    "vocab_size": 128,
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 32,
}


@pytest.mark.parametrize(
    ("model_type", "fields", "autograd_bytes_per_h"),
    [
        ("llama", {"precision": "bf16"}, 45.16),
        ("qwen3", {"precision": "bf16"}, 52.81),
        ("llama", {"precision": "bf16", "attention": "eager"}, 144.03),
        ("llama", {"precision": "bf16", "method": "lora", "lora_rank": 4}, 41.38),
        ("qwen3", {"precision": "bf16", "method": "lora", "lora_rank": 4}, 46.53),
        ("llama", {"method": "lora", "lora_rank": 4}, 49.66),
        ("llama", {}, 55.16),
    ],
)
def test_saved_activations_are_what_autograd_keeps(
    tmp_path: Path, model_type: str, fields: dict[str, object], autograd_bytes_per_h: float
) -> None:
    """The right column was counted with saved_tensors_hooks on the transformers 5.24 classes, weight casts
    apart."""
    import json

    config = tmp_path / "config.json"
    config.write_text(json.dumps(LLAMA | {"model_type": model_type}))
    s = setting_of(Plan.from_dict({"config": str(config), "strategy": "none", "seq_len": 512, **fields}))
    adapted = None if s.lora is None else s.lora.layers[0].adapted
    counted = saved_without_checkpointing(s, s.shape.groups[0].layer, adapted) / s.shape.hidden
    assert counted == pytest.approx(autograd_bytes_per_h, rel=0.01)


def test_allocated_is_the_largest_phase_and_every_phase_the_sum_of_its_terms() -> None:
    found = memory(model="qwen3-8b", gpus=8)
    assert found.allocated >= max(phase.total for phase in found.phases)
    assert found.peak.total == max(phase.total for phase in found.phases)
    for phase in found.phases:
        assert phase.total == sum(held for _, held in phase.terms())
    assert found.device > found.reserved >= found.allocated


def test_the_root_unit_is_most_of_a_widely_sharded_model() -> None:
    found = memory(model="qwen3-8b", gpus=64, reduce_dtype="fp32")
    root = 2 * 151_936 * 4096 * (2 + 4)
    assert found.peak_phase is PhaseName.BACKWARD_END
    assert found.peak.buffers == pytest.approx(root, rel=0.02)
    assert found.allocated == pytest.approx(9.37 * GIB, rel=0.08)


def test_zero3_with_offload_needs_ten_times_its_model_states_and_hardly_less_on_more_gpus() -> None:
    fields = {
        "params": 6805e6,
        "strategy": "zero3",
        "offload": "all",
        "gpu": "v100-32g",
        "precision": "fp16-mixed",
    }
    two, four = (memory(gpus=gpus, **fields) for gpus in (2, 4))
    assert four.device > 10 * 0.49 * GIB
    assert abs(two.device / four.device - 1) < 0.1
    whole = memory(gpus=4, unsharded_init=True, **fields)
    assert 13.5 < whole.device / GIB < 22
    assert whole.peak_phase is PhaseName.LOAD


def test_loading_without_sharded_initialisation_is_the_worst_phase() -> None:
    found = memory(params=29_970e6, gpus=64, strategy="zero3", unsharded_init=True, gpu="a100-80g")
    assert found.peak_phase is PhaseName.LOAD
    assert found.peak.total / GIB == pytest.approx(55.8, abs=0.1)


def test_logits_are_tokens_times_vocabulary() -> None:
    found = memory(model="qwen3-30b-a3b", gpus=64, strategy="zero3", offload="all", seq_len=32_768)
    start = next(p for p in found.phases if p.name is PhaseName.BACKWARD_START)
    assert start.logits == 32_768 * 151_936 * 12
    assert pytest.approx(18.55, abs=0.01) == 32_768 * 151_936 * 4 / GIB


def test_logits_shrink_with_tp_and_cp_but_not_with_sharding() -> None:
    def logits(**fields: object) -> int:
        found = memory(model="llama-3.1-8b", seq_len=8192, checkpointing="none", **fields)
        return next(p for p in found.phases if p.name is PhaseName.BACKWARD_START).logits

    alone = logits(gpus=1, strategy="none")
    assert logits(gpus=8, strategy="zero3") == alone
    assert logits(gpus=8, strategy="fsdp", cp=2) == alone / 2
    assert logits(gpus=8, strategy="fsdp", tp=2) < alone


def test_no_resharding_keeps_the_gathered_model() -> None:
    fields = {"model": "qwen3-8b", "gpus": 8, "checkpointing": "none"}
    more = (
        memory(strategy="fsdp-no-reshard", **fields).allocated - memory(strategy="fsdp", **fields).allocated
    )
    assert more > 0.7 * 2 * 6.9e9


def test_kbit_upcasts_can_make_qlora_need_more_than_lora() -> None:
    fields = {
        "model": "ministral-8b",
        "gpus": 1,
        "strategy": "none",
        "seq_len": 4096,
        "checkpointing": "none",
    }
    lora, upcast = memory(method="lora", **fields), memory(method="qlora", **fields)
    plain = memory(method="qlora", precision="bf16", **fields)
    assert plain.device < upcast.device
    assert upcast.peak.activations > 1.1 * plain.peak.activations
    longer = {**fields, "seq_len": 16_384}
    assert memory(method="qlora", **longer).device > memory(method="lora", **longer).device
    assert lora.device > plain.device


def test_uint8_storage_leaves_packed_weights_whole_under_fsdp2() -> None:
    fields = {"model": "qwen3-32b", "gpus": 2, "strategy": "fsdp", "method": "qlora"}
    whole, sharded = memory(quant_storage="uint8", **fields), memory(**fields)
    assert whole.model_states.weights - sharded.model_states.weights > 7e9


def test_32b_qlora_fits_two_24_gb_cards() -> None:
    found = plan(model="qwen3-32b", gpus=2, gpu="rtx4090-24g", strategy="fsdp", method="qlora")
    assert found.verdict is not Verdict.DOES_NOT_FIT


def test_host_memory_of_a_k_bit_base_counts_a_copy_on_every_rank() -> None:
    """PEFT's guide: about 107 GB of host memory for Llama-2-70B QLoRA offloaded from two GPUs."""
    found = memory(
        model="llama-2-70b", gpus=2, gpu="a100-80g", strategy="fsdp1", method="qlora", offload="all"
    )
    assert found.host_ram_per_node / 1e9 == pytest.approx(107, rel=0.1)


def test_every_rank_that_loads_a_whole_model_needs_host_memory_for_it() -> None:
    once = memory(params=32e9, gpus=8, strategy="fsdp").host_ram_per_node
    each = memory(params=32e9, gpus=8, strategy="fsdp", unsharded_init=True).host_ram_per_node
    assert each - once == pytest.approx(7 * 64e9)
    fp32 = memory(params=40e9, gpus=8, strategy="fsdp", unsharded_init=True, precision="fp32")
    assert fp32.host_ram_per_node == pytest.approx(1280e9, rel=0.02)


def test_a_full_state_dict_stands_in_the_host_memory_of_rank_0() -> None:
    """FSDP gathers masters and both moments, ZeRO-3 16-bit weights, and of a frozen base every byte."""
    fields = {"model": "llama-3.1-70b", "gpus": 16}
    total = evaluate(Plan.from_dict(fields)).model.total_params

    def extra(**more: object) -> int:
        host = memory(**fields, **more).host
        return host.saving_full - host.training

    assert extra(strategy="fsdp") == pytest.approx(12 * total)
    assert extra(strategy="zero3") == pytest.approx(2 * total)
    assert extra(strategy="fsdp", method="lora") == pytest.approx(2 * total, rel=0.03)
    assert extra(strategy="ddp") == 0
    found = evaluate(Plan.from_dict({**fields, "strategy": "fsdp"}))
    save = found.to_json()["memory"]["phases"]["save"]
    assert save["host_ram_per_node"] == found.memory.host.saving_full
    codes = {advice.code for advice in found.advice}
    assert {"full-state-dict", "load-once"} <= codes


def test_loading_on_every_rank_is_said_beside_loading_once() -> None:
    host = memory(params=32e9, gpus=8, strategy="fsdp").host
    assert host.loading_everywhere - host.loading == pytest.approx(7 * 64e9)
    replicated = memory(params=32e9, gpus=8, strategy="ddp", method="lora").host
    assert replicated.loading == replicated.loading_everywhere


def test_modules_to_save_cost_sixteen_bytes_a_parameter() -> None:
    fields = {"model": "gemma-3-270m", "gpus": 1, "strategy": "none", "method": "lora"}
    extra = (
        memory(modules_to_save=["embed_tokens"], **fields).model_states.total
        - memory(**fields).model_states.total
    )
    assert extra == 16 * 167_772_160


def test_frozen_moe_layers_are_gathered_whole_whatever_the_sequence() -> None:
    def gathered(seq_len: int) -> int:
        found = memory(model="qwen3-30b-a3b", gpus=8, strategy="zero3", method="lora", seq_len=seq_len)
        return next(p for p in found.phases if p.name is PhaseName.BACKWARD_END).gathered

    layer = 128 * 3 * 2048 * 768 * 2
    assert gathered(512) == gathered(8192) > 2 * layer


def test_fsdp2_cannot_shard_eight_experts_over_thirty_two_ranks() -> None:
    """The fullest rank holds one whole expert of each stack, and gathers are padded four times."""
    fields = {"model": "mixtral-8x7b", "gpus": 32, "strategy": "fsdp"}
    spread, flat = memory(**fields), memory(model="mixtral-8x7b", gpus=32, strategy="fsdp1")
    experts = 32 * 8 * 3 * 4096 * 14_336
    more = spread.model_states.total - flat.model_states.total
    assert more == pytest.approx(16 * experts * (1 / 8 - 1 / 32), rel=0.001)
    assert "experts-do-not-divide" in [one.code for one in plan(**fields).advice]
    groups = plan(**fields | {"strategy": "hsdp"})  # of eight ranks: one expert each
    assert "experts-do-not-divide" not in [one.code for one in groups.advice]
    assert groups.memory.device < spread.device


def test_expert_adapters_copy_each_layers_expert_stack() -> None:
    """1.21 GB a layer in bf16 for Qwen3-30B-A3B: all 48 without checkpointing, one and its gradient with."""
    fields = {"model": "qwen3-30b-a3b", "gpus": 1, "strategy": "none", "method": "lora", "loss": "fused"}

    def adapted(checkpointing: str) -> float:
        with_experts = memory(expert_lora="scaled", checkpointing=checkpointing, seq_len=128, **fields)
        without = memory(checkpointing=checkpointing, seq_len=128, **fields)
        return (with_experts.peak.activations - without.peak.activations) / 1e9

    copy = 128 * 3 * 2048 * 768 * 2 / 1e9
    assert copy == pytest.approx(1.208, abs=0.001)
    assert adapted("none") == pytest.approx(49 * copy, rel=0.03)
    assert adapted("full") == pytest.approx(2 * copy, rel=0.05)


@pytest.mark.parametrize(
    ("less", "more"),
    [
        ({"checkpointing": "full"}, {"checkpointing": "selective"}),
        ({"checkpointing": "selective"}, {"checkpointing": "none"}),
        ({"loss": "fused"}, {"loss": "chunked"}),
        ({"loss": "chunked"}, {"loss": "full"}),
        ({"attention": "flash"}, {"attention": "eager"}),
        ({"optimizer": "adamw-4bit"}, {"optimizer": "adamw-8bit"}),
        ({"optimizer": "adamw-8bit"}, {"optimizer": "adamw"}),
        ({"optimizer": "sgd"}, {"optimizer": "lion"}),
        ({"micro_batch": 1}, {"micro_batch": 2}),
        ({"precision": "bf16"}, {"precision": "bf16-mixed"}),
        ({"activation_offload": True}, {"activation_offload": False}),
        ({"offload": "all"}, {"offload": "none"}),
        ({"method": "lora"}, {"method": "full"}),
        ({"method": "qlora"}, {"method": "lora"}),
        ({"method": "lora"}, {"method": "lora", "dora": True}),
        ({"gpus": 16}, {"gpus": 8}),
    ],
)
def test_each_choice_moves_memory_the_right_way(less: dict[str, object], more: dict[str, object]) -> None:
    base = {"model": "llama-3.1-8b", "gpus": 8, "strategy": "fsdp", "seq_len": 8192, "checkpointing": "none"}
    assert memory(**(base | less)).device < memory(**(base | more)).device


def test_optimizer_in_backward_keeps_no_gradients() -> None:
    fields = {"model": "llama-3.2-3b", "gpus": 1, "strategy": "none", "precision": "bf16"}
    found = memory(optimizer_in_backward=True, **fields)
    assert found.model_states.gradients == 0
    assert memory(**fields).device - found.device > 3e9


def test_interleaving_holds_more_micro_batches_than_one_stage_a_rank() -> None:
    fields = {"model": "llama-3.1-8b", "gpus": 4, "pp": 4, "micro_batches": 16, "strategy": "megatron"}
    fields |= {"seq_len": 8192, "checkpointing": "none", "loss": "fused"}
    plain = memory(**fields)
    interleaved = memory(pp_schedule="interleaved", virtual_stages=2, **fields)
    gpipe = memory(pp_schedule="gpipe", **fields)
    assert plain.allocated < interleaved.allocated < gpipe.allocated


def test_a_pipeline_keeps_buffers_at_the_edges_of_its_stages() -> None:
    """Four edges' worth of 16 micro-batches: their gradients come into buffers of their own, and outputs of
    the four in flight wait for backward (PyTorch's pipelining); Megatron allocates as it goes."""
    edge = 8192 * 4096 * 2
    fields = {"model": "llama-3.1-8b", "gpus": 8, "pp": 4, "seq_len": 8192}
    few, many = (memory(micro_batches=m, **fields) for m in (8, 16))
    assert many.peak.buffers - few.peak.buffers == 8 * edge
    fields |= {"strategy": "megatron"}
    few, many = (memory(micro_batches=m, **fields) for m in (8, 16))
    assert few.peak.buffers == many.peak.buffers


def test_gptq_upcasts_nothing_but_autograd_keeps_its_unpacked_weights() -> None:
    fields = {"model": "llama-2-7b", "gpus": 1, "strategy": "none", "method": "qlora", "seq_len": 256}
    nf4, gptq = memory(quant="nf4", **fields), memory(quant="gptq4", **fields)
    upcast = 2 * 2 * 32_000 * 4096
    assert nf4.model_states.weights - gptq.model_states.weights > 0.9 * upcast
    block = 2 * (4 * 4096 * 4096 + 3 * 4096 * 11_008)
    assert gptq.peak.buffers >= block
    whole = memory(quant="gptq4", checkpointing="none", **fields)
    assert whole.peak.buffers >= 32 * block


def test_megatrons_fused_cross_entropy_still_holds_the_logits() -> None:
    fields = {"model": "qwen3-8b", "gpus": 8, "tp": 2, "seq_len": 8192, "loss": "fused"}

    def logits(**more: object) -> int:
        return max(phase.logits for phase in memory(**fields, **more).phases)

    assert logits(strategy="fsdp") == 0
    assert logits(strategy="megatron") >= 6 * 8192 * 151_936 / 2


def test_megatrons_main_gradients_follow_the_reduce_dtype() -> None:
    fields = {"model": "qwen3-8b", "gpus": 8, "strategy": "megatron"}
    full, half = memory(**fields), memory(reduce_dtype="bf16", **fields)
    assert full.model_states.gradients == 2 * half.model_states.gradients
