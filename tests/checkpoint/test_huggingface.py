"""config.json: every flag counts, and what jorca has not is refused."""

import json
import shutil

import ml_dtypes
import numpy as np
import pytest

from jorca.checkpoint import CheckpointError, convert_checkpoint, load_checkpoint, load_config, load_params
from jorca.checkpoint.formats import read_foreign
from tests.checkpoint.adder import all_prompts, forward, share_of_sums
from tests.checkpoint.foreign_files import ADDER, DATA, HF_CONFIG, adder_tensors, conv1d, write_hf


def config_of(folder, **config):
    return read_foreign(write_hf(folder, conv1d(adder_tensors()), **config)).config


@pytest.fixture(scope="module")
def adder_logits():
    config = load_config(ADDER)
    return forward(load_params(ADDER, config), config, all_prompts())


class TestFlags:
    @pytest.mark.parametrize(
        ("given", "field", "value"),
        [
            ({"activation_function": "gelu_new"}, "activation", "gelu_tanh"),
            ({"activation_function": "gelu_pytorch_tanh"}, "activation", "gelu_tanh"),
            ({"activation_function": "gelu_fast"}, "activation", "gelu_tanh"),
            ({"activation_function": "gelu"}, "activation", "gelu_erf"),
            ({"activation_function": "gelu_python"}, "activation", "gelu_erf"),
            ({"layer_norm_epsilon": 1e-3}, "norm_epsilon", 1e-3),
            ({"scale_attn_weights": False}, "scale_attention", False),
            ({"scale_attn_by_inverse_layer_idx": True}, "scale_attention_by_inverse_layer", True),
            ({"eos_token_id": 7}, "eos_token_id", 7),
            ({"eos_token_id": [7]}, "eos_token_id", 7),
            ({"n_inner": 192}, "d_ff", 192),
        ],
        ids=str,
    )
    def test_each_is_honoured(self, tmp_path, given, field, value):
        assert getattr(config_of(tmp_path / "x", **given), field) == value

    @pytest.mark.parametrize(
        ("given", "moved"),
        [
            ({"scale_attn_by_inverse_layer_idx": True}, 3.44),
            ({"scale_attn_weights": False}, 3.98),
            ({"layer_norm_epsilon": 1e-3}, 1.68),
        ],
        ids=str,
    )
    def test_the_adders_logits_move_as_far_as_is_known(self, tmp_path, adder_logits, given, moved):
        """Its sums hardly tell: they stay right in more than 99.9 % of all pairs."""
        loaded = load_checkpoint(write_hf(tmp_path / "x", conv1d(adder_tensors()), **given))
        got = forward(loaded.params, loaded.config, all_prompts())
        assert np.abs(got - adder_logits).max() == pytest.approx(moved, abs=5e-3)

    def test_attention_is_float32_whether_it_is_asked_for_or_not(self, tmp_path):
        asked = config_of(tmp_path / "x", reorder_and_upcast_attn=True)
        assert asked == config_of(tmp_path / "y", reorder_and_upcast_attn=False)

    def test_names_that_other_versions_use_mean_the_same(self, tmp_path):
        folder = write_hf(tmp_path / "x", conv1d(adder_tensors()))
        config = {key: x for key, x in HF_CONFIG.items() if not key.startswith("n_")}
        config |= {"num_attention_heads": 3, "num_hidden_layers": 3, "hidden_size": 48}
        (folder / "config.json").write_text(json.dumps(config))
        assert read_foreign(folder).config.num_heads == 3
        (folder / "config.json").write_text(json.dumps(config | {"hidden_size": 64}))
        with pytest.raises(CheckpointError, match="n_embd 64, but the tensors have 48"):
            read_foreign(folder)

    def test_what_is_left_out_is_gpt2s(self, tmp_path):
        tensors = {
            key: np.zeros((50257, 48), np.float32) if "wte" in key else x
            for key, x in adder_tensors().items()
        }
        del tensors["lm_head.weight"]
        folder = write_hf(tmp_path / "x", conv1d(tensors))
        (folder / "config.json").write_text('{"model_type": "gpt2", "n_head": 3}')
        config = read_foreign(folder).config
        assert (config.activation, config.norm_epsilon, config.tie_embeddings) == ("gelu_tanh", 1e-5, True)
        assert (config.scale_attention, config.eos_token_id) == (True, 50256)

    def test_more_than_one_end_of_text_and_one_outside_the_vocabulary_are_noted(self, tmp_path):
        foreign = read_foreign(write_hf(tmp_path / "x", conv1d(adder_tensors()), eos_token_id=[7, 8]))
        assert foreign.config.eos_token_id == 7
        assert "eos_token_id is [7, 8]; the first ends a text" in foreign.notes[0]
        foreign = read_foreign(write_hf(tmp_path / "y", conv1d(adder_tensors()), eos_token_id=50256))
        assert foreign.config.eos_token_id is None
        assert "eos_token_id 50256 lies outside the vocabulary of 10" in foreign.notes[0]


class TestRefusals:
    @pytest.mark.parametrize(
        ("given", "message"),
        [
            ({"model_type": "llama"}, "model_type must be gpt2, got 'llama'"),
            ({"model_type": None}, "model_type must be gpt2, got None"),
            ({"activation_function": "relu"}, "activation_function must be one of gelu_new, .*, got 'relu'"),
            ({"activation_function": ["gelu"]}, "activation_function must be one of"),
            ({"add_cross_attention": True}, "add_cross_attention must be false"),
            ({"n_inner": 100}, "n_inner 100, but the tensors have 192"),
            ({"n_head": 5}, "num_heads must divide d_model"),
            ({"n_head": "3"}, "num_heads must be an integer"),
            ({"n_head": None}, "config.json gives no n_head.*give num_heads"),
            ({"layer_norm_epsilon": "1e-5"}, "norm_epsilon must be a number"),
            ({"scale_attn_weights": "no"}, "scale_attention must be True or False"),
            ({"tie_word_embeddings": "no"}, "config.json must say true or false of tied embeddings"),
            ({"eos_token_id": -1}, "eos_token_id must be"),
        ],
        ids=str,
    )
    def test_what_this_model_cannot_be_is_one_clear_error(self, tmp_path, given, message):
        with pytest.raises(CheckpointError, match=message):
            config_of(tmp_path / "x", **given)

    def test_a_layer_of_another_width_is_named_with_both_shapes(self, tmp_path):
        tensors = adder_tensors()
        tensors["transformer.h.2.mlp.c_fc.weight"] = np.zeros((100, 48), np.float32)
        with pytest.raises(
            CheckpointError, match=r"h\.2\.mlp\.c_fc\.weight is \(48, 100\), .* needs \(48, 192\)"
        ):
            load_checkpoint(write_hf(tmp_path / "x", conv1d(tensors)))

    @pytest.mark.parametrize("text", ["{", "[]", "null"])
    def test_a_config_that_is_none_is_named(self, tmp_path, text):
        folder = write_hf(tmp_path / "x", conv1d(adder_tensors()))
        (folder / "config.json").write_text(text)
        with pytest.raises(CheckpointError, match=r"config\.json: (is not JSON|must hold a JSON object)"):
            read_foreign(folder)

    def test_weights_without_a_config_say_what_is_missing(self, tmp_path):
        folder = write_hf(tmp_path / "x", conv1d(adder_tensors()))
        (folder / "config.json").unlink()
        with pytest.raises(CheckpointError, match=r"config\.json: cannot be read \(No such file"):
            read_foreign(folder)


class TestFiles:
    @pytest.mark.parametrize("kind", ["safetensors", "bin"])
    def test_ten_shards_are_the_same_model_as_one_file(self, tmp_path, kind):
        tensors = conv1d(adder_tensors())
        keys = list(tensors)
        shards = [keys[i::10] for i in range(10)]
        whole = load_checkpoint(write_hf(tmp_path / "whole", tensors, kind=kind))
        cut = load_checkpoint(write_hf(tmp_path / "cut", tensors, shards=shards, kind=kind))
        assert cut.config == whole.config
        assert all(np.array_equal(cut.params[name], x) for name, x in whole.params.items())
        foreign = read_foreign(tmp_path / "cut")
        assert len(foreign.files) == 12  # with index and config

    def test_a_missing_shard_is_an_error_before_anything_is_written(self, tmp_path):
        tensors = conv1d(adder_tensors())
        folder = write_hf(tmp_path / "x", tensors, shards=[list(tensors)[::2], list(tensors)[1::2]])
        (folder / "model-00002-of-00002.safetensors").unlink()
        with pytest.raises(CheckpointError, match=r"missing file: model-00002-of-00002\.safetensors"):
            convert_checkpoint(folder, tmp_path / "out")
        assert [file.name for file in tmp_path.iterdir()] == ["x"]

    def test_of_several_files_safetensors_is_read_and_the_others_are_noted(self, tmp_path):
        tensors = conv1d(adder_tensors())
        folder = write_hf(tmp_path / "x", tensors)
        write_hf(folder, {key: x + 1 for key, x in tensors.items()}, kind="bin")
        foreign = read_foreign(folder)
        assert foreign.notes == ("pytorch_model.bin is left out; model.safetensors is read",)
        assert np.array_equal(foreign.tensors["wte.weight"], tensors["transformer.wte.weight"])
        assert np.array_equal(
            read_foreign(folder / "pytorch_model.bin").tensors["wpe.weight"],
            tensors["transformer.wpe.weight"] + 1,
        )

    @pytest.mark.parametrize("kind", ["safetensors", "bin"])
    def test_bfloat16_keeps_its_bits_and_still_adds(self, tmp_path, kind):
        tensors = {key: x.astype(ml_dtypes.bfloat16) for key, x in conv1d(adder_tensors()).items()}
        folder = write_hf(tmp_path / "x", tensors, kind=kind)
        config = convert_checkpoint(folder, tmp_path / "out")
        assert config.dtype == "bfloat16"
        params = {name: np.asarray(x) for name, x in load_params(tmp_path / "out", config).items()}
        stored = params["layers.1.mlp.down.kernel"]
        assert stored.dtype == ml_dtypes.bfloat16
        assert stored.tobytes() == tensors["transformer.h.1.mlp.c_proj.weight"].tobytes()
        a, b = np.random.default_rng(0).integers(0, 100, (2, 1000))
        assert share_of_sums(params, config, a, b) == 1

    def test_the_tokenizer_beside_the_weights_comes_along(self, tmp_path):
        shutil.copytree(DATA / "hf_tiny_gpt2", tmp_path / "x")
        convert_checkpoint(tmp_path / "x", tmp_path / "out")
        tokenizer = load_checkpoint(tmp_path / "out").tokenizer
        assert tokenizer is not None
        assert tokenizer.encode(" lower newer<|endoftext|>").ids == [14, 15, 10, 9, 3, 2, 15, 20]
        for name in ("vocab.json", "merges.txt", "tokenizer_config.json", "special_tokens_map.json"):
            (tmp_path / "x" / name).unlink()
        assert load_checkpoint(tmp_path / "x").tokenizer is None
