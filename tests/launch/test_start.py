"""Ranks start from wherever they are asked for: scripts, threads, odd directories, without a forkserver."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

import hybridlab.launch.cluster as cluster_module
from hybridlab.errors import UserError
from hybridlab.launch import Cluster, RankError, rendezvous, warm_up
from hybridlab.launch.processes import start_method
from hybridlab.launch.rendezvous import choose_backend, open_store
from tests.launch.support import alive, driver, eventually


def rank_and_world() -> tuple[int, int]:
    dist.barrier()
    return dist.get_rank(), dist.get_world_size()


def test_a_script_without_a_main_guard_runs_in_any_folder_and_ctrl_c_ends_it(tmp_path: Path) -> None:
    """The folder holds a file that hides a module of the standard library; the interrupt goes to the whole process
    group, as a terminal sends it."""
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "random.py").write_text("raise SystemExit('the wrong random')\n")
    script = """
        import os, time
        os.chdir("elsewhere")
        from hybridlab.launch import Cluster

        print("script runs", flush=True)
        cluster = Cluster(2)
        print("sum", sum(cluster.run(lambda x: x + os.getpid() * 0, 21)), flush=True)

        def wait():
            print("waiting", flush=True)
            time.sleep(60)

        cluster.run(wait)
    """
    with driver(script, tmp_path) as running:
        assert running.line("sum") == "42"
        assert running.line("[0] waiting") == ""
        os.killpg(running.process.pid, signal.SIGINT)
        text = running.rest()
        assert "KeyboardInterrupt" in text
        assert running.process.returncode != 0
        assert "".join(running.seen).count("script runs") == 1
        assert "wrong random" not in text
        assert running.leaves_nothing(), running.survivors()


def test_ranks_can_be_spawned_where_there_is_no_forkserver(tmp_path: Path) -> None:
    script = """
        import torch.distributed as dist
        from hybridlab.launch import Cluster, RankError

        def work(fail):
            if fail and dist.get_rank() == 1:
                raise ValueError("planted")
            dist.barrier()
            return dist.get_rank()

        cluster = Cluster(2)
        print("ranks", cluster.run(work, False), flush=True)
        try:
            cluster.run(work, True)
        except RankError as error:
            print("error", error, flush=True)
    """
    with driver(script, tmp_path, HYBRIDLAB_START_METHOD="spawn") as running:
        assert running.line("ranks") == "[0, 1]"
        assert running.line("error") == "rank 1 raised ValueError: planted"
        running.rest()
        assert running.process.returncode == 0
        assert running.leaves_nothing(), running.survivors()


@pytest.fixture
def deaf_store(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The ranks' rendezvous takes their connections and never answers: no rank gets past its start."""
    with socket.create_server(("127.0.0.1", 0), backlog=64) as listener:
        monkeypatch.setattr(rendezvous, "open_store", lambda: SimpleNamespace(port=listener.getsockname()[1]))
        yield


def test_a_worker_killed_while_starting_is_named(deaf_store: None) -> None:
    cluster = Cluster(4, output="quiet")
    with ThreadPoolExecutor(1) as pool:
        starting = pool.submit(cluster.start)
        assert eventually(lambda: len(cluster.pids) == 4, 20)
        pids = cluster.pids
        os.kill(pids[2], signal.SIGKILL)
        with pytest.raises(RankError, match=r"rank 2 died while starting: killed by SIGKILL"):
            starting.result(30)
    assert eventually(lambda: not any(map(alive, pids)), 10)
    cluster.close()


def test_ranks_that_do_not_start_are_named_at_the_deadline(deaf_store: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster_module, "START_SECONDS", 1.5)
    cluster = Cluster(3, output="quiet")
    with ThreadPoolExecutor(1) as pool:
        starting = pool.submit(cluster.start)
        assert eventually(lambda: len(cluster.pids) == 3, 20)
        os.kill(cluster.pids[1], signal.SIGSTOP)
        with pytest.raises(RankError, match=r"rank 1 gave no answer within 1.5 s.* while starting") as caught:
            starting.result(30)
    assert caught.value.kind == "stuck"
    cluster.close()


def test_clusters_run_side_by_side() -> None:
    with Cluster(2) as small, Cluster(3) as large, ThreadPoolExecutor(2) as pool:
        runs = [pool.submit(cluster.run, rank_and_world) for cluster in (small, large)]
        assert [run.result(60) for run in runs] == [[(0, 2), (1, 2)], [(0, 3), (1, 3), (2, 3)]]


def test_a_second_call_while_one_runs_is_told_to_wait() -> None:
    with Cluster(2) as cluster:
        cluster.start()
        thread = threading.Thread(target=cluster.run, args=(time.sleep, 1.0))
        thread.start()
        assert eventually(cluster._lock.locked, 5)
        with pytest.raises(UserError, match="busy with another call"):
            cluster.run(rank_and_world)
        with pytest.raises(UserError, match="busy with another call"):
            cluster.close()
        thread.join()
        assert len(cluster.run(rank_and_world)) == 2


def test_a_rank_cannot_start_ranks() -> None:
    def nest() -> None:
        with Cluster(2) as inner:
            inner.run(rank_and_world)

    with Cluster(2) as cluster, pytest.raises(UserError, match="a rank cannot start ranks of its own"):
        cluster.run(nest)


def test_no_signal_handler_is_changed_and_a_thread_may_use_a_cluster() -> None:
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD)]
    results: list = []

    def use() -> None:
        with Cluster(2) as cluster:
            results.extend(cluster.run(rank_and_world))

    thread = threading.Thread(target=use)
    thread.start()
    thread.join()
    assert results == [(0, 2), (1, 2)]
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD)] == before


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"ranks": 0}, "ranks must be a whole number from 1 to 128, not 0"),
        ({"ranks": 129}, "from 1 to 128, not 129"),
        ({"ranks": 2.0}, "not 2.0"),
        ({"ranks": True}, "not True"),
        ({"ranks": 2, "timeout": 0}, "timeout must be a number of seconds above 0, not 0"),
        ({"ranks": 2, "timeout": float("nan")}, "not nan"),
        ({"ranks": 2, "timeout": "1m"}, "not '1m'"),
        ({"ranks": 2, "threads": 0}, "threads must be"),
        ({"ranks": 2, "output": "loud"}, "live, ordered or quiet"),
        ({"ranks": 2, "backend": "mpi"}, "nccl or gloo"),
    ],
)
def test_arguments_out_of_range_are_refused_at_once(arguments: dict, words: str) -> None:
    with pytest.raises(UserError, match=words):
        Cluster(**arguments)


def test_nccl_needs_a_gpu_for_each_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    assert choose_backend(2, None) == choose_backend(2, "nccl") == "nccl"
    assert choose_backend(3, None) == choose_backend(2, "gloo") == "gloo"
    with pytest.raises(UserError, match="3 ranks were asked for and 2 GPUs are usable"):
        choose_backend(3, "nccl")


def test_the_store_listens_on_this_machine_only() -> None:
    store = open_store()
    port = f"{store.port:04X}"
    listening = [
        line.split()[1]
        for table in ("/proc/net/tcp", "/proc/net/tcp6")
        for line in Path(table).read_text().splitlines()
        if line.split()[3] == "0A" and line.split()[1].endswith(f":{port}")
    ]
    assert listening == [f"0100007F:{port}"]


def test_an_unknown_start_method_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HYBRIDLAB_START_METHOD", "fork")
    with pytest.raises(UserError, match="forkserver or spawn"):
        start_method()


def test_a_forkserver_that_could_not_preload_is_told_of(tmp_path: Path) -> None:
    """As when other code has started multiprocessing's forkserver first."""
    script = """
        import multiprocessing, multiprocessing.forkserver, warnings
        multiprocessing.forkserver.ensure_running()
        from hybridlab.launch import Cluster
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            with Cluster(1) as cluster:
                print("result", cluster.run(lambda: 5), flush=True)
        print("warned", [str(warning.message)[:24] for warning in caught], flush=True)
    """
    with driver(script, tmp_path) as running:
        assert running.line("result") == "[5]"
        assert running.line("warned") == "['ranks start slowly: the ']"
        running.rest()


def test_the_preload_works_here(monkeypatch: pytest.MonkeyPatch) -> None:
    warm_up()
    with Cluster(2) as cluster:
        cluster.start()
        team = cluster._team
        assert team is not None
        assert [hello["preloaded"] for hello in team.hello.values()] == [True, True]


def test_too_few_descriptors_are_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    import resource

    warm_up()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    cluster = Cluster(16)
    before = len(os.listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (before + 40, hard))
    try:
        with pytest.raises(UserError, match="16 ranks need about 144 more open files"):
            cluster.start()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert len(cluster.run(rank_and_world)) == 16
    cluster.close()


def test_a_vanished_current_directory_is_explained(tmp_path: Path) -> None:
    here = Path.cwd()
    gone = tmp_path / "gone"
    gone.mkdir()
    os.chdir(gone)
    gone.rmdir()
    try:
        with Cluster(1) as cluster, pytest.raises(UserError, match="current directory no longer exists"):
            cluster.start()
    finally:
        os.chdir(here)
