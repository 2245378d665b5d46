"""The engine benchmark: both sides compute the same, and what is written can be read back."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from click.testing import CliRunner

from engine.device import device_params
from jorca.bench.batched import PaddedBatch
from jorca.bench.costs import Cost, CostTable, Shape, grid, measure_costs
from jorca.bench.iteration import SelectiveBatch, compare, run
from jorca.bench.steps import Steps
from jorca.checkpoint import save_checkpoint
from jorca.cli import main
from jorca.config import ConfigError, ModelConfig
from jorca.scheduler import SchedulerLimits
from oracle.numpy_gpt import forward, random_params

CONFIG = ModelConfig(vocab_size=37, max_positions=24, num_layers=2, num_heads=2, d_model=16)
SIZES: dict[str, Any] = {"batch_size": 3, "num_input": 5, "num_output": 6}
LADDER: dict[str, Any] = {
    "max_batch_size": 2,
    "max_batch_tokens": 24,
    "min_bucket": 8,
    "bucket_ratio": 8.0,
    "page_size": 4,
}


def greedy_by_oracle(config, prompts_bt, num_output):
    """Every request on its own, the whole sequence computed anew for each token."""
    params = random_params(config, 0)
    tokens_bo = []
    for prompt in prompts_bt.tolist():
        ids = list(prompt)
        for _ in range(num_output):
            ids.append(int(forward(config, params, ids)[-1].argmax()))
        tokens_bo.append(ids[len(prompt) :])
    return np.array(tokens_bo)


@pytest.fixture(scope="module")
def prompts_bt():
    return np.random.default_rng(0).integers(37, size=(3, 5), dtype=np.int32)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model") / "tiny"
    save_checkpoint(folder, CONFIG, device_params(CONFIG))
    return folder


@pytest.mark.parametrize("max_length", [11, 24])
def test_the_padded_batch_generates_what_the_numpy_oracle_does(prompts_bt, max_length):
    batch = PaddedBatch(CONFIG, device_params(CONFIG), **SIZES, max_length=max_length)
    right = greedy_by_oracle(CONFIG, prompts_bt, 6)
    for _ in range(2):  # the second run finds what the first has left in the cache
        assert batch.run(prompts_bt).tokens_bo.tolist() == right.tolist()


def test_the_selective_batch_generates_what_the_numpy_oracle_does(prompts_bt):
    batch = SelectiveBatch(CONFIG, device_params(CONFIG), **SIZES, page_size=4)
    right = greedy_by_oracle(CONFIG, prompts_bt, 6)
    for _ in range(2):
        assert batch.run(prompts_bt).tokens_bo.tolist() == right.tolist()


def test_slots_behind_the_last_token_do_not_touch_the_padded_batch(prompts_bt):
    batch = PaddedBatch(CONFIG, device_params(CONFIG), **SIZES, max_length=24)
    batch._cache = dataclasses.replace(
        batch._cache, keys_bnsh=tuple(jnp.full_like(k, 1e30) for k in batch._cache.keys_bnsh)
    )
    assert batch.run(prompts_bt).tokens_bo.tolist() == greedy_by_oracle(CONFIG, prompts_bt, 6).tolist()


@pytest.mark.parametrize(
    ("kind", "options"), [(SelectiveBatch, {"page_size": 4}), (PaddedBatch, {"max_length": 11})]
)
def test_times_are_those_of_the_clock_in_the_order_first_and_rest(prompts_bt, kind, options):
    batch = kind(CONFIG, device_params(CONFIG), **SIZES, **options)
    run = batch.run(prompts_bt, clock=iter([1.0, 3.0, 8.0]).__next__)
    assert (run.first_s, run.rest_s) == (2.0, 5.0)


def test_a_comparison_says_that_both_sides_gave_the_same_tokens():
    line = compare(CONFIG, device_params(CONFIG), **SIZES, repeats=2, page_size=4)
    assert line["same_tokens"] == 1.0
    assert {name: line[name] for name in SIZES} == SIZES
    for side in ("selective", "batched"):
        assert line[f"{side}_ms"] > 0
    assert json.loads(json.dumps(line)) == line


def test_a_batch_that_is_too_long_for_the_model_is_refused():
    with pytest.raises(ConfigError, match=r"input_tokens 20 \+ output_tokens 6 = 26.*max_positions is 24"):
        compare(CONFIG, {}, batch_size=2, num_input=20, num_output=6, repeats=1)


def test_options_that_the_batch_sets_are_refused():
    with pytest.raises(ConfigError, match="max_batch_size, num_pages must be left out"):
        SelectiveBatch(CONFIG, {}, **SIZES, num_pages=3, max_batch_size=4)


def test_the_command_prints_facts_and_a_json_line_for_each_batch_and_draws_them(checkpoint, tmp_path):
    figure = tmp_path / "figure.png"
    command = (
        f"bench iteration --model {checkpoint} --batch-size 3 --input-tokens 5 --output-tokens 6 --repeats 1"
    )
    # The cache of the other tests: the programs are theirs.
    command += (
        f" --page-size 4 --plot {figure} --compilation-cache-dir {jax.config.jax_compilation_cache_dir}"
    )
    result = CliRunner().invoke(main, command.split())
    assert result.exit_code == 0, result.output
    facts, line = map(json.loads, result.stdout.splitlines())
    assert facts["dtype"] == "float32"
    assert {"model", "cpu", "cores", "devices", "jax", "date"} <= set(facts)
    assert {name: line[name] for name in SIZES} == SIZES
    assert (line["benchmark"], line["same_tokens"]) == ("iteration", 1.0)
    assert figure.read_bytes().startswith(b"\x89PNG")


def test_plot_and_table_are_not_taken_together():
    with pytest.raises(ConfigError, match="give one of them"):
        run(
            model="small",
            batch_sizes=[1],
            input_tokens=[8],
            output_tokens=2,
            repeats=1,
            plot=Path("a"),
            table=Path("b"),
        )


def test_the_grid_has_decodes_prompts_and_mixtures_and_nothing_that_the_limits_forbid():
    limits = SchedulerLimits(
        max_batch_size=12,
        max_batch_tokens=200,
        max_in_flight=1,
        num_pages=40,
        page_size=16,
        max_positions=160,
    )
    shapes = grid(limits)
    assert all(s.fits(limits) for s in shapes)
    assert {s.num_decodes for s in shapes if not s.num_prompts} == {1, 2, 4, 8, 12}
    assert {s.prompt_length for s in shapes if s.num_prompts == 1 and not s.num_decodes} == {16, 32, 64, 128}
    assert any(s.num_decodes and s.num_prompts for s in shapes)
    assert len(set(shapes)) == len(shapes)
    whole = Shape(num_decodes=2, decode_length=160, num_prompts=1, prompt_length=160)
    assert whole.num_tokens == 162
    assert whole.lengths == (160, 160, 160)
    assert whole.fits(limits)
    for change in (
        {"max_batch_size": 2},
        {"max_batch_tokens": 161},
        {"num_pages": 29},
        {"max_positions": 159},
    ):
        assert not whole.fits(dataclasses.replace(limits, **change))


def test_a_measured_table_comes_back_from_its_file_as_it_was(tmp_path):
    table = measure_costs(CONFIG, device_params(CONFIG), {"model": "tiny"}, repeats=1, **LADDER)
    table.save(tmp_path / "costs.json")
    assert CostTable.load(tmp_path / "costs.json") == table
    assert table.facts["model"] == "tiny"
    assert table.facts["limits"]["max_batch_tokens"] == 24
    (decode,) = (c for c in table.costs if (c.num_requests, c.num_decodes, c.kv_length) == (2, 2, 24))
    assert (decode.num_tokens, decode.bucket) == (2, 8)
    assert all(cost.ms > 0 for cost in table.costs)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"format": "other", "facts": {}, "costs": []}'])
def test_a_file_that_is_no_table_is_refused(tmp_path, text):
    (tmp_path / "costs.json").write_text(text)
    with pytest.raises(ConfigError, match=r"costs\.json is not a table of iteration costs"):
        CostTable.load(tmp_path / "costs.json")


def test_a_table_is_json_that_names_its_columns(tmp_path):
    cost = Cost(num_tokens=4, num_requests=1, kv_length=4, num_decodes=0, bucket=8, ms=1.5)
    CostTable({"model": "m"}, (cost,)).save(tmp_path / "costs.json")
    data = json.loads((tmp_path / "costs.json").read_text())
    assert data["costs"] == [dataclasses.asdict(cost)]


def test_an_item_has_the_pages_that_its_positions_need():
    steps = Steps(CONFIG, device_params(CONFIG), **LADDER)
    assert steps.item(1, start=0, token_ids=[5, 6, 7, 8], first_page=3).pages == (3,)
    assert steps.item(1, start=4, token_ids=[5], first_page=3).pages == (3, 4)
