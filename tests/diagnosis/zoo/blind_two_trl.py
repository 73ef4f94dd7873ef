"""Reward functions that hang TRL's GRPO, by somebody who had not read the rules: `blind_two_trl.py CASE`.

The line that the verdict has to name ends in `# named`.
"""

import http.client
import logging
import os
import socket
import sys
from pathlib import Path

import datasets
import torch
import torch.distributed as dist
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
from trl.trainer.grpo_config import GRPOConfig
from trl.trainer.grpo_trainer import GRPOTrainer

RANK = int(os.environ["RANK"])
FOLDER = Path(os.environ["ZOO_DIR"])
WORDS = ["<pad>", "<eos>", "<unk>", *"abcdefghijklmnopqrstuvwxyz0123"]


def ready():
    (FOLDER / f"ready-{RANK}").touch()


def trainer(reward):
    vocabulary = {word: number for number, word in enumerate(WORDS)}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )
    config = Qwen3Config(
        vocab_size=len(WORDS),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        pad_token_id=0,
        eos_token_id=1,
    )
    args = GRPOConfig(
        output_dir=str(FOLDER / "out"),
        use_cpu=True,
        ddp_backend="gloo",
        per_device_train_batch_size=2,
        num_generations=2,
        max_completion_length=4,
        max_steps=50,
        gradient_checkpointing=False,
        bf16=False,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
    )
    return GRPOTrainer(
        model=Qwen3ForCausalLM(config),
        reward_funcs=reward,
        args=args,
        train_dataset=datasets.Dataset.from_dict({"prompt": ["a b c", "d e f", "g h i", "j k l"] * 8}),
        processing_class=tokenizer,
    )


def grpo_judge_never_answers():
    """A reward that asks a judge over HTTP; `async`, so that TRL waits for it from another thread."""
    judge = socket.create_server(("127.0.0.1", 0))

    async def ask_judge(completions, trainer_state, **_):
        if RANK == 1 and trainer_state.global_step == 1:
            connection = http.client.HTTPConnection(*judge.getsockname())
            connection.request("POST", "/score", body="\n".join(completions))
            ready()
            connection.getresponse()  # named
        if trainer_state.global_step == 1:
            ready()
        return [float(len(text)) for text in completions]

    trainer(ask_judge).train()


def grpo_reward_gathers_where_it_is_good():
    """A reward that compares itself with the other ranks, but only where a completion was good."""

    def relative_length(completions, trainer_state, **_):
        lengths = [float(len(text)) for text in completions]
        if trainer_state.global_step == 1:
            ready()
            if RANK == 2:
                everyone = [torch.zeros(len(lengths)) for _ in range(dist.get_world_size())]
                dist.gather(torch.tensor(lengths), everyone, dst=RANK)  # named
                return [length / torch.stack(everyone).max().item() for length in lengths]
        return lengths

    trainer(relative_length).train()


def grpo_reward_error_swallowed():
    """Rank 1 cannot parse a completion, logs the error and goes on to the end of its script."""

    def parsed(completions, trainer_state, **_):
        if trainer_state.global_step == 1:
            ready()
            if RANK == 1:
                raise ValueError("no answer tag in the completion")
        return [float(len(text)) for text in completions]

    grpo = trainer(parsed)
    try:
        grpo.train()
    except ValueError:
        logging.exception("training ended early")
    grpo.accelerator.wait_for_everyone()  # named
    grpo.save_model()


if __name__ == "__main__":
    globals()[sys.argv[1]]()
