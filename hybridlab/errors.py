"""What a user is told when the input is wrong: which key, which value, which rule, and the nearest fix."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class UserError(Exception):
    """One mistake in what the user gave. Commands print it in a line or two and exit with 2, never a traceback.

    Args:
        rule: the rule that was broken, a full sentence with the numbers in it.
        key: where the value stands (dotted for configs, ``--name`` for options), or "".
        value: the offending value as given.
        fix: the nearest thing that would be right, or "".
    """

    def __init__(self, rule: str, *, key: str = "", value: Any = None, fix: str = "") -> None:
        self.key = key
        self.value = value
        self.rule = rule
        self.fix = fix
        super().__init__(str(self))

    def __str__(self) -> str:
        where = f"{self.key}: " if self.key else ""
        fix = f" Fix: {self.fix}" if self.fix else ""
        return f"{where}{self.rule}{fix}"

    def __reduce__(self) -> tuple[Any, ...]:  # exceptions travel between processes
        return _rebuild, (self.rule, self.key, self.value, self.fix)

    def to_json(self) -> dict[str, Any]:
        """The fields that `--json` prints: ``{key, value, rule, fix}``."""
        return {"key": self.key, "value": self.value, "rule": self.rule, "fix": self.fix}


def _rebuild(rule: str, key: str, value: Any, fix: str) -> UserError:
    return UserError(rule, key=key, value=value, fix=fix)


class UserErrors(UserError):
    """Several mistakes, told together, so that a user mends a file in one go."""

    def __init__(self, errors: Sequence[UserError]) -> None:
        self.errors = tuple(errors)
        super().__init__("\n".join(str(error) for error in self.errors))

    def __reduce__(self) -> tuple[Any, ...]:
        return UserErrors, (self.errors,)
