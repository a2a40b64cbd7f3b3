"""Stack frames of another process: whose code they are in, and how a reader finds them."""

from __future__ import annotations

import functools
import linecache
import sys
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import hybridlab

_OURS = str(Path(hybridlab.__file__).parent)
_MOST_SHOWN = 16


@dataclass(frozen=True)
class Frame:
    """One line of a traceback. ``text`` is the source line as the rank saw it, "" where it could not."""

    file: str
    line: int
    function: str
    text: str = ""


def is_ours(file: str) -> bool:
    """Whether a source file is part of hybridlab."""
    return file.startswith(_OURS)


@functools.cache
def _library_roots() -> tuple[str, ...]:
    return tuple({sysconfig.get_path(name) for name in ("purelib", "platlib", "stdlib", "platstdlib")})


def is_foreign(file: str) -> bool:
    """Is the file a library's (torch, the standard library), that is neither the reader's nor ours?"""
    frozen = file.startswith("<frozen")
    return not is_ours(file) and (frozen or "site-packages" in file or file.startswith(_library_roots()))


def place(frame: Frame) -> str:
    """ "Cell In[3], line 7 in step", or "train.py, line 7 in step"."""
    return f"{_file(frame.file)}, line {frame.line} in {frame.function}"


def _file(file: str) -> str:
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    try:  # IPython knows which cell a temporary file name stands for
        if shell is not None and (cell := shell.compile.format_code_name(file)):
            return " ".join(cell)
    except Exception:  # an IPython without it, or with another form of it
        pass
    try:
        return str(Path(file).relative_to(Path.cwd()))
    except (ValueError, OSError):
        return file


def show(frames: Sequence[Frame]) -> list[str]:
    """The lines of a traceback: the reader's frames and the engine's in full, runs of library frames in a line."""
    lines: list[str] = []
    run: list[Frame] = []
    visible = [frame for frame in frames if not _is_machinery(frame.file)]
    if len(visible) > _MOST_SHOWN:
        half = _MOST_SHOWN // 2
        cut = Frame("", len(visible) - _MOST_SHOWN, "")
        visible = [*visible[:half], cut, *visible[-half:]]
    for frame in visible:
        if frame.file and is_foreign(frame.file):
            run.append(frame)
            continue
        lines += _summary(run)
        run = []
        if not frame.file:
            lines.append(f"  … {frame.line} frames left out")
            continue
        lines.append(f"  {place(frame)}")
        text = linecache.getline(frame.file, frame.line).strip() or frame.text
        if text:
            lines.append(f"    {text}")
    return lines + _summary(run)


def _is_machinery(file: str) -> bool:
    return (is_ours(file) and Path(file).parent == Path(__file__).parent) or "cloudpickle" in Path(file).parts


def _summary(run: Sequence[Frame]) -> list[str]:
    if not run:
        return []
    last = run[-1]
    count = "1 frame" if len(run) == 1 else f"{len(run)} frames"
    return [f"  … {count} in {_package(last.file)}, to {Path(last.file).name}, line {last.line} in {last.function}"]


def _package(file: str) -> str:
    parts = Path(file).parts
    if "site-packages" in parts:
        return parts[parts.index("site-packages") + 1].removesuffix(".py")
    return "the standard library"
