"""How fast the planner answers: one evaluation against 1 ms, a search over 10,000 configurations against 2
s."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from itertools import cycle, islice

from ftdash.engine.plan import Plan, PlanError
from ftdash.engine.planner import evaluate, predict
from ftdash.engine.planner.fit import configurations, search
from ftdash.engine.planner.setting import setting_of

PLANS = {
    "dense, fits": Plan(model="qwen3-8b", gpus=8),
    "dense, does not fit": Plan(model="qwen3-32b", gpus=2, gpu="rtx4090-24g"),
    "LoRA": Plan.from_dict({"model": "llama-3.1-70b", "gpus": 8, "method": "lora"}),
    "MoE with MLA": Plan(model="deepseek-v3", gpus=64, tp=2, ep=8),
}


def _median_ms(call: Callable[[], object], times: int = 300) -> float:
    call()
    taken = []
    for _ in range(times):
        started = time.perf_counter()
        call()
        taken.append(time.perf_counter() - started)
    return statistics.median(taken) * 1e3


def main() -> None:
    print("planner: one evaluation (budget 1 ms)")
    for name, plan in PLANS.items():
        bare = _median_ms(lambda plan=plan: evaluate(plan))
        whole = _median_ms(lambda plan=plan: evaluate(plan).advice)
        print(f"  {name:<20} {bare:6.3f} ms, with its advice read {whole:6.3f} ms")
    print("planner: search (budget 2 s for 10,000 configurations)")
    plan = Plan(model="qwen3-30b-a3b", gpus=32, micro_batch=8, seq_len=16_384)
    space = list(configurations(plan, sequences=256, is_moe=True))
    started = time.perf_counter()
    for candidate in islice(cycle(space), 10_000):
        try:
            predict(setting_of(candidate))
        except PlanError:
            continue
    print(f"  10,000 of {len(space):,} configurations {time.perf_counter() - started:5.2f} s")
    started = time.perf_counter()
    found = search(Plan(model="llama-3.1-70b", gpus=64, micro_batch=2, seq_len=8192))
    print(f"  fit llama-3.1-70b on 64 GPUs: {found.tried:,} in {time.perf_counter() - started:5.2f} s")


if __name__ == "__main__":
    main()
