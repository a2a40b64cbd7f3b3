"""What a training step costs a rank, as data: memory, traffic and time, each in one type wherever the number came from.

``source`` says who counted: "plan" (formulas), "rehearsal" (the engine on fake tensors) or "measured" (a real run). The
three are compared field by field, so they share these types and their conventions:

* bytes are integers; GiB = 2^30 bytes and GB = 10^9 bytes, and a text always says which;
* ``message_bytes`` is the payload of a collective: the tensor of an all-reduce, the gathered whole of an all-gather,
  the whole that a reduce-scatter sums, the bytes *sent* of a point-to-point message;
* ``ring_bytes`` is what one rank sends when the collective runs on a ring of n ranks: 2(n-1)/n of an all-reduce's
  payload, (n-1)/n of an all-gather's or reduce-scatter's, all of a point-to-point message. Groups of one send nothing.

Standard library only: the planner, the engine's ledger and a browser's Python all read it.
"""

from __future__ import annotations

from hybridlab.report.memory import MemoryReport, RankMemory
from hybridlab.report.step import StepReport
from hybridlab.report.timeline import Span, Timeline
from hybridlab.report.traffic import ONE_WAY, RankTraffic, Traffic, TrafficReport, ring_bytes
from hybridlab.report.words import CATEGORIES, GB, GIB, GROUPS, SOURCES, categories, gib, sum_categories

__all__ = [
    "CATEGORIES",
    "GB",
    "GIB",
    "GROUPS",
    "ONE_WAY",
    "SOURCES",
    "MemoryReport",
    "RankMemory",
    "RankTraffic",
    "Span",
    "StepReport",
    "Timeline",
    "Traffic",
    "TrafficReport",
    "categories",
    "gib",
    "ring_bytes",
    "sum_categories",
]
