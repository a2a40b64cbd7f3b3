"""`hybridlab doctor`: what this machine can run, and the fix for what is missing."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping
from typing import Annotated, Any

import typer

# torch, and with it seconds, are imported when the command runs: `--help` need not wait for them.


def doctor(
    json_: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Check this machine: Python, torch, GPUs and their links, memory, and ranks that really start and talk.

    Exits with 0 when training can run here and with 1 when it cannot.

    Example: hybridlab doctor
    """
    from hybridlab.launch import machine

    facts = machine.inspect()
    problems = machine.problems(facts)
    ok = not any(problem.fatal for problem in problems)
    if json_:
        print(json.dumps({"ok": ok, **facts, "problems": [dataclasses.asdict(problem) for problem in problems]}))
    else:
        _show(facts, problems, ok)
    raise typer.Exit(0 if ok else 1)


def _show(facts: Mapping[str, Any], problems: list[Any], ok: bool) -> None:
    from rich import box
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    console = Console(highlight=False)
    table = Table(box=box.SIMPLE, show_header=False)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for name, text in _rows(facts):
        table.add_row(name, escape(text))
    console.print(table)
    if facts["links"] and facts["links"]["topology"]:
        console.print(escape(facts["links"]["topology"]), "\n")
    for problem in problems:
        mark = "[bold red]✗[/]" if problem.fatal else "[yellow]![/]"
        console.print(f"{mark} {escape(problem.what)}\n  Fix: {escape(problem.fix)}")
    console.print("[green]Training can run here.[/]" if ok else "[bold red]Training cannot run here yet.[/]")


def _rows(facts: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    cuda = facts["torch"]["cuda"]
    yield "Python", f"{facts['python']} on {facts['platform']}"
    yield "torch", f"{facts['torch']['version']}, " + (f"built for CUDA {cuda}" if cuda else "a build without CUDA")
    cards: dict[str, int] = {}
    for card in facts["gpus"]:
        name = f"{card['name']}, {_gib(card['memory_bytes'])}"
        cards[name] = cards.get(name, 0) + 1
    yield "GPUs", "; ".join(f"{count} × {name}" for name, count in cards.items()) or "none usable"
    if links := facts["links"]:
        yield "links", f"{links['peer_access_pairs']} of {links['pairs']} pairs of GPUs reach each other directly"
    yield "NCCL, gloo", f"{facts['nccl'] or 'no NCCL'}, {'gloo' if facts['gloo'] else 'no gloo'}"
    memory = facts["memory"]
    limit = f", limited to {_gib(memory['limit_bytes'])}" if memory["limit_bytes"] else ""
    shm = f"; /dev/shm {_gib(facts['shm']['total_bytes'])}" if facts["shm"] else ""
    yield (
        "cores, memory",
        (f"{facts['cores']}, {_gib(memory['available_bytes'])} free of {_gib(memory['total_bytes'])}{limit}{shm}"),
    )
    yield "open files", f"{facts['open_files']['soft']} (hard limit {facts['open_files']['hard']})"
    for key, backend in (("cluster", "gloo"), ("cluster_nccl", "NCCL")):
        if cluster := facts[key]:
            yield f"ranks, {backend}", _cluster(cluster)
    yield (
        "can run",
        (
            f"{facts['ranks']['nccl']} ranks with NCCL, a GPU each; up to {facts['ranks']['gloo']} idle ranks with "
            "gloo on the CPU"
        ),
    )
    for extra, packages in facts["extras"].items():
        have = ", ".join(f"{name} {version}" for name, version in packages.items() if version)
        lack = ", ".join(name for name, version in packages.items() if not version)
        yield (
            f"extra {extra}",
            have + (f"{'; ' if have else ''}without {lack}: pip install 'hybridlab[{extra}]'" if lack else ""),
        )


def _cluster(cluster: Mapping[str, Any]) -> str:
    if cluster["error"]:
        return "do not run (see below)"
    times = ", ".join(f"{count} in {seconds:.2f} s" for count, seconds in cluster["start_seconds"].items())
    loaded = "" if cluster["preloaded"] or cluster["method"] != "forkserver" else ", not preloaded"
    return (
        f"started by {cluster['method']}{loaded}: {times} (the first with the server itself); first all-reduce in "
        f"{cluster['all_reduce_seconds']:.3f} s"
    )


def _gib(count: int) -> str:
    return f"{count / 2**30:.1f} GiB"
