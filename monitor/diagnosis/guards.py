"""Whether the user's source sends only some ranks to a line: a condition, a guard before it, a decorator.

Only a hint that breaks ties. A condition has a sense: True where it holds for the few (`rank == 0`,
`is_main`), False where it holds for all the others (`rank != 0`, a bare `rank`), None where it says nothing
of ranks.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import lru_cache

from ftdash.monitor.diagnosis import source
from ftdash.monitor.diagnosis.model import Frame

_IDENTIFIER = re.compile(r"\w+")
_RANK_WORD = re.compile(
    r"rank|is_main|main_process|main_only|process_zero|process_index|on_process|is_master|master_only",
    re.I,
)
_NO_RANK = re.compile(r"(?:lora|low|full|re|fr)_?rank|rank(?:ed|er|ing)|rank_?pattern", re.I)
_THE_FEW = re.compile(r"main|zero|rank_?0|master|first|chief|lead|coordinator", re.I)
_MOST_STEPS = 3  # from a name to what it was set to
_NEGATED = ast.NotEq | ast.NotIn | ast.IsNot | ast.Gt | ast.GtE | ast.Lt | ast.LtE
_LEAVES = ast.Return | ast.Raise | ast.Continue | ast.Break


@lru_cache(maxsize=4096)
def rank_condition(frame: Frame) -> str:
    """The text of the condition on a rank under which the line runs, "" when there is none.

    Only the special branch counts: the body of `if rank == 1`, the else of `if rank != 1`, what comes after
    `if rank != 1: return`, the whole of a function that a decorator keeps to the main process.
    """
    test, _ = rank_test(frame)
    if test is not None:
        return ast.unparse(test)
    for node, _ in reversed(source.around(frame)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            for decorator in node.decorator_list:
                text = ast.unparse(decorator)
                if _speaks_of_ranks(text):
                    return f"@{text}"
    return ""


@lru_cache(maxsize=4096)
def rank_test(frame: Frame) -> tuple[ast.expr | None, bool]:
    """The condition on a rank in the function around a line, and how it came out where the line runs."""
    for node, field in reversed(source.around(frame)):
        for test, holds in _conditions_of(node, field, frame.line):
            if _sense(test, frame.file) is holds:
                return test, holds
    return None, True


def meant(name: str, file: str) -> ast.expr | None:
    """What a name of a file stands for that is set once."""
    return _definitions(file).get(name)


def _conditions_of(node: ast.AST, field: str, line: int) -> Iterator[tuple[ast.expr, bool]]:
    """The conditions that one node puts on what it holds in `field` at a line, each with how it came out."""
    if isinstance(node, ast.If):
        if field in ("body", "orelse"):
            yield node.test, field == "body"
    elif isinstance(node, ast.IfExp):
        if not _calls(node.orelse):
            yield node.test, True
        elif not _calls(node.body):
            yield node.test, False
    elif isinstance(node, ast.BoolOp):
        for number, value in enumerate(node.values[:-1]):
            if any(map(_calls, node.values[number + 1 :])):
                yield value, isinstance(node.op, ast.And)
    elif isinstance(node, ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp):
        for generator in node.generators:
            yield from ((test, True) for test in generator.ifs)
    held = getattr(node, field, None)
    for earlier in held if isinstance(held, list) else ():
        leaves = isinstance(earlier, ast.If) and isinstance(earlier.body[-1], _LEAVES)
        if leaves and (earlier.end_lineno or 0) < line:
            yield earlier.test, False


def _calls(node: ast.AST) -> bool:
    return any(isinstance(inner, ast.Call) for inner in ast.walk(node))


def _speaks_of_ranks(text: str) -> bool:
    return any(_RANK_WORD.search(word) and not _NO_RANK.search(word) for word in _IDENTIFIER.findall(text))


def _sense(test: ast.expr, file: str, steps: int = _MOST_STEPS) -> bool | None:
    """For whom a condition holds: True for the few, False for all the others, None where it does not say."""
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        sense = _sense(test.operand, file, steps)
        return None if sense is None else not sense
    if isinstance(test, ast.BoolOp):
        senses = (_sense(value, file, steps) for value in test.values)
        return next((sense for sense in senses if sense is not None), None)
    text = ast.unparse(test)
    if isinstance(test, ast.Compare):
        if _speaks_of_ranks(text):
            return not any(isinstance(operator, _NEGATED) for operator in test.ops)
        return None
    if _speaks_of_ranks(text):
        return bool(_THE_FEW.search(text))
    meant = _definitions(file).get(_bare(test)) if steps else None
    return _sense(meant, file, steps - 1) if meant is not None else None


def _bare(node: ast.expr) -> str:
    """The last part of a name: of `self.lead()` "lead"; "" for anything else."""
    if isinstance(node, ast.Call):
        return source.called_name(node)
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


@lru_cache(maxsize=64)
def _definitions(file: str) -> dict[str, ast.expr]:
    """What names of a file stand for that are set once, or are functions of a single return."""
    found: dict[str, list[ast.expr]] = {}
    tree = source.tree(file)
    for node in ast.walk(tree) if tree else ():
        if isinstance(node, ast.Assign):
            for target in node.targets:
                for name, value in _pairs(target, node.value):
                    found.setdefault(_bare(name), []).append(value)
        elif isinstance(node, ast.AnnAssign) and node.value is not None:
            found.setdefault(_bare(node.target), []).append(node.value)
        elif isinstance(node, ast.FunctionDef):
            returned = [inner.value for inner in ast.walk(node) if isinstance(inner, ast.Return)]
            if len(returned) == 1 and returned[0] is not None:
                found.setdefault(node.name, []).append(returned[0])
    return {name: values[0] for name, values in found.items() if name and len(values) == 1}


def _pairs(target: ast.expr, value: ast.expr) -> list[tuple[ast.expr, ast.expr]]:
    """Of `a, b = c, d` each name with its value."""
    if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple) and len(target.elts) == len(value.elts):
        return list(zip(target.elts, value.elts, strict=True))
    return [(target, value)]


@lru_cache(maxsize=4096)
def handles_a_signal(frame: Frame) -> bool:
    """Whether the function around a line is set as the handler of a signal in its file."""
    return frame.short in _handlers(frame.file)


@lru_cache(maxsize=64)
def _handlers(file: str) -> frozenset[str]:
    tree = source.tree(file)
    calls = [node for node in (ast.walk(tree) if tree else ()) if isinstance(node, ast.Call)]
    return frozenset(
        _bare(call.args[1])
        for call in calls
        if source.called_name(call) in ("signal", "add_signal_handler") and len(call.args) > 1
    ) - {""}
