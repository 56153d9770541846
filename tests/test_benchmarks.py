"""The parts of benchmarks that run without an accelerator."""

from __future__ import annotations

import gzip
import json

import pytest

from benchmarks import overlap


def test_overlap_of_a_profile(tmp_path) -> None:
    """Two GPUs; only the lines of streams count, overlapping computes once."""
    events = [
        {"ph": "M", "name": "process_name", "pid": 1, "args": {"name": "/device:GPU:0"}},
        {"ph": "M", "name": "process_name", "pid": 2, "args": {"name": "/device:GPU:1"}},
        {"ph": "M", "name": "process_name", "pid": 3, "args": {"name": "/host:CPU"}},
        *({"ph": "M", "name": "thread_name", "pid": p, "tid": 13, "args": {"name": "Stream #13"}} for p in (1, 2)),
        *({"ph": "M", "name": "thread_name", "pid": p, "tid": 14, "args": {"name": "Stream #14"}} for p in (1, 2)),
        {"ph": "M", "name": "thread_name", "pid": 1, "tid": 99, "args": {"name": "XLA Ops"}},
        {"ph": "X", "name": "fa4_forward", "pid": 1, "tid": 13, "ts": 0.0, "dur": 1000.0},
        {"ph": "X", "name": "fusion", "pid": 1, "tid": 14, "ts": 500.0, "dur": 1000.0},
        {"ph": "X", "name": "ncclDevKernel_SendRecv", "pid": 1, "tid": 14, "ts": 1000.0, "dur": 1000.0},
        {"ph": "X", "name": "ncclDevKernel_SendRecv", "pid": 1, "tid": 99, "ts": 0.0, "dur": 9000.0},
        {"ph": "X", "name": "fa4_forward", "pid": 2, "tid": 13, "ts": 0.0, "dur": 1000.0},
        {"ph": "X", "name": "ncclDevKernel_SendRecv", "pid": 2, "tid": 14, "ts": 200.0, "dur": 600.0},
        {"ph": "X", "name": "ncclDevKernel_SendRecv", "pid": 3, "tid": 1, "ts": 0.0, "dur": 9000.0},
    ]
    (tmp_path / "plugins").mkdir()
    path = tmp_path / "plugins" / "vm.trace.json.gz"
    path.write_bytes(gzip.compress(json.dumps({"traceEvents": events}).encode()))
    seen = overlap.read(tmp_path)
    # GPU 0 transfers 1 ms, half of it under the fusion; GPU 1 transfers 0.6 ms, all of it under the kernel.
    assert seen.transfer == pytest.approx(0.8)
    assert seen.hidden == pytest.approx(0.55)
    assert seen.compute == pytest.approx(1.25)
    assert seen.total == pytest.approx(1.5)
    assert seen.share == pytest.approx(0.55 / 0.8)
    with pytest.raises(FileNotFoundError, match=r"no \*\.trace\.json\.gz"):
        overlap.read(tmp_path / "empty")
