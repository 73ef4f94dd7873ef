"""How a run splits its model: the backend that a config or plan asks for."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from ftdash.engine.check.documents import Document


@dataclass(frozen=True, slots=True)
class Backend:
    """`name` is ddp, fsdp1, fsdp2 or zero; `stage` is set under zero."""

    name: str
    where: str
    stage: int = 0

    @property
    def shards(self) -> bool:
        """Whether a rank holds only a part of the weights."""
        return self.name.startswith("fsdp") or self.stage == 3

    @property
    def label(self) -> str:
        return (
            f"ZeRO-{self.stage}"
            if self.name == "zero"
            else {"ddp": "DDP", "fsdp1": "FSDP1"}.get(self.name, "FSDP2")
        )


def stage_in_name(text: str) -> int:
    """The ZeRO stage that a file's name tells, 0 when it tells none."""
    match = re.search(r"(?:zero|stage|z)[_-]?([123])", text.lower())
    return int(match.group(1)) if match else 0


def backend_of_accelerate(document: Document) -> Backend | None:
    """What an accelerate file starts; None where it names no distributed type that shards or copies."""
    kind = document.get("distributed_type")
    if kind is None:
        return None
    name = document.distributed_type
    if name == "FSDP":
        version = document.get("fsdp_config", "fsdp_version")
        return Backend("fsdp2" if version and str(version.value) == "2" else "fsdp1", kind.where)
    if name == "DEEPSPEED":
        stage = document.get("deepspeed_config", "zero_stage")
        return Backend("zero", kind.where, stage.value if stage and isinstance(stage.value, int) else 0)
    if name.startswith("MULTI_"):
        return Backend("ddp", kind.where)
    return None


def backend_of_plan(plan: dict[str, Any]) -> tuple[str, int] | None:
    """Name and stage of a plan's strategy; None where it has none of them."""
    strategy = str(plan.get("strategy", ""))
    if strategy in ("zero1", "zero2", "zero3"):
        return "zero", int(strategy[-1])
    if strategy in ("fsdp", "fsdp-no-reshard", "hsdp"):
        return "fsdp2", 0
    return {"fsdp1": ("fsdp1", 0), "ddp": ("ddp", 0)}.get(strategy)
