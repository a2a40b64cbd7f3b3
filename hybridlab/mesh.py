"""The parallel map: which rank sits where, and with whom it talks.

Ranks fill a grid of shape [pp, dp, tp], tensor parallelism fastest: ``rank = pp*(DP*TP) + dp*TP + tp``. The eight
ranks of the chapter's example (TP=2, PP=2, DP=2):

====  ==  ==  ==   ============  ============  ============
rank  pp  dp  tp   tp group      dp group      pp group
====  ==  ==  ==   ============  ============  ============
0     0   0   0    {0, 1}        {0, 2}        {0, 4}
1     0   0   1    {0, 1}        {1, 3}        {1, 5}
2     0   1   0    {2, 3}        {0, 2}        {2, 6}
3     0   1   1    {2, 3}        {1, 3}        {3, 7}
4     1   0   0    {4, 5}        {4, 6}        {0, 4}
5     1   0   1    {4, 5}        {5, 7}        {1, 5}
6     1   1   0    {6, 7}        {4, 6}        {2, 6}
7     1   1   1    {6, 7}        {5, 7}        {3, 7}
====  ==  ==  ==   ============  ============  ============

Megatron-LM, DeepSpeed's topology, torchtitan and nanotron number ranks in this same order.

===========  =====================================================  =======================================
group        what it carries                                        how often
===========  =====================================================  =======================================
tp           activations and their gradients                        several times a layer and micro-batch
pp           activations at a stage's edge, one way; gradients back  once a boundary and micro-batch
dp           gradients, and ZeRO's weights                          once a step (ZeRO-2, ZeRO-3: more often)
embedding    the gradient of a tied embedding (first, last stage)   once a step
===========  =====================================================  =======================================
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from hybridlab.ledger import Ledger
from hybridlab.plan.layout import Layout

_last_coords: dict[str, int] | None = None


def last_coords() -> dict[str, int] | None:
    """Where this process sat in the mesh it built last, ``{pp, dp, tp}``; None before any. For error messages."""
    return _last_coords


@dataclass(frozen=True)
class Group:
    """Some ranks that talk together, this rank among them. Collectives take one; nothing reads a global group.

    Attributes:
        name: what the ledger files its messages under: "tp", "dp", "pp", "embedding".
        ranks: the global ranks, in the group's order.
        rank: this process's place in ``ranks``.
        process_group: torch's handle; None when the group has a single member, which never communicates.
        ledger: where each message leaves a line.
    """

    name: str
    ranks: tuple[int, ...]
    rank: int
    process_group: Any = field(repr=False)
    ledger: Ledger = field(repr=False, compare=False)

    @property
    def size(self) -> int:
        return len(self.ranks)


class Mesh:
    """The rank grid of one layout and this rank's groups in it. Every rank of the world must build it together.

    Args:
        layout: the degrees; their product must be the world size of the default process group.
        device_type: "cpu" or "cuda".
        ledger: where the groups' messages are recorded.
        tied_stages: also build the {first, last stage} group of a tied embedding.
        kv_copies: tensor-parallel neighbours that hold the same key/value heads (1 when none do).
    """

    def __init__(
        self,
        layout: Layout,
        *,
        device_type: str = "cpu",
        ledger: Ledger | None = None,
        tied_stages: bool = False,
        kv_copies: int = 1,
    ) -> None:
        global _last_coords
        world = dist.get_world_size()
        if layout.world != world:
            raise ValueError(
                f"layout dp{layout.dp}·tp{layout.tp}·pp{layout.pp} needs {layout.world} ranks, the world has {world}"
            )
        self.layout = layout
        self.rank = dist.get_rank()
        self.ledger = ledger if ledger is not None else Ledger()
        self.coords: dict[str, int] = dict(layout.coords(self.rank))
        _last_coords = self.coords
        with unset_fake_temporarily():  # the mesh looks at the numbers in its grid, also in a rehearsal
            self.device_mesh: DeviceMesh = init_device_mesh(
                device_type, (layout.pp, layout.dp, layout.tp), mesh_dim_names=("pp", "dp", "tp")
            )
        self._extra: list[Any] = []
        self.tp = self._axis("tp")
        self.dp = self._axis("dp")
        self.pp = self._axis("pp")
        # One communicator for each direction along the pipeline. A NCCL communicator runs its messages in the order
        # they were issued, so a send that waits for its peer would otherwise hold back the receive behind it.
        self.pp_up = self.pp
        self.pp_down = self._extra_group("pp", list(self._pipelines())) if layout.pp > 1 else self.pp
        self.embedding = self._single("embedding")
        if tied_stages and layout.pp > 1:
            ends = [(line[0], line[-1]) for line in self._pipelines()]
            self.embedding = self._extra_group("embedding", ends)
        self.kv = self._single("tp")
        if kv_copies > 1:
            self.kv = self._extra_group("tp", list(self._kv_groups(kv_copies)))

    def _axis(self, axis: str) -> Group:
        process_group = self.device_mesh.get_group(axis)
        ranks = tuple(dist.get_process_group_ranks(process_group))
        return Group(axis, ranks, ranks.index(self.rank), process_group if len(ranks) > 1 else None, self.ledger)

    def _single(self, name: str) -> Group:
        return Group(name, (self.rank,), 0, None, self.ledger)

    def _extra_group(self, name: str, all_ranks: Sequence[Sequence[int]]) -> Group:
        """Build every group of a kind, in one order on all ranks: making a group is itself a collective."""
        mine = self._single(name)
        for ranks in all_ranks:
            process_group = dist.new_group(list(ranks))
            if self.rank in ranks:
                self._extra.append(process_group)
                mine = Group(name, tuple(ranks), list(ranks).index(self.rank), process_group, self.ledger)
        return mine

    def _pipelines(self) -> Iterator[tuple[int, ...]]:
        grid = self.layout
        for dp in range(grid.dp):
            for tp in range(grid.tp):
                yield tuple(grid.rank(pp=pp, dp=dp, tp=tp) for pp in range(grid.pp))

    def _kv_groups(self, copies: int) -> Iterator[tuple[int, ...]]:
        grid = self.layout
        for pp in range(grid.pp):
            for dp in range(grid.dp):
                for first in range(0, grid.tp, copies):
                    yield tuple(grid.rank(pp=pp, dp=dp, tp=first + i) for i in range(copies))

    def model_groups(self) -> tuple[Group, ...]:
        """The groups over which one replica of the model is spread: a scalar summed over each covers the model."""
        return tuple(group for group in (self.tp, self.pp) if group.size > 1)

    def close(self) -> None:
        """Give the groups back. For processes that try many layouts one after another."""
        for process_group in self._extra:
            dist.destroy_process_group(process_group)
        for axis in ("tp", "dp", "pp"):
            process_group = self.device_mesh.get_group(axis)
            if process_group is not dist.group.WORLD:
                dist.destroy_process_group(process_group)


def local_device(device_type: str) -> torch.device:
    """The device this rank computes on."""
    return torch.device("cuda", torch.cuda.current_device()) if device_type == "cuda" else torch.device("cpu")
