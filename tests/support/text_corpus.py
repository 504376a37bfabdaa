"""Seeded texts for the comparison of two tokenizers: prose, code, many scripts, and odd characters."""

from __future__ import annotations

import random
import unicodedata
from collections.abc import Sequence

_LINE = (
    "the of and to model Tokenizer naïve café Größe façade coöperate don't we'll I'M 3.14 1,000 2026-11-29 "
    "x1 foo_bar camelCase HTTP/2 https://a.b/c?d=e user@host ... -- /* */ // <!-- && || != >= -> :: "
    "Straße Ελλάδα привет мир שלום مرحبا नमस्ते สวัสดี Việt Nam 日本語 テスト 漢字 한국어 각 ქართული 𝒳 Å ﬁ ½ ² "
    "👋 👋🏽 👨‍👩‍👧 🇩🇪 ❤️ \u200b \u00a0 \u2028 \ufeff \u0301 e\u0301 a\u0308 ▁ ▁▁ ▁a"
)
WORDS = tuple(_LINE.split(" "))
SPACES = (
    " ",
    "  ",
    "   ",
    "    ",
    "\t",
    "\n",
    "\n\n",
    "\r\n",
    " \n",
    "\n    ",
    "\n\t\t",
    " " * 40,
    "\n" * 35,
)
CODE = (
    "def f(x):\n    if x:\n        return [i ** 2 for i in range(10)]\n\n\nclass A:\n\tpass\n",
    '{"a": [1, 2.5e3, null],\n  "b": {"c": "\\u00e9"}}',
    "for (int i = 0; i < n; ++i) {\n        a[i] += b[i];  // sum\n    }\n",
    "SELECT *\n  FROM t\n WHERE a = 'b''c'\n   AND d IS NULL;",
)
SCRIPTS = (
    (0x20, 0x7E), (0xA0, 0x24F), (0x300, 0x36F), (0x370, 0x3FF), (0x400, 0x4FF), (0x5D0, 0x5EA),
    (0x620, 0x64A), (0x900, 0x97F), (0xE01, 0xE3A), (0x1100, 0x11FF), (0x1E00, 0x1EF9), (0x2190, 0x21FF),
    (0x3040, 0x30FF), (0x4E00, 0x4FFF), (0xAC00, 0xAD00), (0x1F300, 0x1F64F), (0x00, 0x1F), (0x7F, 0x9F),
)  # fmt: skip


def texts(n: int, added: Sequence[str] = (), seed: int = 1) -> list[str]:
    """Return `n` texts. added: tokens of a vocabulary, which some of the texts contain."""
    draw = random.Random(seed)
    return [_text(draw, added) for _ in range(n)]


def _text(draw: random.Random, added: Sequence[str]) -> str:
    parts: list[str] = []
    for _ in range(draw.randint(1, 12)):
        kind = draw.random()
        if kind < 0.1:
            first, last = draw.choice(SCRIPTS)
            parts.append("".join(chr(draw.randint(first, last)) for _ in range(draw.randint(1, 8))))
        elif kind < 0.2:
            code = draw.choice(CODE)
            begin = draw.randrange(len(code))
            parts.append(code[begin : begin + draw.randint(1, 60)])
        elif kind < 0.25 and added:
            parts.append(draw.choice(added))
        else:
            parts.append(draw.choice(WORDS))
        if draw.random() < 0.8:
            parts.append(draw.choice(SPACES) if draw.random() < 0.4 else " ")
    text = "".join(parts)
    return unicodedata.normalize(draw.choice(("NFC", "NFD")), text) if draw.random() < 0.3 else text
