"""BPE over characters (Gemma 4's): from a tokenizer.json to a file's keys, against the library itself."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer as Library
from tokenizers import models, normalizers, pre_tokenizers

from hotset.convert.hf_tokenizer import tokenizer_keys
from hotset.errors import TokenizerError
from hotset.text.tokenizer import Tokenizer, load_tokenizer

MERGES = [
    ("t", "h"), ("th", "e"), ("\u2581", "the"), ("\u2581", "\u2581"), ("\u2581\u2581", "\u2581\u2581"),
    ("\n", "\n"), ("\n\n", "\n"), ("i", "n"), ("\u2581", "in"), ("ä", "ö"),
]  # fmt: skip
TEXTS = [
    "", "the in the", " the", "the  in", "a\nb", "\n\n\nthe\n\n in\n", "\n\n\n\n\n", "    the\t the", "äö ö",
    "unknown: 漢字 🙂 é", "a\u2581b", "x" * 700 + " the\n" * 40,
]  # fmt: skip


def write(folder: Path, normalizer: normalizers.Normalizer) -> Library:
    pieces = ["<pad>", "<eos>", "<bos>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += [
        *"abcdefghijklmnopqrstuvwxyz:x\t",
        "\u2581",
        "\n",
        "ä",
        "ö",
        *("".join(pair) for pair in MERGES),
    ]
    pieces = list(dict.fromkeys(pieces))
    vocab = {piece: id for id, piece in enumerate(pieces)}
    library = Library(models.BPE(vocab, MERGES, byte_fallback=True))
    library.normalizer = normalizer
    library.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    library.add_special_tokens(["<pad>", "<eos>", "<bos>"])
    library.add_tokens(["<|tool>"])
    library.save(str(folder / "tokenizer.json"))
    settings = {"bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return library


@pytest.fixture
def both(tmp_path: Path) -> tuple[Library, Tokenizer]:
    library = write(tmp_path, normalizers.Replace(" ", "\u2581"))
    keys = tokenizer_keys(tmp_path, {"vocab_size": 400})
    assert keys["tokenizer.ggml.model"] == "gemma4"
    return library, load_tokenizer(keys)


@pytest.mark.parametrize("text", TEXTS)
def test_ids_are_the_librarys(text: str, both: tuple[Library, Tokenizer]) -> None:
    library, tokenizer = both
    ids = library.encode(text, add_special_tokens=False).ids
    assert tokenizer.encode(text, add_special=False) == ids
    assert tokenizer.encode(text) == [2, *ids]
    assert tokenizer.decode(ids) == text.replace("\u2581", " ")
    assert tokenizer.fewest_tokens(text) <= len(ids)


def test_special_tokens(both: tuple[Library, Tokenizer]) -> None:
    _, tokenizer = both
    tool = tokenizer.tokens.index("<|tool>")
    assert tokenizer.encode("the<|tool>in", add_special=False)[1] == tool
    assert tokenizer.encode("<eos>", parse_special=True) == [2, 1]
    assert 1 not in tokenizer.encode("<eos>")
    assert tokenizer.decode([2, tool], skip_special=True) == "<|tool>"


def test_runs_of_line_feeds_that_are_tokens(tmp_path: Path) -> None:
    """Find tokens of line feeds whole, although no merges lead to them, whatever text surrounds them."""
    write(tmp_path, normalizers.Replace(" ", "\u2581"))
    keys = tokenizer_keys(tmp_path, {"vocab_size": 400})
    tokens = keys["tokenizer.ggml.tokens"]
    run = tokens.index("[PAD399]")
    tokens[run], keys["tokenizer.ggml.token_type"][run] = "\n" * 5, 1
    tokenizer = load_tokenizer(keys | {"tokenizer.ggml.add_bos_token": False})
    found = tokenizer.encode("a" + "\n" * 5 + "b")
    assert found == [2, tokens.index("a"), run, tokens.index("b")]
    assert np.array_equal(tokenizer.encode("\n" * 4)[1:], [tokens.index("\n\n")] * 2)


def test_other_normalizers_are_refused(tmp_path: Path) -> None:
    write(tmp_path, normalizers.Prepend("\u2581"))
    with pytest.raises(TokenizerError, match="not byte-level BPE"):
        tokenizer_keys(tmp_path, {"vocab_size": 400})
