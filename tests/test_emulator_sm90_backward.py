"""The Hopper backward kernels, executed from their PTX, against float64: variants, schedules, determinism."""

import pytest

from jax_fa4.kernels.sm90.backward import plan as sm90_plan
from jax_fa4.kernels.spec import splits_backward
from tests.compiled import require_kernels
from tests.emulator.attention import ForwardCase
from tests.emulator.attention_backward import assert_right, inputs, run_backward
from tests.emulator.cases import SM90_BACKWARD_CLEAN
from tests.emulator.fault_hunt import clean_seeds, parts
from tests.emulator.launch import Options

require_kernels()

LENGTHS = ((100, 130, 0), (60, 1, 3), (0, 0, 0))
CASES = [
    ForwardCase(150, 200, 64),
    ForwardCase(150, 200, 128, heads=2, mask="causal"),
    ForwardCase(100, 130, 64, batch=3, heads=2, mask="causal", lengths=LENGTHS),
    ForwardCase(130, 190, 128, heads=2, mask="window", left=40, right=10),
    ForwardCase(200, 100, 72),
    ForwardCase(260, 70, 128, 64),
    ForwardCase(70, 100, 256, mask="causal"),
    ForwardCase(100, 70, 192, 128),
    ForwardCase(1, 1, 64),
    ForwardCase(64, 300, 64, heads=4, kv_heads=2, mask="causal", query_offset=236),
]


def pytest_generate_tests(metafunc):
    if "part" in metafunc.fixturenames:
        metafunc.parametrize("part", parts(metafunc))


SPLIT_LENGTHS = ((130, 190, 0), (93, 161, 5), (0, 0, 0), (1, 64, 63))
SPLIT_CASES = [
    ForwardCase(150, 200, 256, heads=2, mask="causal"),
    ForwardCase(70, 129, 192, 128, heads=4, kv_heads=2),
    ForwardCase(130, 190, 256, batch=4, heads=2, mask="window", lengths=SPLIT_LENGTHS, left=30, right=5),
]


@pytest.mark.parametrize("case", SPLIT_CASES, ids=lambda case: case.name)
def test_split_backward(case):
    given = inputs(case)
    for seed in (0, 1):
        assert_right(case, given, run_backward(case, given, Options(seed=seed)))


def orders(case: ForwardCase) -> tuple[bool, ...]:
    """Values of ``deterministic`` for which there are kernels: the split ones add nothing in an order that could
    vary.
    """
    return (True,) if splits_backward(case.head_dim, case.head_dim_v or case.head_dim) else (True, False)


@pytest.mark.parametrize(
    "case, deterministic",
    [(case, order) for case in CASES for order in orders(case)],
    ids=lambda value: value.name if isinstance(value, ForwardCase) else str(value),
)
def test_backward(case, deterministic):
    given = inputs(case)
    for seed in (0, 1, 2):
        assert_right(case, given, run_backward(case, given, Options(seed=seed), deterministic))


PERSISTENT = [
    ForwardCase(150, 300, 64, heads=2, mask="causal"),
    ForwardCase(64, 260, 64, heads=4, kv_heads=2, mask="window", left=40, right=10, query_offset=100),
    ForwardCase(100, 130, 40, batch=4, mask="causal", lengths=(*LENGTHS, (100, 130, 30)), dtype="float16"),
]


@pytest.mark.parametrize("case", PERSISTENT, ids=lambda case: case.name)
def test_persistent_ctas(case, monkeypatch):
    """However many CTAs share the tiles (some of them without a step), the bits are the same."""
    given = inputs(case)
    results = []
    for ctas in (1, 2, 132):
        monkeypatch.setattr(sm90_plan, "PERSISTENT_CTAS", ctas)
        results.append(run_backward(case, given, Options(seed=ctas)))
        assert_right(case, given, results[-1])
    for result in results[1:]:
        for a, b in zip(results[0].gradients, result.gradients, strict=True):
            assert a.tobytes() == b.tobytes()


@pytest.mark.parametrize("case", SM90_BACKWARD_CLEAN, ids=lambda case: case.name)
def test_deterministic_gradients_do_not_depend_on_the_schedule(case, part):
    given = inputs(case)
    first = run_backward(case, given, Options(seed=0)).gradients
    for seed in clean_seeds(part):
        for a, b in zip(first, run_backward(case, given, Options(seed=seed)).gradients, strict=True):
            assert a.tobytes() == b.tobytes()
