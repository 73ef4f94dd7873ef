"""What the user's source says around a line: the text, loops, except blocks.

Only a hint that breaks ties; files that cannot be read or parsed say nothing.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Sequence
from functools import lru_cache
from pathlib import Path

from ftdash.monitor.diagnosis.model import Frame

_MAX_BYTES = 2 << 20
_STORE_CALL = re.compile(r"\bstore\w*\.(?:get|wait|set|add|compare_set|barrier|num_keys|queue_pop)\(", re.I)
_RAW_WAIT = re.compile(r"\.(?:wait|synchronize|is_completed)\(|\.(?:item|cpu|tolist|numpy)\(\)")
_DIST_CALL = re.compile(r"\b(?:dist|distributed|c10d)\.\w+\(|\.backward\(")
_SENDS = re.compile(r"\.(?:send|sendall|sendto|sendmsg|sendfile|send_bytes)\(|\bos\.(?:write|sendfile)\(")
_LOCK = re.compile(
    r"\.acquire\(|^\s*with\b.*lock|^with [\w.\[\]]+(?:, [\w.\[\]]+)*:|\block\b|\bmutex\b|\.join\(|\.result\(",
    re.I,
)


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
def tree(file: str) -> ast.Module | None:
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


def around(frame: Frame) -> list[tuple[ast.AST, str]]:
    """Statements that hold the line, outermost first, each with the field the line is in; of one function."""
    module = tree(frame.file)
    if module is None:
        return []
    path: list[tuple[ast.AST, str]] = []
    node: ast.AST = module
    while True:
        held = [
            (name, item)
            for name, value in ast.iter_fields(node)
            for item in (value if isinstance(value, list) else [value])
            if isinstance(item, ast.AST)
            and getattr(item, "lineno", 0) <= frame.line <= (getattr(item, "end_lineno", 0) or 0)
        ]
        if not held:
            return path
        # Of a plain name and an expression in one line, the expression is what runs.
        name, inside = min(held, key=lambda pair: isinstance(pair[1], ast.Name | ast.Constant))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            path.clear()
        path.append((node, name))
        node = inside


@lru_cache(maxsize=4096)
def statement(frame: Frame) -> str:
    """The text of the innermost statement around a line, "" when it cannot be read."""
    module = tree(frame.file)
    found = [
        node
        for node in (ast.walk(module) if module else ())
        if isinstance(node, ast.stmt) and node.lineno <= frame.line <= (node.end_lineno or 0)
    ]
    return ast.unparse(max(found, key=lambda node: node.lineno)) if found else ""


@lru_cache(maxsize=4096)
def in_except_block(frame: Frame) -> bool:
    return any(isinstance(node, ast.ExceptHandler) for node, _ in around(frame))


Loop = ast.For | ast.AsyncFor | ast.While


@lru_cache(maxsize=4096)
def may_be_left(frame: Frame, later: int) -> bool:
    """Whether a rank can come past a line, to line `later` of its function, without having made it.

    Out of a loop that has a `break`, or out of a `try` whose handler goes on or into its `finally`; not where
    success ends it.
    """
    if _tries_again(frame):
        return False
    for node, name in around(frame):
        if name != "body":
            continue
        if isinstance(node, Loop) and later > (node.end_lineno or 0) and _may_end_early(node):
            return True
        if isinstance(node, ast.Try) and later > (node.body[-1].end_lineno or 0):
            finally_ends = node.finalbody[-1].end_lineno if node.finalbody else 0
            return later <= (finally_ends or 0) or any(not _raises(handler) for handler in node.handlers)
    return False


@lru_cache(maxsize=4096)
def in_a_loop_before(frame: Frame, later: int) -> bool:
    """Whether a line stands in a loop that is over before line `later`: ranks may have had fewer turns."""
    return not _tries_again(frame) and any(
        isinstance(node, Loop) and name == "body" and later > (node.end_lineno or 0)
        for node, name in around(frame)
    )


@lru_cache(maxsize=4096)
def in_a_loop(frame: Frame) -> bool:
    return any(isinstance(node, Loop) and name == "body" for node, name in around(frame))


@lru_cache(maxsize=4096)
def in_every_turn(frame: Frame) -> bool:
    """Whether a line stands in a loop of its function, under no condition inside of it."""
    path = [node for node, name in around(frame) if name == "body" and isinstance(node, Loop | ast.If)]
    return bool(path) and isinstance(path[-1], Loop)


def _tries_again(frame: Frame) -> bool:
    """Whether a line is tried until it succeeds: the rank that is still there has failed once more."""
    return any(
        isinstance(node, ast.Try)
        and (_ends_the_loop(node.body) or bool(node.orelse and _ends_the_loop(node.orelse)))
        for node, _ in around(frame)
    )


@lru_cache(maxsize=4096)
def may_be_skipped(frame: Frame) -> bool:
    """Whether the function around a line returns before it on a condition, or out of a `try` around it."""
    function = _function(frame)
    if function is None:
        return False
    if any(
        isinstance(node, ast.Try) and name == "body" and not all(map(_raises_on, node.handlers))
        for node, name in around(frame)
    ):
        return not _tries_again(frame)
    return any(
        isinstance(leaving, ast.Return | ast.Raise)
        for node in ast.walk(function)
        if isinstance(node, ast.If) and (node.end_lineno or 0) < frame.line
        for leaving in ast.walk(node)
    )


@lru_cache(maxsize=4096)
def only_first_depends(first: Frame, second: Frame) -> bool:
    """Of two lines of one function, whether the first stands under an `if` and the second under no other."""
    one, two = ({node for node, _ in around(frame) if isinstance(node, ast.If)} for frame in (first, second))
    return bool(one - two) and not two - one


_COUNTED = re.compile(
    r"step|epoch|iter|every|interval|freq|period|world|warm|^(?:i|n|args|cfg|config|self)$", re.I
)


@lru_cache(maxsize=4096)
def depends_on_data(first: Frame, second: Frame) -> bool:
    """Whether the first of two lines of one function stands under an `if` of its own that ranks may see
    differently: one that asks for more than how far the run is."""
    around_second = {node for node, _ in around(second)}
    return _asks_for_data(
        n.test for n, _ in around(first) if isinstance(n, ast.If) and n not in around_second
    )


@lru_cache(maxsize=4096)
def under_data(frame: Frame) -> bool:
    """Whether a line stands under an `if` of its function that ranks may see differently."""
    return _asks_for_data(node.test for node, _ in around(frame) if isinstance(node, ast.If))


def _asks_for_data(tests: Iterable[ast.expr]) -> bool:
    asked = {
        node.attr if isinstance(node, ast.Attribute) else node.id
        for test in tests
        for node in ast.walk(test)
        if isinstance(node, ast.Name | ast.Attribute)
    }
    return any(not _COUNTED.search(name) for name in asked)


def _function(frame: Frame) -> ast.FunctionDef | ast.AsyncFunctionDef | None:
    """The innermost function of that name around a line."""
    module = tree(frame.file)
    found = [
        node
        for node in (ast.walk(module) if module else ())
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and node.name == frame.short
        and node.lineno <= frame.line <= (node.end_lineno or 0)
    ]
    return found[-1] if found else None


def _may_end_early(loop: Loop) -> bool:
    return any(isinstance(inner, ast.Break | ast.Return | ast.Continue) for inner in ast.walk(loop))


def _raises(handler: ast.ExceptHandler) -> bool:
    """Whether the handler's last statement leaves the function or the program."""
    last = handler.body[-1]
    if isinstance(last, ast.Expr) and isinstance(last.value, ast.Call):
        return ast.unparse(last.value.func).rsplit(".", 1)[-1] in ("exit", "_exit", "abort")
    return isinstance(last, ast.Raise | ast.Return)


def _raises_on(handler: ast.ExceptHandler) -> bool:
    """Whether the handler hands on what it caught, or ends the program: a return goes on in the caller."""
    return _raises(handler) and not isinstance(handler.body[-1], ast.Return)


@lru_cache(maxsize=4096)
def innermost_loop(frame: Frame) -> Loop | None:
    for node, name in reversed(around(frame)):
        if isinstance(node, Loop) and name != "orelse":
            return node
    return None


def _ends_the_loop(body: Sequence[ast.stmt]) -> bool:
    last = body[-1]
    if isinstance(last, ast.With | ast.AsyncWith):
        return _ends_the_loop(last.body)
    return isinstance(last, ast.Break | ast.Return | ast.Raise)


POLL_CALLS = frozenset(
    {
        "sleep",
        "print",
        "debug",
        "info",
        "warning",
        "time",
        "monotonic",
        "perf_counter",
        "wait",
        "poll",
        "join",
    }
    | {"is_set", "is_alive", "done", "empty", "qsize", "exists", "is_file", "is_dir", "isfile", "isdir"}
    | {"stat", "getsize", "listdir", "glob", "strftime", "now", "timedelta"}
    | {"min", "max", "float", "round", "uniform", "random", "randint"}
    | {"error", "exception", "warn", "critical", "log", "getLogger", "flush"}
)
TAKES = frozenset({"pop", "popleft", "popitem", "remove", "get_nowait", "discard"})


@lru_cache(maxsize=4096)
def gets_on(frame: Frame, *, to_an_end: bool = False) -> bool | None:
    """Whether the innermost loop around a line goes through something, or works at what its conditions ask.

    None where there is no loop, or no source. With `to_an_end` a loop that only calls something again and
    again, as a heartbeat does, is not enough.
    """
    loop = innermost_loop(frame)
    if loop is None:
        return None
    if not isinstance(loop, ast.While):
        return True
    asked = {node.id for test in conditions(loop) for node in ast.walk(test) if isinstance(node, ast.Name)}
    worked_on = _worked_on(loop)
    if any(name in worked_on or not _only_asked(loop, name) for name in asked & _set_in(loop)):
        return True
    return not to_an_end and bool(_calls(loop, _asked(loop)) - POLL_CALLS)


@lru_cache(maxsize=4096)
def polls(frame: Frame, callee: str = "") -> bool:
    """Whether the line's innermost loop only waits until something holds or succeeds.

    What stands in the loop's condition, in an `if` that leaves it, or in a `try` whose success leaves it is
    asked, not done; so is a call whose result only such a condition uses. `callee` is a function of the user
    that the line calls and that itself only waits.
    """
    loop = innermost_loop(frame)
    if loop is None:
        return False
    asked = _asked(loop)
    if isinstance(loop, ast.While):
        tested = {node.id for node in ast.walk(loop.test) if isinstance(node, ast.Name)}
        taken = _names(loop.test, ast.Store)  # while part := read():
        if tested & _worked_on(loop) or any(not _only_asked(loop, name) for name in taken):
            return False
    elif not asked:
        return False  # it goes through something
    calls = _calls(loop, asked)
    return bool(asked or calls) and calls <= POLL_CALLS | {callee}


def called_name(call: ast.Call) -> str:
    """The bare name of what is called; "" where it has none."""
    return call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")


def _calls(loop: Loop, asked: set[ast.AST]) -> set[str]:
    """Names of what the loop's body calls, without what is only asked."""
    return {
        called_name(node)
        for statement in loop.body
        for node in ast.walk(statement)
        if isinstance(node, ast.Call) and node not in asked
    }


def _asked(loop: Loop) -> set[ast.AST]:
    """The nodes of a loop's body that only ask whether it may end."""
    asked: set[ast.AST] = set()
    for item in ast.walk(loop):
        if isinstance(item, ast.If) and _ends_the_loop(item.body):
            asked.update(node for part in (item.test, *item.body) for node in ast.walk(part))
        elif isinstance(item, ast.Try) and (
            _ends_the_loop(item.body) or (item.orelse and _ends_the_loop(item.orelse))
        ):
            asked.update(node for part in (*item.body, *item.orelse) for node in ast.walk(part))
        elif isinstance(item, ast.Assign) and all(
            isinstance(target, ast.Name) and _only_asked(loop, target.id) for target in item.targets
        ):
            asked.update(ast.walk(item.value))
    return asked


@lru_cache(maxsize=4096)
def asked_in_loop(frame: Frame) -> str:
    """The text of what a loop that only waits asks before it ends; "" where a line stands in no such loop."""
    loop = innermost_loop(frame)
    if loop is None or not polls(frame):
        return ""
    queries = [node.value for node in ast.walk(loop) if isinstance(node, ast.Assign)]
    return " ".join(ast.unparse(node) for node in (*conditions(loop), *queries))


def conditions(loop: Loop) -> list[ast.expr]:
    """What decides when the loop ends."""
    leaving = [n.test for n in ast.walk(loop) if isinstance(n, ast.If) and _ends_the_loop(n.body)]
    return [loop.test, *leaving] if isinstance(loop, ast.While) else leaving


def _names(node: ast.AST, context: type[ast.expr_context]) -> set[str]:
    return {n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, context)}


def _set_in(loop: Loop) -> set[str]:
    return set().union(*(_names(statement, ast.Store) for statement in loop.body)) | _worked_on(loop)


def _worked_on(loop: Loop) -> set[str]:
    """Names that the loop changes step by step: `n += 1`, `items = items[1:]`, `items.pop()`."""
    found: set[str] = set()
    for node in ast.walk(loop):
        if isinstance(node, ast.AugAssign):
            found |= _names(node.target, ast.Store)
        elif isinstance(node, ast.Assign):
            targets = set().union(*(_names(target, ast.Store) for target in node.targets))
            found |= targets & _names(node.value, ast.Load)
        elif isinstance(node, ast.Attribute) and node.attr in TAKES and isinstance(node.value, ast.Name):
            found.add(node.value.id)
    return found


def _only_asked(loop: Loop, name: str) -> bool:
    """Whether the loop uses a name in the conditions that end it, and nowhere else."""
    inside = {node for test in conditions(loop) for node in ast.walk(test)}
    uses = [
        n for n in ast.walk(loop) if isinstance(n, ast.Name) and n.id == name and isinstance(n.ctx, ast.Load)
    ]
    return bool(uses) and all(use in inside for use in uses)


@lru_cache(maxsize=4096)
def calls(frame: Frame) -> frozenset[str]:
    """The bare names of what the function around a line calls."""
    function = _function(frame)
    return frozenset(
        called_name(node)
        for statement in (function.body if function else ())
        for node in ast.walk(statement)
        if isinstance(node, ast.Call)
    )


def does_nothing(frame: Frame) -> bool:
    """Whether the function around a line only waits: its calls are sleeps and words for the log."""
    called = calls(frame)
    return bool(called) and called <= POLL_CALLS | {"wait"}


def says_store(text: str) -> bool:
    return bool(_STORE_CALL.search(text))


def says_collective(text: str) -> bool:
    """A wait that no Python function stands below: Work.wait of torch, a read of a device value."""
    return bool(_RAW_WAIT.search(text) or _DIST_CALL.search(text))


def says_send(text: str) -> bool:
    return bool(_SENDS.search(text))


def says_lock(text: str) -> bool:
    return bool(_LOCK.search(text))
