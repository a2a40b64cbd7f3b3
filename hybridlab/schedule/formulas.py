"""The bubble by formula, and when the formula is true. `simulate` is right in general; these say why.

The symbols mean one thing here: F forward, I gradient of the input, W weight gradients, each of one model chunk; the
whole backward is I + W. (Texts that write B for the whole backward and texts that write B for I give different
formulas for one schedule.) The bubble is the idle time between the first and last action of the rank that takes longest
from one to the other; P stages, m micro-batches, v chunks a rank.

* GPipe, 1F1B: (P-1)(F+I+W) (Huang et al., arXiv:1811.06965; Narayanan et al., arXiv:2104.04473 §2.2.1).
* Interleaved: the same with F, I, W of a chunk, which is 1/v of a rank (arXiv:2104.04473 §2.2.2).
* ZB-H1: (P-1)(F+I-W), ZB-H2: (P-1)(F+I-2W) (Qi et al., arXiv:2401.10241, Table 2). ZB-V: none (§6).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ClosedForm:
    """A formula for the bubble, with numbers put in.

    Attributes:
        formula: in symbols.
        bubble: its value.
        ideal: what a rank computes, m·v·(F+I+W).
        assumes: when it is exact.
        holds: whether the sizes and times asked about are so.
    """

    formula: str
    bubble: float
    ideal: float
    assumes: str
    holds: bool

    @property
    def over_ideal(self) -> float:
        """Bubble over ideal time: (P-1)/m under 1F1B, (P-1)/(v·m) interleaved."""
        return self.bubble / self.ideal

    @property
    def rate(self) -> float:
        """Bubble over the time it takes, bubble/(bubble + ideal): (P-1)/(m+P-1) under 1F1B."""
        return self.bubble / (self.bubble + self.ideal)


def closed_form(
    name: str,
    stages: int,
    micro_batches: int,
    chunks: int,
    forward: float,
    input_grad: float,
    weight_grad: float,
    p2p: float = 0.0,
) -> ClosedForm | None:
    """The formula of a schedule by name; None where there is none.

    Args:
        forward, input_grad, weight_grad: F, I, W of one chunk, alike on all stages, not all 0.
        p2p: latency of a message; no formula knows it.
    """
    p, m, f, i, w = stages, micro_batches, forward, input_grad, weight_grad
    short = w <= f and w <= i
    free = p2p == 0 or p == 1
    forms = {
        "gpipe": ("(P-1)(F+I+W)", f + i + w, "", True),
        "1f1b": ("(P-1)(F+I+W)", f + i + w, "", True),
        "interleaved-1f1b": ("(P-1)(F+I+W)", f + i + w, "", True),
        "zb-h1": ("(P-1)(F+I-W)", f + i - w, ", W no longer than F or I, m ≥ P", short and m >= p),
        "zb-h2": ("(P-1)(F+I-2W)", f + i - 2 * w, ", W no longer than F or I, m ≥ 2P-1", short and m >= 2 * p - 1),
        "zb-v": ("0", 0.0, ", F = I = W, m ≥ 2P-1", f == i == w and m >= 2 * p - 1),
    }
    if name not in forms:
        return None
    formula, factor, condition, met = forms[name]
    assumes = f"stages alike, messages that take no time{condition}"
    return ClosedForm(formula, (p - 1) * factor, m * chunks * (f + i + w), assumes, free and (met or p == 1))
