"""Whose code a file is: the standard library, an installed package, a tree run in place, or the user's."""

from __future__ import annotations

import re
import sys

NATIVE_FILE = re.compile(
    r"\.so(?:\.[\d.]+)?$|^\[|\.(?:c|cc|cpp|cu|h|hpp|pyx)$|/bin/python[\d.]*$|^python[\d.]*$"
)
SITE_FILE = re.compile(r"(?:site|dist)-packages/")
_STDLIB_DIR = re.compile(r"/lib(?:64)?/python3(?:\.\d+)?t?/|/lib/pypy3|\.zip/|[\\/]Lib[\\/]")
_PSEUDO_FILE = re.compile(r"^<(?!string>|stdin>|ipython)|^\[")
_STDLIB_TOP = frozenset(sys.stdlib_module_names)

# Packages whose files py-spy prints from the package on ("torch/nn/modules/module.py").
_LIBRARIES = frozenset(
    [
        "torch",
        "torchvision",
        "torchaudio",
        "torchtitan",
        "transformers",
        "accelerate",
        "trl",
        "peft",
        "deepspeed",
        "datasets",
        "tokenizers",
        "safetensors",
        "bitsandbytes",
        "vllm",
        "multiprocess",
        "dill",
        "numpy",
        "pandas",
        "scipy",
        "sklearn",
        "pyarrow",
        "fsspec",
        "aiohttp",
        "requests",
        "urllib3",
        "httpx",
        "wandb",
        "tensorboard",
        "mlflow",
        "lightning",
        "pytorch_lightning",
        "lightning_fabric",
        "megatron",
        "apex",
        "transformer_engine",
        "flash_attn",
        "xformers",
        "triton",
        "tqdm",
        "rich",
        "huggingface_hub",
        "evaluate",
        "ray",
        "fairscale",
        "horovod",
        "unsloth",
        "llamafactory",
        "swift",
        "axolotl",
        "mpi4py",
        "psutil",
        "yaml",
        "jinja2",
        "click",
        "typer",
        "hydra",
        "omegaconf",
        "nemo",
        "colossalai",
        "sentence_transformers",
        "diffusers",
        "timm",
        "PIL",
        "cv2",
        "decord",
        "av",
        "qwen_vl_utils",
        "torchdata",
        "streaming",
        "composer",
        "mpu",
        "sentencepiece",
        "anyio",
        "uvloop",
        "starlette",
        "fastapi",
        "uvicorn",
        "zmq",
        "msgspec",
        "msgpack",
        "grpc",
        "google",
    ]
)


def is_stdlib(file: str) -> bool:
    """Whether a file belongs to the standard library, given full or as py-spy shortens it."""
    if _PSEUDO_FILE.match(file):
        return True
    if SITE_FILE.search(file):
        return False
    if _STDLIB_DIR.search(file):
        return True
    if file.startswith(("/", "./", "../", "~")):
        return False
    top = file.split("/", 1)[0].removesuffix(".py")
    return top in _STDLIB_TOP and file not in _USER_TOPS


_USER_TOPS = frozenset({"test.py", "code.py", "this.py"})


def is_library(file: str) -> bool:
    """Whether a file belongs to an installed package (or to ftdash's own hook in the process)."""
    if SITE_FILE.search(file) or NATIVE_FILE.search(file):
        return True
    if file.startswith("/"):
        return bool(_VENDORED.search(file))
    return "/" in file and file.split("/", 1)[0] in _LIBRARIES


# Trees that people clone and run in place, and the hook of ftdash when it runs from a checkout.
_VENDORED = re.compile(
    r"/torch/(?:distributed|nn|utils|autograd|optim|_inductor|_dynamo|multiprocessing)/"
    r"|/src/(?:transformers|accelerate|datasets|peft)/|/deepspeed/(?:runtime|comm|utils|launcher)/"
    r"|/megatron/(?:core|training|mpu|legacy|model|data)/|/trl/(?:trainer|extras)/|/vllm/(?:distributed|engine|v1)/"
    r"|/monitor/(?:hook|beat|inject)[/.]"
)
