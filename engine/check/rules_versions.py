"""Checks of pinned library versions against what the configs ask of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from ftdash.engine.check.bundle import Bundle
from ftdash.engine.check.documents import Kind, Sourced
from ftdash.engine.check.findings import Finding, error
from ftdash.engine.check.registry import check


def _accelerates_fsdp2(bundle: Bundle) -> Sourced | None:
    for document in bundle.of(Kind.ACCELERATE):
        version = document.get("fsdp_config", "fsdp_version")
        if document.distributed_type == "FSDP" and version and str(version.value) == "2":
            return Sourced("fsdp_version 2", version.where)
    return None


def _mesh(bundle: Bundle) -> Sourced | None:
    for document in bundle.of(Kind.ACCELERATE):
        if document.section("parallelism_config"):
            return Sourced("parallelism_config", document.where("parallelism_config"))
    return None


def _context_parallel(bundle: Bundle) -> Sourced | None:
    return _axis(bundle, "cp_size")


def _sequence_parallel(bundle: Bundle) -> Sourced | None:
    return _axis(bundle, "sp_size")


def _axis(bundle: Bundle, name: str) -> Sourced | None:
    for document in bundle.of(Kind.ACCELERATE):
        size = document.get("parallelism_config", f"parallelism_config_{name}")
        if size and isinstance(size.value, int) and size.value > 1:
            return Sourced(f"{name} {size.value}", size.where)
    return None


# What asks, the package that answers, and its first release that does: accelerate's release notes of
# 1.6.0, 1.10.0 and 1.12.0, and the torch releases in its utils/constants.py.
_NEEDS: tuple[tuple[Callable[[Bundle], Sourced | None], str, str], ...] = (
    (_accelerates_fsdp2, "accelerate", "1.6"),
    (_accelerates_fsdp2, "torch", "2.6"),
    (_mesh, "accelerate", "1.10"),
    (_context_parallel, "torch", "2.6"),
    (_sequence_parallel, "accelerate", "1.12"),
)


@check
def too_old(bundle: Bundle) -> Iterator[Finding]:
    for asks, package, least in _NEEDS:
        asked, old = asks(bundle), bundle.older(package, least)
        if asked and old:
            yield error(
                "version-too-old",
                old.where,
                f"{asked.value} ({asked.where}) came with {package} {least}, and {old.value} is pinned",
                f"{package}>={least}",
            )
