"""A training script read without running it: its calls in execution order."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from ftdash.engine.check.bindings import UNKNOWN, Bindings, dotted
from ftdash.engine.check.documents import DocumentError

__all__ = ["UNKNOWN", "Call", "Script"]


@dataclass(frozen=True, slots=True)
class Call:
    """One call: `name` is dotted as written (`trainer.save_model`), `target` what the result is bound to."""

    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    line: int
    target: str
    node: ast.Call = field(compare=False, repr=False)

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
        self._block(self.tree.body)
        for node in ast.walk(self.tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                self._enter(node)
        self.assigned = self._attributes()

    def named(self, *lasts: str) -> Iterator[Call]:
        return (call for call in self.calls if call.last in lasts)

    def value(self, node: ast.AST) -> Any:
        """A literal, a dtype's name, a constant or default of the script, or UNKNOWN."""
        return self.bindings.value(node)

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

    def _block(self, statements: list[ast.stmt]) -> None:
        for statement in statements:
            self._statement(statement)

    def _statement(self, node: ast.stmt) -> None:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            return
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.expr):
                self._expression(child, _target(node))
            elif isinstance(child, ast.withitem):
                self._expression(child.context_expr, "")
        for name in ("body", "orelse", "finalbody"):
            if isinstance(block := getattr(node, name, None), list):
                self._block(block)
        for handler in getattr(node, "handlers", []):
            self._block(handler.body)
        for case in getattr(node, "cases", []):
            self._block(case.body)

    def _expression(self, node: ast.expr, target: str) -> None:
        if isinstance(node, ast.IfExp):
            self._expression(node.test, "")
            self._expression(node.body, target)
            self._expression(node.orelse, target)
        elif isinstance(node, ast.Call):
            self._call(node, target)
        elif not isinstance(node, ast.Lambda):
            for child in ast.iter_child_nodes(node):
                if isinstance(child, ast.expr):
                    self._expression(child, "")
                elif isinstance(child, ast.comprehension):
                    self._expression(child.iter, "")

    def _call(self, node: ast.Call, target: str) -> None:
        self._expression(node.func, "")
        for argument in (*node.args, *(keyword.value for keyword in node.keywords)):
            self._expression(argument, "")
        self.calls.append(
            Call(
                self._own_name(dotted(node.func)),
                tuple(self.value(argument) for argument in node.args),
                self.bindings.keywords(node),
                node.lineno,
                target,
                node,
            )
        )
        if isinstance(node.func, ast.Name) and node.func.id in self.functions:
            self._enter(self.functions[node.func.id])

    def _own_name(self, name: str) -> str:
        """The name without the aliases of its import: `dist.barrier` is torch.distributed.barrier."""
        first, dot, rest = name.partition(".")
        bare = first.removesuffix("()").removesuffix("[]")
        return self.aliases.get(bare, bare) + first[len(bare) :] + dot + rest

    def _enter(self, function: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        if id(function) not in self._entered:
            self._entered.add(id(function))
            self._block(function.body)


def _target(node: ast.stmt) -> str:
    if isinstance(node, ast.Assign) and len(node.targets) == 1:
        return dotted(node.targets[0])
    if isinstance(node, ast.AnnAssign):
        return dotted(node.target)
    return ""


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
