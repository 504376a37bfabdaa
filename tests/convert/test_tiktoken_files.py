"""Vocabularies in tiktoken's form (Kimi, Qwen 1, Hunyuan, Mistral): the tokens, and the refused files."""

from __future__ import annotations

import base64
import json
import random
import unicodedata
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_tokenizers import CORPUS, NASTY, bpe_metadata
from tokenizers import Regex
from tokenizers.pre_tokenizers import Split

from hotset.convert.hf import convert_hf
from hotset.convert.hf_tokenizer import tokenizer_keys
from hotset.errors import FormatError, TokenizerError
from hotset.formats.gguf import GGUFWriter, open_gguf
from hotset.text.pretokenizers import PRE_TOKENIZERS
from hotset.text.tokenizer import BYTE_OF_LETTER, load_tokenizer

tiny_models = pytest.importorskip("tiny_models")

N_VOCAB = 1200
CLASSES = {
    "tiktoken.model": "TikTokenTokenizer",
    "qwen.tiktoken": "QWenTokenizer",
    "hy.tiktoken": "HYTokenizer",
}
LETTERS = {byte: letter for letter, byte in BYTE_OF_LETTER.items()}


def rank_bpe(data: bytes, ranks: dict[bytes, int], below: int = 1 << 30) -> list[bytes]:
    """Merge by definition: repeatedly merge the first pair of neighbours whose union has the lowest rank."""
    parts = [bytes([byte]) for byte in data]
    while True:
        unions = [ranks.get(left + right, below) for left, right in pairwise(parts)]
        if not unions or min(unions) >= below:
            return parts
        i = unions.index(min(unions))
        parts[i : i + 2] = [parts[i] + parts[i + 1]]


def tiktoken_ids(text: str, pre: str, ranks: dict[bytes, int]) -> list[int]:
    """Encode like tiktoken: a word that is a token stays whole, other words are merged by rank."""
    (pattern,) = PRE_TOKENIZERS[pre].patterns
    split = Split(Regex(pattern), "isolated")
    words = [word.encode() for word, _ in split.pre_tokenize_str(text)]
    return [ranks[part] for word in words for part in ([word] if word in ranks else rank_bpe(word, ranks))]


def vocabulary(kind: str, seed: int = 0) -> list[bytes]:
    """Return all bytes and more tokens, in the order of ranks.

    kind: "learnt" (by BPE), "shuffled" (the same tokens in random order) or "random" (parts of texts; merging
    reaches only some of them).
    """
    rng = random.Random(f"{kind} {seed}")
    if kind == "random":
        data = "".join([*CORPUS[:3], "abcabcdaab " * 20]).encode()
        starts = [(rng.randrange(len(data)), rng.randint(2, 6)) for _ in range(500)]
        tokens = [bytes([byte]) for byte in range(256)]
        return list(dict.fromkeys([*tokens, *(data[at : at + n] for at, n in starts)]))
    metadata = bpe_metadata()
    n = np.count_nonzero(metadata["tokenizer.ggml.token_type"] == 1)
    tokens = [bytes(map(BYTE_OF_LETTER.get, piece)) for piece in metadata["tokenizer.ggml.tokens"][:n]]
    if kind == "shuffled":
        rng.shuffle(tokens)
    return tokens


def write(
    folder: Path, tokens: list[bytes], name: str = "tiktoken.model", **settings: Any
) -> dict[bytes, int]:
    lines = [base64.b64encode(token) + b" %d\n" % rank for rank, token in enumerate(tokens)]
    (folder / name).write_bytes(b"".join(lines))
    settings = {"tokenizer_class": CLASSES[name]} | settings
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return {token: rank for rank, token in enumerate(tokens)}


def spelled(token: bytes) -> str:
    return "".join(LETTERS[byte] for byte in token)


@pytest.mark.parametrize(
    ("name", "pre"),
    [("tiktoken.model", "kimi-k2"), ("qwen.tiktoken", "qwen2"), ("hy.tiktoken", "hunyuan")],
)
@pytest.mark.parametrize("kind", ["learnt", "shuffled", "random"])
def test_tokens_equal_rank_bpe(tmp_path: Path, kind: str, name: str, pre: str) -> None:
    texts = [text for text in NASTY if len(text) < 1000] + CORPUS[:3]
    for seed in range(1 if kind == "learnt" else 3):
        ranks = write(tmp_path, vocabulary(kind, seed), name)
        keys = tokenizer_keys(tmp_path, {"vocab_size": N_VOCAB})
        ours, rng = load_tokenizer(keys), random.Random(seed)
        drawn = ["".join(rng.choices("abcd the", k=rng.randint(1, 40))) for _ in range(200)]
        pieces = [token.decode() for token in ranks if len(token) > 1 and token.isascii()]
        for text in [*texts, *drawn, *pieces]:
            whole = unicodedata.normalize("NFC", text) if pre != "kimi-k2" else text  # the others use NFC
            assert ours.encode(text) == tiktoken_ids(whole, pre, ranks), text
        reached = all(rank_bpe(token, ranks) == [token] for token in ranks)
        assert keys.get("hotset.tokenizer_ignore_merges", False) is not reached
        assert reached == (kind == "learnt") or kind == "shuffled"


@pytest.mark.parametrize("kind", ["learnt", "shuffled", "random"])
def test_merges_equal_llama_cpps(tmp_path: Path, kind: str) -> None:
    """Compare with llama.cpp's converter, which writes merges only for tokens that lower ranks reach.

    hotset writes a merge for the other tokens too.
    """
    ranks = write(tmp_path, vocabulary(kind))
    merges = tokenizer_keys(tmp_path, {"vocab_size": N_VOCAB})["tokenizer.ggml.merges"]
    found = [rank_bpe(token, ranks, rank) for token, rank in ranks.items() if len(token) > 1]
    theirs = [" ".join(map(spelled, pair)) for pair in found if len(pair) == 2]
    if kind == "learnt":
        assert merges == theirs == bpe_metadata()["tokenizer.ggml.merges"]
    else:
        assert [merge for merge in merges if merge in set(theirs)] == theirs
        assert len(merges) > len(theirs)


EXTRA = [f"<|extra_{i}|>" for i in range(205)]
KIMI = {"0": "[BOS]", "1": "[EOS]", "2": "<|im_end|>", "254": "[UNK]", "255": "[PAD]", "300": "out of range"}
KIMI_TEXTS = {
    "bos_token": "[BOS]",
    "eos_token": "[EOS]",
    "unk_token": "[UNK]",
    "pad_token": {"content": "[PAD]"},
}


@pytest.mark.parametrize(
    ("name", "config", "pre", "special", "ids"),
    [
        (
            "tiktoken.model",
            {"architectures": ["DeepseekV3ForCausalLM"], "bos_token_id": 356, "eos_token_id": 358},
            "kimi-k2",
            [KIMI.get(str(i), f"<|reserved_token_{356 + i}|>") for i in range(256)],
            {"bos": 0, "eos": 2, "unknown": 254, "padding": 255},
        ),
        (
            "tiktoken.model",
            {"architectures": ["KimiLinearForCausalLM"], "eos_token_id": 358},
            "kimi-k2",
            [KIMI.get(str(i), f"<|reserved_token_{356 + i}|>") for i in range(256)],
            {"bos": 0, "eos": 1, "unknown": 254, "padding": 255},
        ),
        (
            "qwen.tiktoken",
            {"architectures": ["QWenLMHeadModel"]},
            "qwen2",
            ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *EXTRA],
            {"bos": 0, "eos": 0, "unknown": 0},
        ),
        (
            "hy.tiktoken",
            {"architectures": ["HunYuanMoEV1ForCausalLM"], "bos_token_id": 1, "eos_token_id": 359},
            "hunyuan",
            ["<|endoftext|>", "<|startoftext|>", "<|bos|>", "<|eos|>", "<|pad|>", *EXTRA],
            {"bos": 2, "eos": 3},
        ),
        (
            "hy.tiktoken",
            {"architectures": ["HunYuanDenseV1ForCausalLM"], "eod_token_id": 366, "pad_token_id": 360},
            "hunyuan",
            ["<|endoftext|>", "<|startoftext|>", "<|bos|>", "<|eos|>", "<|pad|>", *EXTRA],
            {"bos": 1, "eos": 10, "eot": 3, "padding": 4},
        ),
    ],
)
def test_special_tokens_equal_the_class(
    tmp_path: Path, name: str, config: dict[str, Any], pre: str, special: list[str], ids: dict[str, int]
) -> None:
    """Compare the special tokens with the ones that llama.cpp's converter writes."""
    tokens = vocabulary("learnt")[:356]
    settings: dict[str, Any] = {}
    if name == "tiktoken.model":
        added = {str(356 + int(i)): {"content": text, "special": i == "0"} for i, text in KIMI.items()}
        settings = {"added_tokens_decoder": added, **KIMI_TEXTS}
    write(tmp_path, tokens, name, chat_template="{{ messages }}", **settings)
    writer = GGUFWriter(tmp_path / "m.gguf", "llama")
    for key, value in tokenizer_keys(tmp_path, {"vocab_size": 620, **config}).items():
        writer.add(key, value)
    writer.write()
    with open_gguf(tmp_path / "m.gguf") as gguf:
        keys = dict(gguf.metadata)
    padding = [f"[PAD{i}]" for i in range(356 + len(special), 620)]
    assert list(keys["tokenizer.ggml.tokens"]) == [*map(spelled, tokens), *special, *padding]
    types = [1] * len(tokens) + [3] * len(special) + [5] * len(padding)
    assert list(keys["tokenizer.ggml.token_type"]) == types
    found = {key[15:-9]: id - 356 for key, id in keys.items() if key.endswith("_token_id")}
    assert (found, keys["tokenizer.ggml.pre"]) == (ids, pre)
    assert keys["tokenizer.chat_template"] == "{{ messages }}"
    ours = load_tokenizer(keys)
    assert ours.encode(f"a{special[2]}", parse_special=True) == [tokens.index(b"a"), 358]
    assert ours.decode(ours.encode("the fox <|im_end|>")) == "the fox <|im_end|>"


def test_ranks_of_hunyuan_are_the_order_of_different_lines(tmp_path: Path) -> None:
    tokens = vocabulary("learnt")
    write(tmp_path, [*tokens[:300], tokens[4], *tokens[300:]], "hy.tiktoken")
    keys = tokenizer_keys(tmp_path, {"vocab_size": N_VOCAB})
    assert keys["tokenizer.ggml.tokens"][: len(tokens)] == [*map(spelled, tokens)]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"YWI", "line 3 of .* is not a token in base64 and its rank"),
        (b"YWI 2 3", "line 3 .* is not"),
        (b"", "line 4 .* has the rank 3, which must be 2"),  # blank lines are skipped
        (b"YW!i 2", "line 3 .* is not"),
        (b"YWI 2", "line 3 .* is not"),
        ("ä 2".encode("latin-1"), "line 3 .* is not"),
        (b"== 2", "line 3 .* is not"),
        (b"YWI= 3", "line 3 .* the rank 3, which must be 2"),
        (b"YWI= -2", "the rank"),
        (b"YWI= " + b"9" * 9999, "the rank 9{20}, which"),
        (b"AA== 2", "line 3 of .* has the token of rank 0 again"),
        (b"YWI= 2", r"no token for the byte 0x02"),
        (base64.b64encode(b"a" * 50_000) + b" 2", "tokens of 50000 bytes, which are too long"),
    ],
)
def test_damaged_lines_are_refused(tmp_path: Path, line: bytes, message: str) -> None:
    write(tmp_path, [bytes([byte]) for byte in range(256)])
    lines = (tmp_path / "tiktoken.model").read_bytes().splitlines()
    lines[2] = line
    (tmp_path / "tiktoken.model").write_bytes(b"\n".join(lines))
    with pytest.raises(FormatError, match=message):
        tokenizer_keys(tmp_path, {"vocab_size": 600})


def test_vocabularies_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    tokens = vocabulary("learnt")[:356]
    write(tmp_path, tokens)
    for n_vocab, message in ((300, "more tokens than the model"), (611, "356 tokens and the tokenizer 256")):
        with pytest.raises(FormatError, match=message):
            tokenizer_keys(tmp_path, {"vocab_size": n_vocab})
    for text in (spelled(tokens[-1]), "<|reserved_token_357|>"):
        write(tmp_path, tokens, added_tokens_decoder={"356": {"content": text}})
        with pytest.raises(FormatError, match="the text of another token"):
            tokenizer_keys(tmp_path, {"vocab_size": 612})
    write(tmp_path, tokens, tokenizer_class="OtherTokenizer")
    with pytest.raises(TokenizerError, match="needs the tokenizer_class TikTokenTokenizer"):
        tokenizer_keys(tmp_path, {"vocab_size": 612})


N_SPECIAL = 30


def tekken(folder: Path, tokens: list[bytes], *, version: str = "v3", **changes: Any) -> None:
    """Write a tekken.json that leaves out the last 10 of `tokens`. changes: to its config or its objects."""
    rows = [
        {"rank": rank, "token_bytes": base64.b64encode(token).decode(), "token_str": None}
        for rank, token in enumerate(tokens)
    ]
    config = {
        "pattern": PRE_TOKENIZERS["tekken"].patterns[0],
        "num_vocab_tokens": len(tokens),
        "default_vocab_size": len(tokens) - 10 + N_SPECIAL,
        "default_num_special_tokens": N_SPECIAL,
        "version": version,
    }
    content = {"config": config | changes, "vocab": rows}
    content |= {key: value for key, value in changes.items() if key in ("vocab", "special_tokens")}
    (folder / "tekken.json").write_text(json.dumps(content))


def named(*texts: str) -> list[dict[str, Any]]:
    return [{"rank": id, "token_str": text, "is_control": True} for id, text in enumerate(texts)]


@pytest.mark.parametrize("kind", ["learnt", "shuffled", "random"])
def test_tokens_of_tekken_equal_rank_bpe(tmp_path: Path, kind: str) -> None:
    # mistral-common puts the special tokens first, and never makes one from text.
    tokens = vocabulary(kind)
    bytes_first = [*map(bytes, zip(range(256))), *(token for token in tokens if len(token) > 1)]
    tekken(tmp_path, bytes_first)
    ours = load_tokenizer(tokenizer_keys(tmp_path, {"vocab_size": N_VOCAB}))
    ranks = {token: rank for rank, token in enumerate(bytes_first[:-10])}
    for text in [*(text for text in NASTY if len(text) < 1000), *CORPUS[:3], "[INST]a</s>"]:
        wanted = [id + N_SPECIAL for id in tiktoken_ids(text, "tekken", ranks)]
        assert ours.encode(text) == [1, *wanted], text
        assert ours.decode(wanted) == text
    assert ours.encode("[INST]a</s>", parse_special=True) == [1, 3, N_SPECIAL + ord("a"), 2]


def test_special_tokens_of_tekken_are_named_by_the_file(tmp_path: Path) -> None:
    tekken(tmp_path, vocabulary("learnt"))
    ours = load_tokenizer(tokenizer_keys(tmp_path, {"vocab_size": N_VOCAB}))
    assert (ours.unk_id, ours.bos_id, ours.eos_id, ours.pad_id) == (0, 1, 2, 11)
    assert ours.tokens[9:11] + ours.tokens[19:21] == [
        "[TOOL_CALLS]",
        "[IMG]",
        "[TOOL_CONTENT]",
        "<SPECIAL_20>",
    ]
    assert ours.tokens[N_SPECIAL - 1] == f"<SPECIAL_{N_SPECIAL - 1}>"
    assert all(map(ours.is_special, range(N_SPECIAL)))
    tekken(
        tmp_path, vocabulary("learnt"), version="v13", special_tokens=named("<pad>", "</s>", "<s>", "[THINK]")
    )
    ours = load_tokenizer(tokenizer_keys(tmp_path, {"vocab_size": N_VOCAB}))
    assert (ours.bos_id, ours.eos_id, ours.unk_id) == (2, 1, None)
    assert ours.tokens[3:5] == ["[THINK]", "<SPECIAL_4>"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"version": "v13"}, "is not a tokenizer of Mistral"),  # v13 must list special tokens
        ({"default_vocab_size": "many"}, "is not a tokenizer of Mistral"),
        ({"default_vocab_size": 5000}, "has 5000 tokens, the model only 1200"),
        ({"default_vocab_size": 10**12}, "the model only 1200"),
        ({"default_num_special_tokens": 10**12}, "is not a tokenizer of Mistral"),
        ({"default_num_special_tokens": -1}, "is not a tokenizer of Mistral"),
        ({"default_vocab_size": True}, "is not a tokenizer of Mistral"),
        ({"special_tokens": [{"rank": 0, "token_str": 5}]}, "is not a tokenizer of Mistral"),
        ({"pattern": None}, "is not a tokenizer of Mistral"),
        ({"default_num_special_tokens": 10}, "does not number its"),
        ({"default_num_special_tokens": 500}, "is not a tokenizer of Mistral"),
        ({"special_tokens": named("<s>")[0]}, "is not a tokenizer of Mistral"),
        ({"special_tokens": [{"rank": 1, "token_str": "<s>"}]}, "does not number its"),
        ({"special_tokens": named("<s>", "<s>")}, "the text of another token"),
        ({"vocab": [{"rank": 0, "token_bytes": "!"}]}, "is not a tokenizer of Mistral"),
        ({"vocab": []}, "does not number its"),
        ({"pattern": ".*"}, "the pattern in .* is not known"),
    ],
)
def test_damaged_files_of_tekken_are_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    tekken(tmp_path, vocabulary("learnt"), **changes)
    with pytest.raises((FormatError, TokenizerError), match=message):
        tokenizer_keys(tmp_path, {"vocab_size": N_VOCAB})


@pytest.mark.parametrize(
    ("recipe", "name", "end"),
    [("kimi-linear", "tiktoken.model", "[EOS]"), ("qwen", "qwen.tiktoken", "<|endoftext|>")],
)
def test_checkpoints_are_converted(tmp_path: Path, recipe: str, name: str, end: str) -> None:
    folder, row = tmp_path / "hf", (tiny_models.RECIPES | tiny_models.EXPERTS)[recipe]
    tiny_models.save(row, tiny_models.build(row, vocab_size=N_VOCAB), folder)
    config = json.loads((folder / "config.json").read_text())
    ids = ("bos_token_id", "eos_token_id")  # Qwen's files lack these tokens
    (folder / "config.json").write_text(json.dumps({k: v for k, v in config.items() if k not in ids}))
    (folder / "tokenizer.json").unlink()
    tokens = vocabulary("learnt")
    added = {str(len(tokens)): {"content": "[BOS]"}, str(len(tokens) + 1): {"content": "[EOS]"}}
    ranks = write(folder, tokens, name, added_tokens_decoder=added if "kimi" in recipe else {})
    convert_hf(folder, tmp_path / "m.gguf")
    with open_gguf(tmp_path / "m.gguf") as gguf:
        ours, pre = load_tokenizer(gguf.metadata), gguf.metadata["tokenizer.ggml.pre"]
    assert ours.eos_id is not None
    assert (ours.n_vocab, ours.piece(ours.eos_id)) == (N_VOCAB, end)
    assert ours.encode(CORPUS[0]) == tiktoken_ids(CORPUS[0], pre, ranks)
