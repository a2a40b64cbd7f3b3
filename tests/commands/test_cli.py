"""The command line as a person and as a program meet it: text, JSON, exit codes, one line for a mistake."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hybridlab import cli
from hybridlab.report import CATEGORIES
from tests.launch.support import driver

CHAPTER = str(Path(__file__).parent.parent.parent / "labs" / "chapter" / "ds_config.json")
COMMANDS = ("train", "explain", "verify", "rehearse", "timeline", "doctor", "schema")


@pytest.fixture
def small(tmp_path: Path) -> str:
    """Two stages, two replicas, ZeRO-2 with offload: 4 ranks."""
    path = tmp_path / "ds_config.json"
    path.write_text(
        json.dumps(
            {
                "train_batch_size": 8,
                "train_micro_batch_size_per_gpu": 1,
                "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
                "pipeline_parallel": {"pp_size": 2},
                "hybridlab": {"sequence_length": 32},
            }
        )
    )
    return str(path)


def run(capsys: Any, *arguments: str) -> tuple[int, str, str]:
    """Exit code, stdout, stderr."""
    capsys.readouterr()
    code = cli.run(arguments)
    return code, *capsys.readouterr()


@pytest.mark.parametrize("command", COMMANDS)
def test_help_has_an_example(command: str, capsys: Any) -> None:
    code, text, _ = run(capsys, command, "--help")
    assert code == 0
    assert "Example" in text or command in ("schema",)
    assert "--json" in text or command in ("schema",)


def test_train_prints_one_object(small: str, tmp_path: Path, capsys: Any) -> None:
    out = tmp_path / "out"
    code, text, _ = run(
        capsys, "train", small, "--model", "tiny-llama", "--ranks", "4", "--steps", "4", "--out", str(out), "--json"
    )
    assert code == 0
    found = json.loads(text)
    assert found["source"] == "measured"
    assert [rank["rank"] for rank in found["ranks"]] == [0, 1, 2, 3]
    for rank in found["ranks"]:
        assert set(rank["coords"]) == {"pp", "dp", "tp"}
        assert set(rank["at_peak"]) == set(CATEGORIES)
        assert sum(rank["at_peak"].values()) == rank["peak_bytes"] > 0
        assert rank["host_peak_bytes"] > 0
        assert set(rank["traffic"]) == {"dp", "pp", "host"}
        assert all(set(sent) == {"messages", "message_bytes", "ring_bytes"} for sent in rank["traffic"].values())
    losses = [step["loss"] for step in found["steps"]]
    assert len(losses) == 4
    assert losses[-1] < losses[0]
    assert found["resolved"]["pp"] == 2
    (forecast,) = found["forecasts"]
    assert forecast["source"] == "rehearsal"
    for ours, theirs in zip(forecast["ranks"], found["ranks"], strict=True):
        assert ours["at_peak"] == theirs["at_peak"]
        assert ours["traffic"] == theirs["traffic"]
    assert json.loads((out / "report.json").read_text())["steps"] == found["steps"]
    assert "What each rank holds" in (out / "report.html").read_text()


def test_train_tells_people(small: str, capsys: Any) -> None:
    code, text, _ = run(capsys, "train", small, "--model", "tiny-gpt2", "--ranks", "4", "--steps", "2")
    assert code == 0
    for words in ("step 2/2", "What each rank holds", "What each rank sends", "rehearsal | measured", "Loss "):
        assert words in text


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--ranks", "3"], "does not divide the 3 ranks"),
        (["--model", "tiny-lama"], "tiny-llama"),
        (["--steps", "0"], "--steps"),
        (["--data", "/no/such/text"], "there is no /no/such/text"),
        (["--out", "/proc/none"], "cannot be written"),
        (["--set", "seed"], "KEY=VALUE"),
        (["--stps", "3"], "--steps"),
    ],
    ids=str,
)
def test_a_mistake_gives_a_line_and_exit_2(arguments: list[str], words: str, small: str, capsys: Any) -> None:
    given = [] if "--ranks" in arguments else ["--ranks", "4"]
    code, text, error = run(capsys, "train", small, *given, *arguments)
    assert code == 2
    assert text == ""
    assert words in error
    assert "Traceback" not in error
    assert len(error.strip().splitlines()) <= 4


def test_a_mistake_in_json(small: str, capsys: Any) -> None:
    code, text, _ = run(capsys, "train", small, "--ranks", "3", "--json")
    assert code == 2
    (error,) = json.loads(text)["errors"]
    assert set(error) == {"key", "value", "rule", "fix"}


def test_verify_says_yes(small: str, capsys: Any) -> None:
    code, text, _ = run(capsys, "verify", small, "--model", "tiny-llama", "--ranks", "4", "--steps", "1", "--json")
    found = json.loads(text)
    assert code == 0
    assert found["passed"] is True
    assert {"loss", "grad_norm", "weights"} <= set(found["max_rel_diff"])
    assert max(found["max_rel_diff"].values()) <= found["tolerance"] == 1e-9


def test_verify_says_no(small: str, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reference of another seed is another program."""
    import hybridlab.verify

    original = hybridlab.verify.train_reference

    def other(config: Any, *arguments: Any, **named: Any) -> Any:
        from dataclasses import replace

        return original(replace(config, gradient_clipping=0.01), *arguments, **named)

    monkeypatch.setattr(hybridlab.verify, "train_reference", other)
    code, text, _ = run(capsys, "verify", small, "--model", "tiny-llama", "--ranks", "4", "--steps", "1")
    assert code == 1
    assert "Not the same program" in text


def test_rehearse_13b_beside_a_card(capsys: Any) -> None:
    """The chapter's case, with few micro-batches to keep it short."""
    arguments = ["rehearse", CHAPTER, "--model", "tiny-llama", "--json"]
    code, text, _ = run(capsys, *arguments, "--gpu-memory", "2GiB")
    found = json.loads(text)
    assert (code, found["fits"], found["source"], len(found["ranks"])) == (0, True, "rehearsal", 8)
    code, text, _ = run(capsys, *arguments, "--gpu-memory", "801MiB")
    assert (code, json.loads(text)["fits"]) == (1, False)
    code, _, error = run(capsys, *arguments[:-1], "--gpu-memory", "80G")
    assert code == 2
    assert "80GiB" in error


def test_an_unknown_command_names_the_nearest(capsys: Any) -> None:
    code, _, error = run(capsys, "trian")
    assert code == 2
    assert "train" in error


def test_explain_and_schema_need_no_torch() -> None:
    script = (
        "import sys; from hybridlab import cli; "
        f"assert cli.run(['explain', {CHAPTER!r}, '--json']) == 0; assert cli.run(['schema']) == 0; "
        "assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_an_interrupt_ends_training_and_leaves_nothing(small: str, tmp_path: Path) -> None:
    script = f"""
        import sys
        from hybridlab.cli import run
        if __name__ == "__main__":
            sys.exit(run(["train", {small!r}, "--model", "tiny-llama", "--ranks", "4", "--steps", "100000"]))
    """
    with driver(script, tmp_path, PYTHONUNBUFFERED="1") as running:
        running.line("step      2/100000")
        running.process.send_signal(signal.SIGINT)
        text = running.rest()
        assert running.process.returncode == 130
        assert "Interrupted" in text
        assert "Traceback" not in text
        assert running.leaves_nothing()


def test_under_torchrun(small: str) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    arguments = ["-m", "hybridlab", "train", small, "--model", "tiny-llama", "--steps", "2", "--json"]
    done = subprocess.run([*command, *arguments], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert [rank["rank"] for rank in found["ranks"]] == [0, 1]
    assert len(found["steps"]) == 2
