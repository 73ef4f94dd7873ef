"""What the files given to a check say together: backend, world size, trainer arguments, model, versions."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

from ftdash.engine.check.backend import Backend, backend_of_accelerate, backend_of_plan, stage_in_name
from ftdash.engine.check.documents import Document, DocumentError, Kind, Sourced, read_document
from ftdash.engine.check.pyscript import UNKNOWN, Call, Script
from ftdash.engine.check.shell import Launch, Shell
from ftdash.engine.model.shape import ModelShape

# Calls that build trainer arguments: the config classes of transformers and TRL.
_ARGUMENT_CLASS = re.compile(r"(Training|Trainer)?(Arguments|Config)$")
_NOT_ARGUMENTS = re.compile(
    r"(Lora|BitsAndBytes|Distributed|Parallelism|Auto|Model|Generation|Peft|Script|Data|Quant)"
)


# Flags with the number of processes, beside --num_processes; axolotl hands them on to its launcher.
_PER_NODE = {"accelerate": (), "axolotl": ("--nproc_per_node",)}


# accelerate's plugin classes: the distributed type and the section they stand for, and its keys' prefix.
_PLUGINS = {
    "FullyShardedDataParallelPlugin": ("FSDP", "fsdp_config", "fsdp_"),
    "DeepSpeedPlugin": ("DEEPSPEED", "deepspeed_config", ""),
}


class Bundle:
    """All documents of one check, with what they refer to read as well where it stands beside them."""

    def __init__(self, documents: list[Document]) -> None:
        self.documents = list(documents)
        self.scripts: dict[Path, Script] = {}
        self.shells: dict[Path, Shell] = {}
        self.missing: list[tuple[str, str]] = []  # where, path
        self.broken: list[tuple[str, str]] = []  # where, why
        for document in list(self.documents):
            self._parse(document)
        self._follow()

    def of(self, kind: Kind) -> list[Document]:
        return [document for document in self.documents if document.kind is kind]

    def script_calls(self) -> Iterator[tuple[Document, Script, Call]]:
        for document in self.of(Kind.SCRIPT):
            script = self.scripts[document.path]
            for call in script.calls:
                yield document, script, call

    def launches(self) -> Iterator[tuple[Document, Shell, Launch]]:
        for document in self.of(Kind.SHELL):
            shell = self.shells[document.path]
            for launch in shell.launches:
                yield document, shell, launch

    def _parse(self, document: Document) -> None:
        if document.kind is Kind.SCRIPT:
            self.scripts[document.path] = Script(document.text, str(document.path))
            self.documents += self._embedded(document)
        elif document.kind is Kind.SHELL:
            self.shells[document.path] = Shell(document.text)

    def _embedded(self, document: Document) -> Iterator[Document]:
        """Configs that a script holds: DeepSpeed's as a dict, accelerate's as arguments of its plugins."""
        for call in self.scripts[document.path].calls:
            if call.last in _PLUGINS:
                found = Document(document.path, Kind.ACCELERATE, "", _of_plugin(call))
                found.lines = dict.fromkeys(_paths(found.data), call.line)
                yield found
            for name in ("deepspeed", "config", "hf_ds_config", "config_params"):
                value = call.kwargs.get(name)
                if isinstance(value, dict) and {"zero_optimization", "train_batch_size"} & set(
                    map(str, value)
                ):
                    found = Document(document.path, Kind.DEEPSPEED, "", _known(value))
                    found.lines = dict.fromkeys(_paths(found.data), call.line)
                    yield found

    def _follow(self) -> None:
        """Read the files that the given ones name, when they stand where a launcher would look."""
        known = {document.path.resolve() for document in self.documents}
        queue = list(self.documents)
        while queue:
            document = queue.pop(0)
            for reference, where, required in list(self._references(document)):
                path = _locate(document.path, reference)
                if path is None:
                    if required:
                        self.missing.append((where, reference))
                    continue
                if path.resolve() in known or len(known) > 64:
                    continue
                known.add(path.resolve())
                try:
                    found = read_document(path)
                    self._parse(found)
                except DocumentError as error:
                    if required:
                        self.broken.append((where, str(error)))
                    continue
                self.documents.append(found)
                queue.append(found)

    def _references(self, document: Document) -> Iterator[tuple[str, str, bool]]:
        if document.kind is Kind.ACCELERATE:
            if found := document.get("deepspeed_config", "deepspeed_config_file"):
                yield str(found.value), found.where, True
        elif document.kind in (Kind.AXOLOTL, Kind.TRAINER):
            found = document.get("deepspeed")
            if found and isinstance(found.value, str) and found.value.endswith(".json"):
                yield found.value, found.where, False
        elif document.kind is Kind.SCRIPT:
            for call in self.scripts[document.path].calls:
                for name in ("deepspeed", "hf_ds_config", "config", "fsdp_config"):
                    value = call.kwargs.get(name)
                    if isinstance(value, str) and value.endswith(".json"):
                        yield value, document.at(call.line), False
        elif document.kind is Kind.SHELL:
            for launch in self.shells[document.path].launches:
                for option in (
                    "--config_file",
                    "--deepspeed",
                    "--deepspeed_config",
                    "--deepspeed_config_file",
                    "--fsdp_config",
                    "--config",
                ):
                    if value := launch.option(option):
                        yield value, document.at(launch.line), False
                yield from (
                    (text, document.at(launch.line), False)
                    for text in launch.argv
                    if text.endswith((".py", ".yaml", ".yml")) and "$" not in text
                )

    @cached_property
    def backend(self) -> Backend | None:
        """The sharding that the files ask for; None when they do not say."""
        for document in self.of(Kind.ACCELERATE):
            if found := backend_of_accelerate(document):
                return self._with_stage(found)
        for document in self.of(Kind.AXOLOTL):
            if named := document.get("deepspeed"):
                return self._with_stage(Backend("zero", named.where, stage_in_name(str(named.value))))
            if document.get("fsdp") or document.get("fsdp_config"):
                version = document.get("fsdp_version") or document.get("fsdp_config", "fsdp_version")
                version = version or document.get("fsdp_config", "version")
                where = (
                    document.get("fsdp_config") or document.get("fsdp") or Sourced("", document.name)
                ).where
                return Backend("fsdp2" if version and str(version.value) == "2" else "fsdp1", where)
        if self.of(Kind.DEEPSPEED):
            return self._with_stage(Backend("zero", self.of(Kind.DEEPSPEED)[0].name))
        if (fsdp := self.argument("fsdp")) and fsdp.value not in (False, "", []):
            version = self.fsdp_option("version")
            return Backend("fsdp1" if version and str(version.value) == "1" else "fsdp2", fsdp.where)
        if deepspeed := self.argument("deepspeed"):
            return Backend("zero", deepspeed.where, stage_in_name(str(deepspeed.value)))
        for document, _, call in self.script_calls():
            if call.last == "fully_shard":
                return Backend("fsdp2", document.at(call.line))
            if call.last in ("FullyShardedDataParallel", "FSDP"):
                return Backend("fsdp1", document.at(call.line))
            if call.last == "DistributedConfig" and isinstance(call.kwargs.get("fsdp_size"), int):
                return Backend("fsdp2", document.at(call.line))
            if call.last in ("DistributedDataParallel", "DDP"):
                return Backend("ddp", document.at(call.line))
        for plan in self.plans:
            if (name := backend_of_plan(plan.value)) is not None:
                return Backend(name[0], plan.where, name[1])
        return self._launched_backend()

    def _launched_backend(self) -> Backend | None:
        for document, shell, launch in self.launches():
            where = document.at(launch.line)
            if launch.has("--use_fsdp") or launch.has("--fsdp"):
                return Backend("fsdp2" if launch.option("--fsdp_version") == "2" else "fsdp1", where)
            if launch.has("--use_deepspeed") or launch.launcher == "deepspeed" or launch.has("--deepspeed"):
                return Backend("zero", where, shell.number(launch.option("--zero_stage")) or 0)
            several = (shell.number(launch.option("--nproc_per_node", "--num_processes")) or 0) > 1
            if launch.has("--multi_gpu") or (launch.launcher == "torchrun" and several):
                return Backend("ddp", where)
        return None

    def _with_stage(self, backend: Backend) -> Backend:
        if backend.name != "zero" or backend.stage:
            return backend
        for document in self.of(Kind.DEEPSPEED):
            stage = document.get("zero_optimization", "stage")
            if stage and isinstance(stage.value, int):
                return Backend("zero", stage.where, stage.value)
        return backend

    @cached_property
    def world(self) -> Sourced | None:
        """Ranks over all nodes, as the launcher would start them."""
        for document, shell, launch in self.launches():
            where = document.at(launch.line)
            nodes = shell.number(launch.option("--nnodes", "--num_nodes")) or shell.nodes or 1
            if launch.launcher in ("accelerate", "axolotl"):
                if count := shell.number(launch.option("--num_processes", *_PER_NODE[launch.launcher])):
                    return Sourced(count, where)
            elif count := shell.number(launch.option("--nproc_per_node", "--num_gpus")):
                return Sourced(count * nodes, where)
            elif launch.launcher == "python":
                tasks = (shell.tasks_per_node or 1) * nodes if launch.srun else 1
                return Sourced(tasks, where)
        for document in self.of(Kind.ACCELERATE):
            found = document.get("num_processes")
            if found and isinstance(found.value, int) and found.value > 0:
                return found
        for plan in self.plans:
            if isinstance(plan.value.get("gpus"), int):
                return Sourced(plan.value["gpus"], plan.where)
        return None

    @cached_property
    def plans(self) -> list[Sourced]:
        """Plans as mappings: a plan's own file, or the one inside a run.json."""
        found = []
        for document in self.of(Kind.PLAN):
            if isinstance(document.plan, dict):
                found.append(Sourced(document.plan, document.name))
        return found

    def argument_calls(self) -> Iterator[tuple[Document, Call]]:
        """Calls that build trainer arguments, in execution order."""
        for document, _, call in self.script_calls():
            if (
                _ARGUMENT_CLASS.search(call.last)
                and not _NOT_ARGUMENTS.search(call.last)
                and call.last[:1].isupper()
            ):
                yield document, call

    def argument(self, *names: str) -> Sourced | None:
        """A trainer argument, wherever it is set: command line, script, YAML. UNKNOWN values are left out."""
        for document, shell, launch in self.launches():
            for name in names:
                value = launch.option(f"--{name}")
                expanded = shell.expand(value) if value is not None else "$"
                if "$" not in expanded:  # what only the shell would know
                    given = _literal(expanded) if expanded else True  # a flag alone turns it on
                    return Sourced(given, document.at(launch.line))
        for document, call in self.argument_calls():
            for name in names:
                if name in call.kwargs and call.kwargs[name] is not UNKNOWN and call.kwargs[name] is not None:
                    return Sourced(call.kwargs[name], document.at(call.line))
        for kind in (Kind.TRAINER, Kind.AXOLOTL):
            for document in self.of(kind):
                for name in names:
                    if found := document.get(name):
                        return found
        return None

    @cached_property
    def distributed(self) -> bool:
        """Whether several ranks are certain."""
        return self.backend is not None or bool(self.world and self.world.value > 1)

    @cached_property
    def adapters(self) -> Sourced | None:
        """Where adapters are asked for, if they are."""
        for document, _, call in self.script_calls():
            if call.last in ("LoraConfig", "get_peft_model", "DoraConfig", "AdaLoraConfig"):
                return Sourced("lora", document.at(call.line))
        for name in ("use_peft", "use_lora"):
            found = self.argument(name)
            if found and found.value in (True, ""):
                return found
        for document in self.of(Kind.AXOLOTL):
            if found := document.get("adapter"):
                return found
        for document in self.of(Kind.TRAINER):
            found = document.get("finetuning_type")
            if found and found.value != "full":
                return found
        for document in self.of(Kind.ADAPTER):
            return Sourced("lora", document.name)
        for plan in self.plans:
            if plan.value.get("method") in ("lora", "qlora"):
                return Sourced(plan.value["method"], plan.where)
        return None

    @cached_property
    def model_name(self) -> Sourced | None:
        for document, _script, call in self.script_calls():
            if (
                call.last == "from_pretrained"
                and re.search(r"Auto(Model|Config)|ForCausalLM|Model$", call.owner)
                and call.args
                and isinstance(call.args[0], str)
            ):
                return Sourced(call.args[0], document.at(call.line))
            if re.search(r"(SFT|DPO|GRPO|KTO|Reward|RLOO)Trainer$", call.last):
                model = call.kwargs.get("model", call.args[0] if call.args else None)
                if isinstance(model, str):
                    return Sourced(model, document.at(call.line))
        for kind, key in ((Kind.AXOLOTL, "base_model"), (Kind.TRAINER, "model_name_or_path")):
            for document in self.of(kind):
                if found := document.get(key):
                    return Sourced(str(found.value), found.where)
        for document, shell, launch in self.launches():
            if value := launch.option("--model_name_or_path", "--model"):
                return Sourced(shell.expand(value), document.at(launch.line))
        for plan in self.plans:
            if name := plan.value.get("model"):
                return Sourced(str(name), plan.where)
        return None

    @cached_property
    def model(self) -> tuple[ModelShape, str] | None:
        """The model's shape and where it is named: a config.json given or local, or a preset of that name."""
        from ftdash.engine.model.load import ModelError, load_config_file, load_preset

        for document in self.of(Kind.MODEL):
            try:
                return load_config_file(document.path), document.name
            except ModelError:
                continue
        if (named := self.model_name) is None:
            return None
        for document in self.documents:
            local = document.path.parent / named.value
            if (local / "config.json").is_file():
                try:
                    return load_config_file(local), named.where
                except ModelError:
                    return None
        # A release mark such as -v0.1 changes no shape.
        for name in (named.value.rstrip("/"), re.sub(r"-v\d+(\.\d+)*$", "", named.value.rstrip("/"))):
            try:
                return load_preset(name), named.where
            except ModelError:
                continue
        return None

    @cached_property
    def versions(self) -> dict[str, Sourced]:
        """Library versions that the files pin (==) or record; lower bounds say nothing about an old one."""
        found: dict[str, Sourced] = {}
        for document in self.documents:
            if document.kind is Kind.PLAN and isinstance(document.data.get("versions"), dict):
                for name, version in document.data["versions"].items():
                    found.setdefault(
                        str(name).lower(), Sourced(str(version), document.where("versions", name))
                    )
            elif document.kind in (Kind.VERSIONS, Kind.SHELL, Kind.SCRIPT):
                for number, line in enumerate(document.text.splitlines(), 1):
                    if document.kind is not Kind.VERSIONS and not re.search(r"pip3? install|^#\s+\"", line):
                        continue
                    for name, version in re.findall(
                        r"([A-Za-z][\w.-]*)(?:\[[^]]*\])?\s*==\s*([\d][\w.]*)", line
                    ):
                        found.setdefault(name.lower(), Sourced(version, document.at(number)))
        return found

    def older(self, package: str, version: str) -> Sourced | None:
        """The pinned version of `package` when it is below `version`."""
        found = self.versions.get(package)
        return found if found and _release(found.value) < _release(version) else None

    def fsdp_option(self, name: str) -> Sourced | None:
        """An option of the FSDP section, with or without its fsdp_ prefix, of whichever file has one."""
        for kind in (Kind.ACCELERATE, Kind.AXOLOTL, Kind.TRAINER):
            for document in self.of(kind):
                for key in (f"fsdp_{name}", name):
                    if found := document.get("fsdp_config", key):
                        return found
        for document in self.of(Kind.FSDP):
            if found := document.get(f"fsdp_{name}") or document.get(name):
                return found
        for document, shell, launch in self.launches():
            if (value := launch.option(f"--fsdp_{name}")) is not None:
                return Sourced(_literal(shell.expand(value)), document.at(launch.line))
        config = self.argument("fsdp_config")
        if config and isinstance(config.value, dict):
            for key in (f"fsdp_{name}", name):
                if key in config.value and config.value[key] is not UNKNOWN:
                    return Sourced(config.value[key], config.where)
        return None


def call_option(bundle: Bundle, functions: tuple[str, ...], *names: str) -> Sourced | None:
    """A keyword argument of the first call of one of these functions that gives a known value.

    Of several names the first that any call gives.
    """
    for name in names:
        for document, _, call in bundle.script_calls():
            if call.last in functions and name in call.kwargs and call.kwargs[name] is not UNKNOWN:
                return Sourced(call.kwargs[name], document.at(call.line))
    return None


def is_true(found: Sourced | None) -> bool:
    return found is not None and str(found.value).lower() in ("true", "1", "yes", "on")


def is_false(found: Sourced | None) -> bool:
    return found is not None and str(found.value).lower() in ("false", "0", "no", "off")


def dtype_name(value: Any) -> str:
    """A dtype in one spelling: float32, float16, bfloat16, uint8, or empty."""
    text = str(value).removeprefix("torch.").lower()
    return {
        "bf16": "bfloat16",
        "fp16": "float16",
        "half": "float16",
        "fp32": "float32",
        "float": "float32",
    }.get(text, text)


def _known(value: dict[Any, Any]) -> dict[str, Any]:
    """A mapping without the values that only running would tell."""
    return {
        str(key): _known(item) if isinstance(item, dict) else item
        for key, item in value.items()
        if item is not UNKNOWN and key is not UNKNOWN
    }


def _of_plugin(call: Call) -> dict[str, Any]:
    """The accelerate config that says what a plugin's arguments say."""
    kind, section, prefix = _PLUGINS[call.last]
    known = _known(call.kwargs)
    named = {key if key.startswith(prefix) else f"{prefix}{key}": value for key, value in known.items()}
    return {"distributed_type": kind, section: named}


def _paths(value: dict[str, Any], above: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for key, item in value.items():
        yield (*above, key)
        if isinstance(item, dict):
            yield from _paths(item, (*above, key))


def _locate(base: Path, reference: str) -> Path | None:
    if "$" in reference or not reference:
        return None
    named = Path(reference).expanduser()
    candidates = (
        [named]
        if named.is_absolute()
        else [base.parent / named, Path.cwd() / named, base.parent / named.name]
    )
    return next((path for path in candidates if path.is_file()), None)


def _literal(text: str) -> Any:
    lowered = text.lower()
    if lowered in ("true", "false"):
        return lowered == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def _release(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version.split("+")[0])[:3])
