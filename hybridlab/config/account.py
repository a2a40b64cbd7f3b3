"""The account of a config: what became of every key of the file. Nothing is ignored silently."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from hybridlab.config.read import join
from hybridlab.errors import UserError
from hybridlab.plan.legality import Problem

STATUSES = ("used", "no_effect", "refused")


@dataclass
class Entry:
    """One key of the file."""

    value: Any
    status: str = ""
    why: str = ""


class Account:
    """Every key of a JSON object by its dotted path, in the file's order, with its fate.

    Attributes:
        entries: path -> entry. Objects have an entry of their own beside those of their keys; items of a list are
            numbered (``a.0.b``).
        errors: all mistakes found so far.
    """

    def __init__(self, data: Mapping[str, Any]) -> None:
        self.entries: dict[str, Entry] = {path: Entry(value) for path, value in _walk(data)}
        self.errors: list[UserError] = []

    def used(self, path: str, why: str) -> None:
        self._mark(path, "used", why)

    def no_effect(self, path: str, why: str) -> None:
        """The key and everything inside it has no effect."""
        self._mark(path, "no_effect", why)
        self._mark_inside(path, "no_effect", why)

    def refuse(self, error: UserError, *also: str) -> None:
        """Record a mistake. Its key, what is inside it, and the keys ``also`` named are refused."""
        self.errors.append(error)
        self._mark(error.key, "refused", error.rule)
        self._mark_inside(error.key, "refused", error.rule)
        for path in also:
            self._mark(path, "refused", error.rule)

    def refuse_along(self, path: str, why: str) -> None:
        """The key and everything inside it is refused for a mistake that is told elsewhere."""
        self._mark(path, "refused", why)
        self._mark_inside(path, "refused", why)

    def problem(self, problem: Problem, origin: Mapping[str, str]) -> None:
        """Record a broken rule of the planner's; ``origin`` says how the file spells each key."""
        key, *others = (origin.get(key, key) for key in problem.keys)
        self.refuse(UserError(problem.rule, key=key, value=problem.value, fix=problem.fix), *others)

    def refused(self, path: str) -> bool:
        return path in self.entries and self.entries[path].status == "refused"

    def unaccounted(self) -> list[str]:
        """Keys that nobody has said anything of. Empty, or this package has a bug."""
        return [path for path, entry in self.entries.items() if not entry.status]

    def to_json(self) -> list[dict[str, Any]]:
        return [
            {"key": path, "value": entry.value, "status": entry.status, "why": entry.why}
            for path, entry in self.entries.items()
        ]

    def _mark(self, path: str, status: str, why: str) -> None:
        entry = self.entries.get(path)
        if entry is not None and entry.status != "refused":
            entry.status, entry.why = status, why

    def _mark_inside(self, path: str, status: str, why: str) -> None:
        if not path:
            return
        for inner in self.entries:
            if inner.startswith(path + "."):
                self._mark(inner, status, f"inside {path}: {why}")


def _walk(node: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """(path, value) of every key at every depth."""
    if isinstance(node, Mapping):
        for key, value in node.items():
            yield join(path, key), value
            yield from _walk(value, join(path, key))
    elif isinstance(node, (list, tuple)):
        for number, item in enumerate(node):
            yield from _walk(item, join(path, number))
