"""The parts of a text, and batches: every window once in each pass, the same after an interruption."""

import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jorca.training import TrainingError
from jorca.training.data import batches, read_parts
from jorca.training.tokenizer import train_tokenizer


@given(
    text=st.text(min_size=12),
    validation_share=st.sampled_from([0.1, 0.25]),
    test_share=st.sampled_from([0, 0.1, 0.3]),
)
def test_the_parts_are_the_text_cut_where_the_shares_say_but_never_inside_a_character(
    tmp_path_factory, text, validation_share, test_share
):
    file = tmp_path_factory.getbasetemp() / "text"
    file.write_bytes(whole := text.encode())
    parts = read_parts(file, validation_share, test_share)
    assert parts.train + parts.validation + parts.test == whole
    for part in (parts.train, parts.validation, parts.test):
        part.decode()
    # A character has at most four bytes, and each cut moves to the left by less than one.
    assert 0 <= len(parts.test) - test_share * len(whole) < 4
    held_out = len(parts.validation) + len(parts.test)
    assert 0 <= held_out - (validation_share + test_share) * len(whole) < 8


def test_tenths_of_a_text_are_its_last_tenth_and_the_one_before(tmp_path):
    file = tmp_path / "text"
    file.write_bytes(bytes(range(100)))
    parts = read_parts(file, 0.1, 0.1)
    assert (parts.train[-1], parts.validation[0], parts.validation[-1], parts.test[0]) == (79, 80, 89, 90)


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"abc\xff", "is not UTF-8 .byte 3."), (b"", "0 bytes are too few"), (None, "cannot be read")],
)
def test_a_text_that_does_not_do_is_refused(tmp_path, content, message):
    file = tmp_path / "text"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(TrainingError, match=message):
        read_parts(file, 0.1, 0.1)


def take(iterator, count):
    return np.concatenate([next(iterator) for _ in range(count)])


@pytest.mark.parametrize(("num_tokens", "context", "batch_size"), [(23, 4, 3), (7, 6, 2), (40, 8, 8)])
def test_every_window_comes_once_in_each_pass(num_tokens, context, batch_size):
    tokens = np.arange(num_tokens) * 10
    every_window = {tuple(tokens[at : at + context + 1]) for at in range(num_tokens - context)}
    num_windows = len(every_window)
    passes = 3
    rows = take(batches(tokens, context, batch_size, seed=5), math.ceil(passes * num_windows / batch_size))
    assert rows.dtype == np.int32
    for i in range(passes):
        one_pass = [tuple(row) for row in rows[i * num_windows : (i + 1) * num_windows]]
        assert len(one_pass) == num_windows
        assert set(one_pass) == every_window


def test_the_order_follows_from_the_seed_and_changes_from_pass_to_pass():
    tokens = np.arange(60)
    first, again, other = (take(batches(tokens, 3, 19, seed), 6) for seed in (1, 1, 2))
    np.testing.assert_array_equal(first, again)
    assert (first != other).any()
    assert (first[:57] != first[57:]).any()


@pytest.mark.parametrize("done", [0, 1, 4, 9, 31])
def test_an_iterator_goes_on_at_the_same_place_from_its_state(done):
    tokens = np.arange(30)
    whole = batches(tokens, 4, 3, seed=0)
    take(whole, done) if done else None
    state = json.loads(json.dumps(whole.get_state()))
    resumed = batches(tokens, 4, 3, seed=0)
    next(resumed)  # wherever it stands
    resumed.set_state(state)
    np.testing.assert_array_equal(take(resumed, 20), take(whole, 20))


def test_a_text_without_a_whole_window_is_refused():
    next(batches(range(5), 4, 1, seed=0))
    with pytest.raises(TrainingError, match="has 4 tokens, and a window needs 5"):
        batches(range(4), 4, 1, seed=0)


TEXT = "the king the queen the king and the kingdom " * 20


@given(st.text())
def test_any_text_comes_back_from_its_tokens(text):
    tokenizer = train_tokenizer(TEXT, 270)
    assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_frequent_words_become_tokens():
    tokenizer = train_tokenizer(TEXT, 268)
    assert tokenizer.get_vocab_size() == 268
    assert len(tokenizer.encode(" the king").ids) == 2


@pytest.mark.parametrize(("vocab_size", "message"), [(255, "at least 256"), (10_000, "at most 2[67]")])
def test_a_vocabulary_that_the_text_cannot_fill_is_refused(vocab_size, message):
    with pytest.raises(ValueError, match=f"vocab_size must be {message}.*got {vocab_size}"):
        train_tokenizer(TEXT, vocab_size)
