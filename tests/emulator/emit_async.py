"""Emitters: bulk copies, the tensor memory accelerator, wgmma, commit and wait groups."""

from __future__ import annotations

from .emit_memory import address
from .emit_sync import wait
from .ptx import Instruction
from .translate import Translator, opcode


def _each(t: Translator, sources: list[tuple[str, bool]], call: str) -> None:
    """Emits ``call`` with the operands as ints: once if all are uniform, else once per distinct active lane."""
    t.line(f"w.issuing = {t.mask}")
    if all(uniform for _, uniform in sources):
        t.line(call.format(*(s for s, _ in sources)))
    else:
        arrays = ", ".join(s for s, _ in sources)
        t.line(f"for t in w.distinct({t.mask}, {arrays}):")
        t.line(" " + call.format(*(f"t[{i}]" for i in range(len(sources)))))
    t.line("w.issuing = w.initial_mask")


def _value(t: Translator, operand: tuple, kind: str) -> tuple[str, bool]:
    v = t.value(operand, kind)
    return v.expression, v.uniform


@opcode("cp.async.bulk.tensor", "cp.reduce.async.bulk.tensor")
def tensor_copy(t: Translator, ins: Instruction) -> None:
    parts, operands = ins.parts, ins.operands
    if any(p.startswith("im2col") or p.startswith("tile::") for p in parts):
        raise t.fail(ins)
    whole = next((o for o in operands[:2] if len(o[1]) == 2 and o[1][1][0] == "v"), None)  # [map, {coordinates}]
    if whole is None or f"{len(whole[1][1][1])}d" not in parts:
        raise t.fail(ins, "the rank and the number of coordinates differ")
    t.at(ins)
    t.line("yield")
    if operands[0][1][0][0] != "v" and len(operands[0][1]) == 1:  # [shared], [map, {coordinates}], [barrier] ...
        target, source, barrier = operands[0], operands[1], operands[2]
        tensor, coordinates = source[1][0], source[1][1]
        extra = operands[3:]
        multicast = "None"
        values = [address(t, target), _value(t, tensor, "U"), address(t, barrier)]
        values += [_value(t, c, "u") for c in coordinates[1]]
        if any("multicast" in p for p in parts):
            v = _value(t, extra.pop(0), "h")
            values.append(v)
            multicast = f"{{{len(values) - 1}}}"
        slots = ", ".join(f"{{{i}}}" for i in range(3, 3 + len(coordinates[1])))
        pair = "cta_group::2" in parts
        _each(t, values, f"tma_load(w, {{0}}, {{1}}, {{2}}, ({slots},), {multicast}, {pair})")
        return
    target, source = operands[0], operands[1]  # [map, {coordinates}], [shared]
    tensor, coordinates = target[1][0], target[1][1]
    operation = "None"
    if parts[1] == "reduce":
        operation = repr(next(p for p in parts if p in ("add", "min", "max", "inc", "dec", "and", "or", "xor")))
    values = [address(t, source), _value(t, tensor, "U")] + [_value(t, c, "u") for c in coordinates[1]]
    slots = ", ".join(f"{{{i}}}" for i in range(2, 2 + len(coordinates[1])))
    _each(t, values, f"tma_store(w, {{0}}, {{1}}, ({slots},), {operation})")


@opcode("cp.async.bulk.prefetch")
def prefetch(t: Translator, ins: Instruction) -> None:
    """A hint without effect on results."""


@opcode("cp.async.bulk", "cp.reduce.async.bulk")
def bulk_copy(t: Translator, ins: Instruction) -> None:
    parts, operands = ins.parts, ins.operands
    spaces = [p for p in parts if p.startswith(("shared", "global"))]
    t.at(ins)
    t.line("yield")
    first, second = address(t, operands[0]), address(t, operands[1])
    size = _value(t, operands[2], "u")
    if "multicast::cluster" in parts or any("cp_mask" in p for p in parts):
        raise t.fail(ins)
    if spaces[0].startswith("shared"):
        barrier = address(t, operands[3])
        if parts[1] == "reduce":
            raise t.fail(ins)
        kind = "load" if spaces[1].startswith("global") else "shared"
        _each(t, [first, second, size, barrier], f"bulk_{kind}(w, {{0}}, {{1}}, {{2}}, {{3}})")
        return
    operation, element = "None", "'b32'"
    if parts[1] == "reduce":
        operation = repr(next(p for p in parts if p in ("add", "min", "max", "inc", "dec", "and", "or", "xor")))
        element = repr(parts[-1])
    _each(t, [first, second, size], f"bulk_store(w, {{0}}, {{1}}, {{2}}, {operation}, {element})")


@opcode("cp.async.bulk.commit_group", "cp.async.bulk.wait_group", "cp.async.mbarrier", "cp.async.ca", "cp.async.cg",
        "cp.async.commit_group", "cp.async.wait_group", "cp.async.wait_all")  # fmt: skip
def bulk_groups(t: Translator, ins: Instruction) -> None:
    if ins.parts[2] != "bulk":
        raise t.fail(ins)
    t.at(ins)
    if "commit_group" in ins.parts:
        t.line("w.bulk.commit()")
        return
    t.line("yield")
    wait(t, f"w.groups_begin('bulk', {ins.operands[0][1]}, {'read' in ins.parts})", "w.groups_again()")


def store_async(t: Translator, ins: Instruction) -> None:
    """``st.async.weak.shared::cluster.mbarrier::complete_tx::bytes``: each lane stores and signals its own bytes."""
    from .emit_int import width

    nbytes = width(ins.parts[-1]) // 8
    kind = "u" if nbytes == 4 else "U"
    sources = ins.operands[1][1] if ins.operands[1][0] == "v" else [ins.operands[1]]
    values = ", ".join(str(t.value(o, kind)) for o in sources)
    t.at(ins)
    t.line("yield")
    place, barrier = address(t, ins.operands[0])[0], address(t, ins.operands[2])[0]
    t.line(f"async_store(w, {place}, [{values}], {nbytes}, {barrier}, {t.mask})")


def reduce_async(t: Translator, ins: Instruction) -> None:
    raise t.fail(ins)


@opcode("wgmma.fence", "wgmma.commit_group", "wgmma.wait_group", "wgmma.mma_async")
def wgmma(t: Translator, ins: Instruction) -> None:
    action = ins.parts[1]
    t.at(ins)
    if action == "fence":
        pass  # what it must order is checked before a kernel runs: fences.py
    elif action == "commit_group":
        t.line("w.wgmma_groups.commit()")
    elif action == "wait_group":
        t.line("yield")
        wait(t, f"w.groups_begin('wgmma', {ins.operands[0][1]}, False)", "w.groups_again()")
    else:
        _product(t, ins)


def _product(t: Translator, ins: Instruction) -> None:
    d, a, b, *rest = ins.operands
    shape = ins.parts[4]
    types = ins.parts[5:8]
    keep = t.predicate(rest[0])
    immediates = tuple(o[1] for o in rest[1:])
    registers = ", ".join(t.names[o[1]] for o in d[1])
    if any(t.kinds[o[1]] != "f" for o in d[1]):
        registers = ", ".join(str(t.value(o, "f")) for o in d[1])
    if a[0] == "v":
        left = "(" + ", ".join(f"lanes({t.value(o, 'u')}, u4)" for o in a[1]) + ")"
    else:
        left = t.scalar(a, "U")
    right = t.scalar(b, "U")
    flag = keep.expression if keep.uniform else f"w.same({keep}, M)"
    t.line("yield")
    t.line(f"t = ({registers},)")
    t.line(f"g = wgmma_issue(w, {shape!r}, t, {left}, {right}, {flag}, {immediates}, {types})")
    t.line("if g is not t:")
    names = [o[1] for o in d[1]]
    if any(t.flow.uniform(n) for n in names):
        raise t.fail(ins, "uniform accumulators")
    if all(t.kinds[n] == "f" for n in names):
        t.line(f" {', '.join(t.names[n] for n in names)}, = g")
    else:
        targets = ", ".join(t.names[n] for n in names)
        t.line(f" {targets}, = [v.view(u4) for v in g]")
