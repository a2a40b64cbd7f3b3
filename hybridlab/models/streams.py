"""Where random numbers in training come from: functions of what is computed, not of who computes it.

A generator that moves on with every draw ties the numbers to the order of work, and that order differs at every layout:
another micro-batch size, a pipeline's interleaving, recomputation. Here each draw has an address instead,

    (seed, step, name of the module, sample in the global batch[, head]),

and a 64-bit hash of it seeds a generator for this draw alone. One rank and eight, forward and recomputation see the
same masks. (Megatron-LM keeps generators per tensor-parallel rank instead, arXiv:2205.05198 §4; masks then differ
between layouts.)

The engine says where it is:

    streams.assign_names(model)                  once, on the logical model
    streams.sequence_slice(start, stop, full)    once, on a rank that holds a slice of the sequence
    streams.set(seed=…, step=…)                  before each step
    streams.micro_batch(first_sample)            before each forward *and each backward* of a micro-batch

The last line matters: recomputation runs inside backward, when another micro-batch may have gone forward since. Until
`set` is called there is no address and dropout falls back on torch's default generator, as in any other model.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from hashlib import blake2b

from torch import nn


@dataclass
class _Place:
    """Where this process is in its training run."""

    active: bool = False
    seed: int = 0
    step: int = 0
    first_sample: int = 0
    start: int = 0
    stop: int = 0
    full: int = 0  # 0: no slice was announced
    tensor_rank: int = 0


_place = _Place()


def set(*, seed: int, step: int) -> None:
    """A step begins."""
    _place.active, _place.seed, _place.step, _place.first_sample = True, seed, step, 0


def micro_batch(first_sample: int) -> None:
    """Forward or backward of a micro-batch begins whose first sample is number ``first_sample`` of the global batch."""
    _place.first_sample = first_sample


def sequence_slice(start: int, stop: int, full: int) -> None:
    """Under sequence parallelism this rank's activations are positions ``start .. stop`` of ``full``."""
    _place.start, _place.stop, _place.full = start, stop, full


def tensor_rank(rank: int) -> None:
    """This rank's place in its tensor-parallel group: which attention heads it has."""
    _place.tensor_rank = rank


def assign_names(model: nn.Module) -> None:
    """Tell each module that draws random numbers its name in the logical model."""
    for name, module in model.named_modules():
        if hasattr(module, "stream_name"):
            module.stream_name = name  # type: ignore[assignment]


@contextmanager
def saved() -> Iterator[None]:
    """Inside, another run may say where it is; afterwards everything is as before."""
    global _place
    before, _place = _place, replace(_place)
    try:
        yield
    finally:
        _place = before


def active() -> bool:
    """Whether draws have addresses: `set` was called."""
    return _place.active


def head_offset(heads: int) -> int:
    """The number of this rank's first attention head, when every rank has ``heads``."""
    return _place.tensor_rank * heads


def positions(length: int) -> tuple[int, int, int]:
    """``(start, stop, full)``: which positions a tensor of ``length`` positions holds.

    Raises:
        ValueError: neither the announced slice nor the whole sequence is that long.
    """
    if _place.full and length == _place.stop - _place.start:
        return _place.start, _place.stop, _place.full
    if not _place.full or length == _place.full:
        return 0, length, length
    raise ValueError(
        f"a tensor of {length} positions, where this rank holds {_place.start}..{_place.stop} of {_place.full}"
    )


def seed_of(name: str, sample: int | str, head: int | str = "") -> int:
    """The 64-bit seed of one draw: for ``sample`` of the current micro-batch, by its place there.

    ``sample`` may be "all" for a draw that covers the whole micro-batch.
    """
    if isinstance(sample, int):
        sample += _place.first_sample
    else:
        sample = f"{sample} from {_place.first_sample}"
    address = f"{_place.seed}/{_place.step}/{name}/{sample}/{head}"
    return int.from_bytes(blake2b(address.encode(), digest_size=8).digest(), "little", signed=True)
