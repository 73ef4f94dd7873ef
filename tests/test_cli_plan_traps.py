"""A plan that could not be launched says so when it is planned, not ten minutes into a launch."""

from __future__ import annotations

import json

import pytest

from ftdash.tui import cli


def advice(capsys: pytest.CaptureFixture[str], *flags: str) -> dict[str, str]:
    assert cli.run(["plan", "--model", "qwen3-8b", "--gpus", "4", *flags, "--json"]) == 0
    return {entry["code"]: entry["text"] for entry in json.loads(capsys.readouterr().out)["advice"]}


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--strategy", "ddp", "--offload", "optimizer"), "--offload with --strategy ddp"),
        (("--strategy", "zero3", "--method", "qlora"), "--method qlora with zero3"),
        (("--pp", "2"), "pp"),
    ],
)
def test_what_no_launcher_can_start_is_counted_and_named(
    flags: tuple[str, ...], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert words in advice(capsys, *flags)["plan-refused"]


def test_tensor_parallelism_over_pcie_is_a_warning_of_the_plan(capsys: pytest.CaptureFixture[str]) -> None:
    assert "tp-over-pcie" in advice(capsys, "--tp", "4", "--gpu", "rtx4090-24g")
    assert "tp-over-pcie" not in advice(capsys, "--tp", "4", "--gpu", "h100-sxm-80g")


def test_a_plan_that_can_be_launched_has_no_refusal(capsys: pytest.CaptureFixture[str]) -> None:
    assert "plan-refused" not in advice(capsys, "--strategy", "fsdp")


def test_the_readable_form_names_the_refusal_too(capsys: pytest.CaptureFixture[str]) -> None:
    cli.run(["plan", "--model", "qwen3-8b", "--gpus", "4", "--strategy", "ddp", "--offload", "optimizer"])
    assert "plan-refused" in capsys.readouterr().out
