"""What a rank knows about itself: its number, the size of the world, its device, and a place for things it keeps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch

from hybridlab.errors import UserError


@dataclass(frozen=True)
class Context:
    """One rank's place among the processes (not in the mesh: that is `hybridlab.mesh`).

    Attributes:
        rank: 0 .. world-1.
        world: how many ranks there are in all.
        local_rank: the rank's number on its own machine; also its GPU.
        device: what it computes on.
    """

    rank: int
    world: int
    local_rank: int
    device: torch.device


class RankState(SimpleNamespace):
    """What a rank keeps from one call to the next.

    A function that is shipped to a rank carries copies of the globals it reads, so what it assigns to a global is gone
    with the call; this object is the rank's own and stays.
    """

    def __reduce__(self) -> tuple[Any, ...]:  # travels as a name: in a rank it means the rank's own
        return _state, ()


state = RankState()
_current: Context | None = None
_report: Callable[[Any], None] | None = None
_of_cluster = False


def _state() -> RankState:
    return state


def enter(context: Context, report: Callable[[Any], None], *, of_cluster: bool) -> None:
    """Say who this process is and where its reports go. For the worker and for torchrun."""
    global _current, _report, _of_cluster
    _current, _report, _of_cluster = context, report, of_cluster


def in_cluster() -> bool:
    """Is this process a rank that a `Cluster` started?"""
    return _of_cluster


def current() -> Context | None:
    """This process's context, or None outside a rank."""
    return _current


def device() -> torch.device:
    """The device this rank computes on. Outside a rank: the current GPU if there is one, else the CPU."""
    if _current is not None:
        return _current.device
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def report(value: Any) -> None:
    """Hand a value to the driver in the middle of a call: it reaches ``on_report(rank, value)`` there, and counts as a
    sign of life, so that a long call's deadline runs from its last report. Raises UserError outside a rank."""
    if _report is None:
        raise UserError(
            "report() sends to the driver, and this process is not a rank.", fix="call it in a function given to run()."
        )
    _report(value)
