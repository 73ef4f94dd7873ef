"""Further ways to hang gloo ranks, of kinds that users report: `field.py CASE`, one process per rank.

The line that the verdict has to name ends in `# named`.
"""

import asyncio
import concurrent.futures
import ctypes
import fcntl
import http.server
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from pathlib import Path

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

RANK = int(os.environ["RANK"])
WORLD = int(os.environ["WORLD_SIZE"])
FOLDER = Path(os.environ["ZOO_DIR"])


def ready():
    (FOLDER / f"ready-{RANK}").touch()


def tensor(size=4):
    return torch.ones(size)


HOLD = "import fcntl, sys, time; f = open(sys.argv[1], 'w'); fcntl.flock(f, 2); print(); time.sleep(3600)"


def lock_elsewhere(path):
    """Another process takes the lock on a file and keeps it."""
    child = subprocess.Popen([sys.executable, "-u", "-c", HOLD, str(path)], stdout=subprocess.PIPE)
    child.stdout.readline()


def subgroup_on_some():
    ready()
    if RANK != 2:
        dist.new_group(range(WORLD))
    dist.all_reduce(tensor())  # named


def subgroup_on_one():
    ready()
    if RANK == 0:
        dist.new_group(range(WORLD))  # named
    dist.all_reduce(tensor())


def other_root():
    ready()
    shared = [{"lr": 1e-4}] if RANK == 0 else [None]
    dist.broadcast_object_list(shared, src=3 if RANK == 2 else 0)  # named
    dist.barrier()


class EpochDataset(Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, index):
        marker = FOLDER / f"seen-{RANK}-{index}"
        if RANK == 0 and marker.exists():
            threading.Event().wait()  # named
        marker.touch()
        return index


def persistent_workers_second_epoch():
    loader = DataLoader(EpochDataset(), num_workers=1, persistent_workers=True)
    for epoch in range(2):
        if epoch == 1:
            ready()
        for _ in loader:  # named
            dist.all_reduce(tensor())


def map_workers_deadlock():
    import datasets

    datasets.disable_progress_bars()
    data = datasets.Dataset.from_dict({"x": list(range(100))})
    lock = threading.Lock()

    def tokenize(row):
        with lock:
            return {"y": row["x"]}

    lock.acquire()
    ready()
    if RANK == 0:

        def stuck(row):
            queue.Queue().get()

        data.map(stuck, num_proc=2)  # named
    dist.barrier()


def load_with_file_lock():
    from filelock import FileLock

    path = FOLDER / "cache.lock"
    if RANK == 1:
        lock_elsewhere(path)
    ready()
    if RANK == 1:
        with FileLock(str(path)):  # named
            pass
    dist.barrier()


def download_never_answers():
    class Silent(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            time.sleep(3600)

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Silent)
    threading.Thread(target=server.serve_forever, daemon=True).start()

    def download(name):
        return urllib.request.urlopen(f"http://127.0.0.1:{server.server_port}/{name}").read()  # named

    ready()
    if RANK == 0:
        download("model.safetensors")
    dist.barrier()


def generate_on_server_that_refuses():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]

    def generate(prompts):
        while True:
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{port}/generate") as answer:  # named
                    return answer.read()
            except OSError:
                time.sleep(0.2)  # named

    ready()
    if RANK == 0:
        generate(["hello"])
    dist.broadcast(tensor(), src=0)


def load_polls_in_a_helper():
    def pause():
        time.sleep(0.1)  # named

    def load_weights(path):
        while not path.exists():
            pause()
        return path.read_bytes()

    ready()
    if RANK == 2:
        load_weights(Path("/nonexistent/weights.bin"))
    dist.barrier()


def producer_thread_died():
    batches = queue.Queue(maxsize=2)

    def produce():
        for number in range(3):
            batches.put(number)
        if RANK == 1:
            raise ValueError("bad sample")
        for number in range(10**9):
            batches.put(number)

    def next_batch():
        while True:
            try:
                return batches.get(timeout=0.5)  # named
            except queue.Empty:
                continue

    threading.excepthook = lambda args: None
    threading.Thread(target=produce, daemon=True).start()
    for step in range(100):
        if step == 3:
            ready()
        next_batch()
        dist.all_reduce(tensor())


def lock_in_signal_handler():
    lock = threading.Lock()

    def on_alarm(number, frame):
        with lock:  # named
            pass

    signal.signal(signal.SIGALRM, on_alarm)
    ready()
    if RANK == 1:
        with lock:
            signal.raise_signal(signal.SIGALRM)
    dist.all_reduce(tensor())


def holds_the_interpreter_lock():
    ready()
    if RANK == 0:
        ctypes.PyDLL(None).pause()  # named
    dist.all_reduce(tensor())


def left_in_the_debugger():
    ready()
    if RANK == 1:
        breakpoint()  # named
    dist.all_reduce(tensor())  # named


def waits_for_an_asynchronous_save():
    pool = concurrent.futures.ThreadPoolExecutor(1)

    def write(state):
        threading.Event().wait()

    def save_checkpoint():
        pool.submit(write, {}).result()  # named

    ready()
    if RANK == 0:
        save_checkpoint()
    dist.barrier()


def collectives_in_a_thread():
    done = queue.Queue()

    def communicate():
        if RANK == 1:
            time.sleep(3600)  # named
        dist.all_reduce(tensor())
        done.put(True)

    thread = threading.Thread(target=communicate, daemon=True)
    ready()
    thread.start()
    done.get()  # named


def both_receive_first():
    ready()
    if RANK < 2:
        dist.recv(tensor(), src=1 - RANK)  # named
        dist.send(tensor(), dst=1 - RANK)
    dist.barrier()


def prints_into_a_full_pipe():
    reader, writer = os.pipe()
    log = os.fdopen(writer, "w")
    ready()
    if RANK == 1:
        while True:
            log.write("step " * 1000)  # named
            log.flush()  # named
    dist.barrier()
    os.close(reader)


def waits_in_an_event_loop():
    async def reward():
        await asyncio.Event().wait()

    ready()
    if RANK == 2:
        asyncio.run(reward())  # named
    dist.all_reduce(tensor())


def one_more_reduction():
    """A rank-local condition adds a collective of the same kind at another line."""
    ready()
    loss = float("nan") if RANK == 2 else 1.0
    for _ in range(3):
        if loss != loss:
            dist.all_reduce(tensor())  # named
        dist.all_reduce(tensor(), op=dist.ReduceOp.MAX)  # named
    dist.barrier()


def two_are_stuck():
    ready()
    if RANK in (1, 3):
        threading.Event().wait()  # named
    dist.all_reduce(tensor())


def flock_of_another_job():
    path = FOLDER / "tokenizer.lock"
    handle = path.open("w")
    if RANK == 0:
        lock_elsewhere(path)
    ready()
    if RANK == 0:
        fcntl.flock(handle, fcntl.LOCK_EX)  # named
    dist.barrier()


def other_count_of_micro_batches():
    """Rank 1 synchronises gradients one micro-batch later: it runs out of data first."""
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
    last = 5 if RANK == 1 else 4
    for batch in range(12):
        if batch == 8:
            ready()
        if batch % last == last - 1:
            model(torch.ones(2, 4)).sum().backward()
        else:
            with model.no_sync():
                model(torch.ones(2, 4)).sum().backward()
    dist.barrier()  # named


def pool_result_never_comes():
    import multiprocessing

    def evaluate(pool):
        return pool.apply_async(time.sleep, (3600,)).get()  # named

    context = multiprocessing.get_context("spawn")
    if RANK == 1:
        with context.Pool(1) as pool:
            pool.apply(int)
            ready()
            evaluate(pool)
    ready()
    dist.all_reduce(tensor())


def tells_the_others_through_the_store():
    """Ranks wait for a key that rank 0 sets only after a rank-local wait of its own."""
    store = dist.distributed_c10d._get_default_store()
    ready()
    if RANK == 0:
        queue.Queue().get()  # named
        store.set("config", "1")
    store.wait(["config"])


def main(case):
    dist.init_process_group("gloo")
    globals()[case]()


if __name__ == "__main__":
    main(sys.argv[1])
