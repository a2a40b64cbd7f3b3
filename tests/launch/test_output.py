"""What ranks print is labelled, complete, and in the order that was asked for."""

from __future__ import annotations

import os
import time

import pytest
import torch.distributed as dist

from hybridlab.launch import Cluster, RankError
from hybridlab.launch.output import Printer


def talk() -> None:
    rank = dist.get_rank()
    time.sleep(0.05 * (2 - rank))  # the last rank speaks first
    print(f"one {rank}")
    os.system("echo from a child process")
    os.write(2, b"from C\n")
    print("é no newline", end="")


EXPECTED = [
    f"[{rank}] {text}"
    for rank in range(3)
    for text in (f"one {rank}", "from a child process", "from C", "é no newline")
]


@pytest.mark.parametrize("mode", ["live", "ordered", "quiet"])
def test_output_by_mode(mode: str, capsys: pytest.CaptureFixture[str]) -> None:
    with Cluster(3, output=mode) as cluster:  # type: ignore[arg-type]
        cluster.run(talk)
        first = capsys.readouterr().out.splitlines()
        cluster.run(talk)
        second = capsys.readouterr().out.splitlines()
    assert first == second if mode != "live" else sorted(first) == sorted(second)
    if mode == "ordered":
        assert first == EXPECTED
    elif mode == "live":
        assert sorted(first) == sorted(EXPECTED)
        assert first.index("[2] one 2") < first.index("[0] one 0")
    else:
        assert first == []


def test_a_flood_of_output_neither_blocks_nor_is_lost(capsys: pytest.CaptureFixture[str]) -> None:
    def flood() -> int:
        for line in range(9000):
            print(f"line {line:04d}", "x" * 40)
        return dist.get_rank()

    with Cluster(2, output="ordered") as cluster:
        assert cluster.run(flood) == [0, 1]
    lines = capsys.readouterr().out.splitlines()
    assert [line[: len("[0] line 0000")] for line in lines] == [
        f"[{rank}] line {line:04d}" for rank in range(2) for line in range(9000)
    ]


def test_what_was_printed_before_an_error_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    def fail() -> None:
        print(f"before {dist.get_rank()}")
        raise ValueError

    with Cluster(2, output="ordered") as cluster, pytest.raises(RankError):
        cluster.run(fail)
    assert capsys.readouterr().out.splitlines() == ["[0] before 0", "[1] before 1"]


def test_output_between_calls_is_kept_for_the_next(capsys: pytest.CaptureFixture[str]) -> None:
    def later() -> None:
        import threading

        threading.Timer(0.1, print, ("late",)).start()

    with Cluster(1) as cluster:
        cluster.run(later)
        time.sleep(0.4)
        assert capsys.readouterr().out == ""
        cluster.run(dist.get_rank)
        assert capsys.readouterr().out == "[0] late\n"


def test_lines_are_cut_and_counted(capsys: pytest.CaptureFixture[str]) -> None:
    printer = Printer("ordered", 1)
    printer.feed(0, b"10%\r50%\r100%\n" + b"x" * 70_000)
    printer.feed(0, b"\xff\n" * 10_050)
    printer.finish()
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "[0] 100%"
    assert lines[1] == f"[0] {'x' * 70_000}"
    assert lines[2] == "[0] \N{REPLACEMENT CHARACTER}"
    assert len(lines) == 10_001
    assert lines[-1] == "[0] … 52 more lines left out"
