"""Tiny models and their tokenizer, built on the spot from the shipped data: in seconds, without network.

The tokenizer is a byte-level BPE trained on the shipped chats, with ChatML turns; its chat template marks
the assistant's tokens, so that the loss can be taken on them alone. Weights are random, from a fixed seed.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ftdash.engine.train import data
from ftdash.engine.train.options import TrainError
from ftdash.monitor.home import home

WEIGHTS_SEED = 1234
EMBEDDING_STD = 0.5
TINY_MODELS = ("tiny-qwen3", "tiny-moe")
PAD, START, END = "<|pad|>", "<|im_start|>", "<|im_end|>"

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}"
    "{{ '<|im_start|>assistant\\n' }}"
    "{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}"
    "{{ '\\n' }}"
    "{% else %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def is_tiny(name: str) -> bool:
    return name in TINY_MODELS


def tiny_folder(name: str) -> Path:
    """The folder of a tiny model, with weights, config and tokenizer; built once, whoever comes first.

    Kept below FTDASH_HOME under a name that changes with its ingredients. Ranks that come at the same time
    wait for one another. Raises TrainError when the folder cannot be written.
    """
    config = _read_config(name)
    key = hashlib.sha256()
    for part in (config, CHAT_TEMPLATE.encode(), data.shipped_path().read_bytes(), b"layout 3"):
        key.update(hashlib.sha256(part).digest())
    folder = home() / "tiny" / f"{name}-{key.hexdigest()[:12]}"
    try:
        folder.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with open(folder.parent / f".{folder.name}.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not folder.is_dir():
                scratch = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{name}-"))
                try:
                    _build(json.loads(config), scratch)
                    scratch.rename(folder)
                finally:
                    shutil.rmtree(scratch, ignore_errors=True)
    except OSError as error:
        raise TrainError(f"cannot build {name} in {folder.parent}: {error.strerror or error}") from error
    return folder


def _read_config(name: str) -> bytes:
    from importlib.resources import files

    return (files("ftdash.presets") / "models" / f"{name}.json").read_bytes()


def _texts() -> Iterator[str]:
    for conversation in data.read_jsonl(data.shipped_path()):
        for message in conversation["messages"]:
            yield message["content"]


def build_tokenizer(vocab_size: int) -> Any:
    """A PreTrainedTokenizerFast of at most `vocab_size` tokens, special ones and the 256 bytes included."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[PAD, START, END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_texts(), trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=PAD, eos_token=END, additional_special_tokens=[START]
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def _build(config: dict[str, Any], folder: Path) -> None:
    import torch
    from safetensors.torch import save_file
    from transformers import AutoConfig, AutoModelForCausalLM

    tokenizer = build_tokenizer(config["vocab_size"])
    config.pop("source", None)
    tokens = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(WEIGHTS_SEED)
        model = AutoModelForCausalLM.from_config(
            AutoConfig.for_model(**{**config, **tokens, "bos_token_id": None})
        )
        # Larger than the usual 0.02: tokens then stay distinct in the residual stream of so small a model,
        # and the routers of a fresh MoE spread them over the experts instead of sending all to two.
        torch.nn.init.normal_(model.get_input_embeddings().weight, std=EMBEDDING_STD)
    # Not save_pretrained: inside a process group that writes on rank 0 only, and any rank may come first.
    weights = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    model.config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
