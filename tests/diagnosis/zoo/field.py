"""Further ways to hang gloo ranks, of kinds that users report: `field.py CASE`, one process per rank.

The line that the verdict has to name ends in `# named`.
"""

import queue
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from pathlib import Path

import torch.distributed as dist
from rank import FOLDER, RANK, WORLD, ready, tensor

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


def left_in_the_debugger():
    ready()
    if RANK == 1:
        breakpoint()  # named
    dist.all_reduce(tensor())  # named


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
