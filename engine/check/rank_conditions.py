"""Which conditions of a script hold on one rank alone, whatever the names that carry them."""

from __future__ import annotations

import ast
import re
from typing import Protocol

_MAIN = re.compile(
    r"is_(local_|world_|local_world_)?(main_process|process_zero)|(^|[._])is_main(?!tain)|is_master"
    r"|args\.should_save$|(^|[._])(main|master)_process$|(^|[._])(is_)?(global_|local_)?rank_?(0|zero)(\(\))?$"
)
# A rank among all, or among those of a node: not one among the tensor-, pipeline- or data-parallel ranks.
_RANK = re.compile(
    r"(^|\.)_?(local_|global_|process_|world_|my_|dist_|proc_)*rank$|get_(local_|global_)?rank\(\)$"
    r"|(^|[._])(local_)?process_index$",
    re.IGNORECASE,
)
_RANK_VARIABLE = re.compile(
    r"[\"'](LOCAL_RANK|RANK|SLURM_PROCID|SLURM_LOCALID|OMPI_COMM_WORLD_(LOCAL_)?RANK|PMI_RANK)[\"']"
)
_OTHER_GROUP = re.compile(
    r"(tp|pp|dp|cp|ep|sp|mp|tensor|pipeline|pipe|data|context|expert|sequence|model|node|group)_?(parallel_)?rank",
    re.IGNORECASE,
)
_WORLD = re.compile(r"world_size|num_processes|WORLD_SIZE|get_world_size")
# True of a run with one process, where no other rank could wait.
_ALONE = re.compile(
    r"is_initialized\(\)|is_available\(\)|(is_|use_)?(distributed|ddp|multi_gpu)$|\bdistributed\b"
)


class Names(Protocol):
    """What a script binds names to."""

    def value_of(self, node: ast.expr) -> ast.expr | None:
        """The expression that a name or attribute is bound to, or that a function of the script returns."""
        ...


def one_rank(test: ast.expr, names: Names, depth: int = 6) -> bool | None:
    """True when a condition holds on one rank only, False when on all others, None when neither is sure."""
    if depth == 0:
        return None
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        inner = one_rank(test.operand, names, depth - 1)
        if inner is None and is_rank(test.operand, names):
            return True  # `if not rank`
        return None if inner is None else not inner
    if isinstance(test, ast.BoolOp):
        return _combined(test, names, depth - 1)
    if isinstance(test, ast.Compare) and len(test.ops) == 1:
        return _compared(test, names)
    if not isinstance(test, ast.Name | ast.Attribute | ast.Call):
        return None
    if _MAIN.search(ast.unparse(test)):
        return True
    bound = names.value_of(test)
    if bound is not None:
        return one_rank(bound, names, depth - 1)
    if isinstance(test, ast.Name) and is_rank(test, names):
        return False  # `if rank`
    return None


def _combined(test: ast.BoolOp, names: Names, depth: int) -> bool | None:
    # `not is_initialized() or rank == 0` asks for rank 0 as soon as there are others.
    parts = [one_rank(value, names, depth) for value in test.values if not _single_process(value)]
    if isinstance(test.op, ast.And):
        return True if True in parts else (False if parts and all(part is False for part in parts) else None)
    if False in parts:
        return False
    return True if parts and all(part is True for part in parts) else None


def _single_process(test: ast.expr) -> bool:
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        return bool(_ALONE.search(ast.unparse(test.operand)))
    if isinstance(test, ast.Compare) and len(test.ops) == 1:
        return bool(_WORLD.search(ast.unparse(test.left))) and _number(test.comparators[0]) in (0, 1, 2)
    return False


def _compared(test: ast.Compare, names: Names) -> bool | None:
    left, operator, right = test.left, test.ops[0], test.comparators[0]
    if isinstance(operator, ast.In | ast.NotIn):
        chosen = [_number(item) for item in getattr(right, "elts", [])]
        one = is_rank(left, names) and chosen and set(chosen) <= {-1, 0} and 0 in chosen
        return isinstance(operator, ast.In) if one else None
    if not is_rank(left, names):
        if not is_rank(right, names):
            return None
        left, right, operator = right, left, _MIRRORED.get(type(operator), ast.Is)()
    if isinstance(operator, ast.Eq | ast.NotEq | ast.Is | ast.IsNot):
        number = _number(right)
        last = isinstance(right, ast.BinOp) and bool(_WORLD.search(ast.unparse(right)))
        if last or (number is not None and number >= 0):
            return isinstance(operator, ast.Eq | ast.Is)
        return None
    bound = _number(right)
    if (isinstance(operator, ast.LtE) and bound == 0) or (isinstance(operator, ast.Lt) and bound == 1):
        return True
    if (isinstance(operator, ast.Gt) and bound == 0) or (isinstance(operator, ast.GtE) and bound == 1):
        return False
    return None


_MIRRORED: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Eq: ast.Eq,
    ast.NotEq: ast.NotEq,
    ast.Lt: ast.Gt,
    ast.LtE: ast.GtE,
    ast.Gt: ast.Lt,
    ast.GtE: ast.LtE,
}


def is_rank(node: ast.expr, names: Names, depth: int = 4) -> bool:
    """Whether an expression is the number of this rank, in the world or on its node."""
    if isinstance(node, ast.Call) and ast.unparse(node.func) in ("int", "str") and node.args:
        return is_rank(node.args[0], names, depth)
    text = ast.unparse(node)
    if _OTHER_GROUP.search(text):
        return False
    if isinstance(node, ast.Call) and (node.args or node.keywords) and "get_rank" in text:
        return False  # the rank in a group of its own
    if "environ" in text or "getenv" in text:
        return bool(_RANK_VARIABLE.search(text))
    if isinstance(node, ast.Name | ast.Attribute | ast.Call) and _RANK.search(text):
        return True
    bound = names.value_of(node) if depth and isinstance(node, ast.Name | ast.Attribute | ast.Call) else None
    return bound is not None and is_rank(bound, names, depth - 1)


def _number(node: ast.expr) -> int | None:
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        inner = _number(node.operand)
        return None if inner is None else -inner
    if isinstance(node, ast.Constant) and not isinstance(node.value, bool):
        if isinstance(node.value, int):
            return node.value
        if isinstance(node.value, str) and node.value.isdigit():
            return int(node.value)
    return None
