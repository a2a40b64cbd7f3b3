"""Weight gradients put off: the W of the zero-bubble schedules.

A linear layer's backward is two products: the gradient of its input, which the stage before waits for, and the gradient
of its weight, which nobody waits for. During an I action the layers leave the second here; the W action does it.

Source: Qi et al., Zero Bubble Pipeline Parallelism, arXiv:2401.10241 §2.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch import Tensor, nn

Work = Callable[[], None]


class Deferred:
    """Where linear layers leave weight gradients while an I action runs."""

    def __init__(self) -> None:
        self._work: list[Work] | None = None

    @property
    def collecting(self) -> bool:
        """Whether weight gradients are to be put off now."""
        return self._work is not None

    def put(self, work: Work) -> None:
        """Put one weight gradient off."""
        assert self._work is not None, "nothing is being deferred"
        self._work.append(work)

    @contextmanager
    def collect(self) -> Iterator[list[Work]]:
        """What the backward pass inside puts off, for a later `run`."""
        assert self._work is None, "an I action inside another"
        work: list[Work] = []
        self._work = work
        try:
            yield work
        finally:
            self._work = None


def run(work: list[Work]) -> None:
    """The W action: do what was put off, freeing each piece's inputs as it goes."""
    for index, piece in enumerate(work):
        piece()
        work[index] = _done
    work.clear()


def _done() -> None:
    """Takes the place of finished work, so that its tensors are freed at once."""


def accumulate(parameter: nn.Parameter, gradient: Tensor) -> None:
    """Hand over a gradient computed outside autograd: to whoever listens for this parameter, else to ``.grad``."""
    listener = getattr(parameter, "on_gradient", None)
    if listener is not None:
        listener(parameter, gradient)
    elif parameter.grad is None:
        parameter.grad = gradient
    else:
        parameter.grad.add_(gradient)
