"""The report types keep their numbers through JSON and refuse names that are not theirs."""

from __future__ import annotations

import json

import pytest

from hybridlab.report import (
    CATEGORIES,
    MemoryReport,
    RankMemory,
    RankTraffic,
    Span,
    StepReport,
    Timeline,
    Traffic,
    TrafficReport,
    categories,
    gib,
    ring_bytes,
)


def _report() -> StepReport:
    coords = {"pp": 0, "dp": 1, "tp": 0}
    memory = RankMemory(2, coords, 100, 900, 50, categories({"weights": 200, "optimizer": 700}), "0B3", 4)
    traffic = RankTraffic(2, coords, {"dp": Traffic(1, 100, 150), "host": Traffic(2, 8, 8)})
    timeline = Timeline("plan", ((Span("F", 0, 0, 0.0, 1.0), Span("B", 0, 0, 3.0, 5.0)),))
    return StepReport(MemoryReport("plan", (memory,), 1000), TrafficReport("plan", (traffic,)), timeline)


def test_a_report_survives_json() -> None:
    report = _report()
    again = StepReport.from_json(json.loads(json.dumps(report.to_json())))
    assert again.to_json() == report.to_json()
    assert again.memory.ranks == report.memory.ranks
    assert again.traffic.ranks == report.traffic.ranks


def test_json_has_the_fields_that_others_read() -> None:
    rank = _report().to_json()["ranks"][0]
    assert set(rank["at_peak"]) == set(CATEGORIES)
    assert rank["traffic"]["dp"] == {"messages": 1, "message_bytes": 100, "ring_bytes": 150}
    assert {"rank", "coords", "parameters", "peak_bytes", "host_peak_bytes", "at_peak", "traffic"} <= set(rank)


def test_fits_is_unknown_without_a_capacity() -> None:
    memory = _report().memory
    assert memory.fits is True
    assert MemoryReport("plan", memory.ranks, 899).fits is False
    assert MemoryReport("plan", memory.ranks).fits is None


def test_unknown_names_are_refused() -> None:
    with pytest.raises(ValueError, match="weight"):
        categories({"weight": 1})
    with pytest.raises(ValueError, match="model"):
        RankTraffic(0, {}, {"model": Traffic()})
    with pytest.raises(ValueError, match="guess"):
        MemoryReport("guess", ())


def test_ring_bytes_of_each_operation() -> None:
    """nccl-tests' bus factors; all-reduce at n = 4 and 8 are 1.5 and 1.75 of the payload."""
    assert ring_bytes("all_reduce", 4, 1000) == 1500
    assert ring_bytes("all_reduce", 8, 1000) == 1750
    assert ring_bytes("all_gather", 4, 1000) == ring_bytes("reduce_scatter", 4, 1000) == 750
    assert ring_bytes("send", 2, 1000) == 1000
    with pytest.raises(KeyError):
        ring_bytes("gossip", 2, 1)


def test_timeline_measures() -> None:
    timeline = Timeline(
        "plan",
        (
            (Span("F", 0, 0, 0.0, 1.0), Span("B", 0, 0, 4.0, 6.0)),
            (Span("F", 0, 1, 1.0, 2.0), Span("B", 0, 1, 2.0, 4.0)),
        ),
    )
    assert timeline.makespan == 6.0
    assert timeline.idle_fraction == pytest.approx(0.5)
    assert timeline.span_max == 6.0
    assert timeline.bubble_rate == pytest.approx(0.5)


def test_units_are_said() -> None:
    assert gib(2**30 * 24.2) == "24.2 GiB"
    assert gib(10**9) == "953.7 MiB"
    assert gib(12) == "12 B"
