"""The reference's gradients are those of its outputs (central differences)."""

import numpy as np
import pytest

from tests import reference

B, T, S, N, K, H, HV = 2, 5, 6, 4, 2, 3, 4
RNG = np.random.default_rng(0)
OPERANDS = {
    "query": RNG.normal(size=(B, T, N, H)),
    "key": RNG.normal(size=(B, S, K, H)),
    "value": RNG.normal(size=(B, S, K, HV)),
    "bias": RNG.normal(size=(1, N, T, 1)),
    "sinks": RNG.normal(size=(N,)),
    "scale": np.array(0.4),
}
D_OUT, D_LSE = RNG.normal(size=(B, T, N, HV)), RNG.normal(size=(B, N, T))
STATIC = {
    "logits_soft_cap": 1.5,
    "mask": RNG.random((B, 1, T, S)) < 0.8,
    "is_causal": True,
    "query_offset": np.array([1, -1]),
    "key_value_seq_lengths": np.array([6, 3]),
}


@pytest.mark.parametrize("name", OPERANDS)
def test_gradient_by_differences(name):
    def loss(operands):
        result = reference.attention(**operands, **STATIC)
        return (result.out * D_OUT).sum() + (result.lse * D_LSE).sum()

    got = reference.attention(**OPERANDS, **STATIC, d_out=D_OUT, d_lse=D_LSE).gradients[name]
    step = 1e-5
    for index in np.ndindex(OPERANDS[name].shape):
        sides = []
        for sign in (1, -1):
            moved = OPERANDS[name].copy()
            moved[index] += sign * step
            sides.append(loss({**OPERANDS, name: moved}))
        np.testing.assert_allclose(got[index], (sides[0] - sides[1]) / (2 * step), rtol=1e-6, atol=1e-8)


def test_a_row_that_sees_nothing_is_zero_without_sink():
    operands = {name: x for name, x in OPERANDS.items() if name != "sinks"}
    result = reference.attention(**operands, **STATIC, d_out=D_OUT, d_lse=D_LSE)
    assert np.isneginf(result.lse[1, :, 0]).all()  # offset -1: causal hides every key from row 0 of batch 1
    assert (result.out[1, 0] == 0).all() and (result.gradients["query"][1, 0] == 0).all()
