"""nanoGPT's `ckpt.pt`: a state dict with the arguments of its model.

Facts of the format: kernels lie [out, in]; biases are all there or, with `bias=False`, all absent; the head
is tied and stored twice; GELU is the exact one, which early versions computed in its tanh form; a mask
`attn.bias` is stored where PyTorch had no fused attention. By default the vocabulary is GPT-2's, padded to
50,304. `meta.pkl` is what nanoGPT's character-level data sets put beside their text.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

from jorca.checkpoint.errors import CheckpointError
from jorca.checkpoint.foreign import Foreign, Overrides
from jorca.checkpoint.gpt2 import GPT2_EOS, GPT2_VOCAB_SIZE, Recorded, gpt2_foreign
from jorca.checkpoint.pytorch import is_pytorch_file, read_pickle, read_pytorch
from jorca.checkpoint.tensors import state_dict
from jorca.checkpoint.tokenizer_files import tokenizer_json

_FILE: Final = "ckpt.pt"
_META: Final = "meta.pkl"
_PADDED_GPT2: Final = 50304
_PARTS: Final = ("model", "model_args")


class NanoGPT:
    """A checkpoint of nanoGPT's training script."""

    name = "nanogpt"

    def recognises(self, path: Path) -> bool:
        """Returns whether the folder has a ckpt.pt, or the file holds nanoGPT's parts."""
        if path.is_dir():
            return (path / _FILE).is_file()
        if not is_pytorch_file(path):
            return False
        try:
            saved = read_pytorch(path)
        except CheckpointError:
            return False
        return isinstance(saved, dict) and saved.keys() >= set(_PARTS)

    def read(self, path: Path, overrides: Overrides) -> Foreign:
        """Reads `ckpt.pt`, or the file that is given."""
        file = path / _FILE if path.is_dir() else path
        saved = read_pytorch(file)
        if not isinstance(saved, dict) or not saved.keys() >= set(_PARTS):
            raise CheckpointError(f"{file}: is not nanoGPT's; it must hold a dict with model and model_args")
        tensors, arguments = (state_dict(saved[part], file) for part in _PARTS)
        settings = overrides.renamed(arguments)
        notes: list[str] = []
        files, tokenizer, fields = (
            [file],
            tokenizer_json(file.parent),
            _vocabulary(settings, overrides, notes),
        )
        if (meta := file.with_name(_META)).exists():
            files.append(meta)
            vocab_size, characters = _read_meta(meta, notes)
            tokenizer = characters if tokenizer is None else tokenizer
            fields = {"vocab_size": vocab_size}
        if overrides.activation is None:
            notes.append(
                "activation is the exact GELU, as in nanoGPT today; if an early version trained this, "
                "say gelu_tanh"
            )
        return gpt2_foreign(
            tensors,
            Recorded(
                where="model_args",
                settings=settings,
                use_bias=settings.get("bias"),
                tie_embeddings=True,
                fields={"activation": "gelu_erf", **fields},
            ),
            overrides,
            format=self.name,
            path=file,
            files=files,
            out_in=True,
            tokenizer=tokenizer,
            notes=notes,
        )


def _vocabulary(settings: Mapping[str, Any], overrides: Overrides, notes: list[str]) -> dict[str, Any]:
    """Returns what the size of the vocabulary tells: GPT-2's is known by it."""
    vocab_size = settings.get("vocab_size")
    if vocab_size not in (GPT2_VOCAB_SIZE, _PADDED_GPT2) or overrides.vocab_size is not None:
        return {}
    notes.append(
        f"the vocabulary of {vocab_size} is taken for GPT-2's {GPT2_VOCAB_SIZE} tokens, of which {GPT2_EOS} "
        "ends a text"
    )
    return {"vocab_size": GPT2_VOCAB_SIZE, "eos_token_id": GPT2_EOS}


def _read_meta(path: Path, notes: list[str]) -> tuple[int, str | None]:
    """Returns the number of tokens in meta.pkl, and a tokenizer if each of them is a character."""
    meta = read_pickle(path)
    itos = meta.get("itos") if isinstance(meta, dict) else None
    if not isinstance(itos, dict) or set(itos) != set(range(len(itos))):
        raise CheckpointError(f"{path}: is not nanoGPT's meta.pkl, which has a dict itos from ids to tokens")
    vocab = {
        token: token_id for token_id, token in itos.items() if isinstance(token, str) and len(token) == 1
    }
    if len(vocab) != len(itos):
        notes.append(f"{path.name} has tokens that are no characters, so it makes no tokenizer")
        return len(itos), None
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))  # which is none of them: it is refused
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    notes.append(f"the tokenizer is made from the {len(vocab)} characters of {path.name}")
    return len(itos), tokenizer.to_str()
