"""Typed look-ups in a parsed configuration file."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import Any

from hybridlab.errors import UserError


class Reader:
    """Typed look-ups in a configuration; every failure names the key, its value and the rule."""

    def __init__(self, config: Mapping[str, Any], block: str = "", known: Iterable[str] = ()) -> None:
        self.config = config
        self.block = block  # where the configuration stands in a larger one: "attn_config."
        self.known = set(known)

    def _get(self, keys: tuple[str, ...]) -> tuple[str, Any]:
        self.known.update(keys)
        key = next((key for key in keys if self.config.get(key) is not None), keys[0])
        return self.block + key, self.config.get(key)

    def size(self, *keys: str, default: int | None = None) -> int:
        """A whole number of at least 1 under the first of ``keys`` that is there."""
        key, value = self._get(keys)
        if value is None and default is not None:
            return default
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            found = "is missing" if value is None else f"must be a whole number of at least 1, not {value!r}"
            raise UserError(f"{' or '.join(keys)} {found}.", key=key, value=value, fix=self._misspelt(keys))
        return value

    def number(self, *keys: str, default: float) -> float:
        """A number."""
        key, value = self._get(keys)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise UserError(f"must be a number, not {value!r}.", key=key, value=value)
        return float(value)

    def flag(self, *keys: str, default: bool) -> bool:
        """True or false."""
        key, value = self._get(keys)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise UserError(f"must be true or false, not {value!r}.", key=key, value=value)
        return value

    def choice(self, *keys: str, default: str, among: Mapping[str, str]) -> str:
        """A word, translated by ``among``."""
        key, value = self._get(keys)
        value = default if value is None else value
        if value not in among:
            raise UserError(f"{value!r} is not supported.", key=key, value=value, fix="one of " + ", ".join(among))
        return among[value]

    def must_be(self, key: str, expected: Any, why: str) -> None:
        """Refuse any other value; absent is as expected."""
        where, value = self._get((key,))
        if value is not None and value != expected:
            raise UserError(f"{value!r} is not supported: {why}.", key=where, value=value, fix=f"{expected!r}")

    def _misspelt(self, keys: tuple[str, ...]) -> str:
        close = [near for key in keys for near in difflib.get_close_matches(key, self.config, n=1, cutoff=0.8)]
        return f"rename {close[0]!r} to {keys[0]!r}" if close else ""

    def finish(self) -> None:
        """Refuse keys that are nearly one of those read: a misspelt size must not become a default.

        Keys that other software writes resemble none of ours this closely, unless in earnest.
        """
        for key in self.config:
            if key in self.known:
                continue
            close = difflib.get_close_matches(key, self.known, n=1, cutoff=0.92)
            if close and close[0] not in self.config:
                raise UserError(
                    "is not a key that is read.", key=key, value=self.config[key], fix=f"did you mean {close[0]!r}?"
                )
