"""Ways in: compile a kernel's PTX, launch it, run a LaunchPlan over NumPy buffers, run a foreign kernel."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from . import copies, tma, wgmma
from .errors import EmulatorError, SyncError
from .fences import accesses_after_fence
from .machine import Launch, Machine
from .memory import PARAM_BASE, SHARED_RESERVED, GlobalMemory, Region
from .ptx import Kernel, parse
from .race import PROXY_GLOBAL, Shadow
from .translate import ENVIRONMENT, compile_kernel

ENVIRONMENT.update(
    tma_load=copies.tma_load, tma_store=copies.tma_store, bulk_load=copies.bulk_load, bulk_shared=copies.bulk_shared,
    bulk_store=copies.bulk_store, async_store=copies.async_store, wgmma_issue=wgmma.issue,
    SHARED_WINDOW=0x0A0000000000, GLOBAL_BASE=0x7F0000000000, PARAM_BASE=PARAM_BASE,
)  # fmt: skip


@dataclass
class Options:
    """How to run. ``seed`` 0 is a plain round-robin schedule; others draw the adversary's choices.

    ``unwaited_loads``: accept kernels that use registers of tcgen05.ld before tcgen05.wait::ld (ptxas makes them work;
    PTX gives no such guarantee). ``tensor_fences``: require tcgen05.fence::before_thread_sync and ::after_thread_sync
    around the barriers that hand tensor memory between threads, as PTX does (CuTe-DSL pipelines emit none).
    ``chip_products``: wgmma adds as an H200 does, bit by bit (half as fast as in float32, which is the default).
    """

    seed: int = 0
    temperament: str | None = None
    detect_races: bool = True
    resident: int = 16
    unwaited_loads: bool = False
    tensor_fences: bool = False
    chip_products: bool = False


@dataclass
class Report:
    """What a launch did: counters by name, PTX instructions by opcode (per warp), the PTX lines that were executed, and
    those of the tcgen05 fences (with ``tensor_fences``) and warp barriers that ordered anything."""

    counters: dict[str, int] = field(default_factory=dict)
    opcodes: dict[str, int] = field(default_factory=dict)
    lines: set[int] = field(default_factory=set)
    effects: set[int] = field(default_factory=set)


class Program:
    """A kernel translated for one block shape. Attribute ``warp`` is the generator function of a warp."""

    def __init__(self, kernel: Kernel, block: tuple[int, int, int]):
        self.kernel = kernel
        symbols: dict[str, str] = {}
        for name, (offset, _) in kernel.params.items():
            symbols[name] = str(PARAM_BASE + offset)
        place = SHARED_RESERVED
        local = 0
        self.globals: list = []
        dynamic = None
        for variable in kernel.variables.values():
            if variable.space == "shared" and variable.size:
                place = -(-place // variable.align) * variable.align
                symbols[variable.name] = f"(w.cta.window + {place})"
                place += variable.size
            elif variable.space == "shared":
                dynamic = variable
            elif variable.space == "local":
                local = -(-local // variable.align) * variable.align
                symbols[variable.name] = str(local)
                local += variable.size
            else:
                self.globals.append(variable)
                symbols[variable.name] = f"w.machine.symbols[{variable.name!r}]"
        self.static_bytes = place - SHARED_RESERVED
        if dynamic is not None:
            place = -(-place // dynamic.align) * dynamic.align
            self.static_bytes = place - SHARED_RESERVED
            symbols[dynamic.name] = f"(w.cta.window + {place})"
        self.local_bytes = local
        one_dimensional = block[1] == 1 and block[2] == 1
        self.warp, self.source, flow = compile_kernel(
            kernel, symbols, one_dimensional, block[0] * block[1] * block[2] % 32 != 0
        )
        self.unfenced = accesses_after_fence(flow)
        self.block_count = len(flow.blocks)
        self.histograms, self.lines = [], []
        for b in flow.blocks:
            counts: dict[str, int] = {}
            for ins in kernel.instructions[b.start : b.stop]:
                counts[ins.opcode] = counts.get(ins.opcode, 0) + 1
            self.histograms.append(counts)
            self.lines.append([ins.line for ins in kernel.instructions[b.start : b.stop]])


_PARSED: dict[str, dict[str, Kernel]] = {}
_PROGRAMS: dict[tuple, Program] = {}
KEPT_PROGRAMS = 64


def program(ptx: str, entry: str, block: tuple[int, int, int]) -> Program:
    """The translation of an entry for a block shape, kept for the life of the process."""
    digest = hashlib.sha256(ptx.encode()).hexdigest()
    key = (digest, entry, tuple(block))
    found = _PROGRAMS.get(key)
    if found is None:
        kernels = _PARSED.get(digest)
        if kernels is None:
            kernels = _PARSED[digest] = parse(ptx)
        if entry not in kernels:
            raise EmulatorError(f"no entry {entry}; the module has {', '.join(kernels)}")
        kernel = kernels[entry]
        if kernel.reqntid and tuple(block) != kernel.reqntid:
            raise EmulatorError(f"block {tuple(block)} but the kernel requires {kernel.reqntid}")
        for kept in (_PROGRAMS, _PARSED):
            while len(kept) >= KEPT_PROGRAMS:
                kept.pop(next(iter(kept)))  # the oldest: mutants come by the hundred
        found = _PROGRAMS[key] = Program(kernel, block)
    return found


def execute(found: Program, launch: Launch, memory: GlobalMemory, params: bytes, tensor_maps: dict,
            options: Options) -> Report:  # fmt: skip
    """Runs one launch. ``params`` are the bytes of the parameter space."""
    if found.kernel.tensor_hazards and not options.unwaited_loads:
        use, load = found.kernel.tensor_hazards[0]
        raise SyncError(f"PTX line {use} uses a register of the tcgen05.ld in line {load} before tcgen05.wait::ld")
    if found.unfenced:
        product, access = found.unfenced[0]
        what = f"the access to its registers in line {access}" if access else "the kernel's beginning"
        raise SyncError(f"wgmma.mma_async in PTX line {product} without wgmma.fence after {what}")
    machine = Machine(
        found, launch, memory, params, seed=options.seed, temperament=options.temperament,
        detect_races=options.detect_races, resident=options.resident, tensor_maps=tensor_maps,
        tensor_fences=options.tensor_fences, chip_products=options.chip_products,
    )  # fmt: skip
    padded = np.zeros(-(-max(len(params), 16) // 16) * 16, np.uint8)
    padded[: len(params)] = np.frombuffer(params, np.uint8)
    machine.param_region = Region("kernel parameters", PARAM_BASE, len(padded), padded)
    machine.param_region.writable = False
    machine.symbols = {}
    for variable in found.globals:
        data = np.zeros(-(-max(variable.size, 1) // 16) * 16, np.uint8)
        if variable.data:
            data[: len(variable.data)] = np.frombuffer(variable.data, np.uint8)
        machine.symbols[variable.name] = memory.add(variable.name, data).base
    for region in memory.regions:
        region.shadow = None
        if options.detect_races and region.writable:
            region.shadow = Shadow(region.name, region.size, machine.columns, PROXY_GLOBAL, False)
    machine.run()
    report = Report(counters=dict(machine.counters), effects=machine.effects)
    for times, histogram, lines in zip(machine.block_counts, found.histograms, found.lines, strict=True):
        if times:
            report.lines.update(lines)
            for opcode, count in histogram.items():
                report.opcodes[opcode] = report.opcodes.get(opcode, 0) + count * times
    return report


def _bytes_of(array: np.ndarray) -> np.ndarray:
    if not array.flags.c_contiguous:
        raise EmulatorError("buffers must be C-contiguous")
    return array.reshape(-1).view(np.uint8)


def executor(plan, artefacts: Mapping[str, str] | Sequence[str], buffers: Sequence[np.ndarray], operands: int = 0,
             options: Options | None = None) -> list[Report]:  # fmt: skip
    """Runs a LaunchPlan (``jax_fa4.ffi.plan``) over NumPy buffers in place.

    ``artefacts``: PTX text by sha256 of the cubin, or in the order of ``plan.artefacts``. ``buffers``: all operands,
    then all results; the first ``operands`` are read-only. Returns one report per kernel step.
    """
    from jax_fa4.ffi import plan as plans

    options = options or Options()
    memory = GlobalMemory()
    regions = [
        memory.add(f"buffer {i} {b.dtype}{list(b.shape)}", _bytes_of(b), writable=i >= operands)
        for i, b in enumerate(buffers)
    ]
    reports = []
    for step in plan.steps:
        if isinstance(step, plans.Fill):
            region = regions[step.buffer]
            if step.offset % 4 or step.size % 4 or step.offset + step.size > region.size:
                raise EmulatorError(f"fill of {step.size} bytes at {step.offset} of {region.name}")
            region.bytes[step.offset : step.offset + step.size].view(np.uint32)[:] = step.pattern
            continue
        reference = plan.artefacts[step.artefact]
        ptx = artefacts[reference.sha256] if isinstance(artefacts, Mapping) else artefacts[step.artefact]
        found = program(ptx, reference.entry, step.block)
        params, maps = pack_parameters(found.kernel, step.parameters, regions)
        launch = Launch(step.grid, step.block, step.cluster, step.shared_bytes, found.static_bytes)
        reports.append(execute(found, launch, memory, params, maps, options))
    memory.write_back()
    return reports


def pack_parameters(kernel: Kernel, parameters: Sequence, regions: Sequence[Region]) -> tuple[bytes, dict]:
    """The parameter space of a plan's kernel step. Sizes are checked against the entry's declaration."""
    from jax_fa4.ffi import plan as plans

    if len(parameters) != len(kernel.params):
        raise EmulatorError(f"{len(parameters)} parameters given, {kernel.name} has {len(kernel.params)}")
    space = bytearray(kernel.param_bytes)
    maps: dict[int, tma.TensorMap] = {}
    for i, (parameter, (offset, size)) in enumerate(zip(parameters, kernel.params.values(), strict=True)):
        if isinstance(parameter, plans.TensorMap):
            description = tma.TensorMap(
                regions[parameter.buffer].base + parameter.offset, parameter.dtype, tuple(parameter.dims),
                tuple(parameter.strides), tuple(parameter.box), parameter.swizzle,
            )  # fmt: skip
            description.check()
            maps[i] = description
            data = tma.encode(i)
        elif isinstance(parameter, plans.Tensor):
            address = regions[parameter.buffer].base + parameter.offset
            kind = "i" if parameter.int_bits == 32 else "q"
            data = struct.pack(f"<Q{len(parameter.ints)}{kind}", address, *parameter.ints)
        else:
            data = struct.pack("<" + parameter.format, *parameter.values)
        if len(data) > size or size - len(data) >= 16:
            raise EmulatorError(f"parameter {i} of {kernel.name} has {size} bytes, the plan gives {len(data)}")
        space[offset : offset + len(data)] = data
    return bytes(space), maps


def run_foreign(ptx: str, entry: str, grid, block, cluster, shared_bytes: int, parameters: Sequence,
                memory: GlobalMemory, options: Options | None = None) -> Report:  # fmt: skip
    """Runs a kernel of another project: PTX text and raw parameters.

    ``parameters``: per kernel parameter either bytes, or a :class:`tma.TensorMap`. Pointers are addresses of regions
    that the caller made with ``memory.add(name, uint8_array)``: ``struct.pack("<Q", region.base)``.
    """
    found = program(ptx, entry, tuple(block))
    kernel = found.kernel
    if len(parameters) != len(kernel.params):
        raise EmulatorError(f"{len(parameters)} parameters given, {kernel.name} has {len(kernel.params)}")
    space = bytearray(kernel.param_bytes)
    maps = {}
    for i, (parameter, (offset, size)) in enumerate(zip(parameters, kernel.params.values(), strict=True)):
        if isinstance(parameter, tma.TensorMap):
            parameter.check()
            maps[i], data = parameter, tma.encode(i)
        else:
            data = bytes(parameter)
        if len(data) > size:
            raise EmulatorError(f"parameter {i} of {kernel.name} has {size} bytes, {len(data)} are given")
        space[offset : offset + len(data)] = data
    launch = Launch(grid, block, cluster, shared_bytes, found.static_bytes)
    report = execute(found, launch, memory, bytes(space), maps, options or Options())
    memory.write_back()
    return report
