"""Megatron-LM's GPT: what its arguments and its whole tensors mean.

Kernels lie [out, in]. The embedding has padding rows, so that tensor ranks get equal parts. GELU is the tanh
form where it is fused with the bias, which is the default, or where `openai_gelu` is set; else it is exact.
Facts from Megatron-LM's arguments.py, transformer.py and tools/checkpoint, and transformers' converter.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, Final

import numpy as np
from tokenizers import Tokenizer

from jorca.checkpoint.convert import Source, same_bits, stored_dtype, transpose
from jorca.checkpoint.errors import CheckpointError
from jorca.checkpoint.foreign import Foreign, Overrides
from jorca.checkpoint.megatron_files import MODEL_FILES, TRACKER, Rank, listed, read_ranks
from jorca.checkpoint.megatron_shards import HEAD, WORDS, Shards, Whole, check_shards, gather
from jorca.checkpoint.tokenizer_files import tokenizer_json
from jorca.config import Activation, ModelConfig

_POSITIONS: Final = "embedding.position_embeddings.weight"
_TIED_HEAD: Final = "word_embeddings_for_head.weight"
_END_OF_TEXT: Final = "<|endoftext|>"

_ONLY: Final[dict[str, tuple[Any, ...]]] = {
    "position_embedding_type": ("learned_absolute",),
    "add_position_embedding": (True,),
    "use_rotary_position_embeddings": (False,),
    "normalization": ("LayerNorm",),
    "apply_layernorm_1p": (False,),
    "apply_residual_connection_post_layernorm": (False,),
    "qk_layernorm": (False,),
    "add_bias_linear": (True,),
    "disable_bias_linear": (False,),
    "swiglu": (False,),
    "squared_relu": (False,),
    "quick_geglu": (False,),
    "group_query_attention": (False,),
    "multi_latent_attention": (False,),
    "softmax_type": ("vanilla",),
    "num_experts": (),
    "window_size": (),
    "mtp_num_layers": (0,),
    "is_hybrid_model": (False,),
}
"""What the arguments may say beside None: the model here has nothing else."""

_SIZES: Final = {
    "num_layers": "num_layers",
    "hidden_size": "d_model",
    "ffn_hidden_size": "d_ff",
    "max_position_embeddings": "max_positions",
    "padded_vocab_size": "padded_vocab_size",
}
"""Arguments that repeat what the tensors' shapes say, and the fields of `ModelConfig` that they are."""


class Megatron:
    """Megatron-LM's GPT in the `torch` checkpoint format, of any version and any number of ranks."""

    name = "megatron"

    def recognises(self, path: Path) -> bool:
        """Returns whether the path looks like a checkpoint, or like one rank of it."""
        if not path.is_dir():
            return path.name in MODEL_FILES
        return any((path / name).is_file() for name in (TRACKER, *MODEL_FILES)) or any(path.glob("mp_rank_*"))

    def read(self, path: Path, overrides: Overrides) -> Foreign:
        """Reads every rank but the weights' bytes, of which only tied heads are compared.

        Args:
          path: One rank's file or its folder, an iteration's folder, or the folder of all iterations, whose
            tracker file names the one to take. A tokenizer is looked for in it.
          overrides: `num_heads` is needed if the files record no arguments.

        Raises:
          CheckpointError: Ranks or tensors are missing, do not fit together or disagree with the recorded
            arguments, or the model has features that this one has not; it lists them all.
        """
        ranks = read_ranks(path, overrides)
        first = ranks[0][0]
        try:
            shards = gather(ranks)
            tied = _is_tied(shards, first.args.get("untie_embeddings_and_output_weights"))
            if tied:
                shards = {name: parts for name, parts in shards.items() if name not in (_TIED_HEAD, HEAD)}
            _check_features(first)
            tokenizer = tokenizer_json(path if path.is_dir() else path.parent)
            config, notes = _config(first, shards, tied, overrides, tokenizer)
            table = megatron_table(config)
            dtype = stored_dtype({name: parts[0] for name, parts in shards.items()}, table)
            config = dataclasses.replace(config, dtype=dtype)
            check_shards(shards, table, config, len(ranks[0]))
        except CheckpointError as error:
            raise CheckpointError(f"{path}: {error}") from error
        iteration = "no iteration" if first.iteration is None else f"iteration {first.iteration}"
        layout = f"tensor ranks x pipeline stages: {len(ranks[0])} x {len(ranks)}"
        notes.insert(0, f"{layout}; {iteration}; checkpoint_version {first.version:g}")
        if first.others:
            notes.append(f"left out: {', '.join(first.others)}")
        return Foreign(
            format=self.name,
            files=tuple(rank.file for stage in ranks for rank in stage),
            config=config,
            tensors=Whole(shards, first.version, config.num_heads // len(ranks[0]), config.head_dim),
            table=table,
            tokenizer=tokenizer,
            notes=tuple(notes),
        )


def megatron_table(config: ModelConfig) -> dict[str, Source]:
    """Returns where every parameter of `config` lies among the whole tensors, with its heads in order."""
    d, f, v = config.d_model, config.d_ff, config.padded_vocab_size
    n, h = config.num_heads, config.head_dim
    assert f is not None  # set by ModelConfig, and so is the next
    assert v is not None
    table = {
        "embed.tokens": Source(WORDS, (v, d)),
        "embed.positions": Source(_POSITIONS, (config.max_positions, d)),
        "final_norm.scale": Source("final_layernorm.weight", (d,)),
        "final_norm.bias": Source("final_layernorm.bias", (d,)),
    }
    if not config.tie_embeddings:
        table["head.kernel"] = Source(HEAD, (v, d))
    for i in range(config.num_layers):
        at, to = f"layers.{i}.", f"layers.{i}."
        for name, module in (("attention_norm", "input_layernorm"), ("mlp_norm", "post_attention_layernorm")):
            table[f"{to}{name}.scale"] = Source(f"{at}{module}.weight", (d,))
            table[f"{to}{name}.bias"] = Source(f"{at}{module}.bias", (d,))
        qkv = f"{at}self_attention.query_key_value"
        table[f"{to}attention.qkv.kernel"] = Source(f"{qkv}.weight", (3, n, h, d), _inputs_first)
        table[f"{to}attention.qkv.bias"] = Source(f"{qkv}.bias", (3, n, h))
        for name, module, num_out, num_in in (
            ("attention.out", "self_attention.dense", d, d),
            ("mlp.up", "mlp.dense_h_to_4h", f, d),
            ("mlp.down", "mlp.dense_4h_to_h", d, f),
        ):
            table[f"{to}{name}.kernel"] = Source(f"{at}{module}.weight", (num_out, num_in), transpose)
            table[f"{to}{name}.bias"] = Source(f"{at}{module}.bias", (num_out,))
    return table


def _inputs_first(x: np.ndarray) -> np.ndarray:
    """Returns a view of a kernel stored [..., in] as [in, ...]."""
    return np.moveaxis(x, -1, 0)


def _is_tied(shards: Shards, untied: Any) -> bool:
    """Returns whether the head is the embedding.

    A pipeline's last stage has its own copy of a tied embedding. If no argument says whether the head is
    tied, it is if there is no head or if it is equal.
    """
    if untied:
        return False
    words = shards.get(WORDS, ())
    for name in (_TIED_HEAD, HEAD):
        pairs = zip(shards.get(name, ()), words, strict=False)
        if all(same_bits(head, part) for head, part in pairs):
            continue
        if name == HEAD and untied is None:
            return False
        raise CheckpointError(f"the head is tied, but {name} differs from {WORDS}")
    return True


def _check_features(rank: Rank) -> None:
    """Raises if the arguments ask for what the model here has not."""
    args = rank.args
    problems = [
        f"{name} is {args[name]!r}" + (f", not {allowed[0]!r}" if allowed else "")
        for name, allowed in _ONLY.items()
        if args.get(name) is not None and args[name] not in allowed
    ]
    width, heads, hidden = (args.get(k) for k in ("kv_channels", "num_attention_heads", "hidden_size"))
    if width is not None and heads is not None and hidden not in (None, width * heads):
        problems.append(f"kv_channels is {width}, not hidden_size / num_attention_heads")
    if rank.is_core and rank.version < 2:
        problems.append(f"checkpoint_version is {rank.version:g}, but Megatron-core's begin at 2")
    if problems:
        raise CheckpointError(listed("this model has features that are not supported", problems))


def _config(
    rank: Rank, shards: Shards, tied: bool, overrides: Overrides, tokenizer: str | None
) -> tuple[ModelConfig, list[str]]:
    """Returns the config, and notes on what was assumed or overridden."""
    sizes = _sizes(shards)
    problems = [
        f"{arg} is {rank.args[arg]}, but the tensors have {sizes[field]}"
        for arg, field in _SIZES.items()
        if rank.args.get(arg) is not None and rank.args[arg] != sizes[field]
    ]
    if problems:
        raise CheckpointError(listed("the recorded arguments are of another model", problems))
    notes: list[str] = []

    def choose(name: str, given: Any, recorded: Any, default: Any, note: str) -> Any:
        if given is None and recorded is None:
            notes.append(f"nothing records {name}: {note}")
            return default
        if None not in (given, recorded) and given != recorded:
            notes.append(f"{name} {given} was given; the checkpoint says {recorded}")
        return recorded if given is None else given

    args, rows = rank.args, sizes["padded_vocab_size"]
    num_heads = args.get("num_attention_heads")
    if overrides.num_heads is None and num_heads is None:
        raise CheckpointError("no tensor tells the number of heads, and no args are recorded; give num_heads")
    epsilon = args.get("layernorm_epsilon", args.get("norm_epsilon"))
    num_ids, end_of_text = (None, None) if tokenizer is None else _vocabulary(tokenizer)
    padding = f"all {rows} rows are taken to be tokens; if some are padding, give it"
    fields = {
        "vocab_size": choose("vocab_size", overrides.vocab_size, num_ids, rows, padding),
        "num_heads": choose("num_heads", overrides.num_heads, num_heads, None, ""),
        "activation": choose(
            "activation", overrides.activation, _activation(rank), "gelu_tanh", "gelu_tanh is the default"
        ),
        "norm_epsilon": choose("norm_epsilon", overrides.norm_epsilon, epsilon, 1e-5, "1e-5 is the default"),
        "eos_token_id": choose("eos_token_id", overrides.eos_token_id, end_of_text, None, "there is none"),
    }
    return ModelConfig(**sizes, **fields, tie_embeddings=tied), notes


def _sizes(shards: Shards) -> dict[str, Any]:
    """Returns what the shapes tell, as fields of `ModelConfig`."""
    up = "layers.0.mlp.dense_h_to_4h.weight"
    for name in (WORDS, _POSITIONS, up):
        if not (parts := shards.get(name)) or not all(part.ndim == 2 and part.size for part in parts):
            raise CheckpointError(f"is not a GPT of Megatron-LM: it needs a matrix {name!r}")
    return {
        "padded_vocab_size": sum(part.shape[0] for part in shards[WORDS]),
        "d_model": shards[WORDS][0].shape[1],
        "max_positions": shards[_POSITIONS][0].shape[0],
        "d_ff": sum(part.shape[0] for part in shards[up]),
        "num_layers": len({name.split(".")[1] for name in shards if name.startswith("layers.")}),
    }


def _activation(rank: Rank) -> Activation | None:
    """Returns what the arguments choose, as Megatron's own feed-forward layer does; None if none do."""
    recorded = [rank.args[name] for name in ("bias_gelu_fusion", "openai_gelu") if name in rank.args]
    if not recorded:
        return None
    return "gelu_tanh" if any(recorded) else "gelu_erf"


def _vocabulary(tokenizer: str) -> tuple[int, int | None]:
    """Returns the number of ids of a tokenizer, and the one of end-of-text."""
    library = Tokenizer.from_str(tokenizer)
    return max(library.get_vocab().values(), default=-1) + 1, library.token_to_id(_END_OF_TEXT)
