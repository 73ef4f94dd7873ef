"""What rehearsals do not show of real training: equal steps, ranks of adapters, counted tokens, refusals."""

from __future__ import annotations

import math
import shutil
import sys
from pathlib import Path

import pytest

from ftdash.monitor import records
from tests.support import train

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


@pytest.fixture(scope="module", autouse=True)
def models_once(tmp_path_factory):
    """One FTDASH_HOME for the module: the tiny models are built once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FTDASH_HOME", str(tmp_path_factory.mktemp("home")))
        yield


def fsdp2(folder: Path, processes: int = 2, **changes: object) -> list[str]:
    parallelism = changes.pop("parallelism_config", None)
    extra = {"parallelism_config": parallelism} if parallelism else {}
    config = {**train.FSDP2, **changes}
    return train.accelerate(
        train.accelerate_yaml(folder, processes, distributed_type="FSDP", fsdp_config=config, **extra)
    )


def ddp(folder: Path) -> list[str]:
    return train.accelerate(train.accelerate_yaml(folder, 2, distributed_type="MULTI_GPU"))


def trained(done: train.Finished, strategy: str, world: int = 2) -> records.Meta:
    """It ended well, on all ranks, as `strategy`, with a finite loss in every step."""
    assert done.code == 0, done.output[-3000:]
    for rank in range(world):
        meta = done.meta(rank)
        assert (meta.strategy, meta.world_size, meta.rank) == (strategy, world, rank)
        assert all(math.isfinite(loss) for loss in done.losses(rank))
        assert [step.step for step in done.of_kind(rank, records.Step)] == list(range(1, train.STEPS + 1))
    return done.meta()


def loads(done: train.Finished) -> bool:
    """The exported model loads, with no weight missing, and speaks through its own tokenizer."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = done.output_dir / "final"
    model, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    logits = model(**tokenizer("bread", return_tensors="pt")).logits
    return not info["missing_keys"] and not info["unexpected_keys"] and bool(logits.isfinite().all())


def adapter_moved(done: train.Finished) -> bool:
    """The exported adapter is complete and has learnt: LoRA's B matrices start at zero."""
    from safetensors.torch import load_file

    tensors = load_file(done.output_dir / "final" / "adapter_model.safetensors")
    b_matrices = [tensor for name, tensor in tensors.items() if "lora_B" in name]
    return bool(b_matrices) and all(bool(tensor.abs().sum() > 0) for tensor in b_matrices)


def test_ddp_and_fsdp2_take_the_same_steps(tmp_path):
    (tmp_path / "ddp").mkdir()
    (tmp_path / "fsdp").mkdir()
    first = train.run(
        ddp(tmp_path / "ddp"),
        train.script("--strategy", "ddp", output_dir=tmp_path / "ddp" / "out"),
        tmp_path / "ddp",
    )
    second = train.run(
        fsdp2(tmp_path / "fsdp"),
        train.script("--strategy", "fsdp", output_dir=tmp_path / "fsdp" / "out"),
        tmp_path / "fsdp",
    )
    assert trained(first, "ddp").distributed_type == "MULTI_CPU"
    meta = trained(second, "fsdp")
    assert meta.distributed_type == "FSDP"
    assert meta.wrapped_class == "FSDPQwen3ForCausalLM"
    assert meta.dtensor_params > 0
    assert first.losses() == pytest.approx(second.losses(), abs=2e-3)
    assert loads(first)
    assert loads(second)


def test_sharded_checkpoint_resumes_and_the_final_model_is_written_all_the_same(tmp_path):
    launcher = fsdp2(tmp_path)
    whole = train.run(
        launcher,
        train.script("--strategy", "fsdp", "--save-steps", "2", output_dir=tmp_path / "out"),
        tmp_path,
    )
    trained(whole, "fsdp")
    checkpoint = tmp_path / "out" / "checkpoint-2"
    assert list(checkpoint.glob("pytorch_model_fsdp_0/*.distcp"))
    shutil.rmtree(tmp_path / "run")
    resumed = train.run(
        launcher,
        train.script("--strategy", "fsdp", "--resume", str(checkpoint), output_dir=tmp_path / "again"),
        tmp_path,
    )
    assert resumed.code == 0, resumed.output[-3000:]
    assert [step.step for step in resumed.of_kind(0, records.Step)] == [3, 4]
    assert resumed.losses() == pytest.approx(whole_losses(resumed, whole)[2:], abs=2e-3)
    assert loads(resumed)


def whole_losses(resumed: train.Finished, whole: train.Finished) -> list[float]:
    """The losses of the uninterrupted run, from its trainer state (its telemetry was removed)."""
    import json

    state = json.loads((whole.output_dir / "checkpoint-4" / "trainer_state.json").read_text())
    return [entry["loss"] for entry in state["log_history"] if "loss" in entry]


def test_fsdp2_with_full_state_dicts_saves_plain_checkpoints(tmp_path):
    done = train.run(
        fsdp2(tmp_path, fsdp_state_dict_type="FULL_STATE_DICT"),
        train.script("--strategy", "fsdp", "--save-steps", "4", output_dir=tmp_path / "out"),
        tmp_path,
    )
    trained(done, "fsdp")
    assert (tmp_path / "out" / "checkpoint-4" / "model.safetensors").stat().st_size > 0


def test_moe_lora_gives_experts_their_share_of_the_rank(tmp_path):
    from safetensors.torch import load_file

    done = train.run(
        fsdp2(tmp_path),
        train.script(
            "--strategy",
            "fsdp",
            "--variant",
            "moe-lora",
            "--lora-rank",
            "16",
            output_dir=tmp_path / "out",
            model="tiny-moe",
        ),
        tmp_path,
    )
    trained(done, "fsdp")
    assert adapter_moved(done)
    tensors = load_file(done.output_dir / "final" / "adapter_model.safetensors")
    attention = {t.shape[0] for name, t in tensors.items() if "q_proj.lora_A" in name}
    experts = {t.shape[0] for name, t in tensors.items() if ".experts." in name and "lora_A" in name}
    assert attention == {16}
    assert experts == {8 * max(1, 16 // 8)}  # eight experts of rank two, stacked


def test_full_fine_tune_of_a_moe_counts_its_tokens_under_fsdp2(tmp_path):
    done = train.run(
        fsdp2(tmp_path, fsdp_activation_checkpointing=True),
        train.script(
            "--strategy", "fsdp", "--grad-accum", "2", output_dir=tmp_path / "out", model="tiny-moe"
        ),
        tmp_path,
    )
    meta = trained(done, "fsdp")
    assert (meta.expert_count, meta.top_k, meta.moe_layers) == (8, 2, 4)
    for rank in range(2):
        counts = done.of_kind(rank, records.Experts)
        totals = {layer: sum(sum(r.counts) for r in counts if r.layer == layer) for layer in range(4)}
        assert len(set(totals.values())) == 1
        assert totals[0] > 0
        assert totals[0] % meta.top_k == 0


def reference_losses(model: str, dp_size: int, grad_accum: int) -> list[float]:
    """The same steps in one process without any sharding: what a parallel loop has to come out at.

    Each step's micro-batches of all data-parallel ranks in turn, one loss over all their tokens.
    """
    import torch
    from transformers import get_cosine_schedule_with_warmup

    from ftdash.engine.train import data, loading, loop
    from ftdash.engine.train.options import Options

    options = Options(model=model, seq_len=96, micro_batch=2, grad_accum=grad_accum, steps=train.STEPS)
    source = loading.model_source(options)
    tokenizer = loading.load_tokenizer(source, options)
    rows = loop.encode(data.load(options.data), tokenizer, options)
    whole = loading.load_model(source, options)
    whole.train()
    optimizer = torch.optim.AdamW(whole.parameters(), lr=options.lr, weight_decay=0.0, foreach=False)
    schedule = get_cosine_schedule_with_warmup(optimizer, 0, options.steps)
    coefficient = loop.router_coefficient(options, whole)
    extra = {"output_router_logits": True} if coefficient else {}
    layouts = [loop.Layout(world=dp_size, rank=rank, tp=1, ep=1, replicate=1) for rank in range(dp_size)]
    shares = [loop.batches(rows, layout, options.micro_batch, options.seed) for layout in layouts]
    losses = []
    for _ in range(options.steps):
        micro = [
            loop.collate(next(share), tokenizer.pad_token_id, torch.device("cpu"))
            for _ in range(grad_accum)
            for share in shares
        ]
        total = sum(int((batch["labels"] != loop.IGNORED).sum()) for batch in micro)
        step_loss = 0.0
        for batch in micro:
            output = whole(input_ids=batch["ids"], attention_mask=batch["mask"], use_cache=False, **extra)
            summed = loop.token_loss(output.logits, batch["labels"])
            loss = summed / total
            if coefficient:
                loss = loss + coefficient * output.aux_loss / len(micro)
            loss.backward()
            step_loss += float(summed.detach())
        torch.nn.utils.clip_grad_norm_(whole.parameters(), loop.MAX_GRAD_NORM)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(step_loss / total)
    return losses


@pytest.mark.parametrize(
    ("model", "strategy", "world", "flags", "dp_size", "grad_accum"),
    [
        ("tiny-qwen3", "fsdp", 4, ["--tp", "2"], 2, 1),
        ("tiny-moe", "ep", 4, ["--ep", "2", "--tp", "2", "--grad-accum", "2"], 2, 2),
    ],
    ids=["tp-fsdp", "ep-tp-fsdp"],
)
def test_the_plain_loop_takes_the_steps_of_one_process(
    tmp_path, model, strategy, world, flags, dp_size, grad_accum
):
    done = train.run(
        train.torchrun(world),
        train.script("--strategy", strategy, *flags, output_dir=tmp_path / "out", model=model),
        tmp_path,
    )
    meta = trained(done, strategy, world)
    assert meta.dtensor_params > 0
    assert done.losses() == pytest.approx(reference_losses(model, dp_size, grad_accum), abs=2e-3)
    assert loads(done)


def test_asking_for_fsdp_and_getting_ddp_is_an_error_with_one_line(tmp_path):
    done = train.run(ddp(tmp_path), train.script("--strategy", "fsdp", output_dir=tmp_path / "out"), tmp_path)
    assert done.code != 0
    assert "error: asked for fsdp, but MULTI_CPU runs, with DistributedDataParallel" in done.output
    assert not done.of_kind(0, records.Step)
    assert not (tmp_path / "out" / "final").exists()


def test_a_launcher_that_starts_one_process_is_found_out(tmp_path):
    launcher = [sys.executable, "-m", "accelerate.commands.launch", "--cpu", "--num_processes", "2"]
    done = train.run(launcher, train.script("--strategy", "ddp", output_dir=tmp_path / "out"), tmp_path)
    assert done.code != 0
    assert "error: asked for ddp, but only one process runs" in done.output
