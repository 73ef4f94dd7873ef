"""What a pipeline makes its stages hold: micro-batches in flight, and the buffers that they are sent with."""

from __future__ import annotations

from ftdash.engine.plan import PipelineSchedule, Strategy
from ftdash.engine.planner.inventory import Stage
from ftdash.engine.planner.numerics import ZERO_FAMILY
from ftdash.engine.planner.setting import Setting


def micro_batches_in_flight(s: Setting) -> float:
    """Micro-batches whose activations the first stage holds: min(m, p) under 1F1B (arXiv 2104.04473, section
    2.2), times 1 + (p - 1)/(p·v) interleaved, all m under GPipe."""
    p, m = s.mesh.pp, s.micro_steps
    if p == 1:
        return 1.0
    if s.plan.pp_schedule is PipelineSchedule.GPIPE:
        return float(m)
    flight = float(min(m, p))
    if s.plan.pp_schedule is PipelineSchedule.INTERLEAVED:
        flight = min(m, flight * (1 + (p - 1) / (p * s.plan.virtual_stages)))
    return flight


def edge_bytes(s: Setting, stage: Stage) -> float:
    """Bytes that PyTorch's pipelining keeps at the edges of a rank's v stages, beside saved activations.

    It allocates a buffer for each micro-batch's input and one for each one's gradient beforehand, and a
    stage's output waits for its backward (torch/distributed/pipelining/stage.py: `args_recv_info`,
    `grad_recv_info`, `fwd_cache`). An input in flight is counted already, as the first block's. Megatron
    and DeepSpeed allocate as they go.
    """
    strategy = s.plan.strategy
    if s.mesh.pp == 1 or strategy is Strategy.MEGATRON or strategy in ZERO_FAMILY:
        return 0.0
    last = stage.head > 0
    m, v = s.micro_steps, s.plan.virtual_stages
    flight = 1.0 if last else micro_batches_in_flight(s)
    receives, sends = (v, v - 1) if last else (v - 1, v)  # of its stages, those with one before, one behind
    edges = receives * max(0.0, m - flight) + sends * (m + flight)
    return edges * s.tokens / s.mesh.tp * s.shape.hidden * s.dtypes.compute
