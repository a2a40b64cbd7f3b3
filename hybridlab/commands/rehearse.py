"""`hybridlab rehearse`: what each rank of a layout will hold and send, from the real engine on fake tensors."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from hybridlab.commands.options import CHAPTER_MODEL, AsJson, Assign, ConfigFile, GpuMemory, Ranks, settle
from hybridlab.plan.cluster import Headroom
from hybridlab.plan.units import parse_bytes
from hybridlab.report import gib


def usable_bytes(gpu_memory: str | None) -> int | None:
    """What a card of so much memory offers the program, less context and fragmentation.

    Raises:
        UserError: not an amount of memory.
    """
    return None if gpu_memory is None else Headroom().usable(parse_bytes(gpu_memory, "--gpu-memory"))


def rehearse(
    config: ConfigFile,
    model: Annotated[str, typer.Option(help="A preset or a Hugging Face style config.json.")] = CHAPTER_MODEL,
    ranks: Ranks = None,
    gpu_memory: GpuMemory = None,
    assign: Assign = None,
    as_json: AsJson = False,
) -> None:
    """Run the real engine as every rank of CONFIG, in one process, on tensors without memory, and count.

    Needs no GPU and no ranks: a 13B model on 8 cards rehearses on a laptop. Exit 1: a rank does not fit --gpu-memory.

    Example: hybridlab rehearse labs/chapter/ds_config.json --model llama-2-13b --gpu-memory 80GiB
    """
    usable = usable_bytes(gpu_memory)
    resolved, shape = settle(config, model, ranks, assign)
    from hybridlab.rehearse import rehearse as run

    report = run(resolved, shape, usable_bytes=usable)
    if as_json:
        print(json.dumps(report.to_json() | {"model": shape.name}))
    else:
        from hybridlab.show import text
        from hybridlab.train import layers_by_place

        console = text.page()
        console.print(f"{shape.name} on {resolved.layout}, rehearsed\n", style="bold")
        console.print(text.holdings(report, layers_by_place(resolved, shape)))
        console.print(text.sendings(report))
        peak = report.memory.peak
        console.print(f"Rank {peak.rank} peaks highest: {gib(peak.peak_bytes)}, at {peak.moment}.")
        if usable is not None:
            room = Headroom()
            console.print(
                f"A card of {gpu_memory} offers {gib(usable)} ({gib(room.context_bytes)} are for context and "
                f"libraries, {room.fragmentation:.0%} for fragmentation): "
                + ("[green]it fits.[/]" if report.memory.fits else "[bold red]it does not fit.[/]")
            )
    raise typer.Exit(1 if report.memory.fits is False else 0)
