"""Out of memory: what the error's text says, the phase and term that broke the plan, remedies that fit."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from ftdash.engine.plan import Checkpointing, Loss, Plan, Strategy
from ftdash.engine.planner import evaluate
from ftdash.engine.planner.result import PhaseName, Term
from ftdash.engine.postmortem import post_mortem
from ftdash.monitor.diagnosis import oomtext
from ftdash.monitor.diagnosis.logs import read_logs
from ftdash.monitor.diagnosis.model import LogFinding, LogKind

GIB = 1 << 30
OLD = (
    "CUDA out of memory. Tried to allocate 2.00 GiB (GPU 3; 79.15 GiB total capacity; 76.00 GiB "
    "already allocated; 1.21 GiB free; 77.00 GiB reserved in total by PyTorch) If reserved memory "
    "is >> allocated memory try setting max_split_size_mb to avoid fragmentation."
)
MIDDLE = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 3 has a total capacty of 79.15 GiB of "
    "which 1.21 GiB is free. Process 4242 has 77.93 GiB memory in use. Of the allocated memory "
    "76.00 GiB is allocated by PyTorch, and 1.00 GiB is reserved by PyTorch but unallocated."
)
NEW = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 3 has a total capacity of 79.15 GiB of "
    "which 1.21 GiB is free. Including non-PyTorch memory, this process has 77.93 GiB memory in "
    "use. Of the allocated memory 76.00 GiB is allocated by PyTorch, with 24.00 MiB allocated in "
    "private pools (e.g., CUDA Graphs), and 1.00 GiB is reserved by PyTorch but unallocated. If "
    "reserved but unallocated memory is large try setting "
    "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid fragmentation."
)


@pytest.mark.parametrize("text", [OLD, MIDDLE, NEW])
def test_the_sizes_are_read_from_the_words_of_every_torch(text: str) -> None:
    said = oomtext.parse(text)
    assert (said.wanted, said.gpu, said.allocated) == (2 * GIB, 3, 76 * GIB)
    assert said.capacity == round(79.15 * GIB)
    assert said.free == round(1.21 * GIB)
    assert said.unallocated == GIB
    assert not said.fragmented


def test_what_others_hold_and_what_lies_in_pieces_is_said() -> None:
    text = NEW.replace("Including", "Process 77 has 30.00 GiB memory in use. Including").replace(
        "and 1.00 GiB is reserved", "and 5.00 GiB is reserved"
    )
    said = oomtext.parse(text)
    assert said.others == 30 * GIB
    assert said.fragmented
    facts = post_mortem(oom(text), None).facts
    assert any("other processes held 30.0 GiB" in fact for fact in facts)
    assert any("expandable_segments" in fact for fact in facts)


TRACE = {
    "logits": [
        ("fixed_cross_entropy", "transformers/loss/loss_utils.py"),
        ("ForCausalLMLoss", "transformers/loss/loss_utils.py"),
        ("forward", "transformers/models/qwen3/modeling_qwen3.py"),
        ("training_step", "transformers/trainer.py"),
    ],
    "backward": [
        ("_engine_run_backward", "torch/autograd/graph.py"),
        ("backward", "torch/_tensor.py"),
        ("training_step", "transformers/trainer.py"),
    ],
    "optimizer": [
        ("_init_group", "torch/optim/adamw.py"),
        ("step", "torch/optim/adamw.py"),
        ("_inner_training_loop", "transformers/trainer.py"),
    ],
    "load": [
        ("_load_state_dict_into_meta_model", "transformers/modeling_utils.py"),
        ("from_pretrained", "transformers/modeling_utils.py"),
    ],
    "gather": [
        ("foreach_all_gather", "torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py"),
        ("unshard", "torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py"),
        ("forward", "transformers/models/qwen3/modeling_qwen3.py"),
    ],
    "save": [
        ("full_tensor", "torch/distributed/tensor/_api.py"),
        ("get_model_state_dict", "torch/distributed/checkpoint/state_dict.py"),
        ("save_model", "transformers/trainer.py"),
    ],
}
PLAN = Plan(model="qwen3-30b-a3b", gpus=8, seq_len=32768, gpu="h100-sxm-80g")


def oom(text: str, trace: str = "", rank: int | None = 5, kind: LogKind = LogKind.OOM) -> LogFinding:
    from ftdash.monitor.diagnosis.model import Frame

    frames = [Frame(name, file, 10) for name, file in TRACE.get(trace, [])]
    return LogFinding(kind=kind, text=text, rank=rank, frames=frames, wanted_bytes=oomtext.parse(text).wanted)


@pytest.mark.parametrize(
    ("trace", "phase", "term"),
    [
        ("logits", PhaseName.FORWARD_END, Term.LOGITS),
        ("optimizer", PhaseName.OPTIMIZER_STEP, Term.OPTIMIZER),
        ("load", PhaseName.LOAD, Term.WEIGHTS),
        ("gather", PhaseName.FORWARD_END, Term.GATHERED),
        ("save", PhaseName.SAVE, Term.GATHERED),
    ],
)
def test_phase_and_term_come_from_where_it_failed(trace: str, phase: PhaseName, term: Term) -> None:
    found = post_mortem(oom(NEW, trace), PLAN)
    assert (found.phase, found.term, found.rank, found.host) == (phase, term, 5, False)


def test_in_backward_the_term_is_the_largest_of_the_phase() -> None:
    found = post_mortem(oom(NEW, "backward"), PLAN)
    phase = next(one for one in evaluate(PLAN).memory.phases if one.name is PhaseName.BACKWARD_START)
    assert found.phase is PhaseName.BACKWARD_START
    assert getattr(phase, found.term.value) == max(size for _, size in phase.terms())


def test_a_batch_that_was_longer_than_planned_is_told_by_its_tokens() -> None:
    text = NEW.replace("2.00 GiB", "49.04 GiB")
    found = post_mortem(oom(text, "logits"), PLAN)
    assert found.configured_tokens == 32768
    assert found.implied_tokens == round(round(49.04 * GIB) / (4 * 151936))
    assert any("tokens against 32,768" in fact for fact in found.facts)


@pytest.mark.parametrize(
    "plan",
    [
        PLAN,
        Plan(model="llama-3.1-8b", gpus=1, strategy=Strategy.NONE, seq_len=8192),
        Plan(model="qwen3-8b", gpus=4, strategy=Strategy.DDP, seq_len=4096, micro_batch=4),
    ],
    ids=["moe", "one gpu", "ddp"],
)
def test_every_remedy_is_planned_anew_and_fits(plan: Plan) -> None:
    said = oomtext.parse(NEW)
    found = post_mortem(oom(NEW, "backward"), plan)
    assert found.remedies
    unplanned = max(0, said.in_use + said.wanted - evaluate(plan).memory.device)
    for remedy in found.remedies:
        memory = evaluate(remedy.plan).memory
        assert memory.device == remedy.needs
        assert remedy.needs + unplanned <= said.capacity
        assert remedy.needs < evaluate(plan).memory.device


def test_memory_that_others_hold_is_not_planned_with() -> None:
    text = NEW.replace("Including", "Process 77 has 60.00 GiB memory in use. Including")
    plan = Plan(model="qwen3-8b", gpus=4, strategy=Strategy.FSDP, seq_len=4096)
    for remedy in post_mortem(oom(text, "backward"), plan).remedies:
        assert remedy.needs <= round(19.15 * GIB)


def test_a_host_that_killed_a_rank_gets_host_remedies() -> None:
    text = "Memory cgroup out of memory: Killed process 811 (python) total-vm:190000000kB"
    plan = Plan(model="qwen3-8b", gpus=8, strategy=Strategy.ZERO3, offload="all")
    found = post_mortem(oom(text, rank=2, kind=LogKind.HOST_OOM), plan, capacity=64 * GIB)
    assert found.host
    assert found.term is None
    assert found.planned > 64 * GIB
    assert found.remedies
    for remedy in found.remedies:
        assert evaluate(remedy.plan).memory.host_ram_per_node <= 64 * GIB
    assert post_mortem(oom(text, rank=2, kind=LogKind.HOST_OOM), plan).remedies == ()


LOG = f"""[rank5]: Traceback (most recent call last):
[rank5]:   File "/home/u/train.py", line 40, in main
[rank5]:     loss = model(**batch).loss
[rank5]:   File "/v/lib/python3.11/site-packages/transformers/loss/loss_utils.py", line 60, in ForCausalLMLoss
[rank5]:     logits = logits.float()
[rank5]: torch.OutOfMemoryError: {NEW.replace("2.00 GiB", "49.04 GiB")}
[rank0]: torch.distributed.DistBackendError: NCCL communicator was aborted on rank 0.
"""


def test_the_command_explains_a_log_with_a_plan_beside_it(tmp_path: Path) -> None:
    (tmp_path / "train.log").write_text(LOG)
    (finding,) = [f for f in read_logs(tmp_path).findings if f.kind is LogKind.OOM]
    assert oomtext.parse(finding.text).unallocated == GIB
    plan = tmp_path / "plan.json"
    plan.write_text(json.dumps({"model": "qwen3-30b-a3b", "gpus": 64, "seq_len": 32768, "strategy": "zero3"}))
    command = [sys.executable, "-m", "ftdash.tui.cli", "diagnose", "--logs", str(tmp_path / "train.log")]
    answer = subprocess.run(
        [*command, "--plan", str(plan), "--json"], capture_output=True, text=True, check=True
    )
    verdict = json.loads(answer.stdout)["verdict"]
    assert verdict["kind"] == "out-of-memory"
    assert verdict["culprits"][0]["rank"] == 5
    assert any("2.6x the 32,768" in text for text in verdict["evidence"])
    assert any("which fits" in text for text in verdict["next"])


def test_full_checkpointing_and_fused_loss_are_among_what_is_tried() -> None:
    plan = Plan(model="llama-3.1-8b", gpus=8, strategy=Strategy.FSDP, seq_len=32768)
    tried = [remedy.plan for remedy in post_mortem(oom(NEW, "logits"), plan).remedies]
    assert any(one.loss is Loss.FUSED or one.checkpointing is Checkpointing.FULL for one in tried)
