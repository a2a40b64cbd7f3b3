"""The first pass over a file: comments, keys without effect, old spellings, unknown keys and "auto" are taken out.

What remains has only known keys, each under one spelling, and goes to the schema for its types.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from hybridlab.config.account import Account
from hybridlab.config.autos import AUTO
from hybridlab.config.idle import is_comment
from hybridlab.config.keys import IDLE
from hybridlab.config.names import OLD_OFFLOAD, SYNONYMS, suggest
from hybridlab.config.read import join, kind, show
from hybridlab.config.schema import Section, sections
from hybridlab.config.specs import OPTIMIZERS, SCHEDULERS
from hybridlab.errors import UserError

_SECTIONS = sections()


@dataclass
class Sifted:
    """What a file says, under one spelling for each key.

    Attributes:
        tree: the nested values, without "auto".
        origin: key as we spell it -> key as the file spells it, "auto" ones included.
        autos: keys whose value is "auto".
        unknown: unknown keys found, which DeepSpeed would treat in its own way.
    """

    tree: dict[str, Any] = field(default_factory=dict)
    origin: dict[str, str] = field(default_factory=dict)
    autos: set[str] = field(default_factory=set)
    unknown: list[str] = field(default_factory=list)

    def get(self, path: str) -> Any:
        """The value at a path, or None."""
        node: Any = self.tree
        for key in path.split("."):
            node = node.get(key) if isinstance(node, dict) else None
        return node

    def put(self, path: str, value: Any) -> None:
        """Set the value at a path, making sections on the way."""
        *names, last = path.split(".")
        node = self.tree
        for name in names:
            node = node.setdefault(name, {})
        node[last] = value


def sift(data: Mapping[str, Any], account: Account) -> Sifted:
    """Sort the keys of a file; mistakes and keys without effect go to the account."""
    sifted = Sifted()
    _section(data, "", "", account, sifted)
    return sifted


def _section(data: Mapping[str, Any], path: str, spelled: str, account: Account, out: Sifted) -> None:
    """One object: ``path`` is our spelling of where it stands, ``spelled`` the file's."""
    model = _SECTIONS.get(path)
    for key, value in data.items():
        here = join(spelled, key)
        name = SYNONYMS.get(path, {}).get(key, key)
        target = join(path, name)
        if is_comment(key):
            account.no_effect(here, "a comment")
        elif path == "zero_optimization" and key in OLD_OFFLOAD:
            _old_offload(key, value, here, account, out)
        elif key == "params" and _foreign(path, data.get("type")):
            account.refuse_along(here, f"parameters of {data['type']}, which is refused")
        elif key in IDLE.get(path, {}):
            _idle(value, path, key, here, account, out)
        elif model is None or name not in model.model_fields:
            out.unknown.append(here)
            account.refuse(UserError("unknown key.", key=here, value=value, fix=suggest(path, key)))
        elif value is None:
            account.no_effect(here, "null is as good as not given")
        elif target in _SECTIONS:
            _inner(value, target, here, account, out)
        else:
            _leaf(value, target, here, model, account, out)


def _inner(value: Any, target: str, here: str, account: Account, out: Sifted) -> None:
    """A section of the schema."""
    if isinstance(value, bool) and target == "zero_optimization":
        _place("zero_optimization.stage", int(value), here, account, out)
        account.used(here, f"the old form of stage {int(value)}")
    elif isinstance(value, Mapping):
        account.used(here, f"section: {_describe(target)}")
        out.origin.setdefault(target, here)
        _section(value, target, here, account, out)
    else:
        example = '{"enabled": true}' if "enabled" in _SECTIONS[target].model_fields else "{...}"
        rule = f"{show(value)} is {kind(value)}, this section is an object."
        account.refuse(UserError(rule, key=here, value=value, fix=f"{example}."))


def _leaf(value: Any, target: str, here: str, model: type[Section], account: Account, out: Sifted) -> None:
    """A key that holds a value."""
    name = target.rpartition(".")[2]
    info = model.model_fields[name]
    if not (isinstance(value, str) and value.strip().lower() == "auto"):
        _place(target, value, here, account, out)
        account.used(here, info.description or "")
    elif target in AUTO:
        out.autos.add(target)
        out.origin[target] = here
        account.used(here, f"auto: {AUTO[target].text}")
    else:
        default = f", such as the default {show(info.default)}" if info.default is not None else ""
        account.refuse(
            UserError('"auto" cannot be derived for this key.', key=here, value=value, fix=f"a value{default}.")
        )


def _idle(value: Any, path: str, key: str, here: str, account: Account, out: Sifted) -> None:
    """A known key without effect; some of its values are refused."""
    idle = IDLE[path][key]
    if idle.inside and value is not None:
        if isinstance(value, Mapping):
            account.no_effect(here, idle.why)
            _section(value, join(path, key), here, account, out)
        else:
            rule = f"{show(value)} is {kind(value)}, this section is an object."
            account.refuse(UserError(rule, key=here, value=value, fix="{...}, or leave it out."))
        return
    refusal = idle.refusal(value) if value is not None else None
    if refusal is not None:
        account.refuse(UserError(refusal[0], key=here, value=value, fix=refusal[1]))
    else:
        account.no_effect(here, idle.why or "null is as good as not given")


def _foreign(path: str, kind: Any) -> bool:
    """Whether a block's type is not one of ours: what its parameters mean is then not for us to say."""
    ours = {"optimizer": OPTIMIZERS, "scheduler": tuple(SCHEDULERS)}.get(path)
    return ours is not None and isinstance(kind, str) and kind.lower() not in [name.lower() for name in ours]


def _old_offload(key: str, value: Any, here: str, account: Account, out: Sifted) -> None:
    """``cpu_offload: true`` is the old form of ``offload_optimizer: {"device": "cpu"}``, cpu_offload_param likewise."""
    new = OLD_OFFLOAD[key]
    if value is True:
        account.used(here, f'the old form of {new} {{"device": "cpu"}}')
        _place(f"zero_optimization.{new}.device", "cpu", here, account, out)
    elif value is False or value is None:
        account.no_effect(here, f"off; {new} is its new form")
    else:
        rule = f"{show(value)} is {kind(value)}, not true or false."
        account.refuse(UserError(rule, key=here, value=value, fix=f'{new} {{"device": "cpu"}}.'))


def _place(target: str, value: Any, here: str, account: Account, out: Sifted) -> None:
    """Set a value, unless another spelling of the same key has set a different one."""
    before = out.get(target)
    if before is None:
        out.put(target, value)
        out.origin[target] = here
    elif not same(before, value):
        other = out.origin[target]
        account.refuse(
            UserError(
                f"{show(value)}, but {other} says {show(before)}: two spellings of one key.",
                key=here,
                value=value,
                fix="keep one of them.",
            ),
            other,
        )


def same(a: Any, b: Any) -> bool:
    """Equal as values of a config: words without regard to case; true is not 1."""
    if isinstance(a, str) and isinstance(b, str):
        return a.lower() == b.lower()
    if isinstance(a, bool) != isinstance(b, bool):
        return False
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b))
    return bool(a == b)


def _describe(path: str) -> str:
    """What a section is for: the first sentence of its description."""
    return (_SECTIONS[path].__doc__ or "").strip().split("\n")[0].rstrip(".")
