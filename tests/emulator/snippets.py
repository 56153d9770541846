"""Runs a few PTX instructions on one or more warps: for instruction-level tests."""

from __future__ import annotations

import struct

import numpy as np

from .launch import Options, Report, run_foreign
from .memory import GlobalMemory

REGISTERS = """ .reg .pred p, q, %p<16>; .reg .b16 %h<32>; .reg .b64 base, place, %d<32>;
 .reg .b32 tx, lane_id, warp_id, %r<128>;
"""


def module(body: str, parameters: str = ".param .u64 data, .param .u64 out", target: str = "sm_90a") -> str:
    """A module with one entry ``k``. ``tx``, ``lane_id`` and ``warp_id`` are set; ``exit`` label is added."""
    return (
        f".version 8.8\n.target {target}\n.address_size 64\n.extern .shared .align 1024 .b8 smem[];\n"
        f".visible .entry k({parameters})\n{{\n{REGISTERS}"
        " mov.u32 tx, %tid.x; and.b32 lane_id, tx, 31; shr.u32 warp_id, tx, 5;\n" + body + "\n ret;\n}\n"
    )


def operation(text: str, inputs: list[np.ndarray], results: list[str], uniform: bool = False) -> list[np.ndarray]:
    """Executes ``text`` on 32 lanes.

    ``inputs``: arrays of 32 elements, put into registers named %r0.., %h0.. or %d0.. by their width and position
    (``%r0`` is input 0 if it has 32 bits, and so on; bool arrays become %p0..). ``uniform``: all lanes take element 0,
    through an address that the emulator knows to be uniform, which exercises the scalar code. ``results``: registers to
    return, as uint16, uint32 or uint64 arrays by their name (predicates as uint32).
    """
    words = np.zeros((len(inputs), 32), np.uint64)
    body = " ld.param.u64 base, [data];\n"
    for i, array in enumerate(inputs):
        array = np.broadcast_to(np.asarray(array), (32,))
        bits = 32 if array.dtype == bool else array.dtype.itemsize * 8
        unsigned = array.astype(np.uint32) if array.dtype == bool else np.ascontiguousarray(array).view(f"uint{bits}")
        words[i] = unsigned
        body += f" add.u64 place, base, {i * 256};\n"
        if not uniform:
            body += " mul.wide.u32 %d31, lane_id, 8; add.u64 place, place, %d31;\n"
        register = {16: f"%h{i}", 32: f"%r{i}", 64: f"%d{i}"}[bits]
        body += f" ld.global.b{bits} {register}, [place];\n"
        if array.dtype == bool:
            body += f" setp.ne.u32 %p{i}, %r{i}, 0;\n"
    body += text + "\n ld.param.u64 base, [out]; mul.wide.u32 %d31, lane_id, 8; add.u64 place, base, %d31;\n"
    for i, name in enumerate(results):
        if name.startswith("%p"):
            body += f" selp.u32 %r127, 1, 0, {name};\n st.global.b32 [place+{256 * i}], %r127;\n"
        else:
            bits = {"%h": 16, "%r": 32, "%d": 64}[name[:2]]
            body += f" st.global.b{bits} [place+{256 * i}], {name};\n"
    out = np.zeros((len(results), 32), np.uint64)
    launch(module(body), [words, out], threads=32)
    kinds = {"%h": np.uint16, "%r": np.uint32, "%d": np.uint64, "%p": np.uint32}
    return [out[i].astype(kinds[name[:2]]) for i, name in enumerate(results)]


def launch(ptx: str, arrays: list[np.ndarray], *, threads: int = 32, grid: int = 1, cluster: int = 1, shared: int = 0,
           extra: list | None = None, options: Options | None = None, read_only: int = 0) -> Report:  # fmt: skip
    """Runs entry ``k`` with the addresses of ``arrays`` (and then ``extra`` parameters)."""
    memory = GlobalMemory()
    parameters: list = []
    for i, array in enumerate(arrays):
        region = memory.add(f"array {i}", array.reshape(-1).view(np.uint8), writable=i >= read_only)
        parameters.append(struct.pack("<Q", region.base))
    for item in extra or []:
        parameters.append(item(memory.regions) if callable(item) else item)
    return run_foreign(
        ptx, "k", (grid, 1, 1), (threads, 1, 1), (cluster, 1, 1), shared, parameters, memory, options or Options()
    )
