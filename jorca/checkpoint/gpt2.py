"""What Hugging Face's GPT-2, nanoGPT and minGPT share: the names that GPT-2's tensors have.

Facts: `attn.c_attn` holds queries, keys and values one behind the other; a linear layer's weight lies
[in, out] in Hugging Face's `Conv1D` and [out, in] in the `nn.Linear` of the others. Which of both it is
follows from the format alone: a square weight fits either way.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from jorca.checkpoint.convert import (
    Source,
    Table,
    keep,
    same_bits,
    stored_dtype,
    strip_prefixes,
    transpose,
)
from jorca.checkpoint.errors import CheckpointError
from jorca.checkpoint.foreign import Foreign, Overrides
from jorca.config import ConfigError, ModelConfig

PREFIXES: Final = ("module.", "_orig_mod.", "transformer.")
"""What wrappers, and models around the bare transformer, put in front of names."""

GPT2_VOCAB_SIZE: Final = 50257
GPT2_EOS: Final = 50256
"""GPT-2's end-of-text token."""

_EMBED: Final = "wte.weight"
_HEAD: Final = "lm_head.weight"
_SIZES: Final = {
    "n_layer": "num_layers",
    "n_embd": "d_model",
    "n_inner": "d_ff",
    "vocab_size": "padded_vocab_size",
    "n_positions": "max_positions",
    "block_size": "max_positions",
}
"""Settings that the tensors' shapes tell as well, and their names in `ModelConfig`."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Recorded:
    """What the files of a GPT-2 say besides the tensors.

    Attributes:
      where: What to call the place in messages, for example "config.json".
      settings: Settings by GPT-2's names: n_layer, n_head, n_embd, n_inner, vocab_size, n_positions or
        block_size. They must agree with the tensors; only n_head must be there.
      use_bias: Whether there are biases; None if only the tensors tell.
      tie_embeddings: Whether the head is the embedding; None if only the tensors tell.
      fields: Other fields of `ModelConfig`.
    """

    where: str
    settings: Mapping[str, Any]
    use_bias: Any = None
    tie_embeddings: Any = None
    fields: Mapping[str, Any] = dataclasses.field(default_factory=dict)


def gpt2_table(config: ModelConfig, *, out_in: bool) -> Table:
    """Returns where every parameter of `config` lies under GPT-2's names, free of `PREFIXES`.

    Args:
      config: The model.
      out_in: Whether weights of linear layers lie [out, in], else [in, out].
    """
    d, f, v = config.d_model, config.d_ff, config.padded_vocab_size
    assert f is not None  # set by ModelConfig, and so is the next
    assert v is not None
    table = {
        "embed.tokens": Source(_EMBED, (v, d)),
        "embed.positions": Source("wpe.weight", (config.max_positions, d)),
    }

    def add(name: str, key: str, kernel: str, shape: tuple[int, ...]) -> None:
        stored, transform = (shape[::-1], transpose) if out_in else (shape, keep)
        table[f"{name}.{kernel}"] = Source(f"{key}.weight", stored, transform)
        if config.use_bias:
            table[f"{name}.bias"] = Source(f"{key}.bias", shape[-1:])

    for i in range(config.num_layers):
        add(f"layers.{i}.attention_norm", f"h.{i}.ln_1", "scale", (d,))
        add(f"layers.{i}.attention.qkv", f"h.{i}.attn.c_attn", "kernel", (d, 3 * d))
        add(f"layers.{i}.attention.out", f"h.{i}.attn.c_proj", "kernel", (d, d))
        add(f"layers.{i}.mlp_norm", f"h.{i}.ln_2", "scale", (d,))
        add(f"layers.{i}.mlp.up", f"h.{i}.mlp.c_fc", "kernel", (d, f))
        add(f"layers.{i}.mlp.down", f"h.{i}.mlp.c_proj", "kernel", (f, d))
    add("final_norm", "ln_f", "scale", (d,))
    if not config.tie_embeddings:
        table["head.kernel"] = Source(_HEAD, (v, d))
    return table


def gpt2_foreign(
    tensors: Mapping[str, Any],
    recorded: Recorded,
    overrides: Overrides,
    *,
    format: str,
    path: Path,
    files: Sequence[Path],
    out_in: bool,
    tokenizer: str | None,
    notes: Sequence[str],
) -> Foreign:
    """Describes a checkpoint whose tensors have GPT-2's names.

    Sizes come from the tensors. The head is the embedding if only one of both is there, unless the files say
    that they differ, or if they are equal bit for bit; otherwise both are kept.

    Args:
      tensors: As stored; they are renamed and freed of prefixes here.
      recorded: What the files say besides, renamed already.
      overrides: What the user knows better.
      format: The format's name.
      path: What to name in messages.
      files: What was read.
      out_in: As for `gpt2_table`.
      tokenizer: The text of a `tokenizer.json`, or None.
      notes: What to tell the user before what is found here.

    Raises:
      CheckpointError: The tensors are no GPT-2, disagree with `recorded`, or do not tell all.
    """
    notes = list(notes)
    try:
        tensors = strip_prefixes(overrides.renamed(tensors), PREFIXES)
        tensors, tied = _settle_head(tensors, recorded, notes)
        sizes = _sizes(tensors, out_in)
        _check_sizes(sizes, recorded)
        masks = frozenset(
            f"h.{i}.attn.{name}" for i in range(sizes["num_layers"]) for name in ("bias", "masked_bias")
        )
        biased = any(key.endswith(".bias") for key in tensors.keys() - masks)
        fields = {
            **sizes,
            "vocab_size": sizes["padded_vocab_size"],
            "num_heads": _num_heads(recorded, overrides),
            "use_bias": biased if recorded.use_bias is None else recorded.use_bias,
            "tie_embeddings": tied,
            **recorded.fields,
            **{name: value for name, value in _given(overrides).items() if name != "num_heads"},
        }
        if fields["vocab_size"] > sizes["padded_vocab_size"]:
            raise CheckpointError(
                f"vocab_size must be at most the {sizes['padded_vocab_size']} rows of the embedding, "
                f"got {fields['vocab_size']}"
            )
        config = ModelConfig(**fields)
    except (CheckpointError, ConfigError) as error:
        raise CheckpointError(f"{path}: {error}") from error
    table = gpt2_table(config, out_in=out_in)
    return Foreign(
        format=format,
        files=tuple(files),
        config=dataclasses.replace(config, dtype=stored_dtype(tensors, table)),
        tensors=tensors,
        table=table,
        ignored=masks,
        tokenizer=tokenizer,
        notes=tuple(notes),
    )


def _given(overrides: Overrides) -> dict[str, Any]:
    """Returns the fields of the model that the user gave."""
    names = ("num_heads", "activation", "norm_epsilon", "vocab_size", "eos_token_id")
    return {name: value for name in names if (value := getattr(overrides, name)) is not None}


def _settle_head(
    tensors: dict[str, Any], recorded: Recorded, notes: list[str]
) -> tuple[dict[str, Any], bool]:
    """Returns the tensors without a head that is the embedding, and whether it is."""
    if recorded.tie_embeddings not in (True, False, None):
        raise CheckpointError(
            f"{recorded.where} must say true or false of tied embeddings, got {recorded.tie_embeddings!r}"
        )
    untied = recorded.tie_embeddings is False
    if not {_EMBED, _HEAD} <= tensors.keys():
        if _HEAD in tensors and not untied:
            notes.append(f"there is no {_EMBED}; {_HEAD} is tied to it and stands for both")
            tensors = {_EMBED if key == _HEAD else key: tensor for key, tensor in tensors.items()}
        return tensors, not untied
    if same_bits(tensors[_EMBED], tensors[_HEAD]):
        return {key: tensor for key, tensor in tensors.items() if key != _HEAD}, True
    if recorded.tie_embeddings:
        notes.append(f"{recorded.where} ties {_HEAD} to {_EMBED}, but they differ; both are kept")
    return tensors, False


def _sizes(tensors: Mapping[str, Any], out_in: bool) -> dict[str, int]:
    """Returns what the shapes tell, as fields of `ModelConfig`."""
    shapes: dict[str, tuple[int, ...]] = {key: getattr(x, "shape", ()) for key, x in tensors.items()}
    layers = {match[1] for key in tensors if (match := re.match(r"h\.(\d+)\.", key))}
    up = "h.0.mlp.c_fc.weight"
    for key in (_EMBED, "wpe.weight", up):
        if len(shapes.get(key, ())) != 2 or 0 in shapes[key]:
            raise CheckpointError(
                f"has no matrix {key!r}, which every GPT-2 has; if its tensors have other names, rename can "
                f"give them GPT-2's. It has {_some(tensors)}"
            )
    rows, d_model = shapes[_EMBED]
    return {
        "padded_vocab_size": rows,
        "max_positions": shapes["wpe.weight"][0],
        "num_layers": len(layers),
        "d_model": d_model,
        "d_ff": shapes[up][0 if out_in else 1],
    }


def _check_sizes(sizes: Mapping[str, int], recorded: Recorded) -> None:
    """Raises if the settings speak of another model than the tensors; it lists all differences."""
    problems = [
        f"{recorded.where} says {key} {said!r}, but the tensors have {sizes[name]}"
        for key, name in _SIZES.items()
        if (said := recorded.settings.get(key)) is not None and said != sizes[name]
    ]
    if problems:
        raise CheckpointError("; ".join(problems))


def _num_heads(recorded: Recorded, overrides: Overrides) -> Any:
    num_heads = recorded.settings.get("n_head") if overrides.num_heads is None else overrides.num_heads
    if num_heads is None:
        raise CheckpointError(
            f"no tensor tells the number of heads, and {recorded.where} gives no n_head (it has "
            f"{_some(recorded.settings)}); give num_heads, or rename what it is called there"
        )
    return num_heads


def _some(names: Mapping[str, Any], most: int = 12) -> str:
    """Lists the first names."""
    listed = ", ".join(list(names)[:most]) or "nothing"
    return listed if len(names) <= most else f"{listed} and {len(names) - most} more"
