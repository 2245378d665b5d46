"""Tokenizer files of other programs as the text of one `tokenizer.json`.

GPT-2's byte-level BPE comes in two files: ids by token and merges in order. OpenAI calls them `encoder.json`
and `vocab.bpe`, Hugging Face `vocab.json` and `merges.txt`, and says more about special tokens in up to three
others. What they mean is the `tokenizers` library's business; here they are found and put together.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, Final

from tokenizers import AddedToken, Tokenizer, processors
from tokenizers.implementations.byte_level_bpe import ByteLevelBPETokenizer

from jorca.checkpoint.errors import CheckpointError
from jorca.checkpoint.tensors import read_json

_PAIRS: Final = (("vocab.json", "merges.txt"), ("encoder.json", "vocab.bpe"))
_CLASSES: Final = ("GPT2Tokenizer", "GPT2TokenizerFast")
_ROLES: Final = tuple(f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))
_END_OF_TEXT: Final = "<|endoftext|>"


def tokenizer_json(path: str | Path) -> str | None:
    """Returns a checkpoint's tokenizer in the format of the `tokenizers` library.

    Args:
      path: A file in that format, or a folder. In a folder the first of these counts: `tokenizer.json`;
        `vocab.json` with `merges.txt`; `encoder.json` with `vocab.bpe`. The pairs are read as GPT-2's
        byte-level BPE; special tokens, `add_prefix_space` and `add_bos_token` come from
        `tokenizer_config.json`, `special_tokens_map.json` and `added_tokens.json` where those are there.

    Returns:
      The text of a `tokenizer.json`, or None if the folder has no tokenizer.

    Raises:
      CheckpointError: A file is missing, unreadable, or at odds with another; the message names it.
    """
    path = Path(path)
    if not path.is_dir():
        return _checked(path)
    if (path / "tokenizer.json").exists():
        return _checked(path / "tokenizer.json")
    for names in _PAIRS:
        there = [name for name in names if (path / name).exists()]
        if len(there) == 1:
            (missing,) = set(names) - set(there)
            raise CheckpointError(f"{path}: has {there[0]} but no {missing}; a tokenizer needs both")
        if there:
            return _from_pair(path / names[0], path / names[1]).to_str()
    return None


def _checked(file: Path) -> str:
    """Returns the text of a file if the library can read it."""
    try:
        text = file.read_text(encoding="utf-8")
        Tokenizer.from_str(text)
    except Exception as error:  # the library raises nothing narrower
        raise CheckpointError(f"{file}: cannot be read as a tokenizer.json ({error})") from error
    return text


def _from_pair(vocab: Path, merges: Path) -> ByteLevelBPETokenizer:
    """Returns the tokenizer of two files and of what lies beside them."""
    folder = vocab.parent
    settings = _optional(folder / "tokenizer_config.json")
    kind = settings.get("tokenizer_class", _CLASSES[0])
    if kind not in _CLASSES:
        raise CheckpointError(
            f"{folder}: {vocab.name} is read as GPT-2's byte-level BPE, but tokenizer_config.json says "
            f"tokenizer_class {kind!r}; put a tokenizer.json there"
        )
    _check_vocab(vocab)
    try:
        tokenizer = ByteLevelBPETokenizer.from_file(
            str(vocab), str(merges), add_prefix_space=settings.get("add_prefix_space", False)
        )
    except Exception as error:  # the library raises nothing narrower
        raise CheckpointError(
            f"{vocab} and {merges.name}: cannot be read as a tokenizer ({error})"
        ) from error
    try:
        _add_tokens(tokenizer, folder, settings)
        if settings.get("add_bos_token"):
            bos = _token(settings.get("bos_token") or _END_OF_TEXT).content
            tokenizer.post_processor = processors.TemplateProcessing(
                single=[bos, "$A"], special_tokens=[(bos, tokenizer.token_to_id(bos))]
            )
    except CheckpointError:
        raise
    except Exception as error:  # wrong types, and what the library says of them
        raise CheckpointError(
            f"{folder}: the special tokens beside {vocab.name} are malformed ({error})"
        ) from error
    return tokenizer


def _check_vocab(file: Path) -> None:
    """Raises unless the file maps tokens to ids, each id once: the library skips what is no number."""
    ids = list(read_json(file).values())
    if not ids or not all(type(i) is int and i >= 0 for i in ids):
        raise CheckpointError(f"{file}: must map tokens to ids, which are integers of at least 0")
    if len(set(ids)) < len(ids):
        raise CheckpointError(f"{file}: gives {len(ids)} tokens only {len(set(ids))} different ids")


def _add_tokens(tokenizer: ByteLevelBPETokenizer, folder: Path, settings: dict[str, Any]) -> None:
    """Adds the tokens that are never split, each under the id that the files give it."""
    roles = _optional(folder / "special_tokens_map.json") | settings
    tokens: dict[str, AddedToken] = {}
    ids: dict[str, int] = {}
    for token_id, fields in settings.get("added_tokens_decoder", {}).items():
        token = _token(fields)
        tokens[token.content], ids[token.content] = token, int(token_id)
    named = [roles[role] for role in _ROLES if roles.get(role) is not None]
    for value in [*named, *(roles.get("additional_special_tokens") or ())]:
        token = _token(value)
        tokens.setdefault(token.content, token)
    for content, token_id in _optional(folder / "added_tokens.json").items():
        tokens.setdefault(content, AddedToken(content, special=False))
        ids[content] = token_id
    if tokenizer.token_to_id(_END_OF_TEXT) is not None:
        tokens.setdefault(_END_OF_TEXT, _token(_END_OF_TEXT))
    # New ones get the next free ids, so those that say theirs come first and in order.
    for content in sorted(tokens, key=lambda content: ids.get(content, math.inf)):
        tokenizer.add_tokens([tokens[content]])
        got = tokenizer.token_to_id(content)
        if ids.get(content, got) != got:
            raise CheckpointError(
                f"{folder}: the added token {content!r} should have id {ids[content]}, but the vocabulary "
                f"makes it {got}"
            )


def _token(value: str | dict[str, Any]) -> AddedToken:
    """Returns a special token that is given by its text, or by its fields."""
    if isinstance(value, str):
        return AddedToken(value, special=True, normalized=False)
    flags = ("single_word", "lstrip", "rstrip", "normalized")
    return AddedToken(
        value["content"],
        special=value.get("special", True),
        **{flag: value.get(flag, False) for flag in flags},
    )


def _optional(file: Path) -> dict[str, Any]:
    """Returns the JSON object in a file, {} if there is no such file."""
    return read_json(file) if file.exists() else {}
