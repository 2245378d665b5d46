"""Moving arrays onto meshes and between them, whichever processes their devices belong to."""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import numpy as np
from jax.sharding import Sharding, SingleDeviceSharding

from jorca.sharding.stages import Stage

HandOver = Callable[[jax.Array | None, jax.ShapeDtypeStruct], jax.Array | None]
"""(array, or None in a process without the source; shape and dtype) -> the array on the target, or None."""


def is_local(stage: Stage) -> bool:
    """Returns whether a device of the stage belongs to this process."""
    return jax.process_index() in processes_of(stage)


def processes_of(stage: Stage) -> list[int]:
    """Returns the processes that the stage's devices belong to, in rising order."""
    return sorted({device.process_index for device in stage.mesh.devices.flat})


def place(x: jax.Array | np.ndarray, sharding: Sharding) -> jax.Array:
    """Puts an array that this process holds as a whole onto devices.

    Nothing is exchanged: where the devices belong to several processes, each puts its own part of `x`, which
    must be the same in all of them.

    Args:
      x: Any shape and dtype.
      sharding: Where it goes; at least one of the devices belongs to this process.
    """
    if sharding.is_fully_addressable:
        return jax.device_put(x, sharding)
    return jax.make_array_from_callback(x.shape, sharding, lambda index: np.asarray(x[index]))


def hand_over(source: Stage, target: Stage) -> HandOver | None:
    """Returns the way of an array from one stage to another; in both, every device holds all of it.

    Every process walks it, in one global order with all else that the processes exchange, even one that has a
    device of neither stage: JAX numbers the transfers between processes in each of them, and what is sent and
    what is expected meet by number. Only what stays inside another process is none of this one's business:
    None. Walking does not wait for the data. A device takes them from its own process if that has them, else
    from another.

    Args:
      source: Where an array is.
      target: Where it goes; as many devices as the source.
    """
    here, there = set(processes_of(source)), set(processes_of(target))
    if len(here | there) == 1 and not is_local(source):
        return None
    as_a_whole = len(here | there) == 1 or here.isdisjoint(there)
    return functools.partial(_move if as_a_whole else _move_by_device, source, target)


def _move(source: Stage, target: Stage, x: jax.Array | None, like: jax.ShapeDtypeStruct) -> jax.Array | None:
    moved = jax.device_put(_remote(like, source.whole) if x is None else x, target.whole)
    return moved if is_local(target) else None


def _move_by_device(
    source: Stage, target: Stage, x: jax.Array | None, like: jax.ShapeDtypeStruct
) -> jax.Array | None:
    """For stages that share processes but are not in a single one: JAX moves no array as a whole there."""
    held = {} if x is None else {shard.device: shard.data for shard in x.addressable_shards}
    senders = list(source.mesh.devices.flat)
    nearest = {device.process_index: device for device in reversed(senders)}
    shards = []
    for receiver in target.mesh.devices.flat:
        sender = nearest.get(receiver.process_index, senders[0])
        is_here = receiver.process_index == jax.process_index()
        if not is_here and sender.process_index == receiver.process_index:
            continue  # nothing goes between processes
        copy = held[sender] if sender in held else _remote(like, SingleDeviceSharding(sender))
        moved = jax.device_put(copy, SingleDeviceSharding(receiver))
        if is_here:
            shards.append(moved)
    if not shards:
        return None
    return jax.make_array_from_single_device_arrays(like.shape, target.whole, shards)


def _remote(like: jax.ShapeDtypeStruct, sharding: Sharding) -> jax.Array:
    """Returns a name for an array that other processes hold: the receiver's side of a transfer needs one."""
    return jax.make_array_from_single_device_arrays(like.shape, sharding, [], dtype=like.dtype)
