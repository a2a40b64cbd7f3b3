"""From a file to a JSON object, with every way a file can be unreadable told in one line."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hybridlab.errors import UserError


@dataclass(frozen=True)
class Source:
    """A configuration as it was given.

    Attributes:
        data: the JSON object.
        name: where it came from, for messages.
        duplicates: dotted paths of keys that stand twice in one object (``data`` has the last value).
    """

    data: dict[str, Any]
    name: str
    duplicates: tuple[str, ...] = ()


class _Object(dict[str, Any]):
    """A JSON object that remembers the keys it was given twice: `json` itself keeps the last and says nothing."""

    twice: tuple[str, ...] = ()


def read(source: Mapping[str, Any] | str | Path) -> Source:
    """Read a config.

    Args:
        source: a mapping, the path of a JSON file, or JSON text (a string that starts with ``{``).

    Raises:
        UserError: no such file, not UTF-8, not JSON (with line and column), not an object.
    """
    if isinstance(source, Mapping):
        return Source(dict(source), "the given config")
    if isinstance(source, str) and source.lstrip().startswith("{"):
        return _parse(source, "the given text")
    path = Path(source)
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except FileNotFoundError:
        raise UserError(f"there is no file {path}.", key=str(path), fix="give the path of a JSON config.") from None
    except UnicodeDecodeError as error:
        raise UserError(
            f"{path} is not UTF-8 text (byte {error.start}).", key=str(path), fix="save it as UTF-8."
        ) from None
    except (OSError, ValueError) as error:  # a directory, no permission, a name with a zero byte
        reason = getattr(error, "strerror", None) or str(error)
        raise UserError(
            f"{str(path)!r} cannot be read: {reason}.", key=str(path), fix="give the path of a JSON config."
        ) from None
    return _parse(text, str(path))


def _parse(text: str, name: str) -> Source:
    if not text.strip():
        raise UserError(f"{name} is empty.", key=name, fix='the smallest config is {"train_batch_size": 8}.')
    try:
        data = json.loads(
            text, object_pairs_hook=_object, parse_constant=_no_constant, parse_float=_finite, parse_int=_integer
        )
    except json.JSONDecodeError as error:
        raise UserError(
            f"{name} is not JSON: {error.msg} at line {error.lineno}, column {error.colno}.",
            key=name,
            fix=_json_hint(error),
        ) from None
    except RecursionError:
        raise UserError(
            f"{name} is nested too deeply to be a config.", key=name, fix="a config has at most four levels."
        ) from None
    except UserError as error:
        raise UserError(f"{name} {error.rule}", key=name, fix=error.fix) from None
    if not isinstance(data, dict):
        raise UserError(
            f"{name} holds {kind(data)}, a config is an object.",
            key=name,
            fix='write {"train_batch_size": 8, ...}.',
        )
    return Source(_plain(data), name, tuple(_duplicates(data)))


def _object(pairs: list[tuple[str, Any]]) -> _Object:
    result = _Object(pairs)
    if len(result) != len(pairs):
        names = [name for name, _ in pairs]
        result.twice = tuple(dict.fromkeys(name for name in names if names.count(name) > 1))
    return result


def _no_constant(word: str) -> Any:
    raise UserError(f"holds {word}, which is not JSON.", fix="a finite number.")


def _finite(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise UserError(f"holds {text}, which no float can hold.", fix="a smaller number.")
    return value


def _integer(text: str) -> int:
    if len(text) > 300:
        raise UserError(f"holds a number of {len(text)} digits.", fix="a smaller number.")
    return int(text)


def _json_hint(error: json.JSONDecodeError) -> str:
    rest = error.doc[error.pos :].lstrip()
    if error.doc[error.pos : error.pos + 2] in ("//", "/*") or rest.startswith("#"):
        return 'JSON has no comments; use a key "_comment".'
    if "trailing comma" in error.msg.lower() or (
        "property name" in error.msg and error.doc[: error.pos].rstrip().endswith(",") and rest.startswith("}")
    ):
        return "remove the comma before it."
    if rest.startswith("'") or "property name" in error.msg:
        return "names stand in double quotes."
    if rest.startswith(("True", "False", "None")):
        return "JSON writes true, false and null in lower case."
    return "mend it there; `python -m json.tool FILE` checks a file."


def _duplicates(node: Any, path: str = "") -> list[str]:
    if isinstance(node, list):
        return [name for i, item in enumerate(node) for name in _duplicates(item, join(path, i))]
    if not isinstance(node, _Object):
        return []
    found = [join(path, key) for key in node.twice]
    for key, value in node.items():
        found += _duplicates(value, join(path, key))
    return found


def _plain(node: Any) -> Any:
    if isinstance(node, dict):
        return {key: _plain(value) for key, value in node.items()}
    if isinstance(node, list):
        return [_plain(item) for item in node]
    return node


def join(path: str, key: object) -> str:
    """The dotted path of a key inside ``path``; list items are numbered from 0."""
    return f"{path}.{key}" if path else str(key)


def kind(value: Any) -> str:
    """What a JSON value is, in words."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true or false"
    if isinstance(value, (int, float)):
        return "a number"
    if isinstance(value, str):
        return "a string"
    return "a list" if isinstance(value, (list, tuple)) else "an object"


def show(value: Any, width: int = 48) -> str:
    """A JSON value in a message: as JSON writes it, cut when long."""
    try:
        text = json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError):
        text = repr(value)
    return text if len(text) <= width else text[: width - 1] + "…"
