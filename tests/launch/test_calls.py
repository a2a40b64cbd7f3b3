"""What goes to the ranks and comes back."""

from __future__ import annotations

import functools
import linecache
import math
import os
import random
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist

from hybridlab.errors import UserError, UserErrors
from hybridlab.launch import Cluster, RankError, current, device, report, state

FACTOR = 10
LOCK = threading.Lock()


@dataclass
class Pair:
    left: int
    right: torch.Tensor

    def total(self) -> float:
        return self.left + float(self.right.sum())


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster(3, timeout=30, output="quiet") as ranks:
        yield ranks


def helper(x: int) -> int:
    return x * FACTOR


def rank_times(x: int, offset: int = 0) -> int:
    return helper(dist.get_rank() * x) + offset


def all_reduced() -> float:
    value = torch.tensor([float(dist.get_rank() + 1)])
    dist.all_reduce(value)
    return value.item()


def test_results_come_back_by_rank_with_arguments_and_keywords(cluster: Cluster) -> None:
    assert cluster.run(rank_times, 2, offset=1) == [1, 21, 41]


def test_the_default_process_group_is_up(cluster: Cluster) -> None:
    assert cluster.run(all_reduced) == [6.0] * 3


def test_each_rank_gets_its_own_arguments(cluster: Cluster) -> None:
    def join(common: str, own: int, more: str) -> str:
        return f"{common}{own}{more}"

    assert cluster.run(join, "x", per_rank=[(1, "a"), (2, "b"), (3, "c")]) == ["x1a", "x2b", "x3c"]
    with pytest.raises(UserError, match="2 entries for 3 ranks"):
        cluster.run(join, "x", per_rank=[(1, "a"), (2, "b")])


def test_closures_lambdas_partials_and_methods_travel(cluster: Cluster) -> None:
    shift = 5
    assert cluster.run(lambda: dist.get_rank() + shift) == [5, 6, 7]
    assert cluster.run(functools.partial(rank_times, 1)) == [0, 10, 20]
    assert cluster.run(Pair(1, torch.ones(2)).total) == [3.0] * 3


def test_instances_of_a_class_that_only_this_test_knows_come_back_as_that_class(cluster: Cluster) -> None:
    def double(pair: Pair) -> Pair:
        return Pair(2 * pair.left, 2 * pair.right)

    results = cluster.run(double, Pair(1, torch.ones(2)))
    assert all(type(result) is Pair and result.total() == 6.0 for result in results)


def test_a_function_from_exec_as_in_a_notebook_cell_is_shown_with_its_own_line(cluster: Cluster) -> None:
    source = "def cell(x):\n    y = x + 1\n    raise ValueError(f'no {y}')  # the cell's line\n"
    name = "<cell 7>"
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    scope: dict = {"__name__": "__main__"}
    exec(compile(source, name, "exec"), scope)
    with pytest.raises(RankError) as caught:
        cluster.run(scope["cell"], 1)
    assert "raised ValueError: no 2" in str(caught.value)
    assert "<cell 7>, line 3 in cell" in caught.value.traceback
    assert "# the cell's line" in caught.value.traceback
    assert isinstance(caught.value.__cause__, ValueError)


def test_what_is_put_into_state_stays_and_assigned_globals_do_not_leak_back(cluster: Cluster) -> None:
    def remember() -> None:
        state.count = getattr(state, "count", 0) + 1 + dist.get_rank()

    def recall() -> int:
        return state.count

    cluster.run(remember)
    cluster.run(remember)
    assert cluster.run(recall) == [2, 4, 6]
    assert not hasattr(state, "count")


def test_module_globals_of_imported_modules_live_on(cluster: Cluster) -> None:
    cluster.run(lambda: setattr(math, "our_mark", dist.get_rank()))
    assert cluster.run(lambda: math.our_mark) == [0, 1, 2]  # type: ignore[attr-defined]


def test_big_arguments_and_results_pass_and_tensors_arrive_by_value(cluster: Cluster) -> None:
    def double(x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"twice": x * 2 + dist.get_rank()}

    big = torch.arange(6_000_000, dtype=torch.float32)  # 24 MB to and from each of three ranks at once
    for rank, result in enumerate(cluster.run(double, big)):
        assert torch.equal(result["twice"], big * 2 + rank)


def test_a_slice_leaves_its_storage_and_a_loss_its_graph_behind(cluster: Cluster) -> None:
    def work() -> tuple[torch.Tensor, torch.Tensor, torch.nn.Parameter]:
        weight = torch.nn.Parameter(torch.ones(1000))
        return torch.zeros(1_000_000)[:3], weight.sum() * 2, weight

    piece, loss, weight = cluster.run(work)[0]
    assert piece.tolist() == [0.0] * 3
    assert piece.untyped_storage().nbytes() == 12
    assert loss.item() == 2000.0
    assert not loss.requires_grad
    assert isinstance(weight, torch.nn.Parameter)


def test_reports_reach_the_driver_during_the_call_and_extend_its_deadline(cluster: Cluster) -> None:
    def slow() -> str:
        for step in range(5):
            if dist.get_rank() == 1:
                report({"step": step})
            time.sleep(0.5)
        return "done"

    seen: list[tuple[int, int]] = []
    assert (
        cluster.run(slow, timeout=2.0, on_report=lambda rank, value: seen.append((rank, value["step"]))) == ["done"] * 3
    )
    assert seen == [(1, step) for step in range(5)]


def test_report_outside_a_rank_is_refused() -> None:
    with pytest.raises(UserError, match="not a rank"):
        report(1)


def test_a_rank_knows_its_place(cluster: Cluster) -> None:
    def place() -> tuple:
        here = current()
        assert here is not None
        return here.rank, here.world, here.local_rank, str(device()), torch.get_num_threads(), os.environ["LOCAL_RANK"]

    assert cluster.run(place) == [(rank, 3, rank, "cpu", 1, str(rank)) for rank in range(3)]
    assert cluster.ranks == 3
    assert cluster.backend == "gloo"
    assert cluster.device.type == "cpu"
    assert len(set(cluster.pids)) == 3
    assert current() is None


def test_ranks_do_not_share_random_numbers_of_the_process_they_are_forked_from(cluster: Cluster) -> None:
    import numpy

    assert len(set(cluster.run(lambda: float(numpy.random.rand())))) == 3
    assert len(set(cluster.run(lambda: random.random()))) == 3  # the bare method would bring its generator along


def test_environment_and_search_path_are_those_of_the_start(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    (tmp_path / "beside_the_script.py").write_text("VALUE = 7\n")
    monkeypatch.setenv("HYBRIDLAB_SEEN", "yes")
    monkeypatch.syspath_prepend(str(tmp_path))

    def look() -> tuple[str | None, int]:
        import beside_the_script  # type: ignore[import-not-found]

        return os.environ.get("HYBRIDLAB_SEEN"), beside_the_script.VALUE

    with Cluster(2) as ranks:
        assert ranks.run(look) == [("yes", 7)] * 2


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: (lambda: LOCK, ()), "global `LOCK`"),
        (lambda: ((lambda lock: lambda: lock)(threading.Lock()), ()), "variable `lock`"),
        (lambda: (rank_times, ({"a": [1, threading.Lock()]},)), r"item \[1\] of item \['a'\] of argument 1"),
        (lambda: (rank_times, (sys._getframe(),)), "argument 1"),
    ],
    ids=["global", "closure", "nested argument", "frame"],
)
def test_what_cannot_travel_is_named(cluster: Cluster, make, words: str) -> None:
    fn, args = make()
    pids = cluster.pids
    with pytest.raises(UserError, match=words) as caught:
        cluster.run(fn, *args)
    assert "cannot be sent to the ranks" in str(caught.value)
    assert cluster.pids == pids  # found before anything was sent


def test_a_result_that_cannot_travel_is_named(cluster: Cluster) -> None:
    with pytest.raises(UserError, match=r"rank \d returned something that cannot be sent back: item \['lock'\]"):
        cluster.run(lambda: {"lock": threading.Lock()})


def test_the_cluster_itself_cannot_travel(cluster: Cluster) -> None:
    with pytest.raises(UserError, match=r"variable `cluster`.*belongs to the process that made it"):
        cluster.run(lambda: cluster.ranks)


def test_what_is_no_function_is_refused(cluster: Cluster) -> None:
    with pytest.raises(UserError, match="takes a function"):
        cluster.run(3)


def test_a_user_error_arrives_as_itself(cluster: Cluster) -> None:
    def refuse() -> None:
        raise UserError("tp must divide heads: 3 does not divide 4.", key="tp_size", value=3, fix="2 or 4.")

    def refuse_twice() -> None:
        raise UserErrors([UserError("one thing."), UserError("another.")])

    with pytest.raises(UserError) as caught:
        cluster.run(refuse)
    assert caught.value.to_json() == {
        "key": "tp_size",
        "value": 3,
        "rule": "tp must divide heads: 3 does not divide 4.",
        "fix": "2 or 4.",
    }
    with pytest.raises(UserErrors) as both:
        cluster.run(refuse_twice)
    assert [error.rule for error in both.value.errors] == ["one thing.", "another."]


def test_a_call_that_destroyed_the_group_is_told_at_the_next(cluster: Cluster) -> None:
    cluster.run(dist.destroy_process_group)
    with pytest.raises(UserError, match="destroyed the default process group"):
        cluster.run(all_reduced)
    assert cluster.run(all_reduced) == [6.0] * 3
