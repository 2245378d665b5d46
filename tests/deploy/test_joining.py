"""What `join_hosts` does for launchers that start all hosts at once."""

import socket
import types
from typing import Any

import jax
import pytest

from jorca.config import ConfigError, HostsConfig
from jorca.sharding import hosts

NUMBERS: dict[str, Any] = {"num_processes": 2, "process_id": 1}


@pytest.fixture
def joined(monkeypatch):
    """How JAX is told to join; nothing is joined."""
    calls = []
    monkeypatch.setattr(jax.distributed, "initialize", lambda *args, **kwargs: calls.append((args, kwargs)))
    monkeypatch.setattr(jax.config, "update", lambda *_: None)
    return calls


@pytest.fixture
def slept(monkeypatch):
    """Seconds pass at once; the clock shows their sum."""
    waits = []
    clock = types.SimpleNamespace(sleep=waits.append, monotonic=lambda: sum(waits))
    monkeypatch.setattr(hosts, "time", clock)
    return waits


def test_a_name_that_nobody_knows_yet_is_waited_for(monkeypatch, joined, slept, caplog):
    answers = iter([socket.gaierror(-2, "Name or service not known")] * 3 + ["127.0.0.1"])

    def look_up(name):
        assert name == "jorca-hosts-0-0.jorca"
        answer = next(answers)
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(hosts.socket, "gethostbyname", look_up)
    hosts.join_hosts(HostsConfig(coordinator="jorca-hosts-0-0.jorca:8476", secret_file="secret", **NUMBERS))
    assert len(joined) == 1
    assert slept == [1] * 3
    (record,) = caplog.records
    assert record.getMessage().startswith(
        "control: jorca-hosts-0-0.jorca is not known yet, and is waited for"
    )


def test_a_name_that_stays_unknown_is_an_error(monkeypatch, joined, slept):
    def look_up(name):
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(hosts.socket, "gethostbyname", look_up)
    config = HostsConfig(coordinator="nowhere:8476", secret_file="secret", start_timeout_s=20, **NUMBERS)
    with pytest.raises(ConfigError, match="control: nowhere is not known after 20 s"):
        hosts.join_hosts(config)
    assert not joined
    assert 20 <= sum(slept) <= 22


@pytest.mark.parametrize(
    ("options", "detection"),
    [
        ({"coordinator": "127.0.0.1:8476"} | NUMBERS, "deactivate"),
        ({"coordinator": "127.0.0.1:8476", "num_processes": 2}, None),
        ({"coordinator": "auto", "control": "127.0.0.1:8477"}, None),
    ],
    ids=["all numbers", "a number is missing", "auto"],
)
def test_jax_looks_for_a_launcher_only_where_a_number_is_missing(joined, options, detection):
    hosts.join_hosts(HostsConfig(secret_file="secret", **options))
    ((_, told),) = joined
    assert told["cluster_detection_method"] == detection
