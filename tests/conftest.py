"""Options of the whole test suite."""

import jax
import pytest

# Sharding tests need a mesh; the other tests use the first device as ever.
jax.config.update("jax_num_cpu_devices", 8)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--long", action="store_true", help="run the fuzz tests with many more examples")
