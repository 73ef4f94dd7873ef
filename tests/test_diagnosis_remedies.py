"""Remedies fit what the frames show, and are several where they do not decide."""

from __future__ import annotations

import pytest

from ftdash.monitor.diagnosis import diagnose
from ftdash.monitor.diagnosis.model import Verdict
from ftdash.monitor.diagnosis.stacks import read_stacks
from tests.diagnosis import table
from tests.diagnosis.table import ALL_REDUCE, BACKWARD, BARRIER, FETCH, MODULE, TRAINER, Row, same

TRAINING = (f"Trainer.training_step@{TRAINER}", MODULE)
DDP = "torch/nn/parallel/distributed.py"
GRPO = "trl/trainer/grpo_trainer.py"
REWARDS = (f"GRPOTrainer._calculate_rewards@{GRPO}", f"GRPOTrainer._generate_and_score_completions@{GRPO}")


def verdict_of(folder, ranks) -> Verdict:
    table.write(folder, Row("a hang", ranks, frozenset(), frozenset()), next(iter(table.STYLES)))
    return diagnose(read_stacks(folder)).verdict


def test_a_rank_back_in_the_constructor_is_not_told_to_equalise_its_batches(tmp_path):
    verdict = verdict_of(
        tmp_path,
        same((0, 1, 3), *BACKWARD, "step@train.py", MODULE)
        | same(
            (2,),
            "_verify_params_across_processes@torch/distributed/utils.py",
            f"DistributedDataParallel.__init__@{DDP}",
            "build@train.py",
            "retry@train.py",
            MODULE,
        ),
    )
    assert {culprit.rank for culprit in verdict.culprits} == {2}
    assert "starts anew" in verdict.fix
    assert "drop_last" not in verdict.fix


def test_ranks_of_another_phase_get_both_causes_as_one_of_several(tmp_path):
    verdict = verdict_of(
        tmp_path,
        same((0, 1, 3), ALL_REDUCE, "log@train.py", MODULE) | same((2,), *BACKWARD, "step@train.py", MODULE),
    )
    assert verdict.kind == "phase-mismatch"
    assert verdict.fix.startswith("one of: ")
    assert "drop_last" in verdict.fix
    assert "all_reduce the flag" in verdict.fix


def test_a_reward_function_is_named_whoever_is_in_it(tmp_path):
    stuck = ("socket.recv_into@socket.py", "judge@rewards.py", *REWARDS, *TRAINING)
    gathering = (ALL_REDUCE, "score@rewards.py", *REWARDS, *TRAINING)
    (tmp_path / "held").mkdir()
    verdict = verdict_of(tmp_path / "held", same((1,), *stuck) | same((0, 2, 3), BARRIER, *TRAINING))
    assert {culprit.rank for culprit in verdict.culprits} == {1}
    assert "in the reward function judge (rank 1" in verdict.fix
    (tmp_path / "odd").mkdir()
    verdict = verdict_of(tmp_path / "odd", same((0, 1, 3), *gathering) | same((2,), BARRIER, *TRAINING))
    assert "in the reward function score" in verdict.fix
    assert "raised on all" in verdict.fix


@pytest.mark.parametrize(
    ("function", "word"), [("Router.run_expert@model.py", "experts"), ("Model.audio@model.py", "dummy input")]
)
def test_sharded_weights_that_some_ranks_do_not_gather_are_a_skipped_module(function, word, tmp_path):
    inside = (ALL_REDUCE, *FETCH, function, "Model.forward@model.py", *TRAINING)
    past = (ALL_REDUCE, *FETCH, "Model.head@model.py", "Model.forward@model.py", *TRAINING)
    verdict = verdict_of(tmp_path, same((0, 1, 3), *inside) | same((2,), *past))
    assert {culprit.rank for culprit in verdict.culprits} == {2}
    assert word in verdict.fix
    assert "model.py" in verdict.fix


def test_a_group_that_not_all_make_is_no_restart(tmp_path):
    making = (f"new_group@{table.C10D}", "subgroup@train.py", MODULE)
    verdict = verdict_of(tmp_path, same((0,), *making) | same((1, 2, 3), ALL_REDUCE, "step@train.py", MODULE))
    assert "new_group has to be called by every rank" in verdict.fix


def test_an_evaluation_on_one_rank_is_not_blamed_on_a_progress_bar_alone(tmp_path):
    verdict = verdict_of(
        tmp_path,
        same(
            (0,),
            "gather_for_metrics@accelerate/accelerator.py",
            "evaluate@train.py",
            "train@train.py",
            MODULE,
        )
        | same((1, 2, 3), *BACKWARD, "step@train.py", "train@train.py", MODULE),
    )
    assert verdict.kind == "eval-on-one-rank"
    assert "outside `if is_main_process`" in verdict.fix
