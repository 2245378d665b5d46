"""The shipped text model: it is small, and has learnt more of its author's English than the plays it saw."""

import collections
import math
import random
from pathlib import Path

import pytest

from jorca import LLM, SamplingParams
from jorca.checkpoint.store import load_config, load_params
from jorca.frontend.text import Tokenizer
from jorca.training.evaluate import nats_per_byte

CHECKPOINT = Path(__file__).parents[2] / "checkpoints" / "shakespeare"

# Sonnet 18, which is in no play.
SONNET = """Shall I compare thee to a summer's day?
Thou art more lovely and more temperate:
Rough winds do shake the darling buds of May,
And summer's lease hath all too short a date:
Sometime too hot the eye of heaven shines,
And often is his gold complexion dimm'd;
And every fair from fair sometime declines,
By chance, or nature's changing course, untrimm'd;
But thy eternal summer shall not fade
Nor lose possession of that fair thou ow'st;
Nor shall Death brag thou wander'st in his shade,
When in eternal lines to time thou grow'st:
So long as men can breathe or eyes can see,
So long lives this, and this gives life to thee.
"""


def test_all_of_it_is_at_most_8_mb():
    assert sum(file.stat().st_size for file in CHECKPOINT.rglob("*") if file.is_file()) <= 8_000_000


@pytest.fixture(scope="module")
def nats():
    config = load_config(CHECKPOINT)
    params = load_params(CHECKPOINT, config)
    tokenizer = Tokenizer.from_file(CHECKPOINT / "tokenizer.json")
    return lambda text: nats_per_byte(
        config, params, tokenizer.encode(text), len(text.encode()), batch_size=2
    )


def test_a_sonnet_it_never_saw_is_far_likelier_than_its_letters_and_its_words_in_another_order(nats):
    frequencies = [count / len(SONNET) for count in collections.Counter(SONNET).values()]
    of_letters = -sum(p * math.log(p) for p in frequencies)
    words = SONNET.split(" ")
    random.Random(0).shuffle(words)
    assert nats(SONNET) < 0.75 * of_letters
    assert nats(SONNET) < nats(" ".join(words)) - 0.1


def test_it_continues_a_play_in_lines_of_verse():
    (output,) = LLM(CHECKPOINT, max_batch_size=1, min_bucket=16, max_batch_tokens=16).generate(
        "ROMEO:\n", SamplingParams(max_tokens=120, temperature=0.8, seed=0)
    )
    lines = [line for line in output.text.split("\n")[:-1] if line]
    assert len(lines) > 2
    assert all(len(line) < 80 for line in lines)
