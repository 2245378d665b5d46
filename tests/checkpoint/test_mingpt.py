"""The adder: a trained minGPT whose sums and logits are known."""

import json
import re
import shutil
import zipfile
from pathlib import Path

import numpy as np
import pytest

from jorca.checkpoint.errors import CheckpointError
from jorca.checkpoint.mingpt import convert_mingpt
from jorca.checkpoint.pytorch import read_pytorch
from jorca.checkpoint.store import load_config, load_params
from jorca.config import ConfigError, ModelConfig
from tests.checkpoint import torch_files as tf

ADDER = Path(__file__).parents[2] / "checkpoints/adder"

# Recomputed from the published file by a separate NumPy program, for the last row of 8, 5, 5, 0.
LOGITS_TANH = [3.1923, -1.3719, -6.8311, -3.3251, 7.888, 13.8552, 7.3423, -4.2436, -8.6275, -2.0702]
LOGITS_ERF = [3.1921, -1.3699, -6.8308, -3.3271, 7.8858, 13.8554, 7.3449, -4.2412, -8.6277, -2.0722]


def gelu_tanh(x):
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def norm(x, scale, bias, epsilon):
    return (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + epsilon) * scale + bias


def forward(params, config, ids_bt):
    """Returns the last row's logits [B, V] in float64: a GPT written out over the parameter table."""
    p = {name: np.asarray(x, np.float64) for name, x in params.items()}
    t = ids_bt.shape[1]
    x = p["embed.tokens"][ids_bt] + p["embed.positions"][:t]
    for i in range(config.num_layers):
        at = f"layers.{i}."
        y = norm(x, p[at + "attention_norm.scale"], p[at + "attention_norm.bias"], config.norm_epsilon)
        qkv = np.einsum("btd,dcnh->cbnth", y, p[at + "attention.qkv.kernel"])
        q, k, v = qkv + p[at + "attention.qkv.bias"][:, None, :, None, :]
        scores = np.einsum("bnth,bnsh->bnts", q, k) / np.sqrt(config.head_dim)
        weights = np.exp(np.where(np.tri(t, dtype=bool), scores, -np.inf))
        weights /= weights.sum(-1, keepdims=True)
        heads = np.einsum("bnts,bnsh->btnh", weights, v)
        x = (
            x
            + np.einsum("btnh,nhd->btd", heads, p[at + "attention.out.kernel"])
            + p[at + "attention.out.bias"]
        )
        y = norm(x, p[at + "mlp_norm.scale"], p[at + "mlp_norm.bias"], config.norm_epsilon)
        y = gelu_tanh(y @ p[at + "mlp.up.kernel"] + p[at + "mlp.up.bias"])
        x = x + y @ p[at + "mlp.down.kernel"] + p[at + "mlp.down.bias"]
    x = norm(x[:, -1], p["final_norm.scale"], p["final_norm.bias"], config.norm_epsilon)
    return x @ p["head.kernel"].T


def share_of_sums(params, config, a, b):
    """Returns the share of pairs whose three greedy digits are the sum's, units first."""
    ids = np.stack([a // 10, a % 10, b // 10, b % 10], 1)
    for _ in range(3):
        ids = np.concatenate([ids, forward(params, config, ids).argmax(1)[:, None]], 1)
    return np.mean(ids[:, 4] + 10 * ids[:, 5] + 100 * ids[:, 6] == a + b)


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


def write_state(path, tensors):
    """Writes float tensors, in C order, as a state dict."""
    storages = {str(i): np.ascontiguousarray(x).tobytes() for i, x in enumerate(tensors.values())}
    kinds = {"float32": "FloatStorage", "float16": "HalfStorage", "bfloat16": "BFloat16Storage"}
    program = b"}("
    for i, (key, x) in enumerate(tensors.items()):
        strides = [int(np.prod(x.shape[axis + 1 :])) for axis in range(x.ndim)]
        program += tf.text(key) + tf.tensor(tf.storage(str(i), kinds[x.dtype.name], x.size), x.shape, strides)
    return tf.write(path, program + b"u", storages)


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
        config = convert_mingpt(ADDER / "source", tmp_path / "again")
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
            convert_mingpt(source / "model.pt", tmp_path / "out")
        assert convert_mingpt(source / "model.pt", tmp_path / "out", num_heads=3) == adder[0]

    @pytest.mark.parametrize("num_heads", [0, 5])
    def test_an_impossible_number_of_heads_is_refused(self, source, tmp_path, num_heads):
        with pytest.raises(ConfigError, match="num_heads"):
            convert_mingpt(source, tmp_path / "out", num_heads=num_heads)

    def test_spelled_out_sizes_do_for_a_model_type(self, source, tmp_path, adder):
        edit_config(source, model_type=None, n_layer=3, n_head=3, n_embd=48)
        assert convert_mingpt(source, tmp_path / "out") == adder[0]

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
            convert_mingpt(source, tmp_path / "out")
        assert not (tmp_path / "out").exists()

    def test_what_a_changed_model_needs_can_be_said(self, source, tmp_path):
        config = convert_mingpt(
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
        write_state(source / "model.pt", kept)
        config = convert_mingpt(source, tmp_path / "out")
        params = load_params(tmp_path / "out", config)
        assert all(np.array_equal(params[name], x) for name, x in adder[1].items())

    def test_missing_and_foreign_tensors_are_listed_together(self, source, tmp_path):
        tensors = dict(read_pytorch(source / "model.pt"))
        del tensors["transformer.h.1.attn.c_attn.bias"], tensors["lm_head.weight"]
        tensors["value_head.weight"] = np.zeros((1, 48), np.float32)
        write_state(source / "model.pt", tensors)
        with pytest.raises(CheckpointError) as caught:
            convert_mingpt(source, tmp_path / "out")
        assert str(source / "model.pt") in str(caught.value)
        assert sorted(str(caught.value).splitlines()[1:]) == [
            "  missing: lm_head.weight",
            "  missing: transformer.h.1.attn.c_attn.bias",
            "  not part of this model: value_head.weight",
        ]

    def test_mixed_dtypes_are_refused_until_one_is_named(self, source, tmp_path):
        tensors = dict(read_pytorch(source / "model.pt"))
        tensors["lm_head.weight"] = tensors["lm_head.weight"].astype(np.float16)
        write_state(source / "model.pt", tensors)
        with pytest.raises(CheckpointError, match="float16 and float32"):
            convert_mingpt(source, tmp_path / "out")
        assert convert_mingpt(source, tmp_path / "out", dtype="float32").dtype == "float32"

    def test_a_checkpoint_of_another_kind_is_refused(self, tmp_path):
        nanogpt = Path(__file__).parents[1] / "data/nanogpt_byhand/ckpt.pt"
        with pytest.raises(CheckpointError, match="not a minGPT state dict"):
            convert_mingpt(nanogpt, tmp_path / "out", num_heads=2)
