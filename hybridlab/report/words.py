"""The words of a report: who counted, what bytes are for, which group sent them; and bytes as people read them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

SOURCES = ("plan", "rehearsal", "measured")
CATEGORIES = (
    "weights",
    "gradients",
    "master_weights",
    "optimizer",
    "activations",
    "buffers",
    "logits",
    "other",
)
GROUPS = ("tp", "dp", "pp", "embedding", "host")

GIB = 2**30
GB = 10**9


def gib(count: float) -> str:
    """Bytes in binary units for people, e.g. "24.2 GiB"; small amounts in MiB or KiB."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if abs(count) >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count:.0f} B"


def check_source(source: str) -> None:
    """Raises ValueError unless ``source`` is one of `SOURCES`."""
    if source not in SOURCES:
        raise ValueError(f"source must be one of {', '.join(SOURCES)}, not {source!r}")


def categories(given: Mapping[str, int] | None = None) -> dict[str, int]:
    """Bytes by category with every category named, absent ones 0.

    Raises:
        ValueError: a category that is not in `CATEGORIES`.
    """
    given = given or {}
    unknown = [name for name in given if name not in CATEGORIES]
    if unknown:
        raise ValueError(f"unknown category {unknown[0]!r}; the categories are {', '.join(CATEGORIES)}")
    return {name: int(given.get(name, 0)) for name in CATEGORIES}


def sum_categories(parts: Sequence[Mapping[str, int]]) -> dict[str, int]:
    """Categories added up."""
    return categories({name: sum(part.get(name, 0) for part in parts) for name in CATEGORIES})
