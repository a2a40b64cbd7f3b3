"""Machines we know: presets of `hybridlab.plan.cluster`.

Peaks are the data sheets' for dense matrix products. Link rates are per card and one direction, at what nccl-tests
usually reports as bus bandwidth for large messages, about three quarters of the cable. ``8x…`` is one node of eight;
``16x8xH100`` is sixteen of them.
"""

from __future__ import annotations

import difflib
import json
from dataclasses import replace
from pathlib import Path

from hybridlab.errors import UserError
from hybridlab.plan.cluster import GIB, Cluster, Device, Link

A100 = Device(
    name="A100-SXM-80GB",
    memory_bytes=80 * GIB,
    peak_flops={"bf16": 312e12, "fp16": 312e12, "fp32": 19.5e12, "fp64": 19.5e12},
    memory_bytes_per_second=2.0e12 * 0.8,
    best_efficiency=0.74,
    half_width=150.0,
)
H100 = Device(
    name="H100-SXM-80GB",
    memory_bytes=80 * GIB,
    peak_flops={"bf16": 989.4e12, "fp16": 989.4e12, "fp32": 67e12, "fp64": 67e12},
    memory_bytes_per_second=3.35e12 * 0.8,
    best_efficiency=0.52,
    half_width=400.0,
)
H200 = replace(H100, name="H200-SXM-141GB", memory_bytes=140 * GIB, memory_bytes_per_second=4.8e12 * 0.8)
RTX4090 = Device(
    name="RTX-4090-24GB",
    memory_bytes=24 * GIB,
    peak_flops={"bf16": 165.2e12, "fp16": 165.2e12, "fp32": 82.6e12, "fp64": 1.29e12},
    memory_bytes_per_second=1.008e12 * 0.8,
    best_efficiency=0.80,
    half_width=150.0,
)
CORE = Device(
    name="one laptop core",
    memory_bytes=2 * GIB,
    peak_flops={"bf16": 25e9, "fp16": 25e9, "fp32": 50e9, "fp64": 25e9},
    memory_bytes_per_second=8e9,
    best_efficiency=0.8,
    half_width=32.0,
)

_PCIE4 = Link("PCIe 4.0 x16", 22e9, 10e-6)
_PCIE5 = Link("PCIe 5.0 x16", 45e9, 10e-6)

A100_NODE = Cluster(
    name="8xA100-80GB",
    nodes=1,
    gpus_per_node=8,
    device=A100,
    node=Link("NVLink 3", 230e9, 6e-6),
    network=Link("InfiniBand HDR 200 Gb/s", 22e9, 12e-6),
    host=_PCIE4,
    host_memory_bytes=1024 * GIB,
)
H100_NODE = Cluster(
    name="8xH100",
    nodes=1,
    gpus_per_node=8,
    device=H100,
    node=Link("NVLink 4", 350e9, 6e-6),
    network=Link("InfiniBand NDR 400 Gb/s", 45e9, 12e-6),
    host=_PCIE5,
    host_memory_bytes=2048 * GIB,
)
H200_NODE = replace(H100_NODE, name="8xH200", device=H200)
RTX4090_NODE = Cluster(
    name="8x4090",
    nodes=1,
    gpus_per_node=8,
    device=RTX4090,
    node=Link("PCIe 4.0 through host memory (no peer-to-peer)", 10e9, 20e-6),
    network=Link("Ethernet 100 Gb/s shared by a node", 1.5e9, 30e-6),
    host=Link("PCIe 4.0 x16 shared by a node", 12e9, 10e-6),
    host_memory_bytes=512 * GIB,
    note="gaming cards have no NVLink and no peer-to-peer over PCIe: every byte passes through host memory",
)
LAPTOP = Cluster(
    name="laptop",
    nodes=1,
    gpus_per_node=8,
    device=CORE,
    node=Link("gloo over loopback", 0.8e9, 100e-6),
    network=Link("gloo over loopback", 0.8e9, 100e-6),
    host=Link("the same memory", 8e9, 1e-6),
    host_memory_bytes=8 * GIB,
    host_adam_parameters_per_second=2e8,
    overlap=0.0,
    note="eight ranks as processes on two cores; `hybridlab doctor --measure` writes the real figures of a machine",
)

PRESETS: dict[str, Cluster] = {
    cluster.name: cluster for cluster in (A100_NODE, H100_NODE, H200_NODE, RTX4090_NODE, LAPTOP)
}


def preset(name: str) -> Cluster | None:
    """A preset by name, or several nodes of one: "8xH100", "16x8xH100". None when there is no such machine."""
    if name in PRESETS:
        return PRESETS[name]
    nodes, _, base = name.partition("x")
    if nodes.isdigit() and int(nodes) >= 1 and base in PRESETS and base != "laptop":
        return replace(PRESETS[base], name=name, nodes=int(nodes))
    return None


def load_cluster(given: str) -> Cluster:
    """A preset by name, or a file.

    Raises:
        UserError: neither; names the nearest preset.
    """
    known = preset(given)
    if known is not None:
        return known
    path = Path(given)
    if path.suffix == ".json" or path.exists():
        try:
            return Cluster.from_json(json.loads(path.read_text(encoding="utf-8")), path.name)
        except OSError as error:
            raise UserError(f"cannot be read: {error.strerror}.", key="--cluster", value=given) from None
        except json.JSONDecodeError as error:
            raise UserError(f"is not JSON: {error}.", key="--cluster", value=given) from None
    close = difflib.get_close_matches(given, PRESETS, n=1)
    raise UserError(
        f"{given!r} is no known cluster and no file.",
        key="--cluster",
        value=given,
        fix=f"did you mean {close[0]}?" if close else "one of " + ", ".join(PRESETS) + ", or a JSON file.",
    )
