"""A config on its way from file to `Resolved`: the checked keys, the account, and everything chosen along the way."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from hybridlab.config.account import Account
from hybridlab.config.schema import Config
from hybridlab.errors import UserError
from hybridlab.plan.legality import Problem

if TYPE_CHECKING:
    from hybridlab.shapes import ModelShape


@dataclass
class Draft:
    """Handed from step to step of `hybridlab.config.resolve`.

    Attributes:
        config: the keys with an effect, checked one by one; a wrong one has its default here and is in ``bad``.
        account: the fate of every key of the file.
        origin: key as we spell it -> how the file (or the command line) spells it, for every key that was given.
        alias: key as the rules name it -> the key that gave its value instead (tp_size -> autotp_size).
        autos: keys that were "auto" and are settled beside the keys they depend on.
        filled: keys that were "auto" and are settled already.
        bad: keys whose value was wrong: what depends on them cannot be checked.
        world: number of ranks.
        shape: the model, or None: what depends on it is not checked.
        steps: optimizer steps of the run, or None when nobody knows yet.
        chosen: defaults and derived values, ``{key, value, why}``.
        deepspeed: where DeepSpeed 0.19 does something else, ``{key, says}``.
        not_checked: rules that could not be checked, and what is missing.
    """

    config: Config
    account: Account
    world: int
    shape: ModelShape | None = None
    steps: int | None = None
    origin: dict[str, str] = field(default_factory=dict)
    alias: dict[str, str] = field(default_factory=dict)
    autos: set[str] = field(default_factory=set)
    filled: set[str] = field(default_factory=set)
    bad: set[str] = field(default_factory=set)
    chosen: list[dict[str, Any]] = field(default_factory=list)
    deepspeed: list[dict[str, str]] = field(default_factory=list)
    not_checked: list[str] = field(default_factory=list)

    def given(self, path: str) -> bool:
        """Whether the file (or the command line) gives a good value for this key."""
        return path in self.origin and path not in self.autos and path not in self.bad

    def spelled(self, path: str) -> str:
        """How the file spells a key."""
        return self.origin.get(path, path)

    def value(self, path: str) -> Any:
        """The checked value of a key."""
        node: Any = self.config
        for key in path.split("."):
            node = getattr(node, key)
        return node

    def choose(self, key: str, value: Any, why: str) -> None:
        """Record a value that the file does not state."""
        self.chosen.append({"key": key, "value": value, "why": why})

    def refuse(self, path: str, rule: str, fix: str, *also: str) -> None:
        """Record a mistake at a key as we spell it; ``also`` names other keys that take part."""
        error = UserError(rule, key=self.spelled(path), value=self._given_value(path), fix=fix)
        self.account.refuse(error, *(self.spelled(other) for other in also))

    def check(self, *problems: Problem | None) -> bool:
        """Record broken rules; true when there is none."""
        found = [problem for problem in problems if problem is not None]
        for problem in found:
            self.account.problem(problem, {**self.origin, **self.alias})
        return not found

    def differs(self, key: str, says: str) -> None:
        """Note what DeepSpeed 0.19 does differently."""
        self.deepspeed.append({"key": key, "says": says})

    def _given_value(self, path: str) -> Any:
        entry = self.account.entries.get(self.spelled(path))
        if entry is not None:
            return entry.value
        return self.value(path) if path in self.origin else None
