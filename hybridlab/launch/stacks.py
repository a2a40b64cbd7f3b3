"""What a rank is doing right now, read from the stack that `faulthandler` writes on a signal.

The handler is C code: it answers while the rank is blocked inside gloo or NCCL, and while it spins in Python. That
tells the rank that is *not* in a collective, for which the others wait, from those that are.
"""

from __future__ import annotations

import linecache
import re
from dataclasses import dataclass
from pathlib import Path

from hybridlab.launch.frames import Frame, is_foreign, is_ours, place

_THREAD = re.compile(r"^(?:(?:Current thread|Thread) 0x([0-9a-f]+)|Stack \(most recent)")  # "Stack": of a crash
_FRAME = re.compile(r'^  File "(.*)", line (\d+) in (.*)$')
_COLLECTIVE_FILES = ("distributed_c10d.py", "_functional_collectives.py")
_WAITS = re.compile(
    r"\b(wait|wait_tensor|all_reduce|all_gather\w*|reduce_scatter\w*|all_to_all\w*|broadcast|barrier)\("
)


@dataclass(frozen=True)
class Doing:
    """One rank's occupation: ``collective`` is the operation it waits in ("all_reduce"), None when it is in none."""

    collective: str | None
    where: Frame | None

    def __str__(self) -> str:
        action = f"in {self.collective}" if self.collective else "in Python"
        if self.where is None:
            return action
        text = linecache.getline(self.where.file, self.where.line).strip() or self.where.text
        return f"{action} at {place(self.where)}" + (f": {text}" if text else "")


def parse(dump: str, main_thread: int) -> Doing | None:
    """Read one dump; None when there is nothing in it. Innermost frame first, as faulthandler prints them."""
    threads: dict[int, list[Frame]] = {}
    frames: list[Frame] = []
    for line in dump.splitlines():
        if head := _THREAD.match(line):
            frames = threads.setdefault(int(head[1] or "0", 16), [])
            frames.clear()  # two dumps in the pipe: the later one counts
        elif entry := _FRAME.match(line):
            frames.append(Frame(entry[1], int(entry[2]), entry[3]))
    main = threads.get(main_thread) or next(iter(threads.values()), [])
    if not main:
        return None
    where = _user_frame(main)
    collective = _collective(main)
    if collective is None and any(frame.function == "_engine_run_backward" for frame in main):
        # A backward pass on a GPU runs in autograd's own threads.
        others = (_collective(stack) for thread, stack in threads.items() if thread != main_thread)
        collective = next((name for name in others if name), None)
    return Doing(collective, where)


def _user_frame(stack: list[Frame]) -> Frame | None:
    """The innermost line that the reader wrote; else of the engine; else whatever it is."""
    theirs = (frame for frame in stack if not is_foreign(frame.file) and not is_ours(frame.file))
    ours = (frame for frame in stack if is_ours(frame.file) and "launch" not in Path(frame.file).parts)
    return next(theirs, None) or next(ours, None) or (stack[0] if stack else None)


def _collective(stack: list[Frame]) -> str | None:
    """The outermost function of torch's collectives that the stack is inside of, or the wait for one."""
    inside = [frame for frame in stack if Path(frame.file).name in _COLLECTIVE_FILES]
    if inside:
        return inside[-1].function
    innermost = stack[0]
    if innermost.function == "join" and is_ours(innermost.file):
        return "the start of the process group"
    text = linecache.getline(innermost.file, innermost.line).strip() or innermost.text
    if found := _WAITS.search(text):  # work.wait() is C++ at once: the stack ends on the caller's line
        return innermost.function if is_ours(innermost.file) else found[1]
    return None
