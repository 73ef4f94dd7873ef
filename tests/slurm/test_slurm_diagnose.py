"""The Diagnose pane on a real Slurm: the culprit's node is left out of the job's next try."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ftdash.monitor.diagnosis.model import Culprit, Diagnosis, Sample, Verdict
from ftdash.monitor.rundir import RunDir
from ftdash.tui.examine import Examined, Look
from ftdash.tui.panes.diagnose import DiagnosePane
from tests.slurm.conftest import Site
from tests.support.screens import cockpit, screen_text, until

pytestmark = [
    pytest.mark.slow,
    pytest.mark.slurm,
    pytest.mark.timeout(600),
    pytest.mark.xdist_group("slurm"),
]


async def test_the_job_goes_on_without_the_culprits_node_after_one_key_and_the_words(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("SLURM_CONF", "FTDASH_HOME"):
        monkeypatch.setenv(name, site.env[name])
    plan = ["--model", "tiny-qwen3", "--gpus", "1", "--strategy", "none", "--seq-len", "128"]
    where = ["--backend", "slurm", "--device", "cpu", "--steps", "100000", "--save-steps", "2", "--json"]
    first = json.loads(site.ftdash("launch", *plan, *where).stdout)
    status = site.wait(first["run"], "a step", lambda status: (status["step"] or 0) > 2)
    guilty = status["ranks"][0]
    verdict = Verdict("d-state", (Culprit(0, guilty["host"], guilty["pid"]),), 0.9, "it sleeps in the kernel")
    found = Look(Diagnosis(verdict), (Sample(),))
    old = RunDir(first["dir"])
    async with cockpit(site.home, pane="diagnose", run=old) as (app, pilot):
        pane = app.query_one(DiagnosePane)
        await until(pilot, lambda: pane.run_state is not None and bool(pane.run_state.ranks))
        pane.post_message(Examined(found))
        await until(pilot, lambda: pane.look is found)
        await pilot.press("k", "x")
        await until(pilot, lambda: f"type exclude {guilty['host']}" in screen_text(app))
        await pilot.press(*f"exclude {guilty['host']}", "enter")
        await until(pilot, lambda: app.feed is not None and app.feed.run.path != old.path, 120)
        assert app.feed is not None
        again = app.feed.run
    assert site.status(first["run"])["state"] == "stopped"
    status = site.wait(again.run_id, "a step elsewhere", lambda status: (status["step"] or 0) > 0)
    assert {rank["host"] for rank in status["ranks"]} == {"node0", "node1"} - {guilty["host"]}
    first_step = next(
        record["step"]
        for line in (again.telemetry / "rank-0.jsonl").read_text().splitlines()
        if (record := json.loads(line))["kind"] == "step"
    )
    source = json.loads((again.config / "meeting.json").read_text())["resume"]
    assert Path(source).name == f"checkpoint-{first_step - 1}"
    site.ftdash("stop", again.run_id, "--grace", "2")
