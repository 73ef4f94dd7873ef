"""Hangs by somebody who had not read the rules of diagnosis: `blind_two.py CASE`, one process per rank.

The line that the verdict has to name ends in `# named`.
"""

import logging
import os
import pdb
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist

RANK = int(os.environ.get("RANK", "-1"))
WORLD = int(os.environ["WORLD_SIZE"])
FOLDER = Path(os.environ["ZOO_DIR"])


def ready():
    (FOLDER / f"ready-{RANK}").touch()


def join():
    dist.init_process_group("gloo")
    dist.all_reduce(torch.ones(1))


class Shards(torch.utils.data.Dataset):
    """Rows of a shard that one worker at a time unpacks; the kernel kills a worker that unpacks a big one."""

    def __init__(self):
        self.unpacking = torch.multiprocessing.Lock()

    def __len__(self):
        return 64

    def __getitem__(self, index):
        with self.unpacking:  # named: loader_worker_killed_in_its_lock
            if RANK == 1 and index == 9:
                os.kill(os.getpid(), signal.SIGKILL)
            return index


def loader_worker_killed_in_its_lock():
    """The loop begins again with new workers, and those wait for a lock that the dead one holds."""
    join()
    loader = torch.utils.data.DataLoader(Shards(), batch_size=2, num_workers=2, collate_fn=list)
    for attempt in range(3):
        if attempt > 0 or RANK != 1:
            ready()
        try:
            for batch in loader:  # named
                dist.all_reduce(torch.tensor(batch))
        except RuntimeError:
            logging.exception("a loader worker died, starting over")


def store_process():
    """Not a rank: the process that owns the store of `store_owner_stopped`, as a launcher's agent does."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    (FOLDER / "store.tmp").write_text(f"{store.port} {os.getpid()}")
    (FOLDER / "store.tmp").rename(FOLDER / "store")
    signal.pause()


def store_owner_stopped():
    while not (FOLDER / "store").exists():
        time.sleep(0.05)
    port, owner = map(int, (FOLDER / "store").read_text().split())
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=RANK, world_size=WORLD)
    dist.barrier()
    if RANK == 0:
        os.kill(owner, signal.SIGSTOP)
    dist.barrier()
    ready()
    halves = dist.new_group([0, 1]), dist.new_group([2, 3])
    dist.all_reduce(torch.ones(4), group=halves[RANK // 2])


class ShareGradient(torch.autograd.Function):
    @staticmethod
    def forward(context, x):
        return x.view_as(x)

    @staticmethod
    def backward(context, grad):
        ready()
        dist.all_reduce(grad)  # named: autograd_function_on_one
        return grad


def autograd_function_on_one():
    """Only rank 2 has pairs for the contrastive term, whose backward holds a collective."""
    join()
    head = torch.nn.Linear(8, 8)
    for _ in range(3):
        features = head(torch.randn(4, 8))
        if RANK == 2:
            features = ShareGradient.apply(features)
        features.square().mean().backward()
        losses = [None] * WORLD
        ready()
        dist.all_gather_object(losses, 0.5)


class Gated(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk, self.image, self.head = (torch.nn.Linear(8, 8) for _ in range(3))

    def forward(self, x, with_image):
        x = self.trunk(x)
        return self.head(self.image(x) if with_image else x)


def ddp_branch_without_gradient():
    """Rank 1 has a batch without images: its bucket is never complete, and its backward waits for nobody."""
    join()
    model = torch.nn.parallel.DistributedDataParallel(Gated(), find_unused_parameters=False)
    for step in range(4):
        loss = model(torch.randn(4, 8), with_image=not (RANK == 1 and step == 2)).square().mean()
        if step == 2:
            ready()
        loss.backward()
        parts = [torch.zeros(()) for _ in range(WORLD)]
        dist.all_gather(parts, loss.detach())  # named


def gathers_inside_main_process_first():
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    accelerator.wait_for_everyone()
    ready()
    with accelerator.main_process_first():
        lengths = torch.tensor([len(text) for text in ("one", "three", "seventeen")])
        longest = accelerator.gather(lengths).max()  # named
    accelerator.print(longest)


def group_made_by_its_members():
    """The heads of two tensor-parallel groups make a group for themselves, which all ranks have to make."""
    os.environ["TORCH_DIST_INIT_BARRIER"] = "1"  # as older versions of torch did by themselves
    join()
    ready()
    if RANK in (0, 4):
        heads = dist.new_group([0, 4])  # named
        dist.broadcast(torch.ones(4), src=0, group=heads)
    dist.all_reduce(torch.ones(4))


def clips_gradients_on_one():
    from torch.distributed.fsdp import fully_shard

    join()
    model = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.ReLU(), torch.nn.Linear(16, 16))
    for layer in (model[0], model[2]):
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters())
    for step in range(4):
        model(torch.randn(4, 16)).square().mean().backward()
        if step == 2:
            ready()
            if RANK == 0:
                norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # named
                print("gradient norm", norm.full_tensor().item())
        optimizer.step()
        optimizer.zero_grad()


def exchange(*operations):
    for work in dist.batch_isend_irecv([dist.P2POp(call, data, peer) for call, data, peer in operations]):
        work.wait()


def micro_batch(grad_first):
    """One pass through the stages, activations down and gradients up."""
    activation, gradient = torch.zeros(4), torch.zeros(4)
    first, last = RANK == 0, RANK == WORLD - 1
    if not first:
        exchange((dist.irecv, activation, RANK - 1))
    if not last:
        if grad_first:
            exchange((dist.irecv, gradient, RANK + 1))  # named: pipeline_stage_in_other_order
            exchange((dist.isend, activation, RANK + 1))
        else:
            exchange((dist.isend, activation, RANK + 1))
            exchange((dist.irecv, gradient, RANK + 1))
    if not first:
        exchange((dist.isend, gradient, RANK - 1))


def pipeline_stage_in_other_order():
    """Stage 2 wants the gradient of what it has not sent yet; all the others wait for its neighbours."""
    join()
    for step in range(3):
        if step == 2:
            ready()
        micro_batch(grad_first=step == 2 and RANK == 2)


def checkpoint_thread_on_dead_storage():
    """Every rank waits for its own saving thread; the one of rank 1 never gets its file open."""
    import torch.distributed.checkpoint as dcp

    class Writer(dcp.FileSystemWriter):
        def write_data(self, plan, planner):
            ready()
            if RANK == 1:
                os.mkfifo(FOLDER / "mount")
                with (FOLDER / "mount").open("wb") as target:  # named
                    target.write(b"x")
            return super().write_data(plan, planner)

    join()
    model = torch.nn.Linear(8, 8)
    pending = dcp.async_save(model.state_dict(), storage_writer=Writer(FOLDER / "checkpoint"))
    for _ in range(3):
        model(torch.randn(4, 8)).sum().backward()
    pending.result()
    dist.barrier()


def prints_to_a_stopped_pager():
    """Somebody pressed Ctrl-Z in the pager that shows the output of rank 0."""
    join()
    if RANK == 0:
        pager = subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
        os.dup2(pager.stdin.fileno(), sys.stdout.fileno())
        pager.send_signal(signal.SIGSTOP)
    for step in range(1000):
        dist.all_reduce(torch.ones(4))
        if RANK == 0:
            if step > 3:
                ready()
            print(f"step {step}", torch.randn(400).tolist(), flush=True)  # named
        else:
            ready()


def post_mortem_debugger():
    """An exception hook, left in from the last bug, opens the debugger where nobody sees it."""

    def open_debugger(kind, error, trace):
        logging.error("%s", error)
        ready()
        pdb.post_mortem(trace)  # named

    sys.excepthook = open_debugger
    join()
    for step in range(5):
        if RANK == 1 and step == 3:
            raise ValueError("label 32001 is outside the vocabulary")
        if step == 3:
            ready()
        dist.all_reduce(torch.ones(4))


class MetricsClient:
    def __init__(self, address):
        self.lock, self.rows = threading.Lock(), []
        self.connection = socket.create_connection(address)
        self.sending = threading.Event()

    def flush(self):
        with self.lock:
            self.connection.sendall(repr(self.rows).encode())
            self.sending.set()
            self.connection.recv(2)  # named: thread_waits_with_the_lock
            self.rows.clear()

    def log(self, row):
        with self.lock:  # named: thread_waits_with_the_lock
            self.rows.append(row)


def thread_waits_with_the_lock():
    """A thread sends metrics with the lock in its hand, and the server never says that it has them."""
    join()
    server = socket.create_server(("127.0.0.1", 0))
    client = MetricsClient(server.getsockname())
    for step in range(5):
        if step == 3:
            if RANK == 0:
                threading.Thread(target=client.flush, daemon=True).start()
                client.sending.wait()
            ready()
        client.log({"step": step})
        dist.all_reduce(torch.ones(4))


def signal_handler_synchronises():
    """The scheduler warns one rank, and its handler waits for all before it saves."""

    def save_before_the_end(number, frame):
        ready()
        dist.barrier()  # named
        torch.save({}, FOLDER / "last.pt")

    join()
    signal.signal(signal.SIGUSR1, save_before_the_end)
    model = torch.nn.Linear(8, 8)
    for step in range(6):
        model(torch.randn(4, 8)).sum().backward()
        if step == 4:
            ready()
            if RANK == 1:
                signal.raise_signal(signal.SIGUSR1)
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)


if __name__ == "__main__":
    globals()[sys.argv[1]]()
