"""What PyTorch's partitioner keeps of a block under compiled selective checkpointing is what is planned."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ftdash.engine.plan import Plan
from ftdash.engine.planner.activations import block_activations
from ftdash.engine.planner.setting import setting_of

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, WIDTH, TOKENS = 256, 4, 2, 64, 768, 128


@pytest.mark.slow
def test_a_compiled_block_keeps_what_is_planned(tmp_path: Path) -> None:
    """A Llama block under torchtitan's policy (the kernel of attention and every second product), traced and
    partitioned: outputs of its forward graph that are no inputs, and the block's input."""
    config = tmp_path / "config.json"
    llama = {"model_type": "llama", "vocab_size": 128, "hidden_size": HIDDEN, "intermediate_size": WIDTH}
    heads = {"num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "head_dim": HEAD_DIM}
    config.write_text(json.dumps(llama | heads | {"num_hidden_layers": 1}))
    fields = {"config": str(config), "gpus": 2, "checkpointing": "selective", "compile": True}
    s = setting_of(Plan.from_dict(fields))
    planned = block_activations(s, s.shape.groups[0].layer, None)
    assert planned.saved_whole == 0
    assert _kept_bytes() == planned.saved * TOKENS


def _kept_bytes() -> int:
    import torch
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.partitioners import min_cut_rematerialization_partition
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
    from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

    aten = torch.ops.aten
    kernels = {aten._scaled_dot_product_flash_attention_for_cpu.default}

    def contexts() -> Any:
        products = {True: 0, False: 0}

        def policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
            products[context.is_recompute] += operator == aten.mm.default
            odd = operator == aten.mm.default and products[context.is_recompute] % 2 == 1
            keep = odd or operator in kernels
            return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

        return create_selective_checkpoint_contexts(policy)

    kept: list[int] = []

    def forward(graph: Any, inputs: Any) -> Any:
        outputs = graph.graph.output_node().args[0]
        made = [node.meta["val"] for node in outputs[1:] if node.op != "placeholder"]
        kept.extend(value.numel() * value.element_size() for value in made)
        return graph

    block = checkpoint_wrapper(_block().to(torch.bfloat16), context_fn=contexts, preserve_rng_state=False)
    backend = aot_autograd(
        fw_compiler=forward,
        bw_compiler=lambda graph, inputs: graph,
        partition_fn=min_cut_rematerialization_partition,
    )
    inputs = torch.randn(1, TOKENS, HIDDEN, dtype=torch.bfloat16, requires_grad=True)
    torch.compile(block, backend=backend, fullgraph=True)(inputs).sum().backward()
    assert kept
    return sum(kept) + inputs.numel() * inputs.element_size()


def _block() -> Any:
    import torch
    from torch import nn
    from torch.nn import functional

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            sizes = {"q": (HIDDEN, HEADS * HEAD_DIM), "k": (HIDDEN, KV_HEADS * HEAD_DIM)}
            sizes |= {"v": sizes["k"], "o": (HEADS * HEAD_DIM, HIDDEN), "gate": (HIDDEN, WIDTH)}
            sizes |= {"up": (HIDDEN, WIDTH), "down": (WIDTH, HIDDEN)}
            self.linears = nn.ModuleDict({k: nn.Linear(*size, bias=False) for k, size in sizes.items()})
            self.norms = nn.ModuleList(nn.RMSNorm(HIDDEN) for _ in range(2))

        def forward(self, stream: torch.Tensor) -> torch.Tensor:
            linear = self.linears
            normed = self.norms[0](stream)
            q, k, v = (linear[x](normed).unflatten(-1, (-1, HEAD_DIM)).transpose(1, 2) for x in "qkv")
            q, k = (x * x.float().cos().to(x.dtype) for x in (q, k))
            k, v = (x.repeat_interleave(HEADS // KV_HEADS, 1) for x in (k, v))
            attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            stream = stream + linear["o"](attended.transpose(1, 2).flatten(2))
            normed = self.norms[1](stream)
            return stream + linear["down"](functional.silu(linear["gate"](normed)) * linear["up"](normed))

    return Block()
