"""Patterns met in the field and what helps, and the next commands for each kind of verdict."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ftdash.monitor.diagnosis.kinds import Kind
from ftdash.monitor.diagnosis.model import Verdict
from ftdash.monitor.diagnosis.remedies import module_remedy, shown_remedy
from ftdash.monitor.diagnosis.views import View
from ftdash.monitor.hostname import node_name


@dataclass(frozen=True, slots=True)
class Pattern:
    """Applies when the kind fits and a culprit (or anybody, with `anyone`) has one of the function names."""

    kinds: frozenset[Kind]
    names: frozenset[str]
    fix: str
    source: str
    files: str = ""
    anyone: bool = False


def _pattern(
    kinds: Sequence[Kind], names: str, fix: str, source: str, *, files: str = "", anyone: bool = False
) -> Pattern:
    return Pattern(frozenset(kinds), frozenset(names.split()), fix, source, files, anyone)


PATTERNS: tuple[Pattern, ...] = (
    _pattern(
        [Kind.LOCK, Kind.DATA_LOADER],
        "api_cleanup_request _exitfunc _cleanup",
        "start workers with forkserver (multiprocessing_context='forkserver'); or, where the finalizer is "
        "wandb's, another version of it than 0.25.1 to 0.27",
        "wandb/wandb#12079",
    ),
    _pattern(
        [Kind.DATA_LOADER],
        "eval_batch evaluate evaluate_and_print_results",
        "num_workers=0 for the evaluation loader, or multiprocessing_context='spawn'",
        "bigscience-workshop/Megatron-DeepSpeed#282",
    ),
    _pattern(
        [Kind.DATA_LOADER, Kind.LOCK],
        "_try_get_data _get_data _next_data",
        "num_workers=0 to confirm; then multiprocessing_context='spawn', or TOKENIZERS_PARALLELISM=false, "
        "if a tokenizer was used before the fork",
        "pytorch/pytorch#25158",
    ),
    _pattern(
        [Kind.SAVE_ON_ONE, Kind.PHASE_MISMATCH],
        "save_model save_pretrained save_checkpoint get_state_dict full_tensor state_dict __enter__",
        "call the save on every rank, outside `if is_main_process`: the library itself writes on rank 0 only",
        "huggingface/transformers#10596",
    ),
    _pattern(
        [Kind.EVAL_ON_ONE],
        "evaluate gather_for_metrics evaluation_loop",
        "start the evaluation on every rank, outside `if is_main_process`; a step counted by something that "
        "only the main process has (a progress bar) starts it there alone, too",
        "huggingface/transformers#31532",
    ),
    _pattern(
        [Kind.PHASE_MISMATCH],
        "generate",
        "synced_gpus=True in generate under ZeRO-3 or FSDP",
        "deepspeedai/DeepSpeed#860",
        anyone=True,
    ),
    _pattern(
        [Kind.COLLECTIVE_MISMATCH],
        "reduce_and_partition_ipg_grads __reduce_and_partition_ipg_grads __avg_scatter_grads",
        "deepspeed.utils.set_z3_leaf_modules(model, [MoeBlock]), or send every expert some tokens",
        "deepspeedai/DeepSpeed#4808",
        anyone=True,
    ),
    _pattern(
        [Kind.COLLECTIVE_MISMATCH, Kind.ORDER_MISMATCH],
        "visual vision_tower get_image_features get_video_features encode_image encode_images embed_images "
        "vision_model vision_encoder visual_encoder image_encoder get_vision_features extract_feature",
        "give every rank a dummy image in text-only batches, so that all run the vision tower",
        "modelscope/ms-swift#9655",
        anyone=True,
    ),
    _pattern(
        [Kind.COLLECTIVE_MISMATCH, Kind.ORDER_MISMATCH, Kind.PHASE_MISMATCH],
        "update_named_param update_model_params",
        "the rank hands weights to the vLLM server and waits for its worker, not for a training rank: look "
        "at the server's log, version, address and GPUs",
        "huggingface/trl#3608",
    ),
    _pattern(
        [Kind.OUTSIDE],
        "urlopen getresponse recv_into readinto",
        "give the request a timeout, and let all ranks learn of its failure together",
        "Python, socket timeouts",
    ),
    _pattern(
        [Kind.EXTERNAL_PEER],
        "init_communicator",
        "check version, address, port and GPUs of the vLLM server; NCCL_P2P_DISABLE=1 may help",
        "huggingface/trl#3676",
    ),
    _pattern(
        [Kind.SLOW],
        "iflatmap_unordered _map_single map safe_ddp_context",
        "raise ddp_timeout, or tokenise offline before the job",
        "huggingface/datasets#2298",
        anyone=True,
    ),
    _pattern(
        [Kind.SLOW],
        "save _save save_checkpoint save_model _legacy_save save_file",
        "raise the timeout, or save sharded or asynchronously",
        "huggingface/accelerate#4099",
        anyone=True,
    ),
)

_BY_KIND: dict[Kind, str] = {
    Kind.RENDEZVOUS: "start the missing ranks, or correct --nnodes, --nproc-per-node and MASTER_ADDR",
    Kind.STORE: "stop the job, free the port and kill leftovers of the last run, start again",
    Kind.TEARDOWN: "fix the exception in that rank's log; abort the process group instead of destroying it",
    Kind.D_STATE: "exclude the node and restart (sbatch --exclude=NODE); only a reboot frees the process",
    Kind.UNDUMPABLE: "see on NODE whether the rank lives: `ps -o pid,stat,wchan`. Stat D, or a refusal to "
    "its own user, is the kernel or a driver: restart with sbatch --exclude=NODE",
    Kind.COLLECTIVE_MISMATCH: "every rank must make the same collectives in the same order",
    Kind.ORDER_MISMATCH: "every rank must make the same collectives in the same order",
    Kind.SIZE_MISMATCH: "pad to one size (accelerate's pad_across_processes) and cast to one type, or use an "
    "object collective",
    Kind.PHASE_MISMATCH: "one of: equal numbers of batches on all ranks (drop_last=True, or the Join context "
    "manager), if this rank ran out of data; or, if it left or skipped a step by a condition of its own "
    "(early stop, bad loss, signal, time limit), all ranks decide together (all_reduce the flag). "
    "The call that the others wait in is innocent",
    Kind.SAVE_ON_ONE: "a save that gathers needs every rank: move it out of `if is_main_process`; what only "
    "writes may stay there",
    Kind.EVAL_ON_ONE: "an evaluation that gathers needs every rank: move it out of `if is_main_process`",
    Kind.NETWORK: "run the NCCL tests between the nodes, check links and XID errors, shorten the timeout",
    Kind.ADDRESS_IN_USE: "use --standalone or another --master-port; look for leftovers with `ss -ltnp`",
    Kind.RANK_MISSING: "see what that rank did instead of the call: its own log; flight recorder dumps "
    "(TORCH_FR_BUFFER_SIZE=2000) with ftdash diagnose --flight; or ftdash diagnose while it waits",
    Kind.HOST_OUT_OF_MEMORY: "fewer loader workers, low-memory loading, or more host memory per node",
}

_ENDED_WITH_AN_ERROR = frozenset({Kind.OUT_OF_MEMORY, Kind.HOST_OUT_OF_MEMORY})
_OUT_OF_STEP = frozenset({Kind.COLLECTIVE_MISMATCH, Kind.SIZE_MISMATCH, Kind.ORDER_MISMATCH})


def next_steps(verdict: Verdict, *, over: bool) -> tuple[str, ...]:
    """Commands to type next, most useful first; none on processes where the run is `over`."""
    culprit = verdict.culprits[0] if verdict.culprits else None
    at_host = f"ssh {culprit.host} " if culprit and culprit.host and _elsewhere(culprit.host) else ""
    if over and verdict.kind in (Kind.SLOW, Kind.HEALTHY):
        return ()
    pid = culprit.pid if culprit and not over else 0
    if verdict.kind is Kind.STOPPED_RANK and pid:
        return (f"{at_host}kill -CONT {pid}",)
    if verdict.kind is Kind.D_STATE and pid:
        return (f"{at_host}cat /proc/{pid}/stack", f"{at_host}dmesg -T | tail -50")
    if verdict.kind is Kind.NETWORK:
        return (
            "NCCL_DEBUG=INFO TORCH_FR_BUFFER_SIZE=2000 TORCH_NCCL_TRACE_BUFFER_SIZE=2000 at the next start",
            "ftdash diagnose --flight DIR on the flight recorder dumps",
        )
    if verdict.kind in (Kind.SLOW, Kind.HEALTHY):
        return verdict.next
    if culprit and verdict.kind is Kind.CRASH and culprit.frame and not pid:
        return verdict.next  # its error has been found
    if culprit and (over or verdict.kind in (Kind.DEAD_RANK, Kind.TEARDOWN, Kind.STORE, Kind.CRASH)):
        return (f"read the log of rank {culprit.rank}: the first error, not the last", *verdict.next)
    if pid:
        return (f"{at_host}py-spy dump --native --pid {pid}", *verdict.next)
    if verdict.kind in _OUT_OF_STEP and not verdict.next:
        return ("TORCH_DISTRIBUTED_DEBUG=DETAIL at the next start: it names the first call that differs",)
    if culprit and not verdict.next and verdict.kind in _ENDED_WITH_AN_ERROR:
        return (f"read the log of rank {culprit.rank}: the first error, not the last",)
    return verdict.next


def _elsewhere(host: str) -> bool:
    return host != node_name()


def with_advice(verdict: Verdict, views: Sequence[View], *, over: bool = False) -> Verdict:
    """The verdict with the fix of the pattern that fits, and the next commands."""
    named = {culprit.rank for culprit in verdict.culprits}
    fix = shown_remedy(verdict, views)
    for pattern in PATTERNS if not fix else ():
        if verdict.kind not in pattern.kinds:
            continue
        looked_at = [view for view in views if pattern.anyone or view.rank in named]
        if any(_names_of(view) & pattern.names for view in looked_at):
            fix = f"{pattern.fix} ({pattern.source})"
            break
    fix = fix or module_remedy(verdict, views)
    if not fix:
        nodes = ",".join(dict.fromkeys(culprit.host for culprit in verdict.culprits if culprit.host))
        fix = _BY_KIND.get(Kind(verdict.kind), "").replace("NODE", nodes or "NODE")
    return replace(verdict, fix=verdict.fix or fix, next=next_steps(verdict, over=over))


def _names_of(view: View) -> frozenset[str]:
    names = set(view.reading.names)
    for child in view.evidence.children[:8]:
        names.update(frame.short for thread in child.threads for frame in thread.frames)
    return frozenset(names)
