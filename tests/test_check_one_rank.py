"""What one rank alone reaches is told by what an object is, never by what it is called."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest

from ftdash.engine.check.findings import Finding, Severity
from ftdash.engine.check.registry import check_files
from tests.support.check import DDP, ZERO3, fsdp1, fsdp2, written

CODES = {"collective-on-one-rank", "save-on-one-rank", "generate-on-one-rank"}
MADE = """
    import os, sys
    import torch
    import torch.distributed as td
    from accelerate import Accelerator, PartialState
    from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer
    from trl import SFTTrainer
    acc = Accelerator()
    m = AutoModelForCausalLM.from_pretrained("x")
    tok = AutoTokenizer.from_pretrained("x")
    tr = SFTTrainer(model=m)
"""


def found(folder: Path, script: str, config: object | None = None) -> list[Finding]:
    files = {"t.py": textwrap.dedent(MADE) + textwrap.dedent(script)}
    if config is not None:
        files["c.yaml"] = config
    return [finding for finding in check_files(written(folder, files)) if finding.code in CODES]


ONE_RANK = {
    "accelerator attribute": "if tr.accelerator.is_main_process:",
    "accelerator": "if acc.is_main_process:",
    "rank by call": "if td.get_rank() == 0:",
    "mirrored": "if 0 == td.get_rank():",
    "trainer's method": "if tr.is_world_process_zero():",
    "trainer's state": "if tr.state.is_world_process_zero:",
    "environment": "if os.environ['RANK'] == '0':",
    "environment as number": "if int(os.environ.get('LOCAL_RANK', '0')) == 0:",
    "kept rank": "r = td.get_rank()\nif r == 0:",
    "kept variable": "number = int(os.environ['RANK'])\nif not number:",
    "kept condition": "chief = td.get_rank() == 0\nif chief:",
    "function": "def chief():\n    return td.get_rank() == 0\nif chief():",
    "with another condition": "if args.do_eval and PartialState().is_main_process:",
    "only when distributed": "if not td.is_initialized() or td.get_rank() == 0:",
    "the last rank": "if td.get_rank() == td.get_world_size() - 1:",
    "else": "if td.get_rank() != 0:\n    pass\nelse:",
}
ALL_RANKS = {
    "no rank": "if args.do_eval:",
    "the trainer's control": "if control.should_save:",
    "a rank of an adapter": "if lora_rank == 0:",
    "a rank in a list of answers": "if row['rank'] == 0:",
    "a rank in a tensor-parallel group": "if tp_rank == 0:",
    "undistributed": "if local_rank == -1:",
    "a warm-up": "if step == 0:",
}


@pytest.mark.parametrize("condition", ONE_RANK.values(), ids=ONE_RANK.keys())
def test_every_way_to_say_one_rank_is_known(condition, tmp_path):
    (one,) = found(tmp_path, f"{condition}\n    tr.evaluate()\n")
    assert (one.code, one.severity) == ("collective-on-one-rank", Severity.ERROR)


@pytest.mark.parametrize("condition", ALL_RANKS.values(), ids=ALL_RANKS.keys())
def test_other_conditions_keep_nobody_away(condition, tmp_path):
    assert not found(tmp_path, f"{condition}\n    tr.evaluate()\n")


# ruff: noqa: E501 - the tables keep one case a row where they can
# What is called under `if acc.is_main_process:`, after lines that all ranks run
MEETS = {
    "alias": ("other = tr", "other.predict(x)"),
    "training": ("", "tr.train()"),
    "in a list": ("", "scores = [tr.evaluate(d) for d in sets]"),
    "gather": ("", "acc.gather(x)"),
    "gather of a function": ("from accelerate.utils import gather_object as take", "take(x)"),
    "barrier": ("", "td.barrier()"),
    "imported barrier": ("from torch.distributed import barrier as meet", "meet()"),
    "distributed by another name": ("from torch import distributed as d", "d.all_reduce(x)"),
    "wait": ("", "acc.wait_for_everyone()"),
    "state": ("s = PartialState()", "s.wait_for_everyone()"),
    "full tensor": ("", "p.full_tensor()"),
    "sharded checkpoint": ("import torch.distributed.checkpoint as dcp", "dcp.save(x)"),
    "deepspeed engine": ("import deepspeed\ne, o, _, _ = deepspeed.initialize(model=m)", "e.save_checkpoint('o')"),
    "helper": ("def report(t):\n    print(1)\n    t.evaluate()\nreport.__doc__", "report(tr)"),
    "helper that all use too": ("def report(t):\n    t.evaluate()\nreport(tr)", "report(tr)"),
    "own trainer": ("class Mine(Trainer):\n    pass\nt2 = Mine(model=m)", "t2.evaluate()"),
    "made by a function": ("def build():\n    return SFTTrainer(model=m)\nt2 = build()", "t2.evaluate()"),
    "made by a function, in a tuple": ("def build():\n    return m, SFTTrainer(m)\na, b = build()", "b.evaluate()"),
}  # fmt: skip


@pytest.mark.parametrize(("before", "call"), MEETS.values(), ids=MEETS.keys())
def test_a_call_that_meets_the_others_is_an_error_on_one_rank(before, call, tmp_path):
    (one,) = found(tmp_path, f"{before}\nif acc.is_main_process:\n    {call}\n")
    assert one.code == "collective-on-one-rank"
    assert not found(tmp_path, f"{before}\n{call}\n")


QUIET = {
    "tokenizer": ("", "tok.save_pretrained('o')"),
    "logging": ("", "tr.log_metrics('train', x); tr.save_metrics('train', x); tr.save_state(); print(1)"),
    "model card": ("", "tr.create_model_card()"),
    "metric": ("import evaluate\nmetric = evaluate.load('f1')", "metric.compute()"),
    "evaluator of its own": ("ev = lm_eval.Evaluator()", "ev.evaluate(x)"),
    "functools": ("import functools", "functools.reduce(f, x)"),
    "tensor reduce": ("", "torch.gather(x, 0, i)"),
    "gathered before": ("sd = acc.get_state_dict(m)", "acc.unwrap_model(m).save_pretrained('o', state_dict=sd)"),
    "loaded on this rank": (
        "", "again = AutoModelForCausalLM.from_pretrained('o').merge_and_unload(); again.save_pretrained('p')"),
    "generated by a model of this rank": (
        "", "again = AutoModelForCausalLM.from_pretrained('o'); again.generate(x)"),
    "a server": ("from vllm import LLM\nllm = LLM('x')", "llm.generate(x)"),
    "averaged weights of this rank": ("ema = EMAModel(m.parameters())", "ema.save_pretrained('o')"),
    "point to point": ("", "td.send(x, 1)"),
    "a group of its own": ("", "td.all_reduce(x, group=leaders)"),
    "a tokenizer's trainer": ("from tokenizers.trainers import BpeTrainer\nt2 = BpeTrainer()", "t2.train(x)"),
    "own loop": ("class Loop:\n    def evaluate(self):\n        return 1\nt2 = Loop()", "t2.evaluate()"),
    "a lambda": ("", "f = lambda: tr.evaluate()"),
}  # fmt: skip


@pytest.mark.parametrize(("before", "call"), QUIET.values(), ids=QUIET.keys())
@pytest.mark.parametrize("config", [fsdp1(), DDP], ids=["fsdp1", "ddp"])
def test_what_needs_no_other_rank_is_no_finding(before, call, config, tmp_path):
    assert not found(tmp_path, f"{before}\nif acc.is_main_process:\n    {call}\n", config)


SAVES = {
    "trainer": ("", "tr.save_model('o')"),
    "accelerator": ("", "acc.save_state('o')"),
    "model": ("", "m.save_pretrained('o')"),
    "prepared model": ("m2 = acc.prepare(m)", "m2.save_pretrained('o')"),
    "trainer's model": ("", "tr.model.save_pretrained('o')"),
    "unwrapped without gathering": ("", "acc.unwrap_model(m).save_pretrained('o')"),
    "gathering under the condition": ("", "m.save_pretrained('o', state_dict=acc.get_state_dict(m))"),
    "adapter": ("from peft import get_peft_model\nm2 = get_peft_model(m, c)", "m2.save_pretrained('o')"),
    "hub": ("", "tr.push_to_hub()"),
}


@pytest.mark.parametrize(("before", "call"), SAVES.values(), ids=SAVES.keys())
@pytest.mark.parametrize("config", [fsdp2(), fsdp1()], ids=["fsdp2", "fsdp1"])
def test_saving_shards_on_one_rank_is_an_error(before, call, config, tmp_path):
    (one,) = found(tmp_path, f"{before}\nif acc.is_main_process:\n    {call}\n", config)
    assert (one.code, one.severity) == ("save-on-one-rank", Severity.ERROR)


@pytest.mark.parametrize(("before", "call"), SAVES.values(), ids=SAVES.keys())
def test_saving_a_whole_model_on_one_rank_hangs_nobody(before, call, tmp_path):
    severities = {
        each.severity for each in found(tmp_path, f"{before}\nif acc.is_main_process:\n    {call}\n", DDP)
    }
    assert severities <= {Severity.NOTE}


def test_generation_is_told_by_the_model(tmp_path):
    guarded = "if acc.is_main_process:\n    {}\n"
    for call in ("m.generate(x)", "tr.model.generate(x)", "acc.unwrap_model(m).generate(x)"):
        (one,) = found(tmp_path, guarded.format(call), fsdp2())
        assert one.code == "generate-on-one-rank"
    whole = guarded.format("with FSDP.summon_full_params(m):\n        m.generate(x)")
    assert {one.code for one in found(tmp_path, whole, fsdp1())} == {"save-on-one-rank"}
    outside = "with FSDP.summon_full_params(m):\n    if acc.is_main_process:\n        m.generate(x)\n"
    assert not found(tmp_path, outside, fsdp1())


def test_the_forward_of_a_sharded_model_gathers(tmp_path):
    script = "def score(net):\n    return net(ids)\nif td.get_rank() == 0:\n    score(m)\n"
    (one,) = found(tmp_path, script, fsdp2())
    assert one.code == "generate-on-one-rank"
    assert not found(tmp_path, script, DDP)
    assert not found(tmp_path, "def score(net):\n    return net(ids)\nscore(m)\n", fsdp2())


def test_early_return_and_continue_leave_the_rest_to_one_rank(tmp_path):
    for leave in ("return", "sys.exit()"):
        script = f"def main():\n    if td.get_rank() != 0:\n        {leave}\n    tr.evaluate()\nmain()\n"
        assert found(tmp_path, script)
    loop = "for epoch in range(3):\n    if not acc.is_main_process:\n        continue\n    tr.evaluate()\n"
    assert found(tmp_path, loop)
    assert not found(tmp_path, loop.replace("    tr.evaluate()\n", "    print(1)\ntr.evaluate()\n"))


def test_both_sides_of_a_broadcast_are_no_finding(tmp_path):
    script = """
    if td.get_rank() == 0:
        box = [load()]
        td.broadcast_object_list(box, src=0)
    else:
        box = [None]
        td.broadcast_object_list(box, src=0)
    if td.get_rank() != 0:
        td.barrier()
    data = load()
    if td.get_rank() == 0:
        td.barrier()
    """
    assert not found(tmp_path, script)


def test_attributes_and_annotations_are_followed(tmp_path):
    script = """
    class Job:
        def __init__(self, helper: Accelerator):
            self.helper = helper
            self.work = SFTTrainer(model=m)
        def report(self):
            if self.helper.is_main_process:
                self.finish()
        def finish(self):
            self.work.evaluate()
    Job(acc).report()
    """
    (one,) = found(tmp_path, script)
    assert one.code == "collective-on-one-rank"
    assert not found(tmp_path, script.replace("self.work.evaluate()", "self.work.log(x)"))
    typed = (
        "def report(t: 'Trainer', a: Accelerator | None):\n    if a.is_main_process:\n        t.evaluate()\n"
    )
    assert found(tmp_path, typed)


def test_a_callback_gets_the_model_that_all_ranks_share(tmp_path):
    script = """
    class Show(TrainerCallback):
        def on_evaluate(self, args, state, control, **kw):
            if state.is_world_process_zero:
                net = kw["model"]
                net.generate(x)
    """
    (one,) = found(tmp_path, script, {**DDP, **fsdp2()})
    assert one.code == "generate-on-one-rank"
    assert not found(tmp_path, script.replace("net.generate(x)", "print(net)"), fsdp2())


def test_zero3_saves_under_gathered_parameters_are_whole(tmp_path):
    script = "import deepspeed\nwith deepspeed.zero.GatheredParameters(p):\n    if acc.is_main_process:\n        m.save_pretrained('o')\n"
    written(tmp_path, {"d.json": ZERO3, "t.py": textwrap.dedent(MADE) + script})
    paths = [tmp_path / "d.json", tmp_path / "t.py"]
    assert not [each for each in check_files(paths) if each.code in CODES]
    inside = script.replace("with deepspeed.zero.GatheredParameters(p):\n    if acc.is_main_process:\n", (
        "if acc.is_main_process:\n    with deepspeed.zero.GatheredParameters(p):\n"))  # fmt: skip
    (tmp_path / "t.py").write_text(textwrap.dedent(MADE) + inside)
    assert [each.code for each in check_files(paths) if each.code in CODES] == ["save-on-one-rank"]
