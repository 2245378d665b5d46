"""The pipeline's picture, against a schedule that is known."""

import json

import pytest
from click.testing import CliRunner

from jorca.bench.pipeline import Span, busy_shares, draw, to_spans
from jorca.cli import main


def test_a_stage_begins_when_it_is_free_and_the_stage_before_has_handed_over():
    # Stage 0 takes 2 s each; stage 1 takes 3 s each, and is the one that is waited for.
    ends_s = [{0: 12.0, 1: 14.0}, {0: 15.0, 1: 18.0}]
    assert to_spans({0: ("a",), 1: ("b",)}, {0: 10.0, 1: 10.1}, ends_s) == [
        Span(0, 0, ("a",), 0.0, 2.0),
        Span(1, 0, ("b",), 2.0, 4.0),
        Span(0, 1, ("a",), 2.0, 5.0),
        Span(1, 1, ("b",), 5.0, 8.0),
    ]


def test_an_idle_pipeline_begins_when_it_is_given_something():
    spans = to_spans({0: ("a",), 1: ("b",)}, {0: 10.0, 1: 20.0}, [{0: 11.0, 1: 21.0}])
    assert [(s.start_s, s.end_s) for s in spans] == [(0.0, 1.0), (10.0, 11.0)]


def test_busy_shares_are_of_the_whole_time():
    spans = [Span(0, 0, ("a",), 0.0, 2.0), Span(0, 1, ("a",), 2.0, 5.0), Span(1, 0, ("b",), 2.0, 4.0)]
    assert busy_shares(spans) == [4 / 5, 3 / 5]


def test_the_command_prints_every_iteration_of_every_stage_and_draws(tmp_path):
    import jax

    sizes = "--stages 2 --max-batch-size 2 --input-tokens 3 --output-tokens 4 --max-batch-tokens 8"
    more = "--min-bucket 8 --page-size 8 --model small --compilation-cache-dir"
    arguments = [*sizes.split(), *more.split(), jax.config.jax_compilation_cache_dir]
    result = CliRunner().invoke(main, ["bench", "pipeline", *arguments, "--plot", tmp_path / "p.png"])
    assert result.exit_code == 0, result.output
    facts, *lines, last = map(json.loads, result.stdout.splitlines())
    assert facts["model"] == "small"
    # Two batches of two requests, four iterations each, two stages.
    assert len(lines) == 16
    assert {line["stage"] for line in lines} == {0, 1}
    assert all(line["requests"] == 2 and line["end_ms"] >= line["start_ms"] for line in lines)
    assert len(last["busy_share"]) == 2
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_a_figure_is_drawn_in_the_format_of_its_name(tmp_path, suffix):
    draw([Span(0, 0, ("a",), 0.0, 2.0), Span(0, 1, ("a",), 2.0, 5.0)], tmp_path / f"p.{suffix}", "title")
    assert (tmp_path / f"p.{suffix}").stat().st_size > 1000
