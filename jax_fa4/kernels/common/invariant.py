"""Objects that a kernel uses inside run-time loops and branches without changing them."""

from __future__ import annotations


class Invariant:
    """Tells the DSL that no member changes inside a run-time loop or branch.

    The DSL would otherwise try to carry every object whose methods are called in such a region through it. Members may
    be run-time values; what changes must be passed in and returned (or lie in a register tensor).
    """

    def __extract_mlir_values__(self) -> list:
        return []

    def __new_from_mlir_values__(self, values: list):
        return self
