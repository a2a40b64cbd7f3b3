"""However a run ends, nothing is left: no process, no descriptor, no forkserver."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from hybridlab.errors import UserError
from hybridlab.launch import Cluster, RankError, state
from tests.launch.support import alive, driver, eventually


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def reduce() -> float:
    value = torch.ones(1)
    dist.all_reduce(value)
    return value.item()


def fail() -> None:
    raise ValueError


def test_a_killed_driver_leaves_nothing_whatever_its_ranks_are_doing(tmp_path: Path) -> None:
    """Blocked in gloo, stopped, holding the interpreter lock in C, asleep in a process of their own making."""
    script = """
        import os, re, signal, subprocess, threading, time
        import torch, torch.distributed as dist
        from hybridlab.launch import Cluster

        def block():
            rank = dist.get_rank()
            if rank == 0:
                subprocess.run(["sleep", "600"])
            elif rank == 1:
                os.kill(os.getpid(), signal.SIGSTOP)
            elif rank == 2:
                re.match("(a+)+$", "a" * 60 + "b")
            dist.all_reduce(torch.ones(1))

        cluster = Cluster(5)
        cluster.start()
        threading.Timer(1.0, lambda: print("blocked", flush=True)).start()
        cluster.run(block)
    """
    with driver(script, tmp_path) as running:
        running.line("blocked")
        held = running.survivors()
        assert len(held) >= 8  # driver, its forkserver, five ranks, the rank's own process
        assert any("forkserver" in command for command in held.values())
        assert any("sleep" in command for command in held.values())
        running.process.kill()
        assert running.leaves_nothing(), running.survivors()


FAULTS = """
    import os, random, signal, sys, threading, time
    import torch, torch.distributed as dist
    from hybridlab.launch import Cluster, RankError
    from tests.launch.support import TAG, eventually, tagged

    def work(kind, victim, after):
        for step in range(10_000):
            if dist.get_rank() == victim and step == after:
                if kind == "raise":
                    raise ValueError("planted")
                if kind == "stick":
                    while True:
                        time.sleep(0.01)
                if kind == "exit":
                    os._exit(7)
            value = torch.ones(1000)
            dist.all_reduce(value)

    def ranks():  # this process is the driver; what mentions the forkserver's module was forked from it
        return [pid for pid, command in tagged(os.environ[TAG]).items()
                if pid != os.getpid() and os.getsid(pid) == pid]

    dice = random.Random(int(sys.argv[1]) if len(sys.argv) > 1 else 20260)
    cluster = Cluster(4, output="quiet")
    for kind in ["raise", "kill", "interrupt", "exit", "raise", "stick", "kill", "interrupt"]:
        victim, after = dice.randrange(4), dice.randrange(100)
        cluster.start()
        pids = cluster.pids
        assert sorted(pids) == sorted(ranks()), (pids, ranks())
        delay = dice.uniform(0.0, 0.15)
        if kind == "kill":
            threading.Timer(delay, os.kill, (pids[victim], signal.SIGKILL)).start()
        if kind == "interrupt":
            threading.Timer(delay, os.kill, (os.getpid(), signal.SIGINT)).start()
        try:
            cluster.run(work, kind, victim, after, timeout=1.5 if kind == "stick" else 60.0)
        except (RankError, KeyboardInterrupt) as error:
            told = "interrupt" if isinstance(error, KeyboardInterrupt) else f"{error.kind} {error.rank}"
        wanted = {"raise": f"exception {victim}", "kill": f"died {victim}", "exit": f"died {victim}",
                  "stick": f"stuck {victim}", "interrupt": "interrupt"}[kind]
        clean = kind == "interrupt" or eventually(lambda: not ranks(), 10)
        print("case", kind, "ok" if told == wanted and clean else f"told {told}, wanted {wanted}, clean {clean}",
              flush=True)
    cluster.close()
    print("left", ranks(), flush=True)
"""


def test_faults_at_random_points_are_named_and_cleaned_up(tmp_path: Path) -> None:
    with driver(FAULTS, tmp_path, PYTHONPATH=str(Path(__file__).parents[2])) as running:
        text = running.rest()
        cases = [line.split(maxsplit=2) for line in text.splitlines() if line.startswith("case")]
        assert [(kind, verdict) for _, kind, verdict in cases] == [
            (kind, "ok") for kind in ["raise", "kill", "interrupt", "exit", "raise", "stick", "kill", "interrupt"]
        ], text
        assert "left []" in text
        assert running.process.returncode == 0
        assert running.leaves_nothing(), running.survivors()


def test_an_interrupt_of_python_code_keeps_the_ranks_and_what_they_hold() -> None:
    def keep() -> None:
        state.kept = dist.get_rank()

    def spin() -> None:
        stale = dist.isend(torch.full((1,), 99.0), (dist.get_rank() + 1) % 2)  # a message that nobody takes
        while True:
            time.sleep(0.01)
            assert stale

    def shift() -> float:
        mine, theirs = torch.full((1,), float(dist.get_rank())), torch.zeros(1)
        sent = dist.isend(mine, 1 - dist.get_rank())
        dist.recv(theirs, 1 - dist.get_rank())
        sent.wait()
        return theirs.item()

    with Cluster(2, timeout=30) as cluster:
        cluster.run(keep)
        pids = cluster.pids
        threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
        with pytest.raises(KeyboardInterrupt, match="keep their variables"):
            cluster.run(spin)
        assert cluster.run(shift) == [1.0, 0.0]  # the stale message is gone with the old group
        assert cluster.run(lambda: state.kept) == [0, 1]
        assert cluster.pids == pids


def test_an_interrupt_of_ranks_in_a_collective_replaces_them() -> None:
    def block() -> None:
        if dist.get_rank() == 0:
            time.sleep(30)
        reduce()

    with Cluster(3, timeout=30) as cluster:
        cluster.start()
        pids = cluster.pids
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
        with pytest.raises(KeyboardInterrupt):
            cluster.run(block)
        assert eventually(lambda: not any(map(alive, pids)), 10)
        assert cluster.run(reduce) == [3.0] * 3


def test_a_rank_that_will_not_be_interrupted_is_killed() -> None:
    def deaf() -> None:
        while True:
            with contextlib.suppress(KeyboardInterrupt):
                time.sleep(30)

    with Cluster(2, timeout=30) as cluster:
        cluster.start()
        pids = cluster.pids
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
        with pytest.raises(KeyboardInterrupt):
            cluster.run(deaf)
        assert eventually(lambda: not any(map(alive, pids)), 10)


def test_another_thread_can_interrupt_a_call() -> None:
    with Cluster(2, timeout=30) as cluster:
        cluster.start()
        cluster.interrupt()  # nothing is running: nothing happens
        threading.Timer(0.3, cluster.interrupt).start()
        with pytest.raises(KeyboardInterrupt):
            cluster.run(time.sleep, 20)
        assert cluster.run(reduce) == [2.0] * 2


def test_twenty_restarts_leave_no_process_and_no_descriptor() -> None:
    with Cluster(2, timeout=30, output="quiet") as cluster:
        cluster.run(reduce)
        with pytest.raises(RankError):
            cluster.run(fail)
        before, seen = descriptors(), set()
        for _ in range(20):
            assert cluster.run(reduce) == [2.0] * 2
            seen.update(cluster.pids)
            with pytest.raises(RankError):
                cluster.run(fail)
        assert descriptors() == before
        assert len(seen) == 40
        assert not any(map(alive, seen))


def test_a_closed_cluster_leaves_nothing_and_stays_closed() -> None:
    with Cluster(2) as warm:
        warm.start()
    before = descriptors()
    cluster = Cluster(3)
    cluster.run(reduce)
    pids = cluster.pids
    cluster.close()
    cluster.close()
    assert not any(map(alive, pids))
    assert descriptors() == before
    with pytest.raises(UserError, match="closed"):
        cluster.run(reduce)


def test_a_forgotten_cluster_ends_its_ranks() -> None:
    cluster = Cluster(2)
    cluster.start()
    pids = cluster.pids
    del cluster
    gc.collect()
    assert eventually(lambda: not any(map(alive, pids)), 10)


def test_processes_that_a_rank_started_end_with_it() -> None:
    def start_a_sleeper() -> int:
        import subprocess

        return subprocess.Popen(["sleep", "600"]).pid

    def die() -> None:
        if dist.get_rank() == 0:
            os._exit(1)
        reduce()

    with Cluster(2, output="quiet") as cluster:
        sleepers = cluster.run(start_a_sleeper)
        assert all(map(alive, sleepers))
        with pytest.raises(RankError):
            cluster.run(die)
        assert eventually(lambda: not any(map(alive, sleepers)), 10)
        sleepers = cluster.run(start_a_sleeper)
    assert eventually(lambda: not any(map(alive, sleepers)), 10)


def test_a_fork_of_the_driver_neither_holds_the_ranks_alive_nor_ends_them() -> None:
    with Cluster(2, timeout=30) as cluster:
        cluster.start()
        assert cluster._team is not None
        lifelines = {os.fstat(link.lifeline.fileno()).st_ino for link in cluster._team._links}
        assert len(lifelines & pipes_held()) == 2
        child = os.fork()
        if child == 0:
            code = 9
            try:
                held = lifelines & pipes_held()
                cluster.close()  # not its own: nothing happens
                try:
                    cluster.run(reduce)
                except UserError as error:
                    code = 0 if not held and "the process that made it" in str(error) else 1
            finally:
                os._exit(code)
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == 0
        assert cluster.run(reduce) == [2.0] * 2


def pipes_held() -> set[int]:
    """Inodes of all descriptors of this process."""
    found = set()
    for fd in range(3, 1024):
        with contextlib.suppress(OSError):
            found.add(os.fstat(fd).st_ino)
    return found
