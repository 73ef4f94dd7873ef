"""`--smoke`: proves with real gloo processes that a distributed step has the gradient of the whole batch.

Four identities, in float64, each between real collectives and a computation in one process: averaged
gradients of equal shards (DDP); global normalisation when ranks hold different numbers of loss tokens, over
several micro-batches; the same through FSDP2's sharded gradients; reduce-scatter of padded gradients.
"""

from __future__ import annotations

import os
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

WORLD = 2
VOCAB, WIDTH, LENGTH, ROWS = 11, 6, 7, 4
IGNORED = -100
TOLERANCE = 1e-12


def run(world: int = WORLD) -> int:
    """Run the proofs and print them; 0 when all hold, 1 with the reason otherwise."""
    import torch.multiprocessing as processes

    with tempfile.TemporaryDirectory(prefix="ftdash-smoke-") as folder:
        try:
            processes.spawn(_rank, args=(world, folder), nprocs=world, join=True)
        except (processes.ProcessExitedException, processes.ProcessRaisedException) as error:
            reason = str(error).strip().splitlines()[-1]
            print(f"smoke failed: {reason}", file=sys.stderr, flush=True)
            return 1
        proofs = (Path(folder) / "proved").read_text().splitlines()
    for proof in proofs:
        print(f"proved: {proof}")
    print(f"smoke: {len(proofs)} of {len(PROOFS)} proved with {world} gloo processes", flush=True)
    return 0 if len(proofs) == len(PROOFS) else 1


def _rank(rank: int, world: int, folder: str) -> None:
    import torch.distributed as dist

    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank))
    # fully_shard warns of in-place changes to a layer's output; this model makes none.
    warnings.filterwarnings("ignore", category=UserWarning, module=r"torch\.distributed\.fsdp")
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world)
    lines = [prove(rank, world) for prove in PROOFS]
    if rank == 0:
        (Path(folder) / "proved").write_text("\n".join(lines))
    dist.barrier()  # nobody takes the group down while another still talks
    dist.destroy_process_group()
    sys.stdout.flush()
    # Torch's threads can abort an interpreter that shuts down ("terminate called without an active
    # exception"); that would say nothing about what was proved.
    os._exit(0)


def _model() -> Any:
    """A next-token predictor in float64, the same on every rank."""
    import torch
    from torch import nn

    torch.manual_seed(10)
    return nn.Sequential(
        nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, VOCAB)
    ).double()


def _batch(world: int, even: bool) -> tuple[Any, Any]:
    """(rows of all ranks, length) ids and labels; uneven ones keep ever fewer labels towards the last row."""
    import torch

    generator = torch.Generator().manual_seed(20)
    rows = world * ROWS
    ids = torch.randint(VOCAB, (rows, LENGTH), generator=generator)
    labels = torch.randint(VOCAB, (rows, LENGTH), generator=generator)
    if not even:
        for row in range(rows):
            labels[row, max(1, LENGTH - row) :] = IGNORED
    return ids, labels


def _sum_loss(model: Any, ids: Any, labels: Any) -> Any:
    import torch.nn.functional as functional

    flat = model(ids).flatten(0, 1)
    return functional.cross_entropy(flat, labels.flatten(), ignore_index=IGNORED, reduction="sum")


def _mine(rank: int, tensor: Any) -> Any:
    return tensor[rank * ROWS : (rank + 1) * ROWS]


def _gradients(model: Any) -> list[Any]:
    return [parameter.grad for parameter in model.parameters()]


def _whole_batch(ids: Any, labels: Any) -> list[Any]:
    """The gradient of the mean loss over the whole batch, in one process."""
    model = _model()
    (_sum_loss(model, ids, labels) / (labels != IGNORED).sum()).backward()
    return _gradients(model)


def _difference(left: list[Any], right: list[Any]) -> float:
    return max(float((a - b).abs().max()) for a, b in zip(left, right, strict=True))


def _hold(difference: float, what: str) -> None:
    import torch
    import torch.distributed as dist

    worst = torch.tensor([difference], dtype=torch.float64)
    dist.all_reduce(worst, op=dist.ReduceOp.MAX)
    if not worst.item() <= TOLERANCE:
        raise AssertionError(f"{what}: gradients differ by {worst.item():.3g}")


def _averaged_gradients(rank: int, world: int) -> str:
    from torch.nn.parallel import DistributedDataParallel

    ids, labels = _batch(world, even=True)
    model = DistributedDataParallel(_model())
    mine = _mine(rank, labels)
    (_sum_loss(model, _mine(rank, ids), mine) / mine.numel()).backward()
    _hold(_difference(_gradients(model.module), _whole_batch(ids, labels)), "averaged gradients")
    return f"the average of {world} ranks' mean-loss gradients (DDP) is the full-batch gradient"


def _accumulate(model: Any, rank: int, world: int, ids: Any, labels: Any) -> None:
    """Two micro-batches, their losses divided by the loss tokens of all ranks and times the ranks."""
    import torch.distributed as dist

    mine_ids, mine = _mine(rank, ids), _mine(rank, labels)
    total = (mine != IGNORED).sum()
    dist.all_reduce(total)
    half = ROWS // 2
    for part in (slice(0, half), slice(half, ROWS)):
        (_sum_loss(model, mine_ids[part], mine[part]) * world / total).backward()


def _global_normalisation(rank: int, world: int) -> str:
    from torch.nn.parallel import DistributedDataParallel

    ids, labels = _batch(world, even=False)
    whole = _whole_batch(ids, labels)
    counts = [int((_mine(other, labels) != IGNORED).sum()) for other in range(world)]
    model = DistributedDataParallel(_model())
    _accumulate(model, rank, world, ids, labels)
    _hold(_difference(_gradients(model.module), whole), "global normalisation")
    naive = DistributedDataParallel(_model())
    mine = _mine(rank, labels)
    (_sum_loss(naive, _mine(rank, ids), mine) / (mine != IGNORED).sum()).backward()
    wrong = _difference(_gradients(naive.module), whole)
    if wrong <= 1e-4:
        raise AssertionError("averaging per-rank means should differ on ranks with different token counts")
    return (
        f"with {' and '.join(map(str, counts))} loss tokens, dividing by the global number gives the "
        f"full-batch gradient; averaging per-rank means is off by {wrong:.2g}"
    )


def _sharded_gradients(rank: int, world: int) -> str:
    from torch.distributed.fsdp import fully_shard

    ids, labels = _batch(world, even=False)
    model = _model()
    for layer in model:
        if list(layer.parameters()):
            fully_shard(layer)
    fully_shard(model)
    _accumulate(model, rank, world, ids, labels)
    gathered = [gradient.full_tensor() for gradient in _gradients(model)]
    _hold(_difference(gathered, _whole_batch(ids, labels)), "FSDP2")
    shards = [gradient.to_local().shape[0] for gradient in _gradients(model)]
    share = f"{shards[0]} of {VOCAB} embedding rows"
    return f"FSDP2's sharded gradients (rank {rank} holds {share}) are the full-batch gradient"


def _padded_reduce_scatter(rank: int, world: int) -> str:
    import torch
    import torch.distributed as dist

    size = 10 if 10 % world else 10 + 1
    padding = -size % world
    generator = torch.Generator().manual_seed(30)
    everyone = torch.randn(world, size, dtype=torch.float64, generator=generator)
    padded = torch.cat([everyone[rank], everyone.new_zeros(padding)])
    shard = padded.new_empty((size + padding) // world)
    dist.reduce_scatter_single(shard, padded)
    summed = torch.cat([everyone.sum(0), everyone.new_zeros(padding)])
    _hold(float((shard - summed.chunk(world)[rank]).abs().max()), "reduce-scatter")
    return (
        f"reduce-scatter of {size} gradients padded to {size + padding} gives each rank its shard of the sum"
    )


PROOFS = (_averaged_gradients, _global_normalisation, _sharded_gradients, _padded_reduce_scatter)
