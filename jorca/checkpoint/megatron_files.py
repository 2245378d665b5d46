"""Megatron-LM's files: the folders of every rank, and what each of them holds under one set of names.

A checkpoint is a folder with `mp_rank_XX` for each tensor rank XX, or `mp_rank_XX_YYY` for tensor rank XX of
pipeline stage YYY, and in each of them a file of `torch.save`. Facts from Megatron-LM's checkpointing.py and
tools/checkpoint, 2020 to 2025.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from jorca.checkpoint.convert import strip_prefixes
from jorca.checkpoint.errors import CheckpointError
from jorca.checkpoint.foreign import Overrides
from jorca.checkpoint.pytorch import read_pytorch

MODEL_FILES: Final = ("model_optim_rng.pt", "model_rng.pt")
TRACKER: Final = "latest_checkpointed_iteration.txt"
_DESCRIPTION: Final = ("args", "checkpoint_version", "iteration", "total_iters")
_MAX_RANKS: Final = 10_000
_RANK_FOLDER: Final = re.compile(r"mp_rank_(\d+)(?:_(\d+))?")
_CONTAINERS: Final = ("module.", "_orig_mod.", "language_model.", "transformer.", "encoder.", "decoder.")
_GENERATIONS: Final = (
    (r"^final_norm\.", "final_layernorm."),
    *(
        (rf"^(layers\.\d+\.)({there})", rf"\1{here}.")
        for here, there in {
            "input_layernorm": r"input_norm\.|self_attention\.(?:linear|layernorm)_qkv\.layer_norm_",
            "post_attention_layernorm": r"(?:post_attention_norm|pre_mlp_layernorm)\."
            r"|(?:mlp\.linear_fc1|layernorm_mlp)\.layer_norm_",
            "self_attention.query_key_value": r"attention\.query_key_value\."
            r"|self_attention\.(?:linear|layernorm)_qkv\.",
            "self_attention.dense": r"attention\.dense\.|self_attention\.(?:linear_)?proj\.",
            "mlp.dense_h_to_4h": r"mlp\.linear_fc1\.|layernorm_mlp\.fc1_",
            "mlp.dense_4h_to_h": r"mlp\.linear_fc2\.|layernorm_mlp\.fc2_",
        }.items()
    ),
)
"""How other versions name a layer's parts: before 2022 and after, Megatron-core with and without Transformer
Engine, and Transformer Engine's whole layer. Here everything has the names of 2022."""


@dataclasses.dataclass(frozen=True, slots=True)
class Rank:
    """One file.

    Attributes:
      file: Where it lies.
      args: The training run's arguments; empty if it records none.
      version: `checkpoint_version`, 0 if it records none.
      iteration: The training iteration, or None.
      chunks: The tensors by name, of each of its chunks; layers are numbered within a chunk.
      is_core: Whether Megatron-core wrote it.
      others: The keys of what else the file holds.
    """

    file: Path
    args: Mapping[str, Any]
    version: float
    iteration: int | None
    chunks: tuple[Mapping[str, Any], ...]
    is_core: bool
    others: tuple[str, ...]


def read_ranks(path: Path, overrides: Overrides) -> list[list[Rank]]:
    """Returns every rank of a checkpoint, [pipeline stage][tensor rank].

    Args:
      path: One rank's file or its folder, an iteration's folder, or the folder of all iterations, whose
        tracker file names the one to take.
      overrides: What renames tensors and arguments.

    Raises:
      CheckpointError: Ranks are missing, too many, or of different training runs or iterations; it lists
        them all.
    """
    files = _find_files(path)
    ranks = {place: _read_rank(file, overrides) for place, file in files.items()}
    first = ranks[min(ranks)]
    tensor = _size(first, "tensor_model_parallel_size", "model_parallel_size") or 1 + max(t for _, t in ranks)
    stages = _size(first, "pipeline_model_parallel_size") or 1 + max(p for p, _ in ranks)
    wanted = {(p, t) for p in range(stages) for t in range(tensor)}
    problems = [f"missing: {_folder(p, t, stages)}" for p, t in sorted(wanted - ranks.keys())]
    problems += [f"too many: {files[place]}" for place in sorted(ranks.keys() - wanted)]
    for rank in ranks.values():
        for name, got, expected in (
            ("iteration", rank.iteration, first.iteration),
            ("checkpoint_version", rank.version, first.version),
            ("number of chunks", len(rank.chunks), len(first.chunks)),
        ):
            if got != expected:
                problems.append(f"{name} {got} in {rank.file}, but {expected} in {first.file}")
    if problems:
        title = f"{path}: is not one whole checkpoint of {tensor} tensor ranks in {stages} pipeline stages"
        raise CheckpointError(listed(title, problems))
    return [[ranks[p, t] for t in range(tensor)] for p in range(stages)]


def listed(title: str, problems: Sequence[str]) -> str:
    """Returns the message of an error that lists all its reasons."""
    return f"{title}:\n  " + "\n  ".join(problems)


def _size(rank: Rank, *names: str) -> int | None:
    """Returns the first of the arguments that is recorded: a number of ranks."""
    for name in names:
        value = rank.args.get(name)
        if value is not None:
            if type(value) is not int or not 1 <= value <= _MAX_RANKS:
                raise CheckpointError(f"{rank.file}: {name} must be 1 to {_MAX_RANKS}, got {value!r}")
            return value
    return None


def _folder(stage: int, tensor_rank: int, stages: int) -> str:
    return f"mp_rank_{tensor_rank:02d}" + (f"_{stage:03d}" if stages > 1 else "")


def _model_file(folder: Path) -> Path | None:
    return next((folder / name for name in MODEL_FILES if (folder / name).is_file()), None)


def _find_files(path: Path) -> dict[tuple[int, int], Path]:
    """Returns every rank's file by (pipeline stage, tensor rank)."""
    if path.is_file():
        return {(0, 0): path}
    folder = _iteration_folder(path)
    if (file := _model_file(folder)) is not None:
        return {(0, 0): file}
    files: dict[tuple[int, int], Path] = {}
    problems: list[str] = []
    for entry in sorted(folder.glob("mp_rank_*")):
        match = _RANK_FOLDER.fullmatch(entry.name)
        file = _model_file(entry)
        if match is None:
            problems.append(f"{entry.name} is no tensor rank and stage (experts are not supported)")
        elif file is None:
            problems.append(f"{entry.name} has no {' or '.join(MODEL_FILES)}")
        elif (place := (int(match[2] or 0), int(match[1]))) in files:
            problems.append(f"{entry.name} is the same rank as {files[place].parent.name}")
        else:
            files[place] = file
    if problems:
        raise CheckpointError(listed(f"{folder}: has ranks that cannot be read", problems))
    if files:
        return files
    if any(folder.glob("*.distcp")):
        raise CheckpointError(
            f"{folder}: is in Megatron's distributed format; save it again with --ckpt-format torch"
        )
    raise CheckpointError(f"{folder}: has no mp_rank_XX folders; it is not a Megatron checkpoint")


def _iteration_folder(path: Path) -> Path:
    """Returns the folder that the tracker file names, or `path` itself if there is none."""
    tracker = path / TRACKER
    if not tracker.is_file():
        return path
    text = tracker.read_text(encoding="utf-8", errors="replace").strip()
    if text != "release" and not re.fullmatch(r"\d{1,18}", text):
        raise CheckpointError(f"{tracker}: must hold an iteration's number or 'release', got {text[:40]!r}")
    folder = path / (text if text == "release" else f"iter_{int(text):07d}")
    if not folder.is_dir():
        raise CheckpointError(f"{tracker}: names {text}, but there is no folder {folder.name}")
    return folder


def _read_rank(file: Path, overrides: Overrides) -> Rank:
    data = read_pytorch(file)
    models = {}
    if isinstance(data, dict):
        models = {key: data[key] for key in data if re.fullmatch(r"model\d*", str(key))}
    if not models or not all(isinstance(model, dict) for model in models.values()):
        raise CheckpointError(f"{file}: holds no Megatron model (a dict with the key 'model')")
    if sorted(models) not in (["model"], sorted(f"model{i}" for i in range(len(models)))):
        raise CheckpointError(f"{file}: has {', '.join(models)}, which are no chunks from model0 on")
    version = data.get("checkpoint_version", 0)
    if type(version) not in (int, float) or not (version in (0, 1) or version >= 2):
        raise CheckpointError(f"{file}: checkpoint_version must be 0, 1, or at least 2, got {version!r}")
    args = data.get("args", {})
    if not isinstance(args, dict):
        raise CheckpointError(f"{file}: args must be a Namespace, got {type(args).__name__}")
    flat = [_flatten(models[key]) for key in sorted(models, key=lambda key: (len(key), key))]
    try:
        chunks = tuple(_canonical(tensors, overrides) for tensors in flat)
        args = overrides.renamed(args)
    except CheckpointError as error:
        raise CheckpointError(f"{file}: {error}") from error
    return Rank(
        file=file,
        args=args,
        version=float(version),
        iteration=data.get("iteration", data.get("total_iters")),
        chunks=chunks,
        is_core=any(name.startswith("decoder.") for tensors in flat for name in tensors),
        others=tuple(str(key) for key in data if key not in {*models, *_DESCRIPTION}),
    )


def _flatten(tree: Mapping[Any, Any], prefix: str = "") -> dict[str, Any]:
    """Returns the leaves of nested dicts by their keys with dots between them."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, dict):
            flat |= _flatten(value, f"{prefix}{key}.")
        elif not str(key).endswith("_extra_state"):  # Transformer Engine's own, without weights
            flat[f"{prefix}{key}"] = value
    return flat


def _canonical(tensors: Mapping[str, Any], overrides: Overrides) -> dict[str, Any]:
    """Returns a chunk's tensors under the names of 2022, without what contains them."""
    tensors = strip_prefixes(overrides.renamed(tensors), _CONTAINERS)
    return Overrides(rename=_GENERATIONS).renamed(tensors)
