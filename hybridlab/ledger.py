"""The ledger of one rank: every message sent, every byte alive by category, the time of every action.

The same ledger counts a real run ("measured") and a rehearsal on fake tensors ("rehearsal"). Messages are recorded by
`hybridlab.comm` as they are issued. Memory is counted by watching each operator: a tensor's storage is charged to the
category in force when it first appears, and credited when it dies, so that what is counted is what the program holds,
not what an allocator keeps in reserve.
"""

from __future__ import annotations

import time
import weakref
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import repeat
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from hybridlab.report import CATEGORIES, RankMemory, RankTraffic, Span, Traffic, ring_bytes


@dataclass(frozen=True)
class Message:
    """One collective or point-to-point message as this rank issued it.

    Attributes:
        operation: "all_reduce", "all_gather", "reduce_scatter", "broadcast", "send", "to_host", "to_device".
        group: "tp", "dp", "pp", "embedding" or "host".
        size: members of the group.
        message_bytes: the payload (all-gather: the gathered whole; reduce-scatter: the whole that is reduced).
        ring_bytes: what this rank sends when the collective runs on a ring.
        dtype: of the elements, e.g. "float32".
        phase: what the engine was doing: "forward", "backward", "reduce", "step", "control".
        position: actions of the step that had ended before.
    """

    operation: str
    group: str
    size: int
    message_bytes: int
    ring_bytes: int
    dtype: str
    phase: str
    position: int


@dataclass
class Ledger:
    """What one rank did. Cheap when memory is not being watched: a line per message, a pair of clocks per action."""

    messages: list[Message] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    phase: str = "control"
    watching: MemoryWatch | None = None
    _known: list[tuple[Any, str, str]] = field(default_factory=list)
    _epoch: float = field(default_factory=time.perf_counter)

    # -- messages ------------------------------------------------------------
    def sent(self, operation: str, group: str, size: int, message_bytes: int, dtype: torch.dtype) -> None:
        """Record a message of ``message_bytes`` in a group of ``size`` ranks."""
        ring = ring_bytes(operation, size, message_bytes)
        name = str(dtype).removeprefix("torch.")
        self.messages.append(Message(operation, group, size, message_bytes, ring, name, self.phase, len(self.spans)))

    def traffic(self, times: Sequence[int] | None = None) -> dict[str, Traffic]:
        """Totals by group, of the step so far. ``times``: how often each message counts."""
        totals: dict[str, Traffic] = {}
        for m, n in zip(self.messages, times or repeat(1)):
            totals[m.group] = totals.get(m.group, Traffic()) + Traffic(n, n * m.message_bytes, n * m.ring_bytes)
        return totals

    def count(self, operation: str | None = None, group: str | None = None, phase: str | None = None) -> int:
        """How many messages match."""
        return sum(
            (operation is None or m.operation == operation)
            and (group is None or m.group == group)
            and (phase is None or m.phase == phase)
            for m in self.messages
        )

    @contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """Messages inside are filed under ``phase``."""
        before, self.phase = self.phase, phase
        try:
            yield
        finally:
            self.phase = before

    # -- time ------------------------------------------------------------
    @contextmanager
    def action(self, op: str, micro_batch: int = -1, stage: int = -1) -> Iterator[None]:
        """Time one action, named as in the schedule: F, B, I or W of a micro-batch at a stage; or "reduce", "step"."""
        start = time.perf_counter() - self._epoch
        if self.watching is not None:
            self.watching.moment = Span(op, micro_batch, stage, 0.0, 0.0)
        try:
            yield
        finally:
            self.spans.append(Span(op, micro_batch, stage, start, time.perf_counter() - self._epoch))
            if self.watching is not None:
                self.watching.sample()

    def spans_by_the_clock(self) -> list[Span]:
        """The step's actions in seconds of the machine's clock, which its ranks share."""
        return [Span(s.op, s.micro_batch, s.stage, s.start + self._epoch, s.end + self._epoch) for s in self.spans]

    def begin_step(self) -> None:
        """Forget the previous step's messages and times; memory goes on."""
        self.messages.clear()
        self.spans.clear()
        self._epoch = time.perf_counter()

    # -- memory ------------------------------------------------------------
    def own(self, tensor: torch.Tensor, category: str, place: str = "device") -> torch.Tensor:
        """Say what a long-lived tensor is for: its storage counts as ``category`` on ``place`` ("device" or
        "host")."""
        assert category in CATEGORIES, category
        storage = tensor.untyped_storage()
        self._known = [entry for entry in self._known if entry[0]() is not None and entry[0]() is not storage]
        self._known.append((weakref.ref(storage), category, place))
        if self.watching is not None:
            self.watching.charge(storage, category, place)
        return tensor

    @contextmanager
    def category(self, category: str) -> Iterator[None]:
        """Storages that appear inside are charged to ``category``."""
        watch = self.watching
        if watch is None:
            yield
            return
        before, watch.category = watch.category, category
        try:
            yield
        finally:
            watch.category = before

    @contextmanager
    def watch_memory(self) -> Iterator[MemoryWatch]:
        """Count bytes alive, by category, from here to the end of the block."""
        watch = MemoryWatch()
        for reference, category, place in self._known:
            storage = reference()
            if storage is not None:
                watch.charge(storage, category, place)
        self.watching = watch
        try:
            with watch:
                yield watch
        finally:
            self.watching = None

    def bytes_owned(self, category: str, place: str = "device") -> int:
        """Bytes of the long-lived storages of one category that are alive now (needs no watch)."""
        alive = ((ref(), kind, where) for ref, kind, where in self._known)
        return sum(s.nbytes() for s, kind, where in alive if s is not None and (kind, where) == (category, place))


class MemoryWatch(TorchDispatchMode):
    """Sees every operator, keeps account of the storages alive.

    Attributes:
        alive: bytes now, ``{(place, category): bytes}``.
        peak_bytes, at_peak: the largest device total so far and what it was made of.
        host_peak_bytes: the largest host total so far.
        moment: the action under way, without its times; ``peak_moment``: the one of the peak.
        samples: ``(moment, {category: bytes})`` of the device at each action's end.
        peak_position: actions that had ended before the peak's.
    """

    def __init__(self) -> None:
        super().__init__()
        self.category = "activations"
        self.alive: Counter[tuple[str, str]] = Counter()
        self.peak_bytes = 0
        self.host_peak_bytes = 0
        self.at_peak: dict[str, int] = dict.fromkeys(CATEGORIES, 0)
        self.moment: Span | None = None
        self.peak_moment: Span | None = None
        self.peak_position = 0
        self.samples: list[tuple[Span | None, dict[str, int]]] = []
        self._paused = False
        self._storages: dict[int, tuple[Any, int, str, str]] = {}
        self._totals = {"device": 0, "host": 0}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if self._paused:
            return out
        for leaf in tree_iter(out):
            if isinstance(leaf, torch.Tensor):
                storage = leaf.untyped_storage()
                if storage._cdata not in self._storages:
                    self.charge(storage, self.category, "device")
        return out

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Storages that appear inside are not the program's."""
        self._paused = True
        try:
            yield
        finally:
            self._paused = False

    def charge(self, storage: torch.UntypedStorage, category: str, place: str) -> None:
        """Put a storage on the account, or move it to another category."""
        key = storage._cdata
        if key in self._storages:
            self._credit(key)
        size = storage.nbytes()
        reference = weakref.ref(storage, lambda _: self._credit(key))
        self._storages[key] = (reference, size, place, category)
        self.alive[place, category] += size
        self._totals[place] += size
        if place == "host":
            self.host_peak_bytes = max(self.host_peak_bytes, self._totals["host"])
        elif self._totals["device"] > self.peak_bytes:
            self.peak_bytes = self._totals["device"]
            self.at_peak = self.now()
            self.peak_moment, self.peak_position = self.moment, len(self.samples)

    def _credit(self, key: int) -> None:
        _, size, place, category = self._storages.pop(key)
        self.alive[place, category] -= size
        self._totals[place] -= size

    def now(self, place: str = "device") -> dict[str, int]:
        """Bytes alive by category."""
        return {category: self.alive[place, category] for category in CATEGORIES}

    def sample(self) -> None:
        """Keep what is alive now, at the end of an action."""
        self.samples.append((self.moment, self.now()))

    def report(self, rank: int, coords: Mapping[str, int], parameters: int) -> RankMemory:
        """What was seen, as one rank's entry of a report."""
        return RankMemory(
            rank,
            dict(coords),
            parameters,
            self.peak_bytes,
            self.host_peak_bytes,
            dict(self.at_peak),
            self.peak_moment.label if self.peak_moment else "",
        )


def rank_traffic(
    ledger: Ledger, rank: int, coords: Mapping[str, int], times: Sequence[int] | None = None
) -> RankTraffic:
    """The ledger's messages as one rank's entry of a report. ``times``: how often each message counts."""
    return RankTraffic(rank, dict(coords), ledger.traffic(times))
