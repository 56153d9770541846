"""Emitters: loads, stores, atomics, matrix loads, prefetches, address-space queries."""

from __future__ import annotations

from .emit_int import width
from .ptx import Instruction
from .translate import BITS, INT_KIND, Translator, opcode

_VECTOR = {"v2": 2, "v4": 4, "v8": 8}
_ORDERED = ("acquire", "release", "relaxed", "volatile", "mmio")


def space(ins: Instruction) -> str:
    for part in ins.parts:
        base = part.split("::")[0]
        if base in ("global", "shared", "param", "local", "const"):
            return "global" if base == "const" else base
    return "generic"


def item_bytes(t: Translator, ins: Instruction) -> int:
    suffix = ins.parts[-1]
    if suffix in ("f16", "bf16"):
        return 2
    if suffix in ("f16x2", "bf16x2"):
        return 4
    if suffix == "b128":
        return 16
    return width(suffix) // 8


def address(t: Translator, operand: tuple) -> tuple[str, bool]:
    """Source of an address operand ``[base+offset]`` and whether it is uniform; 32-bit bases wrap at 32 bits."""
    inner = operand[1][0]
    v = t.raw(inner, "U") if inner[0] != "i" else t.value(inner, "U")
    return v.expression, v.uniform


def _vector(ins: Instruction) -> int:
    return next((_VECTOR[p] for p in ins.parts if p in _VECTOR), 1)


@opcode("ld", "ldu")
def load(t: Translator, ins: Instruction) -> None:
    where, nbytes, vector = space(ins), item_bytes(t, ins), _vector(ins)
    d, a = ins.operands[0], ins.operands[1]
    targets = d[1] if d[0] == "v" else [d]
    if nbytes == 16:
        raise t.fail(ins)
    t.at(ins)
    kind = INT_KIND[nbytes * 8]
    suffix = ins.parts[-1]
    source, uniform = address(t, a)
    strong = any(p in _ORDERED for p in ins.parts) and where != "param"
    if where == "local":
        t.line(f"t = w.ld_local({source}, {nbytes}, {vector})")
        uniform = False
    elif uniform:
        if strong:
            t.line("yield")
        t.line(f"t = w.ld_uniform({where!r}, {source}, {nbytes}, {vector}, {t.mask}, {strong})")
    else:
        if strong:
            t.line("yield")
        t.line(f"t = w.ld({where!r}, {source}, {nbytes}, {vector}, {t.mask}, {strong})")
    if strong:
        function = "acquire_from" if "acquire" in ins.parts else "note_acquire"
        t.line(f"w.{function}({where!r}, {source}, {t.mask})")
    for i, target in enumerate(targets):
        if target[0] == "_":
            continue
        held = t.kinds[target[1]]
        expr, got = f"t[{i}]", kind
        if nbytes == 1 and not uniform:
            expr = f"{expr}.astype(u2)"
        if BITS[held] != BITS[got] or (suffix == "s8"):
            is_signed = suffix[0] == "s"
            expr = f"resize({expr}, {nbytes * 8}, {is_signed}, {BITS[held]})"
            got = INT_KIND[BITS[held]]
        t.set(target, expr, got, uniform)


@opcode("st")
def store(t: Translator, ins: Instruction) -> None:
    if "async" in ins.parts:
        from .emit_async import store_async

        return store_async(t, ins)
    where, nbytes = space(ins), item_bytes(t, ins)
    a, s = ins.operands[0], ins.operands[1]
    sources = s[1] if s[0] == "v" else [s]
    t.at(ins)
    kind = INT_KIND[nbytes * 8]
    values = ", ".join(str(t.value(o, kind)) for o in sources)
    source, _ = address(t, a)
    if where == "local":
        t.line(f"w.st_local({source}, [{values}], {nbytes}, {t.mask})")
        return
    strong = any(p in _ORDERED for p in ins.parts)
    if strong:
        t.line("yield")
        if "release" in ins.parts:
            t.line(f"w.release_to({where!r}, {source}, {t.mask}, w.clocks); w.tick()")
        else:
            t.line(f"if w.fence_clock is not None: w.release_to({where!r}, {source}, {t.mask}, w.fence_clock)")
        t.line("w.machine.progress += 1")
    t.line(f"w.st({where!r}, {source}, [{values}], {nbytes}, {t.mask}, {strong})")


@opcode("atom", "red")
def atomic(t: Translator, ins: Instruction) -> None:
    if "async" in ins.parts:
        from .emit_async import reduce_async

        return reduce_async(t, ins)
    operands = list(ins.operands)
    destination = operands.pop(0) if ins.parts[0] == "atom" else None
    a, values = operands[0], operands[1:]
    suffix = ins.parts[-1]
    kind = INT_KIND[item_bytes(t, ins) * 8]
    operation = next(p for p in ins.parts if p in (
        "add", "min", "max", "and", "or", "xor", "exch", "cas", "inc", "dec"))  # fmt: skip
    order = next((p for p in ins.parts if p in ("relaxed", "acquire", "release", "acq_rel")), "relaxed")
    t.at(ins)
    t.line("yield")
    rendered = []
    for v in values:
        if v[0] == "v":
            rendered.append("[" + ", ".join(str(t.value(o, kind)) for o in v[1]) + "]")
        else:
            rendered.append(str(t.value(v, kind)))
    source, _ = address(t, a)
    values_text = ", ".join(rendered)
    t.line(f"t = w.atomic({space(ins)!r}, {source}, {operation!r}, {suffix!r}, [{values_text}], {t.mask}, {order!r})")
    if destination is not None:
        for i, target in enumerate(destination[1] if destination[0] == "v" else [destination]):
            if target[0] != "_":
                t.set(target, f"t[{i}]", kind, False)


@opcode("ldmatrix", "stmatrix")
def matrix(t: Translator, ins: Instruction) -> None:
    if "m8n8" not in ins.parts or ins.parts[-1] != "b16":
        raise t.fail(ins)
    count = int(next(p for p in ins.parts if p in ("x1", "x2", "x4"))[1:])
    transpose = "trans" in ins.parts
    t.at(ins)
    if ins.parts[0] == "ldmatrix":
        targets = ins.operands[0][1] if ins.operands[0][0] == "v" else [ins.operands[0]]
        source, _ = address(t, ins.operands[1])
        t.line(f"t = w.ldmatrix({source}, {count}, {transpose}, {t.mask})")
        for i, target in enumerate(targets):
            t.set(target, f"t[{i}]", "u", False)
    else:
        sources = ins.operands[1][1] if ins.operands[1][0] == "v" else [ins.operands[1]]
        values = ", ".join(str(t.value(o, "u")) for o in sources)
        source, _ = address(t, ins.operands[0])
        t.line(f"w.stmatrix({source}, [{values}], {transpose}, {t.mask})")


@opcode("movmatrix")
def move_matrix(t: Translator, ins: Instruction) -> None:
    v = t.value(ins.operands[1], "u")
    expr = f"np.ascontiguousarray(lanes({v}, u4).view(u2).reshape(8, 8).T).reshape(-1).view(u4)"
    t.set(ins.operands[0], expr, "u", False)


@opcode("prefetch", "prefetchu", "discard", "applypriority", "createpolicy", "isspacep", "mapa", "getctarank")
def addressing(t: Translator, ins: Instruction) -> None:
    name = ins.parts[0]
    if name in ("prefetch", "prefetchu", "discard", "applypriority"):
        return  # hints without effect on results
    d = ins.operands[0]
    if name == "createpolicy":
        t.set(d, "0", "U", True)
        return
    kind = "U" if ins.parts[-1] in ("u64", "b64") else "u"
    v = t.value(ins.operands[1], kind if name != "isspacep" else "U")
    if name == "mapa":
        rank = t.value(ins.operands[2], "u")
        both = v.uniform and rank.uniform
        if both or (rank.uniform and not v.uniform):
            shifted = f"({rank} << 24)"
        else:
            shifted = f"({rank} << 24)" if kind == "u" else f"({rank}.astype(u8) << 24)"
        t.set(d, f"({v} & {0xFFFFFFFF00FFFFFF if kind == 'U' else 0x00FFFFFF} | {shifted})", kind, both)
    elif name == "getctarank":
        expr = f"({v} >> 24 & 255)"
        if kind == "U" and not v.uniform:
            expr = f"{expr}.astype(u4)"
        t.set(d, expr, "u", v.uniform)
    else:
        where = ins.parts[1].split("::")[0]
        table = {
            "shared": "(({v} >> 32) == SHARED_WINDOW >> 32)",
            "global": "({v} >= GLOBAL_BASE)",
            "param": "(({v} >> 32) == PARAM_BASE >> 32)",
            "local": "({v} < 0)",
        }
        if where not in table:
            raise t.fail(ins)
        t.set(d, table[where].format(v=v), "p", v.uniform)
