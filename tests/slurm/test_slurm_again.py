"""A run goes on as a new job without the node that failed, on a real Slurm."""

from __future__ import annotations

import json

import pytest

from ftdash.engine.slurm.submit import resubmit
from ftdash.monitor.rundir import RunDir
from tests.slurm.conftest import Site

pytestmark = [
    pytest.mark.slow,
    pytest.mark.slurm,
    pytest.mark.timeout(600),
    pytest.mark.xdist_group("slurm"),
]


def test_a_run_goes_on_without_the_node_that_is_excluded(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_CONF", site.env["SLURM_CONF"])
    plan = ["--model", "tiny-qwen3", "--gpus", "1", "--strategy", "none", "--seq-len", "128"]
    where = ["--backend", "slurm", "--device", "cpu", "--steps", "100000", "--json"]
    first = json.loads(site.ftdash("launch", *plan, *where).stdout)
    status = site.wait(first["run"], "a step", lambda status: (status["step"] or 0) > 2)
    node = status["ranks"][0]["host"]
    site.ftdash("stop", first["run"], "--save", "--grace", "5")
    saved = site.status(first["run"])["step"]
    again = resubmit(RunDir(first["dir"]), exclude=[node])
    status = site.wait(again.run_id, "steps elsewhere", lambda status: (status["step"] or 0) > saved)
    assert {rank["host"] for rank in status["ranks"]} == {"node0", "node1"} - {node}
    first_step = next(
        record["step"]
        for line in (again.telemetry / "rank-0.jsonl").read_text().splitlines()
        if (record := json.loads(line))["kind"] == "step"
    )
    assert first_step == saved + 1
    site.ftdash("stop", again.run_id, "--grace", "2")
