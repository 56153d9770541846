"""Tensor memory and fifth-generation tensor core (tcgen05) of the emulator: sm_100."""
