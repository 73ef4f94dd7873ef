"""Two nodes of a real Slurm lose their shared file system for a minute: nothing dies, no step is lost."""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from ftdash.monitor import procs
from tests.slurm import cluster
from tests.slurm.conftest import Site
from tests.support import hanging

pytestmark = [
    pytest.mark.slow,
    pytest.mark.slurm,
    pytest.mark.timeout(600),
    pytest.mark.xdist_group("slurm"),
    pytest.mark.skipif(bool(hanging.why_not()), reason=hanging.why_not()),
]
OUTAGE_S = 60.0


@pytest.fixture
def shared_site() -> Iterator[tuple[Site, hanging.HangingFileSystem]]:
    if reason := cluster.why_not():
        pytest.skip(f"no Slurm: {reason}")
    with tempfile.TemporaryDirectory(prefix="ftdash-slurm-") as name:
        base = Path(name)
        base.chmod(0o755)
        with (
            hanging.hanging_file_system(base) as shared,
            cluster.Cluster(base / "cluster") as slurm,  # its nodes inherit what is mounted by now
        ):
            yield Site(slurm, shared.place / "home"), shared


def test_a_minute_without_the_shared_file_system_costs_no_step_and_no_process(
    shared_site: tuple[Site, hanging.HangingFileSystem],
) -> None:
    site, shared = shared_site
    run, folder = site.launch("--steps", "100000", "--no-requeue")
    site.both_at_step(run, 3)
    members = procs.pids_of_run(folder)
    agents = procs.pids_of_run(folder, procs.AGENT_ENV)
    assert len(agents) == 2
    shared.hang(rescue_s=3 * OUTAGE_S)
    time.sleep(OUTAGE_S)
    shared.resume()
    assert not shared.rescued
    assert all(procs.alive(pid) for pid in members | agents)
    step = site.status(run)["step"]
    status = site.both_at_step(run, step + 3)
    assert status["state"] == "running"
    assert not [alert for alert in status["alerts"] if alert["code"] == "telemetry-dropped"]
    site.ftdash("stop", run, "--grace", "5")
    for rank in (0, 1):
        lines = (folder / "telemetry" / f"rank-{rank}.jsonl").read_text().splitlines()
        steps = [record["step"] for line in lines if (record := json.loads(line))["kind"] == "step"]
        assert steps == list(range(1, len(steps) + 1))
        assert len(steps) > step
    assert not [pid for pid in members | agents if os.path.exists(f"/proc/{pid}") and procs.alive(pid)]
