"""What this machine is and has, and what is wrong with it: facts, gathered once, and the verdict, a pure function."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
import re
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from hybridlab.errors import UserError
from hybridlab.launch.cluster import MOST_RANKS, Cluster
from hybridlab.launch.failure import RankError
from hybridlab.launch.processes import start_method

GIB = 2**30
_RANK_BYTES = (
    64 * 2**20
)  # of an idle rank that shares the forkserver's pages (about 30 MiB measured), with room to work
_OLDEST_TORCH = "2.10"
_LEAST_SHM = GIB
_LEAST_FILES = 1024
_LEAST_MEMORY = 2 * GIB

Facts = dict[str, Any]


@dataclass(frozen=True)
class Problem:
    """Something missing or wrong, and what to do about it. ``fatal``: training cannot run as things are."""

    what: str
    fix: str
    fatal: bool = False


def inspect() -> Facts:
    """All facts, as one JSON object. Starts ranks: takes some seconds."""
    facts: Facts = {
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.release()} {platform.machine()}",
        "torch": {"version": str(torch.__version__), "cuda": torch.version.cuda},
        "nvidia_driver": _nvidia_smi("--query-gpu=driver_version", "--format=csv,noheader"),
        "gpus": _gpus(),
        "links": _links(),
        "nccl": _nccl_version(),
        "gloo": dist.is_available() and dist.is_gloo_available(),
        "cores": _cores(),
        "memory": _memory(),
        "shm": _shm(),
        "open_files": dict(zip(("soft", "hard"), resource.getrlimit(resource.RLIMIT_NOFILE))),
        "extras": extras(),
    }
    facts["cluster"] = try_ranks("gloo", (2, 8)) if facts["gloo"] else None
    gpus = len(facts["gpus"])
    facts["cluster_nccl"] = try_ranks("nccl", (gpus,)) if gpus and facts["nccl"] else None
    facts["ranks"] = {
        "nccl": gpus if facts["nccl"] else 0,
        "gloo": min(MOST_RANKS, facts["memory"]["available_bytes"] // _RANK_BYTES) if facts["gloo"] else 0,
    }
    return facts


def problems(facts: Mapping[str, Any]) -> list[Problem]:
    """What is missing or wrong, by the facts alone; the fatal first."""
    return sorted((found for check in _CHECKS for found in check(facts)), key=lambda problem: not problem.fatal)


# --- facts -----------------------------------------------------------------------------------------------------------


def _gpus() -> list[Facts]:
    if not torch.cuda.is_available():
        return []
    found = []
    for index in range(torch.cuda.device_count()):
        card = torch.cuda.get_device_properties(index)
        found.append({"name": card.name, "memory_bytes": card.total_memory, "capability": f"{card.major}.{card.minor}"})
    return found


def _links() -> Facts | None:
    """Which GPUs reach each other directly, and nvidia-smi's table of how (NV# is NVLink, PIX to SYS are PCIe ways)."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count < 2:
        return None
    pairs = [(a, b) for a in range(count) for b in range(count) if a != b]
    direct = sum(torch.cuda.can_device_access_peer(a, b) for a, b in pairs)
    return {"pairs": len(pairs), "peer_access_pairs": direct, "topology": _nvidia_smi("topo", "-m")}


def _nvidia_smi(*arguments: str) -> str | None:
    if shutil.which("nvidia-smi") is None:
        return None
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(["nvidia-smi", *arguments], capture_output=True, text=True, timeout=20, check=True)
        return done.stdout.strip() or None
    return None


def _nccl_version() -> str | None:
    if not (dist.is_available() and dist.is_nccl_available() and torch.cuda.is_available()):
        return None
    return ".".join(map(str, torch.cuda.nccl.version()))


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _memory() -> Facts:
    """Bytes of host memory; a container's limit counts, as it is what its processes are killed at."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    available = total
    with contextlib.suppress(OSError), open("/proc/meminfo") as file:
        for line in file:
            if line.startswith("MemAvailable:"):
                available = int(line.split()[1]) * 1024
    limit = None
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        with contextlib.suppress(OSError, ValueError), open(path) as file:
            limit = min(int(file.read()), total)
    if limit is not None:
        available = min(available, limit)
    return {"total_bytes": total, "available_bytes": available, "limit_bytes": limit if limit != total else None}


def free_bytes() -> int:
    """Host memory that a program can have now."""
    return int(_memory()["available_bytes"])


def card_bytes() -> int | None:
    """Memory of the smallest GPU here; None without one."""
    if not torch.cuda.is_available():
        return None
    return min(torch.cuda.get_device_properties(i).total_memory for i in range(torch.cuda.device_count()))


def _shm() -> Facts | None:
    with contextlib.suppress(OSError):
        usage = shutil.disk_usage("/dev/shm")
        return {"total_bytes": usage.total, "free_bytes": usage.free}
    return None


def extras() -> dict[str, dict[str, str | None]]:
    """The optional packages by extra, as hybridlab's own metadata lists them: {extra: {package: version or None}}."""
    found: dict[str, dict[str, str | None]] = {}
    for requirement in importlib.metadata.requires("hybridlab") or []:
        match = re.match(r"([\w.-]+).*extra\s*==\s*['\"](\w+)['\"]", requirement)
        if match:
            version = None
            with contextlib.suppress(importlib.metadata.PackageNotFoundError):
                version = importlib.metadata.version(match[1])
            found.setdefault(match[2], {})[match[1]] = version
    return found


def try_ranks(backend: str, counts: tuple[int, ...]) -> Facts:
    """Start ranks and let them talk: ``start_seconds`` by number of ranks (the first includes the forkserver, once),
    ``all_reduce_seconds`` from the call to the last result, ``preloaded``; or ``error``."""
    facts: Facts = {"method": None, "start_seconds": {}, "all_reduce_seconds": None, "error": None}
    facts |= {"preloaded": False, "preload_failures": {}}
    try:
        facts["method"] = start_method()
        for count in counts:
            begin = time.perf_counter()
            with Cluster(count, backend=backend, output="quiet", timeout=60.0) as cluster:
                cluster.start()
                facts["start_seconds"][str(count)] = round(time.perf_counter() - begin, 3)
                facts |= cluster.preload
                begin = time.perf_counter()
                sums = cluster.run(_all_reduce)
                facts["all_reduce_seconds"] = round(time.perf_counter() - begin, 3)
                if sums != [float(count)] * count:
                    facts["error"] = f"the sum of {count} ones over {count} ranks came out as {sums}"
    except (UserError, RankError, OSError, RuntimeError) as error:
        facts["error"] = str(error)
    return facts


def _all_reduce() -> float:
    from hybridlab.launch.context import device

    value = torch.ones(1, device=device())
    dist.all_reduce(value)
    return value.item()


# --- the verdict -----------------------------------------------------------------------------------------------------


def _check_versions(facts: Mapping[str, Any]) -> Iterator[Problem]:
    version = facts["torch"]["version"]
    if torch.torch_version.TorchVersion(version) < _OLDEST_TORCH:
        yield Problem(f"torch {version} is older than {_OLDEST_TORCH}.", "pip install --upgrade torch", fatal=True)


def _check_gpus(facts: Mapping[str, Any]) -> Iterator[Problem]:
    driver, gpus = facts["nvidia_driver"], facts["gpus"]
    if driver and not gpus:
        version = driver.splitlines()[0]
        if facts["torch"]["cuda"] is None:
            yield Problem(
                f"this machine has NVIDIA GPUs, and torch {facts['torch']['version']} is a build without CUDA.",
                f"pip install --force-reinstall torch=={facts['torch']['version'].partition('+')[0]} from the index of "
                "a CUDA build (pytorch.org says which)",
            )
        else:
            yield Problem(
                f"torch, built for CUDA {facts['torch']['cuda']}, finds no usable GPU with driver {version}.",
                "update the driver, install a torch build for an older CUDA, or see what CUDA_VISIBLE_DEVICES hides",
            )
    if gpus and facts["nccl"] is None:
        yield Problem("this torch has no NCCL: ranks cannot talk between GPUs.", "install a CUDA build of torch", True)
    if links := facts["links"]:
        missing = links["pairs"] - links["peer_access_pairs"]
        if missing:
            yield Problem(
                f"{missing} of {links['pairs']} pairs of GPUs reach each other only through host memory.",
                "keep tensor parallelism on GPUs that reach each other (see the topology), or look whether a virtual "
                "machine or ACS setting blocks peer access",
            )


def _check_host(facts: Mapping[str, Any]) -> Iterator[Problem]:
    shm, memory, files = facts["shm"], facts["memory"], facts["open_files"]
    if facts["gpus"] and shm is not None and shm["total_bytes"] < _LEAST_SHM:
        yield Problem(
            f"/dev/shm has {shm['total_bytes'] / 2**20:.0f} MiB, and NCCL moves data between processes through it.",
            "in a container: docker run --shm-size=8g (or --ipc=host)",
        )
    if memory["available_bytes"] < _LEAST_MEMORY:
        yield Problem(
            f"only {memory['available_bytes'] / GIB:.1f} GiB of memory are available.",
            "end other programs, or use fewer ranks",
        )
    if 0 <= files["soft"] < _LEAST_FILES:
        yield Problem(f"a process may open {files['soft']} files; 64 ranks need about 500.", "ulimit -n 4096")


def _check_ranks(facts: Mapping[str, Any]) -> Iterator[Problem]:
    if not facts["gloo"] and not facts["ranks"]["nccl"]:
        yield Problem(
            "this torch has neither gloo nor usable NCCL: ranks cannot talk.", "install torch from PyPI", fatal=True
        )
    for name, backend in (("cluster", "gloo"), ("cluster_nccl", "NCCL")):
        cluster = facts[name]
        if cluster is None:
            continue
        if cluster["error"]:
            yield Problem(f"ranks do not run with {backend}: {cluster['error']}", _rank_fix(backend), fatal=True)
        elif cluster["method"] == "forkserver" and not cluster["preloaded"]:
            yield Problem(
                "ranks start slowly: the server they are forked from has not loaded torch.",
                f"{sys.executable} -m pip install -e . (the package must be installed, not only on the path)",
            )
        for module, why in cluster["preload_failures"].items():
            yield Problem(
                f"{module} cannot be imported: {why}",
                f"{sys.executable} -m pip install -e . (in hybridlab's folder)",
                fatal=module.startswith("hybridlab"),
            )


def _rank_fix(backend: str) -> str:
    if backend == "gloo":
        return "the loopback interface must be up (ip link set lo up); GLOO_SOCKET_IFNAME names another one"
    return "NCCL_DEBUG=INFO hybridlab doctor shows NCCL's own words"


_CHECKS: tuple[Callable[[Mapping[str, Any]], Iterator[Problem]], ...] = (
    _check_versions,
    _check_gpus,
    _check_host,
    _check_ranks,
)
