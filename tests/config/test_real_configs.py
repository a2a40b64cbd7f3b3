"""Configs from public repositories (`tests/data/ds_configs/index.tsv` names them): each judged by hand, once."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hybridlab.config import explain, resolve
from hybridlab.errors import UserErrors

FOLDER = Path(__file__).parent.parent / "data" / "ds_configs"
BATCH = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 3}

# Legal as they stand: (file, ranks) -> train batch, micro, accumulation, dp, tp, ZeRO stage, precision.
LEGAL: dict[tuple[str, int], tuple[int, int, int, int, int, int, str]] = {
    ("14", 8): (168, 21, 1, 8, 1, 2, "fp16"),
    ("28", 8): (8, 1, 1, 8, 1, 1, "fp16"),  # disable_allgather: a key of old versions, without effect
    ("29", 4): (4, 1, 1, 4, 1, 2, "fp16"),
    ("31", 8): (8, 1, 1, 8, 1, 3, "bf16"),
    ("37", 8): (16, 1, 2, 8, 1, 0, "bf16"),
    ("38", 1): (16, 16, 1, 1, 1, 1, "bf16"),
    ("41", 8): (256, 8, 4, 8, 1, 0, "fp32"),
    ("49", 8): (64, 8, 1, 8, 1, 0, "fp32"),
    ("56", 2): (2, 1, 1, 2, 1, 2, "fp16"),  # DeepSpeed forbids its stage 2 under its pipeline engine; here it is legal
}

# "auto" leaves the batch to a trainer; legal once it is given (`BATCH`): dp, tp, ZeRO stage, precision, what is on the
# host.
LEFT_TO_A_TRAINER: dict[str, tuple[int, int, int, str, str]] = {
    "01": (8, 1, 0, "fp32", ""),
    "02": (4, 2, 2, "fp32", ""),
    "04": (8, 1, 3, "fp32", "optimizer"),
    "05": (8, 1, 1, "fp32", ""),
    "07": (8, 1, 2, "fp32", ""),
    "08": (8, 1, 3, "fp32", "optimizer param"),
    "10": (8, 1, 3, "fp32", "optimizer param"),
    "11": (8, 1, 2, "fp32", ""),
    "13": (8, 1, 3, "bf16", ""),
    "16": (8, 1, 3, "fp16", "optimizer"),
    "17": (8, 1, 3, "bf16", ""),
    "19": (8, 1, 3, "fp16", "optimizer param"),
    "22": (8, 1, 3, "fp32", "optimizer param"),
    "23": (8, 1, 3, "fp32", "optimizer param"),
    "25": (8, 1, 3, "fp32", "optimizer param"),
    "34": (8, 1, 3, "bf16", ""),
    "35": (8, 1, 2, "fp16", "optimizer"),
    "46": (2, 4, 2, "fp32", ""),
    "61": (8, 1, 3, "bf16", ""),
}
ACCUMULATION_GIVEN = {"19", "34"}  # by the file, or 1 where it does not name it

# Refused on 8 ranks: the keys to blame.
REFUSED: dict[str, set[str]] = {
    "20": {"fp16.opt_level", "zero_optimization.offload_param.device"},
    "26": {"activation_checkpointing.partition_activations"},
    "29": {"train_batch_size"},  # 4 samples on 8 ranks
    "32": {"train_batch_size"},  # no batch at all
    "38": {"train_batch_size"},  # right on one rank only
    "40": {"zero_optimization.offload_optimizer.ratio"},
    "43": {"optimizer.type"},
    "44": {"zero_optimization.zenflow"},
    "47": {"bf16.bf16_master_weights_and_grads", "bf16.bf16_optimizer_states", "torch_autocast"},
    "50": {"cuda_visible_devices"},
    "53": {"zero_optimization.stage3_param_persitence_threshold", "optimizer.params.max_grad_norm"},
    "55": {"grandient_accumulation_steps", "train_batch_size"},
    "56": {"train_batch_size"},
    "58": {"zero_optimization.grad_hooks", "sparse_attention"},
    "59": {"zero_optimization.offload_optimizer.device", "zero_optimization.offload_optimizer.ratio"},
    "62": {"gradient_accumulation_steps"},
}
# The nearest right key, where the wrong one is a slip of the pen.
MEANT = {
    ("53", "zero_optimization.stage3_param_persitence_threshold"): "stage3_param_persistence_threshold",
    ("55", "grandient_accumulation_steps"): "gradient_accumulation_steps",
}


def path_of(number: str) -> Path:
    return FOLDER / f"{number}.json"


def dotted(value: Any, path: str = "") -> Iterator[str]:
    """Every key of a file, sections and what is in them."""
    for key, inner in value.items() if isinstance(value, dict) else ():
        here = f"{path}.{key}" if path else key
        yield here
        yield from dotted(inner, here)


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.json")), ids=lambda path: path.stem)
def test_every_key_is_accounted_for(path: Path) -> None:
    report = explain(path, world=8)
    told = {entry["key"]: entry for entry in report["keys"]}
    for key in dotted(json.loads(path.read_text())):
        assert key in told, key
        assert told[key]["status"] in ("used", "no_effect", "refused")
        assert told[key]["why"]
    assert report["ok"] == (not report["errors"]) == (report["resolved"] is not None)
    assert all(error["rule"] and error["fix"] for error in report["errors"])


def test_every_file_is_judged() -> None:
    judged = {number for number, _ in LEGAL} | set(LEFT_TO_A_TRAINER) | set(REFUSED) | {"52"}
    assert judged == {path.stem for path in FOLDER.glob("*.json")}
    assert len(judged) >= 40


@pytest.mark.parametrize(("number", "world"), LEGAL)
def test_legal(number: str, world: int) -> None:
    r = resolve(path_of(number), world=world)
    found = (r.train_batch_size, r.micro_batch_size, r.micro_batches, r.layout.dp, r.layout.tp, r.zero.stage)
    assert (*found, r.precision) == LEGAL[number, world]
    assert r.layout.pp == 1


@pytest.mark.parametrize("number", LEFT_TO_A_TRAINER)
def test_left_to_a_trainer(number: str) -> None:
    report = explain(path_of(number), world=8, steps=100)
    blamed = {error["key"] for error in report["errors"]}
    assert blamed <= {"train_batch_size", "train_micro_batch_size_per_gpu"}
    assert "auto" in report["errors"][0]["rule"]
    assert "--set" in report["errors"][0]["fix"]
    given = dict(BATCH)
    if number in ACCUMULATION_GIVEN:
        del given["gradient_accumulation_steps"]
    r = resolve(path_of(number), world=8, overrides=given, steps=100)
    host = " ".join(["optimizer"] * r.zero.offload_optimizer + ["param"] * r.zero.offload_param)
    assert (r.layout.dp, r.layout.tp, r.zero.stage, r.precision, host) == LEFT_TO_A_TRAINER[number]
    assert r.train_batch_size == r.micro_batch_size * r.micro_batches * r.layout.dp


@pytest.mark.parametrize("number", REFUSED)
def test_refused(number: str) -> None:
    with pytest.raises(UserErrors) as caught:
        resolve(path_of(number), world=8)
    assert {error.key for error in caught.value.errors} == REFUSED[number]
    for error in caught.value.errors:
        if (number, error.key) in MEANT:
            assert MEANT[number, error.key] in error.fix


def test_a_file_of_another_program() -> None:
    """gpt-neox keeps its model's arguments in the same file, and a list of stages to try."""
    with pytest.raises(UserErrors) as caught:
        resolve(path_of("52"), world=8)
    blamed = {error.key: error for error in caught.value.errors}
    assert "pipe-parallel-size" in blamed
    assert "list" in blamed["zero_optimization.stage"].rule
    assert len(blamed) > 30
