"""Checks that need the model's shape: tensor and expert parallel sizes, tied embeddings."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from ftdash.engine.check.bundle import Bundle
from ftdash.engine.check.documents import Kind, Sourced
from ftdash.engine.check.findings import Finding, error, note, warning
from ftdash.engine.check.registry import check
from ftdash.engine.check.rules_accelerate import mesh_findings

_AXES = ("tp_size", "fsdp_size", "dp_replicate_size", "pp_size", "ep_size")


def _parallel(bundle: Bundle, *names: str) -> Iterator[Sourced]:
    """Every size that one of `names` sets, in calls, YAML and plans."""
    for document, _, call in bundle.script_calls():
        if call.last in ("DistributedConfig", "ParallelismConfig", "from_pretrained"):
            for name in names:
                if isinstance(call.kwargs.get(name), int):
                    yield Sourced(call.kwargs[name], document.at(call.line))
    for document in bundle.documents:
        for name in names:
            for keys in (
                (name,),
                ("parallelism_config", f"parallelism_config_{name}"),
                ("parallelism_config", name),
            ):
                found = document.get(*keys)
                if found and isinstance(found.value, int) and document.kind is not Kind.PLAN:
                    yield found


@check
def heads_and_tensor_parallel(bundle: Bundle) -> Iterator[Finding]:
    """TP cuts attention by heads and KV heads; what does not divide fails in forward (transformers#48307)."""
    if bundle.model is None:
        return
    shape, named_at = bundle.model
    for size in _parallel(bundle, "tp_size", "tensor_parallel_size"):
        if size.value < 2:
            continue
        for group in shape.groups:
            attention = group.layer.attention
            counts = [("attention heads", attention.heads)]
            if not attention.is_mla:
                counts.append(("KV heads", attention.kv_heads))
            bad = next(((what, count) for what, count in counts if count % size.value), None)
            if bad:
                valid = [
                    d for d in range(1, min(c for _, c in counts) + 1) if not any(c % d for _, c in counts)
                ]
                yield error(
                    "tp-heads",
                    size.where,
                    f"tp {size.value} does not divide the {bad[1]} {bad[0]} of {shape.name} ({named_at})",
                    f"a tensor-parallel size of {', '.join(map(str, valid))}",
                )
                break


@check
def experts_and_expert_parallel(bundle: Bundle) -> Iterator[Finding]:
    if bundle.model is None:
        return
    shape = bundle.model[0]
    experts = {group.layer.moe.experts for group in shape.groups if group.layer.moe}
    for size in _parallel(bundle, "ep_size", "expert_parallel_size"):
        if size.value < 2:
            continue
        if not experts:
            yield error(
                "ep-experts",
                size.where,
                f"ep {size.value}: {shape.name} has no experts",
                "remove expert parallelism",
            )
        for count in experts:
            if count % size.value:
                yield error(
                    "ep-experts",
                    size.where,
                    f"ep {size.value} does not divide the {count} experts of {shape.name}",
                    "an expert-parallel size that divides them",
                )


@check
def distributed_config_mesh(bundle: Bundle) -> Iterator[Finding]:
    """Rules of transformers' DistributedConfig: products, and what ep may borrow."""
    for document, _, call in bundle.script_calls():
        where = document.at(call.line)
        if call.last == "DistributedConfig":
            yield from _distributed_config(bundle, call.kwargs, where)
        elif call.last == "ParallelismConfig":
            sizes = {
                key.removesuffix("_size"): value
                for key, value in call.kwargs.items()
                if key.endswith("_size") and isinstance(value, int)
            }
            yield from mesh_findings(sizes, bundle.world.value if bundle.world else None, where)


def _distributed_config(bundle: Bundle, kwargs: dict[str, Any], where: str) -> Iterator[Finding]:
    if any(name in kwargs and not isinstance(kwargs[name], int | None) for name in _AXES):
        return
    size = {name: kwargs.get(name) or 1 for name in _AXES}
    tp, fsdp, replicate, pp, ep = (size[name] for name in _AXES)
    if kwargs.get("enable_expert_parallel") is True:
        yield warning(
            "expert-parallel-flag",
            where,
            "enable_expert_parallel is deprecated, and gone from transformers 5.21",
            "ep_size=N",
        )
    if ep > 1 and ep % tp:
        yield error(
            "mesh-ep", where, f"ep_size {ep} is not a multiple of tp_size {tp}", "a multiple of tp_size"
        )
    elif ep > 1 and (fsdp * tp) % ep:
        yield error(
            "mesh-ep",
            where,
            f"ep_size {ep} does not divide fsdp_size {fsdp} x tp_size {tp} = {fsdp * tp}",
            f"set fsdp_size so that fsdp_size x tp_size is a multiple of {ep}",
        )
    if pp > 1 and (fsdp > 1 or replicate > 1):
        yield error(
            "mesh-pp",
            where,
            f"pp_size {pp} with fsdp_size {fsdp} x dp_replicate_size {replicate}: transformers refuses the "
            "pair",
            "combine pipeline stages with tp_size only",
        )
    if pp > 1 and ep > 1:
        yield error(
            "mesh-pp",
            where,
            f"pp_size {pp} with ep_size {ep}: transformers refuses expert dispatch under pipeline stages",
            "drop one of the two",
        )
    world = bundle.world
    product = tp * fsdp * replicate * pp
    derived = kwargs.get("tp_size") is None and kwargs.get("tp_plan") is not None
    if world and (world.value % product if derived else world.value != product):
        yield error(
            "mesh-product",
            where,
            f"tp {tp} x fsdp {fsdp} x replicate {replicate} x pp {pp} = {product}, but {world.value} "
            "processes are "
            f"started ({world.where})",
            "make the product of all axes equal to the number of processes",
        )


_AXOLOTL_AXES = ("dp_replicate_size", "dp_shard_size", "tensor_parallel_size", "context_parallel_size")


@check
def axolotl_product(bundle: Bundle) -> Iterator[Finding]:
    """The product of Axolotl's axes is the world size, once the shard axis is named."""
    for document in bundle.of(Kind.AXOLOTL):
        given = {
            name: document.data[name] for name in _AXOLOTL_AXES if isinstance(document.data.get(name), int)
        }
        world = bundle.world
        if "dp_shard_size" not in given or world is None:
            continue
        product = math.prod(given.values())
        if product != world.value:
            named = " x ".join(f"{name} {size}" for name, size in given.items())
            yield error(
                "mesh-product",
                document.where("dp_shard_size"),
                f"{named} = {product}, but {world.value} processes are started ({world.where})",
                "make the product of all axes equal to the number of processes",
            )


@check
def axolotl_mesh(bundle: Bundle) -> Iterator[Finding]:
    """Axolotl's expert_parallel_size wants FSDP2 and refuses tensor parallelism."""
    for document in bundle.of(Kind.AXOLOTL):
        expert = document.get("expert_parallel_size")
        if expert is None or not isinstance(expert.value, int) or expert.value < 2:
            continue
        tensor = document.get("tensor_parallel_size")
        if tensor and isinstance(tensor.value, int) and tensor.value > 1:
            yield error(
                "mesh-ep",
                expert.where,
                f"expert_parallel_size {expert.value} with tensor_parallel_size {tensor.value}: Axolotl "
                "refuses it",
                "drop one of the two",
            )
        if bundle.backend is not None and bundle.backend.name != "fsdp2":
            yield error(
                "mesh-ep",
                expert.where,
                f"expert_parallel_size {expert.value} needs FSDP2",
                "set fsdp_version: 2 and fsdp_config",
            )


@check
def tied_embeddings(bundle: Bundle) -> Iterator[Finding]:
    """torch 2.13 refuses a parameter in two FSDP2 groups; accelerate 1.15 mends it (accelerate#4171)."""
    backend, model = bundle.backend, bundle.model
    if backend is None or backend.name != "fsdp2" or model is None or not model[0].tied_embeddings:
        return
    shape, named_at = model
    torch, accelerate = bundle.versions.get("torch"), bundle.versions.get("accelerate")
    new_torch = torch is not None and not bundle.older("torch", "2.13")
    old_accelerate = bundle.older("accelerate", "1.15")
    policy = bundle.fsdp_option("auto_wrap_policy")
    fix = "accelerate>=1.15, with TRANSFORMER_BASED_WRAP and the decoder layer class"
    if new_torch and (old_accelerate or (policy and str(policy.value).upper() == "NO_WRAP")):
        yield error(
            "tied-embeddings-fsdp2",
            old_accelerate.where if old_accelerate else backend.where,
            f"{shape.name} ties its embeddings ({named_at}), and torch {torch.value if torch else ''} "
            "refuses "
            "a parameter shared by two FSDP groups",
            fix,
        )
    elif old_accelerate and torch is None:
        yield warning(
            "tied-embeddings-fsdp2",
            old_accelerate.where,
            f"{shape.name} ties its embeddings ({named_at}): with torch 2.13 or newer accelerate "
            f"{old_accelerate.value} fails at the first forward",
            fix,
        )
    elif accelerate is None and not new_torch and torch is None:
        yield note(
            "tied-embeddings-fsdp2",
            backend.where,
            f"{shape.name} ties its embeddings ({named_at}): torch 2.13 with accelerate below 1.15 fails "
            "under FSDP2",
            fix,
        )


@check
def logits(bundle: Bundle) -> Iterator[Finding]:
    """A plain loss holds 2 bytes of bf16, 4 of fp32 and 4 of gradient a token and entry (ms-swift#6966)."""
    if bundle.model is None:
        return
    length = bundle.argument("max_length", "max_seq_length", "sequence_len", "cutoff_len")
    micro = bundle.argument("per_device_train_batch_size", "micro_batch_size")
    if length is None or not isinstance(length.value, int):
        return
    fused = bundle.argument(
        "use_liger_kernel", "use_liger", "enable_liger_kernel", "liger_fused_linear_cross_entropy"
    )
    fused = fused or bundle.argument("cut_cross_entropy", "chunked_cross_entropy", "loss_type")
    samples = micro.value if micro and isinstance(micro.value, int) else 1
    size = 10 * length.value * samples * bundle.model[0].vocab
    if fused is None and size > 16 * 2**30:
        yield note(
            "logits-memory",
            length.where,
            f"{samples} x {length.value:,} tokens x {bundle.model[0].vocab:,} vocabulary: "
            f"{size / 2**30:.0f} GiB of "
            "logits on each GPU with a plain loss, which no sharding divides",
            "a fused or chunked loss (use_liger_kernel=True), or context parallelism",
        )
