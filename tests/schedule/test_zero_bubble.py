"""The Zero-Bubble paper's bubble rates (Table 5), to four decimals, by playing the schedules with its printed times."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hybridlab.schedule import make_schedule, simulate

ROWS: list[dict[str, Any]] = json.loads(
    (Path(__file__).parent.parent / "data" / "zero_bubble_table5.json").read_text(encoding="utf-8")
)
NAMES = {"1f1b": "1f1b", "zbh1": "zb-h1", "zbh2": "zb-h2"}


def played(row: dict[str, Any], *, latency: bool = True) -> float:
    i = row["inputs"]
    schedule = make_schedule(NAMES[row["id"].rsplit("-", 1)[1]], i["p"], i["m"])
    p2p = i["Tcomm_ms"] if latency else 0.0
    return simulate(schedule, i["TF_ms"], i["TB_ms"], i["TW_ms"], p2p=p2p).bubble_rate


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["id"])
def test_bubble_rate(row: dict[str, Any]) -> None:
    assert played(row) == pytest.approx(row["expected"], abs=row["tolerance"]["abs"])


@pytest.mark.parametrize("row", [r for r in ROWS if r["id"].endswith("1f1b")], ids=lambda row: row["id"])
def test_without_latency_it_reads_too_low(row: dict[str, Any]) -> None:
    """The closed form (p-1)/(m+p-1) of 1F1B knows no messages."""
    i = row["inputs"]
    closed = (i["p"] - 1) / (i["m"] + i["p"] - 1)
    assert played(row, latency=False) == pytest.approx(closed)
    assert 0.03 < 1 - closed / row["expected"] < 0.22
