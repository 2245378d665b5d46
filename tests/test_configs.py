"""Every configuration's edges, every kind of wrong value, and its message."""

import collections
import dataclasses
import json
import re
from typing import Any

import numpy as np
import pytest

from jorca.config import (
    BucketConfig,
    CacheConfig,
    ConfigError,
    EngineConfig,
    HostsConfig,
    KVSpec,
    MeshConfig,
    ModelConfig,
    SchedulerConfig,
)
from jorca.request import JorcaError

NAN, INF = float("nan"), float("inf")
HUGE = 10**400
"""An int that no float can hold."""

PARTS = (CacheConfig, SchedulerConfig, BucketConfig, MeshConfig, HostsConfig)
NOT_COUNTS = (0, -1, 1.0, True, "1", NAN, [1])


def model(**changes: Any) -> ModelConfig:
    sizes = {"vocab_size": 50, "max_positions": 16, "num_layers": 3, "num_heads": 2, "d_model": 8}
    fields: dict[str, Any] = sizes | changes
    return ModelConfig(**fields)


def make(kind, **fields) -> Any:
    return model(**fields) if kind is ModelConfig else kind(**fields)


@pytest.mark.parametrize(
    ("kind", "field", "values"),
    [
        (ModelConfig, "vocab_size", [1, 2**40]),
        (ModelConfig, "max_positions", [1]),
        (ModelConfig, "num_layers", [1]),
        (ModelConfig, "num_heads", [1, 8]),
        (ModelConfig, "d_model", [2]),
        (ModelConfig, "d_ff", [1, 33]),
        (ModelConfig, "activation", ["gelu_tanh", "gelu_erf"]),
        (ModelConfig, "norm_epsilon", [1e-12, 0.5]),
        (ModelConfig, "dtype", ["float32", "bfloat16", "float16"]),
        (ModelConfig, "eos_token_id", [None, 0, 49]),
        (ModelConfig, "padded_vocab_size", [50, 64]),
        *[
            (ModelConfig, flag, [True, False])
            for flag in ("use_bias", "tie_embeddings", "scale_attention", "scale_attention_by_inverse_layer")
        ],
        (CacheConfig, "page_size", [1, 64]),
        (CacheConfig, "num_pages", [None, 1]),
        (CacheConfig, "kv_memory_bytes", [None, 1, 2**40]),
        (SchedulerConfig, "policy", ["orca", "request-level"]),
        (SchedulerConfig, "max_batch_size", [1]),
        (SchedulerConfig, "max_batch_tokens", [None, 1]),
        (SchedulerConfig, "max_in_flight", [None, 1]),
        (SchedulerConfig, "microbatch_size", [None]),
        (SchedulerConfig, "shortest_prompt", [False]),
        (BucketConfig, "min_bucket", [None, 1]),
        (BucketConfig, "bucket_ratio", [1.0000001, 2, 1e300]),
        (MeshConfig, "stages", [1, 8]),
        (MeshConfig, "tensor", [1, 8]),
        (EngineConfig, "attention", ["auto", "reference", "xla"]),
        (EngineConfig, "deterministic", [True, False]),
        (EngineConfig, "return_logits", [True, False]),
        (EngineConfig, "seed", [None, 0, 2**80]),
        (EngineConfig, "compilation_cache_dir", [None, "folder"]),
    ],
)
def test_a_field_takes_its_edges(kind, field, values):
    for value in values:
        assert getattr(make(kind, **{field: value}), field) == value


@pytest.mark.parametrize(
    ("kind", "field", "values"),
    [
        *[
            (ModelConfig, field, (*NOT_COUNTS, None))
            for field in ("vocab_size", "max_positions", "num_layers", "num_heads", "d_model")
        ],
        (ModelConfig, "d_ff", NOT_COUNTS),
        (ModelConfig, "activation", ("relu", "GELU_TANH", "", None, 1, [], np.array(["gelu_tanh"] * 2))),
        (ModelConfig, "norm_epsilon", (0, 1, 0.0, 1.0, -1e-5, NAN, INF, HUGE, True, "1e-5", None)),
        (ModelConfig, "dtype", ("float64", "fp16", None, np.float32, np.dtype(np.float32))),
        (ModelConfig, "eos_token_id", (-1, 50, 1.0, True, "1")),
        (ModelConfig, "padded_vocab_size", (*NOT_COUNTS, 49)),
        *[
            (ModelConfig, flag, (0, 1, None, "true", np.True_))
            for flag in ("use_bias", "tie_embeddings", "scale_attention", "scale_attention_by_inverse_layer")
        ],
        (CacheConfig, "page_size", (*NOT_COUNTS, None)),
        (CacheConfig, "num_pages", NOT_COUNTS),
        (CacheConfig, "kv_memory_bytes", (*NOT_COUNTS, "8GB")),
        (SchedulerConfig, "policy", ("fifo", "ORCA", None, 1)),
        (SchedulerConfig, "max_batch_size", (*NOT_COUNTS, None)),
        (SchedulerConfig, "max_batch_tokens", NOT_COUNTS),
        (SchedulerConfig, "max_in_flight", NOT_COUNTS),
        (SchedulerConfig, "microbatch_size", (*NOT_COUNTS, 2)),
        (SchedulerConfig, "shortest_prompt", (0, 1, None, True)),
        (BucketConfig, "min_bucket", NOT_COUNTS),
        (BucketConfig, "bucket_ratio", (1, 1.0, 0.5, -2, NAN, INF, HUGE, True, "2", None)),
        (MeshConfig, "stages", (*NOT_COUNTS, None)),
        (MeshConfig, "tensor", (*NOT_COUNTS, None)),
        (EngineConfig, "cache", (None, {}, CacheConfig, SchedulerConfig())),
        (EngineConfig, "scheduler", (None, {}, "orca")),
        (EngineConfig, "buckets", (None, {}, 2.0)),
        (EngineConfig, "mesh", (None, {}, (1, 1))),
        (EngineConfig, "hosts", (None, {}, "10.0.0.1:80")),
        (HostsConfig, "num_processes", NOT_COUNTS),
        (HostsConfig, "process_id", (-1, 1.0, True, "1")),
        (HostsConfig, "heartbeat_s", (0, -1, NAN, INF, HUGE, True, "5", None)),
        (HostsConfig, "start_timeout_s", (0, -1, NAN, INF, HUGE, True, "5", None)),
        (HostsConfig, "coordinator", ("", "host", "host:", ":80", "host:port", "host:0", "host:65535", 80)),
        (HostsConfig, "control", ("", "host", "host:", ":80", "host:port", "host:0", "host:65535", 80)),
        (EngineConfig, "attention", ("flash", None, True)),
        (EngineConfig, "deterministic", (0, 1, None, "yes")),
        (EngineConfig, "return_logits", (0, 1, None)),
        (EngineConfig, "seed", (-1, 1.0, True, "1")),
        (EngineConfig, "compilation_cache_dir", ("", 5, b"folder", True)),
    ],
)
def test_a_wrong_value_is_refused_by_the_name_of_its_field(kind, field, values):
    for value in values:
        with pytest.raises(ConfigError, match=rf"^{field} must .*got "):
            make(kind, **{field: value})


@pytest.mark.parametrize(
    ("kind", "fields", "message"),
    [
        (ModelConfig, {"vocab_size": 0}, "vocab_size must be an integer of at least 1, got 0"),
        (ModelConfig, {"num_heads": 3}, "num_heads must divide d_model, got num_heads 3 and d_model 8"),
        (ModelConfig, {"activation": "relu"}, "activation must be one of gelu_tanh, gelu_erf, got 'relu'"),
        (ModelConfig, {"use_bias": 1}, "use_bias must be True or False, got 1"),
        (ModelConfig, {"norm_epsilon": 0.0}, "norm_epsilon must be a number above 0 and below 1, got 0.0"),
        (ModelConfig, {"eos_token_id": 50}, "eos_token_id must be below vocab_size 50, got 50"),
        (
            CacheConfig,
            {"num_pages": 4, "kv_memory_bytes": 1000},
            "give num_pages or kv_memory_bytes, not both; got 4 and 1000",
        ),
        (SchedulerConfig, {"policy": "fifo"}, "policy must be one of orca, request-level, got 'fifo'"),
        (
            SchedulerConfig,
            {"microbatch_size": 2},
            "microbatch_size must be left out unless policy is \"request-level\", got 2 with policy 'orca'",
        ),
        (
            SchedulerConfig,
            {"policy": "request-level", "microbatch_size": 9},
            "microbatch_size must be at most max_batch_size 8, got 9",
        ),
        (BucketConfig, {"bucket_ratio": 1.0}, "bucket_ratio must be a number above 1 and finite, got 1.0"),
        (MeshConfig, {"stages": 0}, "stages must be an integer of at least 1, got 0"),
        (EngineConfig, {"cache": None}, "cache must be a CacheConfig, got None"),
        (
            EngineConfig,
            {"attention": "flash"},
            "attention must be one of auto, reference, xla, mosaic, triton, got 'flash'",
        ),
        (
            EngineConfig,
            {"compilation_cache_dir": ""},
            "compilation_cache_dir must be a folder's path as a string, got ''",
        ),
    ],
)
def test_a_message_tells_field_rule_and_value(kind, fields, message):
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}$"):
        make(kind, **fields)


@pytest.mark.parametrize("kind", [ModelConfig, EngineConfig, *PARTS])
def test_an_unknown_field_is_a_type_error(kind):
    with pytest.raises(TypeError, match="no_such_field"):
        make(kind, no_such_field=1)


@pytest.mark.parametrize("kind", [ModelConfig, EngineConfig, *PARTS])
def test_configs_are_frozen_keyword_only_and_hashable(kind):
    config = make(kind)
    for field in dataclasses.fields(kind):
        assert field.kw_only
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(config, field.name, getattr(config, field.name))
    assert hash(config) == hash(make(kind))


def test_a_config_error_can_be_caught_as_jorcas_error_and_as_a_value_error():
    assert issubclass(ConfigError, JorcaError)
    assert issubclass(ConfigError, ValueError)


def test_numpy_numbers_become_plain_ones_so_that_configs_go_to_json_and_products_do_not_overflow():
    config = model(num_layers=np.int32(96), d_model=np.int32(2**22), norm_epsilon=np.float32(0.5))
    assert json.loads(json.dumps(dataclasses.asdict(config)))["norm_epsilon"] == 0.5
    assert config.kv_spec.bytes_per_position == 2 * 96 * 2**22 * 4
    assert type(make(BucketConfig, bucket_ratio=np.float32(2)).bucket_ratio) is float


def test_the_feed_forward_width_is_four_times_the_model_unless_given():
    assert model(d_model=8).d_ff == 32
    assert model(d_model=8, d_ff=20).d_ff == 20


@pytest.mark.parametrize(
    ("scale_attention", "by_inverse_layer", "scales"),
    [
        (True, False, [1 / 4, 1 / 4, 1 / 4]),
        (False, False, [1, 1, 1]),
        (True, True, [1 / 4, 1 / 8, 1 / 12]),
        (False, True, [1, 1 / 2, 1 / 3]),
    ],
)
def test_attention_scales_follow_the_head_width_and_the_layer(scale_attention, by_inverse_layer, scales):
    config = model(
        d_model=32,
        num_heads=2,
        scale_attention=scale_attention,
        scale_attention_by_inverse_layer=by_inverse_layer,
    )
    assert config.head_dim == 16
    assert [config.attention_scale(layer) for layer in range(3)] == pytest.approx(scales, rel=1e-15)


@pytest.mark.parametrize(("dtype", "kv_bytes"), [("float32", 192), ("bfloat16", 96), ("float16", 96)])
def test_a_position_takes_keys_and_values_of_every_layer(dtype, kv_bytes):
    spec = model(num_layers=3, d_model=8, num_heads=2, dtype=dtype).kv_spec
    assert spec == KVSpec(num_layers=3, num_kv_heads=2, head_dim=4, dtype=dtype)
    assert spec.bytes_per_position == kv_bytes
    assert spec.bytes_per_page(16) == 16 * kv_bytes
    assert spec.shape(num_pages=5, page_size=16) == (3, 5, 2, 16, 4)


def test_fewer_key_value_heads_take_fewer_bytes_and_devices_share_them():
    spec = KVSpec(num_layers=6, num_kv_heads=4, head_dim=8, dtype="bfloat16")
    assert spec.bytes_per_position == 2 * 6 * 4 * 8 * 2
    assert spec.part(3, tensor=2) == KVSpec(num_layers=3, num_kv_heads=2, head_dim=8, dtype="bfloat16")
    assert spec.part(3) == dataclasses.replace(spec, num_layers=3)


def test_flat_options_reach_the_config_that_has_the_name():
    config = EngineConfig.from_options(
        page_size=16, num_pages=9, max_batch_size=3, bucket_ratio=1.5, attention="reference", seed=7
    )
    assert config == EngineConfig(
        cache=CacheConfig(page_size=16, num_pages=9),
        scheduler=SchedulerConfig(max_batch_size=3),
        buckets=BucketConfig(bucket_ratio=1.5),
        attention="reference",
        seed=7,
    )
    assert EngineConfig.from_options() == EngineConfig()


def test_option_names_are_unique_across_the_configs():
    names = collections.Counter(f.name for kind in (EngineConfig, *PARTS) for f in dataclasses.fields(kind))
    assert [name for name, count in names.items() if count > 1] == []


def test_every_option_can_be_given_flat():
    parts = ("cache", "scheduler", "buckets", "mesh", "hosts")
    defaults = EngineConfig()
    options = {
        field.name: getattr(config, field.name)
        for config in (defaults, *(getattr(defaults, part) for part in parts))
        for field in dataclasses.fields(config)
        if field.name not in parts
    }
    assert EngineConfig.from_options(**options) == defaults


@pytest.mark.parametrize("name", ["page_sizes", "cache", "vocab_size"])
def test_an_unknown_option_is_a_type_error_that_lists_the_options(name):
    with pytest.raises(TypeError, match=rf"^unknown engine option '{name}'; the options are ") as raised:
        EngineConfig.from_options(**{name: 1})
    listed = str(raised.value).partition("the options are ")[2].split(", ")
    own = {field.name for kind in PARTS for field in dataclasses.fields(kind)}
    whole = {field.name for field in dataclasses.fields(EngineConfig)}
    assert listed == sorted(own | whole - {"cache", "scheduler", "buckets", "mesh", "hosts"})


def test_a_wrong_value_of_an_option_is_a_config_error():
    with pytest.raises(ConfigError, match=r"^page_size must be an integer of at least 1, got 0$"):
        EngineConfig.from_options(page_size=0)


def test_a_policy_gets_its_own_options():
    assert SchedulerConfig().policy_options == {}
    config = SchedulerConfig(policy="request-level", microbatch_size=8, shortest_prompt=True)
    assert config.policy_options == {"microbatch_size": 8, "shortest_prompt": True}
