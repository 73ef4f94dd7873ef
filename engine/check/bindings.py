"""What the names of a script hold, as far as reading tells: constants, defaults of arguments, dicts."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import Any

UNKNOWN = object()  # an expression whose value only running would tell
DEPTH = 8  # names followed from one to the next


class Bindings:
    """Names that a script binds once, and the defaults of its argparse options and dataclass fields."""

    def __init__(self, tree: ast.Module) -> None:
        self._bound = _bound(tree)
        self._items = _items(tree)
        self._defaults = _defaults(tree)
        self._depth = 0

    def source(self, node: ast.AST) -> ast.expr | None:
        """The expression that a name is bound to, where it is bound once."""
        values = self._bound.get(node.id, []) if isinstance(node, ast.Name) else []
        return values[0] if len(values) == 1 else None

    def value(self, node: ast.AST) -> Any:
        """A literal, a dtype's name, what a name holds, or UNKNOWN."""
        if self._depth >= DEPTH:
            return UNKNOWN
        self._depth += 1
        try:
            return self._value(node)
        finally:
            self._depth -= 1

    def keywords(self, node: ast.Call) -> dict[str, Any]:
        """Keyword arguments, those of `**name` among them where the dict is known."""
        found: dict[str, Any] = {}
        for keyword in node.keywords:
            value = self.value(keyword.value)
            if keyword.arg:
                found[keyword.arg] = value
            elif isinstance(value, dict):
                found |= {str(key): item for key, item in value.items()}
        return found

    def _value(self, node: ast.AST) -> Any:
        if isinstance(node, ast.Constant):
            return node.value
        if isinstance(node, ast.Name):
            return self._named(node)
        if isinstance(node, ast.Attribute):
            return self._attribute(node)
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            inner = self.value(node.operand)
            return -inner if isinstance(inner, int | float) else UNKNOWN
        if isinstance(node, ast.List | ast.Tuple | ast.Set):
            return [self.value(item) for item in node.elts]
        if isinstance(node, ast.Dict):
            found: dict[Any, Any] = {}
            for key, item in zip(node.keys, node.values, strict=True):
                value = self.value(item)
                if key is None:
                    found |= value if isinstance(value, dict) else {}
                elif isinstance(key, ast.Constant):
                    found[key.value] = value
            return found
        if isinstance(node, ast.Call):
            return self._call(node)
        return UNKNOWN

    def _named(self, node: ast.Name) -> Any:
        source = self.source(node)
        if source is None:
            return UNKNOWN
        value = self.value(source)
        if isinstance(value, dict):
            value = {**value, **{key: self.value(item) for key, item in self._items.get(node.id, {}).items()}}
        return value

    def _attribute(self, node: ast.Attribute) -> Any:
        name = dotted(node)
        if name.startswith("torch."):
            return name
        if node.attr in self._defaults and isinstance(node.value, ast.Name):
            return self.value(self._defaults[node.attr])
        return node.attr if node.attr.isupper() else UNKNOWN

    def _call(self, node: ast.Call) -> Any:
        name = dotted(node.func)
        if name == "dict":
            return self.keywords(node)
        if name == "getattr" and len(node.args) >= 2 and dotted(node.args[0]) == "torch":
            attribute = self.value(node.args[1])
            return f"torch.{attribute}" if isinstance(attribute, str) else UNKNOWN
        return UNKNOWN


def dotted(node: ast.AST) -> str:
    """`a.b` for an attribute, with () and [] for what is called or indexed on the way."""
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Call):
        return f"{dotted(node.func)}()"
    if isinstance(node, ast.Subscript):
        return f"{dotted(node.value)}[]"
    return ""


def _bound(tree: ast.Module) -> dict[str, list[ast.expr]]:
    """Every expression that each name is bound to; what a loop or += binds counts as several."""
    bound: dict[str, list[ast.expr]] = {}

    def bind(target: ast.expr, value: ast.expr) -> None:
        if isinstance(target, ast.Name):
            bound.setdefault(target.id, []).append(value)
        elif isinstance(target, ast.Tuple | ast.List):
            parts = value.elts if isinstance(value, ast.Tuple | ast.List) else []
            for index, part in enumerate(target.elts):
                bind(part, parts[index] if len(parts) == len(target.elts) else ast.Name("_"))

    for node in ast.walk(tree):
        if isinstance(node, ast.Assign):
            for target in node.targets:
                bind(target, node.value)
        elif isinstance(node, ast.AnnAssign) and node.value is not None:
            bind(node.target, node.value)
        elif isinstance(node, ast.AugAssign | ast.For | ast.NamedExpr) and isinstance(node.target, ast.Name):
            bound.setdefault(node.target.id, []).extend([ast.Name("_"), ast.Name("_")])
        elif isinstance(node, ast.arg):
            bound.setdefault(node.arg, []).extend([ast.Name("_"), ast.Name("_")])
    return bound


def _items(tree: ast.Module) -> dict[str, dict[Any, ast.expr]]:
    """What `name["key"] = value` puts into a dict where nothing decides about it; the last one counts."""
    found: dict[str, dict[Any, ast.expr]] = {}
    for node in _undecided(tree.body):
        if isinstance(node, ast.Assign) and len(node.targets) == 1:
            target = node.targets[0]
            if (
                isinstance(target, ast.Subscript)
                and isinstance(target.value, ast.Name)
                and isinstance(target.slice, ast.Constant)
            ):
                found.setdefault(target.value.id, {})[target.slice.value] = node.value
    return found


def _undecided(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """The statements of a script and of its functions that no condition or loop stands around."""
    for node in body:
        yield node
        if isinstance(node, ast.If) and "__name__" not in ast.unparse(node.test):
            continue
        if isinstance(node, ast.If | ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.With):
            yield from _undecided(node.body)


def _defaults(tree: ast.Module) -> dict[str, ast.expr]:
    """Defaults of argparse options and of the fields of classes, where only one has that name."""
    found: dict[str, list[ast.expr]] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and dotted(node.func).endswith(".add_argument"):
            flags = [arg.value for arg in node.args if isinstance(arg, ast.Constant)]
            name = next((flag for flag in flags if str(flag).startswith("--")), flags[0] if flags else "")
            default = next((word.value for word in node.keywords if word.arg == "default"), None)
            if default is not None:
                found.setdefault(str(name).lstrip("-").replace("-", "_"), []).append(default)
        elif isinstance(node, ast.ClassDef):
            for field in node.body:
                target = getattr(field, "target", None) or next(iter(getattr(field, "targets", [])), None)
                value = getattr(field, "value", None)
                if isinstance(target, ast.Name) and value is not None:
                    found.setdefault(target.id, []).append(_field_default(value))
    return {name: values[0] for name, values in found.items() if len(values) == 1}


def _field_default(value: ast.expr) -> ast.expr:
    """The default inside `field(default=…)`, or the value itself."""
    if isinstance(value, ast.Call) and dotted(value.func).endswith("field"):
        return next((word.value for word in value.keywords if word.arg == "default"), ast.Name("_"))
    return value
