"""Text in, text out: the tokenizer, detokenising a stream of tokens, stop strings in a stream of text."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

import tokenizers
from tokenizers import decoders

from jorca.request import JorcaError, RequestRejected

_REPLACEMENT: Final = "\N{REPLACEMENT CHARACTER}"
_MAX_UTF8_BYTES: Final = 4


class Tokenizer:
    """A `tokenizers.Tokenizer` that neither cuts, pads nor drops anything in silence.

    Threads may share one: it is set up here and only read afterwards.
    """

    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        """Takes a private copy of `tokenizer`, with truncation and padding switched off."""
        self._tokenizer = tokenizers.Tokenizer.from_str(tokenizer.to_str())
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._is_byte_level = isinstance(self._tokenizer.decoder, decoders.ByteLevel)
        own = self._tokenizer.get_vocab(with_added_tokens=False)
        added = self._tokenizer.get_added_tokens_decoder()
        self._added_bytes = {i: t.content.encode("utf-8") for i, t in added.items() if t.content not in own}

    @classmethod
    def from_file(cls, path: str | Path) -> Tokenizer:
        """Reads a `tokenizer.json`.

        Raises:
          JorcaError: The file is missing or not a tokenizer.
        """
        try:
            return cls(tokenizers.Tokenizer.from_file(str(path)))
        except Exception as error:  # the library raises nothing narrower
            raise JorcaError(f"{path}: cannot be read as a tokenizer ({error})") from error

    @classmethod
    def from_checkpoint(cls, path: str | Path) -> Tokenizer | None:
        """Reads the tokenizer in a checkpoint's folder; None if the checkpoint has none."""
        file = Path(path) / "tokenizer.json"
        return cls.from_file(file) if file.exists() else None

    @property
    def vocab_size(self) -> int:
        """Number of ids, added tokens included."""
        return self._tokenizer.get_vocab_size()

    def encode(self, text: str) -> tuple[int, ...]:
        """Returns the ids of `text`; special tokens written out in it count as those tokens.

        Raises:
          RequestRejected: Part of the text has no token, and the tokenizer has none for the unknown.
        """
        try:
            encoding = self._tokenizer.encode(text)
        except Exception as error:  # the library raises nothing narrower
            raise self._rejection(text, str(error)) from error
        if not self._is_complete(text, encoding):
            raise self._rejection(text, "characters are missing from the vocabulary")
        return tuple(encoding.ids)

    def decode(self, ids: Sequence[int]) -> str:
        """Returns the text of `ids`, special tokens included. Ids without a token add nothing."""
        if self._is_byte_level:  # not by the library, which takes the letters of added tokens for bytes
            return b"".join(self.token_bytes(i) or b"" for i in ids).decode("utf-8", errors="replace")
        return self._tokenizer.decode(list(ids), skip_special_tokens=False)

    def token_bytes(self, token_id: int) -> bytes | None:
        """Returns what a token adds to the text, or None when that depends on the tokens around it.

        Byte-level BPE (GPT-2's kind) has such bytes; they need not be whole characters.
        """
        if not self._is_byte_level:
            return None
        if token_id in self._added_bytes:
            return self._added_bytes[token_id]
        token = self._tokenizer.id_to_token(token_id) or ""
        try:
            return bytes(_BYTE_OF_CHAR[char] for char in token)
        except KeyError:  # not made of bytes, so it stands for itself
            return token.encode("utf-8")

    def _is_complete(self, text: str, encoding: tokenizers.Encoding) -> bool:
        """Returns whether all of `text` has tokens: BPE drops characters that its vocabulary lacks."""
        covered = bytearray(len(text))
        for start, end in encoding.offsets:
            covered[start:end] = b"\x01" * (end - start)
        # Pre-tokenizers may drop white space on purpose.
        may_drop_space = self._tokenizer.pre_tokenizer is not None
        return all(seen or (may_drop_space and text[i].isspace()) for i, seen in enumerate(covered))

    def _rejection(self, text: str, reason: str) -> RequestRejected:
        # Offsets slip after a dropped character, so the unknown ones are looked for one by one.
        unknown = [char for char in dict.fromkeys(text) if not self._knows(char)]
        if not unknown:
            return RequestRejected(f"prompt cannot be tokenized ({reason}): {_shorten(text)}")
        return RequestRejected(
            f"prompt has characters that the tokenizer does not know: {', '.join(map(repr, unknown[:10]))}; "
            f"remove them: {_shorten(text)}"
        )

    def _knows(self, char: str) -> bool:
        try:
            return bool(self._tokenizer.encode(char).ids)
        except Exception:  # the library raises nothing narrower
            return False


class TextStream:
    """Turns the tokens of one request into text as they come.

    The pieces, joined, are `Tokenizer.decode` of all ids. A character comes when it is whole, and bytes
    that are no character come as U+FFFD as soon as that is certain. Byte-level tokenizers are followed
    byte by byte; for others the text of a token is what it adds to the text of the tokens before it.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._context: list[int] = []
        self._pending: list[int] = []

    def feed(self, ids: Iterable[int]) -> str:
        """Takes the next tokens and returns the text that is certain now, "" if there is none."""
        return "".join(self._feed_one(token_id) for token_id in ids)

    def finish(self) -> str:
        """Returns what was held back; a character cut in its middle becomes U+FFFD."""
        return self._utf8.decode(b"", final=True) + self._release(hold=False)

    def _feed_one(self, token_id: int) -> str:
        data = self._tokenizer.token_bytes(token_id)
        if data is not None:
            return self._utf8.decode(data)
        self._pending.append(token_id)
        return self._release(hold=len(self._pending) < _MAX_UTF8_BYTES)

    def _release(self, hold: bool) -> str:
        """Returns what the pending tokens add to their context; "" if that may be half a character."""
        before = self._tokenizer.decode(self._context)
        after = self._tokenizer.decode(self._context + self._pending)
        if hold and (after.endswith(_REPLACEMENT) or len(after) <= len(before)):
            return ""
        if len(after) > len(before):
            self._context = self._pending
        self._pending = []
        return after[len(before) :]


class StopMatcher:
    """Looks for stop strings in text that comes in pieces, wherever the pieces are cut.

    The occurrence that ends first wins, since generation would not have gone further; of several that end
    at the same character the longest, so that no part of a stop string is left standing. How the text is cut
    into pieces makes no difference.
    """

    def __init__(self, stop: Sequence[str]) -> None:
        """Takes the stop strings, none of them empty; with none at all, text passes through."""
        if not all(stop):
            raise ValueError("stop strings must not be empty; leave stop empty to stop at none")
        self._stop = tuple(stop)
        self._held = ""
        self.matched: str | None = None

    def feed(self, text: str) -> str:
        """Takes the next piece and returns what can go out now.

        What could still become a stop string is held back. Once `matched` is set, the text before the
        match has been returned, and whatever follows is dropped.
        """
        if self.matched is not None:
            return ""
        text = self._held + text
        found = [(at + len(s), -len(s), s) for s in self._stop if (at := text.find(s)) >= 0]
        if found:
            end, _, self.matched = min(found)
            self._held = ""
            return text[: end - len(self.matched)]
        num_held = max((_overlap(text, s) for s in self._stop), default=0)
        self._held = text[len(text) - num_held :]
        return text[: len(text) - num_held]

    def flush(self) -> str:
        """Returns what is still held back, at the end of a request."""
        text, self._held = self._held, ""
        return text


def _overlap(text: str, stop: str) -> int:
    """Returns the length of the longest end of `text` with which `stop` begins, short of all of it."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)


def _shorten(text: str, max_chars: int = 60) -> str:
    return repr(text if len(text) <= max_chars else text[:max_chars] + "...")


def _byte_of_char() -> dict[str, int]:
    """Returns the alphabet of byte-level BPE: the byte behind each character of a token (GPT-2).

    Printable characters of Latin-1 stand for themselves; the other bytes, in order, are 256 and up.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}


_BYTE_OF_CHAR: Final = _byte_of_char()
