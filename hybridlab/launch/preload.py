"""Imported once by the forkserver, so that every rank forked from it finds these modules loaded.

The forkserver swallows an ImportError of this module, and (Python 3.11) does not see the caller's ``sys.path``: were it
not importable from the installed package, every rank would silently import torch for itself. So each rank looks whether
this module was there before it, and says so if not.

Nothing here may start a thread or touch CUDA: neither survives a fork.
"""

from __future__ import annotations

import gc
import importlib

import hybridlab.launch.worker  # noqa: F401  (and with it torch and torch.distributed)

# What a rank's first step would otherwise import for itself: a torch optimizer pulls in torch._dynamo, a second each.
ALSO = ("torch._dynamo", "hybridlab.engine")

failures: dict[str, str] = {}
for _name in ALSO:
    try:
        importlib.import_module(_name)
    except Exception as error:  # the forkserver must come up: a rank that needs the module will meet the error itself
        failures[_name] = f"{type(error).__name__}: {error}"

gc.collect()
gc.freeze()  # the collector of a rank need not walk, and so copy, the pages that all ranks share
