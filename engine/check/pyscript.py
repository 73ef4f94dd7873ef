"""A training script read without running it: its calls in execution order, and what guards each of them."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from ftdash.engine.check.bindings import UNKNOWN, Bindings, dotted
from ftdash.engine.check.documents import DocumentError

__all__ = ["UNKNOWN", "Call", "Script"]

# Conditions that hold on one rank only.
_MAIN = re.compile(
    r"is_(local_|world_|local_world_)?(main_process|process_zero)|is_main(?!tain)|is_master|should_save\b"
    r"|(^|[._])(main|master)_process$|(^|[._])(is_)?(global_|local_)?rank_?(0|zero)(\(\))?$"
)
_RANK = re.compile(
    r"(^|[._\[\"'])(local_|global_|process_|world_)?rank([\"'\])]|$)|get_rank\(|process_index$|RANK[\"']",
    re.I,
)


@dataclass(frozen=True, slots=True)
class Call:
    """One call: `name` is dotted as written (`trainer.save_model`), `target` what the result is bound to.

    `guard` is the condition that keeps ranks away: empty when all reach the call, led by "!" when all but
    one do.
    """

    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    line: int
    target: str
    guard: str
    node: ast.Call = field(compare=False, repr=False)

    @property
    def main_only(self) -> str:
        """The condition that lets one rank alone reach the call, or empty."""
        return "" if self.guard.startswith("!") else self.guard

    @property
    def last(self) -> str:
        return self.name.rsplit(".", 1)[-1]

    @property
    def owner(self) -> str:
        return self.name.rsplit(".", 1)[0] if "." in self.name else ""


_MAGIC = re.compile(r"^(\s*)(?:[!%].*|\?.*)$")


def _parse(text: str, name: str) -> ast.Module:
    """The script's tree; what only a notebook knows (`!pip`, `%env`) left out. Raises DocumentError."""
    try:
        return ast.parse(text)
    except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
        plain = [_MAGIC.sub(r"\1pass", line) for line in text.splitlines()]
        if isinstance(error, SyntaxError) and plain != text.splitlines():
            try:
                return ast.parse("\n".join(plain))
            except SyntaxError:
                pass  # the first error is the one to tell
        line = getattr(error, "lineno", None)
        reason = error.args[0] if error.args else "nested too deeply"
        raise DocumentError(f"{name}{f':{line}' if line else ''}: not Python: {reason}") from None


class Script:
    """The calls of a script. Functions that the script itself calls are entered where they are called."""

    def __init__(self, text: str, name: str) -> None:
        self.tree = _parse(text, name)
        self.aliases = _aliases(self.tree)
        self.functions = {
            node.name: node
            for node in ast.walk(self.tree)
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        }
        self.bindings = Bindings(self.tree)
        self.imports = set(_imports(self.tree))
        self._entered: set[int] = set()
        self.calls: list[Call] = []
        self._block(self.tree.body, "")
        for node in ast.walk(self.tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                self._enter(node, "")
        self.assigned = self._attributes()

    def named(self, *lasts: str) -> Iterator[Call]:
        return (call for call in self.calls if call.last in lasts)

    def value(self, node: ast.AST) -> Any:
        """A literal, a dtype's name, a constant or default of the script, or UNKNOWN."""
        return self.bindings.value(node)

    def is_trainer(self, owner: str) -> bool:
        """Whether a name holds a trainer, by what it is bound to or how it is called."""
        return "trainer" in owner.lower() or self.bindings.made_by.get(owner, "").endswith("Trainer")

    def _attributes(self) -> list[tuple[str, Any, int]]:
        """What attributes are set to: `config.output_router_logits = False`, by setattr, by update()."""
        found = []
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Assign):
                for target in node.targets:
                    if isinstance(target, ast.Attribute | ast.Subscript):
                        found.append((dotted(target), self.value(node.value), node.lineno))
        for call in self.calls:
            given = call.args[0] if call.args else None
            if call.last == "update" and isinstance(given, dict):
                found += [(f"{call.owner}.{key}", value, call.line) for key, value in given.items()]
            elif call.name == "setattr" and len(call.args) == 3 and isinstance(call.args[1], str):
                found.append((call.args[1], call.args[2], call.line))
        return found

    def _block(self, statements: list[ast.stmt], guard: str) -> None:
        for statement in statements:
            guard = self._statement(statement, guard)

    def _statement(self, node: ast.stmt, guard: str) -> str:
        """Visit one statement; the result guards what follows it in the same block."""
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            for decorator in node.decorator_list:
                if re.search(r"main_process|rank_?(zero|0)", dotted(decorator)):
                    self._enter(node, ast.unparse(decorator))
            return guard
        if isinstance(node, ast.ClassDef):
            return guard
        if isinstance(node, ast.If):
            return self._if(node, guard)
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.expr):
                self._expression(child, guard, _target(node))
            elif isinstance(child, ast.withitem):
                self._expression(child.context_expr, guard, "")
        for name in ("body", "orelse", "finalbody"):
            if isinstance(block := getattr(node, name, None), list):
                self._block(block, guard)
        for handler in getattr(node, "handlers", []):
            self._block(handler.body, guard)
        for case in getattr(node, "cases", []):
            self._block(case.body, guard)
        return guard

    def _if(self, node: ast.If, guard: str) -> str:
        self._expression(node.test, guard, "")
        only = _main_condition(node.test, self.bindings)
        text = ast.unparse(node.test)
        self._block(node.body, guard or _guard(only, text))
        self._block(node.orelse, guard or _guard(None if only is None else not only, f"else of {text}"))
        # `if not main: return` leaves the rest of the block to one rank.
        if only is False and _leaves(node.body):
            return guard or f"after {text}"
        return guard

    def _expression(self, node: ast.expr, guard: str, target: str) -> None:
        if isinstance(node, ast.IfExp):
            self._expression(node.test, guard, "")
            only = _main_condition(node.test, self.bindings)
            text = ast.unparse(node.test)
            self._expression(node.body, guard or _guard(only, text), target)
            self._expression(node.orelse, guard or _guard(None if only is None else not only, text), target)
            return
        if isinstance(node, ast.Lambda):
            return
        if isinstance(node, ast.Call):
            self._call(node, guard, target)
            return
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.expr):
                self._expression(child, guard, "")
            elif isinstance(child, ast.comprehension):
                self._expression(child.iter, guard, "")

    def _call(self, node: ast.Call, guard: str, target: str) -> None:
        self._expression(node.func, guard, "")
        for argument in node.args:
            self._expression(argument, guard, "")
        for keyword in node.keywords:
            self._expression(keyword.value, guard, "")
        name = self._own_name(dotted(node.func))
        self.calls.append(
            Call(
                name,
                tuple(self.value(argument) for argument in node.args),
                self.bindings.keywords(node),
                node.lineno,
                target,
                guard,
                node,
            )
        )
        # Handing a bound method to a helper that runs it on the main process alone.
        if name.rsplit(".", 1)[-1] in ("on_main_process", "on_local_main_process"):
            for argument in node.args:
                if isinstance(argument, ast.Attribute):
                    self.calls.append(Call(dotted(argument), (), {}, node.lineno, "", name, node))
        if isinstance(node.func, ast.Name) and node.func.id in self.functions:
            self._enter(self.functions[node.func.id], guard)

    def _own_name(self, name: str) -> str:
        """The name without the aliases of its import: `dist.barrier` is torch.distributed.barrier."""
        first, dot, rest = name.partition(".")
        bare = first.removesuffix("()").removesuffix("[]")
        return self.aliases.get(bare, bare) + first[len(bare) :] + dot + rest

    def _enter(self, function: ast.FunctionDef | ast.AsyncFunctionDef, guard: str) -> None:
        if id(function) in self._entered:
            return
        self._entered.add(id(function))
        self._block(function.body, guard)


def _target(node: ast.stmt) -> str:
    if isinstance(node, ast.Assign) and len(node.targets) == 1:
        return dotted(node.targets[0])
    if isinstance(node, ast.AnnAssign):
        return dotted(node.target)
    return ""


def _main_condition(test: ast.expr, bindings: Bindings) -> bool | None:
    """True when the condition holds on one rank only, False when it holds on all others, None otherwise."""
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        inner = _main_condition(test.operand, bindings)
        return None if inner is None else not inner
    if isinstance(test, ast.BoolOp):
        parts = [_main_condition(value, bindings) for value in test.values]
        if isinstance(test.op, ast.And):
            return True if True in parts else None
        return False if False in parts else (True if all(part is True for part in parts) else None)
    if isinstance(test, ast.Compare) and len(test.ops) == 1:
        left, right = ast.unparse(test.left), test.comparators[0]
        source = bindings.source(test.left)
        if not _RANK.search(left) and not (source is not None and _RANK.search(ast.unparse(source))):
            return None
        if isinstance(test.ops[0], ast.In | ast.NotIn):
            return isinstance(test.ops[0], ast.In)  # `local_rank in [-1, 0]`
        zero = isinstance(right, ast.Constant) and str(right.value) == "0"
        if not zero:
            return None
        if isinstance(test.ops[0], ast.Eq | ast.LtE):
            return True
        return False if isinstance(test.ops[0], ast.NotEq | ast.Gt) else None
    if isinstance(test, ast.Name | ast.Attribute | ast.Call):
        if _MAIN.search(ast.unparse(test)):
            return True
        source = bindings.source(test)
        return _main_condition(source, bindings.without(test)) if source is not None else None
    return None


def _guard(only: bool | None, text: str) -> str:
    return "" if only is None else text if only else f"!{text}"


def _leaves(body: list[ast.stmt]) -> bool:
    last = body[-1]
    if isinstance(last, ast.Return):
        return True
    return (
        isinstance(last, ast.Expr)
        and isinstance(last.value, ast.Call)
        and dotted(last.value.func)
        in (
            "sys.exit",
            "exit",
            "quit",
            "os._exit",
        )
    )


def _aliases(tree: ast.Module) -> dict[str, str]:
    """Names that an import gives to something else: `import a.b as c`, `from m import A as B`."""
    found: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            found |= {alias.asname: alias.name for alias in node.names if alias.asname}
    return found


def _imports(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module.split(".")[0]
