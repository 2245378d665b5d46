import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attention.suite import Request, check, make_batch


@pytest.mark.parametrize("implementation", ["reference", "xla"])
@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    sizes=st.lists(st.tuples(st.integers(0, 34), st.integers(0, 125)), max_size=4),
    page_size=st.sampled_from([2, 16]),
    seed=st.integers(0, 2**32 - 1),
)
def test_any_batch_matches_softmax_over_each_request_alone(implementation, sizes, page_size, seed):
    rng = np.random.default_rng(seed)
    requests = [Request.random(rng, rows, rows + past) if rows else None for rows, past in sizes]
    check(make_batch(requests, page_size=page_size, seed=seed), implementation)
