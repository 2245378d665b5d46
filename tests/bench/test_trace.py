"""The trace benchmark: the right jobs at the right times, honest latencies, and what the points say."""

import json
import sys

import jax
import numpy as np
import pytest
from click.testing import CliRunner

from jorca import ConfigError
from jorca.bench.curve import Point, Served, summary, throughput_at
from jorca.bench.trace import run
from jorca.bench.workload import SMALL, Job, Trace, load_model, serve
from jorca.cli import main
from jorca.config import EngineConfig
from jorca.testing import FakeExecutor, fake_engine

TRACE = Trace(vocab_size=50257)


class TestTheTrace:
    def test_the_closed_workload_is_the_one_of_record(self):
        rng = np.random.default_rng(0)
        inputs = rng.integers(32, 513, 32)
        outputs = rng.integers(1, 129, 32)
        prompts = [rng.integers(0, 50257, p) for p in inputs]
        jobs = TRACE.jobs(32)
        assert [len(job.prompt_ids) for job in jobs] == inputs.tolist()
        assert [job.num_output for job in jobs] == outputs.tolist()
        assert [list(job.prompt_ids) for job in jobs] == [prompt.tolist() for prompt in prompts]

    def test_lengths_are_uniform_with_both_ends(self):
        trace = Trace(vocab_size=7, input_tokens=(3, 5), output_tokens=(2, 2))
        jobs = trace.jobs(3000)
        counts = np.bincount([len(job.prompt_ids) for job in jobs])[3:]
        assert counts.sum() == 3000
        assert (
            (counts - 1000) ** 2 / 1000
        ).sum() < 13.8  # chi-square, 2 degrees of freedom, one in a thousand
        assert {job.num_output for job in jobs} == {2}
        assert {token for job in jobs for token in job.prompt_ids} == set(range(7))

    def test_arrivals_are_a_poisson_process_of_the_rate(self):
        gaps = np.diff(TRACE.arrivals_s(4000, rate_rps=5.0), prepend=0)
        assert gaps.min() > 0
        np.testing.assert_allclose(gaps.mean(), 1 / 5, rtol=0.06)  # four standard errors
        np.testing.assert_allclose((gaps > 1 / 5).mean(), np.exp(-1), atol=0.03)

    def test_another_rate_stretches_the_same_process(self):
        np.testing.assert_allclose(TRACE.arrivals_s(9, 1.0), np.multiply(TRACE.arrivals_s(9, 4.0), 4))

    def test_another_seed_gives_other_jobs_and_arrivals(self):
        other = Trace(vocab_size=50257, seed=1)
        assert other.jobs(4) != TRACE.jobs(4)
        assert other.arrivals_s(4, 1.0) != TRACE.arrivals_s(4, 1.0)

    @pytest.mark.parametrize("lengths", [(0, 5), (6, 5)])
    def test_lengths_must_be_a_range(self, lengths):
        with pytest.raises(ConfigError, match="input_tokens must be two numbers, 1 <= low <= high, got"):
            Trace(vocab_size=9, input_tokens=lengths)


class SlowExecutor(FakeExecutor):
    """Every iteration takes a second of a clock that otherwise stands still."""

    now_s = 100.0

    def collect(self, ticket):
        self.now_s += 1
        return super().collect(ticket)

    def clock(self):
        return self.now_s

    def sleep(self, seconds):
        assert seconds > 0
        self.now_s += seconds


def served(policy, arrivals_s, outputs):
    executor = SlowExecutor()
    config = EngineConfig.from_options(policy=policy, max_batch_size=2, max_batch_tokens=16)
    jobs = [Job((1, 2), count) for count in outputs]
    engine = fake_engine(executor, config)
    return serve(engine, jobs, arrivals_s, clock=executor.clock, sleep=executor.sleep)


class TestServing:
    def test_arrivals_are_honoured_between_iterations(self):
        """One alone; then one that comes in the middle of an iteration and waits for the next."""
        got = served("orca", [2.5, 10.0, 10.25], [3, 2, 1])
        assert [s.finished_s for s in got] == [5.5, 12.0, 12.0]
        assert [s.normalized_latency_s for s in got] == [1.0, 1.0, 1.75]

    def test_a_late_comer_joins_at_once_under_orca_and_waits_for_the_batch_at_request_level(self):
        arrivals_s, outputs = [0.0, 0.0, 0.5], [1, 4, 1]
        assert [s.finished_s for s in served("orca", arrivals_s, outputs)] == [1, 4, 2]
        assert [s.finished_s for s in served("request-level", arrivals_s, outputs)] == [4, 4, 5]


def point(throughput, latency, offered: float | None = 1.0, policy="orca", size=8):
    return Point(
        policy=policy,
        max_batch_size=size,
        offered_rps=offered,
        num_requests=1,
        throughput_rps=throughput,
        tokens_per_s=0.0,
        median_ms=latency,
        p90_ms=latency,
    )


class TestPoints:
    def test_a_point_sums_up_what_was_served(self):
        rows = [Served(2.0, 4.0, 2), Served(3.0, 7.0, 2), Served(4.0, 6.0, 1)]
        got = Point.of(rows, policy="orca", max_batch_size=8, offered_rps=1.0)
        assert (got.num_requests, got.throughput_rps, got.tokens_per_s) == (3, 3 / 5, 1.0)
        assert (got.median_ms, got.p90_ms) == (2000.0, 2000.0)

    def test_between_two_rates_the_curve_is_straight(self):
        points = [point(4.0, 30.0, offered=4.0), point(2.0, 10.0, offered=2.0)]
        assert throughput_at(points, 20.0) == 3.0
        assert throughput_at(points, 10.0) == 2.0
        assert throughput_at(points, 99.0) == 4.0
        assert throughput_at(points, 9.0) == 0.0

    def test_the_best_batch_size_of_each_policy_counts(self):
        points = [
            point(6.0, 10.0, size=8),
            point(4.0, 10.0, size=1),
            point(9.0, 50.0, offered=None),
            point(1.5, 10.0, policy="request-level"),
            point(3.0, 90.0, policy="request-level", offered=9.0),
            point(1.0, 90.0, policy="shortest-prompt"),
        ]
        got = summary(points, 10.0)
        assert got["rps_at_target"] == {"orca": 6.0, "request-level": 1.5, "shortest-prompt": 0.0}
        assert got["factor_at_target"] == {"request-level": 4.0, "shortest-prompt": None}
        assert got["factor_at_peak"] == {"request-level": 3.0, "shortest-prompt": 9.0}


class TestTheCommand:
    @staticmethod
    def call(*arguments):
        adder = ["--model", "checkpoints/adder", "--input-tokens", "1", "3", "--output-tokens", "1", "3"]
        sizes = ["--max-batch-size", "2", "--max-batch-tokens", "3"]  # three programs to compile
        cache = ["--compilation-cache-dir", jax.config.jax_compilation_cache_dir]  # see conftest
        command = ["bench", "trace", *adder, *sizes, *cache, *arguments]
        result = CliRunner().invoke(main, command, catch_exceptions=False)
        assert result.exit_code == 0, result.output
        return [json.loads(line) for line in result.stdout.splitlines()]

    def test_prints_the_workload_the_machine_a_line_for_each_point_and_how_they_compare(self):
        policies = ["--policy", "orca", "--policy", "request-level"]
        lines = self.call(*policies, "--rate", "100", "--seconds", "0.01")
        head, machine, *points, end = lines
        assert (head["benchmark"], head["input_tokens"]) == ("trace", [1, 3])
        assert machine["cores"] >= 1
        got = [(p["policy"], p["offered_rps"], p["num_requests"]) for p in points]
        assert got == [
            ("orca", None, 24),
            ("orca", 100.0, 24),
            ("request-level", None, 24),
            ("request-level", 100.0, 24),
        ]
        assert set(end["factor_at_peak"]) == {"request-level"}
        *_, closed = self.call("--policy", "orca", "--closed", "--num-requests", "5")
        assert (closed["num_requests"], closed["offered_rps"]) == (5, None)
        assert closed["tokens_per_s"] > 0


class TestMistakes:
    def test_a_plot_without_matplotlib_is_refused_before_anything_is_measured(self, monkeypatch, tmp_path):
        monkeypatch.setitem(sys.modules, "matplotlib", None)
        with pytest.raises(
            ConfigError, match=r"needs matplotlib, which is not installed: pip install 'jorca\[plot\]'"
        ):
            run([("orca", 8)], plot=tmp_path / "trace.png")

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"closed": True, "rates": (1.0,)}, "rates must be left out with closed"),
            ({"closed": True, "seconds": 3.0}, "seconds must be left out with closed, got 3.0"),
            ({"num_requests": 3}, "num_requests must be left out without closed, got 3"),
            ({"model": "gpt9"}, "preset must be one of gpt2, .*got 'gpt9'"),
            ({"input_tokens": (8, 100)}, r"100 .* 32 - 1 = 131 positions, but .* max_positions is 128"),
        ],
    )
    def test_options_that_do_not_fit_are_named(self, options, message):
        with pytest.raises(ConfigError, match=message):
            run([("orca", 8)], **options)

    def test_several_engines_do_not_go_one_after_the_other_on_several_hosts(self, tmp_path):
        hosts = {"coordinator": "127.0.0.1:1", "num_processes": 2, "process_id": 0}
        with pytest.raises(ConfigError, match="with a coordinator there must be one engine, got 2"):
            run([("orca", 8), ("orca", 32)], **hosts, secret_file=str(tmp_path / "secret"))

    def test_a_checkpoint_has_its_own_dtype(self):
        with pytest.raises(ConfigError, match="dtype must be left out for a checkpoint"):
            load_model("checkpoints/adder", "bfloat16")

    def test_random_weights_take_a_dtype(self):
        config, params = load_model("small", "bfloat16")
        assert config.dtype == "bfloat16"
        assert {str(w.dtype) for w in params.values()} == {"bfloat16"}
        assert config.num_layers == SMALL.num_layers
