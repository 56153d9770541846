"""The simulated cost of the Blackwell backward's fixed order stays small."""

import pytest

from benchmarks.backward_order import makespan


@pytest.mark.parametrize("causal", [False, True], ids=["dense", "causal"])
@pytest.mark.parametrize("length", [1024, 4096, 8192])
@pytest.mark.parametrize("ctas, group", [(1, 1), (2, 1), (1, 8)])
def test_turns_cost_little(length, causal, ctas, group):
    pairs = 16 * 8192 // length // group
    ordered, unordered = (makespan(length, pairs, causal, 148, given, ctas, group) for given in (True, False))
    assert 1.0 <= ordered / unordered <= 1.15
