"""Vocabularies of Hugging Face checkpoints in tiktoken's form: lines of a token in base64 and its rank.

tiktoken merges the neighbours whose union has the lowest rank; GGUF has merges, each of one pair. A token is
only ever made of one pair: until two neighbours become it, the merges within its bytes are those that the
bytes alone would have. So the pairs found here, in the order of ranks, give tiktoken's tokens for any ranks.
"""

from __future__ import annotations

import base64
from dataclasses import dataclass
from pathlib import Path

from hotset.errors import FormatError
from hotset.files import read_small_file

_MOST_WORK = 1 << 30  # sum of the squares of the tokens' lengths: about 20 s. Qwen's: 9 million


@dataclass(frozen=True)
class TiktokenClass:
    """What only the code of a checkpoint's tokenizer class says.

    name: tokenizer_class of tokenizer_config.json.
    pre: the name that GGUF files give to the way it splits texts.
    special: texts of the special tokens behind the ranks; {} is the id.
    numbered: false where ranks are not read, and lines with a token again are skipped.
    """

    name: str
    pre: str
    special: tuple[str, ...]
    numbered: bool = True


_EXTRA = tuple(f"<|extra_{i}|>" for i in range(205))
_HUNYUAN = ("<|endoftext|>", "<|startoftext|>", "<|bos|>", "<|eos|>", "<|pad|>", *_EXTRA)

TIKTOKEN_CLASSES = {
    "tiktoken.model": TiktokenClass("TikTokenTokenizer", "kimi-k2", ("<|reserved_token_{}|>",) * 256),
    "qwen.tiktoken": TiktokenClass(
        "QWenTokenizer", "qwen2", ("<|endoftext|>", "<|im_start|>", "<|im_end|>", *_EXTRA)
    ),
    "hy.tiktoken": TiktokenClass("HYTokenizer", "hunyuan", _HUNYUAN, numbered=False),
}
"""File of a checkpoint → its tokenizer."""


def read_ranks(path: Path, most: int, numbered: bool) -> dict[bytes, int]:
    """Token → rank, in the order of ranks 0, 1, 2, ... Raises FormatError.

    most: tokens that the file may have. numbered: as of TiktokenClass.
    """
    ranks: dict[bytes, int] = {}
    for n, line in enumerate(read_small_file(path).splitlines(), 1):
        if not line.strip():
            continue
        try:
            text, rank = line.split()
            token = base64.b64decode(text, validate=True)
        except ValueError:
            token, rank = b"", b""
        if not token:
            said = line[:60].decode(errors="replace")
            raise FormatError(f"line {n} of {path} is not a token in base64 and its rank: {said!r}")
        if numbered and rank != b"%d" % len(ranks):
            said = rank[:20].decode(errors="replace")
            raise FormatError(f"line {n} of {path} has the rank {said}, which must be {len(ranks)}")
        if token in ranks and numbered:
            raise FormatError(f"line {n} of {path} has the token of rank {ranks[token]} again")
        ranks.setdefault(token, len(ranks))
        if len(ranks) > most:
            raise FormatError(f"{path} has more tokens than the model ({most}: vocab_size in config.json)")
    if sum(len(token) ** 2 for token in ranks) > _MOST_WORK:
        raise FormatError(f"{path} has tokens of {max(map(len, ranks))} bytes, which are too long")
    for byte in range(256):
        if bytes([byte]) not in ranks:
            raise FormatError(f"{path} has no token for the byte {byte:#04x}")
    return ranks


def merged_pairs(ranks: dict[bytes, int]) -> tuple[list[tuple[bytes, bytes]], bool]:
    """The pairs that tokens are made of, in the order of ranks; whether each token of more than a byte is."""
    found = [_last_pair(token, ranks) for token in ranks if len(token) > 1]
    return [pair for pair in found if pair], None not in found


def _last_pair(token: bytes, ranks: dict[bytes, int]) -> tuple[bytes, bytes] | None:
    """What merges into a token at last where its bytes are a text; None where they do not become it."""
    parts = [token[i : i + 1] for i in range(len(token))]
    none = len(ranks)
    unions = [ranks.get(token[i : i + 2], none) for i in range(len(token) - 1)]  # of a part and the next
    while len(parts) > 2:
        lowest = min(unions)
        if lowest == none:
            return None
        i = unions.index(lowest)
        parts[i : i + 2] = [parts[i] + parts[i + 1]]
        del unions[i]
        if i < len(unions):
            unions[i] = ranks.get(parts[i] + parts[i + 1], none)
        if i > 0:
            unions[i - 1] = ranks.get(parts[i - 1] + parts[i], none)
    return parts[0], parts[1]
