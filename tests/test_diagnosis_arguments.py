"""Of the locals that py-spy shows, only a call's own small integers are kept, and those of the rendezvous."""

from __future__ import annotations

import msgspec
import pytest

from ftdash.monitor.diagnosis.arguments import parse_call

C10D = "/opt/venv/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py"


def dump(name: str, file: str, **values: str) -> bytes:
    shown = [{"name": key, "repr": value} for key, value in values.items()]
    frame = {"name": name, "filename": file, "locals": shown}
    return msgspec.json.encode([{"thread_name": "MainThread", "frames": [frame]}])


@pytest.mark.parametrize(
    ("name", "values", "kept"),
    [
        ("broadcast", {"src": "2", "tensor": "<Tensor>"}, {"src": 2}),
        ("all_reduce", {"group": "<ProcessGroup>"}, {}),
        ("init_process_group", {"rank": "1", "world_size": "4"}, {"rank": 1, "world_size": 4}),
        ("init_process_group", {"rank": "-1", "world_size": "-1"}, {}),
        ("all_reduce", {"rank": "1", "world_size": "4"}, {}),
    ],
)
def test_a_call_keeps_its_integers_alone(name: str, values: dict[str, str], kept: dict[str, int]) -> None:
    assert parse_call(dump(name, C10D, **values)) == kept


def test_locals_of_the_user_are_dropped() -> None:
    assert parse_call(dump("broadcast", "/home/u/train.py", src="2", group="None")) == {}
