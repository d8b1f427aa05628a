# SPDX-License-Identifier: Apache-2.0
"""Task of the model that ``examples/serve`` serves by default: sums of three digits, whose answers can be checked.

``374+528: 12 10 09 -> 902``: the sum of each column from right to left with the carry, then the answer.
"""

from __future__ import annotations

import random
import re
from typing import Any, Callable, Sequence

from serve.text import Tokenizer


def prompt_of(a: int, b: int) -> str:
    return f"{a}+{b}: "


def text_of(a: int, b: int) -> str:
    """Return the prompt and its right answer, up to the line feed that ends it."""
    columns, carry = [], 0
    for power in (1, 10, 100):
        column = a // power % 10 + b // power % 10 + carry
        carry = column // 10
        columns.append(f"{column:02}")
    return f"{prompt_of(a, b)}{' '.join(columns)} -> {a + b}\n"


def draw_prompts(count: int, seed: int) -> list[str]:
    """Draw the prompts of ``count`` sums of two numbers of three digits."""
    numbers = random.Random(seed)
    return [prompt_of(numbers.randint(100, 999), numbers.randint(100, 999)) for _ in range(count)]


def is_right(text: str) -> bool:
    """Return True if a text, prompt and generated answer together, ends with the right sum of the prompt."""
    found = re.fullmatch(r"(\d+)\+(\d+): .* -> (\d+)\n", text)
    return found is not None and int(found[1]) + int(found[2]) == int(found[3])


def count_right(requests: Sequence[Any]) -> int:
    """Return the number of requests whose answer is right."""
    return sum(is_right(bytes(request.tokens).decode(errors="replace")) for request in requests)


class AnswerStream:
    """Printer of sums: one line when an answer is complete, with the verdict."""

    def __init__(self, now: Callable[[], float], tokenizer: Tokenizer, requests: Sequence[Any]) -> None:
        self.now, self.tokenizer = now, tokenizer
        self.number = {id(request): i for i, request in enumerate(requests)}

    def __call__(self, request: Any) -> None:
        if request.finished_at is None:
            return
        text = bytes(request.tokens).decode(errors="replace")
        verdict = "right" if is_right(text) else "wrong"
        shown = self.tokenizer.decode(request.tokens).rstrip("·")  # the line feed is shown as a dot
        print(f"{self.now():7.3f} s  #{self.number[id(request)]:<3} {shown:<27}  {verdict}", flush=True)
