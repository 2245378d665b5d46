"""What Hugging Face, nanoGPT and minGPT share: the adder in each of their layouts is the adder."""

from typing import Any

import numpy as np
import pytest

from jorca.checkpoint import CheckpointError, load_checkpoint, load_config, load_params
from jorca.checkpoint.foreign import Overrides
from jorca.checkpoint.formats import read_foreign
from jorca.config import Activation
from oracle import numpy_gpt
from tests.checkpoint.adder import LOGITS_ERF, LOGITS_TANH, forward, share_of_sums
from tests.checkpoint.foreign_files import (
    ADDER,
    adder_tensors,
    conv1d,
    is_linear,
    write_hf,
    write_mingpt,
    write_nanogpt,
)

WTE, HEAD = "transformer.wte.weight", "lm_head.weight"


def write(name, folder, tensors, **settings):
    """Writes tensors with linear layers [out, in] in one of the layouts."""
    if name == "hf":
        return write_hf(folder, conv1d(tensors), **settings)
    if name == "hf_bin":
        return write_hf(folder, conv1d(tensors), kind="bin", **settings)
    return (write_nanogpt if name == "nanogpt" else write_mingpt)(folder, tensors, **settings)


LAYOUTS = ["hf", "hf_bin", "nanogpt", "mingpt"]


def load(path):
    loaded = load_checkpoint(path)
    return loaded.config, {name: np.asarray(x) for name, x in loaded.params.items()}


@pytest.fixture(scope="module")
def adder():
    config = load_config(ADDER)
    return config, {name: np.asarray(x) for name, x in load_params(ADDER, config).items()}


def assert_is_adder(path, adder):
    config, params = load(path)
    # nanoGPT's activation is another, which no tensor can tell.
    assert (config.num_layers, config.num_heads, config.d_ff) == (3, 3, 192)
    assert params.keys() == adder[1].keys()
    for name, x in adder[1].items():
        assert np.array_equal(params[name], x), name


@pytest.mark.parametrize("layout", LAYOUTS)
class TestEveryLayout:
    @pytest.mark.parametrize(
        "prefix",
        [
            "",
            "transformer.",
            "module._orig_mod.",
            "_orig_mod.module.transformer.",
            "module.module.transformer.",
        ],
    )
    def test_prefixes_come_and_go(self, tmp_path, adder, layout, prefix):
        assert_is_adder(write(layout, tmp_path / "x", adder_tensors(prefix=prefix)), adder)

    def test_two_names_that_become_one_are_refused(self, tmp_path, layout):
        tensors = adder_tensors()
        tensors["module.transformer.wpe.weight"] = tensors["transformer.wpe.weight"]
        with pytest.raises(CheckpointError, match=r"are both 'wpe\.weight'"):
            load(write(layout, tmp_path / "x", tensors))

    @pytest.mark.parametrize("masks", [("bias", "masked_bias"), ("bias",), ()], ids=str)
    def test_mask_buffers_come_and_go(self, tmp_path, adder, layout, masks):
        tensors = adder_tensors()
        stored = {"bias": np.tri(6, dtype=bool)[None, None], "masked_bias": np.array(-1e4, np.float32)}
        for i in range(3):
            tensors |= {f"transformer.h.{i}.attn.{name}": stored[name] for name in masks}
        assert_is_adder(write(layout, tmp_path / "x", tensors), adder)

    def test_any_other_tensor_that_is_left_over_is_listed(self, tmp_path, layout):
        tensors = adder_tensors()
        tensors["score.weight"] = np.zeros((2, 48), np.float32)
        for name in ("h.0.attn.bias2", "h.0.mlp.bias", "attn.bias"):
            tensors[f"transformer.{name}"] = np.zeros(3, np.float32)
        with pytest.raises(CheckpointError) as caught:
            load(write(layout, tmp_path / "x", tensors))
        assert sorted(str(caught.value).splitlines()[1:]) == [
            "  not part of this model: attn.bias",
            "  not part of this model: h.0.attn.bias2",
            "  not part of this model: h.0.mlp.bias",
            "  not part of this model: score.weight",
        ]

    def test_a_missing_bias_in_a_model_with_biases_is_an_error(self, tmp_path, layout):
        tensors = adder_tensors()
        del tensors["transformer.h.1.attn.c_proj.bias"], tensors["transformer.ln_f.bias"]
        with pytest.raises(CheckpointError) as caught:
            load(write(layout, tmp_path / "x", tensors))
        assert sorted(str(caught.value).splitlines()[1:]) == [
            "  missing: h.1.attn.c_proj.bias",
            "  missing: ln_f.bias",
        ]

    def test_settings_of_another_model_are_refused_with_both_numbers(self, tmp_path, layout):
        positions = "n_positions" if layout.startswith("hf") else "block_size"
        named = {} if layout == "mingpt" else {"n_layer": 4, "n_embd": 64}  # whose model type says those
        path = write(layout, tmp_path / "x", adder_tensors(), vocab_size=11, **{positions: 7}, **named)
        with pytest.raises(CheckpointError) as caught:
            load(path)
        for said in (
            {"n_layer 4, but the tensors have 3", "n_embd 64, but the tensors have 48"} if named else ()
        ):
            assert said in str(caught.value)
        assert "vocab_size 11, but the tensors have 10" in str(caught.value)
        assert f"{positions} 7, but the tensors have 6" in str(caught.value)

    def test_the_orientation_of_the_wrong_format_is_refused_where_shapes_can_tell(self, tmp_path, layout):
        wrong = conv1d(adder_tensors())  # which `write` turns round once more for Hugging Face
        with pytest.raises(CheckpointError, match=r"wrong shape: h\.0\.attn\.c_attn\.weight|but the tensors"):
            load(write(layout, tmp_path / "x", wrong))

    def test_a_square_weight_is_turned_as_the_format_says_and_not_as_its_shape(self, tmp_path, adder, layout):
        """Untransposed, this model keeps all shapes and 2.3 % of its sums."""
        tensors = adder_tensors()
        for i in range(3):
            key = f"transformer.h.{i}.attn.c_proj.weight"
            assert is_linear(key)
            tensors[key] = np.ascontiguousarray(tensors[key].T)
        config, params = load(write(layout, tmp_path / "x", tensors))
        a, b = np.random.default_rng(0).integers(0, 100, (2, 1000))
        assert share_of_sums(params, config, a, b) < 0.05

    def test_padding_of_the_vocabulary_is_told_by_the_user(self, tmp_path, adder, layout):
        tensors = adder_tensors()
        for key in (WTE, HEAD):
            tensors[key] = np.concatenate([tensors[key], np.full((6, 48), np.nan, np.float32)])
        path = write(layout, tmp_path / "x", tensors, vocab_size=16)
        config = read_foreign(path, overrides=Overrides(vocab_size=10)).config
        assert (config.vocab_size, config.padded_vocab_size) == (10, 16)
        assert read_foreign(path).config.vocab_size == 16
        with pytest.raises(CheckpointError, match="vocab_size must be at most the 16 rows"):
            read_foreign(path, overrides=Overrides(vocab_size=17))
        with pytest.raises(CheckpointError, match="eos_token_id must be below vocab_size 10"):
            read_foreign(path, overrides=Overrides(vocab_size=10, eos_token_id=10))


class TestHead:
    """A nanoGPT ties its head; files may have either of both, or both."""

    @pytest.mark.parametrize("stored", ["embedding", "head", "both"])
    def test_a_tied_head_is_the_same_however_it_is_stored(self, tmp_path, stored):
        tensors = adder_tensors()
        tensors[HEAD] = tensors[WTE]
        for key in {"embedding": [HEAD], "head": [WTE], "both": []}[stored]:
            del tensors[key]
        config, params = load(write_nanogpt(tmp_path / "x", tensors))
        assert config.tie_embeddings
        assert "head.kernel" not in params
        assert np.array_equal(params["embed.tokens"], adder_tensors()[WTE])

    def test_a_head_that_differs_is_kept_with_a_note(self, tmp_path, adder):
        path = write_nanogpt(tmp_path / "x", adder_tensors())
        assert any("they differ; both are kept" in note for note in read_foreign(path).notes)
        assert_is_adder(path, adder)

    def test_equal_means_bit_for_bit_even_for_nan(self, tmp_path):
        tensors = adder_tensors()
        tensors[WTE][3, 5] = np.nan
        tensors[HEAD] = tensors[WTE].copy()
        assert load(write_nanogpt(tmp_path / "x", tensors))[0].tie_embeddings
        tensors[HEAD][9, 47] = np.nextafter(tensors[HEAD][9, 47], np.float32(9))
        assert not load(write_nanogpt(tmp_path / "y", tensors))[0].tie_embeddings

    @pytest.mark.parametrize("key", [WTE, HEAD])
    @pytest.mark.parametrize("layout", ["hf", "mingpt"])
    def test_an_untied_model_needs_both(self, tmp_path, layout, key):
        tensors = adder_tensors()
        del tensors[key]
        with pytest.raises(CheckpointError, match=r"missing: lm_head\.weight|has no matrix 'wte\.weight'"):
            load(write(layout, tmp_path / "x", tensors))

    def test_one_without_axes_is_no_matrix(self, tmp_path):
        tensors = adder_tensors()
        tensors[WTE] = tensors[HEAD] = np.array(1, np.float32)
        with pytest.raises(CheckpointError, match=r"has no matrix 'wte\.weight'"):
            load(write_nanogpt(tmp_path / "x", tensors))

    def test_without_embedding_and_head_there_is_no_model(self, tmp_path):
        tensors = adder_tensors()
        del tensors[WTE], tensors[HEAD]
        with pytest.raises(CheckpointError, match=r"has no matrix 'wte\.weight'"):
            load(write_nanogpt(tmp_path / "x", tensors))


class TestBiases:
    @pytest.mark.parametrize("layout", ["nanogpt", "mingpt"])
    def test_a_model_without_biases_has_none_and_not_zeros(self, tmp_path, layout):
        tensors = {key: x for key, x in adder_tensors().items() if not key.endswith(".bias")}
        settings = {"bias": False} if layout == "nanogpt" else {}
        config, params = load(write(layout, tmp_path / "x", tensors, **settings))
        assert not config.use_bias
        assert not any(name.endswith(".bias") for name in params)
        ids = [8, 5, 5, 0]
        right = numpy_gpt.forward(config, params, ids)[-1]
        assert np.abs(forward(params, config, np.array([ids]))[0] - right).max() < 1e-5
        a, b = np.random.default_rng(0).integers(0, 100, (2, 1000))
        assert 0.98 < share_of_sums(params, config, a, b) < 1

    def test_what_is_recorded_stands_above_what_is_there(self, tmp_path):
        tensors = {key: x for key, x in adder_tensors().items() if not key.endswith(".bias")}
        with pytest.raises(CheckpointError, match=r"missing: h\.0\.ln_1\.bias"):
            load(write_nanogpt(tmp_path / "x", tensors, bias=True))
        with pytest.raises(CheckpointError, match=r"not part of this model: h\.0\.ln_1\.bias"):
            load(write_nanogpt(tmp_path / "y", adder_tensors(), bias=False))

    def test_a_mask_is_no_bias(self, tmp_path):
        tensors = {key: x for key, x in adder_tensors().items() if not key.endswith(".bias")}
        tensors |= {f"transformer.h.{i}.attn.bias": np.tri(6, dtype=np.float32)[None, None] for i in range(3)}
        assert not load(write_nanogpt(tmp_path / "x", tensors, bias=None))[0].use_bias


class TestRename:
    def test_patterns_apply_in_order_to_tensors_and_settings(self, tmp_path, adder):
        tensors = {
            key.replace("c_fc", "up").replace("wte", "tokens"): x for key, x in adder_tensors().items()
        }
        path = write_nanogpt(tmp_path / "x", tensors, n_head=None, heads=3)
        rename = (("tokens", "TOKENS"), ("TOKENS", "wte"), (r"\.up\.", ".c_fc."), ("^heads$", "n_head"))
        foreign = read_foreign(path, overrides=Overrides(rename=rename))
        assert foreign.config.num_heads == 3
        assert "wte.weight" in foreign.tensors

    @pytest.mark.parametrize(
        ("rename", "message"),
        [
            ((("wpe", "wte"),), "rename makes 'transformer.wte.weight' of both"),
            ((("(", "x"),), r"rename: '\(' to 'x' is no regular expression"),
            ((("w", r"\1"),), r"rename: 'w' to .* is no regular expression with its replacement"),
        ],
        ids=str,
    )
    def test_patterns_that_cannot_be_are_refused(self, tmp_path, rename, message):
        with pytest.raises(CheckpointError, match=message):
            read_foreign(write_nanogpt(tmp_path / "x", adder_tensors()), overrides=Overrides(rename=rename))


def test_the_activation_of_each_format_is_its_own_and_can_be_overridden(tmp_path, adder):
    """On the adder tanh and erf differ by up to 0.004 in a logit, and in no sum."""
    known = {"gelu_tanh": LOGITS_TANH, "gelu_erf": LOGITS_ERF}
    cases: list[tuple[Any, Activation, Activation]] = [
        (write_mingpt(tmp_path / "mingpt", adder_tensors()), "gelu_tanh", "gelu_erf"),
        (write_nanogpt(tmp_path / "nanogpt", adder_tensors()), "gelu_erf", "gelu_tanh"),
        (write("hf", tmp_path / "new", adder_tensors()), "gelu_tanh", "gelu_erf"),
        (
            write("hf", tmp_path / "exact", adder_tensors(), activation_function="gelu"),
            "gelu_erf",
            "gelu_tanh",
        ),
    ]
    for path, own, other in cases:
        for overrides, activation in ((Overrides(), own), (Overrides(activation=other), other)):
            config = read_foreign(path, overrides=overrides).config
            assert config.activation == activation
            logits = forward(adder[1], config, np.array([[8, 5, 5, 0]]))[0]
            assert np.abs(logits - known[activation]).max() < 1e-3
            wrong = known["gelu_erf" if activation == "gelu_tanh" else "gelu_tanh"]
            assert np.abs(logits - wrong).max() > 1e-3
