"""First values of parameters, the same at every layout: functions of (seed, name), drawn slice by slice.

A parameter is thought of as tiles of at most 512 × 512; each tile has a generator of its own, keyed by (seed, name,
tile). Whoever holds some rows or columns draws the tiles that they touch and keeps what is theirs, bit for bit what
the whole parameter has there. No one ever holds the whole: beside the result there is one tile (1 MiB) at a time.

Values are drawn in fp32 on the host, so that every precision and every device starts from the same numbers.

The scale is GPT-2's: normal with standard deviation 0.02, and 0.02/√(2L) where the result is added to the residual
stream, which L layers do twice each (Radford et al. 2019 §2.3; Shoeybi et al., arXiv:1909.08053 §3).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import lru_cache
from hashlib import blake2b
from typing import Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from hybridlab.shapes import ModelShape, parameters_of

TILE = 512
STD = 0.02

Ranges = Sequence[tuple[int, int]]


class _Span(Protocol):
    @property
    def start(self) -> int: ...
    @property
    def stop(self) -> int: ...


class Part(Protocol):
    """Which part of a logical parameter a tensor is, as `hybridlab.placement.Placement` says it."""

    @property
    def name(self) -> str:
        """Of the logical parameter."""
        ...

    @property
    def logical_shape(self) -> tuple[int, ...]:
        """Its shape in the plain model."""
        ...

    @property
    def dim(self) -> int:
        """The dimension along which it is cut."""
        ...

    @property
    def spans(self) -> Sequence[_Span]:
        """What is held along ``dim``, in order."""
        ...


@torch.no_grad()
def initialise_model(model: nn.Module, shape: ModelShape, seed: int) -> None:
    """Draw every parameter of a plain model."""
    for name, parameter in model.named_parameters():
        _fill(parameter, name, tuple(parameter.shape), [None] * parameter.dim(), shape, seed)


@torch.no_grad()
def initialise(out: Tensor, part: Part, shape: ModelShape, seed: int) -> None:
    """Draw the part of a logical parameter that ``out`` holds; rows or columns of padding after it are left alone."""
    ranges = [(span.start, span.stop) for span in part.spans]
    held = out.narrow(part.dim, 0, sum(stop - start for start, stop in ranges))
    index: list[Ranges | None] = [None] * out.dim()
    index[part.dim] = ranges
    _fill(held, part.name, part.logical_shape, index, shape, seed)


def _fill(
    out: Tensor,
    name: str,
    logical_shape: Sequence[int],
    index: Sequence[Ranges | None],
    shape: ModelShape,
    seed: int,
) -> None:
    constant, std = rule(name, logical_shape, shape)
    if std == 0.0:
        out.fill_(constant)
    else:
        init_into(out, name, logical_shape, index, seed, std)


def rule(name: str, logical_shape: Sequence[int], shape: ModelShape) -> tuple[float, float]:
    """``(mean, standard deviation)`` of a parameter's first values.

    A parameter that is not of ``shape`` (somebody's own model) goes by its looks: a bias is 0, another vector 1, and
    everything else normal.
    """
    kind = _kinds(shape).get(name)
    if kind is None:
        kind = "bias" if name.endswith("bias") else "norm" if len(logical_shape) == 1 else "weight"
    if kind == "norm":
        return 1.0, 0.0
    if kind == "bias":
        return 0.0, 0.0
    return 0.0, STD / math.sqrt(2 * shape.layers) if kind == "output" else STD


@lru_cache(maxsize=16)
def _kinds(shape: ModelShape) -> dict[str, str]:
    return {parameter.name: parameter.kind for parameter in parameters_of(shape)}


@torch.no_grad()
def init_into(
    out: Tensor, name: str, logical_shape: Sequence[int], index: Sequence[Ranges | None], seed: int, std: float = STD
) -> None:
    """Fill ``out`` with a part of a parameter that is normal with mean 0.

    Args:
        out: on any device, of any floating dtype; its extent in each dimension is the sum of the ranges there. Fake
            tensors and those on the meta device have no values and are left alone.
        name: of the logical parameter.
        logical_shape: of the whole, with one or two dimensions.
        index: for each dimension the ranges ``(start, stop)`` that ``out`` holds, in its order; None for all of it.
        seed: of the run.
        std: standard deviation.

    Raises:
        ValueError: the ranges do not give the shape of ``out``, or the parameter has more than two dimensions.
    """
    if isinstance(out, FakeTensor) or out.is_meta:
        return
    ranges = [given if given is not None else [(0, extent)] for given, extent in zip(index, logical_shape)]
    expected = tuple(sum(stop - start for start, stop in given) for given in ranges)
    if expected != tuple(out.shape) or not 1 <= len(logical_shape) <= 2:
        raise ValueError(f"{name} {tuple(logical_shape)}: ranges {ranges} do not give a tensor {tuple(out.shape)}")
    rows, columns = (ranges[0], ranges[1]) if len(ranges) == 2 else ([(0, 1)], ranges[0])
    height, width = logical_shape if len(logical_shape) == 2 else (1, logical_shape[0])
    target = out if out.dim() == 2 else out.unsqueeze(0)
    for tile_row, row, to_row in _touched(rows):
        for tile_column, column, to_column in _touched(columns):
            values = _tile(name, seed, tile_row, tile_column, height, width)
            part = torch.from_numpy(values[row, column]).mul_(std)
            target[to_row, to_column].copy_(part)


def _touched(ranges: Ranges) -> Iterator[tuple[int, slice, slice]]:
    """Tiles that ranges touch along one dimension: ``(tile's number, slice of the tile, slice of the result)``."""
    done = 0
    for start, stop in ranges:
        at = start
        while at < stop:
            tile = at // TILE
            end = min(stop, (tile + 1) * TILE)
            yield tile, slice(at - tile * TILE, end - tile * TILE), slice(done + at - start, done + end - start)
            at = end
        done += stop - start


def _tile(name: str, seed: int, row: int, column: int, height: int, width: int) -> np.ndarray:
    """Standard normal values of one tile, clipped to the parameter's shape, in fp32."""
    key = blake2b(f"{seed}/{name}/{row}/{column}".encode(), digest_size=16).digest()
    generator = np.random.Generator(np.random.Philox(key=int.from_bytes(key, "little")))
    extent = min(TILE, height - row * TILE), min(TILE, width - column * TILE)
    return generator.standard_normal(extent, dtype=np.float32)
