"""What commands that read a config share: the number of ranks, ``--set KEY=VALUE``, and the job they make together."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hybridlab.errors import UserError

if TYPE_CHECKING:
    from hybridlab.config import Resolved
    from hybridlab.shapes import ModelShape

DEFAULT_RANKS = 8
LAPTOP_MODEL = "tiny-llama"
CHAPTER_MODEL = "llama-13b-mini"

ConfigFile = Annotated[str, typer.Argument(help="A DeepSpeed-style JSON file.", metavar="CONFIG")]
Ranks = Annotated[
    int | None, typer.Option(help=f"Number of ranks [default: torchrun's world, or {DEFAULT_RANKS}].", min=1)
]
Assign = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help='Fill in a key the file leaves out or calls "auto".'),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
Data = Annotated[
    str | None, typer.Option(help="A file or folder of text [default: Python's standard library].", metavar="PATH")
]
GpuMemory = Annotated[
    str | None, typer.Option("--gpu-memory", help="What a GPU has, as 80GiB or 24GB: says whether it fits.")
]


def world_size(ranks: int | None) -> int:
    """The number of ranks: as asked for, else torchrun's world, else `DEFAULT_RANKS`."""
    if ranks is not None:
        return ranks
    world = os.environ.get("WORLD_SIZE", "")
    return int(world) if world.isdecimal() and int(world) > 0 else DEFAULT_RANKS


def settle(
    config: str, model: str, ranks: int | None, assign: list[str] | None, steps: int | None = None
) -> tuple[Resolved, ModelShape]:
    """A config file and a model's name, checked against each other and the number of ranks.

    Raises:
        UserError: whatever is wrong with them.
    """
    from hybridlab.config import resolve
    from hybridlab.shapes import load_shape

    shape = load_shape(model)
    return resolve(config, world=world_size(ranks), shape=shape, overrides=assignments(assign), steps=steps), shape


def assignments(pairs: list[str] | None) -> dict[str, Any]:
    """``KEY=VALUE`` pairs; the value is JSON, or a word as it stands.

    Raises:
        UserError: no equals sign, or a key twice.
    """
    found: dict[str, Any] = {}
    for pair in pairs or []:
        key, equals, text = pair.partition("=")
        if not equals or not key:
            raise UserError(f"{pair!r} is not KEY=VALUE.", key="--set", value=pair, fix="--set KEY=VALUE.")
        if key in found:
            raise UserError(f"{key} is set twice.", key="--set", value=pair, fix="set it once.")
        try:
            found[key] = json.loads(text)
        except ValueError:
            found[key] = text
    return found
