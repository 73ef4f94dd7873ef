"""Jobs that go on, however it looks, by somebody who had not read the rules: `blind_two_near.py CASE`."""

import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

RANK = int(os.environ["RANK"])
FOLDER = Path(os.environ["ZOO_DIR"])


def ready():
    (FOLDER / f"ready-{RANK}").touch()


def join():
    dist.init_process_group("gloo")
    dist.all_reduce(torch.ones(1))


def train(batches, width=64):
    """Trains and prints nothing."""
    model = torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.GELU(), torch.nn.Linear(width, 1))
    model = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters())
    for step, batch in enumerate(batches):
        model(batch).square().mean().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        (FOLDER / f"step-{RANK}").write_text(str(step))
        if step == 1:
            ready()


def one_rank_three_times_slower():
    """A throttled device: rank 2 multiplies three times as long as the others for the same batch."""

    def batches():
        weight = torch.randn(256, 256)
        while True:
            until = time.thread_time() + (0.45 if RANK == 2 else 0.15)
            while time.thread_time() < until:
                weight = torch.nn.functional.normalize(weight @ weight)
            yield torch.randn(16, 64)

    join()
    train(batches())


def compiles_its_first_step():
    """Every rank compiles a model block by block, with a collective only at the end of the first backward."""
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(FOLDER / f"inductor-{RANK}")
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
    join()
    torch._dynamo.config.recompile_limit = torch._dynamo.config.accumulated_recompile_limit = 10_000
    blocks = []
    for width in range(16, 216):
        block = torch.nn.Sequential(
            torch.nn.LayerNorm(width), torch.nn.GELU(), torch.nn.Linear(width, width + 1)
        )
        blocks.append(torch.compile(block, dynamic=False))
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Sequential(*blocks))
    ready()
    model(torch.randn(4, 16)).sum().backward()


def evaluates_by_generating():
    """Every rank generates long answers for its part of the evaluation, and they meet only at its end."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    join()
    config = Qwen3Config(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        vocab_size=64,
    )
    model = Qwen3ForCausalLM(config).eval()
    answers = []
    ready()
    for _ in range(10_000):
        prompt = torch.randint(2, 64, (2, 8))
        answers.append(model.generate(prompt, do_sample=True, min_new_tokens=800, max_new_tokens=800))
    dist.all_gather_object([None] * dist.get_world_size(), len(answers))


def tokenizes_first_on_main():
    """Rank 0 tokenizes with two processes; the others wait to read its cache."""
    import datasets
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    accelerator.wait_for_everyone()
    datasets.disable_progress_bars()
    data = datasets.Dataset.from_dict({"text": ["a line of words and numbers " * 40] * 30_000})

    def tokenize(row):
        ids = list(row["text"].encode())
        for merge in range(100):
            kept = ids[:1]
            for piece in ids[1:]:
                if kept[-1] ^ piece == merge:
                    kept[-1] = 256 + merge
                else:
                    kept.append(piece)
            ids = kept
        return {"input_ids": ids}

    ready()
    with accelerator.main_process_first():
        data.map(tokenize, num_proc=2)


def syncs_a_big_checkpoint():
    """Rank 0 writes shards and forces each to the disk before the next; the disk spares it no wait."""
    join()
    shard = torch.randn(4_000_000)
    ready()
    if RANK == 0:
        for number in range(100_000):
            with (FOLDER / f"shard-{number % 4}.pt").open("wb") as file:
                torch.save(shard, file)
                file.flush()
                os.fsync(file.fileno())
    dist.barrier()


class ColdFiles(torch.utils.data.Dataset):
    def __len__(self):
        return 100_000

    def __getitem__(self, index):
        time.sleep(0.6)
        return torch.randn(64)


def waits_for_cold_files_everywhere():
    """Every rank spends nearly all its time in its loader: 1.2 s for a batch of two workers."""
    join()
    train(torch.utils.data.DataLoader(ColdFiles(), batch_size=4, num_workers=2))


def trains_without_a_word():
    """A step of some milliseconds, and nothing printed or logged, ever."""
    join()
    train(torch.randn(16, 64) for _ in range(10**9))


if __name__ == "__main__":
    globals()[sys.argv[1]]()
