# SPDX-License-Identifier: Apache-2.0
"""Text for ``examples/serve``: tokenizers, example prompts, and printing of generated text while it is generated."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Callable, Protocol, Sequence


class Tokenizer(Protocol):
    def encode(self, text: str) -> list[int]: ...

    def decode(self, tokens: list[int]) -> str: ...


class ByteTokenizer:
    """Tokenizer whose tokens are bytes of UTF-8. A random model mostly generates invalid text, printed as dots."""

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, tokens: list[int]) -> str:
        return "".join(c if c.isprintable() and c != "\ufffd" else "·" for c in bytes(tokens).decode(errors="replace"))


class CheckpointTokenizer:
    """Tokenizer from the tokenizer.json of a checkpoint. Needs the package ``tokenizers``, as ``transformers`` does."""

    def __init__(self, folder: Path) -> None:
        import tokenizers

        path = folder / "tokenizer.json"
        if not path.is_file():
            raise ValueError(f"{folder}: has no tokenizer.json, expected the tokenizer there")
        try:
            self._tokenizer = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the package raises plain Exception
            raise ValueError(f"{path}: cannot be read: {error}") from error

    def encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text).ids

    def decode(self, tokens: list[int]) -> str:
        return self._tokenizer.decode(tokens)


class TextStream:
    """Printer of text while it is generated: one line whenever a request has ``width`` more characters or is done."""

    def __init__(
        self, now: Callable[[], float], tokenizer: Tokenizer, requests: Sequence[Any], width: int = 20
    ) -> None:
        self.now, self.tokenizer, self.width = now, tokenizer, width
        self.number = {id(request): i for i, request in enumerate(requests)}
        self.printed = [0] * len(requests)

    def __call__(self, request: Any) -> None:
        number, done = self.number[id(request)], request.finished_at is not None
        text = self.tokenizer.decode(request.output)
        piece = text[self.printed[number] :]
        incomplete = len(piece) < self.width or piece.endswith("\ufffd")  # a character may have more bytes to come
        if incomplete and not done:
            return
        self.printed[number] = len(text)
        end = f"  [{len(request.output)} tokens]" if done else ""
        print(f"{self.now():7.3f} s  #{number:<3} {piece!r}{end}", flush=True)


PROMPTS = [
    "The cache is cut into pages, and a request",
    "Once upon a time there was a kernel that",
    "def attention(q, k, v):\n    ",
    "To be, or not to be, that is",
    "A queue of prompts arrives over time; some are short. Others go on for a while, so that reading them takes longer "
    "than a single decode step, and the engine may cut them into pieces. This is one of the others: it is there to",
    "1, 1, 2, 3, 5, 8, 13,",
]
