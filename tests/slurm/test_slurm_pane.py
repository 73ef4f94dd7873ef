"""The Launch pane on a real Slurm: chosen, filled in, submitted, seen in the queue, watched, cancelled."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from ftdash.engine.slurm.submitted import job_id
from ftdash.tui.panes.queue import QueueScreen
from tests.slurm.conftest import Site
from tests.support.operate import go_on, press_on, start_and_watch, stop, type_into
from tests.support.screens import cockpit, screen_text, until

pytestmark = [
    pytest.mark.slow,
    pytest.mark.slurm,
    pytest.mark.timeout(600),
    pytest.mark.xdist_group("slurm"),
]


async def test_a_job_is_submitted_watched_on_both_nodes_and_cancelled_with_keys_alone(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("SLURM_CONF", "FTDASH_HOME"):
        monkeypatch.setenv(name, site.env[name])
    async with cockpit(site.home, pane="launch") as (app, pilot):
        await press_on(app, pilot, "backend", "right")
        await until(pilot, lambda: "main, the default" in screen_text(app))
        await press_on(app, pilot, "nodes", "right")
        await press_on(app, pilot, "steps", "end")
        await type_into(app, pilot, "partition", "main")
        await until(pilot, lambda: "#SBATCH --partition=main" in screen_text(app))
        await until(pilot, lambda: "#SBATCH --nodes=2" in screen_text(app))
        text = screen_text(app)
        assert "main · 2 nodes, each 4 CPUs" in text
        assert "submit to Slurm: 2 ranks" in text
        await start_and_watch(app, pilot, ["node0", "node1"])
        run = app.feed.run
        job = job_id(run)

        await pilot.press("2", "Q")
        await until(pilot, lambda: isinstance(app.screen, QueueScreen))
        await until(pilot, lambda: job in screen_text(app) and "RUNNING" in screen_text(app), 30)
        assert "2 nodes" in screen_text(app)
        assert "2 allocated" in screen_text(app) or "2 mixed" in screen_text(app)
        await pilot.press("escape")

        controller = site.cluster.daemons["slurmctld"].pid
        os.kill(controller, signal.SIGSTOP)
        try:
            await pilot.press("3")
            step = app.feed.peek().step
            await until(pilot, lambda: app.feed.peek().step > step + 2, 60)
            await pilot.press("2", "Q")
            await until(pilot, lambda: "asking Slurm" in screen_text(app))
            await until(pilot, lambda: "no answer within 10 s" in screen_text(app), 40)
            await pilot.press("escape")
            await until(pilot, lambda: "What will happen" in screen_text(app))
            step = app.feed.peek().step
            await until(pilot, lambda: app.feed.peek().step > step, 60)
        finally:
            os.kill(controller, signal.SIGCONT)
        await stop(app, pilot, "save")
        await go_on(app, pilot)
        await until(pilot, lambda: "submit to Slurm: 2 ranks" in screen_text(app))
        await until(pilot, lambda: "#SBATCH --partition=main" in screen_text(app))
    ended = ("CANCELLED", "FAILED", "COMPLETED")  # whoever came first: the agents or scancel
    site.cluster.wait("the job's end", lambda: site.cluster.job_state(job) in ended, 60)
    assert json.loads(Path(run.manifest_path).read_text())["state"] == "stopped"
