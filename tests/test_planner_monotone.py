"""Which way memory moves whatever else is chosen: ranks, rank of the adapters, tokens, checkpointing."""

from __future__ import annotations

from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from ftdash.engine.model.load import resolve
from ftdash.engine.plan import (
    Attention,
    Checkpointing,
    Loss,
    Method,
    Optimizer,
    Plan,
    PlanError,
    Precision,
    Strategy,
)
from ftdash.engine.planner import evaluate
from ftdash.engine.planner.result import Memory

PLANS = st.builds(
    Plan,
    model=st.sampled_from(["qwen3-8b", "llama-3.2-1b", "mixtral-8x7b", "gpt-oss-20b", "mpt-7b"]),
    gpu=st.sampled_from(["h100-sxm-80g", "rtx4090-24g"]),
    gpus=st.sampled_from(
        [1, 2, 4]
    ),  # doubled no more than eight: FSDP2 pads stacks of fewer experts than ranks
    strategy=st.sampled_from(
        [Strategy.ZERO2, Strategy.ZERO3, Strategy.FSDP, Strategy.FSDP1, Strategy.FSDP_NO_RESHARD]
    ),
    method=st.sampled_from(Method),
    lora_rank=st.sampled_from([4, 16]),
    lora_dropout=st.sampled_from([0.0, 0.05]),
    micro_batch=st.sampled_from([1, 3]),
    grad_accum=st.sampled_from([1, 4]),
    seq_len=st.sampled_from([256, 2048, 8192]),
    checkpointing=st.sampled_from(Checkpointing),
    loss=st.sampled_from(Loss),
    attention=st.sampled_from(Attention),
    compile=st.booleans(),
    optimizer=st.sampled_from(Optimizer),
    precision=st.sampled_from([Precision.BF16_MIXED, Precision.BF16, Precision.FP32]),
    reduce_dtype=st.sampled_from([None, "fp32"]),
    wrap_embeddings=st.booleans(),
    activation_offload=st.booleans(),
)
QUICK = settings(deadline=None, max_examples=60, suppress_health_check=list(HealthCheck))


def memory(plan: Plan) -> Memory:
    try:
        return evaluate(plan).memory
    except PlanError:
        assume(False)
        raise


ROUNDING = 16  # bytes: one in each of a phase's terms, and what is reckoned from them


def never_more(less: Plan, more: Plan, beside: float = ROUNDING) -> None:
    a, b = memory(less), memory(more)
    assert a.allocated <= b.allocated + beside
    assert a.reserved <= b.reserved + beside


@QUICK
@given(plan=PLANS)
def test_more_ranks_to_shard_over_never_need_more_on_each(plan: Plan) -> None:
    never_more(replace(plan, gpus=2 * plan.gpus), plan)


@QUICK
@given(plan=PLANS)
def test_a_higher_adapter_rank_never_needs_less(plan: Plan) -> None:
    assume(plan.method is not Method.FULL)
    never_more(plan, replace(plan, lora_rank=4 * plan.lora_rank))


@QUICK
@given(plan=PLANS)
def test_longer_sequences_and_larger_micro_batches_never_need_less(plan: Plan) -> None:
    never_more(plan, replace(plan, seq_len=2 * plan.seq_len))
    never_more(plan, replace(plan, micro_batch=plan.micro_batch + 1))


@QUICK
@given(plan=PLANS)
def test_checkpointing_never_needs_more(plan: Plan) -> None:
    full, selective, none = (
        replace(plan, checkpointing=kind)
        for kind in (Checkpointing.FULL, Checkpointing.SELECTIVE, Checkpointing.NONE)
    )
    # A block that is computed again stands beside its own input, 4 bytes an element at most, with its share
    # of what the sums do not list.
    own_input = 1.2 * 4 * plan.micro_batch * plan.seq_len * resolve(plan).hidden
    never_more(full, none, own_input)
    never_more(selective, none, own_input)
