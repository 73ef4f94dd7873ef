"""Which calls of a script one rank alone reaches, and through which condition."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass

from ftdash.engine.check.objects import NamesIn, Objects, Scope
from ftdash.engine.check.rank_conditions import one_rank

_ONE_RANK_DECORATOR = re.compile(r"main_process|rank_?(zero|0)|is_main|master_only", re.IGNORECASE)
_LEAVING = frozenset(["sys.exit", "exit", "quit", "os._exit"])


@dataclass(frozen=True, slots=True)
class Reached:
    """One call. `guard` is the condition on its way: empty when all ranks come, led by "!" for all but one.

    `within` are the context managers around it, as written, and "else of X" for each branch that X keeps out.
    """

    node: ast.Call
    guard: str
    scope: Scope
    within: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return ast.unparse(self.node.func)

    @property
    def last(self) -> str:
        function = self.node.func
        if isinstance(function, ast.Attribute):
            return function.attr
        return function.id if isinstance(function, ast.Name) else ""

    @property
    def owner(self) -> ast.expr | None:
        return self.node.func.value if isinstance(self.node.func, ast.Attribute) else None

    @property
    def one_rank(self) -> bool:
        return bool(self.guard) and not self.guard.startswith("!")


class Reach:
    """The calls of a script in execution order. Functions of the script are entered where they are called.

    A function is entered once for all ranks and once for one rank alone, so a helper that both use is judged
    under the condition as well.
    """

    def __init__(self, tree: ast.Module) -> None:
        self.objects = Objects(tree)
        self.calls: list[Reached] = []
        self._entered: set[tuple[int, str]] = set()
        self._within: tuple[str, ...] = ()
        self._block(tree.body, "", self.objects.module)
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                self._enter(node, _decorated(node), unless_entered=True)

    def _block(self, statements: list[ast.stmt], guard: str, scope: Scope) -> None:
        for statement in statements:
            guard = self._statement(statement, guard, scope)

    def _statement(self, node: ast.stmt, guard: str, scope: Scope) -> str:
        """Visit one statement; the result guards what follows it in the same block."""
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            return guard
        if isinstance(node, ast.If):
            return self._if(node, guard, scope)
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                self.objects.bind(target, node.value, guard, scope)
        outside = self._within
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.expr):
                self._expression(child, guard, scope)
            elif isinstance(child, ast.withitem):
                self._expression(child.context_expr, guard, scope)
                self._within += (ast.unparse(child.context_expr),)
                if child.optional_vars is not None:
                    self.objects.bind(child.optional_vars, child.context_expr, guard, scope)
        for name in ("body", "orelse", "finalbody"):
            if isinstance(block := getattr(node, name, None), list):
                self._block(block, guard, scope)
        for handler in getattr(node, "handlers", []):
            self._block(handler.body, guard, scope)
        for case in getattr(node, "cases", []):
            self._block(case.body, guard, scope)
        self._within = outside
        return guard

    def _if(self, node: ast.If, guard: str, scope: Scope) -> str:
        self._expression(node.test, guard, scope)
        only, text = one_rank(node.test, NamesIn(self.objects, scope)), ast.unparse(node.test)
        self._block(node.body, guard or _guard(only, text), scope)
        otherwise = None if only is None else not only
        outside = self._within
        self._within += (f"else of {text}",)
        self._block(node.orelse, guard or _guard(otherwise, f"else of {text}"), scope)
        self._within = outside
        # `if not main: return` leaves the rest of the block to one rank.
        if (only is False and _leaves(node.body)) or (only is True and _leaves(node.orelse)):
            return guard or f"after {text}"
        if only is True and _leaves(node.body) and not node.orelse:
            return guard or f"!after {text}"
        return guard

    def _expression(self, node: ast.expr, guard: str, scope: Scope) -> None:
        if isinstance(node, ast.IfExp):
            self._expression(node.test, guard, scope)
            only, text = one_rank(node.test, NamesIn(self.objects, scope)), ast.unparse(node.test)
            self._expression(node.body, guard or _guard(only, text), scope)
            self._expression(node.orelse, guard or _guard(None if only is None else not only, text), scope)
        elif isinstance(node, ast.BoolOp) and isinstance(node.op, ast.And):
            for value in node.values:  # `is_main and trainer.evaluate()`
                self._expression(value, guard, scope)
                only = one_rank(value, NamesIn(self.objects, scope))
                guard = guard or _guard(only, ast.unparse(value))
        elif isinstance(node, ast.Call):
            self._call(node, guard, scope)
        elif not isinstance(node, ast.Lambda):
            for child in ast.iter_child_nodes(node):
                if isinstance(child, ast.expr):
                    self._expression(child, guard, scope)
                elif isinstance(child, ast.comprehension):
                    self._expression(child.iter, guard, scope)

    def _call(self, node: ast.Call, guard: str, scope: Scope) -> None:
        self._expression(node.func, guard, scope)
        for argument in (*node.args, *(keyword.value for keyword in node.keywords)):
            self._expression(argument, guard, scope)
        self.calls.append(Reached(node, guard, scope, self._within))
        self.objects.hand_over(node, scope)
        if isinstance(node.func, ast.Attribute) and node.func.attr in (
            "on_main_process",
            "on_local_main_process",
        ):
            # A bound method handed to a helper that runs it on the main process alone.
            for argument in node.args:
                if isinstance(argument, ast.Attribute):
                    call = ast.copy_location(ast.Call(argument, [], []), node)
                    self.calls.append(Reached(call, node.func.attr, scope, self._within))
        function = self.objects.function_of(node.func, scope)
        if function is not None:
            self._enter(function, guard or _decorated(function))

    def _enter(
        self, function: ast.FunctionDef | ast.AsyncFunctionDef, guard: str, *, unless_entered: bool = False
    ) -> None:
        kind = "all" if not guard else "others" if guard.startswith("!") else "one"
        if (id(function), kind) in self._entered:
            return
        if unless_entered and any(entered == id(function) for entered, _ in self._entered):
            return
        self._entered.add((id(function), kind))
        self._block(function.body, guard, self.objects.scopes[id(function)])


def _decorated(function: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    texts = (ast.unparse(decorator) for decorator in function.decorator_list)
    return next((f"@{text}" for text in texts if _ONE_RANK_DECORATOR.search(text)), "")


def _guard(only: bool | None, text: str) -> str:
    return "" if only is None else text if only else f"!{text}"


def _leaves(body: list[ast.stmt]) -> bool:
    if not body:
        return False
    last = body[-1]
    if isinstance(last, ast.Return | ast.Continue | ast.Break):
        return True
    return (
        isinstance(last, ast.Expr)
        and isinstance(last.value, ast.Call)
        and ast.unparse(last.value.func) in _LEAVING
    )
