"""Errors that the emulator raises. Each names the PTX line, the warp and, where one is involved, the barrier."""

from __future__ import annotations


class EmulatorError(Exception):
    """Base of everything that the emulator reports about a kernel."""


class UnsupportedError(EmulatorError):
    """An opcode, modifier or operand form that the emulator does not know; the message names it."""


class MemoryFault(EmulatorError):
    """Out-of-range or misaligned access, or a read of memory that nobody wrote."""


class RaceError(EmulatorError):
    """Two accesses to the same memory that nothing orders, or a missing proxy fence between them."""


class DeadlockError(EmulatorError):
    """No warp can run and no asynchronous work is left; the message lists who waits for what."""


class SyncError(EmulatorError):
    """Misuse of a barrier or of an asynchronous unit: counts, tx bytes, uninitialised barriers, missing fences."""
