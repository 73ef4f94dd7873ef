"""Data that ships with ftdash: model configs, GPUs and links, recipes."""

from pathlib import Path

FOLDER = Path(__file__).parent
