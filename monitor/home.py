"""Where ftdash keeps its files on this machine."""

from __future__ import annotations

import os
from pathlib import Path

HOME_ENV = "FTDASH_HOME"


def home() -> Path:
    """$FTDASH_HOME, or ftdash's folder below the user's state directory."""
    if explicit := os.environ.get(HOME_ENV):
        return Path(explicit)
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(state) / "ftdash"
