"""`hybridlab timeline`: a pipeline schedule in time, its idle share, what each rank holds in flight."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Annotated, Any

import typer
from rich.console import Console, Group, RenderableType
from rich.text import Text

from hybridlab.errors import UserError
from hybridlab.schedule import (
    SCHEDULES,
    ClosedForm,
    Problem,
    Schedule,
    Simulation,
    check,
    closed_form,
    in_flight,
    is_file,
    make_schedule,
    read_schedule,
    require_sizes,
    simulate,
    warmup_forwards,
)

_OPTIONS = {
    "schedule": "--schedule",
    "stages": "--stages",
    "micro_batches": "--micro-batches",
    "chunks": "--virtual-stages",
    "p2p": "--p2p",
    **dict.fromkeys(("forward", "input_grad", "weight_grad"), "--times"),
}
_COLOURS = {
    "F": ("black on bright_blue", "black on blue"),
    "B": ("black on bright_green", "black on green"),
    "I": ("black on bright_cyan", "black on cyan"),
    "W": ("black on bright_yellow", "black on yellow"),
}
_OP_NAMES = {"F": "forward", "B": "backward (I + W)", "I": "input gradient", "W": "weight gradient"}
_SHOWN_PROBLEMS = 20


def timeline(
    schedule: Annotated[str, typer.Option(help=f"{', '.join(SCHEDULES)}, or a .json file.", metavar="S")],
    stages: Annotated[
        int | None, typer.Option(help="Ranks of the pipeline; a file says it itself.", metavar="P")
    ] = None,
    micro_batches: Annotated[int | None, typer.Option(help="Per step; a file says it itself.", metavar="M")] = None,
    virtual_stages: Annotated[
        int | None, typer.Option(help="Model chunks per rank [default: the schedule's own].", metavar="V")
    ] = None,
    times: Annotated[
        str,
        typer.Option(
            help="Forward, input-gradient and weight-gradient time of one chunk (B = I + W).", metavar="F,I,W"
        ),
    ] = "1,1,1",
    p2p: Annotated[
        float, typer.Option(help="Latency of a message between ranks, in the same unit.", metavar="C")
    ] = 0.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Play a pipeline schedule: who computes what when, how long ranks are idle, what they hold in flight.

    Exit 0: the schedule runs. Exit 1: it is not legal; what is wrong is listed. Exit 2: an option is wrong.

    Example: hybridlab timeline --schedule 1f1b --stages 4 --micro-batches 8 --times 1,1,1
    """
    try:
        forward, input_grad, weight_grad = _times(times)
        plan = _schedule(schedule, stages, micro_batches, virtual_stages)
        problems = check(plan)
        played = None if problems else simulate(plan, forward, input_grad, weight_grad, p2p)
    except UserError as error:
        key = _OPTIONS.get(error.key, error.key)
        raise UserError(error.rule, key=key, value=error.value, fix=error.fix) from None
    if played is None:
        _tell_problems(plan, problems, as_json)
        raise typer.Exit(1)
    if as_json:
        print(json.dumps(_report(played)))
    else:
        console = Console(highlight=False)
        console.print(_page(played, console.width))


def _times(text: str) -> tuple[float, float, float]:
    try:
        forward, input_grad, weight_grad = map(float, text.split(","))
    except ValueError:
        rule = f"{text!r} is not three numbers."
        raise UserError(rule, key="--times", value=text, fix="F,I,W as in 1,1,1.") from None
    if forward == input_grad == weight_grad == 0:
        raise UserError("with all times 0 there is nothing to play.", key="--times", value=text, fix="1,1,1.")
    return forward, input_grad, weight_grad


def _schedule(name: str, stages: int | None, micro_batches: int | None, chunks: int | None) -> Schedule:
    """By name, legal; or from a file, which may not be."""
    if is_file(name):
        schedule = read_schedule(name)
        require_sizes(schedule, stages, micro_batches, chunks)
        return schedule
    if name in SCHEDULES:
        for key, value in (("--stages", stages), ("--micro-batches", micro_batches)):
            if value is None:
                raise UserError(f"{name} needs {key}.", key=key, fix=f"{key} 4.")
    return make_schedule(name, stages, micro_batches, chunks)


def _formula(played: Simulation) -> ClosedForm | None:
    """The schedule's closed form, unless a file only bears the name."""
    plan = played.schedule
    sizes = (plan.name, plan.stages, plan.micro_batches, plan.chunks)
    try:
        genuine = plan == make_schedule(*sizes)
    except UserError:
        genuine = False
    if not genuine:
        return None
    times = (played.forward[0], played.input_grad[0], played.weight_grad[0])
    return closed_form(*sizes, *times, played.p2p)


# ---- for machines ---------------------------------------------------------------------------------------------------


def _report(played: Simulation) -> dict[str, Any]:
    plan, held, form = played.schedule, in_flight(played.schedule), _formula(played)
    actions = played.timeline().to_json()["actions"]
    for rank, listed in enumerate(plan.ranks):
        for entry, action in zip(actions[rank], listed):
            entry |= {"chunk": action.chunk, "label": plan.label(rank, action)}
    warmup = warmup_forwards(plan.name, plan.stages, plan.micro_batches, plan.chunks) if form else None
    return {
        "ok": True,
        "problems": [],
        "times": _times_used(played),
        "makespan": played.makespan,
        "idle_fraction": played.idle_fraction,
        "span_max": played.span_max,
        "bubble": played.bubble,
        "bubble_rate": played.bubble_rate,
        "busy": list(played.busy),
        "idle": list(played.idle),
        "in_flight_max": list(held.max),
        "in_flight_whole_max": list(held.max_whole),
        "warmup_forwards": list(warmup) if warmup else None,
        "closed_form": _form_json(form),
        "actions": actions,
        "schedule": plan.to_json(),
    }


def _times_used(played: Simulation) -> dict[str, float]:
    f, i, w = played.forward[0], played.input_grad[0], played.weight_grad[0]
    return {"forward": f, "input_grad": i, "weight_grad": w, "full_backward": i + w, "p2p": played.p2p}


def _form_json(form: ClosedForm | None) -> dict[str, Any] | None:
    if form is None:
        return None
    facts = {"formula": form.formula, "bubble": form.bubble, "over_ideal": form.over_ideal, "rate": form.rate}
    return {**facts, "assumes": form.assumes, "holds": form.holds}


def _tell_problems(plan: Schedule, problems: list[Problem], as_json: bool) -> None:
    if as_json:
        told = [problem.to_json() for problem in problems]
        print(json.dumps({"ok": False, "problems": told, "schedule": plan.to_json()}))
        return
    console = Console(highlight=False, soft_wrap=True)
    count = f"{len(problems)} problem{'s' if len(problems) > 1 else ''}"
    console.print(Text.assemble(_title(plan), ": ", (f"not legal, {count}", "bold red")))
    for problem in problems[:_SHOWN_PROBLEMS]:
        console.print(Text.assemble(("✗ ", "red"), f"{problem.message}", (f"  [{problem.where}]", "dim")))
    if len(problems) > _SHOWN_PROBLEMS:
        console.print(f"… and {len(problems) - _SHOWN_PROBLEMS} more; --json lists all")


# ---- for people -----------------------------------------------------------------------------------------------------


def _page(played: Simulation, width: int) -> RenderableType:
    plan, form = played.schedule, _formula(played)
    times = _times_used(played)
    cost = ", ".join(
        f"{op} {times[key]:g}" for op, key in (("F", "forward"), ("I", "input_grad"), ("W", "weight_grad"))
    )
    whose = "one chunk" if plan.chunks > 1 else "a stage"
    lines: list[RenderableType] = [
        Text.assemble((_title(plan), "bold")),
        f"times of {whose}: {cost}, B = I + W = {times['full_backward']:g}; a message takes {played.p2p:g}",
        "",
        *_drawing(played, width),
        "",
        f"makespan {played.makespan:g}   idle {played.idle_fraction:.1%} of it, mean of the ranks",
        f"longest span of a rank {played.span_max:g}   bubble in it {played.bubble:g}, rate {played.bubble_rate:.4f}",
    ]
    if form is not None:
        verdict = "exact here" if form.holds else "not the case here: trust the drawing"
        lines.append(f"by formula: bubble {form.formula} = {form.bubble:g}, rate {form.rate:.4f}")
        lines.append(f"  assumes {form.assumes} ({verdict})")
        warmup = warmup_forwards(plan.name, plan.stages, plan.micro_batches, plan.chunks)
        if warmup:
            rule = SCHEDULES[plan.name].warmup
            lines.append(f"forwards before each rank r's steady state: {rule} = {_some(warmup)}")
    return Group(*lines)


def _title(plan: Schedule) -> str:
    chunks = f", {plan.chunks} chunks a rank ({plan.placement})" if plan.chunks > 1 else ""
    return f"{plan.name}: {_count(plan.stages, 'stage')}, {_count(plan.micro_batches, 'micro-batch')}{chunks}"


def _count(number: int, noun: str) -> str:
    plural = f"{noun}es" if noun.endswith("ch") else f"{noun}s"
    return f"{number} {noun if number == 1 else plural}"


def _some(numbers: tuple[int, ...], most: int = 16) -> str:
    return ", ".join(map(str, numbers[:most])) + (", …" if len(numbers) > most else "")


def _drawing(played: Simulation, width: int) -> list[Text]:
    """One row a rank, time from left to right, with its idle share and what it holds at most; then a legend."""
    plan, held = played.schedule, in_flight(played.schedule).max
    heads = [f"rank {rank}" for rank in range(plan.stages)]
    tails = [f"idle {idle / played.makespan:6.1%}  holds {most}" for idle, most in zip(played.idle, held)]
    columns = max(20, width - len(heads[-1]) - max(map(len, tails)) - 4)
    scale, label = _scale(played, columns)
    rows = []
    for rank, (head, tail) in enumerate(zip(heads, tails)):
        row = Text(f"{head:<{len(heads[-1])}} ", no_wrap=True)
        row.append_text(_row(played, rank, scale, columns, label))
        row.append(f"  {tail}", "dim")
        rows.append(row)
    return [*rows, _legend(plan, scale, label is not None)]


def _scale(played: Simulation, columns: int) -> tuple[float, Callable[[int, Any], str] | None]:
    """Columns per unit of time, and how cells are labelled: None where there is no room for micro-batches."""
    plan = played.schedule
    label = plan.label if plan.chunks > 1 else (lambda _rank, action: f"{action.op}{action.micro_batch}")
    lengths = (end - start for ends, starts in zip(played.ends, played.starts) for end, start in zip(ends, starts))
    shortest = min((length for length in lengths if length > 0), default=played.makespan)
    longest_label = max((len(label(rank, a)) for rank, listed in enumerate(plan.ranks) for a in listed), default=1)
    for letters in (longest_label + 1, longest_label):
        if letters / shortest * played.makespan <= columns:
            return letters / shortest, label
    return columns / played.makespan, None


def _row(played: Simulation, rank: int, scale: float, columns: int, label: Callable[[int, Any], str] | None) -> Text:
    row, at = Text(no_wrap=True), 0
    for action, start, end in zip(played.schedule.ranks[rank], played.starts[rank], played.ends[rank]):
        left, right = max(at, round(start * scale)), round(end * scale)
        if right <= left:
            continue  # too short to be seen
        row.append("·" * (left - at), "dim")
        text = label(rank, action) if label else action.op * (right - left)
        shades = _COLOURS[action.op]
        row.append(f"{text[: right - left]:<{right - left}}", shades[action.chunk % len(shades)])
        at = right
    row.append("·" * (max(at, round(played.makespan * scale)) - at), "dim")
    row.truncate(columns)
    return row


def _legend(plan: Schedule, scale: float, labelled: bool) -> Text:
    used = {action.op for listed in plan.ranks for action in listed}
    legend = Text(" " * 7, no_wrap=False)
    for op, name in _OP_NAMES.items():
        if op in used:
            legend.append(f" {op} ", _COLOURS[op][0]).append(f" {name}  ")
    legend.append("·", "dim").append(" idle")
    if labelled:
        legend.append("   2F0: stage 2, forward, micro-batch 0" if plan.chunks > 1 else "   F0: forward, micro-batch 0")
    else:
        legend.append(f"   one column is {1 / scale:.3g} of time")
    return legend
