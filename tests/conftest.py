"""Options of the whole test suite."""

from pathlib import Path

import jax
import pytest

from tests import compiled

# Sharding tests need a mesh; the other tests use the first device as ever.
jax.config.update("jax_num_cpu_devices", 8)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--long", action="store_true", help="run the fuzz tests with many more examples")
    parser.addoption("--artefacts", type=Path, help="folder of compiled kernels to execute; missing ones are compiled")


def pytest_configure(config: pytest.Config) -> None:
    compiled.set_folder(config.getoption("--artefacts"))
