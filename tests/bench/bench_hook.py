"""What the hook costs a training step on this machine: without expert counts, and with them.

Prints microseconds per step of the plain API and the Trainer callback's share of a small MoE's step.
"""

from __future__ import annotations

import tempfile
import time

STEPS = 2000
PHASES = ("data", "forward", "backward", "optimizer")


def plain_step_us(steps: int = STEPS) -> float:
    """CPU time of the training thread for four phases and one step record, in microseconds, best of five."""
    from ftdash.monitor.hook import Hook

    with tempfile.TemporaryDirectory() as folder:
        hook = Hook.start(folder, 0)
        for _ in range(100):
            hook.step(loss=1.0)
        best = float("inf")
        for _ in range(5):
            began = time.thread_time()
            for _ in range(steps):
                for name in PHASES:
                    with hook.phase(name):
                        pass
                hook.step(loss=1.0, tokens=512, lr=1e-3, grad_norm=1.0)
            best = min(best, time.thread_time() - began)
        hook.close()
    return best / steps * 1e6


def moe_step_ms(counted: bool | None, steps: int = 8) -> float:
    """Best step of a four-layer MoE in milliseconds: no hook (None), hook, hook with expert counts."""
    import torch
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    from ftdash.monitor.hook import Hook

    torch.manual_seed(0)
    torch.set_num_threads(1)
    config = Qwen3MoeConfig(
        vocab_size=512,
        hidden_size=128,
        moe_intermediate_size=64,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        num_experts=8,
        num_experts_per_tok=2,
    )
    model = Qwen3MoeForCausalLM(config).train()
    ids = torch.randint(512, (2, 256))
    with tempfile.TemporaryDirectory() as folder:
        hook = Hook.start(None if counted is None else folder, 0)
        if counted:
            hook.watch_experts(model)
        times = []
        for _ in range(steps):
            began = time.thread_time()
            with hook.phase("forward"):
                loss = model(input_ids=ids, labels=ids).loss
            with hook.phase("backward"):
                loss.backward()
            model.zero_grad()
            hook.step(loss=loss, tokens=ids.numel())
            times.append(time.thread_time() - began)
        hook.close()
    return min(times) * 1e3


def count_step_us(layers: int = 4, tokens: int = 512, steps: int = 50) -> float:
    """Cost of the router hooks of one step alone, in microseconds, best of five."""
    import torch
    from transformers.models.qwen3_moe.configuration_qwen3_moe import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

    from ftdash.monitor.hook.experts import ExpertCounter

    config = Qwen3MoeConfig(hidden_size=256, num_experts=8, num_experts_per_tok=2)
    routers = torch.nn.ModuleList(Qwen3MoeTopKRouter(config) for _ in range(layers)).train()
    hidden = torch.randn(tokens, 256)

    def once(counter: ExpertCounter | None = None) -> float:
        began = time.thread_time()
        for _ in range(steps):
            for router in routers:
                router(hidden)
            if counter is not None:
                counter.add_up()
        return time.thread_time() - began

    torch.set_num_threads(1)  # what the other threads wait would count too
    once()
    bare = min(once() for _ in range(5))
    counter = ExpertCounter(routers)
    counted = min(once(counter) for _ in range(5))
    return (counted - bare) / steps * 1e6


def main() -> None:
    print(f"hook without expert counts  {plain_step_us():8.1f} us a step  (budget 100)")
    bare, hooked, counted = (moe_step_ms(kind) for kind in (None, False, True))
    router_us = count_step_us()
    share = router_us / bare / 10
    print(f"router hooks of four layers {router_us:8.1f} us a step, {share:.2f} % of it  (budget 1 %)")
    print(f"a small MoE's step          {bare:8.2f} ms bare, {hooked:.2f} hooked, {counted:.2f} with counts")


if __name__ == "__main__":
    main()
