"""Model, tokenizer and rows of a run, for the trainer and for the plain loop alike."""

from __future__ import annotations

import os
from typing import Any

from ftdash.engine.train import adapters, tiny
from ftdash.engine.train.options import ATTENTION, Options, TrainError, Variant


def model_source(options: Options) -> str:
    """The folder or hub id to load from; a tiny model is built when it is not there yet."""
    return str(tiny.tiny_folder(options.model)) if tiny.is_tiny(options.model) else options.model


def load_tokenizer(source: str, options: Options) -> Any:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(source)
    except (OSError, ValueError) as error:
        raise TrainError(f"--model {options.model}: no tokenizer: {first_line(error)}") from error


def marks_assistant(tokenizer: Any) -> bool:
    """Whether the chat template, or TRL's version of it, marks the assistant's tokens for the loss."""
    if "{% generation" in (tokenizer.chat_template or "") or "{%- generation" in (
        tokenizer.chat_template or ""
    ):
        return True
    from trl.chat_template_utils import get_training_chat_template

    try:
        return get_training_chat_template(tokenizer) is not None
    except ValueError:
        return False


def load_model(source: str, options: Options, **extra: Any) -> Any:
    """The model on its way to the trainer: fp32 masters for mixed precision, a bf16 base under adapters."""
    import torch
    from transformers import AutoModelForCausalLM

    frozen_base = options.variant is not Variant.FULL
    low = options.precision == "bf16" or options.variant is Variant.QLORA
    dtype = torch.bfloat16 if low or (frozen_base and options.precision == "bf16-mixed") else torch.float32
    quantization = adapters.quantization(options)
    if quantization is not None:
        extra["quantization_config"] = quantization
    try:
        return AutoModelForCausalLM.from_pretrained(
            source, dtype=dtype, attn_implementation=ATTENTION[options.attention], **extra
        )
    except (OSError, ImportError) as error:
        raise TrainError(f"--model {options.model}: {first_line(error)}") from error


def first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def enough_rows(rows: int, options: Options) -> None:
    ranks = int(os.environ.get("WORLD_SIZE", "1")) // (options.tp * options.cp)
    if rows < ranks:
        raise TrainError(
            f"--data has {rows} rows for {ranks} data-parallel ranks: some would have nothing to do"
        )


def freeze_routers(model: Any) -> None:
    from ftdash.monitor.hook.experts import find_routers

    routers = find_routers(model)
    if not routers:
        raise TrainError("--freeze-router: the model has no router")
    for _, router in routers:
        router.requires_grad_(False)


def quiet() -> None:
    """No progress bars of the libraries: in a log file each is a hundred lines."""
    import datasets
    from transformers.utils import logging

    datasets.disable_progress_bars()
    logging.disable_progress_bar()


def meta(options: Options, max_steps: int) -> dict[str, Any]:
    """What the options say of a run, as fields of its meta record."""
    import accelerate
    import torch
    import transformers
    import trl

    modules = (torch, transformers, trl, accelerate)
    return {
        "variant": str(options.variant),
        "max_steps": max_steps,
        "micro_batch": options.micro_batch,
        "grad_accum": options.grad_accum,
        "seq_len": options.seq_len,
        "versions": {module.__name__: module.__version__ for module in modules},
    }
