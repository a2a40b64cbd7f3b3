"""The chapter's JSON, verbatim: what it comes to on 8 ranks, and what DeepSpeed itself does with it."""

from __future__ import annotations

from pathlib import Path

import pytest

from hybridlab.config import explain, resolve
from hybridlab.errors import UserErrors
from hybridlab.shapes import PRESETS

CHAPTER = Path(__file__).parent.parent.parent / "labs" / "chapter" / "ds_config.json"


def test_what_it_comes_to() -> None:
    r = resolve(CHAPTER, world=8, shape=PRESETS["llama-2-13b"])
    assert (r.layout.dp, r.layout.tp, r.layout.pp) == (2, 2, 2)
    assert (r.zero.stage, r.zero.offload_optimizer, r.zero.gradient_policy) == (2, True, "scatter_every_microbatch")
    assert (r.train_batch_size, r.micro_batch_size, r.micro_batches) == (64, 1, 32)
    assert r.split == (20, 20)
    assert (r.schedule, r.precision, r.gradient_clipping) == ("1f1b", "fp32", 1.0)


def test_its_keys_and_what_deepspeed_does_with_them() -> None:
    report = explain(CHAPTER, world=8)
    assert {entry["status"] for entry in report["keys"]} == {"used"}
    differs = {note["key"]: note["says"] for note in report["deepspeed"]}
    assert "tensor_parallel.tp_size" in differs
    assert any(key.startswith("pipeline_parallel") for key in differs)
    why = {choice["key"]: choice["why"] for choice in report["chosen"]}
    assert "pp=2" in why["train_micro_batch_size_per_gpu"]


@pytest.mark.parametrize("world", [1, 2, 3, 6, 7])
def test_a_world_it_does_not_fit(world: int) -> None:
    with pytest.raises(UserErrors) as caught:
        resolve(CHAPTER, world=world)
    (error,) = caught.value.errors
    assert "2*2=4" in error.rule
    assert str(world) in error.rule
    assert error.fix.startswith("run on 4")
    assert f"on {world} choose tp" in error.fix
