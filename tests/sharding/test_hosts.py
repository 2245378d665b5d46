"""What a config may say about hosts, and joining them."""

import pytest

from jorca.config import ConfigError, EngineConfig, HostsConfig

GOOD = {"coordinator": "10.0.0.1:8476", "num_processes": 2, "process_id": 1, "secret_file": "secret"}


def test_one_process_needs_to_say_nothing():
    assert EngineConfig.from_options().hosts == HostsConfig()


def test_control_is_the_port_behind_the_coordinator_unless_it_is_given():
    assert HostsConfig(**GOOD).control_address == "10.0.0.1:8477"
    assert HostsConfig(**GOOD, control="10.0.0.1:9000").control_address == "10.0.0.1:9000"
    assert HostsConfig(coordinator="auto", control="a:1", secret_file="s").control_address == "a:1"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"coordinator": "10.0.0.1"},
            "coordinator must be HOST:PORT with a port below 65535, got '10.0.0.1'",
        ),
        ({"coordinator": ":80"}, "coordinator must be HOST:PORT"),
        ({"coordinator": "h:65535"}, "coordinator must be HOST:PORT"),
        ({"coordinator": "h:x"}, "coordinator must be HOST:PORT"),
        ({"coordinator": 8476}, "coordinator must be HOST:PORT"),
        ({"control": "h"}, "control must be HOST:PORT"),
        (
            {"coordinator": "auto"},
            'control must be HOST:PORT of process 0 if coordinator is "auto", got None',
        ),
        ({"secret_file": None}, "secret_file must be a file's path where there is a coordinator, got None"),
        ({"process_id": 2}, "process_id must be below num_processes 2, got 2"),
        ({"num_processes": 0}, "num_processes must be an integer of at least 1, got 0"),
        ({"process_id": -1}, "process_id must be an integer of at least 0, got -1"),
        ({"heartbeat_s": 0}, "heartbeat_s must be a number above 0 and finite, got 0"),
        ({"start_timeout_s": float("inf")}, "start_timeout_s must be a number above 0 and finite, got inf"),
        (
            {"coordinator": None},
            "coordinator must be HOST:PORT of process 0 if num_processes is set, got None",
        ),
    ],
)
def test_what_cannot_work_is_refused(change, message):
    with pytest.raises(ConfigError) as error:
        HostsConfig(**(GOOD | change))
    assert str(error.value).startswith(message)
