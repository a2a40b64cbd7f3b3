"""Configs with a mistake, and the line that each must give: the key, the rule with its numbers, the nearest fix."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hybridlab.config import resolve
from hybridlab.errors import UserError, UserErrors
from hybridlab.shapes import PRESETS

CASES: list[dict[str, Any]] = json.loads((Path(__file__).parent.parent / "data" / "wrong_configs.json").read_text())


def mistakes(source: Path, ranks: int, model: str | None = None) -> list[str]:
    with pytest.raises(UserError) as caught:
        resolve(source, world=ranks, shape=PRESETS[model] if model else None)
    errors = caught.value.errors if isinstance(caught.value, UserErrors) else (caught.value,)
    return [str(error).replace(str(source), "FILE") for error in errors]


def test_there_are_sixty() -> None:
    assert len(CASES) >= 60
    assert len({case["config"] for case in CASES}) >= 60


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["config"][:80])
def test_the_line_it_gives(case: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "ds_config.json"
    path.write_text(case["config"])
    found = mistakes(path, case["ranks"], case["model"])
    assert found == case["errors"]
    assert all("\n" not in line and "Fix: " in line for line in found)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    for path, words in (
        (tmp_path / "none.json", "there is no file"),
        (tmp_path, "Is a directory"),
    ):
        (line,) = mistakes(path, 8)
        assert words in line
    binary = tmp_path / "binary.json"
    binary.write_bytes(b'{"train_batch_size": 8, "_comment": "\xff\xfe"}')
    (line,) = mistakes(binary, 8)
    assert "UTF-8" in line
    deep = tmp_path / "deep.json"
    deep.write_text('{"a": ' * 3000)
    (line,) = mistakes(deep, 8)
    assert "nested too deeply" in line


def test_a_byte_order_mark_is_no_mistake(tmp_path: Path) -> None:
    path = tmp_path / "ds_config.json"
    path.write_bytes(b"\xef\xbb\xbf" + b'{"train_batch_size": 8}')
    assert resolve(path, world=8).train_batch_size == 8
