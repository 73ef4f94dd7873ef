"""Fine-tuning with TRL's SFTTrainer: single process, DDP, FSDP1, FSDP2, HSDP and DeepSpeed ZeRO."""

from __future__ import annotations

import contextlib
import os
import warnings
from pathlib import Path
from typing import Any

from ftdash.engine.train import adapters, data, loading, verify
from ftdash.engine.train.options import (
    FSDP2_STRATEGIES,
    OPTIMIZERS,
    Options,
    TrainError,
    TrainStrategy,
)
from ftdash.engine.train.report import StepReport
from ftdash.engine.train.stop import StopRequest
from ftdash.monitor.hook import Hook


def run(options: Options, asked: TrainStrategy, deepspeed: str | None, hook: Hook) -> None:
    """Train, verify before the first step, and export the final model. Raises TrainError in one line."""
    from transformers import TrainerCallback
    from transformers.trainer_callback import PrinterCallback, ProgressCallback
    from trl import SFTTrainer

    from ftdash.monitor.hook.trainer import FtdashCallback

    loading.quiet()
    # A tiny model is built before anything of a process group or ZeRO-3 stands around it.
    source = loading.model_source(options)
    # Before the model is loaded: under ZeRO-3 these tell from_pretrained to partition while it loads.
    arguments = _arguments(options, deepspeed)
    tokenizer = loading.load_tokenizer(source, options)
    dataset = data.load(options.data)
    loading.enough_rows(len(dataset), options)
    arguments.assistant_only_loss = data.is_conversational(dataset) and loading.marks_assistant(tokenizer)
    model = loading.load_model(source, options)

    class Trainer(SFTTrainer):
        """SFTTrainer that tells the hook when ranks wait for one another, and can use full logits."""

        def _get_num_items_in_batch(self, *args: Any, **kwargs: Any) -> Any:
            with hook.phase("sync"):
                return super()._get_num_items_in_batch(*args, **kwargs)

        def compute_loss(self, model: Any, inputs: Any, **kwargs: Any) -> Any:
            if options.loss != "full" or kwargs.get("return_outputs"):
                return super().compute_loss(model, inputs, **kwargs)
            return super(SFTTrainer, self).compute_loss(model, inputs, **kwargs)

    class Verify(TrainerCallback):
        """Holds the prepared trainer against what was asked for, before the first step."""

        def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            zero = _zero_stage(trainer)
            kind = str(trainer.accelerator.distributed_type).rpartition(".")[2]
            found = verify.observe(trainer.model_wrapped, trainer.model, kind, zero)
            hook.describe(
                trainer.model, **loading.meta(options, state.max_steps), **found.meta(), strategy=str(asked)
            )
            verify.check(options, asked, found)
            report.tell_reality(asked, found)
            if asked in FSDP2_STRATEGIES and found.unsharded_packed:
                count = found.unsharded_packed
                text = f"{count} quantised weights stay whole on all ranks: FSDP cannot shard uint8"
                hook.event("warning", "not-sharded", text)
                report.say(f"warning: {text}")

    class Stop(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            with hook.phase("sync"):
                wanted = stop.agreed(args.device)
            if wanted and not control.should_training_stop:
                control.should_save = control.should_training_stop = True
                hook.event("note", "stop-requested", f"asked to stop: saving after step {state.global_step}")

    report = StepReport(options, hook)
    peft_config = adapters.lora_config(options, model.config)
    with warnings.catch_warnings():
        # PEFT says that rank_pattern is ignored for target_parameters; it is not, and the tests measure it.
        warnings.filterwarnings("ignore", message=".*rank_pattern.*")
        trainer = Trainer(
            model=model,
            args=arguments,
            train_dataset=dataset,
            processing_class=tokenizer,
            peft_config=peft_config,
            callbacks=[Verify(), FtdashCallback(hook, describe=False), report, Stop()],
        )
    trainer.remove_callback(PrinterCallback)
    trainer.remove_callback(ProgressCallback)
    if options.freeze_router:
        loading.freeze_routers(trainer.model)
    stop = StopRequest(hook.run_dir, hook.rank)
    try:
        trainer.train(resume_from_checkpoint=str(options.resume) if options.resume else None)
        if options.export:
            with hook.phase("save"):
                _export(trainer, options.output_dir / "final")
    finally:
        stop.close()


def _arguments(options: Options, deepspeed: str | None) -> Any:
    """The SFTConfig of the options. Loss is normalised by the loss tokens of all ranks and micro-batches."""
    from trl import SFTConfig

    on_gpu = options.on_gpu
    if options.loss not in ("fused", "chunked", "full"):
        raise TrainError(f"--loss {options.loss}: this script has fused (chunked) and full")
    aux = 0.0 if options.router_logits == "off" else options.router_aux_loss
    fields = SFTConfig.__dataclass_fields__
    checkpointing = (
        "activation_checkpointing" if "activation_checkpointing" in fields else "gradient_checkpointing"
    )
    wanted: dict[str, Any] = {
        checkpointing: _trainer_checkpoints(options),
        f"{checkpointing}_kwargs": {"selective": True} if options.checkpointing == "selective" else None,
    }
    return SFTConfig(
        output_dir=str(options.output_dir),
        max_steps=options.steps,
        per_device_train_batch_size=options.micro_batch,
        gradient_accumulation_steps=options.grad_accum,
        max_length=options.seq_len,
        packing=options.packing,
        pad_to_multiple_of=_padding(options),
        learning_rate=options.lr,
        lr_scheduler_type="cosine",
        warmup_steps=options.warmup,
        optim=OPTIMIZERS[options.optimizer],
        bf16=options.precision == "bf16-mixed",
        fp16=options.precision == "fp16-mixed",
        router_aux_loss_coef=aux,
        average_tokens_across_devices=True,
        logging_steps=1,
        logging_nan_inf_filter=False,
        disable_tqdm=True,
        report_to="none",
        save_strategy="steps" if options.save_steps else "no",
        save_steps=options.save_steps or 500,
        seed=options.seed,
        data_seed=options.seed,
        use_cpu=not on_gpu,
        dataloader_pin_memory=on_gpu,
        deepspeed=deepspeed,
        ddp_backend=None if on_gpu or int(os.environ.get("WORLD_SIZE", "1")) < 2 else "gloo",
        **wanted,
    )


def _padding(options: Options) -> int | None:
    """What sequences are padded to where several ranks share one.

    Ring attention cuts each into two chunks a rank, Ulysses into one. Ulysses first gathers the batches of
    these ranks, and gloo gathers tensors of one size only.
    """
    if options.cp == 1:
        return None
    if options.strategy in FSDP2_STRATEGIES:
        return 2 * options.cp
    return options.cp if options.on_gpu else options.seq_len


def _trainer_checkpoints(options: Options) -> bool:
    """Whether the trainer checkpoints activations itself: not when FSDP's own config already does."""
    if os.environ.get("FSDP_ACTIVATION_CHECKPOINTING", "").lower() == "true":
        return False
    return options.checkpointing != "none"


def _zero_stage(trainer: Any) -> int:
    engine = getattr(trainer, "deepspeed", None)
    return int(engine.zero_optimization_stage()) if engine is not None else 0


def _tensors_in(folder: Path) -> int:
    """Tensors of all safetensors files of a folder; a file that holds none is still 40 bytes long."""
    from safetensors import safe_open

    count = 0
    for path in folder.glob("*.safetensors"):
        with safe_open(path, framework="pt") as weights:
            count += len(weights.keys())
    return count


def _export(trainer: Any, folder: Path) -> None:
    """Write the final model or adapter so that from_pretrained loads it; a collective under sharding.

    With sharded state dicts FSDP's save_model writes nothing and says nothing, so the full kind is set first.
    Raises TrainError when no weights came out.
    """
    plugin = getattr(trainer.accelerator.state, "fsdp_plugin", None)
    if trainer.is_fsdp_enabled and plugin is not None:
        plugin.set_state_dict_type("FULL_STATE_DICT")
    with contextlib.suppress(AttributeError):
        trainer.accelerator.wait_for_everyone()
    trainer.save_model(str(folder))
    if trainer.args.should_save:
        if not _tensors_in(folder):
            raise TrainError(f"the final model in {folder} holds no tensors: use the last checkpoint")
        print(f"final model: {folder}", flush=True)
