"""The same worker function under torchrun."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch.distributed as dist

from hybridlab.errors import UserError
from hybridlab.launch import Cluster, join_torchrun, launch, under_torchrun
from tests.launch.support import driver

VARIABLES = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29999"}


@pytest.fixture
def torchrun_variables(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name, value in VARIABLES.items():
        monkeypatch.setenv(name, value)
    return monkeypatch


def test_one_worker_function_for_both(tmp_path: Path) -> None:
    """Under a real torchrun: results, a number of ranks that does not fit, and an error that ends both processes."""
    script = """
        import sys
        import torch, torch.distributed as dist
        from hybridlab.errors import UserError
        from hybridlab.launch import Cluster, current, launch, report, under_torchrun

        def work(x, fail=False):
            value = torch.tensor([x + dist.get_rank()])
            dist.all_reduce(value)
            report(value.item())
            if fail and dist.get_rank() == 1:
                raise ValueError("planted")
            if fail:
                dist.barrier()
            return value.item()

        assert under_torchrun()
        result = launch(work, 10, on_report=lambda rank, value: print(f"\\nreport {rank} {value}", flush=True))
        print(f"\\nresult {current().rank} of {current().world}: {result}", flush=True)
        for build in (lambda: launch(work, 1, ranks=3), lambda: Cluster(2)):
            try:
                build()
            except UserError as error:
                print(f"\\nrefused {error}", flush=True)
        launch(work, 1, fail=True)
        print("not reached")
    """
    arguments = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    with driver(script, tmp_path, *arguments) as running:
        text = running.rest()
        lines = set(text.splitlines())
        assert {"result 0 of 2: [21]", "result 1 of 2: [21]", "report 0 21", "report 1 21"} <= lines, text
        assert text.count("refused ranks: 3 ranks were asked for, and torchrun has started 2.") == 2
        assert text.count("refused torchrun has started the ranks already.") == 2
        assert text.count("rank 1 raised ValueError: planted") == 1
        assert text.count('raise ValueError("planted")') == 1
        assert "rank 0 raised" not in text  # it only lost its peer
        assert "not reached" not in text
        assert running.process.returncode != 0
        assert running.leaves_nothing(), running.survivors()


def test_without_torchrun_launch_starts_ranks() -> None:
    def square(x: int) -> int:
        return x * dist.get_rank()

    assert not under_torchrun()
    assert launch(square, 3, ranks=2) == [0, 3]


def test_numbers_that_differ_are_both_named(torchrun_variables: pytest.MonkeyPatch) -> None:
    assert under_torchrun()
    with pytest.raises(UserError, match="8 ranks were asked for, and torchrun has started 2"):
        launch(print, ranks=8)
    with pytest.raises(UserError, match="torchrun has started the ranks already"):
        Cluster(2)


def test_a_malformed_variable_is_named(torchrun_variables: pytest.MonkeyPatch) -> None:
    torchrun_variables.setenv("WORLD_SIZE", "two")
    with pytest.raises(UserError, match="WORLD_SIZE to a whole number; it is 'two'"):
        join_torchrun()


def test_torchrun_without_all_of_its_variables_is_told_which(torchrun_variables: pytest.MonkeyPatch) -> None:
    torchrun_variables.setenv("TORCHELASTIC_RUN_ID", "1")
    torchrun_variables.delenv("RANK")
    assert not under_torchrun()
    with pytest.raises(UserError, match="RANK is not set"):
        launch(print)


def test_ranks_of_a_cluster_are_not_taken_for_torchruns() -> None:
    with Cluster(1) as cluster:
        assert cluster.run(under_torchrun) == [False]
