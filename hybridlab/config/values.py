"""The kinds of value a key can have: whole number, number, switch, word. Strict, with messages that say what to write.

Three rules hold everywhere:

- Numbers are numbers. ``"8"`` is a string and is refused (compared as text, "8" and 8 never meet: LlamaFactory#1116).
  A float that is whole counts as a whole number (5e8), any other does not (2.5).
- ``true`` and ``false`` are not numbers, and 0 and 1 are not switches.
- The case of words does not matter: "CPU", "Cpu" and "cpu" are one device, "AdamW" and "adamw" one optimizer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic_core import PydanticCustomError, core_schema

from hybridlab.config.read import kind, show


@dataclass(frozen=True, eq=False)
class Kind:
    """The kind of a value, to stand in ``Annotated[type, Kind]``: pydantic checks by it and writes it in the schema.

    Attributes:
        check: JSON value -> Python value, or `fail`.
        schema: the JSON Schema of the value.
    """

    check: Callable[[Any], Any]
    schema: Mapping[str, Any]

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> core_schema.CoreSchema:
        return core_schema.no_info_plain_validator_function(self.check)

    def __get_pydantic_json_schema__(
        self, schema: core_schema.CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        return dict(self.schema)


def fail(rule: str, fix: str) -> PydanticCustomError:
    """A value is wrong: the rule and the fix travel in the error's context."""
    return PydanticCustomError("hybridlab", "{rule}", {"rule": rule, "fix": fix})


def _a_number(value: Any, what: str, example: str) -> float | int:
    """Refuse everything that is not a finite number."""
    if isinstance(value, str):
        try:
            number = float(value)
        except ValueError:
            raise fail(f"{show(value)} is not {what}.", f"{example}.") from None
        if not math.isfinite(number):
            raise fail(f"{show(value)} is not a finite number.", f"{example}.")
        written = show(int(number)) if number.is_integer() and abs(number) < 2**53 else show(number)
        raise fail(f"{show(value)} is a string, not {what}.", f"{written} without quotes.")
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise fail(f"{show(value)} is {kind(value)}, not {what}.", f"{example}.")
    if isinstance(value, float) and not math.isfinite(value):
        raise fail(f"{value} is not a finite number.", f"{example}.")
    return value


def _range(low: float | None, high: float | None, open_low: bool, open_high: bool) -> str:
    parts = []
    if low is not None:
        parts.append(f"more than {low:g}" if open_low else f"{low:g} or more")
    if high is not None:
        parts.append(f"less than {high:g}" if open_high else f"{high:g} or less")
    return " and ".join(parts) or "any number"


def whole(low: int, high: int | None = None) -> Kind:
    """A whole number from ``low`` to ``high``, both legal; ``high`` None: no upper bound."""
    example = _range(low, high, False, False)
    if high is not None and high - low < 5:
        *some, last = (str(n) for n in range(low, high + 1))
        example = f"{', '.join(some)} or {last}"

    def check(value: Any) -> int:
        number = _a_number(value, "a whole number", example)
        if isinstance(number, float) and not number.is_integer():
            below, above = math.floor(number), math.ceil(number)
            near = [str(n) for n in (below, above) if n >= low and (high is None or n <= high)]
            raise fail(f"{show(value)} is not a whole number.", f"{' or '.join(near) or example}.")
        number = int(number)
        if number < low or (high is not None and number > high):
            raise fail(f"must be {example}, not {number}.", f"{low if number < low else high}.")
        return number

    schema: dict[str, Any] = {"type": "integer", "minimum": low}
    if high is not None:
        schema["maximum"] = high
    return Kind(check, schema)


def real(
    low: float | None = None, high: float | None = None, *, open_low: bool = False, open_high: bool = False
) -> Kind:
    """A finite number within bounds, which are legal themselves unless open."""
    example = _range(low, high, open_low, open_high)

    def check(value: Any) -> float:
        number = float(_a_number(value, "a number", example))
        too_low = low is not None and (number < low or (open_low and number == low))
        too_high = high is not None and (number > high or (open_high and number == high))
        if too_low or too_high:
            raise fail(f"must be {example}, not {show(value)}.", f"{example}.")
        return number

    schema: dict[str, Any] = {"type": "number"}
    if low is not None:
        schema["exclusiveMinimum" if open_low else "minimum"] = low
    if high is not None:
        schema["exclusiveMaximum" if open_high else "maximum"] = high
    return Kind(check, schema)


def _check_switch(value: Any) -> bool:
    if isinstance(value, bool):
        return value
    guess = {"true": "true", "1": "true", "false": "false", "0": "false"}.get(str(value).lower(), "true or false")
    raise fail(f"{show(value)} is {kind(value)}, not true or false.", f"{guess}.")


SWITCH = Kind(_check_switch, {"type": "boolean"})


def word(
    *choices: str,
    also: Mapping[str, str] | None = None,
    refused: Mapping[str, tuple[str, str]] | None = None,
    what: str = "one of the choices",
) -> Kind:
    """One of a few words, case ignored, ``_`` and ``-`` alike.

    Args:
        choices: the words, as they are spelled in the result.
        also: other spellings (lower case) of a choice.
        refused: words that are known and refused by name: lower-case word -> (rule, fix).
        what: what the words are, for the message.
    """
    spelled = {_fold(choice): choice for choice in choices}
    spelled.update({_fold(other): choice for other, choice in (also or {}).items()})
    listed = ", ".join(choices)

    def check(value: Any) -> str:
        if not isinstance(value, str):
            raise fail(f"{show(value)} is {kind(value)}, not {what}.", f"one of {listed}.")
        folded = _fold(value)
        if folded in spelled:
            return spelled[folded]
        if refused and folded in refused:
            raise fail(*refused[folded])
        close = get_close_matches(folded, spelled, n=1, cutoff=0.6)
        guess = f"{spelled[close[0]]}; the choices are {listed}" if close else f"one of {listed}"
        raise fail(f"{show(value)} is not {what}.", f"{guess}.")

    # The schema states the plain spellings; a validator that ignores case would need a pattern nobody can read.
    return Kind(check, {"type": "string", "enum": list(choices)})


def _fold(text: str) -> str:
    return text.strip().lower().replace("_", "-")


def _check_betas(value: Any) -> tuple[float, float]:
    if not isinstance(value, (list, tuple)) or len(value) != 2:
        count = f" of {len(value)}" if isinstance(value, (list, tuple)) else ""
        raise fail(f"{show(value)} is {kind(value)}{count}, not two numbers.", "[0.9, 0.999].")
    for beta in value:
        number = _a_number(beta, "a number", "[0.9, 0.999]")
        if not 0 <= number < 1:
            raise fail(f"each of the two must be 0 or more and less than 1, not {show(beta)}.", "[0.9, 0.999].")
    return float(value[0]), float(value[1])


BETAS = Kind(
    _check_betas,
    {
        "type": "array",
        "items": {"type": "number", "minimum": 0, "exclusiveMaximum": 1},
        "minItems": 2,
        "maxItems": 2,
    },
)


def _check_layer_counts(value: Any) -> tuple[int, ...]:
    if not isinstance(value, (list, tuple)) or not value:
        raise fail(f"{show(value)} is {kind(value)}, not a list of layers per stage.", "such as [12, 12, 11, 11].")
    counts = []
    for item in value:
        number = _a_number(item, "a whole number", "1 or more for each stage")
        if number != int(number) or number < 1:
            raise fail(f"each stage needs a whole number of layers, 1 or more, not {show(item)}.", "1 or more.")
        counts.append(int(number))
    return tuple(counts)


LAYER_COUNTS = Kind(_check_layer_counts, {"type": "array", "items": {"type": "integer", "minimum": 1}, "minItems": 1})
