"""nanoGPT's nest, its vocabularies and its meta.pkl."""

import os
import pickle

import numpy as np
import pytest

from jorca.checkpoint import CheckpointError, load_checkpoint
from jorca.checkpoint.foreign import Overrides
from jorca.checkpoint.formats import read_foreign
from tests.checkpoint import torch_files as tf
from tests.checkpoint.foreign_files import DATA, NANOGPT_ARGS, adder_tensors, write_nanogpt


class Touch:
    """What an attacker pickles: reading it back makes a folder."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (os.mkdir, (str(self.path),))


def with_vocabulary(rows):
    tensors = adder_tensors()
    for key in ("transformer.wte.weight", "lm_head.weight"):
        tensors[key] = np.zeros((rows, 48), np.float32)
    return tensors


class TestVocabulary:
    @pytest.mark.parametrize("rows", [50257, 50304])
    def test_gpt2s_is_known_by_its_size_padded_or_not(self, tmp_path, rows):
        foreign = read_foreign(write_nanogpt(tmp_path / "x", with_vocabulary(rows), vocab_size=rows))
        config = foreign.config
        assert (config.vocab_size, config.padded_vocab_size, config.eos_token_id) == (50257, rows, 50256)
        assert "taken for GPT-2's 50257 tokens" in foreign.notes[0]

    def test_the_user_may_know_better(self, tmp_path):
        path = write_nanogpt(tmp_path / "x", with_vocabulary(50304), vocab_size=50304)
        config = read_foreign(path, overrides=Overrides(vocab_size=50300, eos_token_id=3)).config
        assert (config.vocab_size, config.padded_vocab_size, config.eos_token_id) == (50300, 50304, 3)

    def test_any_other_size_is_what_it_says(self, tmp_path):
        config = read_foreign(write_nanogpt(tmp_path / "x", adder_tensors())).config
        assert (config.vocab_size, config.padded_vocab_size, config.eos_token_id) == (10, 10, None)


class TestMeta:
    def write(self, folder, meta):
        write_nanogpt(folder, adder_tensors())
        (folder / "meta.pkl").write_bytes(pickle.dumps(meta))
        return folder

    def test_characters_make_a_tokenizer(self, tmp_path):
        itos = dict(enumerate("\n !ABCé猫x"))
        path = self.write(
            tmp_path / "x", {"vocab_size": 9, "itos": itos, "stoi": {c: i for i, c in itos.items()}}
        )
        loaded = load_checkpoint(path)
        assert (loaded.config.vocab_size, loaded.config.padded_vocab_size) == (9, 10)
        assert loaded.tokenizer is not None
        text = "A é猫\n!\n"
        assert loaded.tokenizer.encode(text).ids == ["\n !ABCé猫x".index(c) for c in text]
        assert loaded.tokenizer.decode(loaded.tokenizer.encode(text).ids) == text

    def test_words_give_their_number_alone(self, tmp_path):
        foreign = read_foreign(
            self.write(tmp_path / "x", {"itos": {0: "a", 1: "word"}, "stoi": {"a": 0, "word": 1}})
        )
        assert (foreign.config.vocab_size, foreign.tokenizer) == (2, None)
        assert "no characters" in foreign.notes[0]

    @pytest.mark.parametrize(
        "meta", [{"itos": {1: "a", 2: "b"}}, {"stoi": {"a": 0}}, {"itos": "ab"}, [1], 7], ids=str
    )
    def test_anything_else_is_refused(self, tmp_path, meta):
        with pytest.raises(CheckpointError, match=r"meta\.pkl: is not nanoGPT's"):
            read_foreign(self.write(tmp_path / "x", meta))

    @pytest.mark.parametrize("cut", [0, 1, 20, -1])
    def test_a_damaged_one_is_malformed(self, tmp_path, cut):
        path = self.write(tmp_path / "x", {"itos": dict(enumerate("abc"))})
        (path / "meta.pkl").write_bytes((path / "meta.pkl").read_bytes()[:cut])
        with pytest.raises(CheckpointError, match=r"meta\.pkl: its pickle is malformed"):
            read_foreign(path)


class TestHostile:
    @pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
    def test_code_in_meta_is_refused_and_not_run(self, tmp_path, protocol):
        path = write_nanogpt(tmp_path / "x", adder_tensors())
        meta = {"itos": {0: "a"}, "stoi": Touch(tmp_path / "touched")}
        (path / "meta.pkl").write_bytes(pickle.dumps(meta, protocol))
        pickle.loads((path / "meta.pkl").read_bytes())  # as nanoGPT itself would
        (tmp_path / "touched").rmdir()
        with pytest.raises(CheckpointError, match=r"meta\.pkl: its pickle asks for .*nothing was run"):
            read_foreign(path)
        assert not (tmp_path / "touched").exists()

    def test_code_in_the_checkpoint_is_refused_and_not_run(self, tmp_path):
        (tmp_path / "x").mkdir()
        program = pickle.dumps({"model": {}, "model_args": Touch(tmp_path / "touched")}, 2)[2:-1]
        tf.write(tmp_path / "x/ckpt.pt", program)
        with pytest.raises(
            CheckpointError, match=r"ckpt\.pt: its pickle asks for '.*mkdir'.*nothing was run"
        ):
            read_foreign(tmp_path / "x")
        assert not (tmp_path / "touched").exists()


class TestNest:
    @pytest.mark.parametrize(
        ("saved", "message"),
        [
            ([1], "is not nanoGPT's; it must hold a dict with model and model_args"),
            ({"model": {}}, "is not nanoGPT's"),
            ({"model": [1], "model_args": {}}, "holds no state dict"),
            ({"model": {}, "model_args": {1: 2}}, "holds no state dict"),
            ({"model": {}, "model_args": NANOGPT_ARGS}, r"has no matrix 'wte\.weight'.*It has nothing"),
            ({"model": {"wte.weight": 1.5}, "model_args": {}}, r"has no matrix 'wte\.weight'"),
        ],
        ids=str,
    )
    def test_a_file_without_its_parts_is_one_error(self, tmp_path, saved, message):
        tf.save(tmp_path / "ckpt.pt", saved)
        with pytest.raises(CheckpointError, match=message):
            read_foreign(tmp_path)

    def test_a_file_under_other_names_lists_what_it_has(self):
        with pytest.raises(
            CheckpointError, match=r"no n_head \(it has .*num_heads.*give num_heads, or rename"
        ):
            read_foreign(DATA / "nanogpt_byhand")

    def test_the_file_may_have_any_name(self, tmp_path):
        path = write_nanogpt(tmp_path / "x", adder_tensors()) / "ckpt.pt"
        moved = path.rename(tmp_path / "step-7.pth")
        assert read_foreign(moved).format == "nanogpt"

    def test_an_old_file_without_a_setting_for_biases_has_those_that_are_there(self, tmp_path):
        assert read_foreign(write_nanogpt(tmp_path / "x", adder_tensors(), bias=None)).config.use_bias
