"""What the planner knows of a model: its layers, their matrices and their widths, exactly.

A `ModelShape` is built by `ftdash.engine.model.load` from a Hugging Face config; every count in it
equals what the real transformers class allocates.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec


class Role(StrEnum):
    """Where a weight matrix sits; LoRA targets, TP sharding and quantisation go by role."""

    ATTENTION = "attention"
    MLP = "mlp"
    EXPERT = "expert"  # routed experts, stored as 3-D stacks
    SHARED_EXPERT = "shared-expert"
    ROUTER = "router"


class Linear(msgspec.Struct, frozen=True):
    """`count` matrices of (d_out, d_in); `name` is the module's last part, such as q_proj."""

    name: str
    d_in: int
    d_out: int
    role: Role
    bias: bool = False
    count: int = 1  # number of experts for a stack

    @property
    def params(self) -> int:
        return self.count * self.d_out * (self.d_in + (1 if self.bias else 0))


class AttentionShape(msgspec.Struct, frozen=True):
    """Heads and widths of one attention block; for MLA the latent ranks are set."""

    heads: int
    kv_heads: int
    head_dim: int  # of q and k
    v_head_dim: int
    q_lora_rank: int = 0
    kv_lora_rank: int = 0
    rope_dim: int = 0  # MLA: the part of head_dim that carries rotary positions
    window: int | None = None  # sliding window in tokens

    @property
    def is_mla(self) -> bool:
        return self.kv_lora_rank > 0


class MoeShape(msgspec.Struct, frozen=True):
    experts: int
    top_k: int
    expert_width: int
    shared_width: int = 0  # summed width of always-on experts


class LayerShape(msgspec.Struct, frozen=True):
    """One decoder block. `other_params` are norms, biases outside linears, sinks and the like."""

    attention: AttentionShape
    linears: tuple[Linear, ...]
    other_params: int
    gated: bool = True  # gate and up projection (SwiGLU, GeGLU) or one up projection
    ffn_width: int = 0  # dense width; 0 in a pure MoE layer
    moe: MoeShape | None = None

    @property
    def params(self) -> int:
        return sum(linear.params for linear in self.linears) + self.other_params

    @property
    def active_params(self) -> int:
        """Parameters that one token touches: top_k of the experts, all of the rest."""
        total = self.other_params
        for linear in self.linears:
            if linear.role is Role.EXPERT and self.moe is not None:
                total += linear.params // linear.count * self.moe.top_k
            else:
                total += linear.params
        return total


class LayerGroup(msgspec.Struct, frozen=True):
    """`count` equal layers; a model is a short list of groups, so that planning stays fast."""

    layer: LayerShape
    count: int


class ModelShape(msgspec.Struct, frozen=True, cache_hash=True):
    name: str
    model_type: str
    hidden: int
    vocab: int
    groups: tuple[LayerGroup, ...]
    tied_embeddings: bool
    embedding_params: int  # the input embedding (and learned positions)
    head_params: int  # the output head when untied, else 0
    other_params: int  # final norm and what else stands outside the blocks
    max_positions: int = 0
    layer_class: str = ""  # the transformers class to wrap, such as Qwen3DecoderLayer
    source: str = ""
    stored_as: str = ""  # the quantisation that the checkpoint is stored in, as its config names it
    unplaced: tuple[str, ...] = ()  # what of the config could not be placed, in words
    unplaced_params: int = 0  # the parameters of those parts where known; in no other count

    @property
    def layers(self) -> int:
        return sum(group.count for group in self.groups)

    @property
    def root_params(self) -> int:
        """Everything outside the wrapped blocks: FSDP's root unit."""
        return self.embedding_params + self.head_params + self.other_params

    @property
    def total_params(self) -> int:
        return self.root_params + sum(group.layer.params * group.count for group in self.groups)

    @property
    def active_params(self) -> int:
        return self.root_params + sum(group.layer.active_params * group.count for group in self.groups)

    @property
    def is_moe(self) -> bool:
        return any(group.layer.moe is not None for group in self.groups)
