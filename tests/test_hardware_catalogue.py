"""The GPU catalogue: fixed names, sane figures with sources, links, and NVML for `local`."""

from __future__ import annotations

import os

import pytest

from ftdash.engine import hardware
from ftdash.engine.hardware import HardwareError, gpu, gpu_names
from ftdash.engine.plan import Plan
from ftdash.engine.planner import evaluate
from tests.support.nvml import Stub, compile_stub

NAMES = """
a100-40g a100-80g h100-sxm-80g h100-pcie-80g h100-nvl-94g h100-hbm2e-96g h200-sxm-141g b200-180g gb200-184g
l4-24g l40s-48g a10-24g a10g-24g rtx6000ada-48g rtx3090-24g rtx4090-24g rtx5090-32g t4-16g v100-16g
v100-32g local
""".split()  # noqa: SIM905


def test_the_fixed_names_are_known() -> None:
    assert set(NAMES) <= set(gpu_names())


@pytest.mark.parametrize("name", [name for name in gpu_names() if name != "local"])
def test_every_gpu_has_sourced_figures_in_a_sane_order(name: str) -> None:
    found = gpu(name)
    box_gib = int(name.rsplit("-", 1)[1].rstrip("g"))
    assert found.source
    assert 0.90 * box_gib <= found.memory_bytes / 2**30 <= 1.01 * box_gib
    assert found.fp32_flops <= found.fp16_flops
    assert found.fp8_flops is None or found.fp8_flops >= 1.9 * found.fp16_flops
    assert found.pcie_bytes_per_s < found.memory_bytes_per_s
    assert found.has_nvlink == (found.nvlink_peers > 1)


def test_an_h100_computes_989_dense_bf16_and_talks_450_gb_each_way() -> None:
    found = gpu("h100-sxm-80g")
    assert round(found.bf16_flops / 1e12) == 989
    assert found.intra_node_link(8).bytes_per_s == 450e9


def test_a_bridge_joins_two_cards_and_no_more() -> None:
    found = gpu("h100-pcie-80g")
    assert found.intra_node_link(2).name == "nvlink"
    assert found.intra_node_link(4).name == "pcie5"


def test_one_ethernet_port_is_shared_by_the_node() -> None:
    assert gpu("l4-24g").inter_node_link(8).bytes_per_s == 12.5e9 / 8
    assert gpu("h100-sxm-80g").inter_node_link(8).bytes_per_s == 50e9


def test_unknown_names_are_answered_with_the_valid_ones() -> None:
    with pytest.raises(HardwareError, match=r"--gpu h101: one of a100-40g.*local"):
        gpu("h101")
    with pytest.raises(HardwareError, match="ethernet-100g"):
        gpu("l4-24g").inter_node_link(8, "carrier-pigeon")


def test_a_name_may_end_before_a_dash_where_one_gpu_alone_goes_on() -> None:
    assert hardware.full_name("L40S") == "l40s-48g"
    assert hardware.full_name("h100-pcie") == "h100-pcie-80g"
    assert hardware.full_name("local") == "local"
    with pytest.raises(HardwareError, match="--gpu h100: one of h100-sxm-80g, h100-pcie-80g, h100-nvl"):
        hardware.full_name("h100")
    with pytest.raises(HardwareError, match=r"--gpu h101: one of a100-40g.*local"):
        hardware.full_name("h101")


def test_products_are_matched_by_name_and_memory() -> None:
    assert hardware.by_product("NVIDIA A100-SXM4-80GB", 85 * 10**9).name == "a100-80g"
    assert hardware.by_product("Tesla V100-SXM2-16GB", 16 * 10**9).name == "v100-16g"
    assert hardware.by_product("NVIDIA GeForce GTX 1080", 8 * 10**9) is None


def test_local_without_a_driver_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    import pynvml

    def no_driver() -> None:
        raise pynvml.NVMLError_LibraryNotFound

    monkeypatch.setattr(pynvml, "nvmlInit", no_driver)
    with pytest.raises(HardwareError, match="--gpu local: NVML finds no NVIDIA driver"):
        gpu("local")


READ_LOCAL = """
import json
from ftdash.engine.hardware import gpu
found = gpu("local")
print(json.dumps([found.name, found.memory_bytes, found.pcie_generation, found.pcie_bytes_per_s,
                  found.max_power_w, found.nvlink_bytes_per_s, found.source]))
"""


@pytest.fixture(scope="module")
def stub(tmp_path_factory: pytest.TempPathFactory) -> Stub:
    folder = tmp_path_factory.mktemp("nvml")
    return Stub(compile_stub(folder / "lib"), folder / "state")


def test_local_reads_memory_link_and_power_through_nvml(stub: Stub) -> None:
    stub.set("gpu * pcie_gen_max 4\ngpu * pcie_width_max 8\ngpu * power_limit_w 500\n")
    name, memory, generation, rate, watts, nvlink, source = stub.python(READ_LOCAL)
    assert name == "h100-sxm-80g"
    assert 78 * 2**30 < memory < 80 * 2**30
    assert (generation, rate, watts) == (4, 8 * 1.969e9, 500)
    assert nvlink == 450e9
    assert source.startswith("NVML: NVIDIA H100 80GB HBM3")


READ_JOINS = """
import json
from ftdash.engine.hardware import gpu
found = gpu("local")
links = [found.intra_node_link(n) for n in (2, 4, 8)]
print(json.dumps([found.nvlink_peers, found.socket_gpus, [[link.name, link.bytes_per_s] for link in links]]))
"""


def test_local_takes_the_machines_topology(stub: Stub) -> None:
    stub.set("gpu * pcie_gen_max 5\ngpu * pcie_width_max 16\n")
    peers, _, links = stub.python(READ_JOINS)
    assert peers == 8
    assert [name for name, _ in links] == ["nvlink"] * 3

    sockets = "gpu 0-3 numa 0\ngpu 4-7 numa 1\n"
    stub.set(f"gpu 2-7 nvlinks 0\ngpu * pcie_gen_max 5\ngpu * pcie_width_max 16\n{sockets}")
    peers, socket, links = stub.python(READ_JOINS)
    assert (peers, socket) == (2, 4)
    assert links == [["nvlink", 450e9], ["pcie5", 16 * 3.938e9], ["pcie5", 10e9]]


def test_a_bridge_that_is_up_counts_on_a_card_sold_without(stub: Stub) -> None:
    stub.set("gpus 2\ngpu * name NVIDIA GeForce RTX 3090\ngpu * mem_total_mib 24576\ngpu * nvlinks 4\n")
    peers, _, links = stub.python(READ_JOINS)
    assert (peers, links[0]) == (2, ["nvlink", 56.25e9])
    assert not gpu("rtx3090-24g").has_nvlink


def test_local_without_active_links_has_no_nvlink(stub: Stub) -> None:
    stub.set("gpu * nvlinks 0\n")
    assert stub.python(READ_LOCAL)[5] == 0


def test_a_split_gpu_is_planned_as_its_smallest_instance(stub: Stub) -> None:
    """Instances of 1g.10gb: a seventh of the compute, an eighth of memory and bandwidth, no links."""
    split = "gpu 0 mig_mode 1\ngpu 0 mig_devices 2\n"
    stub.set(f"gpu * name NVIDIA A100-SXM4-80GB\ngpu * mem_total_mib 81920\n{split}")
    name, memory, _, _, _, nvlink, source = stub.python(READ_LOCAL)
    assert name == "a100-80g"
    assert memory == 10 * 2**30
    assert nvlink == 0
    assert source.startswith("NVML: MIG instance NVIDIA A100-SXM4-80GB MIG 1g.10gb")
    ask = "import json\nfrom ftdash.engine.hardware import gpu\nprint(json.dumps(gpu('local').bf16_flops))"
    flops = stub.python(ask)
    assert flops == pytest.approx(312e12 / 7)


def test_a_split_gpu_without_instances_says_so(stub: Stub) -> None:
    stub.set("gpus 1\ngpu 0 mig_mode 1\n")
    words = stub.python(
        "import json\nfrom ftdash.engine.hardware import HardwareError, gpu\n"
        "try:\n    gpu('local')\nexcept HardwareError as error:\n    print(json.dumps(str(error)))"
    )
    assert "has no instance" in words


def test_unified_memory_is_the_machines(stub: Stub) -> None:
    stub.set("gpus 1\ngpu 0 name NVIDIA GB10\ngpu 0 mem_used_mib na\n")
    name, memory, *_ = stub.python(READ_LOCAL)
    assert name == "gb10-128g"
    assert memory == os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def test_offload_is_no_remedy_in_unified_memory() -> None:
    fields = {"model": "llama-3.3-70b", "gpu": "gb10-128g", "strategy": "fsdp", "seq_len": 4096}
    codes = {advice.code for advice in evaluate(Plan.from_dict(fields)).advice}
    assert "unified-memory" in codes
    assert not codes & {"offload", "activation-offload"}
