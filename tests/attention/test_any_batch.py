import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.experimental.pallas import mosaic_gpu as plgpu

from attention.suite import Request, check, make_batch
from jorca.attention.mosaic import MosaicAttention
from jorca.attention.triton import TritonAttention

SIZES = st.lists(st.tuples(st.integers(0, 34), st.integers(0, 125)), max_size=4)
SEEDS = st.integers(0, 2**32 - 1)


def random_requests(sizes, seed, **shape):
    rng = np.random.default_rng(seed)
    requests = [Request.random(rng, rows, rows + past if rows else 0, **shape) for rows, past in sizes]
    return requests or [Request.random(rng, 0, 0, **shape)]


@pytest.mark.parametrize("implementation", ["reference", "xla"])
@settings(max_examples=40, deadline=None, derandomize=True)
@given(sizes=SIZES, page_size=st.sampled_from([2, 16]), seed=SEEDS)
def test_any_batch_matches_softmax_over_each_request_alone(implementation, sizes, page_size, seed):
    check(make_batch(random_requests(sizes, seed), page_size=page_size, seed=seed), implementation)


@pytest.mark.kernels
@pytest.mark.filterwarnings("ignore:invalid value encountered in matmul:RuntimeWarning")
@pytest.mark.parametrize(
    "implementation",
    [
        TritonAttention(interpret=True),
        TritonAttention(interpret=True, block_q=16, splits=2),
        MosaicAttention(interpret=plgpu.InterpretGPUParams()),
        MosaicAttention(interpret=plgpu.InterpretGPUParams(), splits=2),
    ],
    ids=["triton", "triton-split", "mosaic", "mosaic-split"],
)
@settings(max_examples=6, deadline=None, derandomize=True)
@given(sizes=SIZES, dtype=st.sampled_from([np.float16, jnp.bfloat16]), seed=SEEDS)
def test_kernels_match_softmax_over_each_request_alone(implementation, sizes, dtype, seed):
    requests = random_requests(sizes, seed, dtype=dtype, head_dim=64)
    ulp = float(jnp.finfo(dtype).eps)
    # Weights are rounded as well, half an ulp each; no value is as large as 6.
    check(make_batch(requests, page_size=64, seed=seed), implementation, rtol=ulp / 2, atol=3 * ulp)
