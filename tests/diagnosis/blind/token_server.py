"""A tokenizer behind a socket whose server stopped answering one of its clients."""

import socket
import threading

import torch
import torch.distributed as dist

from tests.diagnosis.blind.ranks import at_the_point, join


class RemoteTokenizer:
    def __init__(self, answers: int) -> None:
        self.server = socket.create_server(("127.0.0.1", 0))
        threading.Thread(target=self.serve, args=(answers,), daemon=True).start()
        self.connection = socket.create_connection(self.server.getsockname())

    def serve(self, answers: int) -> None:
        client, _ = self.server.accept()
        for _ in range(answers):
            client.sendall(client.recv(1024))
        threading.Event().wait()

    def encode(self, text: str) -> list[int]:
        self.connection.sendall(text.encode())
        return list(self.connection.recv(1024))


def collate(tokenizer: RemoteTokenizer, texts: list[str]) -> torch.Tensor:
    return torch.tensor([tokenizer.encode(text) for text in texts], dtype=torch.float)


def train(rank: int) -> None:
    tokenizer = RemoteTokenizer(answers=7 if rank == 1 else 10_000)
    for step in range(1000):
        if step == 3:
            at_the_point()
        batch = collate(tokenizer, ["hello", "world"])
        dist.all_reduce(batch)


def main() -> None:
    rank, _ = join()
    train(rank)


if __name__ == "__main__":
    main()
