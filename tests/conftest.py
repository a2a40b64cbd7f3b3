"""Ranks that tests share: starting them is cheap, not starting them is cheaper."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from hybridlab.launch import Cluster


@pytest.fixture(scope="session")
def ranks() -> Iterator[Callable[[int], Cluster]]:
    """``ranks(n)``: a Cluster of n ranks on gloo, the same one for every test of this process."""
    clusters: dict[int, Cluster] = {}

    def of(count: int) -> Cluster:
        if count not in clusters:
            clusters[count] = Cluster(count, backend="gloo", output="quiet", timeout=90)
        return clusters[count]

    yield of
    for cluster in clusters.values():
        cluster.close()
