"""SentencePiece's normalisation (tokenizer.ggml.precompiled_charsmap): what text is replaced by what.

    4 bytes: size of the trie | trie: uint32 units of a double array (github.com/s-yata/darts-clone) |
    replacements, UTF-8, each with a 0 behind it

A unit of the trie: bits 0 to 7 the byte that leads to it, bit 8 whether a key ends here, bit 9 whether the
offset counts in 256s, bits 10 to 30 the offset, by exclusive or, to its children; or, with bit 31, a value:
where a replacement begins. A file is hostile: a step that leads out of the trie is as one that is not there.
"""

from __future__ import annotations

import numpy as np

from hotset.errors import TokenizerError

_ENDS, _IS_VALUE = 1 << 8, 1 << 31
_REMEMBERED = 1 << 16  # steps
_LONGEST = 256  # bytes of a replacement; nmt_nfkc has up to 33
_NOWHERE = -1


class CharsMap:
    """Replaces each longest key of a table in a text, from left to right, as SentencePiece does."""

    def __init__(self, blob: bytes) -> None:
        """Raises TokenizerError for a blob that is damaged; an empty one changes nothing."""
        n_bytes = int.from_bytes(blob[:4], "little")
        if blob and (len(blob) < 8 or n_bytes % 4 or not 4 <= n_bytes <= len(blob) - 4):
            raise TokenizerError(
                "The file's tokenizer.ggml.precompiled_charsmap is damaged: fetch or convert it again."
            )
        self._units: list[int] = np.frombuffer(blob[4 : 4 + n_bytes], "<u4").tolist()
        self._replacements = blob[4 + n_bytes :]
        # From a node by a character to the next one, and what replaces the key that ends there.
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
        """The node that a character leads to, and what replaces the key that ends there."""
        at = node
        for byte in character.encode():
            at = self._child(at, byte) if byte else _NOWHERE
            if at == _NOWHERE:
                break
        found = None
        if at != _NOWHERE and self._units[at] & _ENDS:
            found = self._replacement(at ^ self._offset(at))
        if len(self._steps) >= _REMEMBERED:
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
        """None where it is no text, or too long for one."""
        if value >= len(self._units):
            return None
        start = self._units[value] & (_IS_VALUE - 1)
        end = self._replacements.find(b"\0", start, start + _LONGEST)
        try:
            return None if end < 0 else self._replacements[start:end].decode()
        except UnicodeDecodeError:
            return None
