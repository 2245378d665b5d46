"""Nothing here touches a GPU or its driver."""

import os

import jax
import pytest

# Read when JAX looks for its plugins, at the first use of a device.
os.environ["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] = "1"


@pytest.fixture(scope="session", autouse=True)
def _no_compilation_cache(_compile_each_program_once):
    """Programs for devices that are not there cannot be read back from JAX's persistent cache."""
    jax.config.update("jax_enable_compilation_cache", False)
    yield
    jax.config.update("jax_enable_compilation_cache", True)
