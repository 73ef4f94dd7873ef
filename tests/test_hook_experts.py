"""Tokens per expert: every total is tokens x k for each layer, whatever runs the routers a second time."""

from __future__ import annotations

import pytest

from ftdash.monitor import records
from ftdash.monitor.hook import Hook

LAYERS, EXPERTS, TOP_K = 3, 8, 2
BATCH, LENGTH = 2, 10


@pytest.fixture(scope="module")
def torch():
    return pytest.importorskip("torch")


@pytest.fixture
def moe(torch):
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(1)
    config = Qwen3MoeConfig(
        vocab_size=64,
        hidden_size=16,
        moe_intermediate_size=8,
        intermediate_size=16,
        num_hidden_layers=LAYERS,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        num_experts=EXPERTS,
        num_experts_per_tok=TOP_K,
    )
    return Qwen3MoeForCausalLM(config).train()


def totals(run_dir):
    """{layer: (summed counts of one layer, experts)} over all records of rank 0."""
    lines = (run_dir / "telemetry" / "rank-0.jsonl").read_bytes().splitlines()
    found = {}
    for record in map(records.decoder.decode, lines):
        if isinstance(record, records.Experts):
            assert len(record.counts) == EXPERTS
            found[record.layer] = found.get(record.layer, 0) + sum(record.counts)
    return found


def train(torch, model, hook, steps=4, accumulate=1):
    ids = torch.randint(64, (BATCH, LENGTH))
    for _ in range(steps):
        for _ in range(accumulate):
            model(input_ids=ids, labels=ids).loss.backward()
        model.zero_grad()
        hook.step(tokens=ids.numel())
    hook.close()


def expected(steps=4, accumulate=1):
    return dict.fromkeys(range(LAYERS), steps * accumulate * BATCH * LENGTH * TOP_K)


def test_plain_training(torch, moe, tmp_path):
    hook = Hook.start(tmp_path, 0, model=moe, expert_every=2)
    train(torch, moe, hook)
    assert totals(tmp_path) == expected()
    lines = (tmp_path / "telemetry" / "rank-0.jsonl").read_bytes().splitlines()
    decoded = [records.decoder.decode(line) for line in lines]
    assert (decoded[0].expert_count, decoded[0].top_k, decoded[0].moe_layers) == (EXPERTS, TOP_K, LAYERS)
    assert {record.step for record in decoded if isinstance(record, records.Experts)} == {2, 4}


def test_counts_are_the_routers_own_choices(torch, moe, tmp_path):
    chosen = []
    router = moe.model.layers[0].mlp.gate
    router.register_forward_hook(lambda module, args, output: chosen.append(output[2]))
    hook = Hook.start(tmp_path, 0, model=moe, expert_every=1)
    train(torch, moe, hook, steps=1)
    lines = (tmp_path / "telemetry" / "rank-0.jsonl").read_bytes().splitlines()
    counts = [
        r.counts
        for r in map(records.decoder.decode, lines)
        if isinstance(r, records.Experts) and r.layer == 0
    ]
    assert counts == [torch.bincount(chosen[0].reshape(-1), minlength=EXPERTS).tolist()]


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing_does_not_count_twice(torch, moe, tmp_path, reentrant):
    ran = []
    moe.model.layers[0].mlp.gate.register_forward_hook(lambda *_: ran.append(1))
    moe.gradient_checkpointing_enable({"use_reentrant": reentrant})
    moe.enable_input_require_grads()
    hook = Hook.start(tmp_path, 0, model=moe)
    train(torch, moe, hook)
    assert len(ran) == 8  # the routers did run twice a step
    assert totals(tmp_path) == expected()


def test_checkpoint_wrappers_as_fsdp_uses_them_do_not_count_twice(torch, moe, tmp_path):
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    for index, layer in enumerate(moe.model.layers):
        moe.model.layers[index] = checkpoint_wrapper(layer)
    hook = Hook.start(tmp_path, 0, model=moe)
    train(torch, moe, hook, accumulate=2)
    assert totals(tmp_path) == expected(accumulate=2)


def test_gradient_accumulation_counts_every_micro_batch(torch, moe, tmp_path):
    hook = Hook.start(tmp_path, 0, model=moe, expert_every=3)
    train(torch, moe, hook, accumulate=3)
    assert totals(tmp_path) == expected(accumulate=3)


def test_evaluation_is_not_counted(torch, moe, tmp_path):
    hook = Hook.start(tmp_path, 0, model=moe)
    ids = torch.randint(64, (BATCH, LENGTH))
    moe.eval()
    with torch.no_grad():
        moe(input_ids=ids)
    moe.train()
    train(torch, moe, hook)
    assert totals(tmp_path) == expected()


def test_a_dense_model_has_no_expert_records(torch, tmp_path):
    hook = Hook.start(tmp_path, 0)
    assert hook.watch_experts(torch.nn.Linear(2, 2)) == 0
    hook.step(loss=1.0)
    hook.close()
    assert totals(tmp_path) == {}


def test_the_trainer_callback_tells_steps_phases_and_experts(torch, moe, tmp_path, monkeypatch):
    from transformers import Trainer, TrainingArguments

    from ftdash.monitor.beat import read_beat
    from ftdash.monitor.hook.trainer import FtdashCallback

    monkeypatch.setenv("FTDASH_RUN_DIR", str(tmp_path))
    ids = torch.randint(64, (LENGTH,)).tolist()
    row = {"input_ids": ids, "labels": [-100, -100, *ids[2:]]}
    arguments = TrainingArguments(
        output_dir=str(tmp_path / "out"),
        use_cpu=True,
        max_steps=4,
        per_device_train_batch_size=BATCH,
        per_device_eval_batch_size=BATCH,
        gradient_accumulation_steps=2,
        logging_steps=1,
        eval_strategy="steps",
        eval_steps=2,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    rows = [row] * 16
    trainer = Trainer(
        model=moe, args=arguments, train_dataset=rows, eval_dataset=rows[:4], callbacks=[FtdashCallback()]
    )
    trainer.train()
    lines = (tmp_path / "telemetry" / "rank-0.jsonl").read_bytes().splitlines()
    decoded = [records.decoder.decode(line) for line in lines]
    steps = [record for record in decoded if isinstance(record, records.Step)]
    assert [step.step for step in steps] == [1, 2, 3, 4]
    assert {step.tokens for step in steps} == {2 * BATCH * (LENGTH - 2)}
    logged = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert [step.loss for step in steps] == pytest.approx(logged)
    for step in steps:
        assert min(step.forward_s, step.backward_s, step.optimizer_s) > 0
        assert step.data_s + step.forward_s + step.backward_s + step.optimizer_s <= step.step_s * 1.001
    assert totals(tmp_path) == expected(steps=4, accumulate=2)
    assert decoded[0].distributed_type == "NO"
    assert read_beat(tmp_path / "telemetry" / "rank-0.beat").step == 4
