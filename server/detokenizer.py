"""Token ids to text while they arrive, and where a stop string ends it.

Works on bytes: each token adds some, and UTF-8 says when a character is whole. So it never decodes a
token twice, and text never changes once given out. Knows nothing of requests or protobuf.
"""

import codecs
import json
import re
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from headway.engine.errors import ModelLoadError
from headway.server.stop_strings import StopFinder

MAX_PROMPT_TAIL = 4
"""A UTF-8 character has four bytes at most, so no more tokens than these can share one."""


class TokenBytes:
    """What each token of a vocabulary adds to a text.

    Two kinds of tokenizer are read: byte-level ones (GPT-2, Llama 3, Qwen, SmolLM2), whose pieces spell
    bytes in a printable alphabet, and SentencePiece ones (Llama 2, Gemma), whose pieces are text
    with U+2581 for a space and <0x0A> for a byte.
    Example: byte-level piece U+0120 "a" is b" a"; SentencePiece's "<0xE2>" is b"\\xe2".
    """

    def __init__(self, tokenizer: Any) -> None:
        """Read a transformers tokenizer; ModelLoadError when it decodes in neither way."""
        self._tokenizer = tokenizer
        self._added = dict(tokenizer.added_tokens_decoder)
        self._special = {i for i, token in self._added.items() if token.special}
        self._num_tokens = len(tokenizer)
        self._byte_level = _is_byte_level(tokenizer)
        self._known: dict[int, bytes] = {}

    def is_special(self, token_id: int) -> bool:
        """Tell a mark such as <|im_end|> from text."""
        return token_id in self._special

    def __getitem__(self, token_id: int) -> bytes:
        """Return the token's bytes; none for an id without a piece, as padded vocabularies have."""
        if not 0 <= token_id < self._num_tokens:
            return b""  # not kept: clients may send any number of these
        if token_id not in self._known:
            self._known[token_id] = self._read(token_id)
        return self._known[token_id]

    def _read(self, token_id: int) -> bytes:
        if token_id in self._added:
            return str(self._added[token_id].content).encode()
        piece: str | None = self._tokenizer.convert_ids_to_tokens(token_id)
        if piece is None:
            return b""
        if self._byte_level:
            return bytes(_BYTE_OF_CHAR[char] for char in piece)
        if re.fullmatch("<0x[0-9A-F]{2}>", piece):
            return bytes([int(piece[3:5], 16)])
        return piece.replace("\u2581", " ").encode()


@dataclass(frozen=True, slots=True)
class Piece:
    """Text that is settled, and how many of the oldest tokens not yet given out it completes."""

    text: str
    num_tokens: int


class Detokenizer:
    """The text of one answer as its tokens arrive.

    Invalid UTF-8 becomes U+FFFD as soon as it cannot become valid any more, by Unicode's rule of maximal
    subparts. Where the prompt ends within a character, its missing bytes complete it and the
    character belongs to the answer; nothing else of the prompt does.
    """

    def __init__(
        self,
        token_bytes: TokenBytes,
        prompt_ids: Sequence[int] = (),
        *,
        stop_strings: Sequence[str] = (),
        include_stop: bool = False,
        skip_special_tokens: bool = True,
        min_new_tokens: int = 0,
    ) -> None:
        self._bytes = token_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._prompt_tail = self._open_character(prompt_ids)
        self._stops = StopFinder(stop_strings)
        self._include_stop = include_stop
        self._skip_special_tokens = skip_special_tokens
        self._min_new_tokens = min_new_tokens
        self._held = ""  # decoded, not given out
        self._num_decoded = 0  # characters
        self._ends: deque[int] = deque()  # for each token not given out, the characters it needs
        self.num_tokens = 0
        """Tokens read, up to and including the one that completed a stop string."""
        self.stop_string: str | None = None
        """The stop string that ended the text; what is pushed afterwards is ignored."""

    def push(self, token_ids: Iterable[int], *, hidden: bool = False) -> Piece:
        """Read tokens and return what they settle; a hidden one counts but adds no text."""
        for token_id in token_ids:
            if self.stop_string is None:
                self._read(b"" if hidden else self._visible_bytes(token_id))
        num_held = 0 if self.stop_string is not None else self._stops.num_held
        return self._give_out(num_held)

    def finish(self) -> Piece:
        """Return all that was held back; a character that stayed incomplete is U+FFFD."""
        if self.stop_string is None and not self._prompt_tail:
            self._append(self._decoder.decode(b"", final=True))
        self._ends = deque(0 for _ in self._ends)
        return self._give_out(0)

    def _read(self, data: bytes) -> None:
        self.num_tokens += 1
        if data and self._prompt_tail:
            self._close_prompt(data)
        self._append(self._decoder.decode(data))
        is_whole = not self._decoder.getstate()[0]
        self._ends.append(self._num_decoded + (0 if is_whole else 1))

    def _append(self, text: str) -> None:
        match = self._stops.feed(text, armed=self.num_tokens >= self._min_new_tokens)
        if match is not None:
            end, self.stop_string = match
            text = text[:end]
        self._num_decoded += len(text)
        self._held += text
        if self.stop_string is not None and not self._include_stop:
            self._held = self._held[: len(self._held) - len(self.stop_string)]

    def _give_out(self, num_held: int) -> Piece:
        cut = len(self._held) - num_held
        text, self._held = self._held[:cut], self._held[cut:]
        given = self._num_decoded - len(self._held)
        num_tokens = 0
        while self._ends and (self._ends[0] <= given or self.stop_string is not None):
            self._ends.popleft()
            num_tokens += 1
        return Piece(text, num_tokens)

    def _visible_bytes(self, token_id: int) -> bytes:
        if self._skip_special_tokens and self._bytes.is_special(token_id):
            return b""
        return self._bytes[token_id]

    def _open_character(self, prompt_ids: Sequence[int]) -> bytes:
        """Leave the decoder within the prompt's last character and return the bytes it has of it."""
        self._decoder.decode(b"".join(self._bytes[i] for i in prompt_ids[-MAX_PROMPT_TAIL:]))
        return self._decoder.getstate()[0]

    def _close_prompt(self, data: bytes) -> None:
        """Forget the prompt's open character when the answer does not go on with it."""
        strict = codecs.getincrementaldecoder("utf-8")("strict")
        try:
            strict.decode(self._prompt_tail + data[:1])
        except UnicodeDecodeError:
            self._decoder.reset()
        self._prompt_tail = b""


def _is_byte_level(tokenizer: Any) -> bool:
    decoder = tokenizer.backend_tokenizer.decoder
    tree = json.loads(decoder.__getstate__()) if decoder is not None else {"type": None}
    kinds = {part["type"] for part in tree.get("decoders", [tree])}
    if "ByteLevel" in kinds:
        return True
    if "ByteFallback" in kinds or "Metaspace" in kinds:
        return False
    raise ModelLoadError(
        f"the tokenizer decodes by {sorted(map(str, kinds))}; Headway streams text from byte-level "
        "and SentencePiece tokenizers. Serve a model that has one of these."
    )


def _byte_alphabet() -> dict[str, int]:
    """Return GPT-2's printable alphabet: visible Latin-1 stands for itself, the rest from U+0100 on."""
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in visible]
    return {chr(b): b for b in visible} | {chr(0x100 + i): b for i, b in enumerate(hidden)}


_BYTE_OF_CHAR = _byte_alphabet()
