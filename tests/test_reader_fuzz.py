"""A run directory that is torn at while it is read: no reader crashes, none waits for ever."""

from __future__ import annotations

import json
import os
import random
import time
from pathlib import Path

import pytest

from ftdash.monitor.reader import RunReader
from ftdash.monitor.replay import Replay
from ftdash.monitor.rundir import RunDir, RunError
from tests.support.cluster import Cluster

VALUES = (None, -1, 0, 2**63, 2**200, 1e308, -1e308, 1e-320, "nan", "inf", "x", [], {}, [1, -2], True)


def damage(chance: random.Random, run: RunDir, path: Path) -> None:
    """One thing that may happen to a file under its reader."""
    match chance.randrange(7):
        case 0:
            path.write_bytes(chance.randbytes(chance.randrange(3000)))
        case 1:
            os.truncate(path, chance.randrange(max(1, path.stat().st_size)))
        case 2:
            path.unlink()
        case 3:
            other = path.with_suffix(".new")
            other.write_bytes(path.read_bytes()[chance.randrange(200) :])
            os.replace(other, path)
        case 4:
            with open(path, "ab") as handle:
                handle.write(b"x" * chance.randrange(200_000))
        case 5:
            manifest = json.loads(run.manifest_path.read_text())
            manifest[chance.choice(list(manifest))] = chance.choice(VALUES)
            run.manifest_path.write_text(json.dumps(manifest))
        case _:
            record = json.loads(path.read_bytes().split(b"\n")[0])
            record[chance.choice(list(record))] = chance.choice(VALUES)
            with open(path, "ab") as handle:
                handle.write(json.dumps(record).encode() + b"\n")


@pytest.mark.parametrize("seed", range(3))
def test_whatever_happens_to_its_files_a_run_is_read_or_refused_in_one_line(
    seed: int, tmp_path: Path
) -> None:
    chance = random.Random(seed)
    said: list[str] = []
    for number in range(40):
        cluster = Cluster(4, per_node=2, experts=4, start_t=time.time() - 30)
        run = cluster.create(tmp_path, f"torn-{number}", steps=12)
        reader = RunReader(run)
        reader.poll()
        for step in range(13, 25):
            try:
                damage(chance, run, chance.choice(sorted(run.telemetry.iterdir())))
            except (ValueError, FileNotFoundError):
                cluster.append(run, step)  # nothing left to damage: the ranks write on
            try:
                for _ in range(50):
                    reader.poll()
                    if not reader.behind:
                        break
                assert not reader.behind
            except RunError as error:
                said.append(str(error))
        reader.close()
        try:
            Replay(run).seek(time.time())
        except RunError as error:
            said.append(str(error))
    assert not any("\n" in text for text in said)
