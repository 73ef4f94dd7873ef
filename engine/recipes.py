"""Named recipes: a plan with its data and what it is meant to show, kept as YAML in presets/recipes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import yaml

from ftdash import presets
from ftdash.engine.plan import Plan


class RecipeError(Exception):
    """There is no such recipe, or its file is broken; the text is one line."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """`compare` are recipes to put beside it; `variants` change the plan by name to show one thing."""

    name: str
    title: str
    shows: str
    plan: Plan
    data: str
    log_steps: int
    compare: tuple[str, ...] = ()
    variants: tuple[tuple[str, Plan], ...] = ()

    def variant(self, name: str) -> Plan:
        """Raises RecipeError naming the variants there are."""
        for known, plan in self.variants:
            if known == name:
                return plan
        raise RecipeError(
            f"recipe {self.name} has no variant {name!r}: one of {', '.join(n for n, _ in self.variants)}"
        )


@cache
def recipe_names() -> tuple[str, ...]:
    return tuple(sorted(path.stem for path in (presets.FOLDER / "recipes").glob("*.yaml")))


def load_recipe(name: str) -> Recipe:
    """A recipe by name, or `name:variant` for one of its variants. Raises RecipeError."""
    base, _, variant = name.partition(":")
    if base not in recipe_names():
        raise RecipeError(f"--recipe {name}: one of {', '.join(recipe_names())}")
    recipe = read_recipe(presets.FOLDER / "recipes" / f"{base}.yaml")
    return replace(recipe, plan=recipe.variant(variant)) if variant else recipe


def read_recipe(path: Path) -> Recipe:
    """Raises RecipeError naming the file and the field."""
    try:
        data: dict[str, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))
        plan = Plan.from_dict(data["plan"])
        variants = tuple(
            (str(name), Plan.from_dict({**data["plan"], **changes}))
            for name, changes in (data.get("variants") or {}).items()
        )
        return Recipe(
            name=path.stem,
            title=data["title"],
            shows=data["shows"],
            plan=plan,
            data=data.get("data", "trl-lib/Capybara"),
            log_steps=int(data.get("log_steps", 10)),
            compare=tuple(data.get("compare") or ()),
            variants=variants,
        )
    except OSError as error:
        raise RecipeError(f"{path}: {error.strerror or error}") from None
    except (yaml.YAMLError, KeyError, TypeError, AttributeError, msgspec.ValidationError) as error:
        raise RecipeError(f"{path}: {type(error).__name__}: {' '.join(str(error).split())}") from None
