"""Plans of every kind are rehearsed for real: trained on gloo, saved, resumed, converted, loaded."""

from __future__ import annotations

import pytest

from ftdash.engine.configs import Launcher
from ftdash.engine.plan import ExpertLora, Method, Offload, Plan, Strategy
from ftdash.engine.rehearse import RehearsalError, rehearse

pytestmark = pytest.mark.timeout(1200)


def plan(model: str = "qwen3-8b", gpus: int = 8, **choices: object) -> Plan:
    return Plan(model=model, gpus=gpus, **choices)  # type: ignore[arg-type]


MOE = "qwen3-30b-a3b"
# name: plan, ranks, resumed elsewhere, what must be among the proofs
MATRIX = {
    "ddp": (plan("qwen3-0.6b", strategy=Strategy.DDP), 2, True, "DistributedDataParallel"),
    "fsdp": (plan(strategy=Strategy.FSDP), 2, True, "FSDPQwen3ForCausalLM"),
    "fsdp-no-reshard": (plan("llama-3.1-8b", strategy=Strategy.FSDP_NO_RESHARD), 2, False, "FSDPLlama"),
    "hsdp": (plan(gpus=16, strategy=Strategy.HSDP), 4, False, "replicate 2 as 2, shard 8 as 2"),
    "fsdp-lora": (plan(method=Method.LORA), 2, False, "all of them adapters"),
    "fsdp-qlora": (plan("qwen3-32b", 2, method=Method.QLORA), 2, False, "converts to adapter"),
    "fsdp-moe-lora": (plan(MOE, 4, method=Method.LORA, expert_lora=ExpertLora.SCALED), 2, False, "adapters"),
    "ddp-lora": (plan(strategy=Strategy.DDP, method=Method.LORA), 2, False, "adapter"),
    "tp": (plan(gpus=2, strategy=Strategy.NONE, tp=2), 2, False, "DTensors"),
    "tp-fsdp": (plan(tp=2), 4, False, "tp 2 as 2"),
    "ep-fsdp": (plan(MOE, ep=8), 2, False, "ep 8 as 2"),
    "zero2": (plan(gpus=4, strategy=Strategy.ZERO2), 2, False, "DeepSpeedEngine"),
    "zero2-offload": (plan(strategy=Strategy.ZERO2, offload=Offload.OPTIMIZER), 2, False, "DeepSpeedEngine"),
    "zero3": (plan(gpus=4, strategy=Strategy.ZERO3), 2, True, "universal checkpoint"),
    "zero3-lora": (plan(gpus=4, strategy=Strategy.ZERO3, method=Method.LORA), 2, False, "adapters"),
    "zero3-moe": (plan(MOE, strategy=Strategy.ZERO3), 2, False, "DeepSpeedEngine"),
    "zero3-ulysses": (plan(gpus=4, strategy=Strategy.ZERO3, cp=2), 2, False, "cp 2 as 2"),
    "zero1-deepspeed-launcher": (plan(gpus=4, strategy=Strategy.ZERO1), 2, False, "DeepSpeedEngine"),
    "one-rank": (plan(gpus=1, strategy=Strategy.NONE), 1, False, "loads with from_pretrained"),
}


# One of each kind for the quick tests. None is DeepSpeed's, which compiles an operator on first use.
QUICK = ("one-rank", "ddp-lora", "fsdp-no-reshard", "fsdp-qlora", "tp", "ep-fsdp")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in MATRIX]
)
def test_the_plan_rehearses(name, tmp_path):
    asked, ranks, resume, proof = MATRIX[name]
    launcher = Launcher.DEEPSPEED if name.endswith("deepspeed-launcher") else None
    result = rehearse(asked, work=tmp_path, launcher=launcher, resume=resume)
    said = "\n".join(result.proved)
    assert proof in said
    assert f"on {ranks} ranks" in said
    assert ("resumed at step 2" in said) is resume
    assert "generates a token" in said
    assert ("adapters learned" in said) is (asked.method is not Method.FULL)
    if asked.strategy not in (Strategy.DDP, Strategy.NONE) and asked.tp == asked.ep == 1:
        assert "bit for bit" in said
    assert any("memory" in line for line in result.not_proved)
    assert result.plan.gpus == ranks


def test_a_refused_plan_is_refused_before_anything_starts(tmp_path):
    with pytest.raises(RehearsalError, match="only at stage 3"):
        rehearse(plan(strategy=Strategy.ZERO2, offload=Offload.ALL), work=tmp_path)
    assert not list(tmp_path.iterdir())
