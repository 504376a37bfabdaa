"""Special tokens in a text: the same parts as with one regular expression of all special tokens."""

from __future__ import annotations

import random
import re

import pytest

from hotset.text import special_tokens
from hotset.text.special_tokens import SpecialTokens

WORDS = ["<", "<|", "<|im", "<|im_end|>", "<|im_end", "  ", "    ", "\n", "ab", "abab", "é🦙", "<unused1>"]


def by_regex(text: str, words: list[str]) -> list[tuple[str, bool]]:
    pattern = "|".join(map(re.escape, sorted(words, key=len, reverse=True)))
    parts = re.split(f"({pattern})", text)
    return [(part, i % 2 == 1) for i, part in enumerate(parts) if part]


@pytest.mark.parametrize("window", [1, 2, 7, 1 << 15])
def test_parts_equal_a_regular_expressions(window: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(special_tokens, "WINDOW", window)
    draw = random.Random(window)
    pieces = [*WORDS, "<", "|", "im", "a", "b", " ", "é", "x"]
    for _ in range(400):
        words = draw.sample(WORDS, draw.randrange(1, len(WORDS)))
        found = SpecialTokens({word: i for i, word in enumerate(words)})
        text = "".join(draw.choice(pieces) for _ in range(draw.randrange(12)))
        parts = list(found.split(text))
        assert [(part, id is not None) for part, id in parts] == by_regex(text, words), (text, words)
        assert all(id is None or words[id] == part for part, id in parts)


def test_without_any_the_text_is_one_part():
    assert list(SpecialTokens({}).split("a<b")) == [("a<b", None)]
    assert list(SpecialTokens({}).split("")) == []


def test_thousands_of_tokens_that_begin_alike_are_told_apart():
    words = {f"<unused{i}>": i for i in range(6000)}
    found = SpecialTokens(words)
    assert list(found.split("<<unused5999><unused6000>")) == [
        ("<", None), ("<unused5999>", 5999), ("<unused6000>", None),
    ]  # fmt: skip
