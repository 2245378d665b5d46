"""Megatron-LM's shards: which of them make up each tensor of the whole model, and how.

A pipeline stage numbers its layers from 0. With an interleaved pipeline a rank holds several chunks; chunk c
of stage p is number c * stages + p in the order of the model. Tensor ranks share embeddings, the fused
projection and the first feed-forward layer with its bias by rows (out), the attention output and the second
feed-forward layer by columns (in); the biases of these two each of them has whole, like norms and positions.

The rows of queries, keys and values were ordered in three ways over time, which only `checkpoint_version`
tells: 0 or none [3, heads, width], 1 [heads, width, 3], from 2 on [heads, 3, width]. A tensor rank holds
whole heads in that order. Facts from Megatron-LM's checkpointing.py and tools/checkpoint.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

import numpy as np

from jorca.checkpoint.convert import Source, same_bits
from jorca.checkpoint.errors import CheckpointError
from jorca.checkpoint.megatron_files import Rank, listed
from jorca.config import ModelConfig

Shards = Mapping[str, tuple[np.ndarray, ...]]
"""The parts of every tensor, one for each tensor rank."""

WORDS: Final = "embedding.word_embeddings.weight"
HEAD: Final = "output_layer.weight"
_LAYER: Final = re.compile(r"layers\.(\d+)\.")


def gather(ranks: Sequence[Sequence[Rank]]) -> dict[str, tuple[np.ndarray, ...]]:
    """Returns the shards of every tensor, in the order of tensor ranks, with layers numbered through.

    Raises:
      CheckpointError: A rank lacks what others of its stage have, a stage's layers are not numbered from 0
        on, two stages have the same tensor, or something is no tensor; it lists them all.
    """
    whole: dict[str, tuple[np.ndarray, ...]] = {}
    problems: list[str] = []
    num_layers = 0
    for chunk in range(len(ranks[0][0].chunks)):
        for stage, tensor_ranks in enumerate(ranks):
            parts = [rank.chunks[chunk] for rank in tensor_ranks]
            names = dict.fromkeys(name for part in parts for name in part)
            layers = {int(match[1]) for name in names if (match := _LAYER.match(name))}
            if layers != set(range(len(layers))):
                problems.append(
                    f"stage {stage} has layers {sorted(layers)}, which are not numbered from 0 on"
                )
            for name in names:
                problems += [
                    f"{rank.file}: {name} is " + (type(part[name]).__name__ if name in part else "missing")
                    for rank, part in zip(tensor_ranks, parts, strict=True)
                    if not isinstance(part.get(name), np.ndarray)
                ]
                target = name
                if match := _LAYER.match(name):
                    target = f"layers.{num_layers + int(match[1])}.{name[match.end() :]}"
                if target in whole:
                    problems.append(f"{name} of stage {stage} is in an earlier stage, too")
                whole[target] = tuple(part[name] for part in parts if name in part)
            num_layers += len(layers)
    if problems:
        raise CheckpointError(listed("the parts of the model do not fit together", problems))
    return whole


def check_shards(shards: Shards, table: Mapping[str, Source], config: ModelConfig, num_ranks: int) -> None:
    """Raises unless every rank's shards have the shapes that the whole model asks for; lists all."""
    if config.num_heads % num_ranks:
        raise CheckpointError(f"{config.num_heads} heads cannot be split over {num_ranks} tensor ranks")
    problems: list[str] = []
    for source in table.values():
        parts = shards.get(source.key, ())
        shape = list(source.shape)
        if _is_fused(source.key):
            shape = [3 * config.d_model, *shape[3:]]
        axis = _split_axis(source.key)
        if axis is not None:
            shape[axis] //= num_ranks
        for rank, part in enumerate(parts):
            if part.shape != tuple(shape):
                problems.append(
                    f"wrong shape: {source.key} of tensor rank {rank} is {part.shape}, not {tuple(shape)}"
                )
        dtypes = sorted({part.dtype.name for part in parts})
        if len(dtypes) > 1:
            problems.append(f"mixed: {source.key} is {' and '.join(dtypes)} on different tensor ranks")
    if problems:
        raise CheckpointError(listed("the tensors do not fit the model", problems))


class Whole(Mapping[str, np.ndarray]):
    """The tensors of the whole model; each is put together from its shards when it is asked for.

    Fused projections come as [3, N, H, ...] whatever the version. One rank alone gives views.
    """

    def __init__(self, shards: Shards, version: float, num_heads: int, head_dim: int):
        self._shards = shards
        self._version = version
        self._num_heads, self._head_dim = num_heads, head_dim  # of one tensor rank

    def __getitem__(self, name: str) -> np.ndarray:
        parts, axis = self._shards[name], _split_axis(name)
        if _is_fused(name):
            parts, axis = tuple(self._ordered(part) for part in parts), 1
        if len(parts) == 1:
            return parts[0]
        if axis is not None:
            return np.concatenate(parts, axis)
        if not all(same_bits(part, parts[0]) for part in parts):
            raise CheckpointError(f"{name} differs between tensor ranks, which should have the same one")
        return parts[0]

    def _ordered(self, x: np.ndarray) -> np.ndarray:
        """Returns one rank's fused rows as [3, heads, width, ...]."""
        n, h, rest = self._num_heads, self._head_dim, x.shape[1:]
        if self._version < 1:
            return x.reshape(3, n, h, *rest)
        if self._version < 2:
            return np.moveaxis(x.reshape(n, h, 3, *rest), 2, 0)
        return x.reshape(n, 3, h, *rest).swapaxes(0, 1)

    def __iter__(self) -> Iterator[str]:
        return iter(self._shards)

    def __len__(self) -> int:
        return len(self._shards)


def _is_fused(name: str) -> bool:
    return ".self_attention.query_key_value." in name


def _split_axis(name: str) -> int | None:
    """Returns the axis along which tensor ranks share a tensor, None if each has it whole."""
    if name in (WORDS, HEAD) or _is_fused(name) or ".mlp.dense_h_to_4h." in name:
        return 0
    if name.endswith((".self_attention.dense.weight", ".mlp.dense_4h_to_h.weight")):
        return 1
    return None
