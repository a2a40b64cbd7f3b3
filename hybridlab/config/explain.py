"""What `hybridlab explain` says of a config: the fate of every key, and what the file comes to."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hybridlab.config.deepspeed import VERSION
from hybridlab.config.fields import BECOMES
from hybridlab.config.read import read
from hybridlab.config.resolve import work

if TYPE_CHECKING:
    from hybridlab.shapes import ModelShape


def explain(
    config: Mapping[str, Any] | str | Path,
    *,
    world: int | None,
    shape: ModelShape | None = None,
    overrides: Mapping[str, Any] | None = None,
    steps: int | None = None,
) -> dict[str, Any]:
    """The account of a config; arguments as of `hybridlab.config.resolve`.

    Returns:
        ``ok``; ``errors`` [{key, value, rule, fix}]; ``keys`` [{key, value, status, why}] with every key of the file,
        in its order, status used, no_effect or refused; used values also have ``becomes``, where in ``resolved`` they
        are found; ``resolved``, the effective config, or None when it is refused;
        ``chosen`` [{key, value, why}], every value that the file does not state; ``deepspeed`` [{key, says}], what
        DeepSpeed itself does where it differs; ``not_checked`` [rule]; ``world``, ``model``, ``deepspeed_version``.

    Raises:
        UserError: the file cannot be read, or ``world`` is missing.
    """
    draft, resolved = work(read(config), world=world, shape=shape, overrides=overrides, steps=steps)
    spelled = {here: path for path, here in draft.origin.items()}
    errors = [error.to_json() for error in draft.account.errors]
    return {
        "ok": not errors,
        "errors": errors,
        "keys": [_with_field(entry, spelled) for entry in draft.account.to_json()],
        "resolved": resolved.to_json() if resolved is not None else None,
        "chosen": draft.chosen,
        "deepspeed": draft.deepspeed,
        "deepspeed_version": VERSION,
        "not_checked": draft.not_checked,
        "world": world,
        "model": shape.name if shape is not None else None,
    }


def _with_field(entry: dict[str, Any], spelled: Mapping[str, str]) -> dict[str, Any]:
    """A used key with the place in ``resolved`` that it decides."""
    field = BECOMES.get(spelled.get(entry["key"], ""))
    return {**entry, "becomes": field} if entry["status"] == "used" and field else entry
