"""The device mesh of a run: how the world size factors into parallel degrees, and the rules that bind them.

The axes, outermost first, are pipeline (pp), replicate, shard, context (cp) and tensor (tp), as in
torchtitan's `ParallelDims` and accelerate's `ParallelismConfig`. Expert parallelism (ep) is no axis
of its own: it borrows ranks of shard × cp × tp.
"""

from __future__ import annotations

import msgspec

from ftdash.engine.model.shape import ModelShape
from ftdash.engine.plan import PipelineSchedule, Plan, PlanError, Strategy

UNSHARDED = frozenset({Strategy.NONE, Strategy.DDP})
# DeepSpeed cuts sequences the Ulysses way (accelerate, `sp_backend="deepspeed"`), everybody else in a ring.
ULYSSES = frozenset({Strategy.ZERO1, Strategy.ZERO2, Strategy.ZERO3})


class Mesh(msgspec.Struct, frozen=True):
    """Degrees whose product is `world`. Build it with `Mesh.solve` or `Mesh.from_plan`, which check it."""

    world: int
    gpus_per_node: int
    replicate: int
    shard: int
    cp: int
    tp: int
    pp: int
    ep: int

    @property
    def nodes(self) -> int:
        return -(-self.world // self.gpus_per_node)

    @property
    def ranks_per_node(self) -> int:
        return min(self.world, self.gpus_per_node)

    @property
    def data_parallel(self) -> int:
        """Ranks that see different samples."""
        return self.replicate * self.shard

    @property
    def param_shard(self) -> int:
        """Ranks that divide a dense parameter: the context-parallel ranks shard as well (torchtitan,
        accelerate)."""
        return self.shard * self.cp

    @property
    def expert_shard(self) -> int:
        """Ranks that divide the experts left on one expert-parallel rank."""
        return max(1, self.shard * self.cp * self.tp // self.ep) if self.ep > 1 else self.param_shard

    @property
    def shard_spans_nodes(self) -> bool:
        """Whether one sharding group reaches over more than one node."""
        return self.shard * self.cp * self.tp > self.gpus_per_node

    @property
    def tp_spans_nodes(self) -> bool:
        return self.tp > self.gpus_per_node

    @classmethod
    def solve(
        cls,
        *,
        world: int,
        gpus_per_node: int = 8,
        replicate: int = 1,
        shard: int = -1,
        cp: int = 1,
        tp: int = 1,
        pp: int = 1,
        ep: int = 1,
    ) -> Mesh:
        """The mesh with `shard` filled in when it is -1. Raises PlanError naming the factor that is wrong."""
        for name, value in (("replicate", replicate), ("tp", tp), ("cp", cp), ("pp", pp), ("ep", ep)):
            if value < 1:
                raise PlanError(
                    f"--{name} {value}: must be at least 1 (only shard may be -1, to be filled in)"
                )
        if shard != -1 and shard < 1:
            raise PlanError(f"shard {shard}: must be -1 (filled in) or at least 1")
        fixed = replicate * cp * tp * pp
        factors = f"replicate {replicate} x cp {cp} x tp {tp} x pp {pp}"
        if shard == -1:
            if world % fixed:
                blame = _blame(world, replicate, cp, tp, pp)
                raise PlanError(f"--gpus {world} is not a multiple of {factors} = {fixed}: {blame}")
            shard = world // fixed
        elif fixed * shard != world:
            raise PlanError(
                f"{factors} x shard {shard} = {fixed * shard}, but --gpus is {world}: "
                f"shard must be {world // fixed if world % fixed == 0 else 'another factor'} or -1"
            )
        borrowed = shard * cp * tp
        if borrowed % ep:
            raise PlanError(
                f"--ep {ep} must divide shard {shard} x cp {cp} x tp {tp} = {borrowed}: "
                f"one of {_listed(_divisors(borrowed))}"
            )
        return cls(world, gpus_per_node, replicate, shard, cp, tp, pp, ep)

    @classmethod
    def from_plan(cls, plan: Plan, shape: ModelShape | None = None) -> Mesh:
        """The mesh that the plan's strategy makes of its GPUs; with a `shape`, the degrees that a refusal
        lists are those the model can be cut by. Raises PlanError."""
        model_parallel = plan.tp * plan.cp * plan.pp
        if model_parallel < 1 or plan.gpus % model_parallel:
            raise PlanError(
                f"--gpus {plan.gpus} is not a multiple of tp {plan.tp} x cp {plan.cp} x pp {plan.pp} = "
                f"{model_parallel}: {_blame_model_parallel(plan, shape)}"
            )
        data_parallel = plan.gpus // model_parallel
        strategy = plan.strategy
        if strategy is Strategy.NONE and data_parallel > 1:
            raise PlanError(
                f"--strategy none trains one replica, but --gpus {plan.gpus} leaves {data_parallel} "
                f"data-parallel ranks: use ddp, zero1, zero2, zero3, fsdp or hsdp"
            )
        replicate = plan.replicate
        if replicate is None:
            if strategy in UNSHARDED:
                replicate = data_parallel
            elif strategy is Strategy.HSDP:
                replicate = _replicas_over_nodes(plan, data_parallel)
            else:
                replicate = 1
        elif replicate < 1 or data_parallel % replicate:
            raise PlanError(
                f"--replicate {replicate} must divide the {data_parallel} data-parallel ranks: "
                f"one of {_listed(_divisors(data_parallel))}"
            )
        elif strategy in UNSHARDED and replicate != data_parallel:
            raise PlanError(
                f"--replicate {replicate} with --strategy {strategy} must be {data_parallel}: {strategy} "
                f"does not shard"
            )
        return cls.solve(
            world=plan.gpus,
            gpus_per_node=plan.gpus_per_node,
            replicate=replicate,
            cp=plan.cp,
            tp=plan.tp,
            pp=plan.pp,
            ep=plan.ep,
        )


def check_shape(mesh: Mesh, plan: Plan, shape: ModelShape) -> None:
    """Raise PlanError where the model cannot be cut as the mesh asks, with the valid degrees.

    Tensor parallelism cuts attention by heads and KV heads (MLA has no KV heads to cut), the feed
    forward by its width and embedding and head by vocabulary; experts are cut by width only without
    expert parallelism. Transformers accepts a tp over the KV heads at load and fails in forward
    (huggingface/transformers#48307), so it is refused here.
    """
    if mesh.tp > 1:
        _check_tensor_parallel(plan, shape)
    if mesh.ep > 1:
        experts = {group.layer.moe.experts for group in shape.groups if group.layer.moe}
        if not experts:
            raise PlanError(f"--ep {mesh.ep}: {shape.name} has no experts, so --ep must be 1")
        for count in sorted(experts):
            if count % mesh.ep:
                raise PlanError(
                    f"--ep {mesh.ep} must divide the {count} experts of {shape.name}: "
                    f"one of {_listed(_divisors(count))}"
                )
    if mesh.pp > 1:
        _check_pipeline(plan, shape)
    if mesh.cp > 1 and plan.strategy in ULYSSES:
        _check_ulysses(plan, shape)
    elif mesh.cp > 1 and plan.seq_len % (2 * mesh.cp):
        raise PlanError(
            f"--seq-len {plan.seq_len} must be a multiple of 2 x cp {mesh.cp} = {2 * mesh.cp}: "
            f"ring attention balances the causal mask in pairs of chunks"
        )


def _check_ulysses(plan: Plan, shape: ModelShape) -> None:
    """Ulysses trades its cut of the sequence for one of the heads: every rank needs whole query heads, and KV
    heads that divide the ranks or are divided by them (deepspeed/runtime/sequence_parallel/ulysses_sp.py)."""
    for group in shape.groups:
        a = group.layer.attention
        valid = [
            d
            for d in _divisors(a.heads)
            if (a.kv_heads % d == 0 or d % a.kv_heads == 0) and plan.seq_len % d == 0
        ]
        if plan.cp not in valid:
            raise PlanError(
                f"--cp {plan.cp} with --strategy {plan.strategy} is Ulysses: it must divide the {a.heads} "
                f"attention heads of {shape.name} and --seq-len {plan.seq_len}, and divide or be a multiple "
                f"of the {a.kv_heads} KV heads: {_one_of(_fitting(valid, plan.gpus, plan.tp * plan.pp))}"
            )


def warnings(mesh: Mesh, plan: Plan, nvlink: bool) -> tuple[tuple[str, str], ...]:
    """(code, text) of what is possible but known to hurt or not launchable from here."""
    found = []
    if mesh.tp_spans_nodes:
        text = (
            f"tp {mesh.tp} is wider than a node of {mesh.gpus_per_node} GPUs: every layer's all-reduces "
            f"cross the network"
        )
        found.append(("tp-across-nodes", text))
    elif mesh.tp > 1 and not nvlink:
        text = f"tp {mesh.tp} over PCIe: four all-reduces a layer, not recommended without NVLink"
        found.append(("tp-over-pcie", text))
    if mesh.pp > 1 or plan.strategy is Strategy.MEGATRON:
        what = "pipeline parallelism" if mesh.pp > 1 else "Megatron's optimizer"
        both = " with expert parallelism" if mesh.pp > 1 and mesh.ep > 1 else ""
        text = f"{what}{both} is planned here, not launched: it needs a Megatron-style framework"
        found.append(("planned-only", text))
    return tuple(found)


def _tensor_cuts(plan: Plan, shape: ModelShape) -> list[tuple[str, int]]:
    """What tensor parallelism cuts, in words, and how many there are of it."""
    cut = []
    for group in shape.groups:
        layer = group.layer
        cut.append(("attention heads", layer.attention.heads))
        if not layer.attention.is_mla:
            cut.append(("KV heads", layer.attention.kv_heads))
        if layer.ffn_width:
            cut.append(("FFN width", layer.ffn_width))
        if layer.moe is not None and plan.ep == 1:
            cut.append(("expert width", layer.moe.expert_width))
    if plan.strategy is not Strategy.MEGATRON:  # Megatron pads the vocabulary to a multiple
        cut.append(("vocabulary", shape.vocab))
    return [(what, size) for what, size in cut if size]


def _tensor_degrees(plan: Plan, shape: ModelShape) -> list[int]:
    """Every tensor-parallel degree that the model can be cut by."""
    cut = _tensor_cuts(plan, shape)
    return [d for d in _divisors(cut[0][1]) if all(size % d == 0 for _, size in cut)]


def _pipeline_degrees(plan: Plan, shape: ModelShape) -> list[int]:
    """Every number of stages of equal depth, embedding and head counted as a layer each where that divides
    (Llama 405B: 126 + 2; Megatron's `account_for_embedding_in_pipeline_split`, torchtitan's input and output
    weight). Interleaved schedules cut at any layer (torchtitan gives the first chunks one layer more), so
    only their number is bounded."""
    layers = shape.layers
    if plan.pp_schedule is PipelineSchedule.INTERLEAVED:
        return list(range(1, layers // plan.virtual_stages + 1))
    return [d for d in range(1, layers + 1) if layers % d == 0 or (layers + 2) % d == 0]


def _check_tensor_parallel(plan: Plan, shape: ModelShape) -> None:
    for what, size in _tensor_cuts(plan, shape):
        if size % plan.tp:
            valid = _fitting(_tensor_degrees(plan, shape), plan.gpus, plan.cp * plan.pp)
            raise PlanError(f"--tp {plan.tp} must divide the {size} {what} of {shape.name}: {_one_of(valid)}")


def _check_pipeline(plan: Plan, shape: ModelShape) -> None:
    valid = _pipeline_degrees(plan, shape)
    if plan.pp in valid:
        return
    fitting = _fitting(valid, plan.gpus, plan.cp * plan.tp)
    if plan.pp_schedule is PipelineSchedule.INTERLEAVED:
        stages = plan.pp * plan.virtual_stages
        raise PlanError(
            f"--pp {plan.pp} makes {stages} stages of the {shape.layers} layers of {shape.name}: "
            f"{_one_of(fitting)} with --virtual-stages {plan.virtual_stages}"
        )
    raise PlanError(
        f"--pp {plan.pp} must divide the {shape.layers} layers of {shape.name}: one of "
        f"{_listed(_divisors(shape.layers))} (on {plan.gpus} GPUs {_one_of(fitting)})"
    )


def _fitting(degrees: list[int], gpus: int, taken: int) -> list[int]:
    """Of these degrees, those that also divide the GPUs which the other factors leave."""
    left = gpus // taken if gpus % taken == 0 else gpus
    return [d for d in degrees if left % d == 0]


def _replicas_over_nodes(plan: Plan, data_parallel: int) -> int:
    """One replica a node, as far as the data-parallel ranks allow."""
    nodes = -(-plan.gpus // plan.gpus_per_node)
    return next(n for n in range(min(nodes, data_parallel), 0, -1) if data_parallel % n == 0)


def _blame(world: int, replicate: int, cp: int, tp: int, pp: int) -> str:
    """The first factor that does not divide what is left, with the values that would."""
    left = world
    for name, value in (("replicate", replicate), ("tp", tp), ("cp", cp), ("pp", pp)):
        if left % value:
            return f"--{name} must be one of {_listed(_divisors(left))}"
        left //= value
    return "one of the factors must be smaller"


def _blame_model_parallel(plan: Plan, shape: ModelShape | None) -> str:
    """As `_blame`, of the degrees that the model can be cut by as well."""
    left = plan.gpus
    for name, value in (("tp", plan.tp), ("cp", plan.cp), ("pp", plan.pp)):
        if left % value == 0:
            left //= value
            continue
        valid = _divisors(left)
        if shape is not None and name != "cp":
            cuts = _tensor_degrees(plan, shape) if name == "tp" else _pipeline_degrees(plan, shape)
            valid = [degree for degree in valid if degree in cuts]
        return f"--{name} must be {_one_of(valid)}"
    return "one of the factors must be smaller"


def _divisors(n: int) -> list[int]:
    small = [d for d in range(1, int(n**0.5) + 1) if n % d == 0]
    return sorted({*small, *(n // d for d in small)})


def _listed(values: list[int]) -> str:
    if len(values) <= 16:
        return ", ".join(map(str, values))
    return ", ".join([*map(str, values[:15]), "…", str(values[-1])])


def _one_of(values: list[int]) -> str:
    return f"one of {_listed(values)}" if len(values) > 1 else f"{values[0]}" if values else "1"
