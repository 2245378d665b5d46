"""The way back: what transformers is given, bit for bit, and that it comes back as the same model."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
from click.testing import CliRunner

from jorca.checkpoint import export
from jorca.checkpoint.errors import CheckpointError
from jorca.checkpoint.export import export_hf
from jorca.checkpoint.load import convert_checkpoint
from jorca.checkpoint.store import load_config, load_params, save_checkpoint
from jorca.cli import main
from jorca.config import ModelConfig
from jorca.model.params import param_table
from tests.oracle.golden import golden_cases
from tests.oracle.numpy_gpt import forward, random_params

ADDER = Path(__file__).parents[2] / "checkpoints/adder"
CONFIG = ModelConfig(
    vocab_size=11, max_positions=6, num_layers=2, num_heads=3, d_model=6, d_ff=10, eos_token_id=7
)


def params_of(config):
    return {name: x.astype(config.dtype) for name, x in random_params(config, seed=5).items()}


def there_and_back(folder, config, params):
    """Returns the notes of the export, and the config and parameters that come back."""
    save_checkpoint(folder / "model", config, params)
    notes = export_hf(folder / "model", folder / "hf")
    convert_checkpoint(folder / "hf", folder / "back")
    back = load_config(folder / "back")
    return notes, back, {name: np.asarray(x) for name, x in load_params(folder / "back", back).items()}


def bits(params):
    return {name: (x.dtype, x.shape, x.tobytes()) for name, x in params.items()}


class TestRoundTrip:
    @pytest.mark.parametrize("tied", [True, False])
    @pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
    def test_it_is_bit_identical(self, tmp_path, dtype, tied):
        config = dataclasses.replace(CONFIG, dtype=dtype, tie_embeddings=tied)
        params = params_of(config)
        notes, back, got = there_and_back(tmp_path, config, params)
        assert (notes, back, bits(got)) == ((), config, bits(params))

    @pytest.mark.parametrize("case", golden_cases(), ids=str)
    def test_every_flag_survives(self, tmp_path, case):
        notes, back, got = there_and_back(tmp_path, case.config, case.params)
        assert (notes, back, bits(got)) == ((), case.config, bits(case.params))

    @pytest.mark.parametrize("tied", [True, False])
    def test_rows_of_padding_are_left_out_and_told(self, tmp_path, tied):
        config = dataclasses.replace(CONFIG, padded_vocab_size=16, tie_embeddings=tied)
        params = params_of(config)
        notes, back, got = there_and_back(tmp_path, config, params)
        assert notes == ("rows of padding left out behind the 11 tokens: 5",)
        assert back == dataclasses.replace(config, padded_vocab_size=11)
        tables = ("embed.tokens", "head.kernel")
        assert bits(got) == bits({name: x[:11] if name in tables else x for name, x in params.items()})

    def test_biases_that_a_model_has_not_become_zeros_which_change_nothing(self, tmp_path):
        config = dataclasses.replace(CONFIG, use_bias=False)
        params = params_of(config)
        notes, back, got = there_and_back(tmp_path, config, params)
        assert notes == ("GPT-2 has biases there: zeros stand for those that this model has not",)
        assert back == dataclasses.replace(config, use_bias=True)
        assert bits({name: got[name] for name in params}) == bits(params)
        assert not any(got[name].any() for name in got.keys() - params.keys())
        ids = [1, 10, 4, 4, 0]
        assert np.array_equal(forward(back, got, ids), forward(config, params, ids))

    def test_the_tokenizer_comes_back_as_it_was(self, tmp_path):
        export_hf(ADDER, tmp_path / "hf")
        convert_checkpoint(tmp_path / "hf", tmp_path / "back")
        assert (tmp_path / "back/tokenizer.json").read_bytes() == (ADDER / "tokenizer.json").read_bytes()


class TestFiles:
    def test_tensors_have_transformers_names_and_layouts(self, tmp_path):
        config = dataclasses.replace(CONFIG, tie_embeddings=False)
        params = params_of(config)
        save_checkpoint(tmp_path / "model", config, params)
        export_hf(tmp_path / "model", tmp_path / "hf")
        tensors = safetensors.numpy.load_file(tmp_path / "hf/model.safetensors")
        d, n, h, f = 6, 3, 2, 10
        shapes: dict[str, tuple[int, ...]] = {
            "transformer.wte.weight": (11, d),
            "transformer.wpe.weight": (6, d),
            "lm_head.weight": (11, d),
        }
        shapes |= {"transformer.ln_f.weight": (d,), "transformer.ln_f.bias": (d,)}
        for i in range(2):
            for module, num_in, num_out in (
                ("attn.c_attn", d, 3 * d),
                ("attn.c_proj", d, d),
                ("mlp.c_fc", d, f),
                ("mlp.c_proj", f, d),
            ):
                shapes[f"transformer.h.{i}.{module}.weight"] = (num_in, num_out)
                shapes[f"transformer.h.{i}.{module}.bias"] = (num_out,)
            for module in ("ln_1", "ln_2"):
                shapes[f"transformer.h.{i}.{module}.weight"] = (d,)
                shapes[f"transformer.h.{i}.{module}.bias"] = (d,)
        assert {name: x.shape for name, x in tensors.items()} == shapes
        for kind in range(3):  # queries, keys and values stand one behind the other, and in each the heads
            for head in range(n):
                columns = slice(kind * d + head * h, kind * d + (head + 1) * h)
                got = tensors["transformer.h.1.attn.c_attn.weight"][:, columns]
                assert np.array_equal(got, params["layers.1.attention.qkv.kernel"][:, kind, head])
                got = tensors["transformer.h.1.attn.c_attn.bias"][columns]
                assert np.array_equal(got, params["layers.1.attention.qkv.bias"][kind, head])
        for head in range(n):  # the square one, whose shape would not tell
            got = tensors["transformer.h.0.attn.c_proj.weight"][head * h : (head + 1) * h]
            assert np.array_equal(got, params["layers.0.attention.out.kernel"][head])
        assert np.array_equal(tensors["transformer.h.0.mlp.c_fc.weight"], params["layers.0.mlp.up.kernel"])
        assert np.array_equal(tensors["lm_head.weight"], params["head.kernel"])

    def test_a_tied_head_is_stored_once_and_the_format_is_noted(self, tmp_path):
        save_checkpoint(tmp_path / "model", CONFIG, params_of(CONFIG))
        export_hf(tmp_path / "model", tmp_path / "hf")
        with safetensors.safe_open(tmp_path / "hf/model.safetensors", framework="numpy") as file:
            assert "lm_head.weight" not in file.keys()  # noqa: SIM118  (it is no mapping)
            assert file.metadata() == {"format": "pt"}  # without it, older transformers refuse the file

    def test_the_config_says_everything_in_gpt2s_words(self, tmp_path):
        config = dataclasses.replace(
            CONFIG,
            activation="gelu_erf",
            norm_epsilon=1e-3,
            scale_attention=False,
            scale_attention_by_inverse_layer=True,
            tie_embeddings=False,
            dtype="bfloat16",
        )
        save_checkpoint(tmp_path / "model", config, params_of(config))
        export_hf(tmp_path / "model", tmp_path / "hf")
        assert json.loads((tmp_path / "hf/config.json").read_text()) == {
            "architectures": ["GPT2LMHeadModel"],
            "model_type": "gpt2",
            "vocab_size": 11,
            "n_positions": 6,
            "n_layer": 2,
            "n_head": 3,
            "n_embd": 6,
            "n_inner": 10,
            "activation_function": "gelu",
            "layer_norm_epsilon": 1e-3,
            "scale_attn_weights": False,
            "scale_attn_by_inverse_layer_idx": True,
            "tie_word_embeddings": False,
            "bos_token_id": 7,
            "eos_token_id": 7,
            "dtype": "bfloat16",
            "torch_dtype": "bfloat16",
        }

    def test_a_tokenizer_gets_what_auto_tokenizer_needs(self, tmp_path):
        tokenizer = (ADDER / "tokenizer.json").read_text(encoding="utf-8")
        save_checkpoint(tmp_path / "model", CONFIG, params_of(CONFIG), tokenizer=tokenizer)
        export_hf(tmp_path / "model", tmp_path / "hf")
        assert (tmp_path / "hf/tokenizer.json").read_text(encoding="utf-8") == tokenizer
        assert json.loads((tmp_path / "hf/tokenizer_config.json").read_text()) == {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": 6,
            "clean_up_tokenization_spaces": False,
            "bos_token": "7",
            "eos_token": "7",
        }

    def test_no_tokenizer_gives_no_tokenizer_files(self, tmp_path):
        save_checkpoint(tmp_path / "model", CONFIG, params_of(CONFIG))
        export_hf(tmp_path / "model", tmp_path / "hf")
        files = sorted((tmp_path / "hf").iterdir())
        assert [file.name for file in files] == ["config.json", "model.safetensors"]
        assert files[0].stat().st_mode == files[1].stat().st_mode  # whoever may read one may read the other

    def test_weights_are_written_from_the_memory_that_they_were_read_into(self, tmp_path, monkeypatch):
        seen = {}

        def load(path, config, **options):
            seen["params"] = load_params(path, config, **options)
            return seen["params"]

        monkeypatch.setattr(export, "load_params", load)

        def save(tensors, file, metadata):
            seen["tensors"] = tensors
            safetensors.numpy.save_file(tensors, file, metadata)

        monkeypatch.setattr(export, "save_file", save)
        config = dataclasses.replace(CONFIG, padded_vocab_size=16, tie_embeddings=False)
        save_checkpoint(tmp_path / "model", config, params_of(config))
        export_hf(tmp_path / "model", tmp_path / "hf")
        params = [np.asarray(x) for x in seen["params"].values()]
        assert len(params) == len(seen["tensors"]) == len(param_table(config))
        for name, tensor in seen["tensors"].items():
            assert any(np.shares_memory(tensor, x) for x in params), name


class TestWholly:
    def test_something_in_the_way_stays_as_it_is(self, tmp_path):
        (tmp_path / "hf").mkdir()
        (tmp_path / "hf/mine").write_text("x")
        with pytest.raises(CheckpointError, match="hf: exists already; choose another path"):
            export_hf(ADDER, tmp_path / "hf")
        assert [file.name for file in (tmp_path / "hf").iterdir()] == ["mine"]

    def test_a_parent_that_is_not_there_is_refused(self, tmp_path):
        with pytest.raises(CheckpointError, match="is not a folder; make it first"):
            export_hf(ADDER, tmp_path / "no/hf")

    def test_a_source_that_is_no_checkpoint_is_refused_and_leaves_nothing(self, tmp_path):
        (tmp_path / "src").mkdir()
        with pytest.raises(CheckpointError, match="is not a jorca checkpoint"):
            export_hf(tmp_path / "src", tmp_path / "hf")
        assert [file.name for file in tmp_path.iterdir()] == ["src"]

    @pytest.mark.parametrize("step", ["save_file", "_write_json"])
    def test_an_interrupted_export_leaves_nothing(self, tmp_path, monkeypatch, step):
        def interrupt(*_, **__):
            raise KeyboardInterrupt

        monkeypatch.setattr(export, step, interrupt)
        with pytest.raises(KeyboardInterrupt):
            export_hf(ADDER, tmp_path / "hf")
        assert list(tmp_path.iterdir()) == []


class TestCommand:
    def test_it_names_the_files_and_what_is_different(self, tmp_path):
        config = dataclasses.replace(CONFIG, padded_vocab_size=12)
        save_checkpoint(tmp_path / "model", config, params_of(config))
        result = CliRunner().invoke(main, ["export", "hf", str(tmp_path / "model"), str(tmp_path / "hf")])
        assert result.exit_code == 0
        assert result.stdout.splitlines() == [
            f"{tmp_path / 'hf'}: config.json, model.safetensors",
            "rows of padding left out behind the 11 tokens: 1",
        ]

    def test_an_error_is_one_line(self, tmp_path):
        result = CliRunner().invoke(main, ["export", "hf", str(ADDER), str(tmp_path)])
        assert result.exit_code == 1
        assert result.stderr == f"Error: {tmp_path}: exists already; choose another path\n"
