"""How a list of parameters is packed into buckets, each a flat buffer that one collective moves. No torch: the
planner counts with the same functions that the engine packs with."""

from __future__ import annotations

from collections.abc import Sequence


def pack(sizes: Sequence[int], capacity: int) -> list[list[int]]:
    """Indices of ``sizes``, in order, in buckets of at most ``capacity`` elements; a larger one has a bucket of its
    own.

    A bucket that is exactly full is closed, not overfull: ``capacity`` elements are allowed.
    """
    buckets: list[list[int]] = []
    filled = 0
    for index, size in enumerate(sizes):
        if not buckets or filled + size > capacity:
            buckets.append([])
            filled = 0
        buckets[-1].append(index)
        filled += size
    return buckets


def padded(numel: int, multiple: int) -> int:
    """``numel`` rounded up to a multiple, so that it can be dealt out evenly."""
    return -(-numel // multiple) * multiple
