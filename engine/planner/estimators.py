"""DeepSpeed's own estimates of model states, value for value, to set beside a plan.

They count neither activations nor gathered parameters nor buckets, and print GiB as "GB". The host
figures carry a hidden factor of 1.5 (deepspeed/runtime/zero/stage3.py and stage_1_and_2.py,
`estimate_zero3_model_states_mem_needs` and `estimate_zero2_model_states_mem_needs`).
"""

from __future__ import annotations

import msgspec

GIB = 2**30
HOST_BUFFER_FACTOR = 1.5


class ModelStatesEstimate(msgspec.Struct, frozen=True):
    """Bytes per GPU and of host memory per node, model states only."""

    gpu_bytes: int
    host_bytes: int

    @property
    def gpu_gib(self) -> float:
        return self.gpu_bytes / GIB

    @property
    def host_gib(self) -> float:
        return self.host_bytes / GIB


def deepspeed_zero2(
    params: float, gpus_per_node: int, nodes: int = 1, *, offload_optimizer: bool
) -> ModelStatesEstimate:
    """ZeRO-2: 2Ψ with the optimizer on the host, else 4Ψ + 16Ψ/n."""
    n = gpus_per_node * nodes
    if offload_optimizer:
        return ModelStatesEstimate(int(2 * params), int(params * max(4 * n, 16) * HOST_BUFFER_FACTOR))
    return ModelStatesEstimate(
        int(4 * params + 16 * params / n), int(params * 4 * gpus_per_node * HOST_BUFFER_FACTOR)
    )


def deepspeed_zero3(
    params: float,
    largest_layer: float,
    gpus_per_node: int,
    nodes: int = 1,
    *,
    offload_optimizer: bool,
    offload_params: bool = False,
) -> ModelStatesEstimate:
    """ZeRO-3 under zero.Init: 4 × the largest layer, plus 2Ψ/n or 18Ψ/n for what stays on the GPU."""
    n = gpus_per_node * nodes
    largest = 4 * largest_layer
    if offload_optimizer and offload_params:
        return ModelStatesEstimate(int(largest), int(params * 18 / nodes * HOST_BUFFER_FACTOR))
    if offload_optimizer:
        return ModelStatesEstimate(
            int(largest + 2 * params / n), int(params * 16 / nodes * HOST_BUFFER_FACTOR)
        )
    return ModelStatesEstimate(
        int(largest + 18 * params / n), int(largest_layer * 4 * gpus_per_node * HOST_BUFFER_FACTOR)
    )
