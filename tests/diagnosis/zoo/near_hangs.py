"""Jobs that look stuck and are not, and jobs that just run: `near_hangs.py CASE`, one process per rank."""

import asyncio
import os
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import torch
import torch.distributed as dist
from rank import FOLDER, RANK, ready, tensor


def slow_preprocessing():
    def tokenize(text):
        return [ord(letter) % 97 for letter in text]

    def preprocess():
        rows = []
        for number in range(10**9):
            rows.append(sum(tokenize("some text of a row " * 50)) + number)
            if len(rows) > 1000:
                rows.clear()

    ready()
    if RANK == 0:
        preprocess()
    dist.barrier()


def slow_map():
    import datasets

    datasets.disable_progress_bars()
    data = datasets.Dataset.from_dict({"x": list(range(100000))})

    def encode(row):
        time.sleep(0.02)
        return {"y": row["x"] + 1}

    ready()
    if RANK == 0:
        data.map(encode, num_proc=2)
    dist.barrier()


def slow_save():
    def save_checkpoint():
        with open(FOLDER / "checkpoint.bin", "wb") as handle:
            for _ in range(10**6):
                handle.write(b"x" * 20000)
                handle.flush()
                if handle.tell() > 20_000_000:
                    handle.seek(0)
                time.sleep(0.02)

    ready()
    if RANK == 0:
        save_checkpoint()
    dist.barrier()


def slow_torch_save():
    ready()
    if RANK == 0:
        state = {f"layer.{number}": torch.randn(512, 512) for number in range(40)}
        while True:
            torch.save(state, FOLDER / "model.pt")
    dist.barrier()


def long_evaluation():
    def evaluate(model):
        with torch.no_grad():
            while True:
                model(torch.randn(256, 256))

    ready()
    if RANK == 0:
        evaluate(torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.ReLU(), torch.nn.Linear(256, 256)))
    dist.barrier()


def long_compute_on_one():
    ready()
    matrix = torch.randn(700, 700)
    if RANK == 1:
        for _ in range(10**6):
            matrix = torch.nn.functional.normalize(matrix @ matrix)
    dist.all_reduce(tensor())


def slow_loading():
    path = FOLDER / f"weights-{RANK}.bin"
    path.write_bytes(os.urandom(1 << 20))
    ready()
    if RANK == 0:
        while True:
            len(path.read_bytes())
            time.sleep(0.01)
    dist.barrier()


def generates_on_one():
    def generate():
        state = torch.randn(64, 64)
        while True:
            state = torch.tanh(state @ state)

    ready()
    if RANK == 1:
        generate()
    dist.barrier()


def compiles():
    ready()
    if RANK == 0:
        width = 8
        while True:
            width += 1
            model = torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.GELU())
            torch.compile(model)(torch.ones(2, width))
            torch._dynamo.reset()
    dist.barrier()


def trains():
    model = torch.nn.parallel.DistributedDataParallel(
        torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))
    )
    optimizer = torch.optim.AdamW(model.parameters())
    for step in range(10**9):
        model(torch.randn(32, 64)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == 3:
            ready()


def trains_unevenly():
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 1))
    for step in range(10**9):
        time.sleep(0.05 if RANK else 0.15)
        model(torch.randn(32, 64)).sum().backward()
        if step == 3:
            ready()


def waits_for_slow_loader():
    from torch.utils.data import DataLoader, Dataset

    class Slow(Dataset):
        def __len__(self):
            return 10**6

        def __getitem__(self, index):
            time.sleep(0.02)
            return torch.randn(1000) * index

    ready()
    for batch in DataLoader(Slow(), batch_size=20 if RANK == 0 else 1, num_workers=1):
        dist.all_reduce(batch.sum())


def paces_itself():
    def build_index():
        for _ in range(10**6):
            time.sleep(0.05)

    ready()
    if RANK == 1:
        build_index()
    dist.barrier()


def works_through_a_queue():
    def drain(items):
        while items:
            items = items[1:]
            time.sleep(0.05)

    ready()
    if RANK == 0:
        drain(list(range(10**6)))
    dist.barrier()


def counts_in_python():
    def histogram():
        counts = [0] * 97
        for number in range(10**12):
            counts[number % 97] += 1

    ready()
    if RANK == 0:
        histogram()
    dist.barrier()


def waits_for_a_compiler():
    ready()
    if RANK == 0:
        subprocess.run(["sh", "-c", "while :; do :; done"], check=False)
    dist.barrier()


def waits_for_its_writer():
    def write():
        with open(FOLDER / "state.bin", "wb") as handle:
            for _ in range(10**6):
                handle.write(b"x" * 20000)
                handle.flush()
                handle.seek(0)
                time.sleep(0.02)

    writer = threading.Thread(target=write)
    ready()
    if RANK == 0:
        writer.start()
        writer.join()
    dist.barrier()


def receives_slowly():
    server = socket.create_server(("127.0.0.1", 0))

    def serve():
        client, _ = server.accept()
        while True:
            client.sendall(b"y" * 100)
            time.sleep(0.05)

    def fetch_vocabulary():
        with socket.create_connection(server.getsockname()) as connection, connection.makefile("rb") as lines:
            total = 0
            while chunk := lines.read(100):
                total += len(chunk)

    ready()
    if RANK == 1:
        threading.Thread(target=serve, daemon=True).start()
        fetch_vocabulary()
    dist.barrier()


def finds_a_learning_rate():
    """Every rank sleeps between its trial steps."""
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 1))
    for step in range(10**6):
        model(torch.randn(4, 8)).sum().backward()
        time.sleep(0.3)
        if step == 2:
            ready()


def saves_in_a_thread():
    """Training goes on while a thread writes the last checkpoint."""

    def save(state):
        while True:
            torch.save(state, FOLDER / f"model-{RANK}.pt")
            time.sleep(0.05)

    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 64))
    threading.Thread(target=save, args=(model.module.state_dict(),), daemon=True).start()
    for step in range(10**6):
        model(torch.randn(8, 64)).sum().backward()
        if step == 2:
            ready()


def awaits_one_score_after_another():
    """All of the work is in coroutines, and the main thread is in its event loop each time one looks."""

    async def score(number):
        await asyncio.sleep(0.05)
        return number

    async def scores():
        return [await score(number) for number in range(10**6)]

    ready()
    if RANK == 0:
        asyncio.run(scores())
    dist.barrier()


def thread_computes():
    def work():
        x = torch.randn(300, 300)
        while True:
            x = torch.tanh(x @ x)

    ready()
    if RANK == 0:
        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        thread.join()
    dist.barrier()


def uploads_in_a_pool():
    def upload(name):
        with (FOLDER / name).open("wb") as target:
            while True:
                target.write(os.urandom(1 << 14))
                target.flush()
                time.sleep(0.1)

    ready()
    if RANK == 0:
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(upload, ["model", "optimizer"]))
    dist.barrier()


def accumulates_gradients():
    model = torch.nn.Sequential(*[torch.nn.Linear(256, 256) for _ in range(4)])
    ready()
    while True:
        for _ in range(300 if RANK == 0 else 10):
            model(torch.randn(64, 256)).sum().backward()
        dist.all_reduce(tensor())


def main(case):
    dist.init_process_group("gloo")
    globals()[case]()


if __name__ == "__main__":
    main(sys.argv[1])
