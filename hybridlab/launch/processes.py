"""How the system is asked for ranks: forked from a server that has imported torch once, or spawned one by one."""

from __future__ import annotations

import contextlib
import multiprocessing
import multiprocessing.forkserver
import os
import resource
import sys
import threading
from collections.abc import Iterator
from importlib.machinery import ModuleSpec

from hybridlab.errors import UserError

PRELOAD = "hybridlab.launch.preload"
_lock = threading.Lock()
_DESCRIPTORS_EACH = 7  # of the driver: four pipes, the process's two, one to spare
_DESCRIPTORS_MORE = 32  # for the rank that is just being started, the forkserver, the store


def start_method() -> str:
    """ "forkserver" (0.1 s for eight ranks), or "spawn" (each rank imports torch: seconds) where there is no fork or,
    as with macOS's system libraries, an unsafe one. ``HYBRIDLAB_START_METHOD`` overrides.

    Raises UserError on Windows, and for a method that the system lacks.
    """
    if os.name != "posix":
        raise UserError("local ranks need a POSIX system (Linux, macOS).", fix="on Windows, run it under WSL.")
    usable = {"forkserver", "spawn"} & set(multiprocessing.get_all_start_methods())
    wanted = os.environ.get("HYBRIDLAB_START_METHOD")
    if wanted is not None and wanted not in usable:
        raise UserError(
            "a start method is forkserver or spawn, as far as the system has it.",
            key="HYBRIDLAB_START_METHOD",
            value=wanted,
            fix=f"one of {', '.join(sorted(usable))}.",
        )
    return wanted or ("forkserver" if "forkserver" in usable and sys.platform != "darwin" else "spawn")


def check_room(ranks: int) -> None:
    """Raises UserError when the limit on open files would be met on the way: half-started ranks are hard to explain."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    used = len(os.listdir("/dev/fd"))
    needed = _DESCRIPTORS_EACH * ranks + _DESCRIPTORS_MORE
    if limit != resource.RLIM_INFINITY and used + needed > limit:
        raise UserError(
            f"{ranks} ranks need about {needed} more open files; of the {limit} allowed, {used} are in use.",
            fix="raise `ulimit -n`, or use fewer ranks.",
        )


def warm_up() -> None:
    """Start the forkserver now, so that its import of torch (1–2 s) overlaps with what the caller does next."""
    if start_method() == "forkserver":
        with starting():
            pass


@contextlib.contextmanager
def starting() -> Iterator[None]:
    """Around `Process.start`: the forkserver is up with our preload, and children leave the caller's script alone."""
    # The forkserver (or a spawned child) is a `python -c`, which would look for modules in the current directory first:
    # a `random.py` lying there would break it.
    with _lock, _main_left_alone(), _variable("PYTHONSAFEPATH", "1"):
        if start_method() == "forkserver":
            multiprocessing.get_context("forkserver").set_forkserver_preload([PRELOAD])
            multiprocessing.forkserver.ensure_running()
        yield


@contextlib.contextmanager
def _main_left_alone() -> Iterator[None]:
    """multiprocessing makes each child run the caller's script again, under another name, and so asks for an
    ``if __name__ == "__main__"``. Our functions travel by value and need none of it: while processes start, the script
    looks like a package's ``__main__``, which multiprocessing does not run again."""
    main = sys.modules["__main__"]
    before = getattr(main, "__spec__", None)
    main.__spec__ = ModuleSpec("hybridlab.__main__", None)
    try:
        yield
    finally:
        main.__spec__ = before


@contextlib.contextmanager
def _variable(name: str, value: str) -> Iterator[None]:
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before
