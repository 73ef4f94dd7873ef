"""Generated configs are what the libraries themselves accept, and commands are what the script parses."""

from __future__ import annotations

import json
import os

import pytest
import yaml
from msgspec.structs import replace

from ftdash.engine.configs import ConfigError, Launcher, Rendezvous, TrainArgs, generate
from ftdash.engine.configs.deepspeed import moe_block_classes
from ftdash.engine.configs.script import model_source
from ftdash.engine.mesh import Mesh
from ftdash.engine.model.load import resolve
from ftdash.engine.plan import (
    SWITCHES,
    Checkpointing,
    ExpertLora,
    Method,
    Offload,
    Plan,
    Precision,
    Quant,
    Strategy,
    flag_of,
)

BASE = Plan(model="qwen3-8b", gpus=8)
MOE = Plan(model="qwen3-30b-a3b", gpus=8)
PLANS = {
    "ddp": replace(BASE, strategy=Strategy.DDP),
    "fsdp": BASE,
    "fsdp-no-reshard": replace(BASE, strategy=Strategy.FSDP_NO_RESHARD),
    "fsdp-offload": replace(BASE, offload=Offload.ALL),
    "fsdp-qlora": replace(BASE, method=Method.QLORA, lora_dropout=0.05),
    "fsdp-replicated": replace(BASE, replicate=2),
    "fsdp-cp": replace(BASE, cp=2),
    "fsdp1": replace(BASE, strategy=Strategy.FSDP1, method=Method.LORA),
    "hsdp": replace(BASE, strategy=Strategy.HSDP, gpus=16),
    "zero1": replace(BASE, strategy=Strategy.ZERO1),
    "zero2-offload": replace(BASE, strategy=Strategy.ZERO2, offload=Offload.OPTIMIZER),
    "zero3": replace(BASE, strategy=Strategy.ZERO3),
    "zero3-fp16": replace(BASE, strategy=Strategy.ZERO3, precision=Precision.FP16_MIXED),
    "zero3-offload": replace(BASE, strategy=Strategy.ZERO3, offload=Offload.ALL),
    "zero3-nvme": replace(BASE, strategy=Strategy.ZERO3, offload=Offload.NVME),
    "zero3-ulysses": replace(BASE, strategy=Strategy.ZERO3, cp=2),
    "zero3-moe-nodes": replace(MOE, strategy=Strategy.ZERO3, gpus=16),
    "tp-fsdp": replace(BASE, tp=2),
    "ep-fsdp": replace(MOE, ep=8),
    "moe-lora": replace(MOE, method=Method.LORA, expert_lora=ExpertLora.SCALED),
    "none": replace(BASE, strategy=Strategy.NONE, gpus=1),
}


def made(plan: Plan, device: str = "auto", **changes):
    shape = resolve(plan)
    train = TrainArgs(model=model_source(plan, shape), output_dir="out", save_steps=2, seed=1, device=device)
    return generate(plan, shape=shape, train_args=train, **changes)


@pytest.fixture(params=PLANS)
def plan(request) -> Plan:
    return PLANS[request.param]


def test_accelerate_loads_every_file_that_is_written_for_it(plan, tmp_path):
    from accelerate.commands.config.config_args import load_config_from_file

    found = 0
    for name, text in made(plan).files.items():
        if name.endswith(".yaml"):
            (tmp_path / name).write_text(text)
            config = load_config_from_file(str(tmp_path / name))
            assert config.num_processes == plan.gpus
            assert config.num_machines == Mesh.from_plan(plan).nodes
            found += 1
    assert found == (0 if plan.gpus == 1 or plan.tp > 1 or plan.ep > 1 else 1)


def test_fsdp_files_make_the_plugin_that_the_plan_asks_for(plan, tmp_path, monkeypatch):
    """Through accelerate's own launcher: YAML, arguments, environment, plugin."""
    generated = made(plan, device="cpu")
    names = [name for name in generated.files if name.endswith(".yaml")]
    if not names or "fsdp_config" not in generated.files[names[0]]:
        pytest.skip("no FSDP file")
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser
    from accelerate.utils import FullyShardedDataParallelPlugin
    from accelerate.utils.launch import prepare_multi_gpu_env

    (tmp_path / names[0]).write_text(generated.files[names[0]])
    parser = launch_command_parser()
    args, _, _ = _validate_launch_command(
        parser.parse_args(["--config_file", str(tmp_path / names[0]), "x.py"])
    )
    environment = prepare_multi_gpu_env(args)
    for key, value in environment.items():
        if key.startswith(("FSDP_", "PARALLELISM_CONFIG_")):
            monkeypatch.setenv(key, value)
    plugin = FullyShardedDataParallelPlugin()
    version = 1 if plan.strategy is Strategy.FSDP1 else 2
    assert plugin.fsdp_version == version
    assert plugin.transformer_cls_names_to_wrap == [
        "Qwen3DecoderLayer" if plan.model == "qwen3-8b" else "Qwen3MoeDecoderLayer"
    ]
    assert "SHARDED" in str(plugin.state_dict_type)
    assert plugin.activation_checkpointing is (plan.method is Method.FULL)
    if version == 2:
        assert plugin.reshard_after_forward is (plan.strategy is not Strategy.FSDP_NO_RESHARD)
    else:
        assert plugin.use_orig_params is False
    from accelerate import ParallelismConfig

    mesh = Mesh.from_plan(plan)
    if mesh.replicate > 1 or mesh.cp > 1:
        assert ParallelismConfig().total_size == plan.gpus
        assert ParallelismConfig().dp_replicate_size == mesh.replicate
        assert ParallelismConfig().cp_size == mesh.cp


def test_deepspeed_reads_every_json(plan):
    pytest.importorskip("deepspeed")
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    files = {
        name: json.loads(text)
        for name, text in made(plan).files.items()
        if name.startswith("zero") and name.endswith(".json")
    }
    if plan.strategy not in (Strategy.ZERO1, Strategy.ZERO2, Strategy.ZERO3):
        assert not files
        return
    for config in files.values():
        zero = {key: value for key, value in config["zero_optimization"].items() if value != "auto"}
        built = DeepSpeedZeroConfig(**zero)
        assert int(built.stage) == int(str(plan.strategy)[-1])
        assert (built.offload_param is not None and built.offload_param.device != "none") is (
            plan.offload in (Offload.ALL, Offload.NVME)
        )
        for key in ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"):
            assert config[key] == "auto"


def test_the_training_script_takes_every_command(plan):
    from ftdash.engine.train.options import build_parser

    for command in made(plan).commands:
        assert len(command.nodes) == Mesh.from_plan(plan).nodes
        for argv in command.nodes:
            arguments = argv[argv.index("ftdash.engine.train") + 1 :]
            parsed = build_parser().parse_args(list(arguments))
            assert (parsed.micro_batch, parsed.lora_dropout) == (plan.micro_batch, plan.lora_dropout)
            assert (parsed.tp, parsed.ep, parsed.cp) == (plan.tp, plan.ep, plan.cp)
            assert (parsed.deepspeed is not None) is (command.launcher is Launcher.DEEPSPEED)


def test_launchers_accept_their_own_commands(plan):
    from accelerate.commands.launch import launch_command_parser
    from torch.distributed.run import get_args_parser

    for command in made(plan, log_dir="logs").commands:
        for rank, argv in enumerate(command.nodes):
            if command.launcher is Launcher.ACCELERATE:
                parsed = launch_command_parser().parse_args(list(argv[2:]))
                assert parsed.module
                assert parsed.training_script == "ftdash.engine.train"
                assert (parsed.machine_rank or 0) == rank
            elif command.launcher is Launcher.TORCHRUN:
                parsed = get_args_parser().parse_args(list(argv[1:]))
                assert int(parsed.nproc_per_node) * len(command.nodes) == plan.gpus
                assert parsed.standalone is (len(command.nodes) == 1)


def test_two_nodes_meet_at_the_address_they_are_given():
    plan = replace(BASE, strategy=Strategy.DDP, gpus=16)
    generated = made(plan, rendezvous=Rendezvous(address="node7", port=41234))
    config = yaml.safe_load(generated.files["ddp.yaml"])
    assert (config["main_process_ip"], config["main_process_port"]) == ("node7", 41234)
    torchrun = generated.command("torchrun").nodes
    assert [argv[argv.index("--node-rank") + 1] for argv in torchrun] == ["0", "1"]
    assert all(argv[argv.index("--master-addr") + 1] == "node7" for argv in torchrun)


def test_one_place_alone_recomputes_activations():
    fsdp = made(BASE)
    assert yaml.safe_load(fsdp.files["fsdp.yaml"])["fsdp_config"]["fsdp_activation_checkpointing"] is True
    argv = fsdp.preferred.nodes[0]
    assert argv[argv.index("--checkpointing") + 1] == "none"
    lora = made(replace(BASE, method=Method.LORA))
    assert yaml.safe_load(lora.files["fsdp.yaml"])["fsdp_config"]["fsdp_activation_checkpointing"] is False
    argv = lora.preferred.nodes[0]
    assert argv[argv.index("--checkpointing") + 1] == "full"
    zero = made(replace(BASE, strategy=Strategy.ZERO3)).preferred.nodes[0]
    assert zero[zero.index("--checkpointing") + 1] == "full"


def test_exports_that_no_cpu_can_try_are_marked():
    generated = made(replace(BASE, strategy=Strategy.ZERO3, offload=Offload.NVME))
    assert set(generated.not_rehearsed) == {"zero3-plusplus.json", "zero3.json"}
    plus = json.loads(generated.files["zero3-plusplus.json"])["zero_optimization"]
    assert plus["zero_hpz_partition_size"] == 8
    assert plus["zero_quantized_weights"] is True


def test_mixture_blocks_are_leaf_modules_of_classes_that_exist():
    import transformers.models.qwen3_moe.modeling_qwen3_moe as qwen

    plan = replace(MOE, strategy=Strategy.ZERO3)
    zero = json.loads(made(plan).files["zero3.json"])["zero_optimization"]
    assert zero["leaf_module"]["classes"] == moe_block_classes(resolve(plan))
    assert any(hasattr(qwen, name) for name in zero["leaf_module"]["classes"])
    dense = json.loads(made(replace(BASE, strategy=Strategy.ZERO3)).files["zero3.json"])["zero_optimization"]
    assert "leaf_module" not in dense


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"pp": 2, "gpus": 8}, "--pp"),
        ({"model": "qwen3-30b-a3b", "pp": 2, "ep": 2}, "--pp with --ep"),
        ({"strategy": Strategy.MEGATRON}, "Megatron-LM"),
        ({"strategy": Strategy.ZERO2, "offload": Offload.ALL}, "only at stage 3"),
        ({"strategy": Strategy.FSDP1, "method": Method.QLORA, "quant_storage": "uint8"}, "uint8"),
        ({"method": Method.QLORA, "quant": Quant.INT8}, "cannot be sharded"),
        ({"method": Method.QLORA, "tp": 2}, "tensor-parallel"),
        ({"tp": 3, "gpus": 6}, "must divide"),
        ({"strategy": Strategy.ZERO3, "tp": 2}, "FSDP2 only"),
        ({"model": "qwen3-30b-a3b", "ep": 2, "tp": 4}, "multiple of --tp"),
        ({"strategy": Strategy.HSDP}, "two axes"),
        ({"precision": Precision.NVFP4}, "nvfp4"),
        ({"dora": True, "method": Method.LORA}, "--dora"),
        ({"offload": Offload.NVME}, "DeepSpeed"),
        ({"checkpointing": Checkpointing.SELECTIVE}, "selective"),
    ],
)
def test_what_cannot_be_launched_is_refused_with_the_reason(changes, reason):
    with pytest.raises(ConfigError, match=reason):
        made(replace(BASE, **changes))


@pytest.mark.parametrize("field", [field for field, known in SWITCHES.items() if known.planned_only])
def test_a_choice_that_the_script_does_not_make_is_not_dropped_in_silence(field):
    with pytest.raises(ConfigError, match=f"^{flag_of(field)} "):
        made(replace(BASE, checkpointing=Checkpointing.SELECTIVE, **{field: True}))


def test_no_torch_is_loaded_to_write_configs():
    import subprocess
    import sys

    code = (
        "import sys; from ftdash.tui.cli import run; "
        "run(['configs', '--model', 'qwen3-8b', '--gpus', '8', '--strategy', 'fsdp', '--json']); "
        "sys.exit(bool({'torch', 'transformers', 'numpy', 'accelerate'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=dict(os.environ), check=False
    )
    assert done.returncode == 0, done.stderr
    assert set(json.loads(done.stdout)["files"]) == {"plan.json", "fsdp.yaml"}
