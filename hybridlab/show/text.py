"""Step reports as tables for the terminal: what each rank holds, what it sends, and plan | rehearsal | measured."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from rich import box
from rich.table import Table
from rich.text import Text

from hybridlab.report import CATEGORIES, GROUPS, RankMemory, RankTraffic, StepReport, gib

MOST_ROWS = 16  # ranks shown one by one; larger worlds show one row for ranks that are alike

_TITLES = {
    "master_weights": "master",
    "optimizer": "optim.",
    "activations": "activ.",
    "gradients": "grads",
}


def holdings(report: StepReport, layers: Mapping[int, str] | None = None) -> Table:
    """What each rank holds at the moment of its device peak, by category.

    Args:
        layers: for each pipeline place, which pieces of the model lie there.
    """
    names = [name for name in CATEGORIES if any(rank.at_peak.get(name) for rank in report.memory.ranks)]
    host = any(rank.host_peak_bytes for rank in report.memory.ranks)
    table = _table(f"What each rank holds at its peak ({report.source})")
    _coordinates(table)
    if layers:
        table.add_column("layers")
    table.add_column("parameters", justify="right")
    for name in names:
        table.add_column(_TITLES.get(name, name), justify="right")
    table.add_column("peak", justify="right", style="bold")
    table.add_column("at", justify="right", style="dim")
    if host:
        table.add_column("host", justify="right")
    for label, memory, _ in _rows(report):
        row = [label, *_place(memory.coords)]
        if layers:
            row.append(layers.get(memory.coords["pp"], ""))
        row.append(f"{memory.parameters:,}")
        row += [gib(memory.at_peak[name]) for name in names]
        row += [gib(memory.peak_bytes), memory.moment]
        if host:
            row.append(gib(memory.host_peak_bytes))
        table.add_row(*row)
    return table


def sendings(report: StepReport) -> Table:
    """What each rank sends in a step, by group: messages and the bytes that leave the rank (on a ring)."""
    groups = [name for name in GROUPS if any(name in entry.groups for entry in report.traffic.ranks)]
    table = _table(f"What each rank sends in one step ({report.source}; bytes on a ring, messages)")
    _coordinates(table)
    for name in groups:
        table.add_column("to host and back" if name == "host" else f"{name} group", justify="right")
    for label, memory, traffic in _rows(report):
        table.add_row(label, *_place(memory.coords), *(_sent(traffic, name) for name in groups))
    return table


def comparison(reports: Sequence[StepReport]) -> Table:
    """The peak and the bytes sent of each rank, by source side by side; what differs from the last is marked."""
    table = _table("The same numbers, " + " | ".join(report.source for report in reports))
    _coordinates(table)
    for what in ("peak", "sent"):
        for report in reports:
            table.add_column(f"{what}\n{report.source}", justify="right")
    sides = [{memory.rank: (memory, traffic) for memory, traffic in report} for report in reports]
    for label, memory, _ in _rows(reports[-1]):
        found = [side.get(memory.rank) for side in sides]
        peaks = [entry[0].peak_bytes if entry else None for entry in found]
        sent = [total_sent(entry[1]) if entry else None for entry in found]
        table.add_row(label, *_place(memory.coords), *_beside(peaks), *_beside(sent))
    return table


def total_sent(traffic: RankTraffic) -> int:
    """Bytes that leave the rank for other ranks in a step; copies to its own host are not among them."""
    return sum(entry.ring_bytes for name, entry in traffic.groups.items() if name != "host")


def agreement(reports: Sequence[StepReport]) -> str:
    """One sentence: how far each forecast is from the last report, at worst."""
    *forecasts, last = reports
    truth = {memory.rank: (memory.peak_bytes, total_sent(traffic)) for memory, traffic in last}
    parts = []
    for report in forecasts:
        gaps = [0.0, 0.0]
        for memory, traffic in report:
            for i, value in enumerate((memory.peak_bytes, total_sent(traffic))):
                real = truth[memory.rank][i]
                gaps[i] = max(gaps[i], abs(value - real) / real if real else float(value != real))
        parts.append(f"{report.source}: peak {_gap(gaps[0])}, bytes sent {_gap(gaps[1])}")
    return f"Against what was {last.source}, at the worst rank. " + "; ".join(parts) + "."


def _gap(share: float) -> str:
    return "equal to the byte" if share == 0 else f"off by {share:.2%}"


def _table(title: str) -> Table:
    return Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)


def _coordinates(table: Table) -> None:
    for name in ("rank", "pp", "dp", "tp"):
        table.add_column(name, justify="right")


def _place(coords: Mapping[str, int]) -> list[str]:
    return [str(coords[axis]) if coords[axis] >= 0 else "*" for axis in ("pp", "dp", "tp")]


def _sent(traffic: RankTraffic, name: str) -> str:
    entry = traffic[name]
    return f"{gib(entry.ring_bytes)} in {entry.messages:,}" if entry.messages else "–"


def _beside(values: Sequence[int | None]) -> Iterator[Text]:
    last = values[-1]
    for value in values:
        style = "" if value == last else "yellow"
        yield Text("–" if value is None else gib(value), style)


def _rows(report: StepReport) -> Iterator[tuple[str, RankMemory, RankTraffic]]:
    """A row per rank; in large worlds one per run of ranks whose numbers are the same."""
    entries = list(report)
    if len(entries) <= MOST_ROWS:
        for memory, traffic in entries:
            yield str(memory.rank), memory, traffic
        return
    start = 0
    for stop in range(1, len(entries) + 1):
        if stop == len(entries) or _numbers(entries[stop]) != _numbers(entries[start]):
            first, last = entries[start][0], entries[stop - 1][0]
            coords = {a: first.coords[a] if first.coords[a] == last.coords[a] else -1 for a in first.coords}
            label = str(first.rank) if first is last else f"{first.rank}–{last.rank}"
            memory, traffic = entries[start]
            yield label, RankMemory(**{**vars(memory), "coords": coords}), traffic
            start = stop


def _numbers(entry: tuple[RankMemory, RankTraffic]) -> tuple[object, ...]:
    memory, traffic = entry
    return memory.peak_bytes, memory.host_peak_bytes, tuple(memory.at_peak.items()), traffic.to_json()
