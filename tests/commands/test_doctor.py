"""`hybridlab doctor` on the machine that runs the tests, and on one that cannot train."""

from __future__ import annotations

import json

import pytest
import torch
import typer
from typer.testing import CliRunner

from hybridlab.commands.doctor import doctor
from hybridlab.launch import machine

APP = typer.Typer()
APP.command()(doctor)


def test_this_machine_can_train(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[machine.Facts] = []
    inspect = machine.inspect
    monkeypatch.setattr(machine, "inspect", lambda: asked.append(inspect()) or asked[-1])
    result = CliRunner().invoke(APP, ["--json"])
    told = json.loads(result.stdout)
    assert (told["ok"], result.exit_code) == (True, 0), told["problems"]
    assert told["torch"]["version"] == torch.__version__
    assert set(told["cluster"]["start_seconds"]) == {"2", "8"}
    assert told["cluster"]["error"] is None
    assert told["cluster"]["preloaded"]
    assert "plotly" in told["extras"]["lab"]
    assert told["extras"]["dev"]["pytest"] == pytest.__version__

    monkeypatch.setattr(machine, "inspect", lambda: asked[0])  # for people, from the same facts
    shown = CliRunner().invoke(APP, [])
    assert shown.exit_code == 0
    assert "Training can run here." in shown.stdout
    assert "extra lab" in shown.stdout

    monkeypatch.setattr(machine, "inspect", lambda: {**asked[0], "cluster": {**asked[0]["cluster"], "error": "no"}})
    broken = CliRunner().invoke(APP, [])
    assert broken.exit_code == 1
    assert "Training cannot run here yet." in broken.stdout
    assert "Fix: the loopback interface" in broken.stdout.replace("\n", " ")


def test_ranks_that_cannot_start_are_a_fact_not_a_crash(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HYBRIDLAB_START_METHOD", "fork")
    facts = machine.try_ranks("gloo", (2,))
    assert "forkserver or spawn" in facts["error"]
    assert facts["start_seconds"] == {}
