"""`hybridlab explain`: what becomes of every key of a config, and what it comes to. Starts no rank, needs no torch."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Annotated, Any

import typer
from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from hybridlab.commands.options import AsJson, Assign, ConfigFile, Ranks, assignments, world_size
from hybridlab.config.explain import explain as explain_config
from hybridlab.config.read import show
from hybridlab.errors import UserError, UserErrors
from hybridlab.shapes import load_shape
from hybridlab.show.text import page

_MARKS = {"used": ("✓", "green"), "no_effect": ("·", "dim"), "refused": ("✗", "red")}


def explain(
    config: ConfigFile,
    model: Annotated[
        str | None, typer.Option(help="A preset or a Hugging Face style config.json: checks its widths too.")
    ] = None,
    ranks: Ranks = None,
    assign: Assign = None,
    steps: Annotated[int | None, typer.Option(help="Optimizer steps of the run, where the schedule asks.")] = None,
    as_json: AsJson = False,
) -> None:
    """Say what becomes of every key of CONFIG: used, without effect and why, or refused and how to mend it.

    Exit 0: the config is legal on so many ranks. Exit 1: it is refused. Exit 2: it cannot be read, or an option is
    wrong.

    Example: hybridlab explain ds_config.json --model llama-2-13b --ranks 8
    """
    try:
        report = explain_config(
            config,
            world=world_size(ranks),
            shape=load_shape(model) if model is not None else None,
            overrides=assignments(assign),
            steps=steps,
        )
    except UserError as error:
        if as_json:
            mistakes = error.errors if isinstance(error, UserErrors) else (error,)
            nothing: dict[str, Any] = {"keys": [], "resolved": None}
            print(json.dumps({"ok": False, "errors": [one.to_json() for one in mistakes], **nothing}, default=str))
        else:
            Console(stderr=True, soft_wrap=True, highlight=False).print(str(error), markup=False, style="red")
        raise typer.Exit(2) from None
    if as_json:
        print(json.dumps(report, ensure_ascii=False, default=str))
    else:
        page().print(_page(config, report))
    raise typer.Exit(0 if report["ok"] else 1)


# ---- for people -----------------------------------------------------------------------------------------------------


def _page(name: str, report: Mapping[str, Any]) -> RenderableType:
    """The report, to be read at 100 columns."""
    parts: list[RenderableType] = [_headline(name, report)]
    if report["keys"]:
        parts.append(_keys(report))
    loose = [error for error in report["errors"] if not _has_row(error, report)]
    if loose:
        parts += [_title("Mistakes beside the keys"), *(_error_line(error) for error in loose)]
    if report["resolved"] is not None:
        parts += [_title("It comes to"), _facts(report["resolved"])]
    if report["chosen"] and report["ok"]:
        parts += [_title("Chosen, for the file does not say"), _list(report["chosen"], "key", _choice)]
    if report["deepspeed"]:
        title = f"DeepSpeed {report['deepspeed_version']} itself"
        parts += [_title(title), _list(report["deepspeed"], "key", lambda note: note["says"])]
    if report["not_checked"]:
        parts += [_title("Not checked"), *(Padding(rule, (0, 0, 0, 2)) for rule in report["not_checked"])]
    return Group(*parts)


def _headline(name: str, report: Mapping[str, Any]) -> Text:
    count = len(report["errors"])
    verdict = "legal" if report["ok"] else f"refused, {count} mistake{'s' if count > 1 else ''}"
    model = f", model {report['model']}" if report["model"] else ""
    world = f"{report['world']} rank{'s' if report['world'] > 1 else ''}"
    return Text.assemble(
        (name, "bold"), f" on {world}{model}: ", (verdict, "bold green" if report["ok"] else "bold red")
    )


def _title(text: str) -> RenderableType:
    return Padding(Text(text, style="bold"), (1, 0, 0, 0))


def _keys(report: Mapping[str, Any]) -> Table:
    """One row a key. What lies inside a section that is refused or without effect as a whole is not repeated."""
    table = Table(box=None, padding=(0, 1), pad_edge=False)
    table.add_column("")
    table.add_column("key", overflow="fold", ratio=5)
    table.add_column("value", overflow="fold", ratio=3)
    table.add_column("✓ what it does   · why it has no effect   ✗ what is wrong", ratio=9)
    errors: dict[str, list[Mapping[str, Any]]] = {}
    for error in report["errors"]:
        errors.setdefault(error["key"], []).append(error)
    for entry in report["keys"]:
        if entry["why"].startswith("inside ") or (entry["why"].startswith("section: ") and entry["status"] == "used"):
            continue
        mark, style = _MARKS[entry["status"]]
        value = "{…}" if isinstance(entry["value"], dict) else show(entry["value"], 28)
        own = errors.get(entry["key"], [])
        why = "\n".join(f"{error['rule']} Fix: {error['fix']}" for error in own) if own else entry["why"]
        table.add_row(Text(mark, style), Text(entry["key"]), Text(value), Text(why, style if own else ""))
    return table


def _has_row(error: Mapping[str, Any], report: Mapping[str, Any]) -> bool:
    return any(entry["key"] == error["key"] for entry in report["keys"])


def _error_line(error: Mapping[str, Any]) -> RenderableType:
    return Padding(Text(f"✗ {error['key']}: {error['rule']} Fix: {error['fix']}", style="red"), (0, 0, 0, 2))


def _choice(choice: Mapping[str, Any]) -> str:
    value = "none" if choice["value"] is None else show(choice["value"], 40).strip('"')
    return f"{value}: {choice['why']}"


def _list(rows: list[Mapping[str, Any]], key: str, text: Any) -> Table:
    table = Table(box=None, show_header=False, padding=(0, 1), pad_edge=False)
    table.add_column("", width=1)
    table.add_column(overflow="fold", ratio=5)
    table.add_column(ratio=12)
    for row in rows:
        table.add_row("", Text(row[key]), Text(text(row)))
    return table


def _facts(resolved: Mapping[str, Any]) -> Table:
    table = Table(box=None, show_header=False, padding=(0, 1), pad_edge=False)
    table.add_column("", width=1)
    table.add_column()
    table.add_column()
    for name, text in _fact_lines(resolved):
        table.add_row("", name, Text(text))
    return table


def _fact_lines(r: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """The effective config in a few lines."""
    micro, accumulation = r["train_micro_batch_size_per_gpu"], r["gradient_accumulation_steps"]
    yield "batch", f"{r['train_batch_size']} = micro {micro} × accumulation {accumulation} × dp {r['dp']}"
    yield "layout", f"dp {r['dp']} × tp {r['tp']} × pp {r['pp']} = {r['world']} ranks"
    yield "sequence", f"{r['sequence_length']} tokens" + (", sequence parallel" if r["sequence_parallel"] else "")
    yield "precision", r["precision"]
    zero = r["zero"]
    host = [part for part in ("optimizer", "param") if zero[f"offload_{part}"]]
    policy = f", {zero['gradient_policy']}" if zero["stage"] == 2 else ""
    yield "ZeRO", f"stage {zero['stage']}{policy}" + (f", {' and '.join(host)} on the host" if host else "")
    if r["pp"] > 1:
        chunks = f", {r['virtual_stages']} chunks a rank" if r["virtual_stages"] > 1 else ""
        split = f", layers {'/'.join(map(str, r['split']))}" if r["split"] else ""
        yield "pipeline", f"{r['schedule']}{chunks}{split}"
    yield "recompute", r["recompute"]
    yield "optimizer", _optimizer(r)
    clip = r["gradient_clipping"]
    yield "clipping", f"global norm at most {clip:g}" if clip else "off"


def _optimizer(r: Mapping[str, Any]) -> str:
    spec = r["optimizer"]
    constants = [f"lr {spec['lr']:g}"]
    if spec["type"] == "SGD":
        constants.append(f"momentum {spec['momentum']:g}")
    else:
        constants.append(f"betas {', '.join(f'{beta:g}' for beta in spec['betas'])}")
    constants.append(f"weight decay {spec['weight_decay']:g}")
    schedule = f"; {r['scheduler']['type']}" if r["scheduler"] else ""
    return f"{spec['type']} ({', '.join(constants)}){schedule}"
