"""What each rank sends in one step, by group."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from hybridlab.report.words import GROUPS, check_source

_RING_SHARE = {
    "all_reduce": 2,
    "all_gather": 1,
    "reduce_scatter": 1,
    "broadcast": 1,
}
ONE_WAY = ("send", "to_host", "to_device")


def ring_bytes(operation: str, size: int, message_bytes: int) -> int:
    """What one rank of ``size`` sends for one message, on a ring (see the module's conventions).

    Raises:
        KeyError: an operation that is not known.
    """
    if operation in ONE_WAY:
        return message_bytes
    return round(_RING_SHARE[operation] * (size - 1) * message_bytes / size)


@dataclass(frozen=True)
class Traffic:
    """What one rank sends in one group in one step."""

    messages: int = 0
    message_bytes: int = 0
    ring_bytes: int = 0

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(
            self.messages + other.messages,
            self.message_bytes + other.message_bytes,
            self.ring_bytes + other.ring_bytes,
        )

    def to_json(self) -> dict[str, int]:
        """``{messages, message_bytes, ring_bytes}``."""
        return {
            "messages": self.messages,
            "message_bytes": self.message_bytes,
            "ring_bytes": self.ring_bytes,
        }


@dataclass(frozen=True)
class RankTraffic:
    """What one rank sends in one step, by group; a group that carries nothing is left out.

    Raises:
        ValueError: a group that is not in `GROUPS`.
    """

    rank: int
    coords: Mapping[str, int]
    groups: Mapping[str, Traffic] = field(default_factory=dict)

    def __post_init__(self) -> None:
        unknown = [name for name in self.groups if name not in GROUPS]
        if unknown:
            raise ValueError(f"unknown group {unknown[0]!r}; the groups are {', '.join(GROUPS)}")

    def __getitem__(self, group: str) -> Traffic:
        return self.groups.get(group, Traffic())

    def to_json(self) -> dict[str, dict[str, int]]:
        """``{group: {messages, message_bytes, ring_bytes}}``."""
        return {name: self.groups[name].to_json() for name in GROUPS if name in self.groups}


@dataclass(frozen=True)
class TrafficReport:
    """The traffic of some or all ranks of a layout in one step."""

    source: str
    ranks: tuple[RankTraffic, ...]

    def __post_init__(self) -> None:
        check_source(self.source)

    def to_json(self) -> dict[str, Any]:
        """``{source, ranks: [{rank, coords, traffic}]}``."""
        return {
            "source": self.source,
            "ranks": [{"rank": r.rank, "coords": dict(r.coords), "traffic": r.to_json()} for r in self.ranks],
        }

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> TrafficReport:
        """The inverse of `to_json`; also reads the joined form of `StepReport`."""
        return TrafficReport(
            data["source"],
            tuple(
                RankTraffic(r["rank"], dict(r["coords"]), {g: Traffic(**t) for g, t in r["traffic"].items()})
                for r in data["ranks"]
            ),
        )
