"""Ranks from the cells of a real kernel, interrupted and killed as JupyterLab does it. Needs the extra `lab`."""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from tests.launch.support import TAG, eventually, tagged

pytest.importorskip("ipykernel")
manager = pytest.importorskip("jupyter_client.manager")


@dataclass
class Kernel:
    tag: str
    control: Any
    client: Any
    seen: str = field(default="")

    def start(self, code: str) -> None:
        self.client.execute(code)
        self.seen = ""

    def until_idle(self, seconds: float = 60.0) -> str:
        """All text that the cell put out: streams, results, tracebacks."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            with contextlib.suppress(queue.Empty):
                message = self.client.get_iopub_msg(timeout=0.2)
                content = message["content"]
                self.seen += content.get("text", "") + "\n".join(content.get("traceback", []))
                self.seen += content.get("data", {}).get("text/plain", "")
                if content.get("execution_state") == "idle":
                    return self.seen
        raise AssertionError(f"the cell never ended: {self.seen}")

    def run(self, code: str) -> str:
        self.start(code)
        return self.until_idle()


@pytest.fixture(scope="module")
def kernel() -> Iterator[Kernel]:
    tag = uuid.uuid4().hex
    control, client = manager.start_new_kernel(env={**os.environ, TAG: tag})
    try:
        yield Kernel(tag, control, client)
    finally:
        client.stop_channels()
        control.shutdown_kernel(now=True)
        for pid in tagged(tag):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def test_cells(kernel: Kernel) -> None:
    kernel.run(
        "import time, torch, torch.distributed as dist\n"
        "from hybridlab.launch import Cluster, state\n"
        "cluster = Cluster(4, output='ordered', timeout=20)\n"
        "scale = 3"
    )
    text = kernel.run(
        "def total(x):\n    t = torch.tensor([scale * x])\n    dist.all_reduce(t)\n"
        "    print('sum', t.item())\n    state.t = t\n    return t.item()\n"
        "cluster.run(total, 2)"
    )
    assert "".join(f"[{rank}] sum 24\n" for rank in range(4)) in text
    assert "[24, 24, 24, 24]" in text

    text = kernel.run(
        "def bad():\n    if dist.get_rank() == 2:\n        raise ValueError('learner')  # this line\n"
        "    dist.barrier()\ncluster.run(bad)"
    )
    assert "RankError: rank 2 raised ValueError: learner\n" in text
    assert "Cell In[3], line 3 in bad\n    raise ValueError('learner')  # this line" in text
    assert "ranks 0, 1, 3 in barrier at Cell In[3], line 4 in bad" in text
    assert text.count("ValueError") == 2
    assert "hybridlab" not in text

    kernel.run("cluster.run(lambda: setattr(state, 'mark', dist.get_rank()))")
    kernel.start("def spin():\n    while dist.get_rank() == 1: pass\n    time.sleep(60)\ncluster.run(spin)")
    time.sleep(1.0)
    kernel.control.interrupt_kernel()
    assert "KeyboardInterrupt: the ranks are idle again and keep their variables" in kernel.until_idle(10)
    assert "[0, 1, 2, 3]" in kernel.run("cluster.run(lambda: state.mark)")

    kernel.start("def half():\n    while dist.get_rank() == 3: pass\n    dist.barrier()\ncluster.run(half)")
    time.sleep(1.0)
    kernel.control.interrupt_kernel()
    assert "KeyboardInterrupt: the ranks have been ended; the next call starts fresh ones" in kernel.until_idle(10)
    assert "[24, 24, 24, 24]" in kernel.run("cluster.run(total, 2)")

    kernel.start("cluster.run(half)")
    time.sleep(1.0)
    assert len(tagged(kernel.tag)) >= 6
    kernel.control.shutdown_kernel(now=True)
    assert eventually(lambda: not tagged(kernel.tag), 10), tagged(kernel.tag)
