"""Emitters: what sm_100 adds: tcgen05 (tensor memory and tensor core) and cluster launch control."""

from __future__ import annotations

from .ptx import Instruction
from .sm100.cp import copy_shape
from .sm100.fragments import SHAPES, fragment
from .sm100.hazards import uses_before_wait
from .sm100.launch_control import first_ctaid, is_canceled, try_cancel
from .sm100.warp import MmaForm
from .translate import ENVIRONMENT, Translator, opcode

ENVIRONMENT.update(clc_try_cancel=try_cancel, clc_is_canceled=is_canceled, clc_first_ctaid=first_ctaid)


def _group(t: Translator, ins: Instruction) -> int:
    for part in ins.parts:
        if part.startswith("cta_group::"):
            return int(part[-1])
    raise t.fail(ins, "no .cta_group")


def _address(t: Translator, operand: tuple, kind: str = "u") -> str:
    """A memory operand's address as one scalar."""
    (inner,) = operand[1]
    return t.scalar(inner, kind)


@opcode("tcgen05.alloc")
def alloc(t: Translator, ins: Instruction) -> None:
    address, columns = ins.operands
    t.at(ins)
    t.line(f"q = w.tensor_alloc_begin({_address(t, address)}, {t.scalar(columns, 'u')}, {_group(t, ins)}, {t.mask})")
    t.line("while q is not None:")
    t.line(" yield q")
    t.line(" q = w.tensor_alloc_again()")


@opcode("tcgen05.dealloc")
def dealloc(t: Translator, ins: Instruction) -> None:
    address, columns = ins.operands
    t.at(ins)
    t.line(f"w.tensor_dealloc({t.scalar(address, 'u')}, {t.scalar(columns, 'u')}, {t.mask})")


@opcode("tcgen05.relinquish_alloc_permit")
def relinquish(t: Translator, ins: Instruction) -> None:
    t.at(ins)
    t.line(f"w.tensor_relinquish({t.mask})")


@opcode("tcgen05.fence::before_thread_sync", "tcgen05.fence::after_thread_sync")
def fence(t: Translator, ins: Instruction) -> None:
    t.at(ins)
    t.line(f"w.tensor_fence({ins.parts[1] == 'fence::after_thread_sync'}, {t.mask})")


@opcode("tcgen05.wait::ld", "tcgen05.wait::st")
def wait(t: Translator, ins: Instruction) -> None:
    t.at(ins)
    t.line(f"w.tensor_wait({ins.parts[1][-2:]!r}, {t.mask})")


def _fragment(t: Translator, ins: Instruction, registers: list[tuple], split: tuple | None) -> str:
    shape = next((p for p in ins.parts if p in SHAPES), None)
    num = next((int(p[1:]) for p in ins.parts if p[0] == "x" and p[1:].isdigit()), None)
    if shape is None or num is None or "red" in ins.parts:
        raise t.fail(ins)
    packed = "pack::16b" in ins.parts or "unpack::16b" in ins.parts
    part = fragment(shape, num, packed, split[1] if split else 0)
    if len(registers) != part.registers:
        raise t.fail(ins, f"{len(registers)} registers, the shape has {part.registers}")
    return t.constant(part)


def _vector(operand: tuple) -> list[tuple]:
    return operand[1] if operand[0] == "v" else [operand]


@opcode("tcgen05.ld")
def load(t: Translator, ins: Instruction) -> None:
    registers = _vector(ins.operands[0])
    part = _fragment(t, ins, registers, ins.operands[2] if len(ins.operands) > 2 else None)
    if t.kernel.tensor_hazards is None:
        t.kernel.tensor_hazards = uses_before_wait(t.flow)
    t.at(ins)
    t.line(f"L = w.tensor_load({part}, {_address(t, ins.operands[1])}, {bool(t.kernel.tensor_hazards)}, {t.mask})")
    kinds = {t.kinds[r[1]] if r[0] == "r" else "_" for r in registers}
    plain = t.mask == "M" and kinds in ({"f"}, {"u"}) and not any(t.flow.escaping(t.block, r[1]) for r in registers)
    if plain and not any(t.flow.uniform(r[1]) for r in registers):
        names = ", ".join(t.names[r[1]] for r in registers)
        t.line(f"{names}, = L" + (".view(f4)" if kinds == {"f"} else ""))
        return
    for number, register in enumerate(registers):
        if register[0] != "_":
            t.set(register, f"L[{number}]", "u", False)


@opcode("tcgen05.st")
def store(t: Translator, ins: Instruction) -> None:
    registers = _vector(ins.operands[-1])
    part = _fragment(t, ins, registers, ins.operands[1] if len(ins.operands) > 2 else None)
    kind = "f" if all(r[0] == "r" and t.kinds[r[1]] == "f" for r in registers) else "u"
    values = [t.value(r, kind) for r in registers]
    listed = ", ".join(f"spread_{kind}({v})" if v.uniform else str(v) for v in values)
    view = ".view(u4)" if kind == "f" else ""
    t.at(ins)
    t.line(
        f"w.tensor_store({part}, {_address(t, ins.operands[0])}, "
        f"np.concatenate(({listed},)){view}.reshape({len(values)}, 32), {t.mask})"
    )


_MMA_PARTS = {"tcgen05", "mma", "kind::f16", "kind::tf32", "cta_group::1", "cta_group::2"}


@opcode("tcgen05.mma")
def mma(t: Translator, ins: Instruction) -> None:
    if any(part not in _MMA_PARTS and not part.startswith("collector::a") for part in ins.parts):
        raise t.fail(ins)
    d, a, b, instruction, *rest = ins.operands
    disabled = "()"
    if rest and rest[0][0] == "v":
        words = [t.scalar(word, "u") for word in rest.pop(0)[1]]
        if len(words) != 4 * _group(t, ins):
            raise t.fail(ins, f"{len(words)} words of disabled lanes")
        disabled = f"({', '.join(words)},)"
    accumulate = t.predicate(rest.pop(0)) if rest else None
    scale = rest.pop(0)[1] if rest else 0
    kind = next(p[6:] for p in ins.parts if p.startswith("kind::"))
    form = t.constant(MmaForm(kind, _group(t, ins), a[0] == "m", scale))
    if accumulate is None:
        predicate = "True"
    else:
        predicate = str(accumulate) if accumulate.uniform else f"w.same({accumulate}, {t.mask})"
    first = _address(t, a) if a[0] == "m" else t.scalar(a, "U")
    t.at(ins)
    t.line(
        f"w.tensor_mma({form}, {_address(t, d)}, {first}, {t.scalar(b, 'U')}, {t.scalar(instruction, 'u')}, "
        f"{predicate}, {disabled}, {t.mask})"
    )
    t.line("yield")


@opcode("tcgen05.cp")
def copy(t: Translator, ins: Instruction) -> None:
    shape = next((p for p in ins.parts if p.endswith("b") and p[0].isdigit()), "")
    multicast = next((p for p in ins.parts if p.startswith("warpx")), "")
    if len(ins.parts) != 4 + bool(multicast):
        raise t.fail(ins, "source formats are not executed here")
    form = t.constant(copy_shape(shape, multicast))
    address, source = ins.operands
    t.at(ins)
    t.line(f"w.tensor_copy({form}, {_group(t, ins)}, {_address(t, address)}, {t.scalar(source, 'U')}, {t.mask})")
    t.line("yield")


@opcode("tcgen05.commit")
def commit(t: Translator, ins: Instruction) -> None:
    multicast = "multicast::cluster" in ins.parts
    _group(t, ins)
    address = ins.operands[0]
    kind = "U" if address[1][0][0] == "r" and t.kinds[address[1][0][1]] == "U" else "u"
    cta_mask = t.scalar(ins.operands[1], "h") if multicast else "None"
    t.at(ins)
    t.line(f"w.tensor_commit({_address(t, address, kind)}, {cta_mask}, {t.mask})")
    t.line("yield")


@opcode("mov.b128")
def move_handle(t: Translator, ins: Instruction) -> None:
    """Handles of cluster launch control are the only 128-bit registers: pairs of 64-bit values."""
    d, s = ins.operands
    if d[0] != "r" or s[0] != "v" or len(s[1]) != 2:
        raise t.fail(ins)
    low, high = (t.value(half, "U") for half in s[1])
    t.line(f"{t.names[d[1]]} = ({low}, {high})")


@opcode("clusterlaunchcontrol.try_cancel")
def cancel(t: Translator, ins: Instruction) -> None:
    response, barrier = (t.value(operand[1][0], "u") for operand in ins.operands)
    t.at(ins)
    t.line(f"clc_try_cancel(w, {response}, {barrier}, {'multicast::cluster::all' in ins.parts}, {t.mask})")
    t.line("yield")


@opcode("clusterlaunchcontrol.query_cancel")
def query(t: Translator, ins: Instruction) -> None:
    d, handle = ins.operands
    name = t.names[handle[1]]
    uniform = t.flow.uniform(handle[1])
    if ins.parts[2] == "is_canceled":
        t.set(d, f"clc_is_canceled({name})", "p", uniform)
        return
    _, _, axis = ins.parts[2].partition("::")
    for number, target in enumerate(d[1] if d[0] == "v" else [d]):
        if target[0] != "_" and number < 3:
            t.set(target, f"clc_first_ctaid({name}, {'xyz'.index(axis) if axis else number})", "u", uniform)
