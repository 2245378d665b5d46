"""The adder: a trained minGPT whose sums and logits are known."""

import json
import re
import shutil
import zipfile

import numpy as np
import pytest

from jorca.checkpoint import CheckpointError, convert_checkpoint
from jorca.checkpoint.pytorch import read_pytorch
from jorca.checkpoint.store import load_config, load_params
from jorca.config import ModelConfig
from tests.checkpoint import torch_files as tf
from tests.checkpoint.adder import LOGITS_ERF, LOGITS_TANH, forward, share_of_sums
from tests.checkpoint.foreign_files import ADDER, DATA


@pytest.fixture(scope="module")
def adder():
    config = load_config(ADDER)
    return config, {name: np.asarray(x) for name, x in load_params(ADDER, config).items()}


@pytest.fixture
def source(tmp_path):
    """A copy of the adder's source to spoil."""
    for name in ("model.pt", "config.json"):
        (tmp_path / "source").mkdir(exist_ok=True)
        shutil.copyfile(ADDER / "source" / name, tmp_path / "source" / name)
    return tmp_path / "source"


def edit_config(source, **fields):
    data = json.loads((source / "config.json").read_text())
    data["model"].update(fields)
    (source / "config.json").write_text(json.dumps(data))


class TestShippedAdder:
    def test_its_config_is_gpt_nano(self, adder):
        assert adder[0] == ModelConfig(
            vocab_size=10,
            max_positions=6,
            num_layers=3,
            num_heads=3,
            d_model=48,
            d_ff=192,
            activation="gelu_tanh",
            tie_embeddings=False,
            norm_epsilon=1e-5,
        )

    def test_its_logits_are_the_known_ones(self, adder):
        config, params = adder
        logits = forward(params, config, np.array([[8, 5, 5, 0]]))[0]
        assert np.max(np.abs(logits - LOGITS_TANH)) < 1e-3
        assert np.max(np.abs(logits - LOGITS_ERF)) > 1e-3  # the check can tell the activations apart

    def test_it_adds(self, adder):
        config, params = adder
        a, b = np.random.default_rng(0).integers(0, 100, (2, 500))
        assert share_of_sums(params, config, a, b) == 1

    @pytest.mark.slow
    def test_it_adds_all_pairs(self, adder):
        config, params = adder
        a, b = np.divmod(np.arange(10_000), 100)
        assert share_of_sums(params, config, a, b) == 1

    @pytest.mark.parametrize(
        ("mutate", "change"),
        [
            # How far each mistake moves a logit, known from the same program.
            ("c_proj untransposed", 23.1),
            ("queries and keys swapped", 25.3),
            ("qkv read head by head", 26.5),
            ("layers 0 and 1 swapped", 23.8),
            ("tied head", 13.8),
        ],
    )
    def test_the_logit_check_sees_every_wrong_layout(self, adder, mutate, change):
        config, params = adder
        wrong = dict(params)
        for i in range(3):
            out, qkv = f"layers.{i}.attention.out.kernel", f"layers.{i}.attention.qkv."
            if mutate == "c_proj untransposed":
                wrong[out] = params[out].reshape(48, 48).T.reshape(3, 16, 48)
            elif mutate == "queries and keys swapped":
                wrong[qkv + "kernel"] = params[qkv + "kernel"][:, [1, 0, 2]]
                wrong[qkv + "bias"] = params[qkv + "bias"][[1, 0, 2]]
            elif mutate == "qkv read head by head":
                kernel = params[qkv + "kernel"].reshape(48, 3, 3, 16)
                wrong[qkv + "kernel"] = kernel.swapaxes(1, 2)
                wrong[qkv + "bias"] = params[qkv + "bias"].swapaxes(0, 1)
            elif mutate == "layers 0 and 1 swapped":
                other = {0: 1, 1: 0, 2: 2}[i]
                at = f"layers.{i}."
                wrong |= {n: params[n.replace(at, f"layers.{other}.")] for n in params if n.startswith(at)}
        if mutate == "tied head":
            wrong["head.kernel"] = params["embed.tokens"]
        ids = np.array([[8, 5, 5, 0]])
        moved = np.max(np.abs(forward(wrong, config, ids) - forward(params, config, ids)))
        assert moved > 1
        assert moved <= change + 0.05  # the known figure is the largest over all prompts

    def test_its_arrays_are_the_bits_of_the_source(self, adder):
        """Reads the archive by hand: storage i belongs to the i-th tensor, whose order is minGPT's."""
        _, params = adder
        modules = ["ln_1", "mask", "attn.c_attn", "attn.c_proj", "ln_2", "mlp.c_fc", "mlp.c_proj"]
        names = {
            "ln_1": ("attention_norm.scale", "attention_norm.bias"),
            "ln_2": ("mlp_norm.scale", "mlp_norm.bias"),
            "attn.c_attn": ("attention.qkv.kernel", "attention.qkv.bias"),
            "attn.c_proj": ("attention.out.kernel", "attention.out.bias"),
            "mlp.c_fc": ("mlp.up.kernel", "mlp.up.bias"),
            "mlp.c_proj": ("mlp.down.kernel", "mlp.down.bias"),
            "mask": (None,),
        }
        order = ["embed.tokens", "embed.positions"]
        for i in range(3):
            order += [name and f"layers.{i}.{name}" for module in modules for name in names[module]]
        order += ["final_norm.scale", "final_norm.bias", "head.kernel"]
        assert len(order) == 44
        with zipfile.ZipFile(ADDER / "source/model.pt") as archive:
            for i, name in enumerate(order):
                if name is None:
                    continue
                source = np.frombuffer(archive.read(f"model/data/{i}"), "<f4")
                x = params[name]
                if name.endswith("kernel") and name != "head.kernel":
                    num_in = 192 if "down" in name else 48
                    x = x.reshape(num_in, -1).T
                assert np.array_equal(x.ravel(), source), name

    def test_converting_the_shipped_source_gives_the_shipped_model(self, adder, tmp_path):
        config = convert_checkpoint(ADDER / "source", tmp_path / "again")
        assert config == adder[0] == load_config(tmp_path / "again")
        params = load_params(tmp_path / "again", config)
        assert all(np.array_equal(params[name], x) for name, x in adder[1].items())

    def test_it_holds_no_absolute_path(self):
        absolute = re.compile(rb"(?<![\w.])/[a-z]{3,}/\w")
        assert absolute.search(b"successful to /home/someone/model")
        files = [file for file in ADDER.rglob("*") if file.is_file()]
        assert 10 < len(files) < 20
        assert [file for file in files if absolute.search(file.read_bytes())] == []


class TestConvert:
    def test_a_file_without_its_config_needs_the_number_of_heads(self, source, tmp_path, adder):
        (source / "config.json").unlink()
        with pytest.raises(CheckpointError, match="give num_heads"):
            convert_checkpoint(source / "model.pt", tmp_path / "out")
        assert convert_checkpoint(source / "model.pt", tmp_path / "out", num_heads=3) == adder[0]

    @pytest.mark.parametrize("num_heads", [0, 5])
    def test_an_impossible_number_of_heads_is_refused(self, source, tmp_path, num_heads):
        with pytest.raises(CheckpointError, match="num_heads must"):
            convert_checkpoint(source, tmp_path / "out", num_heads=num_heads)

    def test_spelled_out_sizes_do_for_a_model_type(self, source, tmp_path, adder):
        edit_config(source, model_type=None, n_layer=3, n_head=3, n_embd=48)
        assert convert_checkpoint(source, tmp_path / "out") == adder[0]

    @pytest.mark.parametrize(
        ("fields", "message"),
        [
            ({"model_type": "gpt-micro"}, "n_layer 4, but the tensors have 3"),
            ({"vocab_size": 11}, "vocab_size 11, but the tensors have 10"),
            ({"block_size": 7}, "block_size 7, but the tensors have 6"),
            ({"n_head": 6}, "model_type 'gpt-nano' has n_head 3, but n_head is 6"),
            ({"model_type": "gpt-pico"}, "model_type must be one of openai-gpt, .*gpt-nano, got 'gpt-pico'"),
        ],
    )
    def test_a_config_of_another_model_is_refused_with_both_numbers(self, source, tmp_path, fields, message):
        edit_config(source, **fields)
        with pytest.raises(CheckpointError, match=message):
            convert_checkpoint(source, tmp_path / "out")
        assert not (tmp_path / "out").exists()

    def test_what_a_changed_model_needs_can_be_said(self, source, tmp_path):
        config = convert_checkpoint(
            source,
            tmp_path / "out",
            activation="gelu_erf",
            norm_epsilon=1e-3,
            eos_token_id=9,
            dtype="bfloat16",
        )
        assert (config.activation, config.norm_epsilon, config.eos_token_id) == ("gelu_erf", 1e-3, 9)
        assert load_config(tmp_path / "out") == config
        stored = load_params(tmp_path / "out", config)["embed.tokens"]
        original = read_pytorch(source / "model.pt")["transformer.wte.weight"]
        assert stored.dtype == "bfloat16"
        assert np.array_equal(np.asarray(stored), original.astype(stored.dtype))

    @pytest.mark.parametrize("prefix", ["", "module.", "_orig_mod.module."])
    @pytest.mark.parametrize("masks", [False, True])
    def test_wrappers_and_mask_buffers_come_and_go(self, source, tmp_path, adder, prefix, masks):
        tensors = read_pytorch(source / "model.pt")
        kept = {prefix + k: x for k, x in tensors.items() if masks or not k.endswith(".attn.bias")}
        assert len(kept) == (44 if masks else 41)
        tf.save(source / "model.pt", kept)
        config = convert_checkpoint(source, tmp_path / "out")
        params = load_params(tmp_path / "out", config)
        assert all(np.array_equal(params[name], x) for name, x in adder[1].items())

    def test_missing_and_foreign_tensors_are_listed_together(self, source, tmp_path):
        tensors = dict(read_pytorch(source / "model.pt"))
        del tensors["transformer.h.1.attn.c_attn.bias"], tensors["lm_head.weight"]
        tensors["value_head.weight"] = np.zeros((1, 48), np.float32)
        tf.save(source / "model.pt", tensors)
        with pytest.raises(CheckpointError) as caught:
            convert_checkpoint(source, tmp_path / "out")
        assert str(source / "model.pt") in str(caught.value)
        assert sorted(str(caught.value).splitlines()[1:]) == [
            "  missing: h.1.attn.c_attn.bias",
            "  missing: lm_head.weight",
            "  not part of this model: value_head.weight",
        ]

    def test_mixed_dtypes_are_refused_until_one_is_named(self, source, tmp_path):
        tensors = dict(read_pytorch(source / "model.pt"))
        tensors["lm_head.weight"] = tensors["lm_head.weight"].astype(np.float16)
        tf.save(source / "model.pt", tensors)
        with pytest.raises(CheckpointError, match="float16 and float32"):
            convert_checkpoint(source, tmp_path / "out")
        assert convert_checkpoint(source, tmp_path / "out", dtype="float32").dtype == "float32"

    def test_a_checkpoint_of_another_kind_is_refused(self, tmp_path):
        with pytest.raises(CheckpointError, match=r"has no matrix 'wte\.weight'.*It has model, optimizer"):
            convert_checkpoint(
                DATA / "nanogpt_byhand/ckpt.pt", tmp_path / "out", format="mingpt", num_heads=2
            )
