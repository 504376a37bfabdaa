"""Tokenizers in the checkpoints of encoders become keys that give the same ids."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from text_corpus import texts
from tiny_tokenizers import CORPUS, NASTY, SPECIALS, trained_unigram, trained_word_piece, unigram_metadata
from tokenizers import Tokenizer as Library
from tokenizers.normalizers import Precompiled

from hotset.convert.hf_tokenizer import tokenizer_keys
from hotset.engine.reranking import reranking_tokens
from hotset.errors import TokenizerError
from hotset.formats.gguf import GGUFWriter, open_gguf
from hotset.text.charsmap import CharsMap
from hotset.text.tokenizer import Tokenizer, load_tokenizer

TEXTS = [*NASTY, *CORPUS[:3]]


def loaded(folder: Path, n_vocab: int = 400) -> tuple[Tokenizer, dict[str, Any]]:
    """Write the tokenizer of a folder to a GGUF file, and return it loaded with the file's keys."""
    writer = GGUFWriter(folder / "m.gguf", "bert")
    for key, value in tokenizer_keys(folder, {"vocab_size": n_vocab}).items():
        writer.add(key, value)
    writer.write()
    with open_gguf(folder / "m.gguf") as gguf:
        return load_tokenizer(gguf.metadata), dict(gguf.metadata)


def xlm_roberta(prepend: str = "always") -> dict[str, Any]:
    """Return a tokenizer.json in XLM-RoBERTa's form. prepend: the words that get the prefix."""
    library, charsmap = trained_unigram()
    metadata = unigram_metadata()
    scores = metadata["tokenizer.ggml.scores"].tolist()
    normalizers = [
        {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(charsmap).decode()},
        {"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": " "},
    ]
    metaspace = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": prepend, "split": True}
    special = ((library.bos_id(), "<s>"), (library.eos_id(), "</s>"), (library.unk_id(), "<unk>"))
    added = [(*token, True) for token in special] + [(library.piece_to_id("<user>"), "<user>", False)]
    plain = dict.fromkeys(("normalized", "lstrip", "rstrip", "single_word"), False)
    return {
        "added_tokens": [
            {"id": i, "content": t, "special": is_special, **plain} for i, t, is_special in added
        ],
        "normalizer": {"type": "Sequence", "normalizers": normalizers},
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [{"type": "WhitespaceSplit"}, metaspace]},
        "post_processor": {
            "type": "RobertaProcessing",
            "sep": ["</s>", 2],
            "cls": ["<s>", 0],
            "trim_offsets": True,
            "add_prefix_space": True,
        },
        "model": {
            "type": "Unigram",
            "unk_id": library.unk_id(),
            "vocab": [list(row) for row in zip(metadata["tokenizer.ggml.tokens"], scores, strict=True)],
        },
    }


def write(folder: Path, tokenizer: dict[str, Any], **config: Any) -> None:
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


@pytest.mark.parametrize(("lowercase", "strips"), [(True, None), (False, None), (True, False)])
def test_word_pieces_of_a_tokenizer_json(tmp_path: Path, lowercase: bool, strips: bool | None) -> None:
    library = trained_word_piece(lowercase=lowercase, strips=strips)
    names = {f"{kind}_token": f"[{kind.upper()}]" for kind in ("unk", "cls", "sep", "pad", "mask")}
    write(tmp_path, json.loads(library.to_str()), **names)
    tokenizer, keys = loaded(tmp_path)
    for text in TEXTS:
        assert tokenizer.encode(text) == library.encode(text).ids, text
    assert keys["tokenizer.ggml.model"] == "bert"
    assert keys["tokenizer.ggml.tokens"][:5] == SPECIALS
    assert keys["tokenizer.ggml.tokens"][-1].startswith("[PAD")
    ids = {"bos": 2, "seperator": 3, "cls": 2, "mask": 4, "unknown": 1, "padding": 0}
    for name, id in ids.items():
        assert keys[f"tokenizer.ggml.{name}_token_id"] == id


def test_word_pieces_without_a_tokenizer_json(tmp_path: Path) -> None:
    library = trained_word_piece(lowercase=False)
    ids = library.get_vocab()
    (tmp_path / "vocab.txt").write_text("".join(f"{token}\n" for token in sorted(ids, key=ids.get)))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"do_lower_case": False}))
    tokenizer, _ = loaded(tmp_path)
    for text in TEXTS:
        assert tokenizer.encode(text) == library.encode(text).ids, text


@pytest.mark.parametrize("prepend", ["always", "first", "never"])
def test_unigrams_of_a_tokenizer_json(tmp_path: Path, prepend: str) -> None:
    """Compare ids, except for texts that the library's normaliser changes differently from SentencePiece."""
    library, charsmap = trained_unigram()
    content, normalised = xlm_roberta(prepend), CharsMap(charsmap)
    write(tmp_path, content, cls_token="<s>", sep_token="</s>", unk_token="<unk>")
    theirs = Library.from_str(json.dumps({"version": "1.0", "decoder": None, **content}))
    tokenizer, keys = loaded(tmp_path)
    precompiled, n = Precompiled(charsmap), 0
    for text in [*TEXTS, *texts(200, ["<user>", "</s>"])]:
        if normalised(text) == precompiled.normalize_str(text):
            found = tokenizer.encode(text, add_special=False, parse_special=True)
            assert found == theirs.encode(text, add_special_tokens=False).ids, text
            n += 1
    assert n > 0.8 * (len(TEXTS) + 200)
    if prepend != "always":
        return
    assert tokenizer.encode("the") == [library.bos_id(), *library.encode("the"), library.eos_id()]
    expected = unigram_metadata()
    np.testing.assert_array_equal(
        keys["tokenizer.ggml.token_type"][: library.vocab_size()], expected["tokenizer.ggml.token_type"]
    )
    np.testing.assert_array_equal(
        keys["tokenizer.ggml.precompiled_charsmap"], expected["tokenizer.ggml.precompiled_charsmap"]
    )


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("normalizer",), {"type": "NFKC"}, "'NFKC' of a unigram"),
        (("normalizer",), {"type": "Precompiled", "precompiled_charsmap": "!"}, "damaged"),
        (("pre_tokenizer",), {"type": "BertPreTokenizer"}, "'BertPreTokenizer' of a unigram"),
        (("model", "unk_id"), None, "without unk_id"),
        (("model", "vocab"), [["a"]], "damaged"),
        (("model", "vocab"), [["a", "b"]], "damaged"),
        (("post_processor",), {"type": "RobertaProcessing", "sep": [], "cls": []}, "post_processor"),
    ],
)
def test_settings_without_keys_are_refused(tmp_path: Path, path: Any, value: Any, message: str) -> None:
    tokenizer = xlm_roberta()
    inside = tokenizer if len(path) == 1 else tokenizer[path[0]]
    inside[path[-1]] = value
    write(tmp_path, tokenizer)
    with pytest.raises(TokenizerError, match=message):
        loaded(tmp_path)


@pytest.mark.parametrize(
    ("part", "entry", "value", "message"),
    [
        ("normalizer", "handle_chinese_chars", False, "without BERT's normalizer"),
        ("normalizer", "type", "Lowercase", "without BERT's normalizer"),
        ("pre_tokenizer", "type", "Whitespace", "without BERT's normalizer"),
        ("model", "continuing_subword_prefix", "@@", "settings of its own"),
        ("model", "max_input_chars_per_word", 50, "settings of its own"),
        ("model", "unk_token", "[NONE]", "lacks its special token"),
    ],
)
def test_other_word_pieces_are_refused(
    tmp_path: Path, part: str, entry: str, value: Any, message: str
) -> None:
    tokenizer = json.loads(trained_word_piece().to_str())
    tokenizer[part][entry] = value
    write(tmp_path, tokenizer)
    with pytest.raises(TokenizerError, match=message):
        loaded(tmp_path)


PAIR = ("the inn", "then 1234 in")


def test_a_query_and_a_document_are_the_librarys_pair(tmp_path: Path) -> None:
    from tokenizers.processors import TemplateProcessing

    library = trained_word_piece()
    library.post_processor = TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    write(tmp_path, json.loads(library.to_str()))
    tokenizer, keys = loaded(tmp_path)
    (found,) = reranking_tokens(keys, tokenizer, 512, PAIR[0], [PAIR[1]])
    assert found == library.encode(*PAIR).ids


@pytest.mark.parametrize(("form", "separates"), [("roberta", True), ("template", True), ("template", False)])
def test_separator_next_to_an_end_token(tmp_path: Path, form: str, separates: bool) -> None:
    """<s> query </s></s> document </s>, unless the template has one </s> between."""
    tokenizer_json = xlm_roberta()
    if form == "template":
        token = {name: {"SpecialToken": {"id": name, "type_id": 0}} for name in ("<s>", "</s>")}
        first, second = ({"Sequence": {"id": id, "type_id": 0}} for id in "AB")
        between = [token["</s>"]] * (1 + separates)
        tokenizer_json["post_processor"] = {
            "type": "TemplateProcessing",
            "single": [token["<s>"], first, token["</s>"]],
            "pair": [token["<s>"], first, *between, second, token["</s>"]],
        }
    write(tmp_path, tokenizer_json, sep_token="</s>")
    tokenizer, keys = loaded(tmp_path)
    assert keys.get("tokenizer.ggml.add_sep_token") is (True if separates else None)
    query, document = (tokenizer.encode(text, add_special=False) for text in PAIR)
    bos, eos = tokenizer.bos_id, tokenizer.eos_id
    (found,) = reranking_tokens(keys, tokenizer, 512, PAIR[0], [PAIR[1]])
    assert found == [bos, *query, *([eos] * (1 + separates)), *document, eos]
