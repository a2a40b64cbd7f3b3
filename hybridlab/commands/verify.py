"""`hybridlab verify`: is this layout the same program as one rank?"""

from __future__ import annotations

import json
from math import prod
from typing import TYPE_CHECKING, Annotated

import typer

from hybridlab.commands.options import LAPTOP_MODEL, AsJson, Assign, ConfigFile, Data, Ranks, settle
from hybridlab.errors import UserError

if TYPE_CHECKING:
    from hybridlab.shapes import ModelShape
    from hybridlab.verify import Verdict

# Of float64: weights, gradient and two moments, for the reference and for all ranks of the layout together.
_BYTES_A_PARAMETER = 2 * 8 * 4


def verify(
    config: ConfigFile,
    model: Annotated[str, typer.Option(help="A preset or a Hugging Face style config.json.")] = LAPTOP_MODEL,
    ranks: Ranks = None,
    steps: Annotated[int, typer.Option(help="Steps to train on both sides.", min=1)] = 3,
    data: Data = None,
    assign: Assign = None,
    as_json: AsJson = False,
) -> None:
    """Train CONFIG's layout and one plain rank side by side in float64, and compare loss, gradients and weights.

    Some targets are masked, another number in each sample, so that a mean of means would show. Exit 0: they agree to
    1e-9. Exit 1: they don't.

    Example: hybridlab verify labs/chapter/ds_config.json --model tiny-llama
    """
    resolved, shape = settle(config, model, ranks, assign, steps)
    _require_room(shape)
    from hybridlab.verify import verify as compare

    verdict = compare(resolved, shape, steps=steps, data=data)
    if as_json:
        print(json.dumps(verdict.to_json()))
    else:
        _show(verdict, shape, steps)
    raise typer.Exit(0 if verdict.passed else 1)


def _require_room(shape: ModelShape) -> None:
    """Both sides live on this machine.

    Raises:
        UserError: they don't fit.
    """
    from hybridlab.launch import machine
    from hybridlab.shapes import parameters_of

    needed = sum(prod(entry.shape) for entry in parameters_of(shape)) * _BYTES_A_PARAMETER
    free = machine.free_bytes()
    if needed > free:
        raise UserError(
            f"in float64, {shape.name} and its reference take {needed / 2**30:.1f} GiB, and {free / 2**30:.1f} GiB are "
            "free here.",
            key="--model",
            value=shape.name,
            fix="a smaller model of the same kind: the layout is what is verified, e.g. tiny-llama or tiny-gpt2.",
        )


def _show(verdict: Verdict, shape: ModelShape, steps: int) -> None:
    from rich.console import Console

    console = Console(highlight=False)
    console.print(f"[bold]{verdict.layout}[/] beside one rank: {shape.name}, {steps} steps, float64\n")
    for name, value in verdict.to_json()["max_rel_diff"].items():
        style = "green" if value <= verdict.tolerance else "bold red"
        console.print(f"  {name.replace('_', ' '):<10} largest relative difference [{style}]{value:.2e}[/]")
    if verdict.passed:
        console.print(f"\n[green]The same program[/] (tolerance {verdict.tolerance:g}).")
    else:
        console.print(f"\n[bold red]Not the same program[/] (tolerance {verdict.tolerance:g}).")
