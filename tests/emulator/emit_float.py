"""Emitters: floating-point arithmetic, packed pairs, approximate functions."""

from __future__ import annotations

from .emit_int import _COMPARE, finish_compare
from .ptx import Instruction
from .translate import Translator, Value, opcode

_HALF = {"f16": (False, "h"), "bf16": (True, "h"), "f16x2": (False, "u"), "bf16x2": (True, "u")}
_KIND = {"f32": "f", "f64": "d", "f32x2": "x"}


def _mode(ins: Instruction) -> str:
    return next((p for p in ins.parts if p in ("rn", "rz", "rm", "rp")), "rn")


def _operands(t: Translator, ins: Instruction, kind: str) -> list[Value]:
    values = [t.value(o, kind) for o in ins.operands[1:]]
    if kind == "x":
        values = [Value(f"pair_from_64({v})", "x", False) if v.kind == "U" else v for v in values]
    if "ftz" in ins.parts:
        values = [
            v if o[0] != "r" or o[1] in t.flushed else Value(f"ftz({v})", kind, v.uniform)
            for v, o in zip(values, ins.operands[1:], strict=True)
        ]
    return values


def _finish(t: Translator, ins: Instruction, expr: str, kind: str, uniform: bool) -> None:
    if "ftz" in ins.parts:
        expr = f"ftz({expr})"
    if "sat" in ins.parts:
        expr = f"np.clip(np.nan_to_num({expr}, nan=0.0), f4(0), f4(1))"
    if uniform and kind == "f":
        expr = f"f4({expr})"
    t.set(ins.operands[0], expr, kind, uniform)


@opcode("fma", "copysign")
def arithmetic(t: Translator, ins: Instruction) -> None:
    """add, sub, mul, fma/mad, div for every float type."""
    name, suffix, mode = ins.parts[0], ins.parts[-1], _mode(ins)
    if suffix in _HALF and ins.parts[-2] == "f32":
        _mixed(t, ins, name, suffix == "bf16", mode)
        return
    if suffix in _HALF:
        bf16, kind = _HALF[suffix]
        values = [t.value(o, kind) for o in ins.operands[1:]]
        body = {"add": "a + b", "sub": "a - b", "mul": "a * b", "fma": "fma_odd(a, b, c)"}.get(name)
        if body is None or mode != "rn":
            raise t.fail(ins)
        arguments = ", ".join("abc"[: len(values)])
        if "relu" in ins.parts:
            body = f"np.maximum({body}, 0)"
        if "sat" in ins.parts:
            body = f"np.clip({body}, 0, 1)"
        function = "half2" if kind == "u" else "half1"
        expr = f"{function}(lambda {arguments}: {body}, {bf16}, {', '.join(map(str, values))})"
        t.set(ins.operands[0], expr, kind, all(v.uniform for v in values))
        return
    if name == "copysign":
        raise t.fail(ins)
    kind = _KIND[suffix]
    values = _operands(t, ins, kind)
    uniform = all(v.uniform for v in values)
    a, b = values[0], values[1]
    c = values[2] if len(values) > 2 else None
    if kind == "d":
        if mode != "rn":
            raise t.fail(ins)
        expr = {"add": f"{a} + {b}", "sub": f"{a} - {b}", "mul": f"{a} * {b}", "div": f"{a} / {b}"}.get(name)
        _finish(t, ins, f"({expr})" if expr else f"fma_double({a}, {b}, {c})", kind, uniform)
        return
    if name in ("add", "sub"):
        if mode == "rn":
            if c is not None:
                raise t.fail(ins)
            expr = f"({a} {'+' if name == 'add' else '-'} {b})"
        else:
            expr = f"add_mode({a}, {b if name == 'add' else f'-{b}'}, {mode!r})"
    elif name == "mul":
        expr = f"({a} * {b})" if mode == "rn" else f"mul_mode({a}, {b}, {mode!r})"
    elif name in ("fma", "mad"):
        expr = f"fma({a}, {b}, {c})" if mode == "rn" else f"fma_mode({a}, {b}, {c}, {mode!r})"
    elif name == "div":
        if mode not in ("rn",) and "approx" not in ins.parts and "full" not in ins.parts:
            raise t.fail(ins)
        expr = f"divide_float({a}, {b})"
    else:
        raise t.fail(ins)
    _finish(t, ins, expr, kind, uniform)


def _mixed(t: Translator, ins: Instruction, name: str, bf16: bool, mode: str) -> None:
    """add, sub, fma of 16-bit operands (all but the last) with a float32 one: ``fma.rn.f32.bf16 d, a, b, c``."""
    if name not in ("add", "sub", "fma") or mode != "rn" or "sat" in ins.parts:
        raise t.fail(ins)
    *narrow, last = ins.operands[1:]
    halves = [t.value(o, "h") for o in narrow]
    wide = t.value(last, "f")
    a = [f"from_half({v}, {bf16})" for v in halves]
    expr = f"fma({a[0]}, {a[1]}, {wide})" if name == "fma" else f"({a[0]} {'+' if name == 'add' else '-'} {wide})"
    _finish(t, ins, expr, "f", wide.uniform and all(v.uniform for v in halves))


def unary_float(t: Translator, ins: Instruction) -> None:
    name, suffix = ins.parts[0], ins.parts[-1]
    if suffix in _HALF:
        _, kind = _HALF[suffix]
        v = t.value(ins.operands[1], kind)
        mask = {"h": 0x8000, "u": 0x80008000}[kind]
        expr = f"({v} ^ {mask})" if name == "neg" else f"({v} & {mask ^ (0xFFFF if kind == 'h' else 0xFFFFFFFF)})"
        t.set(ins.operands[0], expr, kind, v.uniform)
        return
    kind = _KIND[suffix]
    v = _operands(t, ins, kind)[0]
    _finish(t, ins, f"(-{v})" if name == "neg" else f"np.abs({v})", kind, v.uniform)


def extremum_float(t: Translator, ins: Instruction) -> None:
    name, suffix = ins.parts[0], ins.parts[-1]
    nan = "NaN" in ins.parts
    function = {"min": "minimum", "max": "maximum"}[name] if nan else f"f{name}"
    if "xorsign" in ins.parts:
        raise t.fail(ins)
    if suffix in _HALF:
        bf16, kind = _HALF[suffix]
        values = [t.value(o, kind) for o in ins.operands[1:]]
        expr = f"{'half2' if kind == 'u' else 'half1'}({function}, {bf16}, {', '.join(map(str, values))})"
        t.set(ins.operands[0], expr, kind, all(v.uniform for v in values))
        return
    kind = _KIND[suffix]
    values = _operands(t, ins, kind)
    uniform = all(v.uniform for v in values)
    if "abs" in ins.parts:
        values = [Value(f"np.abs({v})", kind, v.uniform) for v in values]
    expr = f"{function}({values[0]}, {values[1]})"
    if len(values) == 3:
        expr = f"{function}({expr}, {values[2]})"
    _finish(t, ins, expr, kind, uniform)


def compare_float(t: Translator, ins: Instruction) -> None:
    suffix, test = ins.parts[-1], ins.parts[1]
    if ins.parts[0] == "set":
        raise t.fail(ins)
    if suffix in ("f16", "bf16"):
        bf16, kind = _HALF[suffix]
        values = [t.value(o, kind) for o in ins.operands[1:3]]
        values = [Value(f"from_half({v}, {bf16})", "f", v.uniform) for v in values]
    elif suffix in _KIND:
        values = [t.value(o, _KIND[suffix]) for o in ins.operands[1:3]]
        if "ftz" in ins.parts:
            values = [Value(f"ftz({v})", v.kind, v.uniform) for v in values]
    else:
        raise t.fail(ins)
    a, b = values
    uniform = a.uniform and b.uniform
    if test == "num":
        expr = f"(({a} == {a}) & ({b} == {b}))"
    elif test == "nan":
        expr = f"(({a} != {a}) | ({b} != {b}))"
    elif test in _COMPARE:
        expr = f"({a} {_COMPARE[test]} {b})"
        if test == "ne":  # ordered: false for NaN
            expr = f"({expr} & ({a} == {a}) & ({b} == {b}))"
    elif test[:-1] in _COMPARE and test[-1] == "u":  # unordered: true for NaN
        inverse = {"equ": "!=", "neu": "==", "ltu": ">=", "leu": ">", "gtu": "<=", "geu": "<"}[test]
        if test == "equ":
            expr = f"(({a} == {b}) | ({a} != {a}) | ({b} != {b}))"
        elif test == "neu":
            expr = f"({a} != {b})"
        else:
            expr = f"({a} {inverse} {b})"
            expr = f"(not {expr})" if uniform else f"~{expr}"
    else:
        raise t.fail(ins)
    finish_compare(t, ins, f"bool({expr})" if uniform else expr, uniform)


_FUNCTIONS = {"ex2": "exp2", "lg2": "log2", "rcp": "reciprocal", "rsqrt": "rsqrt", "sqrt": "sqrt", "sin": "sine",
              "cos": "cosine", "tanh": "tanh"}  # fmt: skip


@opcode(*_FUNCTIONS)
def special_function(t: Translator, ins: Instruction) -> None:
    name, suffix = ins.parts[0], ins.parts[-1]
    function = _FUNCTIONS[name]
    if suffix in _HALF:
        bf16, kind = _HALF[suffix]
        v = t.value(ins.operands[1], kind)
        t.set(ins.operands[0], f"{'half2' if kind == 'u' else 'half1'}({function}, {bf16}, {v})", kind, v.uniform)
        return
    kind = _KIND[suffix]
    v = t.value(ins.operands[1], kind) if name == "ex2" else _operands(t, ins, kind)[0]
    if kind == "d":
        table = {"rcp": "(1.0 / {})", "rsqrt": "(1.0 / np.sqrt({}))", "sqrt": "np.sqrt({})"}
        if name not in table:
            raise t.fail(ins)
        t.set(ins.operands[0], table[name].format(v), kind, v.uniform)
        return
    _finish(t, ins, f"{function}({v})", kind, v.uniform)


@opcode("testp")
def test_property(t: Translator, ins: Instruction) -> None:
    kind = _KIND[ins.parts[-1]]
    v = t.value(ins.operands[1], kind)
    table = {"finite": "np.isfinite({})", "infinite": "np.isinf({})", "notanumber": "np.isnan({})",
             "number": "~np.isnan({})"}  # fmt: skip
    if ins.parts[1] not in table:
        raise t.fail(ins)
    expr = table[ins.parts[1]].format(v)
    t.set(ins.operands[0], f"bool({expr.replace('~', 'not ')})" if v.uniform else expr, "p", v.uniform)
