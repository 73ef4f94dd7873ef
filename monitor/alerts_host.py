"""Alerts about the processors that ranks may use."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ftdash.monitor.state import Alert, RankPhase, RankState, RunState
from ftdash.monitor.wording import rank_list


def processor_alerts(state: RunState, history: Any, limits: Any) -> Iterator[Alert]:
    """Ranks whose loader workers and OpenMP threads share fewer processors than they are.

    Slurm from 22.05 on does not hand sbatch's --cpus-per-task on to srun, and every task is then pinned to
    one core (SchedMD's release notes; snakemake/snakemake-executor-plugin-slurm#41).
    """
    crowded = [rank for rank in state.ranks if rank.state is not RankPhase.DEAD and _crowded(rank)]
    if not crowded:
        return
    worst = min(crowded, key=lambda rank: (rank.cpus_allowed / (rank.loader_workers + 1), rank.rank))
    parts = []
    if worst.loader_workers:
        parts.append(f"{worst.loader_workers} loader worker{'s' * (worst.loader_workers > 1)}")
    if worst.omp_threads > worst.cpus_allowed:
        parts.append(f"{worst.omp_threads} OpenMP threads")
    cores = f"{worst.cpus_allowed} processor{'s' * (worst.cpus_allowed > 1)}"
    text = (
        f"{rank_list([rank.rank for rank in crowded])}: rank {worst.rank} may use {cores} for itself and "
        f"{' and '.join(parts)}; under Slurm: srun --cpus-per-task=N"
    )
    yield Alert("cpus-crowded", "warning", text, tuple(rank.rank for rank in crowded))


def _crowded(rank: RankState) -> bool:
    """Two processes or more for each processor, or a team of threads that cannot run at once."""
    if not rank.cpus_allowed:
        return False
    processes = rank.loader_workers + 1
    return (processes > 1 and processes >= 2 * rank.cpus_allowed) or rank.omp_threads > rank.cpus_allowed
