"""The doctor's verdict: each missing thing is found by the facts and told with its fix."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from hybridlab.launch.machine import Facts, problems

GOOD_RANKS: Facts = {
    "method": "forkserver",
    "start_seconds": {"2": 1.5, "8": 0.1},
    "all_reduce_seconds": 0.03,
    "error": None,
    "preloaded": True,
    "preload_failures": {},
}
CARD = {"name": "NVIDIA A100", "memory_bytes": 80 * 2**30, "capability": "8.0"}
GOOD: Facts = {
    "torch": {"version": "2.13.0+cu128", "cuda": "12.8"},
    "nvidia_driver": "570.10",
    "gpus": [CARD, CARD],
    "links": {"pairs": 2, "peer_access_pairs": 2, "topology": "GPU0 GPU1"},
    "nccl": "2.27.5",
    "gloo": True,
    "cores": 16,
    "memory": {"total_bytes": 2**37, "available_bytes": 2**36, "limit_bytes": None},
    "shm": {"total_bytes": 2**36, "free_bytes": 2**36},
    "open_files": {"soft": 4096, "hard": 4096},
    "cluster": dict(GOOD_RANKS),
    "cluster_nccl": dict(GOOD_RANKS),
    "ranks": {"nccl": 2, "gloo": 128},
}


def with_(**changes: Any) -> Facts:
    facts = copy.deepcopy(GOOD)
    for path, value in changes.items():
        *folders, last = path.split("__")
        target = facts
        for name in folders:
            target = target[name]
        target[last] = value
    return facts


def test_a_good_machine_has_no_problems() -> None:
    assert problems(GOOD) == []
    laptop = with_(nvidia_driver=None, gpus=[], links=None, nccl=None, cluster_nccl=None, ranks__nccl=0)
    assert problems(laptop) == []


@pytest.mark.parametrize(
    ("facts", "what", "fix", "fatal"),
    [
        (with_(torch__version="2.9.1"), "torch 2.9.1 is older than 2.10", "pip install --upgrade torch", True),
        (
            with_(gpus=[], links=None, torch={"version": "2.13.0+cpu", "cuda": None}),
            "a build without CUDA",
            "torch==2.13.0 from the index",
            False,
        ),
        (with_(gpus=[], links=None), "no usable GPU with driver 570.10", "update the driver", False),
        (with_(nccl=None, cluster_nccl=None), "no NCCL", "CUDA build", True),
        (with_(links__peer_access_pairs=0), "2 of 2 pairs of GPUs", "tensor parallelism", False),
        (with_(shm__total_bytes=64 * 2**20), "/dev/shm has 64 MiB", "--shm-size", False),
        (with_(memory__available_bytes=2**30), "only 1.0 GiB of memory", "fewer ranks", False),
        (with_(open_files__soft=256), "may open 256 files", "ulimit -n", False),
        (with_(cluster__error="rank 1 died"), "do not run with gloo: rank 1 died", "loopback", True),
        (with_(cluster_nccl__error="boom"), "do not run with NCCL: boom", "NCCL_DEBUG", True),
        (with_(cluster__preloaded=False), "ranks start slowly", "pip install -e .", False),
        (
            with_(cluster__preload_failures={"hybridlab.engine": "SyntaxError: oh"}),
            "hybridlab.engine cannot be imported: SyntaxError: oh",
            "pip install -e .",
            True,
        ),
        (
            with_(gloo=False, cluster=None, gpus=[], links=None, nvidia_driver=None, nccl=None, cluster_nccl=None)
            | {"ranks": {"nccl": 0, "gloo": 0}},
            "neither gloo nor usable NCCL",
            "PyPI",
            True,
        ),
    ],
)
def test_each_missing_thing_is_told_with_its_fix(facts: Facts, what: str, fix: str, fatal: bool) -> None:
    (problem,) = problems(facts)
    assert what in problem.what
    assert fix in problem.fix
    assert problem.fatal is fatal


def test_fatal_problems_come_first() -> None:
    found = problems(with_(open_files__soft=256, cluster__error="no"))
    assert [problem.fatal for problem in found] == [True, False]
