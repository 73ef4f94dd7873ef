"""The truth of each script: who holds the job up, in which line, and what a right answer may call it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).parent


@dataclass(frozen=True)
class Case:
    """`culprits` is empty where nothing hangs; `line` is the text of the culprit's line in the script.

    `kinds` names the verdicts that fit. The first truth said it in words ("a lock, or outside the
    collective"); the names were put in after the first score, which was counted against the words.
    """

    script: str
    world: int
    kinds: str
    culprits: frozenset[int] = frozenset()
    function: str = ""
    line: str = ""

    @property
    def path(self) -> Path:
        return FOLDER / f"{self.script}.py"

    @property
    def frame(self) -> tuple[str, str]:
        """Function and file:line of the culprit; the line's text stands once in the function."""
        lines = self.path.read_text().splitlines()
        start = next(n for n, text in enumerate(lines) if text.strip().startswith(f"def {self.function}("))
        number = next(n for n in range(start, len(lines)) if self.line in lines[n])
        return self.function, f"{self.path.name}:{number + 1}"


def _rank(*ranks: int) -> frozenset[int]:
    return frozenset(ranks)


CASES = (
    Case("early_stop", 3, "collective-mismatch phase-mismatch", _rank(1), "finish", "dist.barrier()"),
    Case(
        "log_gather",
        3,
        "collective-mismatch",
        _rank(0),
        "log_throughput",
        "dist.gather(",
    ),
    Case(
        "short_sampler",
        3,
        "collective-mismatch phase-mismatch",
        _rank(2),
        "validate",
        "dist.all_gather_object(",
    ),
    Case(
        "prefetch_lock",
        3,
        "lock rank-outside-collective",
        _rank(1),
        "next_batch",
        "with self.buffer_lock:",
    ),
    Case(
        "pool_killed",
        2,
        "data-loader rank-outside-collective",
        _rank(0),
        "prepare_dataset",
        "pool.map(",
    ),
    Case(
        "upload",
        3,
        "rank-outside-collective",
        _rank(0),
        "upload",
        "subprocess.run(",
    ),
    Case(
        "wrong_source",
        3,
        "collective-mismatch order-mismatch",
        _rank(1),
        "share_config",
        "dist.broadcast_object_list(",
    ),
    Case("cache_lock", 3, "lock storage rank-outside-collective", _rank(0), "load_cached", "fcntl.flock("),
    Case(
        "token_server",
        2,
        "data-loader rank-outside-collective",
        _rank(1),
        "encode",
        "self.connection.recv(",
    ),
    Case(
        "swallowed",
        3,
        "teardown rank-outside-collective",
        _rank(2),
        "run",
        "self.pending.get()",
    ),
    Case(
        "metric_order",
        3,
        "collective-mismatch order-mismatch",
        _rank(1),
        "collect_lengths",
        "dist.all_gather(",
    ),
    Case("ready_flag", 2, "rank-outside-collective", _rank(1), "wait_for_shards", "time.sleep("),
    Case("slow_tokenize", 2, "slow"),
    Case("slow_save", 2, "slow"),
    Case("compiling", 2, "slow"),
    Case("long_eval", 2, "slow healthy"),
    Case("healthy", 3, "healthy"),
    Case("straggler", 3, "slow healthy"),
)
