"""A shape from whatever the user gives for ``--model``: a preset's name, a ``config.json`` or its folder."""

from __future__ import annotations

import difflib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hybridlab.errors import UserError
from hybridlab.shapes.huggingface import shape_of_config
from hybridlab.shapes.presets import PRESETS
from hybridlab.shapes.shape import ModelShape


def load_shape(model: str | os.PathLike[str] | Mapping[str, Any] | ModelShape) -> ModelShape:
    """The shape of a model.

    Args:
        model: a name from `PRESETS` (in any case), the path of a Hugging Face style ``config.json`` or of a folder
            that holds one, such a configuration as a dictionary, or a shape, which is returned as it is.

    Raises:
        UserError: no such name or file, not JSON, a family or a feature that is not known, sizes that do not fit.
    """
    if isinstance(model, ModelShape):
        return model
    if isinstance(model, Mapping):
        return shape_of_config(model)
    given = os.fspath(model)
    preset = PRESETS.get(given.lower())
    if preset is not None:
        return preset
    path = Path(given).expanduser()
    if path.is_dir():
        path = path / "config.json"
    if path.is_file():
        return _read(path)
    if os.sep in given or "/" in given or given.endswith(".json"):
        raise UserError(
            f"there is no file {path}.", key="--model", value=given, fix="the path of a config.json, or of its folder"
        )
    close = difflib.get_close_matches(given.lower(), PRESETS, n=3, cutoff=0.5)
    raise UserError(
        f"no model is called {given!r}.",
        key="--model",
        value=given,
        fix=f"did you mean {' or '.join(close)}?" if close else "one of " + ", ".join(PRESETS) + ", or a config.json",
    )


def _read(path: Path) -> ModelShape:
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{path} is not JSON: {error}.", key="--model", value=str(path)) from None
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}.", key="--model", value=str(path)) from None
    if not isinstance(config, dict):
        raise UserError(
            f"{path} holds a {type(config).__name__}, a model's configuration is an object.",
            key="--model",
            value=str(path),
        )
    name = path.parent.resolve().name if path.name == "config.json" else path.stem
    return shape_of_config(config, name=name)
