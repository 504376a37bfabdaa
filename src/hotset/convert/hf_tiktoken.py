"""Vocabularies of Hugging Face checkpoints in tiktoken's format: lines with a token in base64 and its rank.

tiktoken merges the neighbours whose union has the lowest rank. GGUF has merges, each of one pair. A token is
always made from one pair: until two neighbours become the token, the merges inside it do not depend on the
text around it. So the pairs found here, in the order of ranks, give tiktoken's tokens for any ranks.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hotset.convert.hf_config import read_json
from hotset.errors import FormatError
from hotset.files import read_small_file

_MOST_WORK = 1 << 30  # sum of the squares of the tokens' lengths: about 20 s. Qwen's: 9 million


@dataclass(frozen=True)
class TiktokenClass:
    """Facts that only the code of a checkpoint's tokenizer class has.

    name: tokenizer_class of tokenizer_config.json.
    pre: GGUF's name for the way it splits texts.
    special: texts of the special tokens after the ranks; {} is the id.
    numbered: whether ranks are read. If not, lines that repeat a token are skipped.
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
    """Return token → rank, in the order of ranks 0, 1, 2, ... Raises FormatError.

    most: the maximum number of tokens in the file. numbered: see TiktokenClass.
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
    _check_tokens(path, ranks)
    return ranks


def _check_tokens(path: Path, ranks: Mapping[bytes, int]) -> None:
    if sum(len(token) ** 2 for token in ranks) > _MOST_WORK:
        raise FormatError(f"{path} has tokens of {max(map(len, ranks))} bytes, which are too long")
    for byte in range(256):
        if bytes([byte]) not in ranks:
            raise FormatError(f"{path} has no token for the byte {byte:#04x}")


@dataclass(frozen=True)
class Tekken:
    """The vocabulary in a tekken.json of Mistral, whose special tokens come before the ranks.

    ranks: token → rank, in the order of ranks. special: texts of the special tokens by id.
    pattern: the regular expression that splits texts.
    """

    ranks: dict[bytes, int]
    special: list[str]
    pattern: str


# Files of versions v3 and v7 may omit their special tokens.
_TEKKEN_SPECIAL = (
    "<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]",
    "[/TOOL_RESULTS]", "[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]", "[IMG_END]", "[PREFIX]", "[MIDDLE]",
    "[SUFFIX]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[TOOL_CONTENT]",
)  # fmt: skip


def read_tekken(path: Path, most: int) -> Tekken:
    """Read a tekken.json. Raises FormatError for a damaged file and for one with more than `most` tokens."""
    content = read_json(path)
    try:
        config = content["config"]
        n_tokens, n_special = config["default_vocab_size"], config["default_num_special_tokens"]
        if type(n_tokens) is not int or type(n_special) is not int or not 0 <= n_special <= n_tokens:
            raise ValueError("default_vocab_size or default_num_special_tokens is not a number of tokens")
        if n_tokens > most:
            raise FormatError(
                f"{path} has {n_tokens} tokens, the model only {most} (vocab_size in config.json)"
            )
        listed: Any = content.get("special_tokens")
        if listed is None and config.get("version") in ("v3", "v7"):
            listed = [{"rank": id, "token_str": text} for id, text in enumerate(_TEKKEN_SPECIAL)]
        special = [token["token_str"] for token in listed]
        ids = [token["rank"] for token in listed]
        n_ranks = n_tokens - n_special
        rows = content["vocab"][:n_ranks]
        tokens = [base64.b64decode(row["token_bytes"], validate=True) for row in rows]
        numbered = ids == [*range(len(ids))] and [row["rank"] for row in rows] == [*range(n_ranks)]
        pattern = config["pattern"]
        if not all(isinstance(text, str) for text in [pattern, *special]):
            raise ValueError("pattern or token_str is not a text")
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise FormatError(f"{path} is not a tokenizer of Mistral: {str(error)[:100]!r}") from None
    if not numbered or len(special) > n_special or b"" in tokens or len(set(tokens)) < n_ranks:
        raise FormatError(f"{path} does not number its {n_tokens} tokens as its config says")
    special += [f"<SPECIAL_{id}>" for id in range(len(special), n_special)]
    ranks = {token: rank for rank, token in enumerate(tokens)}
    _check_tokens(path, ranks)
    return Tekken(ranks, special, pattern)


def merged_pairs(ranks: dict[bytes, int]) -> tuple[list[tuple[bytes, bytes]], bool]:
    """Return the pairs of tokens, in the order of ranks, and whether all tokens over one byte have one."""
    found = [_last_pair(token, ranks) for token in ranks if len(token) > 1]
    return [pair for pair in found if pair], None not in found


def _last_pair(token: bytes, ranks: dict[bytes, int]) -> tuple[bytes, bytes] | None:
    """Return the pair whose merge completes a token; None if merging its bytes does not give the token."""
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
