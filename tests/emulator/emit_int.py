"""Emitters: moves, integer arithmetic, logic, comparisons, selection, and warp-wide exchanges of data."""

from __future__ import annotations

from .ptx import Instruction
from .translate import BITS, INT_KIND, Translator, Value, opcode

_BASIC = {"add": "+", "sub": "-", "and": "&", "or": "|", "xor": "^"}


def width(suffix: str) -> int:
    """Bits of a type suffix such as ``s32``; 1 for ``pred``."""
    return 1 if suffix == "pred" else int(suffix.lstrip("busf"))


def _binary(t: Translator, ins: Instruction) -> tuple[int, bool, str, Value, Value]:
    bits, is_signed = width(ins.parts[-1]), ins.parts[-1][0] == "s"
    kind = INT_KIND[bits]
    return bits, is_signed, kind, t.value(ins.operands[1], kind), t.value(ins.operands[2], kind)


@opcode("mov", "cvta", "cvta.to", "cvta.param")
def mov(t: Translator, ins: Instruction) -> None:
    d, s = ins.operands
    if ins.parts[0] == "cvta":
        return _cvta(t, ins)
    if d[0] == "v":
        _unpack(t, d[1], s)
        return
    if d[0] == "_":
        return
    held = t.kinds[d[1]]
    if held == "p":
        v = t.predicate(s)
    else:
        v = t.raw(s, held)
        if s[0] == "s":
            v = Value(v.expression, "u" if BITS[held] == 32 else "U", True)
    t.set(d, v.expression, v.kind, v.uniform, alias=s[0] == "r" and s[1] in t.accumulators)


def _cvta(t: Translator, ins: Instruction) -> None:
    d, s = ins.operands
    v = t.value(s, "U")
    if "shared" in ins.parts or "shared::cta" in ins.parts or "shared::cluster" in ins.parts:
        if "to" in ins.parts:
            t.set(d, f"({v} & 0xffffffff)", "U", v.uniform)
        else:
            t.set(d, f"({v} | SHARED_WINDOW)", "U", v.uniform)
    elif any(space in ins.parts for space in ("global", "param", "const")):
        t.set(d, v.expression, "U", v.uniform)
    else:
        raise t.fail(ins)


def _unpack(t: Translator, destinations: list[tuple], source: tuple) -> None:
    v = t.raw(source)
    if len(destinations) != 2:
        if len(destinations) == 4 and BITS[v.kind] == 64:
            v = t.convert(v, "U")
            t.line(f"t = {v}")
            for i, d in enumerate(destinations):
                if d[0] != "_":
                    expr = f"(t >> {16 * i} & 65535)" if v.uniform else f"(t >> {16 * i}).astype(u2)"
                    t.set(d, expr, "h", v.uniform)
            return
        raise t.fail(Instruction(("mov",), [], t.line_number, f"unpacking into {len(destinations)}"))
    low, high = destinations
    if v.kind == "x":
        t.line(f"t = {v}")
        for d, expr in ((low, "t[0]"), (high, "t[1]")):
            if d[0] != "_":
                t.set(d, expr, "f", False)
    elif BITS[v.kind] == 64:
        v = t.convert(v, "U")
        t.line(f"t = {v}")
        for d, expr in ((low, "low32(t)"), (high, "high32(t)")):
            if d[0] != "_":
                t.set(d, expr, "u", v.uniform)
    else:
        v = t.convert(v, "u")
        t.line(f"t = {v}")
        for d, expr in ((low, "low16(t)"), (high, "high16(t)")):
            if d[0] != "_":
                t.set(d, expr, "h", v.uniform)


@opcode("add", "sub", "and", "or", "xor")
def basic(t: Translator, ins: Instruction) -> None:
    if ins.parts[-1] in ("f32", "f64", "f32x2", "f16", "bf16", "f16x2", "bf16x2"):
        from .emit_float import arithmetic

        return arithmetic(t, ins)
    if "cc" in ins.parts:
        raise t.fail(ins, "carry chains are not supported")
    symbol = _BASIC[ins.parts[0]]
    if ins.parts[-1] == "pred":
        a, b = t.predicate(ins.operands[1]), t.predicate(ins.operands[2])
        t.set(ins.operands[0], f"({a} {symbol} {b})", "p", a.uniform and b.uniform)
        return
    bits, _is_signed, kind, a, b = _binary(t, ins)
    if "sat" in ins.parts:
        wide = f"np.clip(lanes({a}, u4).view(i4).astype(i8) {symbol} lanes({b}, u4).view(i4), -2**31, 2**31-1)"
        t.set(ins.operands[0], f"{wide}.astype(i4).view(u4)", kind, False)
        return
    if a.uniform and b.uniform:
        expr = f"({a} {symbol} {b})" if symbol in "&|^" else f"({a} {symbol} {b} & {(1 << bits) - 1})"
        t.set(ins.operands[0], expr, kind, True)
    else:
        t.set(ins.operands[0], f"({a} {symbol} {b})", kind, False)


@opcode("mul", "mad", "fma.lo")
def multiply(t: Translator, ins: Instruction) -> None:
    if ins.parts[-1] in ("f32", "f64", "f32x2", "f16", "bf16", "f16x2", "bf16x2"):
        from .emit_float import arithmetic

        return arithmetic(t, ins)
    bits, is_signed, _kind, a, b = _binary(t, ins)
    uniform = a.uniform and b.uniform
    mode = ins.parts[1]
    out = bits
    if mode == "wide":
        expr, out = f"mul_wide({a}, {b}, {bits}, {is_signed})", 2 * bits
    elif mode == "hi":
        expr = f"mul_hi({a}, {b}, {bits}, {is_signed})"
    elif mode == "lo":
        expr = f"({a} * {b} & {(1 << bits) - 1})" if uniform else f"({a} * {b})"
    else:
        raise t.fail(ins)
    if ins.parts[0] == "mad":
        c = t.value(ins.operands[3], INT_KIND[out])
        both = uniform and c.uniform
        expr = f"({expr} + {c} & {(1 << out) - 1})" if both else f"({expr} + {c})"
        if uniform and not c.uniform:
            expr = f"({expr[1:-1]})"
        uniform = both
    t.set(ins.operands[0], expr, INT_KIND[out], uniform)


@opcode("mul24", "mad24", "sad", "addc", "subc", "madc", "dp4a", "dp2a")
def rare(t: Translator, ins: Instruction) -> None:
    raise t.fail(ins)


@opcode("div", "rem")
def divide(t: Translator, ins: Instruction) -> None:
    if ins.parts[-1][0] == "f":
        from .emit_float import arithmetic

        return arithmetic(t, ins)
    bits, is_signed, kind, a, b = _binary(t, ins)
    expr = f"divide({a}, {b}, {bits}, {is_signed}, {ins.parts[0] == 'rem'})"
    t.set(ins.operands[0], expr, kind, a.uniform and b.uniform)


@opcode("shl", "shr")
def shifts(t: Translator, ins: Instruction) -> None:
    bits = width(ins.parts[-1])
    kind = INT_KIND[bits]
    a, n = t.value(ins.operands[1], kind), t.value(ins.operands[2], "u")
    mode = "l" if ins.parts[0] == "shl" else "s" if ins.parts[-1][0] == "s" else "u"
    uniform = a.uniform and n.uniform
    constant = ins.operands[2][1] & 0xFFFFFFFF if ins.operands[2][0] == "i" else None
    if constant is not None and constant < bits and not (uniform and mode == "s"):
        if mode == "l":
            expr = f"({a} << {constant} & {(1 << bits) - 1})" if uniform else f"({a} << {constant})"
        elif mode == "u":
            expr = f"({a} >> {constant})"
        else:
            expr = f"({a}.view(i{bits // 8}) >> {constant}).view(u{bits // 8})"
    else:
        expr = f"shift({a}, {n}, {bits}, {mode!r})"
    t.set(ins.operands[0], expr, kind, uniform)


@opcode("shf")
def funnel(t: Translator, ins: Instruction) -> None:
    a, b, n = (t.value(o, "u") for o in ins.operands[1:4])
    expr = f"funnel({a}, {b}, {n}, {ins.parts[1] == 'l'}, {'wrap' in ins.parts})"
    t.set(ins.operands[0], expr, "u", a.uniform and b.uniform and n.uniform)


@opcode("not", "neg", "abs")
def unary(t: Translator, ins: Instruction) -> None:
    name, suffix = ins.parts[0], ins.parts[-1]
    if suffix in ("f32", "f64", "f32x2", "f16", "bf16", "f16x2", "bf16x2"):
        from .emit_float import unary_float

        return unary_float(t, ins)
    if suffix == "pred":
        v = t.predicate(("!", ins.operands[1]))
        t.set(ins.operands[0], v.expression, "p", v.uniform)
        return
    bits = width(suffix)
    kind = INT_KIND[bits]
    a = t.value(ins.operands[1], kind)
    mask = (1 << bits) - 1
    if name == "not":
        expr = f"({a} ^ {mask})"
    elif name == "neg":
        expr = f"(-{a} & {mask})" if a.uniform else f"(-{a})"
    else:
        expr = (
            f"(abs(signed({a}, {bits})) & {mask})" if a.uniform else f"np.abs(signed({a}, {bits})).view(u{bits // 8})"
        )
    t.set(ins.operands[0], expr, kind, a.uniform)


@opcode("min", "max")
def extremum(t: Translator, ins: Instruction) -> None:
    if ins.parts[-1] in ("f32", "f64", "f16", "bf16", "f16x2", "bf16x2", "f32x2"):
        from .emit_float import extremum_float

        return extremum_float(t, ins)
    bits, is_signed, kind, a, b = _binary(t, ins)
    if a.uniform and b.uniform:
        key = f", key=lambda v: signed(v, {bits})" if is_signed else ""
        expr = f"{ins.parts[0]}({a}, {b}{key})"
        if "relu" in ins.parts:
            expr = f"max(signed({expr}, {bits}), 0)"
        t.set(ins.operands[0], expr, kind, True)
        return
    function = "np.minimum" if ins.parts[0] == "min" else "np.maximum"
    if is_signed:
        expr = f"{function}(signed({a}, {bits}), signed({b}, {bits})).view(u{bits // 8})"
    else:
        expr = f"{function}({a}, {b})"
    if "relu" in ins.parts:
        expr = f"np.maximum(signed({expr}, {bits}), 0).view(u{bits // 8})"
    t.set(ins.operands[0], expr, kind, False)


_COMPARE = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">=",
            "lo": "<", "ls": "<=", "hi": ">", "hs": ">="}  # fmt: skip


@opcode("setp", "set")
def compare(t: Translator, ins: Instruction) -> None:
    suffix = ins.parts[-1]
    if suffix in ("f32", "f64", "f16", "bf16", "f16x2", "bf16x2"):
        from .emit_float import compare_float

        return compare_float(t, ins)
    if ins.parts[0] == "set":
        raise t.fail(ins)
    bits = width(suffix)
    kind = INT_KIND[bits]
    a, b = t.value(ins.operands[1], kind), t.value(ins.operands[2], kind)
    if suffix[0] == "s" and ins.parts[1] not in ("eq", "ne"):
        left, right = _signed_source(a, bits, ins.operands[1]), _signed_source(b, bits, ins.operands[2])
    else:
        left, right = a.expression, b.expression
    finish_compare(t, ins, f"({left} {_COMPARE[ins.parts[1]]} {right})", a.uniform and b.uniform)


def _signed_source(v: Value, bits: int, operand: tuple) -> str:
    if operand[0] == "i":
        value = operand[1] & ((1 << bits) - 1)
        return str(value - (1 << bits) if value >> (bits - 1) else value)
    return f"signed({v}, {bits})" if v.uniform else f"{v}.view(i{bits // 8})"


def finish_compare(t: Translator, ins: Instruction, expr: str, uniform: bool) -> None:
    """Applies the boolean operand of ``setp`` and writes one or two destinations."""
    first = ins.operands[0]
    combine = next((p for p in ins.parts[2:] if p in ("and", "or", "xor")), None)
    if combine:
        c = t.predicate(ins.operands[3])
        symbol = _BASIC[combine]
        if first[0] == "|":
            t.line(f"t = {expr}")
            negated = "(not t)" if uniform else "~t"
            t.set(first[1], f"(t {symbol} {c})", "p", uniform and c.uniform)
            t.set(first[2], f"({negated} {symbol} {c})", "p", uniform and c.uniform)
            return
        t.set(first, f"({expr} {symbol} {c})", "p", uniform and c.uniform)
        return
    if first[0] == "|":
        t.line(f"t = {expr}")
        t.set(first[1], "t", "p", uniform)
        t.set(first[2], "(not t)" if uniform else "~t", "p", uniform)
        return
    t.set(first, expr, "p", uniform)


@opcode("selp")
def select(t: Translator, ins: Instruction) -> None:
    d, x, y, c = ins.operands
    kind = t.kinds[d[1]]
    if kind == "p":
        raise t.fail(ins)
    a, b, p = t.value(x, kind), t.value(y, kind), t.predicate(c)
    if p.uniform:
        uniform = a.uniform and b.uniform
        if not uniform:
            a = a if not a.uniform else Value(f"spread_{kind}({a})", kind, False)
            b = b if not b.uniform else Value(f"spread_{kind}({b})", kind, False)
        alias = any(o[0] == "r" and o[1] in t.accumulators for o in (x, y))
        t.set(d, f"({a} if {p} else {b})", kind, uniform, alias=alias)
        return
    types = {"h": "u2", "u": "u4", "U": "u8", "f": "f4", "d": "f8"}
    if a.uniform and b.uniform and kind in types:
        t.set(d, f"where({p}, {types[kind]}({a}), {types[kind]}({b}))", kind, False)
    else:
        t.set(d, f"where({p}, {a}, {b})", kind, False)


@opcode("bfe", "bfi", "prmt", "lop3", "popc", "clz", "brev", "bfind", "fns", "szext", "bmsk")
def bits_and_bytes(t: Translator, ins: Instruction) -> None:
    name, d = ins.parts[0], ins.operands[0]
    bits, is_signed = width(ins.parts[-1]), ins.parts[-1][0] == "s"
    kind = INT_KIND[bits]
    if name == "bfe":
        a, p, n = t.value(ins.operands[1], kind), t.value(ins.operands[2], "u"), t.value(ins.operands[3], "u")
        values, expr = [a, p, n], f"bit_field_extract({a}, {p}, {n}, {bits}, {is_signed})"
    elif name == "bfi":
        values = [t.value(o, kind) for o in ins.operands[1:3]] + [t.value(o, "u") for o in ins.operands[3:5]]
        expr = f"bit_field_insert({values[0]}, {values[1]}, {values[2]}, {values[3]}, {bits})"
    elif name == "prmt" and ins.parts[-1] == "b32" and len(ins.parts) == 2:
        values = [t.value(o, "u") for o in ins.operands[1:4]]
        expr = f"permute_bytes({values[0]}, {values[1]}, {values[2]})"
    elif name == "lop3":
        values = [t.value(o, "u") for o in ins.operands[1:4]]
        expr = f"logic3({values[0]}, {values[1]}, {values[2]}, {ins.operands[4][1]})"
    elif name in ("popc", "clz", "brev", "bfind") and "shiftamt" not in ins.parts:
        a = t.value(ins.operands[1], kind)
        mask = (1 << bits) - 1
        table = {
            "popc": "lambda v: v.bit_count()",
            "clz": f"lambda v: {bits} - v.bit_length()",
            "brev": f"lambda v: int(format(v, '0{bits}b')[::-1], 2)",
            "bfind": (
                f"lambda v: (((v ^ {mask}) if {is_signed} and v >> {bits - 1} else v).bit_length() - 1) & 0xffffffff"
            ),
        }
        out = bits if name == "brev" else 32
        t.set(d, f"per_lane({table[name]}, {out}, {a})", INT_KIND[out], a.uniform)
        return
    else:
        raise t.fail(ins)
    t.set(d, expr, kind, all(v.uniform for v in values))


@opcode("shfl.sync", "vote.sync", "redux.sync", "match.any.sync", "match.all.sync", "activemask", "elect.sync")
def warp_wide(t: Translator, ins: Instruction) -> None:
    name, d = ins.parts[0], ins.operands[0]
    if name == "activemask":
        t.set(d, f"w.bits({t.mask})", "u", True)
    elif name == "elect":
        first, second = (d[1], d[2]) if d[0] == "|" else (d, ("_",))
        t.line(f"t = w.elect({t.mask})")
        if first[0] != "_":
            t.set(first, "t[0]", "u", True)
        if second[0] != "_":
            t.set(second, "t[1]", "p", False)
    elif name == "vote":
        p = t.predicate(ins.operands[1])
        p = p if not p.uniform else Value(f"spread_p({p})", "p", False)
        mode = ins.parts[2]
        if mode == "ballot":
            t.set(d, f"w.bits({p} & {t.mask})", "u", True)
        else:
            table = {
                "any": "count_nonzero({p} & {m})",
                "all": "not count_nonzero(~{p} & {m})",
                "uni": "w.all_same({p}, {m})",
            }
            t.set(d, f"bool({table[mode].format(p=p, m=t.mask)})", "p", True)
    elif name == "redux":
        kind = "f" if ins.parts[-1] == "f32" else "u"
        v = t.value(ins.operands[1], kind)
        signed = ins.parts[-1][0] == "s"
        t.set(
            d,
            f"w.redux({ins.parts[2]!r}, {v}, {t.mask}, {signed}, {'abs' in ins.parts}, {'NaN' in ins.parts})",
            kind,
            True,
        )
    elif name == "match":
        bits = width(ins.parts[-1])
        v = t.value(ins.operands[1], INT_KIND[bits])
        if ins.parts[1] == "any":
            t.set(d, f"w.match_any({v}, {t.mask})", "u", False)
        else:
            first, second = (d[1], d[2]) if d[0] == "|" else (d, ("_",))
            t.line(f"t = w.match_all({v}, {t.mask})")
            t.set(first, "t[0]", "u", True)
            if second[0] != "_":
                t.set(second, "t[1]", "p", True)
    else:
        _shuffle(t, ins)


def _shuffle(t: Translator, ins: Instruction) -> None:
    d = ins.operands[0]
    first, second = (d[1], d[2]) if d[0] == "|" else (d, ("_",))
    source = ins.operands[1]
    kind = t.kinds[source[1]] if source[0] == "r" and not source[1].startswith("%l") else "u"
    v, lane, clamp = t.value(source, kind), t.value(ins.operands[2], "u"), t.value(ins.operands[3], "u")
    mode = ins.parts[2]
    if mode == "idx" and lane.uniform and ins.operands[3] == ("i", 31):
        if v.uniform:
            t.set(first, v.expression, kind, True)
        else:
            cast = {"f": "", "d": ""}.get(kind, "int")
            t.set(first, f"{cast}({v}[{lane} & 31])", kind, True)
        if second[0] != "_":
            t.set(second, "True", "p", True)
        return
    types = {"h": "u2", "u": "u4", "U": "u8", "f": "f4", "d": "f8"}
    t.line(f"t = w.shuffle({mode!r}, lanes({v}, {types[kind]}), {lane}, {clamp})")
    t.set(first, "t[0]", kind, False)
    if second[0] != "_":
        t.set(second, "t[1]", "p", False)
