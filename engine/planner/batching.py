"""What rows of samples of unequal length come to: tokens processed, tokens that train, how far they attend.

Memory is planned for a micro-batch of full rows, which the longest samples make; time for the mean one.
"""

from __future__ import annotations

import msgspec

from ftdash.engine.plan import Attention, Batching, Plan


class Rows(msgspec.Struct, frozen=True):
    """The mean micro-batch of one data-parallel rank, before context parallelism cuts it."""

    processed: float  # tokens, padding included
    useful_share: float  # of them, tokens of samples
    attended: float  # positions that a token's row or sample has


def rows_of(plan: Plan) -> Rows:
    """From the mean length of the samples, `--mean-len`; without one every row is full.

    Packed: whole samples of equal length in rows of --seq-len, where mixed lengths leave smaller gaps
    (arXiv 2404.10830). With FlashAttention's variable-length kernels a token attends to its own sample
    (position ids, trl's padding_free), with a mask the whole row is computed. Longest: rows as long as the
    longest sample of the micro-batch, the mean maximum of exponential lengths: an assumption.
    """
    full, count = float(plan.seq_len), plan.micro_batch
    if plan.mean_len is None:
        return Rows(count * full, 1.0, full)
    mean = float(plan.mean_len)
    varlen = plan.attention is Attention.FLASH
    match plan.batching:
        case Batching.PACKED:
            fill = full // mean * mean / full
            return Rows(count * full, fill, mean if varlen else full)
        case Batching.PADDED:
            return Rows(count * full, mean / full, full)
        case Batching.LONGEST:
            longest = min(full, mean * sum(1 / k for k in range(1, min(count, 1000) + 1)))
            return Rows(count * longest, mean / longest, longest)
        case _:
            return Rows(count * mean, 1.0, mean if varlen else count * mean)


def needs_mask(plan: Plan) -> bool:
    """Whether attention is given a mask: rows that hold padding or several samples, without kernels for
    variable lengths (transformers, masking_utils.py)."""
    return plan.mean_len is not None and plan.attention is Attention.SDPA
