"""Small tokenizers in the forms of published tokenizer.json files: ids and texts equal the library's."""

from __future__ import annotations

import json
import random
import string
import unicodedata
from pathlib import Path
from typing import Any

import pytest
from text_corpus import texts
from tiny_tokenizers import bpe_metadata
from tokenizers import Tokenizer as Library

from hotset.convert.hf_tokenizer import tokenizer_keys
from hotset.errors import TokenizerError
from hotset.text.pretokenizers import PRE_TOKENIZERS
from hotset.text.tokenizer import NFC_KEY, UNIGRAM_SCORES_KEY, WHOLE_TEXT_KEY, Tokenizer, load_tokenizer

SPACE = "\u2581"
PREFIX = {"type": "Prepend", "prepend": SPACE}
SPACES = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
DECODER = [{"type": "Replace", "pattern": {"String": SPACE}, "content": " "}, {"type": "ByteFallback"},
           {"type": "Fuse"}]  # fmt: skip
STRIP = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
PLAIN = dict.fromkeys(("normalized", "lstrip", "rstrip", "single_word"), False)  # flags of an added token
RUNS = [SPACE * n for n in range(2, 8)]
WORDS = [
    "th", "the", f"{SPACE}t", f"{SPACE}the", "in", "re", "tu", "retu", "rn", "return", f"{SPACE}re", "é",
    "mo", "de", "l", "model", "mode", f"{SPACE}mo", "==", "//", "привет", "ив",
]  # fmt: skip
OVER_LINES = [";\n", "\n\n", f"\n{SPACE}", f"\n{SPACE}{SPACE}", "}\n", f":\n{SPACE}"]


def characters(pieces: list[str], added: list[str], normalizer: Any, *strip: Any) -> dict[str, Any]:
    """Return a tokenizer.json of BPE over characters: each piece has the merges of all its divisions."""
    singles = sorted({*string.printable[:95], "\n", SPACE, *"".join(pieces)})
    vocabulary = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *singles]
    pieces = [piece for piece in dict.fromkeys(pieces) if piece not in singles]
    vocabulary += pieces
    merges = [
        [piece[:at], piece[at:]]
        for piece in pieces
        for at in range(1, len(piece))
        if piece[:at] in vocabulary and piece[at:] in vocabulary
    ]
    tokens = ["<unk>", "<s>", "</s>", *added]
    vocabulary += [token for token in added if token not in vocabulary]
    ids = {token: id for id, token in enumerate(vocabulary)}
    return {
        "version": "1.0",
        "added_tokens": [
            {"id": ids[token], "content": token, "special": token.startswith("<"), **PLAIN}
            for token in tokens
        ],
        "normalizer": normalizer, "pre_tokenizer": None, "post_processor": None,
        "decoder": {"type": "Sequence", "decoders": [*DECODER, *strip]},
        "model": {"type": "BPE", "vocab": ids, "merges": merges, "byte_fallback": True, "fuse_unk": True,
                  "unk_token": "<unk>", "dropout": None, "ignore_merges": False},
    }  # fmt: skip


NFC = {"type": "NFC"}
LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
AS_QWEN = [
    {
        "type": "Split",
        "pattern": {"Regex": PRE_TOKENIZERS["qwen2"].patterns[0]},
        "behavior": "Isolated",
        "invert": False,
    },
    LEVEL | {"use_regex": False},
]


def byte_level(normalizer: Any, pre_tokenizers: list[Any], *added: str) -> dict[str, Any]:
    """Return a tokenizer.json of byte-level BPE. added: tokens that the library finds in normalised text."""
    keys = bpe_metadata("qwen2")
    tokens = dict.fromkeys([*keys["tokenizer.ggml.tokens"], *added])
    ids = {token: id for id, token in enumerate(tokens)}
    return {
        "version": "1.0",
        "added_tokens": [
            {"id": ids[token], "content": token, "special": False, **PLAIN, "normalized": True}
            for token in added
        ],
        "normalizer": normalizer, "post_processor": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": pre_tokenizers}, "decoder": LEVEL,
        "model": {"type": "BPE", "vocab": ids, "merges": keys["tokenizer.ggml.merges"]},
    }  # fmt: skip


def unigram(normalizer: Any, *pre_tokenizers: Any) -> dict[str, Any]:
    """Return a tokenizer.json of a unigram model without a table of characters."""
    singles = sorted({*string.printable[:95], "\n", SPACE, *"".join(WORDS)} - {"~"})
    pieces = [*singles, *(piece for piece in [*WORDS, *OVER_LINES, *RUNS] if len(piece) > 1)]
    draw = random.Random(3)
    scores = [-draw.randint(64, 640) / 64 for _ in pieces]  # sums are exact in both precisions
    special = ["<unk>", "<s>", "</s>"]
    vocabulary = [*([token, 0.0] for token in special), *map(list, zip(pieces, scores, strict=True))]
    added = [*enumerate(special), (len(vocabulary), "[x]")]
    return {
        "version": "1.0",
        "added_tokens": [
            {"id": id, "content": token, "special": token in special, **PLAIN} for id, token in added
        ],
        "normalizer": normalizer,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": list(pre_tokenizers)}, "post_processor": None,
        "decoder": None,
        "model": {"type": "Unigram", "unk_id": 0, "byte_fallback": False, "vocab": vocabulary},
    }  # fmt: skip


def both(folder: Path, content: dict[str, Any]) -> tuple[Library, Tokenizer, dict[str, Any]]:
    (folder / "tokenizer.json").write_text(json.dumps(content))
    library = Library.from_file(str(folder / "tokenizer.json"))
    keys = tokenizer_keys(folder, {"vocab_size": library.get_vocab_size()})
    return library, load_tokenizer(keys | {"tokenizer.ggml.add_bos_token": False}), keys


FORMS = {
    "llama 2": characters(WORDS, [], {"type": "Sequence", "normalizers": [PREFIX, SPACES]}, STRIP),
    "gemma 3": characters([*RUNS, *WORDS], ["\n", "\n\n", *RUNS, "[x]"], SPACES),
    "over lines": characters([*OVER_LINES, *WORDS], ["[x]"], SPACES),
    "nfc": byte_level(NFC, AS_QWEN),
    "no nfc": byte_level(None, AS_QWEN),
    "gpt-neox": byte_level(NFC, [LEVEL], *(" " * n for n in range(24, 1, -1))),
    "command r": byte_level(NFC, [{"type": "Digits", "individual_digits": True}, LEVEL]),
}


COLLAPSE = {"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": " "}
WORDWISE = {"type": "WhitespaceSplit"}


def visible_spaces(prepend: str, split: bool) -> dict[str, Any]:
    return {"type": "Metaspace", "replacement": SPACE, "prepend_scheme": prepend, "split": split}


@pytest.mark.parametrize("normalizer", [None, COLLAPSE])
@pytest.mark.parametrize("words", [[], [WORDWISE]])
@pytest.mark.parametrize(
    ("prepend", "split"),
    [("always", True), ("never", True), ("always", False), ("first", True), ("first", False)],
)
def test_unigram_ids_without_a_table_equal_the_librarys(
    normalizer: Any, words: list[Any], prepend: str, split: bool, tmp_path: Path
):
    library, tokenizer, _ = both(tmp_path, unigram(normalizer, *words, visible_spaces(prepend, split)))
    for text in [*texts(200, ["[x]", "</s>"]), "[x]the", "the[x]the", "the [x] the</s>the"]:
        found = tokenizer.encode(text, add_special=False, parse_special=True)
        assert found == library.encode(text).ids, text


def test_a_prefix_of_the_first_word_only_is_left_out_of_texts(tmp_path: Path):
    _, tokenizer, _ = both(tmp_path, unigram(None, visible_spaces("first", False)))
    for text in ("the[x]the", "the[x] the", "[x] the", "[x]the"):
        assert tokenizer.decode(tokenizer.encode(text, add_special=False)) == text


@pytest.mark.parametrize("scores", [(1.0,), (1.0, 1.125, 1.25), (0.7, 1.1, 1.3)])
@pytest.mark.parametrize("words", [[], [WORDWISE]])
def test_ties_of_unigrams_are_broken_as_by_the_library(
    scores: tuple[float, ...], words: list[Any], tmp_path: Path
):
    """Use words with many divisions of the same sum, or of sums that differ by the rounding of doubles."""
    content, draw = unigram(None, *words, visible_spaces("always", True)), random.Random(5)
    for row in content["model"]["vocab"][3:]:
        row[1] = -draw.choice(scores) * len(row[0])
    library, tokenizer, keys = both(tmp_path, content)
    assert (UNIGRAM_SCORES_KEY in keys) == (0.7 in scores)
    for text in texts(400):
        assert tokenizer.encode(text, add_special=False) == library.encode(text).ids, text


@pytest.mark.parametrize("form", FORMS)
def test_ids_and_text_equal_the_librarys(form: str, tmp_path: Path):
    library, tokenizer, keys = both(tmp_path, FORMS[form])
    named = [token["content"] for token in FORMS[form]["added_tokens"] if not token["special"]]
    for text in texts(300, named):
        ids = library.encode(text, add_special_tokens=False).ids
        found = tokenizer.encode(text, add_special=False)
        if keys["tokenizer.ggml.model"] == "gemma4":
            ids = [id for id in ids if id != tokenizer.bos_id]
            found = [id for id in found if id != tokenizer.bos_id]
        assert found == ids, text
        assert tokenizer.decode(found) == library.decode(ids), text


@pytest.mark.parametrize("scheme", ["first", "always", "never"])
def test_ids_of_characters_with_visible_spaces_equal_the_librarys(scheme: str, tmp_path: Path):
    content = characters(WORDS, ["[x]"], None, STRIP) | {"pre_tokenizer": visible_spaces(scheme, False)}
    library, tokenizer, keys = both(tmp_path, content)
    assert keys["tokenizer.ggml.model"] == "llama"
    for text in [*texts(200, ["[x]", "</s>"]), "[x]the", " the[x] the", "</s> the</s>the", f"{SPACE}the"]:
        found = tokenizer.encode(text, add_special=False, parse_special=True)
        assert found == library.encode(text, add_special_tokens=False).ids, text


@pytest.mark.parametrize("sides", [{"lstrip"}, {"rstrip"}, {"lstrip", "rstrip"}])
@pytest.mark.parametrize("special", [True, False])
@pytest.mark.parametrize("form", ["llama 2", "no nfc"])
def test_added_tokens_take_in_white_space(sides: set[str], special: bool, form: str, tmp_path: Path):
    """Such as Phi-3's <|user|>, after which the template has a line feed."""
    content = json.loads(json.dumps(FORMS[form]))
    vocabulary = content["model"]["vocab"]
    vocabulary["[y]"] = len(vocabulary)
    token = {"id": vocabulary["[y]"], "content": "[y]", "special": special, **PLAIN}
    content["added_tokens"].append(token | dict.fromkeys(sides, True))
    library, tokenizer, _ = both(tmp_path, content)
    for text in [
        "[y]\nthe [y] the\n\n",
        " [y]  [y]\t\n",
        "a \u3000[y]\u00a0b",
        "[y]",
        "  ",
        "the",
        " [y][y] ",
    ]:
        found = tokenizer.encode(text, add_special=False, parse_special=True)
        assert found == library.encode(text, add_special_tokens=False).ids, text


def test_special_tokens_of_phi_3_take_in_white_space_in_files_of_other_converters(tmp_path: Path):
    content = json.loads(json.dumps(FORMS["llama 2"]))
    content["model"]["vocab"]["<|user|>"] = id = len(content["model"]["vocab"])
    content["added_tokens"].append({"id": id, "content": "<|user|>", "special": True, **PLAIN})
    _, _, keys = both(tmp_path, content)
    for name, same in ("Phi 3.5 Mini", True), ("Phi-3-mini", True), ("Dolphin 3", False), ("Phi 4", False):
        tokenizer = load_tokenizer(keys | {"general.name": name})
        texts = ("<|user|>\nthe", "<|user|>the")
        one, other = (tokenizer.encode(text, add_special=False, parse_special=True) for text in texts)
        assert (one == other) == same, name


def test_forms_are_known_by_their_keys(tmp_path: Path):
    keys = {}
    for form, content in FORMS.items():
        _, _, keys[form] = both(tmp_path, content)
    assert keys["llama 2"]["tokenizer.ggml.model"] == "llama"
    assert "  " in keys["gemma 3"]["tokenizer.ggml.tokens"], "as llama.cpp's converter writes it"
    assert [form for form in keys if WHOLE_TEXT_KEY in keys[form]] == ["over lines"]
    flags = {form: keys[form].get(NFC_KEY) for form in keys if keys[form]["tokenizer.ggml.model"] == "gpt2"}
    assert flags == {"nfc": None, "no nfc": False, "gpt-neox": True, "command r": True}


# The published tokenizers of these names have the normaliser NFC.
COMPOSED = (
    "command-r", "deepseek-r1-qwen", "hunyuan", "modern-bert", "mpt", "olmo", "qwen2", "qwen35",
    "stablelm2",
)  # fmt: skip


@pytest.mark.parametrize("pre", COMPOSED)
def test_a_file_without_the_key_is_normalised_by_the_name_of_its_pre_tokenizer(pre: str):
    tokenizer = load_tokenizer(bpe_metadata(pre))
    decomposed = unicodedata.normalize("NFD", "café Việt 각 ") * 300
    composed = unicodedata.normalize("NFC", decomposed)
    assert tokenizer.encode(decomposed, most=len(composed.encode())) == tokenizer.encode(composed)
    assert tokenizer.encode_inside(decomposed) == tokenizer.encode_inside(composed)
    assert tokenizer.fewest_tokens(decomposed) == tokenizer.fewest_tokens(composed)
    assert load_tokenizer(bpe_metadata("llama-bpe")).encode("e\u0301") != tokenizer.encode("e\u0301")


@pytest.mark.parametrize("change", ["order", "missing"])
def test_merges_that_no_scores_describe_are_refused(change: str, tmp_path: Path):
    content = characters(
        ["ab", "abc", "bc"], [], {"type": "Sequence", "normalizers": [PREFIX, SPACES]}, STRIP
    )
    merges = content["model"]["merges"]
    if change == "missing":
        merges.remove(["a", "bc"]) if ["a", "bc"] in merges else merges.pop()
    else:
        merges.append(merges[0])
    with pytest.raises(TokenizerError, match=r"tokenizer\.json"):
        both(tmp_path, content)
