"""A rank raises, dies, is stuck: the right one is named, with its line, and all of them are ended."""

from __future__ import annotations

import os
import pickle
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hybridlab.launch import Cluster, RankError
from hybridlab.launch.failure import Failure, Link, RemoteError, exit_reason, failed, root_cause, stuck
from hybridlab.launch.frames import Frame
from hybridlab.launch.stacks import Doing, parse
from tests.launch.support import alive, eventually


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster(4, timeout=30, output="quiet") as ranks:
        yield ranks


def failure_of(cluster: Cluster, fn: Any, *args: Any, **kwargs: Any) -> RankError:
    """Run what fails; check that its ranks are gone, and that the next call finds fresh ones."""
    cluster.start()
    pids = cluster.pids
    with pytest.raises(RankError) as caught:
        cluster.run(fn, *args, **kwargs)
    assert eventually(lambda: not any(map(alive, pids)), 10)
    assert cluster.pids == []
    return caught.value


def reduce() -> float:
    value = torch.ones(1)
    dist.all_reduce(value)
    return value.item()


def raise_on(rank: int) -> None:
    if dist.get_rank() == rank:
        raise KeyError("the learner's key")
    reduce()


def test_an_exception_names_its_rank_its_line_and_where_the_others_were(cluster: Cluster) -> None:
    error = failure_of(cluster, raise_on, 1)
    assert (error.rank, error.kind, error.coords) == (1, "exception", None)
    text = str(error)
    assert text.startswith('rank 1 raised KeyError: "the learner\'s key"\n')
    assert "test_failures.py, line" in error.traceback
    assert "raise KeyError" in error.traceback
    assert text.count("raise KeyError") == 1
    assert "worker.py" not in text  # our machinery is no news
    assert set(error.others) == {0, 2, 3}
    assert all("in all_reduce" in doing and "dist.all_reduce(value)" in doing for doing in error.others.values())
    assert isinstance(error.__cause__, KeyError)
    assert error._render_traceback_() == [f"RankError: {text}"]
    assert cluster.run(reduce) == [4.0] * 4


def test_the_cause_is_found_every_time_among_its_consequences(cluster: Cluster) -> None:
    """The ranks' sockets close when a rank fails in C++ or is killed, and peers may be heard first."""

    def fail(rank: int, how: str) -> None:
        if dist.get_rank() == rank:
            if how == "exit":
                os._exit(3)
            dist.destroy_process_group()  # the peers see closed connections before we raise
            time.sleep(0.05)
            raise ValueError("the cause")
        for _ in range(1000):
            reduce()

    for repeat in range(6):
        rank, how = repeat % 4, ("exit", "raise")[repeat % 2]
        error = failure_of(cluster, fail, rank, how)
        assert error.rank == rank, str(error)
        assert error.kind == ("died" if how == "exit" else "exception")


def test_the_same_error_on_several_ranks_is_said_once(cluster: Cluster) -> None:
    def fail() -> None:
        dist.barrier()
        if dist.get_rank() != 2:
            raise ValueError("same everywhere")
        time.sleep(30)

    error = failure_of(cluster, fail)
    assert error.rank in {0, 1, 3}
    assert {error.rank, *error.also} == {0, 1, 3}
    assert str(error).count("same everywhere") == 2  # the headline and the source line
    assert "time.sleep(30)" in error.others[2]


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        (lambda: os._exit(3), "exit code 3"),
        (lambda: os.kill(os.getpid(), signal.SIGKILL), "killed by SIGKILL (kill -9, or the system ran out of memory)"),
        (lambda: os.kill(os.getpid(), signal.SIGSEGV), "killed by SIGSEGV (segmentation fault)"),
    ],
    ids=["os._exit", "SIGKILL", "SIGSEGV"],
)
def test_a_rank_that_died_is_named_with_its_exit(cluster: Cluster, how: Any, reason: str) -> None:
    def die() -> None:
        if dist.get_rank() == 2:
            print("last words", flush=True)
            how()
        reduce()

    error = failure_of(cluster, die)
    assert (error.rank, error.kind) == (2, "died")
    assert str(error).startswith(f"rank 2 died: {reason}\n")
    assert error.traceback.count("last words") == 1  # the output was not shown
    if "SIGSEGV" in reason:
        assert "test_failures.py, line" in error.traceback  # and where it crashed


def test_a_rank_that_dies_between_calls_is_told_at_the_next(cluster: Cluster) -> None:
    cluster.start()
    pid = cluster.pids[3]
    os.kill(pid, signal.SIGKILL)
    assert eventually(lambda: not Path(f"/proc/{pid}").exists(), 10)
    error = failure_of_running(cluster)
    assert (error.rank, error.kind) == (3, "died")
    assert "between two calls" in str(error)
    assert cluster.run(reduce) == [4.0] * 4


def failure_of_running(cluster: Cluster) -> RankError:
    with pytest.raises(RankError) as caught:
        cluster.run(reduce)
    return caught.value


def test_a_stuck_rank_is_named_at_the_deadline_with_its_line(cluster: Cluster) -> None:
    def spin() -> None:
        if dist.get_rank() == 3:
            while True:
                pass
        reduce()

    error = failure_of(cluster, spin, timeout=1.2)
    assert (error.rank, error.kind) == (3, "stuck")
    headline = str(error).partition("\n")[0]
    assert "rank 3 gave no answer within 1.2 s: it is in Python at " in headline
    assert " in spin: " in headline
    assert set(error.others) == {0, 1, 2}
    assert all("in all_reduce" in doing for doing in error.others.values())


def test_ranks_in_different_collectives_are_told_apart(cluster: Cluster) -> None:
    def differ() -> None:
        if dist.get_rank() == 1:
            dist.broadcast(torch.ones(1), src=0)
            dist.barrier()
        reduce()
        reduce()

    error = failure_of(cluster, differ, timeout=1.2)
    assert error.kind == "stuck"
    places = {error.rank: str(error).partition("\n")[0], **error.others}
    assert "in broadcast" in places[1]
    assert "in all_reduce" in places[2]


def test_a_rank_that_leaves_a_loop_early_is_named_as_finished(cluster: Cluster) -> None:
    def uneven() -> None:
        for _ in range(2 if dist.get_rank() == 2 else 3):
            reduce()

    error = failure_of(cluster, uneven, timeout=1.2)
    assert (error.rank, error.kind) == (2, "stuck")
    assert "has finished its call" in str(error)
    assert "in all_reduce" in error.others[0]


def test_a_rank_that_waits_for_a_message_is_in_a_collective(cluster: Cluster) -> None:
    def half() -> None:
        work = dist.irecv(torch.ones(1), src=3) if dist.get_rank() == 0 else None
        if work is not None:
            work.wait()
        elif dist.get_rank() == 3:
            time.sleep(30)

    error = failure_of(cluster, half, timeout=1.2)
    assert error.rank == 3
    assert "in wait" in error.others[0]
    assert error.others[1] == "finished"


def test_a_stopped_rank_is_named_as_stopped(cluster: Cluster) -> None:
    def stop() -> None:
        if dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        reduce()

    error = failure_of(cluster, stop, timeout=1.2)
    assert error.rank == 1
    assert "it is stopped (SIGSTOP)" in str(error)


def test_coordinates_are_told_of_whoever_fails() -> None:
    def train(how: str) -> None:
        from hybridlab.mesh import Mesh
        from hybridlab.plan.layout import Layout

        Mesh(Layout(dp=1, tp=2, pp=2))
        if dist.get_rank() == 2:
            if how == "raise":
                raise ValueError("bad")
            time.sleep(0.5)  # the driver learns of a mesh within 0.1 s; what dies sooner is told without coordinates
            if how == "exit":
                os._exit(1)
            time.sleep(30)
        reduce()

    with Cluster(4, timeout=30, output="quiet") as ranks:
        for how, kind in (("raise", "exception"), ("exit", "died"), ("sleep", "stuck")):
            with pytest.raises(RankError, match=r"^rank 2 \(pp 1, dp 0, tp 0\) ") as caught:
                ranks.run(train, how, timeout=1.2)
            assert caught.value.kind == kind
            assert caught.value.coords == {"pp": 1, "dp": 0, "tp": 0}


def test_library_frames_are_folded_and_the_chain_is_kept(cluster: Cluster) -> None:
    def fail() -> None:
        if dist.get_rank():
            return
        try:
            torch.nn.functional.linear(torch.ones(2, 3), torch.ones(4, 5))
        except RuntimeError as error:
            raise ValueError("the layer does not fit") from error

    def fold() -> None:
        torch.nn.Linear(3, 4)(torch.ones(2, 5))

    error = failure_of(cluster, fail)
    assert "raised ValueError: the layer does not fit" in str(error)
    assert "which caused:" in error.traceback
    assert "mat1 and mat2" in error.traceback
    assert "frames in torch, to linear.py" in failure_of(cluster, fold).traceback


def test_a_missing_module_comes_with_a_hint(cluster: Cluster) -> None:
    def fail() -> None:
        import no_such_module_anywhere  # type: ignore[import-not-found]  # noqa: F401

    assert "Hint: a rank looks for modules where this process did" in str(failure_of(cluster, fail))


def test_sys_exit_in_a_rank_is_an_error_not_a_quiet_end(cluster: Cluster) -> None:
    def leave() -> None:
        if dist.get_rank() == 1:
            raise SystemExit(0)
        reduce()

    assert "rank 1 raised SystemExit" in str(failure_of(cluster, leave))


def test_an_exception_that_cannot_be_pickled_still_arrives_as_text(cluster: Cluster) -> None:
    class Odd(Exception):
        def __init__(self, one: int, two: int) -> None:
            super().__init__("odd")

    def fail() -> None:
        raise Odd(1, 2)

    error = failure_of(cluster, fail)
    assert "Odd: odd" in str(error)
    assert error.__cause__ is None


def test_a_rank_error_can_itself_be_pickled(cluster: Cluster) -> None:
    error = failure_of(cluster, raise_on, 0)
    again = pickle.loads(pickle.dumps(error))
    assert str(again) == str(error)
    assert (again.rank, again.kind, again.others) == (error.rank, error.kind, error.others)


# --- the reasoning alone ---------------------------------------------------------------------------------------------


def remote(text: str, when: float, consequence: bool = False) -> RemoteError:
    return RemoteError("RuntimeError", text, (Link("", f"RuntimeError: {text}", ()),), consequence, when, None)


def test_consequences_give_way_to_a_later_cause() -> None:
    closed = Failure(0, 1.0, 1.0, remote("Connection closed by peer", 1.0, True))
    cause = Failure(3, 1.2, 1.3, remote("boom", 1.2))
    same = Failure(2, 1.4, 1.4, remote("boom", 1.4))
    assert root_cause([closed, same, cause]) == (cause, [same])
    assert root_cause([closed]) == (closed, [])
    died = Failure(1, 2.0, 2.0, exit_code=-9)
    assert root_cause([closed, died])[0] is died


@pytest.mark.parametrize(
    ("text", "consequence"),
    [
        ("[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:2525", True),
        (
            "[../third_party/gloo/gloo/transport/tcp/pair.cc:534] Read error [127.0.0.1]:9: Connection reset by peer",
            True,
        ),
        ("[../third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 5000ms for recv", True),
        ("NCCL error: remote process exited or there was a network error, ncclRemoteError", True),
        ("wait timeout after 300000ms, keys: /default_pg/0//cuda//0", True),
        ("mat1 and mat2 shapes cannot be multiplied (2x3 and 5x4)", False),
        ("timed out waiting for the data", False),
    ],
)
def test_errors_that_only_tell_of_a_peer_are_consequences(text: str, consequence: bool) -> None:
    def read(error: Exception) -> bool:
        try:
            raise error
        except Exception as caught:
            return RemoteError.read(caught, None).consequence

    assert read(RuntimeError(text)) is consequence
    assert read(ValueError(text)) is False


def test_an_error_made_out_of_a_consequence_is_one_too() -> None:
    outer = ValueError("training failed")
    outer.__cause__ = RuntimeError("Connection closed by peer [127.0.0.1]:2525")
    assert RemoteError.read(outer, None).consequence


def test_a_stack_names_the_collective_and_the_readers_line() -> None:
    dump = """Thread 0x0000000000000022 (most recent call first):
  File "/x/hybridlab/launch/worker.py", line 190 in _watch

Current thread 0x0000000000000011 (most recent call first):
  File "/v/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py", line 3000 in all_reduce
  File "/v/lib/python3.11/site-packages/torch/distributed/c10d_logger.py", line 83 in wrapper
  File "/home/u/train.py", line 7 in step
"""
    assert parse(dump, 0x11) == Doing("all_reduce", Frame("/home/u/train.py", 7, "step"))
    assert parse("", 0x11) is None


def test_when_all_wait_in_collectives_the_odd_one_is_named() -> None:
    here, there = Frame("a.py", 1, "f"), Frame("a.py", 2, "f")
    waiting = {0: Doing("all_reduce", here), 1: Doing("all_reduce", here), 2: Doing("barrier", there)}
    error = stuck(waiting, [], 5, {2: {"pp": 0, "dp": 1, "tp": 0}})
    assert error.rank == 2
    assert "rank 2 (pp 0, dp 1, tp 0) gave no answer within 5 s: all ranks wait in collectives" in str(error)
    assert "ranks 0, 1 in all_reduce" in str(error)


def test_exit_codes_in_words() -> None:
    assert exit_reason(0) == "exit code 0"
    assert exit_reason(-signal.SIGTERM) == "killed by SIGTERM"
    assert "SIGABRT" in str(failed([Failure(0, 0.0, 0.0, exit_code=-signal.SIGABRT)], {}, {}))
