"""Every layout is the same program as one rank: loss, gradient norm, gradients and weights within 1e-9 in float64.

A seeded covering of the choices: every pair of values of two choices occurs together in some layout, and all of
dp = tp = pp = 2 with every ZeRO stage and schedule is there.
"""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest

from hybridlab.verify import verify
from tests.support import job, shape_of

GRIDS = [
    (dp, tp, pp) for dp in (1, 2, 4, 8) for tp in (1, 2, 4, 8) for pp in (1, 2, 4, 8) if dp * tp * pp <= 8 and tp <= 4
]
CHOICES: dict[str, list[Any]] = {
    "grid": GRIDS,
    "zero": [0, 1, 2, 3],
    "schedule": ["gpipe", "1f1b", "interleaved-1f1b", "zb-h1", "zb-h2", "zb-v"],
    "policy": ["accumulate_then_scatter", "scatter_every_microbatch"],
    "sequence_parallel": [False, True],
    "recompute": ["none", "selective", "full", "full by 2"],
    "offload": ["none", "optimizer", "optimizer and weights"],
    "tied": [False, True],
    "family": ["llama", "gpt2"],
    "m": [1, 2, 3, 8],
    "uneven": [False, True],
    "clip": [0.0, 0.05],
}


def legal(case: dict[str, Any]) -> dict[str, Any]:
    """The nearest legal layout: some choices exclude each other."""
    case = dict(case)
    dp, tp, pp = case["grid"]
    if pp == 1:
        case["schedule"] = "1f1b"
    if pp == 8 and case["schedule"] in ("interleaved-1f1b", "zb-v"):
        case["schedule"] = "zb-h1"
    if pp == 8 or (pp == 4 and case["schedule"] in ("interleaved-1f1b", "zb-v")):
        case["layers"] = 8
    if case["schedule"] == "interleaved-1f1b" and case["m"] % pp:
        case["m"] = 8
    if case["zero"] == 0:
        case["offload"] = "none"
    if case["zero"] < 3 and case["offload"] == "optimizer and weights":
        case["offload"] = "optimizer"
    if tp == 1:
        case["sequence_parallel"] = False
    if dp * case["m"] > 16:
        case["m"] = 2
    return case


def covering(seed: int = 0) -> list[dict[str, Any]]:
    """Cases until every pair of values that can be together has been."""
    rng = random.Random(seed)
    names = list(CHOICES)
    wanted = {
        (a, i, b, j)
        for a, b in itertools.combinations(names, 2)
        for i in range(len(CHOICES[a]))
        for j in range(len(CHOICES[b]))
    }
    cases: list[dict[str, Any]] = []
    fruitless = 0
    while wanted and fruitless < 60:
        best, gain = None, -1
        for _ in range(30):
            picks = {name: rng.randrange(len(CHOICES[name])) for name in names}
            case = legal({name: CHOICES[name][pick] for name, pick in picks.items()})
            got = len(_pairs(case) & wanted)
            if got > gain:
                best, gain = case, got
        assert best is not None
        fruitless = 0 if gain else fruitless + 1
        if gain:
            wanted -= _pairs(best)
            cases.append(best)
    return cases


def _pairs(case: dict[str, Any]) -> set[tuple[str, int, str, int]]:
    places = {name: CHOICES[name].index(case[name]) for name in CHOICES}
    return {(a, places[a], b, places[b]) for a, b in itertools.combinations(CHOICES, 2)}


def corner() -> list[dict[str, Any]]:
    """All of dp = tp = pp = 2 with every ZeRO stage, policy and schedule."""
    rng = random.Random(1)
    cases = []
    for zero, schedule in itertools.product(CHOICES["zero"], CHOICES["schedule"]):
        for policy in CHOICES["policy"] if zero == 2 else ["scatter_every_microbatch"]:
            case = {name: rng.choice(values) for name, values in CHOICES.items()}
            case |= {"grid": (2, 2, 2), "zero": zero, "schedule": schedule, "policy": policy}
            cases.append(legal(case))
    return cases


def grids() -> list[dict[str, Any]]:
    """Every grid of at most 8 ranks once more, with other choices drawn at random."""
    rng = random.Random(2)
    cases = []
    for grid in GRIDS:
        case = {name: rng.choice(values) for name, values in CHOICES.items()} | {"grid": grid}
        cases.append(legal(case))
    return cases


def name_of(case: dict[str, Any]) -> str:
    """Short enough to read in a test's name."""
    dp, tp, pp = case["grid"]
    extras = [
        case["family"],
        case["schedule"] if pp > 1 else "",
        f"m{case['m']}",
        "sp" if case["sequence_parallel"] else "",
        case["recompute"].replace(" ", "") if case["recompute"] != "none" else "",
        {"none": "", "optimizer": "offload", "optimizer and weights": "offload2"}[case["offload"]],
        "tied" if case["tied"] else "",
        "acc" if case["zero"] == 2 and case["policy"].startswith("acc") else "",
        "uneven" if case["uneven"] else "",
        "clip" if case["clip"] else "",
    ]
    return "-".join([f"dp{dp}tp{tp}pp{pp}", f"z{case['zero']}", *filter(None, extras)])


CASES = {name_of(case): case for case in [*corner(), *covering(), *grids()]}


def test_there_are_enough_layouts() -> None:
    assert len(CASES) >= 150
    seen = {(c["zero"], c["schedule"]) for c in CASES.values() if c["grid"] == (2, 2, 2)}
    assert seen == set(itertools.product(CHOICES["zero"], CHOICES["schedule"]))
    covered = set().union(*(_pairs(case) for case in CASES.values()))
    # Pairs that no legal layout holds: offload without shards or of weights below stage 3, sequence parallelism
    # without tensor parallelism, schedules without stages, and interleaving of fewer micro-batches than stages.
    impossible = 0
    for a, b in itertools.combinations(CHOICES, 2):
        for i, x in enumerate(CHOICES[a]):
            for j, y in enumerate(CHOICES[b]):
                if (a, i, b, j) not in covered:
                    impossible += 1
                    assert {a, b} & {"grid", "zero", "offload", "schedule", "m"}, (a, x, b, y)
    assert impossible < 90


@pytest.mark.parametrize("name", CASES)
def test_layout_is_the_same_program(name: str, ranks: Any) -> None:
    case = CASES[name]
    dp, tp, pp = case["grid"]
    layers = case.get("layers", 4)
    recompute, _, interval = case["recompute"].partition(" by ")
    config = job(
        dp,
        tp,
        pp,
        m=case["m"],
        micro=1 if case["m"] == 8 else 2,
        zero=case["zero"],
        policy=case["policy"],
        schedule=case["schedule"],
        offload=case["offload"] != "none",
        offload_param=case["offload"] == "optimizer and weights",
        layers=layers,
        sequence_parallel=case["sequence_parallel"],
        recompute=recompute,
        recompute_interval=int(interval or 1),
        gradient_clipping=case["clip"],
    )
    shape = shape_of(case["family"], tied=case["tied"], layers=layers)
    verdict = verify(config, shape, steps=2, uneven=case["uneven"], cluster=ranks(config.layout.world))
    assert verdict.passed, verdict
