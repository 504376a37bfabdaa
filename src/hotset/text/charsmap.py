"""SentencePiece's normalisation (tokenizer.ggml.precompiled_charsmap): a table of replacements in text.

    4 bytes: size of the trie | trie: uint32 units of a double array (github.com/s-yata/darts-clone) |
    replacements, UTF-8, each followed by a 0

A unit of the trie has these bits. Bits 0 to 7: the byte that leads to it. Bit 8: a key ends here. Bit 9: the
offset counts in 256s. Bits 10 to 30: the offset to its children, by exclusive or. A unit with bit 31 is a
value: the index at which a replacement begins. The file is not trusted: a step out of the trie finds nothing.
"""

from __future__ import annotations

import numpy as np

from hotset.errors import TokenizerError

_ENDS, _IS_VALUE = 1 << 8, 1 << 31
REMEMBERED = 1 << 16  # steps
_LONGEST = 256  # bytes of a replacement; nmt_nfkc has up to 33
_NOWHERE = -1


class CharsMap:
    """A function that replaces the longest keys of a table in a text, from the left, like SentencePiece."""

    def __init__(self, blob: bytes) -> None:
        """Raise TokenizerError for a damaged blob. An empty blob changes nothing."""
        n_bytes = int.from_bytes(blob[:4], "little")
        if blob and (len(blob) < 8 or n_bytes % 4 or not 4 <= n_bytes <= len(blob) - 4):
            raise TokenizerError(
                "The file's tokenizer.ggml.precompiled_charsmap is damaged: fetch or convert it again."
            )
        self._units: list[int] = np.frombuffer(blob[4 : 4 + n_bytes], "<u4").tolist()
        self._replacements = blob[4 + n_bytes :]
        # (node, character) → (next node, replacement of the key that ends there or None)
        self._steps: dict[tuple[int, str], tuple[int, str | None]] = {}

    def __call__(self, text: str) -> str:
        if not self._units:
            return text
        out, start, n, steps = [], 0, len(text), self._steps
        while start < n:
            node, at, end, replacement = 0, start, start + 1, text[start]
            while at < n:
                step = steps.get((node, text[at]))
                node, found = self._step(node, text[at]) if step is None else step
                if node == _NOWHERE:
                    break
                at += 1
                if found is not None:
                    end, replacement = at, found
            out.append(replacement)
            start = end
        return "".join(out)

    def _step(self, node: int, character: str) -> tuple[int, str | None]:
        """Return the node that a character leads to, and the replacement of the key that ends there."""
        at = node
        for byte in character.encode():
            at = self._child(at, byte) if byte else _NOWHERE
            if at == _NOWHERE:
                break
        found = None
        if at != _NOWHERE and self._units[at] & _ENDS:
            found = self._replacement(at ^ self._offset(at))
        if len(self._steps) >= REMEMBERED:
            self._steps.clear()
        self._steps[node, character] = at, found
        return at, found

    def _offset(self, node: int) -> int:
        unit = self._units[node]
        return (unit >> 10 & (1 << 21) - 1) << ((unit & 1 << 9) >> 6)

    def _child(self, node: int, byte: int) -> int:
        child = node ^ self._offset(node) ^ byte
        is_there = child < len(self._units) and self._units[child] & (_IS_VALUE | 0xFF) == byte
        return child if is_there else _NOWHERE

    def _replacement(self, value: int) -> str | None:
        """Return the replacement of a value; None if it is not UTF-8, too long, or outside the table."""
        if value >= len(self._units):
            return None
        start = self._units[value] & (_IS_VALUE - 1)
        end = self._replacements.find(b"\0", start, start + _LONGEST)
        try:
            return None if end < 0 else self._replacements[start:end].decode()
        except UnicodeDecodeError:
            return None
