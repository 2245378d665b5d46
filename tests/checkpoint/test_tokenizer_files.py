"""Tokenizer files: GPT-2's real ones against published ids and a BPE written out, and spoilt ones."""

import functools
import gzip
import itertools
import json
import re
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from jorca.checkpoint.errors import CheckpointError
from jorca.checkpoint.tokenizer_files import tokenizer_json
from jorca.frontend.text import Tokenizer

BPE = Path(__file__).parents[1] / "data/gpt2_bpe"
OPENAI = ("encoder.json", "vocab.bpe")
HUGGING_FACE = ("vocab.json", "merges.txt")
END_OF_TEXT = "<|endoftext|>"

# The vocabulary and the merges of transformers' own test of GPT-2's tokenizer.
TINY_TOKENS = "l o w e r s t i d n Ġ Ġl Ġn Ġlo Ġlow er Ġlowest Ġnewer Ġwider <unk> <|endoftext|>"
TINY_VOCAB = {token: i for i, token in enumerate(TINY_TOKENS.split())}
TINY_MERGES = "#version: 0.2\nĠ l\nĠl o\nĠlo w\ne r\n"


@functools.cache
def gpt2_texts():
    """The text of OpenAI's two files."""
    return tuple(gzip.decompress((BPE / f"{name}.gz").read_bytes()).decode("utf-8") for name in OPENAI)


def write_gpt2(folder, names=OPENAI, **more):
    for name, text in zip(names, gpt2_texts(), strict=True):
        (folder / name).write_text(text, encoding="utf-8")
    return write_more(folder, more)


def write_tiny(folder, vocab=TINY_VOCAB, merges=TINY_MERGES, **more):
    (folder / "vocab.json").write_text(json.dumps(vocab), encoding="utf-8")
    (folder / "merges.txt").write_text(merges, encoding="utf-8")
    return write_more(folder, more)


def write_more(folder, contents):
    for name, content in contents.items():
        (folder / f"{name}.json").write_text(json.dumps(content), encoding="utf-8")
    return folder


def load(folder):
    text = tokenizer_json(folder)
    assert text is not None
    return tokenizers.Tokenizer.from_str(text)


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory):
    return load(write_gpt2(tmp_path_factory.mktemp("gpt2")))


WORDS = re.compile(r"'(?:s|t|re|ve|m|ll|d)| ?[A-Za-z]+| ?[0-9]+| ?[^\sA-Za-z0-9]+|\s+(?!\S)|\s+")


@functools.cache
def ranks():
    lines = gpt2_texts()[1].splitlines()[1:]
    return {tuple(line.split()): rank for rank, line in enumerate(lines) if line}


@functools.cache
def ids():
    return json.loads(gpt2_texts()[0])


def written_out(text):
    """Returns the ids of ASCII text by the definition of byte-level BPE (Radford et al., 2019)."""
    result = []
    for word in WORDS.findall(text):
        # Printable bytes stand for themselves, and the first 33 for the characters from 256 on.
        pieces = [char if 0x21 <= ord(char) < 0x7F else chr(256 + min(ord(char), 33)) for char in word]
        while True:
            pairs = set(itertools.pairwise(pieces)) & ranks().keys()
            if not pairs:
                break
            left, right = min(pairs, key=ranks().__getitem__)
            merged, i = [], 0
            while i < len(pieces):
                take = 1 + (tuple(pieces[i : i + 2]) == (left, right))
                merged.append("".join(pieces[i : i + take]))
                i += take
            pieces = merged
        result += [ids()[piece] for piece in pieces]
    return result


class TestGpt2:
    @pytest.mark.parametrize(
        ("text", "expected"),
        [
            ("Hello world", [15496, 995]),
            ("Hello, my dog is cute", [15496, 11, 616, 3290, 318, 13779]),
            ("DEF", [32988]),
            ("GH", [17511]),
            ("IJ", [23852]),
            ("😀", [47249, 222]),
            ("ď", [128, 237]),
            (END_OF_TEXT, [50256]),
            (f"Hello{END_OF_TEXT} world", [15496, 50256, 995]),
            ("", []),
        ],
    )
    def test_it_has_the_published_ids(self, gpt2, text, expected):
        assert gpt2.encode(text).ids == expected
        assert gpt2.decode(expected, skip_special_tokens=False) == text

    def test_it_has_50257_ids(self, gpt2):
        assert gpt2.get_vocab_size() == 50257
        assert sorted(gpt2.get_vocab().values()) == list(range(50257))

    @given(
        st.text(
            st.characters(max_codepoint=126, exclude_categories=["Cc"]) | st.sampled_from("\n\t '"),
            max_size=30,
        )
    )
    @settings(max_examples=300, deadline=None)
    def test_it_agrees_with_bpe_written_out(self, gpt2, text):
        assert gpt2.encode(text).ids == written_out(text)

    @given(st.text(max_size=40))
    @settings(max_examples=200, deadline=None)
    def test_any_text_survives_a_round_trip(self, gpt2, text):
        assert gpt2.decode(gpt2.encode(text).ids, skip_special_tokens=False) == text

    def test_both_pairs_of_names_give_the_same_tokenizer(self, gpt2, tmp_path):
        assert load(write_gpt2(tmp_path, HUGGING_FACE)).to_str() == gpt2.to_str()

    def test_a_prefix_space_is_added_only_where_the_files_say_so(self, gpt2, tmp_path):
        prefixed = load(write_gpt2(tmp_path, HUGGING_FACE, tokenizer_config={"add_prefix_space": True}))
        assert gpt2.encode("Hello").ids == [15496]
        assert prefixed.encode("Hello").ids == gpt2.encode(" Hello").ids == [18435]

    def test_what_comes_out_is_what_the_engine_reads(self, gpt2, tmp_path):
        text = tokenizer_json(write_gpt2(tmp_path))
        assert text is not None
        (tmp_path / "tokenizer.json").write_text(text, encoding="utf-8")
        tokenizer = Tokenizer.from_checkpoint(tmp_path)
        assert tokenizer is not None
        assert tokenizer.encode("Hello world") == (15496, 995)
        assert tokenizer.token_bytes(47249) == b"\xf0\x9f\x98"  # so that a stream can follow it byte by byte


class TestSpecialTokens:
    def test_a_published_folder_gives_its_ids(self):
        tokenizer = load(BPE.with_name("hf_tiny_gpt2"))
        assert tokenizer.encode(" lower newer<unk><|endoftext|>").ids == [14, 15, 10, 9, 3, 2, 15, 19, 20]

    def test_the_files_of_transformers_own_test_give_its_ids(self, tmp_path):
        tokenizer = load(write_tiny(tmp_path, tokenizer_config={"add_prefix_space": True}))
        assert tokenizer.encode("lower newer").ids == [14, 15, 10, 9, 3, 2, 15]

    @pytest.mark.parametrize(
        "files",
        [
            {},
            {"special_tokens_map": {"eos_token": END_OF_TEXT, "unk_token": "<unk>"}},
            {"special_tokens_map": {"eos_token": {"content": END_OF_TEXT, "normalized": True}}},
            {"tokenizer_config": {"bos_token": {"__type": "AddedToken", "content": END_OF_TEXT}}},
            {"tokenizer_config": {"added_tokens_decoder": {"20": {"content": END_OF_TEXT, "special": True}}}},
            {"added_tokens": {END_OF_TEXT: 20}},
        ],
    )
    def test_end_of_text_is_never_split_wherever_it_is_named(self, tmp_path, files):
        tokenizer = load(write_tiny(tmp_path, **files))
        assert tokenizer.encode(f"low{END_OF_TEXT}er").ids == [0, 1, 2, 20, 15]

    def test_new_tokens_get_the_ids_that_the_files_give_them(self, tmp_path):
        added = {"<b>": 22, "<a>": 21}
        tokenizer = load(write_tiny(tmp_path, added_tokens=added, special_tokens_map={"pad_token": "<pad>"}))
        assert tokenizer.encode("<a>er<b><pad>").ids == [21, 15, 22, 23]
        assert tokenizer.decode([21, 15, 22, 23]) == "<a>er<b>"  # of the three only <pad> is special

    def test_additional_special_tokens_and_their_flags_count(self, tmp_path):
        extra = {"content": "<sep>", "lstrip": True}
        tokenizer = load(
            write_tiny(tmp_path, special_tokens_map={"additional_special_tokens": ["<x>", extra]})
        )
        assert tokenizer.encode("er <sep><x>").ids == [15, 22, 21]  # the space belongs to <sep>

    def test_an_id_at_odds_with_the_vocabulary_is_an_error_with_both_numbers(self, tmp_path):
        with pytest.raises(CheckpointError, match="'<a>' should have id 30, but the vocabulary makes it 21"):
            tokenizer_json(write_tiny(tmp_path, added_tokens={"<a>": 30}))

    def test_a_beginning_of_text_is_added_only_where_the_files_say_so(self, tmp_path):
        assert load(write_tiny(tmp_path)).encode("er").ids == [15]
        begins = {"add_bos_token": True, "bos_token": END_OF_TEXT}
        assert load(write_tiny(tmp_path, tokenizer_config=begins)).encode("er").ids == [20, 15]

    @pytest.mark.parametrize(
        "files",
        [
            {"special_tokens_map": {"eos_token": 7}},
            {"special_tokens_map": {"eos_token": {"text": "<e>"}}},
            {"tokenizer_config": {"added_tokens_decoder": {"x": {"content": "<e>"}}}},
            {"tokenizer_config": {"added_tokens_decoder": [END_OF_TEXT]}},
            {"added_tokens": {"<e>": "x"}},
        ],
    )
    def test_malformed_special_tokens_are_refused(self, tmp_path, files):
        with pytest.raises(CheckpointError, match=r"special tokens beside vocab\.json are malformed"):
            tokenizer_json(write_tiny(tmp_path, **files))


class TestFolders:
    def test_a_folder_without_a_tokenizer_has_none(self, tmp_path):
        (tmp_path / "config.json").write_text("{}")
        assert tokenizer_json(tmp_path) is None

    def test_a_tokenizer_json_counts_first_and_is_kept_as_it_is(self, tmp_path):
        text = "\n" + tokenizers.Tokenizer(tokenizers.models.BPE({"é": 0}, [])).to_str(pretty=True)
        (tmp_path / "tokenizer.json").write_text(text, encoding="utf-8")
        (tmp_path / "vocab.json").write_text("no JSON")
        assert tokenizer_json(tmp_path) == text
        assert tokenizer_json(tmp_path / "tokenizer.json") == text

    @pytest.mark.parametrize("content", [b"{}", b"[", b"\xff\xfe", b'{"model": {"type": "Magic"}}'])
    def test_a_file_that_is_no_tokenizer_is_refused_by_name(self, tmp_path, content):
        (tmp_path / "tokenizer.json").write_bytes(content)
        for path in (tmp_path, tmp_path / "tokenizer.json"):
            with pytest.raises(
                CheckpointError, match=r"tokenizer\.json: cannot be read as a tokenizer\.json"
            ):
                tokenizer_json(path)

    def test_a_path_that_is_not_there_is_refused_by_name(self, tmp_path):
        with pytest.raises(CheckpointError, match=r"nowhere: cannot be read"):
            tokenizer_json(tmp_path / "nowhere")

    @pytest.mark.parametrize("names", [OPENAI, HUGGING_FACE])
    @pytest.mark.parametrize("kept", [0, 1])
    def test_half_a_pair_is_an_error_that_names_the_other_half(self, tmp_path, names, kept):
        write_gpt2(tmp_path, names)
        (tmp_path / names[1 - kept]).unlink()
        with pytest.raises(CheckpointError, match=f"has {names[kept]} but no {names[1 - kept]}"):
            tokenizer_json(tmp_path)

    @pytest.mark.parametrize(
        ("vocab", "message"),
        [
            ([1, 2], "must hold a JSON object, got list"),
            ({}, "must map tokens to ids"),
            ({"a": "0"}, "must map tokens to ids"),
            ({"a": -1}, "must map tokens to ids"),
            ({"a": True}, "must map tokens to ids"),
            ({"a": 0, "b": 0}, "gives 2 tokens only 1 different ids"),
        ],
    )
    def test_a_vocabulary_that_is_none_is_refused(self, tmp_path, vocab, message):
        with pytest.raises(CheckpointError, match=rf"vocab\.json: {message}"):
            tokenizer_json(write_tiny(tmp_path, vocab))

    @pytest.mark.parametrize(
        "merges", ["#version: 0.2\na\n", "#version: 0.2\na b c\n", "#version: 0.2\nl z\n"]
    )
    def test_merges_that_are_none_are_refused(self, tmp_path, merges):
        with pytest.raises(CheckpointError, match=r"vocab\.json and merges\.txt: cannot be read"):
            tokenizer_json(write_tiny(tmp_path, merges=merges))

    @pytest.mark.parametrize("name", ["vocab", "tokenizer_config", "special_tokens_map", "added_tokens"])
    def test_a_file_that_is_no_json_is_refused_by_name(self, tmp_path, name):
        write_tiny(tmp_path)
        (tmp_path / f"{name}.json").write_text("{")
        with pytest.raises(CheckpointError, match=rf"{name}\.json: is not JSON"):
            tokenizer_json(tmp_path)

    @pytest.mark.parametrize("kind", ["OpenAIGPTTokenizer", "CLIPTokenizer", 7])
    def test_files_of_another_kind_of_bpe_are_refused(self, tmp_path, kind):
        write_tiny(tmp_path, tokenizer_config={"tokenizer_class": kind})
        with pytest.raises(CheckpointError, match=f"tokenizer_class {kind!r}; put a tokenizer.json there"):
            tokenizer_json(tmp_path)
