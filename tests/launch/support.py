"""Drivers in processes of their own, and what they leave behind."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import textwrap
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

TAG = "HYBRIDLAB_TEST_TAG"


def alive(pid: int) -> bool:
    """Is there such a process, not counting one that is dead and not yet waited for?"""
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


def tagged(tag: str) -> dict[int, str]:
    """All processes that were started, at any distance, with this tag in their environment: {pid: command line}."""
    found = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal():
            with contextlib.suppress(OSError):
                if f"{TAG}={tag}".encode() in (folder / "environ").read_bytes() and alive(int(folder.name)):
                    found[int(folder.name)] = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
    return found


def eventually(condition: Callable[[], bool], seconds: float) -> bool:
    """Does the condition come true in time?"""
    until = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > until:
            return False
        time.sleep(0.02)
    return True


class Driver:
    """A script in its own process, session and folder. Its standard output is read line by line."""

    def __init__(self, script: str, folder: Path, *arguments: str, **environment: str) -> None:
        self.tag = uuid.uuid4().hex
        path = folder / "script.py"
        path.write_text(textwrap.dedent(script))
        self.process = subprocess.Popen(
            [sys.executable, *arguments, str(path)],
            cwd=folder,
            env={**os.environ, TAG: self.tag, **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self.seen: list[str] = []

    def line(self, start: str) -> str:
        """The rest of the next line that starts so."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.seen.append(line)
            if line.startswith(start):
                return line[len(start) :].strip()
        raise AssertionError(f"no line {start!r} in:\n{''.join(self.seen)}")

    def rest(self) -> str:
        """All further output, until the driver and all that hold its output are gone."""
        assert self.process.stdout is not None
        text = self.process.stdout.read()
        self.process.wait()
        return text

    def survivors(self) -> dict[int, str]:
        return tagged(self.tag)

    def leaves_nothing(self, seconds: float = 10.0) -> bool:
        return eventually(lambda: not self.survivors(), seconds)


@contextlib.contextmanager
def driver(script: str, folder: Path, *arguments: str, **environment: str) -> Iterator[Driver]:
    running = Driver(script, folder, *arguments, **environment)
    try:
        yield running
    finally:
        for pid in running.survivors():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        running.process.wait()
        assert running.process.stdout is not None
        running.process.stdout.close()
