"""The `diagnose` command: its fixed JSON, its reports, bad input, hostile input."""

from __future__ import annotations

import json
import pickle
from dataclasses import replace

import pytest

from ftdash.tui import cli
from tests.diagnosis import flightdumps, table
from tests.support import zoo


def run(capsys, *argv):
    code = cli.run(["diagnose", *map(str, argv)])
    return code, capsys.readouterr().out


def row(name):
    return next(item for item in table.ROWS if item.name == name)


def test_json_has_the_fixed_shape(tmp_path, capsys):
    table.write(tmp_path, row("out of memory retried on one rank"), "new json")
    code, out = run(capsys, "--stacks", tmp_path, "--json")
    assert code == 0
    value = json.loads(out)
    assert set(value) == {"verdict", "groups"}
    assert set(value["verdict"]) == {"kind", "culprits", "confidence", "evidence", "next"}
    assert set(value["verdict"]["culprits"][0]) == {"rank", "host", "pid", "frame", "why"}
    assert set(value["groups"][0]) == {"ranks", "phase", "collective", "frames"}
    assert value["groups"][0]["ranks"] == [1]
    assert value["groups"][0]["collective"] == "all_gather"


def test_stacks_and_flight_recorder_of_one_incident_agree(tmp_path, capsys):
    stacks, flight = tmp_path / "stacks", tmp_path / "flight"
    stacks.mkdir()
    table.write(stacks, row("out of memory retried on one rank"), "old text")
    flightdumps.write(flight, flightdumps.other_type(4, 1))
    _, alone = run(capsys, "--stacks", stacks, "--json")
    _, both = run(capsys, "--stacks", stacks, "--flight", flight, "--json")
    one, two = json.loads(alone)["verdict"], json.loads(both)["verdict"]
    assert [culprit["rank"] for culprit in two["culprits"]] == [1]
    assert two["confidence"] > one["confidence"]
    assert "retry" in two["culprits"][0]["frame"]


def test_nobody_differs_in_stacks_and_the_flight_recorder_finds_who_does(tmp_path, capsys):
    stacks, flight = tmp_path / "stacks", tmp_path / "flight"
    stacks.mkdir()
    table.write(stacks, row("nobody differs"), "old text")
    flightdumps.write(flight, flightdumps.other_size(4, 2))
    _, out = run(capsys, "--stacks", stacks, "--flight", flight, "--json")
    verdict = json.loads(out)["verdict"]
    assert (verdict["kind"], [culprit["rank"] for culprit in verdict["culprits"]]) == ("size-mismatch", [2])


def test_a_caught_out_of_memory_in_the_culprits_log_gives_the_fix(tmp_path, capsys):
    stacks, logs = tmp_path / "stacks", tmp_path / "logs"
    stacks.mkdir()
    logs.mkdir()
    table.write(stacks, row("out of memory retried on one rank"), "old text")
    (logs / "rank0.log").write_text("step 40 loss 1.1\n")
    (logs / "rank1.log").write_text(
        "step 40 loss 1.1\ntorch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.\n"
    )
    _, bare = run(capsys, "--stacks", stacks)
    _, joined = run(capsys, "--stacks", stacks, "--logs", logs)
    assert "do not retry on one rank alone" not in bare
    assert "do not retry on one rank alone" in joined
    assert "log of rank 1: torch.OutOfMemoryError" in joined


def test_one_rank_alone_is_not_said_to_be_like_all(tmp_path, capsys):
    lone = row("save under is_main_process with FSDP")
    table.write(tmp_path, replace(lone, ranks={0: lone.ranks[0]}), "new text")
    _, out = run(capsys, "--stacks", tmp_path)
    assert "one rank only was looked at" in out
    assert "same call at the same place" not in out
    assert "ended normally" in out
    assert "NCCL tests" not in out


def test_report_and_markdown_name_the_culprit(tmp_path, capsys):
    table.write(tmp_path, row("save under is_main_process with FSDP"), "new text")
    _, text = run(capsys, "--stacks", tmp_path)
    assert text.startswith("save-on-one-rank: rank 0")
    assert "call the save on every rank" in text
    _, markdown = run(capsys, "--stacks", tmp_path, "--markdown")
    assert "| 0 | node00 |" in markdown


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ((), "needs RUN, --pid"),
        (("--stacks", "/nonexistent"), "--stacks /nonexistent"),
        (("--flight", "/nonexistent"), "--flight /nonexistent"),
        (("--logs", "/nonexistent"), "--logs /nonexistent"),
        (("--pid", "0"), "--pid 0"),
        (("--pid", "4194303"), "no such process"),
    ],
)
def test_bad_input_is_one_line_that_names_the_flag(argv, words):
    with pytest.raises(cli.UserError, match=words):
        cli.run(["diagnose", *argv, "--json"])


class Evil:
    def __reduce__(self):
        return (print, ("executed",))


def test_crafted_files_give_notices_and_no_more(tmp_path, capsys):
    (tmp_path / "rank-0.json").write_bytes(b"[" * 200_000)
    (tmp_path / "rank-1.json").write_bytes(b'[{"frames": 5}]')
    (tmp_path / "rank-2.txt").write_bytes(bytes(range(256)) * 50)
    (tmp_path / "rank-3.json").write_bytes(b"")
    with open(tmp_path / "rank-4.json", "wb") as handle:
        handle.truncate(100 << 20)
    (tmp_path / "rank_5").write_bytes(pickle.dumps(Evil()))
    for flag in ("--stacks", "--flight", "--logs"):
        code, out = run(capsys, flag, tmp_path, "--json")
        assert code == 0
        value = json.loads(out)
        assert value["verdict"]["kind"] in ("no-evidence", "healthy")
        assert value["verdict"]["culprits"] == []
        assert "executed" not in out
    assert any(
        "notice" in line
        for line in json.loads(run(capsys, "--stacks", tmp_path, "--json")[1])["verdict"]["evidence"]
    )


def test_quick_verdict_on_live_ranks(tmp_path, capsys):
    with zoo.job(tmp_path, "hangs.py", "lock_held", 3) as pids:
        code, out = run(capsys, "--pid", pids[0], "--quick", "--json")
    verdict = json.loads(out)["verdict"]
    assert code == 0
    assert (verdict["kind"], [culprit["rank"] for culprit in verdict["culprits"]]) == ("lock", [2])
    assert verdict["culprits"][0]["pid"] == pids[2]


def test_a_folder_without_dumps_is_said_to_have_none(tmp_path, capsys):
    code, out = run(capsys, "--flight", tmp_path)
    assert code == 0
    assert f"notice: --flight {tmp_path}: no flight recorder dumps are in it" in out
