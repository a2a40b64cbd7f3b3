"""What is known of a key that has no effect: why it has none, and which of its values would need one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from hybridlab.config.read import show

Harmless = Callable[[Any], bool]


@dataclass(frozen=True)
class Idle:
    """A known key without effect.

    Attributes:
        why: why it has none.
        harmless: which values may be given; the others are refused.
        rule: why the others are refused; "{}" stands for the value.
        fix: what to write instead; "{}" likewise.
        inside: keys of the object that have their own entries; None: the object is taken as a whole.
    """

    why: str
    harmless: Harmless = field(default=lambda value: True)
    rule: str = ""
    fix: str = ""
    inside: bool = False

    def refusal(self, value: Any) -> tuple[str, str] | None:
        """(rule, fix) when this value would need an effect, else None."""
        if self.harmless(value):
            return None
        return self.rule.replace("{}", show(value)), self.fix.replace("{}", show(value))


def only(*values: Any) -> Harmless:
    """Harmless values, compared as JSON (true is not 1); words without regard to case."""

    def harmless(value: Any) -> bool:
        if isinstance(value, str):
            return value.lower() in [v for v in values if isinstance(v, str)]
        return any(type(value) is type(v) and value == v for v in values)

    return harmless


def switched_off(value: Any) -> bool:
    """An object whose "enabled" is absent or false; an empty object; a plain false."""
    if isinstance(value, Mapping):
        return value.get("enabled", False) in (False, "auto") or not value
    return value is False


def nowhere_enabled(value: Any) -> bool:
    """No "enabled": true at any depth."""
    if isinstance(value, Mapping):
        return value.get("enabled") is not True and all(nowhere_enabled(inner) for inner in value.values())
    if isinstance(value, (list, tuple)):
        return all(nowhere_enabled(inner) for inner in value)
    return True


def never(value: Any) -> bool:
    """No value is harmless."""
    return False


def off(why: str, feature: str, fix: str = "false, or leave it out.") -> Idle:
    """A feature that is harmless only when it is switched off."""
    return Idle(why, only(False), f"not implemented: {feature}.", fix)


COMMENTS = ("comment", "_comment", "//", "#")


def is_comment(key: str) -> bool:
    """Keys that carry remarks: comment, _comment, _comment_2, //, #, and $schema for editors."""
    return key in COMMENTS or key == "$schema" or key.startswith(("_comment", "//"))
