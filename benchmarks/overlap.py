"""How much of the transfers' time lies under compute, read from a profile of one call."""

from __future__ import annotations

import collections
import gzip
import json
import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

import jax

TRANSFER_WORDS = ("nccl", "collective", "sendrecv", "allgather", "reducescatter", "alltoall", "memcpyp2p")
"""What the names of device activities that move data between devices contain, in lower case."""

Span = tuple[float, float]
"""Begin and end in microseconds."""


class Overlap(NamedTuple):
    """Means over devices, milliseconds: transfers, those of them under compute, compute, and the whole time line."""

    transfer: float
    hidden: float
    compute: float
    total: float

    @property
    def share(self) -> float:
        """Share of the transfers' time that lies under compute; NaN where there is no transfer."""
        return self.hidden / self.transfer if self.transfer else math.nan


def union(spans: Iterable[Span]) -> list[Span]:
    """Disjoint spans in order that cover the same times."""
    merged: list[Span] = []
    for start, stop in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], stop))
        else:
            merged.append((start, stop))
    return merged


def common(a: list[Span], b: list[Span]) -> float:
    """Length of the intersection of two lists of disjoint, ordered spans."""
    total, i, j = 0.0, 0, 0
    while i < len(a) and j < len(b):
        total += max(0.0, min(a[i][1], b[j][1]) - max(a[i][0], b[j][0]))
        if a[i][1] < b[j][1]:
            i += 1
        else:
            j += 1
    return total


def _length(spans: list[Span]) -> float:
    return sum(stop - start for start, stop in spans)


def device_activities(events: list[dict]) -> dict[int, list[dict]]:
    """Kernels and copies of each GPU (by the trace's process id).

    Only the lines of CUDA streams: others repeat the same time by operation, by module and by source line. Activities
    of a stream also carry CUPTI's correlation id, which tells them where lines have other names.
    """
    processes = {e["pid"]: e["args"]["name"] for e in events if e.get("name") == "process_name"}
    threads = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e.get("name") == "thread_name"}
    on_gpus = [e for e in events if e.get("ph") == "X" and "GPU" in processes.get(e["pid"], "")]
    on_streams = [e for e in on_gpus if threads.get((e["pid"], e["tid"]), "").lower().startswith("stream")]
    found = collections.defaultdict(list)
    for event in on_streams or [e for e in on_gpus if "correlation_id" in e.get("args", {})]:
        found[event["pid"]].append(event)
    return found


def read(folder: Path) -> Overlap:
    """The overlap in the newest profile below ``folder``.

    Raises:
      FileNotFoundError: there is none.
      ValueError: it has no device activity.
    """
    files = sorted(folder.rglob("*.trace.json.gz"), key=lambda path: path.stat().st_mtime)
    if not files:
        raise FileNotFoundError(f"no *.trace.json.gz below {folder}")
    with gzip.open(files[-1]) as file:
        activities = device_activities(json.load(file)["traceEvents"])
    if not activities:
        raise ValueError(f"{files[-1]} has no activity of a GPU's stream")
    figures = []
    for events in activities.values():
        transfers, computes = [], []
        for event in events:
            is_transfer = any(word in event["name"].lower() for word in TRANSFER_WORDS)
            (transfers if is_transfer else computes).append((event["ts"], event["ts"] + event.get("dur", 0.0)))
        moved, busy = union(transfers), union(computes)
        everything = union(moved + busy)
        whole = everything[-1][1] - everything[0][0]
        figures.append([x / 1e3 for x in (_length(moved), common(moved, busy), _length(busy), whole)])
    return Overlap(*(sum(column) / len(figures) for column in zip(*figures, strict=True)))


def profile(run: Callable[[], object], folder: Path) -> Overlap:
    """Profiles one call into ``folder`` and reads it. ``run`` has been called before, so that all is loaded."""
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0
    options.host_tracer_level = 1
    jax.block_until_ready(run())
    with jax.profiler.trace(str(folder), profiler_options=options):
        jax.block_until_ready(run())
    return read(folder)
