"""What the user's source says around a line: the text, rank conditions, loops, except blocks.

Only a hint that breaks ties; files that cannot be read or parsed say nothing.
"""

from __future__ import annotations

import ast
import re
from functools import lru_cache
from pathlib import Path

from ftdash.monitor.diagnosis.model import Frame

_MAX_BYTES = 2 << 20
_RANK_NAME = re.compile(
    r"\b\w*(?:rank|is_main|main_process|world_process_zero|process_index|master|is_first)\w*", re.I
)
_STORE_CALL = re.compile(r"\bstore\w*\.(?:get|wait|set|add|compare_set|barrier|num_keys|queue_pop)\(", re.I)
_RAW_WAIT = re.compile(r"\.(?:wait|synchronize)\(|\.(?:item|cpu|tolist|numpy)\(\)")
_DIST_CALL = re.compile(r"\b(?:dist|distributed|c10d)\.\w+\(|\.backward\(")
_LOCK = re.compile(r"\.acquire\(|^\s*with\b.*lock|\block\b|\bmutex\b|\.join\(|\.result\(", re.I)


@lru_cache(maxsize=256)
def _lines(file: str) -> tuple[str, ...]:
    try:
        path = Path(file)
        if not file.startswith("/") or path.stat().st_size > _MAX_BYTES:
            return ()
        return tuple(path.read_text("utf-8", "replace").splitlines())
    except OSError:
        return ()


def _changed_at(file: str) -> float:
    try:
        return Path(file).stat().st_mtime
    except OSError:
        return 0.0


@lru_cache(maxsize=64)
def _tree(file: str) -> ast.Module | None:
    try:
        return ast.parse("\n".join(_lines(file)))
    except (SyntaxError, ValueError, RecursionError):
        return None


def line_text(frame: Frame | None, started: float = 0.0) -> str:
    """The line, "" when it cannot be read or its file is newer than the process that `started` then."""
    if frame is None or frame.line <= 0 or (started and _changed_at(frame.file) > started + 1.0):
        return ""
    lines = _lines(frame.file)
    return lines[frame.line - 1].strip() if frame.line <= len(lines) else ""


def _around(frame: Frame) -> list[tuple[ast.AST, str]]:
    """Statements that hold the line, outermost first, each with the field the line is in; of one function."""
    tree = _tree(frame.file)
    if tree is None:
        return []
    path: list[tuple[ast.AST, str]] = []
    node: ast.AST = tree
    while True:
        for name, value in ast.iter_fields(node):
            inside = next(
                (
                    item
                    for item in (value if isinstance(value, list) else [value])
                    if isinstance(item, ast.AST)
                    and getattr(item, "lineno", 0) <= frame.line <= (getattr(item, "end_lineno", 0) or 0)
                ),
                None,
            )
            if inside is not None:
                if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                    path.clear()
                path.append((node, name))
                node = inside
                break
        else:
            return path


@lru_cache(maxsize=4096)
def rank_condition(frame: Frame) -> str:
    """The text of the condition on a rank under which the line runs, "" when there is none.

    Only the special branch counts: the body of `if rank == 1`, the else of `if rank != 1`.
    """
    for node, name in reversed(_around(frame)):
        if not isinstance(node, ast.If):
            continue
        text = ast.unparse(node.test)
        if not _RANK_NAME.search(text):
            continue
        negated = any(isinstance(op, ast.NotEq | ast.Gt | ast.GtE | ast.Lt) for op in _comparisons(node.test))
        negated = negated or (isinstance(node.test, ast.UnaryOp) and isinstance(node.test.op, ast.Not))
        if name == ("orelse" if negated else "body"):
            return text
    return ""


def _comparisons(test: ast.expr) -> list[ast.cmpop]:
    return [op for node in ast.walk(test) if isinstance(node, ast.Compare) for op in node.ops]


@lru_cache(maxsize=4096)
def in_except_block(frame: Frame) -> bool:
    return any(isinstance(node, ast.ExceptHandler) for node, _ in _around(frame))


@lru_cache(maxsize=4096)
def loop_may_break(frame: Frame) -> bool:
    """Whether the line stands in a loop that can be left by `break`."""
    loops = [
        node for node, name in _around(frame) if isinstance(node, ast.For | ast.While) and name == "body"
    ]
    return any(isinstance(inner, ast.Break | ast.Return) for loop in loops for inner in ast.walk(loop))


_POLL_CALLS = frozenset({"sleep", "print", "debug", "info", "warning", "time", "monotonic", "perf_counter"})


@lru_cache(maxsize=4096)
def polls(frame: Frame) -> bool:
    """Whether the line's innermost loop is a `while` that does nothing but sleep until something holds."""
    loop = next(
        (
            node
            for node, name in reversed(_around(frame))
            if isinstance(node, ast.For | ast.While) and name in ("body", "test")
        ),
        None,
    )
    if not isinstance(loop, ast.While):
        return False
    leaving = [
        item
        for item in ast.walk(loop)
        if isinstance(item, ast.If) and isinstance(item.body[-1], ast.Break | ast.Return | ast.Raise)
    ]
    asked = {node for item in leaving for part in (item.test, *item.body) for node in ast.walk(part)}
    calls = {
        called.attr if isinstance(called := node.func, ast.Attribute) else getattr(called, "id", "")
        for statement in loop.body
        for node in ast.walk(statement)
        if isinstance(node, ast.Call) and node not in asked
    }
    return "sleep" in calls and calls <= _POLL_CALLS


def says_store(text: str) -> bool:
    return bool(_STORE_CALL.search(text))


def says_collective(text: str) -> bool:
    """A wait that no Python function stands below: Work.wait of torch, a read of a device value."""
    return bool(_RAW_WAIT.search(text) or _DIST_CALL.search(text))


def says_lock(text: str) -> bool:
    return bool(_LOCK.search(text))
