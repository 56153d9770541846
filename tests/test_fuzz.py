"""Random calls against the float64 reference: output, log-sum-exp and every gradient, for both XLA implementations."""

import jax
import pytest
from hypothesis import HealthCheck, given, settings

from jax_fa4.implementations import blockwise
from tests import calls

IMPLEMENTATIONS = ("xla", "blockwise")
EXAMPLES, EXAMPLES_LONG = 60, 600


@pytest.fixture(autouse=True, scope="module")
def small_tiles():
    """Several tiles of uneven size at small shapes. Compiled programs must not outlive the changed constant."""
    saved = blockwise.TILE_LIMITS
    jax.clear_caches()
    blockwise.TILE_LIMITS = (8, 8)
    yield
    blockwise.TILE_LIMITS = saved
    jax.clear_caches()


def check(call):
    want = calls.expected(call)
    for implementation, result in calls.evaluate(call, IMPLEMENTATIONS).items():
        try:
            calls.assert_matches(call, result, want)
        except AssertionError as error:
            raise AssertionError(f"{implementation}: {error}") from error


def fuzz(examples):
    options = settings(
        max_examples=examples,
        derandomize=True,
        deadline=None,
        database=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
    )
    return options(given(calls.calls())(check))


def test_random_calls(request):
    fuzz(EXAMPLES_LONG if request.config.getoption("long") else EXAMPLES)()
