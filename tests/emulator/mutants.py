"""Edits of PTX text that plant a fault: a wait removed, a phase flipped, a count changed, and so on."""

from __future__ import annotations

import re
from collections.abc import Callable

Edit = Callable[[str], str]


def _nth(pattern: str, text: str, occurrence: int) -> re.Match:
    found = list(re.finditer(pattern, text))
    if not found:
        raise LookupError(f"no {pattern!r} in the PTX")
    return found[occurrence]


def replace(pattern: str, replacement: str, occurrence: int = 0) -> Edit:
    """Replaces one match; the replacement may use the match's groups."""

    def edit(text: str) -> str:
        match = _nth(pattern, text, occurrence)
        return text[: match.start()] + match.expand(replacement) + text[match.end() :]

    return edit


def remove(pattern: str, occurrence: int = 0) -> Edit:
    """Removes the statement that matches."""
    return replace(pattern + r"[^;]*;", "", occurrence)


def everywhere(pattern: str, replacement: str) -> Edit:
    def edit(text: str) -> str:
        _nth(pattern, text, 0)
        return re.sub(pattern, replacement, text)

    return edit


_WAIT = r"mbarrier\.try_wait\.parity\.shared\.b64 (P1), (\[[^\]]+\]), ([%\w]+), 10000000"


def skip_wait(occurrence: int) -> Edit:
    """A wait on an mbarrier passes at once."""
    return replace(_WAIT, r"setp.eq.b32 \1, 0, 0", occurrence)


def flip_wait(occurrence: int) -> Edit:
    """A wait on an mbarrier uses the other parity."""
    flipped = r"{.reg .b32 flipped; xor.b32 flipped, \3, 1; mbarrier.try_wait.parity.shared.b64 \1, \2, flipped;}"
    return replace(_WAIT + ";", flipped, occurrence)


def count_waits(text: str) -> int:
    return len(re.findall(_WAIT, text))


def move_before(pattern: str, anchor: str, occurrence: int = 0) -> Edit:
    """Moves a statement to just before the closest earlier match of ``anchor``."""

    def edit(text: str) -> str:
        match = _nth(pattern + r"[^;]*;", text, occurrence)
        statement = match.group(0)
        earlier = [m for m in re.finditer(anchor, text) if m.start() < match.start()][-1]
        text = text[: match.start()] + text[match.end() :]
        return text[: earlier.start()] + statement + "\n\t" + text[earlier.start() :]

    return edit
