"""Step reports as tables for the terminal: what each rank holds, what it sends, and plan | rehearsal | measured."""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator, Mapping, Sequence

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from hybridlab.report import CATEGORIES, GROUPS, RankMemory, RankTraffic, StepReport

MOST_ROWS = 16  # ranks shown one by one; larger worlds show one row for ranks that are alike

_TITLES = {"master_weights": "master", "activations": "activ.", "gradients": "grads"}
_UNITS = (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10), ("B", 1))
_PAGE = 120  # columns where the output is no terminal


def page(*, record: bool = False, quiet: bool = False) -> Console:
    """A console for tables: as wide as the terminal, `_PAGE` columns in a file or a pipe."""
    # A quiet console would record nothing, either.
    console = Console(highlight=False, record=record, file=io.StringIO() if quiet else None)
    if not console.is_terminal and "COLUMNS" not in console._environ:
        console.width = _PAGE
    return console


class _Amounts:
    """Bytes in one unit for a whole table, so that numbers can be compared by eye."""

    def __init__(self, values: Iterable[int]) -> None:
        most = max(values, default=0)
        self.unit, self.size = next((u for u in _UNITS if most >= 4 * u[1]), _UNITS[-1])
        self.digits = 0 if self.size == 1 else 1 if most >= 100 * self.size else 2

    def __call__(self, count: int) -> str:
        return f"{count / self.size:,.{self.digits}f}" if count else "–"


def holdings(report: StepReport, layers: Mapping[int, str] | None = None) -> Table:
    """What each rank holds at the moment of its device peak, by category.

    Args:
        layers: for each pipeline place, which pieces of the model lie there.
    """
    ranks = report.memory.ranks
    names = [name for name in CATEGORIES if any(rank.at_peak.get(name) for rank in ranks)]
    host = any(rank.host_peak_bytes for rank in ranks)
    show = _Amounts(max(rank.peak_bytes, rank.host_peak_bytes) for rank in ranks)
    table = _table(f"What each rank holds at its peak, in {show.unit} ({report.source})")
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
        row = [*label]
        if layers:
            row.append(layers.get(memory.coords["pp"], ""))
        row.append(f"{memory.parameters:,}")
        row += [show(memory.at_peak[name]) for name in names]
        row += [show(memory.peak_bytes), memory.moment]
        if host:
            row.append(show(memory.host_peak_bytes))
        table.add_row(*row)
    return table


def sendings(report: StepReport) -> Table:
    """What each rank sends in a step, by group: the bytes that leave the rank (on a ring), and in how many messages."""
    groups = [name for name in GROUPS if any(name in entry.groups for entry in report.traffic.ranks)]
    show = _Amounts(entry[name].ring_bytes for entry in report.traffic.ranks for name in groups)
    table = _table(f"What each rank sends in one step, in {show.unit} (messages) ({report.source})")
    for name in groups:
        table.add_column("host and back" if name == "host" else f"{name} group", justify="right")
    for label, _, traffic in _rows(report):
        cells = [
            f"{show(traffic[name].ring_bytes)} ({traffic[name].messages:,})" if traffic[name].messages else "–"
            for name in groups
        ]
        table.add_row(*label, *cells)
    return table


def comparison(reports: Sequence[StepReport]) -> Table:
    """The peak and the bytes sent of each rank, by source side by side; what differs from the last is marked."""
    sides = [
        {memory.rank: (memory.peak_bytes, total_sent(traffic)) for memory, traffic in report} for report in reports
    ]
    show = _Amounts(value for side in sides for pair in side.values() for value in pair)
    table = _table(f"The same numbers in {show.unit}: " + " | ".join(report.source for report in reports))
    for what in ("peak", "sent"):
        for report in reports:
            table.add_column(f"{what}\n{report.source}", justify="right")
    for label, memory, _ in _rows(reports[-1]):
        found = [side.get(memory.rank) for side in sides]
        table.add_row(*label, *(cell for i in (0, 1) for cell in _beside([pair and pair[i] for pair in found], show)))
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
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("rank", justify="right")
    table.add_column("pp·dp·tp", justify="right", no_wrap=True)
    return table


def _place(coords: Mapping[str, int]) -> str:
    return "·".join(str(coords[axis]) if coords[axis] >= 0 else "*" for axis in ("pp", "dp", "tp"))


def _beside(values: Sequence[int | None], show: _Amounts) -> Iterator[Text]:
    for value in values:
        yield Text("?" if value is None else show(value), "" if value == values[-1] else "yellow")


def _rows(report: StepReport) -> Iterator[tuple[tuple[str, str], RankMemory, RankTraffic]]:
    """A row per rank; in large worlds one per run of ranks whose numbers are the same."""
    entries = list(report)
    if len(entries) <= MOST_ROWS:
        for memory, traffic in entries:
            yield (str(memory.rank), _place(memory.coords)), memory, traffic
        return
    start = 0
    for stop in range(1, len(entries) + 1):
        if stop == len(entries) or _numbers(entries[stop]) != _numbers(entries[start]):
            first, last = entries[start][0], entries[stop - 1][0]
            coords = {a: first.coords[a] if first.coords[a] == last.coords[a] else -1 for a in first.coords}
            label = str(first.rank) if first is last else f"{first.rank}–{last.rank}"
            yield (label, _place(coords)), *entries[start]
            start = stop


def _numbers(entry: tuple[RankMemory, RankTraffic]) -> tuple[object, ...]:
    memory, traffic = entry
    return memory.peak_bytes, memory.host_peak_bytes, tuple(memory.at_peak.items()), traffic.to_json()
