"""The model against two independent sources of right logits: Hugging Face and plain numpy."""

import dataclasses
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jorca.attention import AttentionMetadata, KVCache, get_attention
from jorca.config import ModelConfig
from jorca.model.gpt import GPT
from jorca.model.init import init_params
from jorca.model.params import num_params, param_bytes, param_table
from jorca.model.presets import PRESETS, preset
from oracle.golden import golden_cases
from oracle.numpy_gpt import forward, random_params

BOUND = 1e-5
PAGE = 4


def flat_logits(config, params, sequences, implementation: Any = "xla", padding=0, jit: Any = jax.jit):
    """Logits [T, V] of every row of several whole sequences, laid end to end in one flat batch."""
    lengths = [len(ids) for ids in sequences]
    pages_each = -(-config.max_positions // PAGE)
    num_pages = pages_each * len(sequences)
    cache = KVCache.allocate(config.kv_spec, num_pages=num_pages, page_size=PAGE)
    cache = jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), cache)
    metadata = AttentionMetadata(
        first_row_b=jnp.array([sum(lengths[:i]) for i in range(len(lengths))], jnp.int32),
        num_rows_b=jnp.array(lengths, jnp.int32),
        kv_len_b=jnp.array(lengths, jnp.int32),
        pages_bm=jnp.arange(num_pages, dtype=jnp.int32)[::-1].reshape(len(sequences), pages_each),
    )
    total = sum(lengths) + padding
    tokens = jnp.array([t for ids in sequences for t in ids] + [0] * padding, jnp.int32)
    positions = jnp.array([p for n in lengths for p in range(n)] + [0] * padding, jnp.int32)
    attention = get_attention(implementation)

    @jit
    def run(params, cache):
        prepared = attention.prepare(metadata, num_tokens=total, page_size=PAGE)

        def attend(q, k, v, cache, layer, scale):
            return attention(q, k, v, cache, layer, prepared, scale=scale)

        model = GPT(config, params)
        x_td, _ = model(tokens, positions, cache, attend)
        return model.logits(x_td)

    return np.asarray(run({n: jnp.asarray(w, config.dtype) for n, w in params.items()}, cache))


@pytest.mark.parametrize("implementation", ["reference", "xla"])
@pytest.mark.parametrize("case", golden_cases(), ids=str)
def test_logits_are_those_of_hugging_face(case, implementation):
    sequences = [ids.tolist() for ids, _ in case.sequences]
    # The reference, operation by operation: a whole program for every case takes long to compile.
    jit = jax.jit if implementation == "xla" else lambda run: run
    got = flat_logits(case.config, case.params, sequences, implementation, padding=3, jit=jit)
    right = np.concatenate([logits for _, logits in case.sequences])
    assert np.abs(got[: len(right)] - right).max() < BOUND * np.abs(right).max()
    assert np.isfinite(got).all()


FLAGS = {
    "activation": ["gelu_tanh", "gelu_erf"],
    "use_bias": [True, False],
    "tie_embeddings": [True, False],
    "scale_attention": [True, False],
    "scale_attention_by_inverse_layer": [True, False],
}


@pytest.mark.parametrize("values", list(itertools.product(*FLAGS.values())), ids=str)
def test_every_flag_combination_agrees_with_plain_numpy(values):
    config = ModelConfig(
        vocab_size=37,
        max_positions=12,
        num_layers=2,
        num_heads=3,
        d_model=12,
        d_ff=20,
        norm_epsilon=1e-3,
        **dict(zip(FLAGS, values, strict=True)),
    )
    params = random_params(config, seed=len(str(values)))
    rng = np.random.default_rng(0)
    sequences = [rng.integers(0, 37, n).tolist() for n in (5, 12, 1)]
    right = np.concatenate([forward(config, params, ids) for ids in sequences])
    # Operation by operation: 32 whole programs would take minutes to compile. The op under jit is above.
    got = flat_logits(config, params, sequences, "reference", jit=lambda run: run)
    assert np.abs(got - right).max() < BOUND * np.abs(right).max()


@pytest.mark.parametrize("tied", [True, False])
def test_padding_of_the_vocabulary_shows_nowhere(tied):
    config = ModelConfig(
        vocab_size=37, max_positions=12, num_layers=1, num_heads=3, d_model=12, tie_embeddings=tied
    )
    assert config.padded_vocab_size == 37
    params = random_params(config, seed=0)
    ids = [[36, 0, 5]]
    padded = {
        name: np.concatenate([x, np.full((3, 12), np.inf, x.dtype)]) if x.shape[0] == 37 else x
        for name, x in params.items()
    }
    padded_config = dataclasses.replace(config, padded_vocab_size=40)
    assert {n: i.shape for n, i in param_table(padded_config).items()} == {
        n: x.shape for n, x in padded.items()
    }
    got = flat_logits(padded_config, padded, ids)
    assert got.shape[1] == 37
    right = forward(config, params, ids[0])
    assert np.abs(got - right).max() < BOUND * np.abs(right).max()


@pytest.mark.parametrize(("dtype", "bound"), [("bfloat16", 2**-5), ("float16", 2**-8)])
def test_half_precision_stays_near_float32_and_its_logits_are_float32(dtype, bound):
    # A few roundings of 2^-9 (bfloat16) or 2^-12 (float16) per layer, on values of size one.
    config = ModelConfig(vocab_size=50, max_positions=16, num_layers=3, num_heads=2, d_model=32, dtype=dtype)
    params = {n: np.asarray(jnp.asarray(w, dtype), np.float32) for n, w in random_params(config, 1).items()}
    ids = np.random.default_rng(2).integers(0, 50, 16).tolist()
    right = forward(config, params, ids)
    got = flat_logits(config, params, [ids])
    assert got.dtype == np.float32
    assert np.abs(got - right).max() < bound * np.abs(right).max()


def test_module_paths_are_the_names_of_the_table_and_nnx_can_split_and_merge():
    for tied, bias in itertools.product([True, False], repeat=2):
        config = ModelConfig(
            vocab_size=7,
            max_positions=4,
            num_layers=2,
            num_heads=1,
            d_model=4,
            tie_embeddings=tied,
            use_bias=bias,
        )
        model = GPT(config, init_params(config))
        graphdef, state = nnx.split(model)
        flat = {".".join(map(str, path)): value for path, value in nnx.to_flat_state(state)}
        table = param_table(config)
        assert {n: v[...].shape for n, v in flat.items()} == {n: i.shape for n, i in table.items()}
        assert isinstance(nnx.merge(graphdef, state), GPT)


@pytest.mark.parametrize(
    ("name", "count"),
    # Published parameter counts of GPT-2 (Hugging Face model cards), a tied head counted once.
    [
        ("gpt2", 124_439_808),
        ("gpt2-medium", 354_823_168),
        ("gpt2-large", 774_030_080),
        ("gpt2-xl", 1_557_611_200),
    ],
)
def test_gpt2_presets_have_the_published_number_of_weights(name, count):
    assert num_params(preset(name)) == count


def test_paper_presets_weigh_what_their_names_say_and_have_heads_of_128():
    for name in ("orca-13b", "orca-101b", "orca-175b", "orca-341b"):
        config = preset(name)
        billions = float(name.removeprefix("orca-").removesuffix("b"))
        assert num_params(config) / 1e9 == pytest.approx(billions, rel=0.02)
        assert param_bytes(config) == 2 * num_params(config)
        assert config.head_dim == 128
    assert preset("orca-13b").kv_spec.bytes_per_position == 819_200  # known from the paper's shapes


def test_unknown_preset_lists_the_known_ones():
    with pytest.raises(ValueError, match=r"gpt2-xl.*got 'gpt5'"):
        preset("gpt5")
    assert set(PRESETS) >= {"gpt2", "gpt3-1.3b"}


def test_fresh_weights_have_the_stated_deviations_and_follow_the_seed():
    config = ModelConfig(vocab_size=500, max_positions=64, num_layers=8, num_heads=4, d_model=64)
    params, same, other = init_params(config, 1), init_params(config, 1), init_params(config, 2)
    for name, info in param_table(config).items():
        w = np.asarray(params[name])
        assert w.shape == info.shape
        np.testing.assert_array_equal(w, np.asarray(same[name]))
        if info.init in ("normal", "residual"):
            assert not np.array_equal(w, np.asarray(other[name]))
            stddev = 0.02 / (4 if info.init == "residual" else 1)  # sqrt(2 * 8 layers) = 4
            assert w.std() == pytest.approx(stddev, rel=0.05)
        else:
            assert (w == (1 if info.init == "ones" else 0)).all()
    half = init_params(dataclasses.replace(config, dtype="bfloat16"), 1)
    assert {w.dtype for w in half.values()} == {jnp.dtype("bfloat16")}
