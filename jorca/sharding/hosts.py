"""Joining the processes of several hosts, and leaving them when one is lost."""

from __future__ import annotations

import logging
import os
import socket
import sys
import time
from typing import Final, NoReturn

import jax

from jorca.config import ConfigError, HostsConfig

_logger = logging.getLogger(__name__)

EXIT_FAILED: Final = 70
"""Exit status of a process that has failed itself; its log says why."""
EXIT_LOST: Final = 75
"""Exit status of a process that leaves because another is lost: start all of them again."""


def join_hosts(config: HostsConfig) -> None:
    """Makes this process one of several that share their devices, if the config says so.

    To be called before JAX looks for devices. Where `jax.distributed` runs already, it is used as it is.

    Raises:
      ConfigError: JAX has looked for devices already, the processes do not find each other, or
        `jax.distributed` runs although the config says that there is one process.
    """
    if jax.distributed.is_initialized():
        if config.coordinator is None:
            raise ConfigError("coordinator must be set where jax.distributed has been started, got None")
        return
    if config.coordinator is None:
        return
    # Or JAX would end every process when one dies, before anybody could be told.
    jax.config.update("jax_enable_recoverability", True)
    # Or JAX would swallow SIGTERM, by which launchers end what is not needed any more.
    jax.config.update("jax_enable_preemption_service", False)
    address = _own_address(config.control_address, config.start_timeout_s)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    # Only backends without transfers of their own between processes (CPU) look at these. Port 0 will not do
    # for the first: peers are told the port that stands there.
    jax.config.update("jax_cross_host_transfer_socket_address", f"{address}:{_free_port(address)}")
    jax.config.update("jax_cross_host_transport_addresses", f"{address}:0")
    explicit = None if config.coordinator == "auto" else config.coordinator
    bind = explicit if explicit is not None and address.startswith("127.") else None
    # JAX's detection of launchers does more than find numbers: under Slurm and Open MPI it leaves one GPU
    # to each process. Who gives all numbers wants none of that.
    is_complete = None not in (explicit, config.num_processes, config.process_id)
    try:
        jax.distributed.initialize(
            explicit,
            config.num_processes,
            config.process_id,
            initialization_timeout=max(1, int(config.start_timeout_s)),
            cluster_detection_method="deactivate" if is_complete else None,
            coordinator_bind_address=bind,
        )
    except (RuntimeError, ValueError) as error:
        raise ConfigError(
            f"coordinator {config.coordinator}: the processes cannot be joined: {error}"
        ) from error


def leave(status: int) -> NoReturn:
    """Ends this process at once: without lost peers, JAX can neither finish what it does nor shut down."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(status)


def _free_port(address: str) -> int:
    with socket.create_server((address, 0)) as server:
        return server.getsockname()[1]


def _own_address(peer: str, timeout_s: float) -> str:
    """Returns the address by which this host reaches HOST:PORT; nothing is sent."""
    host, _, port = peer.rpartition(":")
    number = _wait_for_name(host, timeout_s)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((number, int(port)))
        except OSError as error:
            raise ConfigError(f"control: {peer} cannot be reached: {error}") from error
        return probe.getsockname()[0]


def _wait_for_name(host: str, timeout_s: float) -> str:
    """Returns the address behind a name; where hosts start together, it may become known after this one."""
    give_up_s = time.monotonic() + timeout_s
    is_new = True
    while True:
        try:
            return socket.gethostbyname(host)
        except OSError as error:
            if time.monotonic() > give_up_s:
                raise ConfigError(f"control: {host} is not known after {timeout_s:g} s: {error}") from error
            if is_new:
                _logger.warning("control: %s is not known yet, and is waited for: %s", host, error)
        is_new = False
        time.sleep(1)
