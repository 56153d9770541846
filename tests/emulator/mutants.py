"""Faults planted in PTX, one at a time: waits skipped, phases flipped, counts changed, statements removed.

The edits follow patterns, line by line, so that they apply to any kernel and keep applying while kernels change. Only
lines that a clean run has executed are worth a fault. Lines keep their numbers.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

Fault = tuple[str, int, str]
"""(kind, 1-based line, the whole mutated text)"""

_WAIT = r"(mbarrier\.try_wait\.parity\S*\.b64) (\w+), (\[[^\]]+\]), (%?\w+)(, \d+)?;"
_COUNT = r"(mbarrier\.init\S* \s*\[[^\]]+\]), (%\w+);"
_EXPECT = r"(mbarrier\.arrive\.expect_tx\S* [^;]*\]), (%?\w+);"
_ARRIVE = r"mbarrier\.arrive\.(?!expect)[^;]*;"


def _register(change: str, result: str) -> str:
    """A scope with a changed copy of group 2 (an operand) in front of the statement."""
    return "{.reg .b32 changed; " + change + "; " + result + "}"


RULES: dict[str, tuple[str, str | Callable[[re.Match], str]]] = {
    "wait skipped": (_WAIT, r"setp.eq.b32 \2, 0, 0;"),
    "phase flipped": (_WAIT, _register(r"xor.b32 changed, \4, 1", r"\1 \2, \3, changed;")),
    "16 bytes more expected": (_EXPECT, _register(r"add.s32 changed, \2, 16", r"\1, changed;")),
    "16 bytes fewer expected": (_EXPECT, _register(r"add.s32 changed, \2, -16", r"\1, changed;")),
    "one arrival more in the count": (_COUNT, _register(r"add.s32 changed, \2, 1", r"\1, changed;")),
    "arrival removed": (_ARRIVE, ""),
    "arrival doubled": (_ARRIVE, r"\g<0> \g<0>"),
    "copy removed": (r"cp(\.reduce)?\.async\.bulk\.(tensor|shared|global)[^;]*;", ""),
    "wgmma wait removed": (r"wgmma\.wait_group[^;]*;", ""),
    "wgmma wait leaves one more group": (r"(wgmma\.wait_group\S*\s+)(\d+);", lambda m: f"{m[1]}{int(m[2]) + 1};"),
    "wgmma commit removed": (r"wgmma\.commit_group[^;]*;", ""),
    "wgmma fence removed": (r"wgmma\.fence[^;]*;", ""),
    "proxy fence removed": (r"fence\.proxy\.async[^;]*;", ""),
    "init fence removed": (r"fence\.mbarrier_init[^;]*;", ""),
    "CTA barrier removed": (r"bar\.sync[^;]*;", ""),
    "barrier arrival removed": (r"bar\.arrive[^;]*;", ""),
    "32 threads fewer at the barrier": (
        r"(bar\.(?:sync|arrive)\s+\S+), (\d+);",
        lambda m: f"{m[1]}, {int(m[2]) - 32};",
    ),
    "bulk wait removed": (r"cp\.async\.bulk\.wait_group[^;]*;", ""),
    "bulk commit removed": (r"cp\.async\.bulk\.commit_group[^;]*;", ""),
    "warp barrier removed": (r"bar\.warp\.sync[^;]*;", ""),
    "tcgen05 load wait removed": (r"tcgen05\.wait::ld[^;]*;", ""),
    "tcgen05 store wait removed": (r"tcgen05\.wait::st[^;]*;", ""),
    "tcgen05 commit removed": (r"tcgen05\.commit[^;]*;", ""),
    "tcgen05 commit to the next barrier": (r"(tcgen05\.commit[^\[]*\[%\w+)\]", r"\1+8]"),
    "tcgen05 fence before removed": (r"tcgen05\.fence::before[^;]*;", ""),
    "tcgen05 fence after removed": (r"tcgen05\.fence::after[^;]*;", ""),
    "tcgen05 product removed": (r"tcgen05\.mma[^;]*;", ""),
    "tensor memory not freed": (r"tcgen05\.dealloc[^;]*;", ""),
    "shuffle over other lanes": (r"(shfl\.sync\.bfly\.b32[^;]*), (\d+), 31", lambda m: f"{m[1]}, {int(m[2]) * 4}, 31"),
}
"""Kind of fault -> (pattern in one line, replacement)."""


def faults(text: str, executed: set[int], kinds: tuple[str, ...] = tuple(RULES)) -> Iterator[Fault]:
    """Every fault of the given kinds in the lines that were executed."""
    lines = text.split("\n")
    for kind in kinds:
        pattern, replacement = RULES[kind]
        for number, line in enumerate(lines, 1):
            if number in executed and re.search(pattern, line):
                mutated = re.sub(pattern, replacement, line, count=1)
                yield kind, number, "\n".join([*lines[: number - 1], mutated, *lines[number:]])


def sample(planted: list[Fault], most: int) -> list[Fault]:
    """At most ``most`` faults, spread evenly over the kernel."""
    if len(planted) <= most:
        return planted
    return [planted[i * len(planted) // most] for i in range(most)]


def shifted_mask(text: str) -> str:
    """All comparisons ``> n`` of column numbers in a mask become ``>= n``."""
    mutated, count = re.subn(r"setp\.gt(\.s32\s+%p\d+, %r\d+), (9|17|25|33|41);", r"setp.ge\1, \2;", text)
    if not count:
        raise LookupError("no mask comparisons found")
    return mutated
