"""Options of the whole test suite, and eight CPU devices for tests that need a mesh."""

import os

import jax
import pytest

if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
    jax.config.update("jax_num_cpu_devices", 8)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--long", action="store_true", help="run the fuzz tests with many more examples")
