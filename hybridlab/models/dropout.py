"""Dropout whose mask is a function of (seed, step, module, sample, position, feature), the same at every layout.

For each sample a generator of its own draws the mask of the whole sequence; a rank that holds a slice of it keeps that
slice. So one rank, tensor and sequence parallelism, any split into micro-batches and recomputation all drop the same
elements. See `hybridlab.models.streams` for how a module knows where it is.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from hybridlab.models import streams


class Dropout(nn.Module):
    """[b, s, h] to the same shape: each element zeroed with probability p, the others divided by 1 - p.

    The identity in eval mode and for p = 0. Backward keeps one byte per element, the mask.
    """

    def __init__(self, p: float) -> None:
        super().__init__()
        self.p = p
        self.stream_name = ""

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.p == 0.0:
            return x
        if not streams.active():
            return F.dropout(x, self.p)
        start, stop, full = streams.positions(x.shape[1])
        keep = torch.empty(x.shape, dtype=torch.bool, device=x.device)
        for sample in range(x.shape[0]):
            generator = seeded(x, streams.seed_of(self.stream_name, sample))
            if stop - start == full:
                keep[sample].bernoulli_(1.0 - self.p, generator=generator)
            else:
                whole = torch.empty((full, *x.shape[2:]), dtype=torch.bool, device=x.device)
                keep[sample] = whole.bernoulli_(1.0 - self.p, generator=generator)[start:stop]
        return apply_mask(x, keep, self.p)

    def extra_repr(self) -> str:
        return f"p={self.p}"


def apply_mask(x: Tensor, keep: Tensor, p: float) -> Tensor:
    """``x`` where ``keep``, divided by 1 - p; 0 elsewhere. Autograd keeps ``keep`` (bool), not ``x``."""
    return (x * keep).mul_(1.0 / (1.0 - p))


def seeded(like: Tensor, seed: int) -> torch.Generator | None:
    """A generator on the device of ``like``. None for fake tensors: they have no values to draw."""
    if isinstance(like, FakeTensor):
        return None
    return torch.Generator(like.device).manual_seed(seed)


@contextmanager
def default_generator_seeded(like: Tensor, seed: int) -> Iterator[None]:
    """Seed the default generator of the device of ``like``, for kernels that draw by themselves; put it back after."""
    if isinstance(like, FakeTensor):
        yield
        return
    cuda = like.device.type == "cuda"
    before = torch.cuda.get_rng_state(like.device) if cuda else torch.get_rng_state()
    try:
        if cuda:
            with torch.cuda.device(like.device):
                torch.cuda.manual_seed(seed)
        else:
            torch.default_generator.manual_seed(seed)
        yield
    finally:
        if cuda:
            torch.cuda.set_rng_state(before, like.device)
        else:
            torch.set_rng_state(before)
