"""Text: nothing dropped, no half characters, stop strings wherever the tokens are cut."""

import concurrent.futures
import dataclasses
import functools
import gzip
import json
from pathlib import Path

import pytest
import tokenizers
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers, pre_tokenizers

from jorca.config import EngineConfig
from jorca.frontend.text import StopMatcher, TextStream, Tokenizer
from jorca.request import JorcaError, Request, RequestRejected, SamplingParams
from jorca.testing import TINY, FakeExecutor, fake_engine

ROOT = Path(__file__).parents[2]
BPE = ROOT / "tests/data/gpt2_bpe"
END_OF_TEXT = 50256


@functools.cache
def raw_gpt2():
    vocab = json.loads(gzip.decompress((BPE / "encoder.json.gz").read_bytes()))
    lines = gzip.decompress((BPE / "vocab.bpe.gz").read_bytes()).decode("utf-8").split("\n")
    merges = [(left, right) for left, right in (line.split() for line in lines[1:] if line)]
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|endoftext|>"])
    tokenizer.add_tokens(["žluťoučký ☃"])  # characters outside the byte alphabet, and a space
    return tokenizer


def gpt2_with(*added):
    tokenizer = tokenizers.Tokenizer.from_str(raw_gpt2().to_str())
    tokenizer.add_tokens(list(added))
    return Tokenizer(tokenizer)


@functools.cache
def gpt2():
    return Tokenizer(raw_gpt2())


@functools.cache
def adder():
    return Tokenizer.from_file(ROOT / "checkpoints/adder/tokenizer.json")


def words_tokenizer(decoder):
    pieces = ["▁hello", "▁wor", "ld", "▁", "s", ".", "é", "##ly", "##s", "end</w>", "x"]
    tokenizer = tokenizers.Tokenizer(models.WordLevel({p: i for i, p in enumerate(pieces)}, unk_token="x"))
    tokenizer.decoder = decoder
    return Tokenizer(tokenizer)


@functools.cache
def other_tokenizers():
    """Tokenizers whose tokens depend on their neighbours when decoded."""
    return {
        "metaspace": words_tokenizer(decoders.Metaspace()),
        "word pieces": words_tokenizer(decoders.WordPiece()),
        "suffixes": words_tokenizer(decoders.BPEDecoder()),
        "none": words_tokenizer(None),
        "fuse": adder(),
    }


def stream_pieces(tokenizer, ids):
    stream = TextStream(tokenizer)
    return [*(stream.feed([token_id]) for token_id in ids), stream.finish()]


class TestTokenizer:
    def test_gpt2_has_the_published_ids(self):
        assert gpt2().encode("Hello world") == (15496, 995)
        assert gpt2().encode("DEFGHIJ<|endoftext|>")[-1] == END_OF_TEXT
        assert [gpt2().decode([i]) for i in (32988, 17511, 23852)] == ["DEF", "GH", "IJ"]
        assert gpt2().decode([47249, 222]) == "😀"
        assert gpt2().vocab_size == 50258

    @given(st.text(max_size=40))
    @settings(max_examples=200, deadline=None)
    def test_any_text_survives_a_round_trip_through_gpt2(self, text):
        assert gpt2().decode(gpt2().encode(text)) == text

    def test_the_adder_reads_digits_and_writes_them_without_spaces(self):
        assert adder().encode("8550") == (8, 5, 5, 0)
        assert adder().decode([5, 3, 1]) == "531"
        assert adder().encode("") == ()
        assert adder().vocab_size == 10

    @pytest.mark.parametrize(
        ("text", "unknown"),
        [("8a50", "'a'"), ("85 50", "' '"), ("855\n", r"'\\n'"), ("٣", "'٣'"), ("+", r"'\+'")],
    )
    def test_the_adder_refuses_what_is_no_digit_by_name(self, text, unknown):
        with pytest.raises(RequestRejected, match=f"does not know: {unknown}; remove"):
            adder().encode(text)

    @pytest.mark.parametrize(
        ("text", "unknown"), [("a?b", r"'\?'"), ("?", r"'\?'"), ("ab\nab", r"'\\n'"), ("ab ", "' '")]
    )
    def test_characters_that_bpe_would_drop_are_refused_by_name(self, text, unknown):
        raw = tokenizers.Tokenizer(models.BPE({"a": 0, "b": 1, "ab": 2}, [("a", "b")]))
        assert len(raw.encode(text).ids) < len(text)  # the library says nothing
        with pytest.raises(RequestRejected, match=f"does not know: {unknown}; remove"):
            Tokenizer(raw).encode(text)
        assert Tokenizer(raw).encode("abba") == (2, 1, 0)

    def test_white_space_that_a_pre_tokenizer_splits_at_is_not_missed(self):
        raw = tokenizers.Tokenizer(models.WordLevel({"a": 0, "b": 1}))
        raw.pre_tokenizer = pre_tokenizers.Whitespace()
        assert Tokenizer(raw).encode(" a  b\n") == (0, 1)

    def test_normalised_text_is_not_mistaken_for_dropped_text(self):
        raw = tokenizers.Tokenizer(models.BPE({"e": 0, "a": 1}, []))
        raw.normalizer = normalizers.Sequence(
            [normalizers.NFD(), normalizers.StripAccents(), normalizers.Lowercase()]
        )
        assert Tokenizer(raw).encode("éA") == (0, 1)

    def test_truncation_and_padding_inside_the_file_are_switched_off(self, tmp_path):
        raw = tokenizers.Tokenizer.from_str(raw_gpt2().to_str())
        raw.enable_truncation(max_length=3)
        raw.enable_padding(length=8)
        raw.save(str(tmp_path / "tokenizer.json"))
        assert len(raw.encode("one two three four five").ids) == 8
        tokenizer = Tokenizer.from_checkpoint(tmp_path)
        assert tokenizer is not None
        assert len(tokenizer.encode("one two three four five")) == 5
        assert len(Tokenizer(raw).encode("one")) == 1
        assert raw.truncation is not None  # the caller's own is left alone

    def test_a_checkpoint_without_a_tokenizer_has_none(self, tmp_path):
        assert Tokenizer.from_checkpoint(tmp_path) is None

    def test_a_broken_file_is_named(self, tmp_path):
        (tmp_path / "tokenizer.json").write_text("{}")
        with pytest.raises(JorcaError, match=r"tokenizer\.json: cannot be read as a tokenizer"):
            Tokenizer.from_checkpoint(tmp_path)

    def test_32_threads_may_share_one_for_everything_at_once(self):
        def use(i):
            text = f"request {i} says 😀 " * (1 + i % 7)
            ids = gpt2().encode(text)
            with pytest.raises(RequestRejected, match="does not know: '#'"):
                adder().encode(f"{i}#")
            return ids, gpt2().decode(ids), "".join(stream_pieces(gpt2(), ids)), adder().encode(str(i)), text

        alone = [use(i) for i in range(320)]
        assert all(decoded == streamed == text for _, decoded, streamed, _, text in alone)
        with concurrent.futures.ThreadPoolExecutor(32) as pool:
            assert list(pool.map(use, range(320))) == alone

    @pytest.mark.parametrize("text", ["\ud800", "ok \udfff"])
    def test_half_a_surrogate_pair_is_no_text(self, text):
        with pytest.raises(RequestRejected, match="prompt"):
            gpt2().encode(text)

    @pytest.mark.parametrize("added", ["café", "naïve ☃"])
    def test_an_added_token_stands_for_itself_even_if_its_letters_could_be_bytes(self, added):
        tokenizer = gpt2_with(added)
        ids = tokenizer.encode(f"un {added} deux")
        assert 50258 in ids
        assert tokenizer.decode(ids) == "".join(stream_pieces(tokenizer, ids)) == f"un {added} deux"

    def test_an_added_token_that_is_one_of_the_vocabulary_keeps_its_bytes(self):
        assert gpt2_with("Ġ").decode([403, 220, 220, 390]) == "un   de"


class TestTextStream:
    @pytest.mark.parametrize(
        ("ids", "pieces"),
        [
            ([32988, 17511, 23852], ["DEF", "GH", "IJ", ""]),
            ([47249, 222], ["", "😀", ""]),  # F0 9F 98 | 80
            ([128, 237], ["", "ď", ""]),  # C4 | 8F
            ([222, 15496], ["�", "Hello", ""]),  # 80 begins no character
            ([47249], ["", "�"]),  # cut by max_tokens
            ([47249, 15496], ["", "�Hello", ""]),
            ([222] * 6, ["�"] * 6 + [""]),
            ([47249, END_OF_TEXT, 222], ["", "�<|endoftext|>", "�", ""]),
            ([50257, 15496], ["žluťoučký ☃", "Hello", ""]),
            ([15496, 50300, 995], ["Hello", "", " world", ""]),  # an id without a token
            ([], [""]),
        ],
    )
    def test_gpt2_tokens_give_these_pieces(self, ids, pieces):
        assert stream_pieces(gpt2(), ids) == pieces

    @given(st.lists(st.integers(0, 50257), max_size=40), st.data())
    @settings(max_examples=300, deadline=None)
    def test_joined_pieces_are_the_decoded_whole_however_the_ids_are_cut(self, ids, data):
        self.check_joined(gpt2(), ids, data)
        assert gpt2().decode(ids) == raw_gpt2().decode(ids, skip_special_tokens=False)

    @given(st.lists(st.integers(94, 255), max_size=30), st.data())
    @settings(max_examples=300, deadline=None)
    def test_random_bytes_join_too(self, ids, data):
        """GPT-2's ids from 94 are the bytes above ASCII: mostly no valid UTF-8."""
        self.check_joined(gpt2(), ids, data)
        assert gpt2().decode(ids) == raw_gpt2().decode(ids)

    @given(st.text(max_size=30))
    @settings(max_examples=200, deadline=None)
    def test_valid_text_never_shows_a_replacement_character(self, text):
        text = text.replace("�", "")
        pieces = stream_pieces(gpt2(), gpt2().encode(text))
        assert "".join(pieces) == text
        assert not any("�" in piece for piece in pieces)

    @pytest.mark.parametrize("kind", ["metaspace", "word pieces", "suffixes", "none", "fuse"])
    @given(ids=st.lists(st.integers(0, 11), max_size=20), data=st.data())
    @example(ids=[10, 0, 1, 2], data=None)
    @example(ids=[0, 11, 11, 11, 11, 1], data=None)  # 11 has no token
    @settings(max_examples=100, deadline=None)
    def test_other_decoders_join_too(self, kind, ids, data):
        self.check_joined(other_tokenizers()[kind], ids, data)

    def check_joined(self, tokenizer, ids, data):
        cuts = sorted(data.draw(st.lists(st.integers(0, len(ids)), max_size=5))) if data else []
        stream = TextStream(tokenizer)
        joined = "".join(stream.feed(ids[a:b]) for a, b in zip([0, *cuts], [*cuts, len(ids)], strict=True))
        assert joined + stream.finish() == tokenizer.decode(ids)

    def test_bad_bytes_do_not_hold_up_a_stream(self):
        stream = TextStream(gpt2())
        sent = 0
        for fed in range(1, 100):
            sent += len(stream.feed([222 if fed % 3 else 47249]))
            assert fed - sent <= fed // 3 + 1

    def test_byte_tokens_of_other_tokenizers_wait_for_a_whole_character(self):
        vocab = {f"<0x{byte:02X}>": byte for byte in range(256)} | {"a": 256}
        raw = tokenizers.Tokenizer(models.BPE(vocab, [], byte_fallback=True))
        raw.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
        tokenizer = Tokenizer(raw)
        ids = [*"a😀é".encode(), 256]
        assert stream_pieces(tokenizer, ids) == ["a", "", "", "", "😀", "", "é", "a", ""]
        # Four tokens that are no character cannot become one any more.
        assert "".join(stream_pieces(tokenizer, [0xFF] * 9)) == tokenizer.decode([0xFF] * 9)
        assert "".join(TextStream(tokenizer).feed([0xFF] * 9)) == "�" * 8


def whole_text_definition(text, stop):
    """Returns (text before the match, stop string): the match that ends first, the longest of those."""
    found = [(text.find(s) + len(s), -len(s), s) for s in stop if s in text]
    if not found:
        return text, None
    end, minus_length, matched = min(found)
    return text[: end + minus_length], matched


def run_matcher(stop, pieces):
    matcher = StopMatcher(stop)
    sent = [matcher.feed(piece) for piece in pieces]
    return [*sent, matcher.flush()], matcher.matched


class TestStopMatcher:
    @pytest.mark.parametrize(
        ("stop", "sent", "matched"),
        [
            (["DEFGHIJ"], ["", "", "", ""], "DEFGHIJ"),
            (["GHX"], ["DEF", "", "GHIJ", ""], None),
            (["FG"], ["DE", "", "", ""], "FG"),
            (["J"], ["DEF", "GH", "I", ""], "J"),
            (["JK"], ["DEF", "GH", "I", "J"], None),
            ([], ["DEF", "GH", "IJ", ""], None),
            (["HI", "FGHI"], ["DE", "", "", ""], "FGHI"),  # both end at I: the longest
            (["FGHI", "G"], ["DE", "F", "", ""], "G"),  # ends first, though it begins later
        ],
    )
    def test_three_tokens_and_a_stop_string(self, stop, sent, matched):
        pieces = [gpt2().decode([i]) for i in (32988, 17511, 23852)]
        assert run_matcher(stop, pieces) == (sent, matched)

    def test_nothing_comes_after_a_match(self):
        matcher = StopMatcher(["b"])
        assert matcher.feed("abc") == "a"
        assert matcher.matched == "b"
        assert matcher.feed("more") == ""
        assert matcher.flush() == ""

    def test_an_empty_stop_string_is_refused(self):
        with pytest.raises(ValueError, match="must not be empty"):
            StopMatcher(["a", ""])

    @given(
        st.lists(st.text("ab", min_size=1, max_size=5), max_size=4),
        st.lists(st.text("abc", max_size=6), max_size=8),
    )
    @example(["aab"], ["a", "a", "a", "b"])
    @example(["abab", "abb"], ["aba", "bb"])
    @settings(max_examples=1000, deadline=None)
    def test_it_agrees_with_a_search_of_the_whole_text(self, stop, pieces):
        sent, matched = run_matcher(stop, pieces)
        assert ("".join(sent), matched) == whole_text_definition("".join(pieces), stop)

    @given(
        st.lists(st.text("ab", min_size=1, max_size=5), max_size=4),
        st.lists(st.text("abc", max_size=6), max_size=8),
    )
    @settings(max_examples=500, deadline=None)
    def test_it_holds_back_only_what_could_still_become_a_stop_string(self, stop, pieces):
        matcher = StopMatcher(stop)
        seen = sent = ""
        for piece in pieces:
            seen += piece
            sent += matcher.feed(piece)
            if matcher.matched is not None:
                return
            starts = {s[:n] for s in stop for n in range(len(s))}
            held = next(seen[i:] for i in range(len(seen) + 1) if seen[i:] in starts | {""})
            assert sent + held == seen

    def test_a_stop_string_with_a_character_cut_in_two_is_found(self):
        stream, matcher = TextStream(gpt2()), StopMatcher(["😀!"])
        sent = [matcher.feed(stream.feed([i])) for i in (15496, 47249, 222, 0, 995)]  # id 0 is "!"
        assert sent == ["Hello", "", "", "", ""]
        assert matcher.matched == "😀!"


def serve(ids, stop_token_ids=(), **params):
    """Lets the real loop generate GPT-2's `ids`; returns what each output brought, and the last one."""
    model = dataclasses.replace(TINY, vocab_size=50257, padded_vocab_size=50257, max_positions=64)
    executor = FakeExecutor(lambda _, position: ids[position - 1])
    engine = fake_engine(executor, EngineConfig(), model, tokenizer=gpt2())
    params = SamplingParams(max_tokens=len(ids), seed=0, stop_token_ids=stop_token_ids, **params)
    engine.submit(Request(id="a", prompt_ids=(0,), params=params))
    outputs = []
    while engine.has_work:
        outputs += engine.step()
    return [output.new_text for output in outputs], outputs[-1]


class TestThroughTheLoop:
    @pytest.mark.parametrize(
        ("stop", "pieces", "reason"),
        [
            ((), ["DEF", "GH", "IJ"], "length"),
            (["DEFGHIJ"], ["", "", ""], "stop"),
            (["GHX"], ["DEF", "", "GHIJ"], "length"),
            (["FG"], ["DE", ""], "stop"),
            (["JK"], ["DEF", "GH", "IJ"], "length"),  # held back, and given out at the end
        ],
    )
    def test_stop_strings_cross_tokens_and_nothing_of_them_gets_out(self, stop, pieces, reason):
        got, last = serve([32988, 17511, 23852], stop=stop)
        assert (got, last.finish_reason) == (pieces, reason)
        assert last.text == "".join(pieces)
        assert last.token_ids == (32988, 17511, 23852)[: len(pieces)]
        assert last.stop_reason == (stop[0] if reason == "stop" else None)

    @pytest.mark.parametrize(
        ("ids", "pieces"),
        [
            ([47249, 222], ["", "😀"]),
            ([128, 237], ["", "ď"]),
            ([15496, 47249], ["Hello", "�"]),  # cut by max_tokens in the middle of a character
            ([222, 15496], ["�", "Hello"]),
        ],
    )
    def test_characters_come_whole_and_cut_ones_at_the_end(self, ids, pieces):
        got, last = serve(ids)
        assert got == pieces
        assert last.text == gpt2().decode(ids)

    def test_a_stop_token_gives_out_what_was_held_back(self):
        got, last = serve([47249, END_OF_TEXT, 0], stop_token_ids=[END_OF_TEXT])
        assert (got, last.finish_reason, last.stop_reason) == (["", "�"], "stop", END_OF_TEXT)
        assert last.token_ids == (47249, END_OF_TEXT)

    @given(st.text(min_size=1, max_size=12), st.data())
    @settings(max_examples=50, deadline=None)
    def test_any_part_of_any_text_stops_it_there(self, text, data):
        ids = gpt2().encode(text)
        start = data.draw(st.integers(0, len(text) - 1))
        stop = text[start : data.draw(st.integers(start + 1, len(text)))]
        got, last = serve(ids, stop=[stop])
        assert "".join(got) == last.text == text[: text.find(stop)]
        assert last.stop_reason == stop
