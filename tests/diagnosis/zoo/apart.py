"""Hangs that differ in where a rank is and in what holds it: `apart.py CASE`, one process per rank.

The line that the verdict has to name ends in `# named`.
"""

import logging
import os
import signal
import socket
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import torch
import torch.distributed as dist
from rank import FOLDER, RANK, WORLD, ready, tensor


def silent_server():
    """Takes connections and never answers."""
    server = socket.create_server(("127.0.0.1", 0))
    server.listen(8)
    return server, server.getsockname()[1]


def pool_reads_dead_storage():
    """The threads of a pool read shards; one opens a pipe that nobody writes to."""
    os.mkfifo(FOLDER / f"shard-{RANK}")

    def read(path):
        with open(path, "rb") as shard:  # named
            return shard.read()

    ready()
    paths = [__file__, FOLDER / "shard-1" if RANK == 1 else __file__]
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(read, paths))  # named
    dist.all_reduce(tensor())


def log_metrics(loss):
    dist.reduce(loss, dst=0)  # named: helpers_of_two


def reduce_gradients(loss):
    dist.all_reduce(loss)


def helpers_of_two():
    """Of two ranks one logs every third step, the other every fourth."""
    ready()
    for step in range(1, 20):
        reduce_gradients(tensor(1))
        if step % (3 if RANK == 1 else 4) == 0:
            log_metrics(tensor(1))


def skips_an_overflowed_step():
    """Of two ranks one finds a loss that is not finite and goes on with the next batch."""
    ready()
    for step in range(20):
        loss = torch.tensor(float("nan") if RANK == 1 and step == 3 else 1.0)
        tokens = [None] * WORLD
        dist.all_gather_object(tokens, step)  # named
        if not torch.isfinite(loss):
            continue
        dist.all_reduce(loss)


def swallows_a_bad_batch():
    """Of two ranks one cannot read a batch, logs it and ends its epoch."""
    ready()
    try:
        for step in range(20):
            if RANK == 0 and step == 3:
                raise ValueError("bad image")
            dist.all_reduce(tensor())
    except ValueError:
        logging.exception("epoch ended")
    dist.barrier()  # named


def one_has_fewer_batches():
    """Of two ranks one has fewer batches."""
    ready()
    for _ in range(5 - (RANK == 1)):
        dist.all_reduce(tensor())
    dist.all_gather([tensor() for _ in range(WORLD)], tensor())  # named


def exchange(*operations):
    for work in dist.batch_isend_irecv([dist.P2POp(call, data, peer) for call, data, peer in operations]):
        work.wait()


def stage_sends_nothing():
    """A pipeline of four stages, and the second one reduces before it has sent its activations."""
    activation = tensor()
    for step in range(4):
        if step == 2:
            ready()
        if RANK > 0:
            exchange((dist.irecv, activation, RANK - 1))
        if RANK == 1 and step == 2:
            dist.all_reduce(tensor(1))  # named
        if RANK < WORLD - 1:
            exchange((dist.isend, activation, RANK + 1))
        dist.barrier()


def logger_thread_holds_its_lock():
    """A thread logs into a full pipe with the logger's lock in its hand; the main thread wants to log too."""
    log = logging.getLogger("train")
    if RANK == 1:
        _, writing = os.pipe()
        log.addHandler(logging.StreamHandler(os.fdopen(writing, "w")))
    else:
        log.addHandler(logging.NullHandler())

    def noisy():
        while True:
            log.warning("x" * 10000)  # named

    ready()
    if RANK == 1:
        threading.Thread(target=noisy, daemon=True).start()
        time.sleep(1)
    for _ in range(10):
        log.warning("step")  # named
        dist.all_reduce(tensor())


def stale_build_lock():
    """A lock that a killed compilation left behind."""
    from torch.utils.file_baton import FileBaton

    baton = FileBaton(str(FOLDER / "lock"))
    if RANK == 0:
        (FOLDER / "lock").touch()
    ready()
    if RANK == 0:
        baton.wait()  # named
    dist.barrier()


class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        if RANK == 1 and index == 20:
            os.kill(os.getpid(), signal.SIGSTOP)
        return index


def loader_worker_stopped():
    loader = torch.utils.data.DataLoader(Rows(), batch_size=4, num_workers=1)
    ready()
    for batch in loader:  # named
        dist.all_reduce(batch.float())


def reads_a_pipe_into_a_tensor():
    reading, _ = os.pipe()
    ready()
    if RANK == 1:
        torch.frombuffer(bytearray(os.read(reading, 16)), dtype=torch.float32).tolist()  # named
    dist.all_reduce(tensor())


def two_hang_apart():
    """Rank 1 waits for a lock, rank 4 for a socket; the others reduce."""
    lock = threading.Lock()
    lock.acquire()
    _server, port = silent_server()
    ready()
    if RANK == 1:
        lock.acquire()  # named
    if RANK == 4:
        socket.create_connection(("127.0.0.1", port)).recv(8)  # named
    dist.all_reduce(tensor())


def one_stuck_beside_one_slow():
    ready()
    if RANK == 1:
        end = time.monotonic() + 3600
        total = tensor(100)
        while time.monotonic() < end:
            total = torch.nn.functional.softmax(total, 0) + torch.randn(100)
    if RANK == 2:
        threading.Event().wait()  # named
    dist.all_reduce(tensor())


def group_member_skips():
    """The same, and rank 3 is in a barrier of the world: the others wait for it in one group or the other."""
    tensor_groups = dist.new_group([0, 1]), dist.new_group([2, 3])
    data_groups = dist.new_group([0, 2]), dist.new_group([1, 3])
    ready()
    if RANK == 3:
        dist.barrier()  # named
    dist.all_reduce(tensor(), group=tensor_groups[RANK // 2])
    dist.all_reduce(tensor(), group=data_groups[RANK % 2])


def evaluates_with_fewer_batches():
    """Of four ranks one has fewer batches of evaluation, and saves already."""

    def evaluate():
        for _ in range(5 - (RANK == 3)):
            dist.all_gather([tensor() for _ in range(WORLD)], tensor())

    ready()
    evaluate()
    dist.barrier()  # named


def main(case):
    dist.init_process_group("gloo")
    globals()[case]()


if __name__ == "__main__":
    main(sys.argv[1])
