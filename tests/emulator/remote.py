"""``st.async``: small stores into the shared memory of a CTA of the cluster that signal an mbarrier there."""

from __future__ import annotations

import numpy as np

from .operations import Operation


class RemoteStore(Operation):
    """One lane's bytes; the operation belongs to the async proxy and completes by ``complete_tx``."""

    def __init__(self, warp, target: tuple, data: np.ndarray, barrier: tuple):
        super().__init__(warp, f"st.async of {len(data)} bytes")
        self.target, self.data, self.barrier = target, data, barrier

    def run(self) -> bool:
        cta, offset = self.target
        self.write_bytes(cta.shared, offset, self.data)
        self.machine.count("async_shared_write", len(self.data))
        self.close()
        self.signal(*self.barrier, len(self.data))
        return True
