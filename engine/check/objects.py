"""What the names of a training script stand for: a trainer, an accelerator, a model.

Nothing is run: a name is followed through assignments, attributes of `self`, functions and classes of the
script, parameters (by annotation, or by what callers hand over) and imports.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum

from ftdash.engine.check.documents import words


class Role(StrEnum):
    """What an object is, as far as meeting the other ranks goes."""

    TRAINER = "trainer"
    ACCELERATOR = "accelerator"
    STATE = "process state"  # accelerate's PartialState and AcceleratorState
    ENGINE = "DeepSpeed engine"
    MODEL = "model"
    OTHER = "other"  # made by something known that is none of these
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Binding:
    """One assignment of `value` to a name, or of item `index` of a value that is a tuple."""

    value: ast.expr
    guard: str  # as Call.guard
    line: int
    index: int | None = None


@dataclass(eq=False, slots=True)
class Klass:
    node: ast.ClassDef
    methods: dict[str, ast.FunctionDef | ast.AsyncFunctionDef]
    attributes: dict[str, list[Binding]] = field(default_factory=dict)

    @property
    def bases(self) -> list[str]:
        return [ast.unparse(base) for base in self.node.bases]


@dataclass(eq=False, slots=True)
class Scope:
    """A module or function with its names; `parent` is the scope that encloses it."""

    node: ast.Module | ast.FunctionDef | ast.AsyncFunctionDef
    parent: Scope | None = None
    klass: Klass | None = None
    names: dict[str, list[Binding]] = field(default_factory=dict)
    functions: dict[str, ast.FunctionDef | ast.AsyncFunctionDef] = field(default_factory=dict)
    handed: dict[str, list[tuple[ast.expr, Scope]]] = field(default_factory=dict)  # parameters, by callers

    def parameter(self, name: str) -> ast.arg | None:
        if isinstance(self.node, ast.Module):
            return None
        found = self.node.args
        every = [*found.posonlyargs, *found.args, *found.kwonlyargs]
        return next((argument for argument in every if argument.arg == name), None)

    def enclosing_class(self) -> Klass | None:
        scope: Scope | None = self
        while scope is not None:
            if scope.klass is not None:
                return scope.klass
            scope = scope.parent
        return None


@dataclass(frozen=True, slots=True)
class Found:
    """`alone`: the object was made where one rank only came by, so nobody shares it with the others.

    `declared`: only an annotation says what it is; what state the caller hands it over in, nobody knows.
    """

    role: Role
    alone: bool = False
    declared: bool = False


_NONE = Found(Role.UNKNOWN)
_TRAINER = re.compile(r"Trainer(?!Callback|Config|Args|Arguments|State|Control|Mixin)\w*$")
_MODEL_CLASS = re.compile(r"(Model|ForCausalLM|LMHead|For[A-Z]\w+|Transformer)(\w*)$")
_NO_MODEL = re.compile(
    r"(^EMA|^Ema|Averaged|Token|Process|Config|Extractor|Arguments|Dataset|Collator|Callback|Output|Card|Args)"
)
_WRAPPERS = words(
    "get_peft_model prepare_model_for_kbit_training FSDP FullyShardedDataParallel DistributedDataParallel "
    "DDP DataParallel fully_shard PeftModel PeftModelForCausalLM parallelize_module"
)
_SAME_OBJECT = words(
    "to cuda cpu eval train half float bfloat16 requires_grad_ merge_and_unload unload get_base_model "
    "compile unwrap_model extract_model_from_parallel unwrap_model_for_generation deepcopy copy"
)
_ATTRIBUTES = {
    (Role.TRAINER, "accelerator"): Role.ACCELERATOR,
    (Role.TRAINER, "model"): Role.MODEL,
    (Role.TRAINER, "model_wrapped"): Role.MODEL,
    (Role.TRAINER, "deepspeed"): Role.ENGINE,
    (Role.ACCELERATOR, "state"): Role.STATE,
    (Role.ENGINE, "module"): Role.MODEL,
    (Role.MODEL, "module"): Role.MODEL,
    (Role.MODEL, "base_model"): Role.MODEL,
    (Role.MODEL, "model"): Role.MODEL,
    (Role.MODEL, "pretrained_model"): Role.MODEL,
}
_BY_NAME = {"Accelerator": Role.ACCELERATOR, "PartialState": Role.STATE, "AcceleratorState": Role.STATE}
_DEPTH = 12


class Objects:
    """The scopes, classes and imports of one script, and what its expressions stand for."""

    def __init__(self, tree: ast.Module) -> None:
        self.module = Scope(tree)
        self.scopes: dict[int, Scope] = {id(tree): self.module}
        self.classes: dict[str, Klass] = {}
        self.imports = dict(_imported(tree))
        self._lay_out(tree, self.module, None)

    def _lay_out(self, node: ast.AST, scope: Scope, klass: Klass | None) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                self.scopes[id(child)] = inner = Scope(child, scope, klass)
                if klass is None:
                    scope.functions[child.name] = child
                self._lay_out(child, inner, None)
            elif isinstance(child, ast.ClassDef):
                methods = {
                    item.name: item
                    for item in child.body
                    if isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef)
                }
                self.classes[child.name] = found = Klass(child, methods)
                self._lay_out(child, scope, found)
            else:
                self._lay_out(child, scope, klass)

    def bind(self, target: ast.expr, value: ast.expr, guard: str, scope: Scope) -> None:
        """Record an assignment to a name, to an attribute of self, or to several of them at once."""
        if isinstance(target, ast.Tuple | ast.List):
            parts = value.elts if isinstance(value, ast.Tuple | ast.List) else None
            for index, item in enumerate(target.elts):
                if parts is not None and len(parts) == len(target.elts):
                    self.bind(item, parts[index], guard, scope)
                else:
                    self._bind_one(item, Binding(value, guard, value.lineno, index), scope)
            return
        self._bind_one(target, Binding(value, guard, value.lineno), scope)

    def _bind_one(self, target: ast.expr, binding: Binding, scope: Scope) -> None:
        if isinstance(target, ast.Name):
            scope.names.setdefault(target.id, []).append(binding)
        elif isinstance(target, ast.Attribute) and _is_self(target.value):
            klass = scope.enclosing_class()
            if klass is not None:
                klass.attributes.setdefault(target.attr, []).append(binding)

    def hand_over(self, call: ast.Call, scope: Scope) -> None:
        """Record what a call gives to the parameters of a function, method or class of the script."""
        function = self.function_of(call.func, scope)
        if function is None and isinstance(call.func, ast.Name) and call.func.id in self.classes:
            function = self.classes[call.func.id].methods.get("__init__")
        if function is None or any(isinstance(argument, ast.Starred) for argument in call.args):
            return
        inner = self.scopes[id(function)]
        names = [argument.arg for argument in [*function.args.posonlyargs, *function.args.args]]
        if inner.klass is not None and names and not _is_static(function):
            names = names[1:]
        given = list(zip(names, call.args, strict=False))
        given += [(keyword.arg, keyword.value) for keyword in call.keywords if keyword.arg]
        for name, value in given:
            inner.handed.setdefault(name, []).append((value, scope))

    def function_of(self, node: ast.expr, scope: Scope) -> ast.FunctionDef | ast.AsyncFunctionDef | None:
        """The function or method of the script that a call would enter."""
        if isinstance(node, ast.Name):
            around: Scope | None = scope
            while around is not None:
                if node.id in around.functions:
                    return around.functions[node.id]
                around = around.parent
            return None
        if isinstance(node, ast.Attribute):
            klass = scope.enclosing_class() if _is_self(node.value) else self._class_of(node.value, scope)
            seen = 0
            while klass is not None and seen < _DEPTH:
                if node.attr in klass.methods:
                    return klass.methods[node.attr]
                klass = next((self.classes[base] for base in klass.bases if base in self.classes), None)
                seen += 1
        return None

    def _class_of(self, node: ast.expr, scope: Scope) -> Klass | None:
        binding = self._binding(node, scope, getattr(node, "lineno", 0))
        value = binding[0].value if binding else node
        if isinstance(value, ast.Call) and isinstance(value.func, ast.Name):
            return self.classes.get(value.func.id)
        return None

    def path(self, node: ast.expr) -> str:
        """The dotted name of a function with imports followed: torch.distributed.barrier for dist.barrier."""
        text = ast.unparse(node) if isinstance(node, ast.Name | ast.Attribute) else ""
        first, dot, rest = text.partition(".")
        return f"{self.imports[first]}{dot}{rest}" if first in self.imports else text

    def value_of(self, node: ast.expr, scope: Scope) -> ast.expr | None:
        """What a name is bound to where all its bindings agree, or what a function of the script returns."""
        if isinstance(node, ast.Call):
            function = self.function_of(node.func, scope)
            returned = _returned(function) if function is not None else []
            return returned[0] if len(returned) == 1 else None
        bindings = self._bindings(node, scope)
        if (
            bindings
            and len({ast.dump(each.value) for each, _ in bindings}) == 1
            and bindings[0][0].index is None
        ):
            return bindings[0][0].value
        return None

    def role(self, node: ast.expr, scope: Scope, depth: int = _DEPTH) -> Found:
        """What an expression stands for where it is written."""
        if depth == 0:
            return _NONE
        if isinstance(node, ast.Name):
            return self._name(node, scope, depth - 1)
        if isinstance(node, ast.Attribute):
            return self._attribute(node, scope, depth - 1)
        if isinstance(node, ast.Call):
            return self._made(node, scope, None, depth - 1)
        if isinstance(node, ast.IfExp):
            return self._first([node.body, node.orelse], scope, depth - 1)
        if isinstance(node, ast.BoolOp):
            return self._first(node.values, scope, depth - 1)
        if isinstance(node, ast.NamedExpr | ast.Await):
            return self.role(node.value, scope, depth - 1)
        if isinstance(node, ast.Subscript) and _in_callback(scope) and "model" in ast.unparse(node.slice):
            return Found(Role.MODEL)
        return _NONE if not isinstance(node, ast.Constant) else Found(Role.OTHER)

    def _first(self, nodes: list[ast.expr], scope: Scope, depth: int) -> Found:
        found = [self.role(node, scope, depth) for node in nodes]
        return next((each for each in found if each.role not in (Role.UNKNOWN, Role.OTHER)), found[0])

    def _name(self, node: ast.Name, scope: Scope, depth: int) -> Found:
        if found := self._binding(node, scope, node.lineno):
            return self._bound(*found, depth)
        around: Scope | None = scope
        while around is not None:
            if (parameter := around.parameter(node.id)) is not None:
                return self._parameter(parameter, around, depth)
            around = around.parent
        if (klass := scope.enclosing_class()) is not None and _is_self(node):
            return Found(self._class_role(klass, depth))
        return Found(Role.OTHER) if node.id in self.imports else _NONE

    def _parameter(self, parameter: ast.arg, scope: Scope, depth: int) -> Found:
        if parameter.annotation is not None:
            text = ast.unparse(parameter.annotation).strip("\"'").removeprefix("Optional[").removesuffix("]")
            role = self._constructed(text.split("|")[0].strip(), depth)
            if role is not Role.UNKNOWN:
                return Found(role, declared=True)
        given = [self.role(value, caller, depth) for value, caller in scope.handed.get(parameter.arg, [])]
        known = [found for found in given if found.role is not Role.UNKNOWN]
        if known:
            return Found(known[0].role, all(found.alone for found in known))
        if _is_self(ast.Name(parameter.arg)) and scope.klass is not None:
            return Found(self._class_role(scope.klass, depth))
        if _in_callback(scope) and parameter.arg == "model":
            return Found(Role.MODEL)
        return _NONE

    def _attribute(self, node: ast.Attribute, scope: Scope, depth: int) -> Found:
        if found := self._binding(node, scope, node.lineno):
            return self._bound(*found, depth)
        owner = self.role(node.value, scope, depth)
        role = _ATTRIBUTES.get((owner.role, node.attr))
        return Found(role, owner.alone) if role else _NONE

    def _bound(self, binding: Binding, scope: Scope, depth: int) -> Found:
        alone = bool(binding.guard) and not binding.guard.startswith("!")
        if isinstance(binding.value, ast.Call):
            found = self._made(binding.value, scope, binding.index, depth)
        elif binding.index is None:
            found = self.role(binding.value, scope, depth)
        else:
            found = _NONE
        fresh = isinstance(binding.value, ast.Call) and self._makes_anew(binding.value)
        return Found(found.role, found.alone or (alone and fresh))

    def _makes_anew(self, call: ast.Call) -> bool:
        """Whether a call builds an object, and does not hand on or wrap one that all ranks have."""
        last = self.path(call.func).rsplit(".", 1)[-1]
        if last in _SAME_OBJECT and isinstance(call.func, ast.Attribute):
            return isinstance(call.func.value, ast.Call) and self._makes_anew(call.func.value)
        return last in ("from_pretrained", "from_config") or (last[:1].isupper() and last not in _WRAPPERS)

    def _binding(self, node: ast.expr, scope: Scope, line: int) -> tuple[Binding, Scope] | None:
        """The binding in force at `line`: the last one above it, or the last of all in another function."""
        found = self._bindings(node, scope)
        above = [each for each in found if each[0].line < line and each[1] is scope]
        if above:
            return above[-1]
        return found[-1] if found else None

    def _bindings(self, node: ast.expr, scope: Scope) -> list[tuple[Binding, Scope]]:
        if isinstance(node, ast.Name):
            around: Scope | None = scope
            while around is not None:
                if node.id in around.names:
                    return [(binding, around) for binding in around.names[node.id]]
                if around.parameter(node.id) is not None:
                    return []
                around = around.parent
        if isinstance(node, ast.Attribute) and _is_self(node.value):
            klass, seen = scope.enclosing_class(), 0
            while klass is not None and seen < _DEPTH:
                if node.attr in klass.attributes:
                    made_in = klass.methods.get("__init__") or next(iter(klass.methods.values()))
                    inner = self.scopes[id(made_in)]
                    return [(binding, inner) for binding in klass.attributes[node.attr]]
                klass = next((self.classes[base] for base in klass.bases if base in self.classes), None)
                seen += 1
        return []

    def _made(self, call: ast.Call, scope: Scope, index: int | None, depth: int) -> Found:
        last = self.path(call.func).rsplit(".", 1)[-1] or _last(call.func)
        if last == "prepare" and isinstance(call.func, ast.Attribute):
            return self._prepared(call, scope, index, depth)
        if self.path(call.func) in ("deepspeed.initialize", "deepspeed.init_inference"):
            return Found(Role.ENGINE) if index in (None, 0) else Found(Role.OTHER)
        if last in ("from_pretrained", "from_config", "get_model"):
            owner = _last(call.func.value) if isinstance(call.func, ast.Attribute) else ""
            is_model = bool(_MODEL_CLASS.search(owner)) and not _NO_MODEL.search(owner)
            return Found(Role.MODEL if is_model else Role.OTHER)
        if last in _WRAPPERS:
            inner = self.role(call.args[0], scope, depth) if call.args else _NONE
            return Found(Role.MODEL, inner.alone)
        if last in _SAME_OBJECT:
            arguments = call.args[:1] if last not in ("to", "train", "eval") else []
            candidates = [*arguments, *([call.func.value] if isinstance(call.func, ast.Attribute) else [])]
            found = [self.role(each, scope, depth) for each in candidates]
            return next((each for each in found if each.role in (Role.MODEL, Role.ENGINE)), _NONE)
        function = self.function_of(call.func, scope)
        if function is not None:
            returned = _returned(function, index)
            return self._first(returned, self.scopes[id(function)], depth) if returned else Found(Role.OTHER)
        return Found(self._constructed(self.path(call.func), depth))

    def _prepared(self, call: ast.Call, scope: Scope, index: int | None, depth: int) -> Found:
        """accelerator.prepare returns what it was given, in order."""
        position = index or 0
        if position < len(call.args) and not isinstance(call.args[position], ast.Starred):
            return self.role(call.args[position], scope, depth)
        return _NONE

    def _constructed(self, path: str, depth: int) -> Role:
        """What a class makes, by its name, or by its bases where the script defines it."""
        last = path.rsplit(".", 1)[-1].split("[")[0]
        if last in self.classes and depth:
            return self._class_role(self.classes[last], depth - 1)
        if path.startswith("tokenizers.") or _NO_MODEL.search(last):
            return Role.OTHER
        if last in _BY_NAME:
            return _BY_NAME[last]
        if last in ("DeepSpeedEngine", "PipelineEngine"):
            return Role.ENGINE
        if last[:1].isupper() and _TRAINER.search(last):
            return Role.TRAINER
        if last[:1].isupper() and _MODEL_CLASS.search(last):
            return Role.MODEL
        return Role.OTHER if last[:1].isupper() else Role.UNKNOWN

    def _class_role(self, klass: Klass, depth: int) -> Role:
        for base in klass.bases:
            if base in ("nn.Module", "torch.nn.Module", "Module"):
                return Role.MODEL
            if depth and (role := self._constructed(base, depth - 1)) not in (Role.UNKNOWN, Role.OTHER):
                return role
        return Role.OTHER


@dataclass(frozen=True, slots=True)
class NamesIn:
    """The names of one scope, as conditions are read by."""

    objects: Objects
    scope: Scope

    def value_of(self, node: ast.expr) -> ast.expr | None:
        return self.objects.value_of(node, self.scope)


def _last(node: ast.AST) -> str:
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def _is_self(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id == "self"


def _is_static(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    return any(_last(decorator) == "staticmethod" for decorator in function.decorator_list)


def _in_callback(scope: Scope) -> bool:
    klass = scope.enclosing_class()
    return klass is not None and any("Callback" in base for base in klass.bases)


def _returned(function: ast.FunctionDef | ast.AsyncFunctionDef, index: int | None = None) -> list[ast.expr]:
    """What a function returns, item `index` of it where it returns tuples."""
    found = []
    for node in ast.walk(function):
        if isinstance(node, ast.Return) and node.value is not None:
            if index is None:
                found.append(node.value)
            elif isinstance(node.value, ast.Tuple) and index < len(node.value.elts):
                found.append(node.value.elts[index])
    return found


def _imported(tree: ast.Module) -> Iterator[tuple[str, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.asname:
                    yield alias.asname, alias.name
                else:
                    yield alias.name.split(".")[0], alias.name.split(".")[0]
        elif isinstance(node, ast.ImportFrom):
            prefix = "." * node.level + (node.module or "")
            yield from ((alias.asname or alias.name, f"{prefix}.{alias.name}") for alias in node.names)
