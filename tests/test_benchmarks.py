"""The parts of benchmarks that run without an accelerator."""

from __future__ import annotations

import argparse
import csv
import dataclasses
import gzip
import json

import pytest

from benchmarks import launch_overhead, memory, overlap, ring_cost
from benchmarks.ring_cost import Machine, Problem


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


FREE = Machine(500, 450, *(1e12,) * 5, host=8, call=0.0, stop=0.0)
"""Transfers, memory and launches cost nothing."""


@pytest.mark.parametrize("strategy", ring_cost.STRATEGIES)
@pytest.mark.parametrize("devices", [1, 2, 8, 64])
def test_free_transfers_leave_the_speed_of_one_gpu(strategy: str, devices: int) -> None:
    forward = Problem(strategy, True, False, 2**17, 64, 8, devices)
    both = dataclasses.replace(forward, backward=True)
    assert ring_cost.tflops(forward, FREE) == pytest.approx(500)
    assert ring_cost.tflops(both, FREE) == pytest.approx(450)


def test_ring_hides_transfers_until_they_take_longer_than_a_stop() -> None:
    problem = Problem("ring", False, False, 2**16, 16, 16, 4)
    stop = 4 * 16 * (2**16) ** 2 * 128 / 4 / 4 / 500e12
    piece = 2 * 2**16 / 4 * 16 * 128 * 2  # bytes of a key and a value piece
    for longer in (0.5, 3.0):
        machine = dataclasses.replace(FREE, link=piece / (longer * stop) / 1e9)
        assert ring_cost.predict(problem, machine) == pytest.approx((3 * max(1, longer) + 1) * stop)
    # Backward: K/V and twice as many bytes of dK/dV at each stop, and the latter once more on the way home.
    both = dataclasses.replace(problem, backward=True)
    machine = dataclasses.replace(FREE, link=piece / stop / 1e9, both=500)
    assert ring_cost.predict(both, machine) == pytest.approx(4 * stop + (3 * 3 + 2.5 + 2) * stop)


def test_a_ring_over_two_hosts_goes_at_the_pace_of_the_network() -> None:
    machine = dataclasses.replace(FREE, link=300, gather=200, exchange=280, network=50)
    assert machine.spanning(8) == machine
    wide = machine.spanning(16)
    assert (wide.link, wide.gather) == (50, 200)
    assert wide.exchange == pytest.approx(1 / (8 / 15 / 50 + 7 / 15 / 280))


def test_measured_rows_are_predicted(tmp_path, capsys) -> None:
    path = tmp_path / "rows.csv"
    columns = ("strategy", "direction", "mask", "heads", "devices", "length", "tflops", "alone_tflops")
    rows = [
        ("ring", "forward", "causal", "16/16", 2, 2**18, 640.0, 650.0),
        ("ring", "both", "causal", "16/16", 2, 2**18, 600.0, 615.0),
    ]
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([columns, *rows])
    picture = tmp_path / "curve.png"
    ring_cost.main(["--rows", str(path), "--lengths", "262144", "--heads", "16/16", "--plot", str(picture)])
    printed = capsys.readouterr().out
    assert "| ring | both | causal | 16/16 | 2 | 262144 | 600.0 |" in printed
    assert "largest error" in printed and picture.read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ValueError, match="no forward row for causal"):
        ring_cost.compare(ring_cost.read_rows(path)[1:], FREE)


def test_memory_of_a_step() -> None:
    """Operands and results are counted to the byte; the total has the temporaries too."""
    arguments = argparse.Namespace(length=32, heads=(4, 2), head_dim=16, full=False, worker="blockwise")
    got = memory.measure(arguments)
    operands = 2 * 32 * 16 * (4 + 2 + 2 + 4)
    assert got["arguments"] == operands
    assert operands <= got["results"] <= operands + 1024  # out and three gradients, and XLA's tuple of them
    assert got["total"] == pytest.approx(got["arguments"] + got["results"] + got["temporaries"])


def test_launch_overhead_runs_each_program(monkeypatch) -> None:
    """The programs make as many calls as they say."""
    monkeypatch.setattr(launch_overhead, "CALLS", 3)
    calls = []
    programs = launch_overhead.programs(lambda query, key, value: calls.append(1) or query + key)
    results = {name: function(1.0, 2.0, 0.0) for name, function in programs.items()}
    assert results == {"one call": 3.0, "3 calls": 7.0, "scan of 3": 7.0}
    assert len(calls) == 1 + 3 + 1  # a scan traces its body once
    times = launch_overhead.measure(2, "xla")
    for functions in times.values():
        assert set(functions) == {"jax_fa4", "elementwise"}
        assert all(0 < returned <= ready for returned, ready in functions.values())
