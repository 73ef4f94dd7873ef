"""Ways to hang a job of gloo ranks with plain torch: `hangs.py CASE`, one process per rank, forever.

The line that the verdict has to name ends in `# named`.
"""

import ctypes
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

RANK = int(os.environ["RANK"])
WORLD = int(os.environ["WORLD_SIZE"])


def ready():
    Path(os.environ["ZOO_DIR"], f"ready-{RANK}").touch()


def tensor(size=4):
    return torch.ones(size)


def reward_sleeps():
    def score(batch):
        time.sleep(3600)  # named

    ready()
    if RANK == 1:
        score(tensor())
    dist.all_reduce(tensor())


def spins():
    flag = []
    ready()
    if RANK == 1:
        count = 0
        while not flag:  # named
            count += 1  # named
    dist.all_reduce(tensor())


def polls_a_file():
    ready()
    if RANK == 0:
        while not os.path.exists("/nonexistent/flag"):  # named
            time.sleep(0.05)  # named
    dist.barrier()


class StuckDataset(Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        if RANK == 1 and index >= 2:
            queue.Queue().get()  # named
        return index


def loader_worker_stuck():
    ready()
    for _ in DataLoader(StuckDataset(), batch_size=2, num_workers=1):  # named
        dist.all_reduce(tensor())


LOCK = threading.Lock()


class LockedDataset(Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, index):
        if RANK == 1:
            with LOCK:  # named
                return index
        return index


def lock_across_fork():
    if RANK == 1:
        LOCK.acquire()
    ready()
    loader = DataLoader(LockedDataset(), num_workers=1, multiprocessing_context="fork")
    for _ in loader:  # named
        dist.all_reduce(tensor())


def lock_held():
    other = threading.Lock()
    other.acquire()
    ready()
    if RANK == 2:
        other.acquire()  # named
    dist.all_reduce(tensor())


def queue_never_filled():
    ready()
    if RANK == 0:
        queue.Queue().get()  # named
    dist.all_reduce(tensor())


def child_process_never_ends():
    ready()
    if RANK == 0:
        subprocess.run(["sleep", "3600"], check=False)  # named
    dist.barrier()


def reads_standard_input():
    ready()
    if RANK == 1:
        sys.stdin.read()  # named
    dist.barrier()


def other_collective():
    ready()
    if RANK == 2:
        dist.all_gather([tensor() for _ in range(WORLD)], tensor())  # named
    else:
        dist.all_reduce(tensor())


def other_order():
    first, second = dist.new_group(range(WORLD)), dist.new_group(range(WORLD))
    ready()
    if RANK == 1:
        dist.all_reduce(tensor(), group=second)  # named
        dist.all_reduce(tensor(), group=first)
    else:
        dist.all_reduce(tensor(), group=first)
        dist.all_reduce(tensor(), group=second)


def other_group():
    part = dist.new_group([0, 1])
    ready()
    if RANK == 1:
        dist.all_reduce(tensor(), group=part)  # named
    else:
        dist.all_reduce(tensor())


def one_in_barrier():
    ready()
    if RANK == 0:
        dist.barrier()  # named
    for _ in range(3):
        dist.all_reduce(tensor())


def early_break():
    for step in range(100):
        dist.all_reduce(tensor())
        if RANK == 1 and step == 3:
            break
        if step == 2:
            ready()
    dist.barrier()  # named


def uneven_batches():
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
    batches = 3 if RANK == 2 else 4
    for step in range(batches):
        model(torch.ones(2, 4)).sum().backward()
        if step == 2:
            ready()
    dist.barrier()  # named


def out_of_memory_retried():
    ready()
    try:
        if RANK == 1:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        dist.all_reduce(tensor())
    except torch.OutOfMemoryError:
        dist.all_gather([tensor() for _ in range(WORLD)], tensor())  # named


def reward_gathers():
    def reward(batch):
        gathered = [None] * WORLD
        dist.all_gather_object(gathered, batch)  # named

    ready()
    if RANK == 0:
        reward([1])
    dist.barrier()


def async_receive():
    ready()
    if RANK == 1:
        work = dist.irecv(tensor(), src=0)
        work.wait()  # named
    dist.barrier()


def store_key_never_set():
    store = dist.distributed_c10d._get_default_store()
    ready()
    if RANK == 1:
        store.get("never")  # named
    dist.barrier()


def stopped():
    ready()
    if RANK == 1:
        os.kill(os.getpid(), signal.SIGSTOP)  # named
    dist.all_reduce(tensor())


def uninterruptible():
    ready()
    if RANK == 0:
        libc = ctypes.CDLL(None)
        stack = ctypes.create_string_buffer(1 << 16)
        top = ctypes.c_void_p(ctypes.addressof(stack) + (1 << 16) - 16)
        # A child that shares the memory and never runs a program keeps its parent in state D.
        clone_vm, clone_vfork = 0x100, 0x4000
        libc.clone(libc.pause, top, clone_vm | clone_vfork | signal.SIGCHLD, None)  # named
    dist.all_reduce(tensor())


def killed():
    store = dist.distributed_c10d._get_default_store()
    ready()
    if RANK == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    store.wait([f"done-{RANK}"])


def teardown_after_exception():
    def cleanup():
        threading.Event().wait()  # named

    ready()
    try:
        if RANK == 1:
            raise RuntimeError("swallowed")
        dist.all_reduce(tensor())
    except RuntimeError:
        cleanup()


def joins_thread_at_exit():
    ready()
    if RANK == 1:
        threading.Thread(target=time.sleep, args=(3600,)).start()
        return
    dist.all_reduce(tensor())


def all_equal():
    ready()
    dist.recv(tensor(), src=(RANK + 1) % WORLD)


def evaluates_on_main_only():
    def evaluate():
        dist.all_gather([tensor() for _ in range(WORLD)], tensor())  # named

    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
    model(torch.ones(2, 4)).sum().backward()
    ready()
    if RANK == 0:
        evaluate()
    model(torch.ones(2, 4)).sum().backward()


def never_started():
    ready()
    dist.init_process_group("gloo")


def main(case):
    if case != "never_started":
        dist.init_process_group("gloo")
    globals()[case]()


if __name__ == "__main__":
    main(sys.argv[1])
