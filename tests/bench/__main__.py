"""Runs every benchmark in a process of its own, so that none warms or burdens another."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def main(wanted: list[str]) -> int:
    """Run the benchmarks whose names contain one of `wanted` (all without any). Exit 1 when one fails."""
    failed = []
    for path in sorted(Path(__file__).parent.glob("bench_*.py")):
        if wanted and not any(word in path.stem for word in wanted):
            continue
        print(f"{path.stem.removeprefix('bench_')}", flush=True)
        if subprocess.run([sys.executable, "-m", f"tests.bench.{path.stem}"], check=False).returncode:
            failed.append(path.stem)
        print(flush=True)
    if failed:
        print(f"failed: {', '.join(failed)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
