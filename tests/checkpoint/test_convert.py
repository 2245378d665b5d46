"""Applying a table: each tensor is found exactly once, fits, and is moved without copies."""

import re
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from jorca.checkpoint.convert import (
    Source,
    apply_table,
    cast,
    common_dtype,
    keep,
    same_bits,
    strip_prefixes,
    transpose,
)
from jorca.checkpoint.errors import CheckpointError
from jorca.checkpoint.gpt2 import gpt2_table
from jorca.config import ModelConfig
from jorca.model.params import param_table

CONFIG = ModelConfig(
    vocab_size=7, max_positions=5, num_layers=2, num_heads=2, d_model=6, d_ff=10, tie_embeddings=False
)
TABLE = gpt2_table(CONFIG, out_in=True)


def make_tensors() -> dict[str, Any]:
    rng = np.random.default_rng(0)
    return {source.key: rng.standard_normal(source.shape, np.float32) for source in TABLE.values()}


def apply(tensors, **options):
    return apply_table(tensors, TABLE, CONFIG, **options)


class TestApplyTable:
    def test_each_element_lands_where_the_layouts_say(self):
        tensors = make_tensors()
        params = apply(tensors)
        assert {name: x.shape for name, x in params.items()} == {
            name: info.shape for name, info in param_table(CONFIG).items()
        }
        d, n, h = 6, 2, 3
        for layer in range(2):
            at, to = f"h.{layer}.", f"layers.{layer}."
            qkv = tensors[at + "attn.c_attn.weight"]
            for which in range(3):
                for head in range(n):
                    rows = slice(which * d + head * h, which * d + (head + 1) * h)
                    assert np.array_equal(params[to + "attention.qkv.kernel"][:, which, head], qkv[rows].T)
                    bias = tensors[at + "attn.c_attn.bias"][rows]
                    assert np.array_equal(params[to + "attention.qkv.bias"][which, head], bias)
            out = tensors[at + "attn.c_proj.weight"]
            for head in range(n):
                columns = out[:, head * h : (head + 1) * h]
                assert np.array_equal(params[to + "attention.out.kernel"][head], columns.T)
            assert np.array_equal(params[to + "mlp.up.kernel"], tensors[at + "mlp.c_fc.weight"].T)
            assert np.array_equal(params[to + "mlp.down.kernel"], tensors[at + "mlp.c_proj.weight"].T)
            assert np.array_equal(params[to + "attention_norm.scale"], tensors[at + "ln_1.weight"])
            assert np.array_equal(params[to + "mlp_norm.bias"], tensors[at + "ln_2.bias"])
        assert np.array_equal(params["head.kernel"], tensors["lm_head.weight"])

    def test_nothing_is_copied(self):
        tensors = make_tensors()
        for name, x in apply(tensors).items():
            assert np.shares_memory(x, tensors[TABLE[name].key]), name

    def test_everything_that_does_not_fit_is_listed_at_once(self):
        tensors = make_tensors()
        del tensors["ln_f.bias"], tensors["h.1.mlp.c_fc.weight"]
        tensors["lm_head.bias"] = np.zeros(7, np.float32)
        tensors["h.0.attn.masked_bias"] = np.zeros((), np.float32)
        tensors["wpe.weight"] = np.zeros((4, 6), np.float32)
        tensors["h.0.ln_1.weight"] = np.zeros(6, np.int64)
        tensors["h.0.ln_1.bias"] = [0.0] * 6
        with pytest.raises(CheckpointError) as caught:
            apply(tensors)
        assert sorted(str(caught.value).splitlines()[1:]) == [
            "  missing: h.1.mlp.c_fc.weight",
            "  missing: ln_f.bias",
            "  not a tensor: h.0.ln_1.bias (list)",
            "  not floating point: h.0.ln_1.weight is int64",
            "  not part of this model: h.0.attn.masked_bias",
            "  not part of this model: lm_head.bias",
            "  wrong shape: wpe.weight is (4, 6), this model needs (5, 6)",
        ]

    def test_ignored_names_are_exact_and_may_be_absent(self):
        tensors = make_tensors() | {"h.0.attn.bias": np.tri(5)}
        params = apply(tensors, ignored={"h.0.attn.bias", "h.1.attn.bias"})
        assert "layers.0.attention.qkv.bias" in params
        with pytest.raises(CheckpointError, match=r"not part of this model: h\.0\.attn\.bias"):
            apply(tensors, ignored={"attn.bias"})

    def test_a_table_must_cover_the_parameters_and_use_no_tensor_twice(self):
        table = dict(TABLE)
        table["final_norm.bias"] = Source("ln_f.weight", (6,))
        with pytest.raises(AssertionError, match="twice"):
            apply_table(make_tensors(), table, CONFIG)
        del table["final_norm.bias"]
        with pytest.raises(AssertionError, match="covers"):
            apply_table(make_tensors(), table, CONFIG)

    def test_transforms_are_views(self):
        x = np.arange(6).reshape(2, 3)
        assert keep(x) is x
        assert np.array_equal(transpose(x), [[0, 3], [1, 4], [2, 5]])


class TestPrefixes:
    @pytest.mark.parametrize(
        "prefix", ["", "module.", "_orig_mod.", "module._orig_mod.", "_orig_mod.module."]
    )
    def test_wrappers_are_stripped_from_the_front_repeatedly(self, prefix):
        assert strip_prefixes({prefix + "lm_head.weight": 1}) == {"lm_head.weight": 1}

    def test_a_prefix_in_the_middle_is_part_of_the_name(self):
        assert strip_prefixes({"a.module.b": 1, "amodule.c": 2}) == {"a.module.b": 1, "amodule.c": 2}

    def test_two_names_that_become_one_are_refused(self):
        with pytest.raises(CheckpointError, match=re.escape("'a.b' and 'module.a.b' are both 'a.b'")):
            strip_prefixes({"a.b": 1, "module.a.b": 2})


class TestDtypes:
    @pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
    def test_a_common_dtype_is_found_and_kept_without_a_copy(self, dtype):
        params = {"a": np.ones(2, np.dtype(dtype)), "b": np.ones(3, np.dtype(dtype))}
        assert common_dtype(params) == dtype
        assert cast(params["a"], dtype, "a") is params["a"]

    @pytest.mark.parametrize("dtypes", [(np.float32, np.float16), (np.float64, np.float64)])
    def test_mixed_or_double_precision_needs_a_decision(self, dtypes):
        params = {str(i): np.ones(2, dtype) for i, dtype in enumerate(dtypes)}
        with pytest.raises(CheckpointError, match="say which dtype"):
            common_dtype(params)

    def test_casting_rounds_to_the_nearest_even(self):
        x = np.array([1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-9], np.float32)  # bfloat16 steps by 2**-7 here
        y = cast(x, "bfloat16", "x")
        assert y.dtype == ml_dtypes.bfloat16
        assert np.array_equal(y.astype(np.float32), np.array([1, 1 + 2**-6, 1], np.float32))

    @pytest.mark.parametrize(
        ("value", "dtype"), [(7e4, "float16"), (3.4e38, "bfloat16"), (-7e4, "float16"), (1e39, "float32")]
    )
    @pytest.mark.parametrize("beside", [0, np.nan, np.inf])
    def test_a_value_beyond_a_dtype_is_refused_by_name(self, value, dtype, beside):
        with pytest.raises(CheckpointError, match=f"w holds values too large for {dtype}"):
            cast(np.array([beside, value], np.float64), dtype, "w")

    @pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
    def test_nan_and_infinity_stay_what_they_are(self, dtype):
        x = np.array([np.nan, np.inf, -np.inf, 1], np.float64)
        assert np.array_equal(cast(x, dtype, "w").astype(np.float64), x, equal_nan=True)


class TestSameBits:
    def test_arrays_are_the_same_if_every_bit_is(self):
        x = np.random.default_rng(0).standard_normal((3000, 3)).astype(np.float32)
        x[7] = np.nan
        assert same_bits(x, x.copy())
        assert same_bits(x.T, x.T.copy())
        assert same_bits(x[:0], x[:0].copy())
        assert same_bits(x[0, 0], x[0, 0]) is False  # a scalar is no array
        assert same_bits(np.array(x[0, 0]), np.array(x[0, 0]))
        for row in (0, 1023, 1024, 2999):
            other = x.copy()
            other[row, 2] = -0.0 if row == 0 else np.nextafter(x[row, 2], np.float32(9))
            assert not same_bits(x, other)

    def test_shape_and_dtype_count(self):
        x = np.zeros((4, 2), np.float32)
        assert not same_bits(x, x.reshape(2, 4))
        assert not same_bits(x, x.astype(np.float64))
        assert not same_bits(x, x.view(np.int32))
        assert not same_bits(x, [[0.0]])
