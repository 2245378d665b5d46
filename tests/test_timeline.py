"""The picture of an engine's iterations, against a schedule that is known."""

import io

import pytest
from rich.console import Console

from jorca.config import EngineConfig
from jorca.request import Request, SamplingParams
from jorca.testing import FakeExecutor, fake_engine
from jorca.timeline import Timeline


def draw(timeline, width):
    file = io.StringIO()
    console = Console(width=100, file=file, color_system=None)
    console.print(timeline.picture(str, lambda output: str(output.finish_reason), width))
    return [line.rstrip() for line in file.getvalue().splitlines()]


@pytest.fixture
def timeline():
    """Batches of two: A (4 tokens) and B (2) run, C waits for B's place."""
    engine = fake_engine(FakeExecutor(), EngineConfig.from_options(max_batch_size=2, page_size=4))
    timeline = Timeline()
    engine.observe(timeline)
    for name, max_tokens in (("A", 4), ("B", 2), ("C", 3)):
        params = SamplingParams(max_tokens=max_tokens, temperature=0, seed=0)
        engine.submit(Request(id=name, prompt_ids=(1, 2, 3), params=params))
        timeline.submitted(name)
    while engine.has_work:
        engine.step()
    return timeline


def test_joins_leaves_and_waiting_are_where_they_happened(timeline):
    lines = draw(timeline, 80)
    assert lines[:5] == [
        "   0           iteration",
        "A  ██■■■■■■    length",
        "B  ██■■        length",
        "C  ····██■■■■  length",
        "   2 2 2 2 1   requests in it",
    ]


def test_figures_are_counted(timeline):
    assert timeline.num_iterations == 5
    assert timeline.mean_batch_size == 9 / 5  # 4 + 2 + 3 parts in 5 iterations


def test_iterations_that_do_not_fit_are_counted_and_not_dropped_in_silence(timeline):
    lines = draw(timeline, 22)
    assert lines[1] == "A  █■■  length"
    assert lines[-1] == "2 more iterations do not fit"


def test_numbers_of_iterations_stand_above_their_columns():
    engine = fake_engine(FakeExecutor(), EngineConfig.from_options(max_batch_size=1, page_size=32))
    timeline = Timeline()
    engine.observe(timeline)
    params = SamplingParams(max_tokens=24, temperature=0, seed=0)
    engine.submit(Request(id="A", prompt_ids=(1, 2, 3), params=params))
    while engine.has_work:
        engine.step()
    narrow, wide = draw(timeline, 60)[0], draw(timeline, 90)[0]
    assert [narrow.index(f" {c} ") - 2 for c in (5, 10, 15, 20)] == [5, 10, 15, 20]
    assert [wide.index(f" {c} ") - 2 for c in (5, 10, 15, 20)] == [10, 20, 30, 40]
