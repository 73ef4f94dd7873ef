"""Which builder reads which `model_type` of the hub."""

from __future__ import annotations

from collections.abc import Callable

from ftdash.engine.model.config import HubConfig
from ftdash.engine.model.families import classic, dense, hybrid, latent, moe
from ftdash.engine.model.shape import ModelShape

Builder = Callable[[HubConfig], ModelShape]

BUILDERS: dict[str, Builder] = {
    **dense.BUILDERS,
    **classic.BUILDERS,
    **moe.BUILDERS,
    **latent.BUILDERS,
    **hybrid.BUILDERS,
}
