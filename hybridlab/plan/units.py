"""Amounts of memory as people write them. GiB = 2^30 bytes and GB = 10^9 bytes; "80G" could be either and is refused.

A card sold as "80GB" has 80 GiB; the ZeRO paper's tables are in GB, Megatron's activation figures in GiB. Seven percent
between the two decide whether a layout fits, so nothing here ever guesses.
"""

from __future__ import annotations

import re

from hybridlab.errors import UserError

UNITS = {
    "B": 1,
    "KiB": 2**10,
    "MiB": 2**20,
    "GiB": 2**30,
    "TiB": 2**40,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
}
_AMOUNT = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?(?:[eE][0-9]+)?)\s*([A-Za-z]*)\s*")


def parse_bytes(text: str | int | float, key: str = "") -> int:
    """Bytes from "80GiB", "85.9 GB" or a plain number of bytes.

    Raises:
        UserError: a unit that is missing its letters ("80G"), is unknown, or no positive amount at all.
    """
    if isinstance(text, int | float) and not isinstance(text, bool):
        amount, unit = float(text), "B"
    else:
        match = _AMOUNT.fullmatch(str(text))
        if match is None:
            raise UserError(
                f"{text!r} is not an amount of memory.", key=key, value=text, fix="a number and a unit, e.g. 80GiB."
            )
        amount, unit = float(match[1]), match[2] or "B"
    known = {name.lower(): size for name, size in UNITS.items()}
    size = known.get(unit.lower())
    if size is None:
        letter = unit[:1].upper()
        fix = f"{amount:g}{letter}iB (2^n bytes) or {amount:g}{letter}B (10^n bytes)." if letter in "KMGT" else ""
        raise UserError(
            f"{unit!r} is not a unit of memory.", key=key, value=text, fix=fix or "one of " + ", ".join(UNITS) + "."
        )
    count = round(amount * size)
    if count <= 0:
        raise UserError(f"{text!r} is no memory at all.", key=key, value=text, fix="a positive amount, e.g. 80GiB.")
    return count
