"""Emitter: conversions between integers and floats of all widths, with rounding modes and saturation."""

from __future__ import annotations

from .emit_int import width
from .ptx import Instruction
from .translate import INT_KIND, Translator, opcode

_FLOATS = {"f16", "bf16", "f32", "f64", "f16x2", "bf16x2", "e4m3x2", "e5m2x2", "tf32"}


@opcode("cvt")
def convert(t: Translator, ins: Instruction) -> None:
    target, source = ins.parts[-2], ins.parts[-1]
    modifiers = ins.parts[1:-2]
    if "pack" in modifiers:
        return _pack(t, ins)
    if target in _FLOATS and source in _FLOATS:
        return _float_to_float(t, ins, target, source, modifiers)
    if source in _FLOATS:
        return _float_to_int(t, ins, target, source, modifiers)
    bits, is_signed = width(source), source[0] == "s"
    if target in _FLOATS:
        return _int_to_float(t, ins, target, bits, is_signed)
    out = width(target)
    held = t.raw(ins.operands[1], INT_KIND[bits])
    if held.kind not in ("h", "u", "U"):
        held = t.convert(held, {"f": "u", "d": "U", "x": "U", "p": "h"}[held.kind])
    expr = f"resize({held}, {bits}, {is_signed}, {out})"
    if "sat" in modifiers:
        low, high = (-(1 << (out - 1)), (1 << (out - 1)) - 1) if target[0] == "s" else (0, (1 << out) - 1)
        mask = (1 << out) - 1
        reader = f"signed(v, {bits})" if is_signed else "v"
        expr = f"per_lane(lambda v: min(max({reader}, {low}), {high}) & {mask}, {max(out, 16)}, {held})"
        t.set(ins.operands[0], expr, INT_KIND[out], held.uniform)
        return
    destination = ins.operands[0]
    kind = INT_KIND[out]
    if destination[0] == "r":
        wide = t.kinds[destination[1]]
        if wide in ("u", "U") and wide != kind:  # a narrow result in a wider register is extended by its own sign
            expr = f"resize({expr}, {out}, {target[0] == 's'}, {32 if wide == 'u' else 64})"
            kind = wide
        elif out == 8 and target[0] == "s":
            expr = f"resize({expr}, 8, True, 16)"
    t.set(destination, expr, kind, held.uniform)


def _source(t: Translator, ins: Instruction, source: str):
    """The source operand as float32 (or float64) lanes."""
    if source == "f64":
        return t.value(ins.operands[1], "d")
    if source in ("f32", "tf32"):
        return t.value(ins.operands[1], "f")
    v = t.value(ins.operands[1], "h")
    v.expression, v.kind = f"from_half({v}, {source == 'bf16'})", "f"
    return v


def _float_to_float(t: Translator, ins: Instruction, target: str, source: str, modifiers: tuple[str, ...]) -> None:
    d = ins.operands[0]
    integral = next((m for m in modifiers if m in ("rni", "rzi", "rmi", "rpi")), None)
    mode = next((m for m in modifiers if m in ("rn", "rz", "rm", "rp")), "rn")
    relu = "relu" in modifiers
    if target in ("f16x2", "bf16x2") and source == "f32":
        high, low = t.value(ins.operands[1], "f"), t.value(ins.operands[2], "f")
        function = "to_bf16" if target == "bf16x2" else "to_f16"
        if mode not in ("rn", "rz") or "satfinite" in modifiers or "rs" in modifiers:
            raise t.fail(ins)
        if mode == "rn" and not relu:
            expr = f"{'pack_bf16' if target == 'bf16x2' else 'pack_f16'}({low}, {high})"
        else:
            expr = f"pack16({function}({low}, {mode!r}, {relu}), {function}({high}, {mode!r}, {relu}))"
        t.set(d, expr, "u", high.uniform and low.uniform)
        return
    v = _source(t, ins, source)
    if "ftz" in modifiers and v.kind == "f":
        v.expression = f"ftz({v})"
    if target in ("f16", "bf16"):
        if v.kind == "d":
            v.expression = f"{v}.astype(f4)"
        if integral:
            v.expression = _integral(v.expression, integral)
        if mode not in ("rn", "rz") or "sat" in modifiers:
            raise t.fail(ins)
        function = "to_bf16" if target == "bf16" else "to_f16"
        t.set(d, f"{function}({v}, {mode!r}, {relu})", "h", v.uniform)
        return
    if target == "tf32":
        raise t.fail(ins)
    expr = v.expression
    if integral:
        expr = _integral(expr, integral)
    if target == "f32":
        if v.kind == "d":
            expr = f"round_exact(np.asarray({expr}), 0.0, {mode!r})"
        if "sat" in modifiers:
            expr = f"np.clip(np.nan_to_num({expr}, nan=0.0), f4(0), f4(1))"
        t.set(d, f"f4({expr})" if v.uniform else expr, "f", v.uniform)
    elif target == "f64":
        t.set(d, f"f8({expr})" if v.uniform else f"{expr}.astype(f8)", "d", v.uniform)
    else:
        raise t.fail(ins)


def _integral(expr: str, mode: str) -> str:
    return f"{ {'rni': 'np.rint', 'rzi': 'np.trunc', 'rmi': 'np.floor', 'rpi': 'np.ceil'}[mode] }({expr})"


def _float_to_int(t: Translator, ins: Instruction, target: str, source: str, modifiers: tuple[str, ...]) -> None:
    mode = next((m for m in modifiers if m in ("rni", "rzi", "rmi", "rpi")), None)
    if mode is None:
        raise t.fail(ins)
    v = _source(t, ins, source)
    if "ftz" in modifiers and v.kind == "f":
        v.expression = f"ftz({v})"
    bits = width(target)
    t.set(ins.operands[0], f"float_to_int({v}, {mode!r}, {bits}, {target[0] == 's'})", INT_KIND[bits], v.uniform)


def _int_to_float(t: Translator, ins: Instruction, target: str, bits: int, is_signed: bool) -> None:
    mode = next((m for m in ins.parts if m in ("rn", "rz", "rm", "rp")), "rn")
    held = t.raw(ins.operands[1], INT_KIND[bits])
    if held.kind not in ("h", "u", "U"):
        held = t.convert(held, {"f": "u", "d": "U", "x": "U"}[held.kind])
    if {"h": 16, "u": 32, "U": 64}[held.kind] != bits:
        held.expression = f"resize({held}, {bits}, {is_signed}, {max(bits, 16)})"
        if bits == 8:
            held.expression, bits = f"resize({held}, 8, {is_signed}, 16)", 16
    if target == "f64":
        t.set(ins.operands[0], f"int_to_float({held}, {bits}, {is_signed}, f8)", "d", held.uniform)
        return
    if mode == "rn":
        expr = f"int_to_float({held}, {bits}, {is_signed})"
    elif bits <= 32:
        expr = f"round_exact(np.asarray(int_to_float({held}, {bits}, {is_signed}, f8)), 0.0, {mode!r})"
    else:
        raise t.fail(ins)
    if target == "f32":
        t.set(ins.operands[0], f"f4({expr})" if held.uniform else expr, "f", held.uniform)
    elif target in ("f16", "bf16"):
        t.set(ins.operands[0], f"{'to_bf16' if target == 'bf16' else 'to_f16'}({expr})", "h", held.uniform)
    else:
        raise t.fail(ins)


def _pack(t: Translator, ins: Instruction) -> None:
    """``cvt.pack.sat.<s8|u8|s16|u16>.s32[.b32]``: two saturated values beside each other."""
    target = ins.parts[3]
    bits, is_signed = width(target), target[0] == "s"
    if bits != 16 or len(ins.operands) != 3:
        raise t.fail(ins)
    a, b = t.value(ins.operands[1], "u"), t.value(ins.operands[2], "u")
    low, high = (-(1 << 15), (1 << 15) - 1) if is_signed else (0, 0xFFFF)
    clamp = f"lambda v: min(max(signed(v, 32), {low}), {high}) & 65535"
    expr = f"pack16(per_lane({clamp}, 16, {b}), per_lane({clamp}, 16, {a}))"
    t.set(ins.operands[0], expr, "u", a.uniform and b.uniform)
