"""One real two-node Slurm for all tests of this folder, and the ftdash command that talks to it."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.slurm.cluster import Cluster, why_not


class Site:
    """A cluster with a shared home for ftdash; commands run as a user on the login node would run them."""

    def __init__(self, cluster: Cluster, home: Path) -> None:
        self.cluster = cluster
        self.home = home
        self.env = {**cluster.env, "FTDASH_HOME": str(home), "OMP_NUM_THREADS": "1"}

    def ftdash(
        self, *words: str, check: bool = True, timeout_s: float = 120
    ) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            [sys.executable, "-m", "ftdash.tui.cli", *words],
            env=self.env,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
        if check and done.returncode:
            raise AssertionError(
                f"ftdash {' '.join(words)} exited {done.returncode}\n{done.stdout}{done.stderr}"
            )
        return done

    @contextlib.contextmanager
    def start(self, *words: str) -> Iterator[subprocess.Popen[str]]:
        """The command while it runs, its output in a pipe; ended with SIGTERM when the block did not."""
        command = [sys.executable, "-m", "ftdash.tui.cli", *words]
        process = subprocess.Popen(command, env=self.env, stdout=subprocess.PIPE, text=True)
        try:
            yield process
        finally:
            if process.poll() is None:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(5)
                process.terminate()
            process.communicate(timeout=30)

    def launch(self, *words: str) -> tuple[str, Path]:
        """Submit the tiny model on two nodes, one CPU rank each; run id and directory."""
        plan = [
            "--model",
            "tiny-qwen3",
            "--gpus",
            "2",
            "--nodes",
            "2",
            "--strategy",
            "ddp",
            "--seq-len",
            "128",
        ]
        where = ["--backend", "slurm", "--device", "cpu", "--cpus-per-task", "2", "--json"]
        answer = json.loads(self.ftdash("launch", *plan, *where, *words).stdout)
        return answer["run"], Path(answer["dir"])

    def status(self, run: str) -> dict[str, Any]:
        return json.loads(self.ftdash("status", run, "--json").stdout)

    def wait(
        self, run: str, what: str, ready: Callable[[dict[str, Any]], bool], timeout_s: float = 150
    ) -> dict[str, Any]:
        """The first status that is `ready`; a run that fails meanwhile fails the test with its logs."""
        end = time.monotonic() + timeout_s
        while True:
            status = self.status(run)
            if ready(status):
                return status
            if time.monotonic() > end or status["state"] == "failed":
                logs = self.home / "runs" / run / "logs"
                words = "\n".join(
                    path.read_text(errors="replace")[-1500:] for path in sorted(logs.glob("*.*"))
                )
                raise AssertionError(f"{what}: {json.dumps(status)[:2000]}\n{words}")
            time.sleep(0.5)

    def both_at_step(self, run: str, step: int) -> dict[str, Any]:
        return self.wait(
            run,
            f"both ranks at step {step}",
            lambda status: (
                len(status["ranks"]) == 2 and all(rank["step"] >= step for rank in status["ranks"])
            ),
        )


@pytest.fixture(scope="module")
def site() -> Iterator[Site]:
    if reason := why_not():
        pytest.skip(f"no Slurm: {reason}")
    # outside pytest's own folders: munge wants a path that everybody may enter
    with tempfile.TemporaryDirectory(prefix="ftdash-slurm-") as name:
        base = Path(name)
        base.chmod(0o755)
        with Cluster(base / "cluster") as cluster:
            yield Site(cluster, base / "home")
