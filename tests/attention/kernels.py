"""What the GPU kernels must show beyond the shared suite, interpreted on the CPU."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from attention.suite import KV_LENS, LONG, AttentionSuite, Request, make_batch, sizes_of

HEAD_DIMS, PAGE_SIZES, DTYPES, SPLITS = (64, 80, 96, 128), (64, 128), ("float16", "bfloat16"), (1, 3)


@dataclasses.dataclass(frozen=True)
class Form:
    """One form of a kernel, as the compiler sees it."""

    head_dim: int
    page_size: int
    dtype: str
    splits: int

    def __str__(self) -> str:
        return f"H{self.head_dim}-S{self.page_size}-{self.dtype}-{self.splits}"


ALL_FORMS = [Form(*values) for values in itertools.product(HEAD_DIMS, PAGE_SIZES, DTYPES, SPLITS)]


def pairwise_sample() -> list[Form]:
    """Forms in which every value of a factor meets every value of each other one, in two per head width."""
    return [
        Form(head_dim, PAGE_SIZES[bit], DTYPES[bit ^ i & 1], SPLITS[bit ^ i >> 1])
        for i, head_dim in enumerate(HEAD_DIMS)
        for bit in (0, 1)
    ]


@pytest.mark.kernels
class KernelSuite(AttentionSuite):
    """Inherited by one test class per kernel."""

    implementation: Any
    page_sizes = PAGE_SIZES
    page_size = 64
    head_dim = 64
    other_head_dims = HEAD_DIMS[1:]
    group_sizes = (1,)
    dtype = np.float16
    rounds_weights = True

    def check_form(self, form: Form, kv_lens: tuple[int, ...]) -> None:
        rng = np.random.default_rng(form.head_dim + form.page_size)
        shape = {"dtype": jnp.dtype(form.dtype), "head_dim": form.head_dim}
        sizes = sizes_of(*kv_lens)
        requests = [Request.random(rng, *s, num_heads=1 + (max(kv_lens) < LONG), **shape) for s in sizes]
        rows = sum(r.num_rows for r in requests)
        batch = make_batch(
            requests,
            page_size=form.page_size,
            num_tokens=rows + 5,
            num_slots=len(requests) + 1,
            table_positions=max(kv_lens),
        )
        self.check(batch, dataclasses.replace(self.implementation, splits=form.splits))

    @pytest.mark.parametrize("form", pairwise_sample(), ids=str)
    def test_every_pair_of_width_page_dtype_and_split_is_right_at_all_lengths(self, form):
        self.check_form(form, KV_LENS)

    @pytest.mark.slow
    @pytest.mark.parametrize("form", ALL_FORMS, ids=str)
    def test_every_width_page_dtype_and_split_is_right_at_all_lengths(self, form):
        self.check_form(form, KV_LENS)
        self.check_form(form, (LONG,))

    def test_splits_without_a_position_weigh_nothing(self):
        rng = np.random.default_rng(0)
        sizes = [(1, 1), (1, 65), (70, 130)]  # 1, 2 and 3 blocks for 8 splits
        batch = self.batch([self.request(rng, *s) for s in sizes])
        self.check(batch, dataclasses.replace(self.implementation, splits=8))

    def test_values_behind_the_last_position_may_be_anything(self):
        rng = np.random.default_rng(1)
        batch = self.batch([self.request(rng, *s) for s in [(1, 65), (3, 3), (64, 127)]])
        nobodys = np.isnan(batch.values_after)
        for bad in (np.inf, -np.inf, 6e4):
            for array in (batch.keys, batch.keys_after, batch.values, batch.values_after):
                array[nobodys] = bad
            self.check(batch)

    @pytest.mark.parametrize(
        ("shape", "layout", "message"),
        [
            ({}, {"page_size": 16}, "takes page_size 64, 128, got 16; use one of these, or attention xla"),
            ({"head_dim": 72}, {}, "takes head width 64, 80, 96, 128, got 72; use one of these, or"),
            ({"dtype": np.float32}, {}, "takes dtype float16, bfloat16, got float32; use one of these, or"),
            ({"group_size": 2}, {}, "takes query heads per key/value head 1, got 2; use one of these, or"),
        ],
    )
    def test_what_it_does_not_take_is_refused_by_name(self, shape, layout, message):
        request = self.request(np.random.default_rng(2), 1, 1, **shape)
        with pytest.raises(NotImplementedError, match=message):
            self.batch([request], **layout).run(self.implementation)
