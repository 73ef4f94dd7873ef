"""Any combination of choices is either planned with consistent figures or refused in one line."""

from __future__ import annotations

import contextlib
import io
import json
import math

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ftdash.engine.plan import (
    SWITCHES,
    Attention,
    Batching,
    Checkpointing,
    ExpertLora,
    KbitUpcast,
    Loss,
    Method,
    Offload,
    Optimizer,
    PipelineSchedule,
    Plan,
    PlanError,
    Precision,
    Quant,
    Strategy,
    flag_of,
)
from ftdash.engine.planner import evaluate
from ftdash.tui.cli import guarded
from ftdash.tui.commands.plan_flags import CHOICES, COUNTS, DTYPES, NAMES

POWERS = st.sampled_from([1, 1, 1, 2, 4, 8])
PLANS = st.builds(
    Plan,
    model=st.sampled_from(
        ["qwen3-8b", "qwen3-30b-a3b", "deepseek-v2-lite", "mpt-7b", "gemma-3-4b", "gpt-oss-20b"]
    ),
    gpu=st.sampled_from(["h100-sxm-80g", "rtx4090-24g", "t4-16g", "gb200-184g"]),
    gpus=st.sampled_from([1, 2, 4, 8, 16, 64]),
    gpus_per_node=st.sampled_from([1, 4, 8]),
    strategy=st.sampled_from(Strategy),
    replicate=st.sampled_from([None, None, 2]),
    tp=POWERS,
    cp=POWERS,
    pp=POWERS,
    pp_schedule=st.sampled_from(PipelineSchedule),
    virtual_stages=st.sampled_from([1, 2]),
    micro_batches=st.sampled_from([None, 4]),
    ep=POWERS,
    method=st.sampled_from(Method),
    lora_rank=st.sampled_from([1, 16]),
    dora=st.booleans(),
    modules_to_save=st.sampled_from([(), ("embed_tokens",)]),
    quant=st.sampled_from([None, *Quant]),
    quantize_experts=st.booleans(),
    quant_storage=st.sampled_from(["bf16", "uint8"]),
    adapter_dtype=st.sampled_from([None, "fp32", "bf16"]),
    expert_lora=st.sampled_from(ExpertLora),
    micro_batch=POWERS,
    grad_accum=POWERS,
    seq_len=st.sampled_from([128, 2048, 32_768]),
    batching=st.sampled_from(Batching),
    mean_len=st.sampled_from([None, 1, 100, 2000]),
    checkpointing=st.sampled_from(Checkpointing),
    loss=st.sampled_from(Loss),
    attention=st.sampled_from(Attention),
    compile=st.booleans(),
    optimizer=st.sampled_from(Optimizer),
    optimizer_in_backward=st.booleans(),
    precision=st.sampled_from(Precision),
    reduce_dtype=st.sampled_from([None, "fp32", "bf16"]),
    offload=st.sampled_from(Offload),
    activation_offload=st.booleans(),
    unsharded_init=st.booleans(),
    kbit_upcast=st.sampled_from([None, *KbitUpcast]),
    reentrant=st.booleans(),
    old_bitsandbytes=st.booleans(),
    lora_dropout=st.sampled_from([0.0, 0.1]),
    untied_head=st.booleans(),
    wrap_embeddings=st.booleans(),
    whole_graph=st.booleans(),
    save_every_product=st.booleans(),
    fused_qkv=st.booleans(),
    fused_norms=st.booleans(),
    expert_loop=st.booleans(),
    pcie=st.sampled_from([None, "3x8", "5x16"]),
)


@settings(deadline=None, max_examples=150, suppress_health_check=[HealthCheck.too_slow])
@given(plan=PLANS)
def test_every_plan_is_consistent_or_refused(plan: Plan) -> None:
    try:
        found = evaluate(plan)
    except PlanError as error:
        refusal = str(error)
    else:
        refusal = ""
    if refusal:
        assert "\n" not in refusal
        return
    memory, time = found.memory, found.time
    assert memory.allocated >= memory.model_states.total
    assert memory.device > memory.reserved >= memory.allocated > 0
    for phase in memory.phases:
        assert all(held >= 0 for _, held in phase.terms()), phase
        assert phase.cached >= 0, phase
    assert found.model.trainable_params <= found.model.total_params + 2 * 262_144 * 5376
    for value in (time.compute_s, time.step_s, time.tokens_per_s_per_gpu):
        assert math.isfinite(value)
        assert value > 0
    assert 0 <= time.exposed_s <= time.communication_s + 1e-12
    assert 0 < time.mfu < 1
    assert 0 <= time.bubble < 1
    json.dumps(found.to_json(), allow_nan=False)


NUMBERS = st.sampled_from(
    [
        "1",
        "2",
        "4",
        "8",
        "16",
        "2048",
        "0",
        "-1",
        "nan",
        "inf",
        "1e9",
        "9" * 30,
        "",
        "a\nb",
        "\x1b[2J",
        "1.5",
        "0x10",
    ]
)
WORDS = st.sampled_from(["all-linear", "q_proj,v_proj", "nonsense", ",", "", "lm_head", "-1", "a\nb"])
FLAGS = {
    "--model": st.sampled_from(["qwen3-8b", "qwen3-30b-a3b", "tiny-qwen3", "no-such", ""]),
    "--params": NUMBERS,
    "--gpu": st.sampled_from(["t4-16g", "v100-32g", "h100-sxm-80g", "b200-180g", "no-such", ""]),
    **{f"--{name}": NUMBERS for name in COUNTS},
    **{
        f"--{name}": st.sampled_from([*(kind.value for kind in kinds), "nonsense"])
        for name, kinds in CHOICES.items()
    },
    **{f"--{name}": st.sampled_from([*values, "nonsense"]) for name, values in DTYPES.items()},
    **{f"--{name}": WORDS for name in NAMES},
    **{flag_of(field): st.none() for field in SWITCHES},
    "--lora-dropout": NUMBERS,
    "--pcie": st.sampled_from(["3x8", "4x16", "x", "3x", "²x8", "9" * 5000, ""]),
}


@st.composite
def command_lines(draw: st.DrawFn) -> list[str]:
    """Up to six flags of a plan with values that are right, wrong or hostile; mostly beside a model."""
    line = draw(st.sampled_from([["--model=qwen3-8b"], ["--model=qwen3-30b-a3b"], ["--params=7e9"], []]))
    for flag in draw(st.lists(st.sampled_from(sorted(FLAGS)), max_size=6, unique=True)):
        value = draw(FLAGS[flag])
        line = [*line, flag if value is None else f"{flag}={value}"]
    return line


@settings(deadline=None, max_examples=300, suppress_health_check=[HealthCheck.too_slow])
@given(line=command_lines())
def test_any_command_line_is_planned_or_refused_in_one_line(line: list[str]) -> None:
    out, said = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(said):
        code = guarded(["plan", "--json", *line])
    assert code in (0, 2), said.getvalue()
    if code == 0:
        json.loads(out.getvalue())
        return
    assert out.getvalue() == ""
    words = said.getvalue().removesuffix("\n")
    assert words.startswith("ftdash: ")
    assert words.isprintable()
    assert "--" in words
