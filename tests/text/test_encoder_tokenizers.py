"""WordPiece and unigram tokenizers made only from metadata equal the libraries' own, and damage is safe."""

from __future__ import annotations

import json
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_tokenizers import (
    CORPUS,
    NASTY,
    trained_unigram,
    trained_word_piece,
    unigram_metadata,
    word_piece_metadata,
)

from hotset.errors import TokenizerError
from hotset.text.charsmap import CharsMap
from hotset.text.tokenizer import load_tokenizer


def random_texts(n: int, seed: int = 0) -> list[str]:
    """Return texts of random Unicode characters, many of them combining marks."""
    rng = np.random.default_rng(seed)
    ranges = [(32, 127), (0, 0x300), (0x300, 0x370), (0x370, 0x3000), (0x3000, 0xD800), (0xE000, 0x11000)]
    ranges.append((0x1F000, 0x20000))
    texts = []
    for _ in range(n):
        chosen = rng.integers(0, len(ranges), rng.integers(1, 40))
        texts.append("".join(chr(rng.integers(*ranges[i])) for i in chosen))
    return texts


TEXTS = [*NASTY, *CORPUS[:3], *random_texts(1000)]


# ---- WordPiece


@pytest.mark.parametrize(("lowercase", "strips"), [(True, None), (False, None), (True, False), (False, True)])
def test_word_pieces_are_the_librarys(lowercase: bool, strips: bool | None) -> None:
    library = trained_word_piece(lowercase=lowercase, strips=strips)
    keys = {"normalizer.lowercase": lowercase}
    if strips is not None:
        keys["normalizer.strip_accents"] = strips
    tokenizer = load_tokenizer(word_piece_metadata(library, **keys))
    plain = json.loads(library.to_str())  # without special tokens in texts
    plain["added_tokens"] = []
    library = type(library).from_str(json.dumps(plain))
    for text in TEXTS:
        assert tokenizer.encode(text) == library.encode(text).ids, text
    assert tokenizer.encode("") == [2, 3]


def test_special_tokens_of_bert_are_text_unless_they_are_parsed() -> None:
    tokenizer = load_tokenizer(word_piece_metadata(trained_word_piece()))
    assert tokenizer.encode("[SEP] [CLS]", parse_special=True) == [2, 3, 2, 3]
    assert not {2, 3} & set(tokenizer.encode("[SEP] [CLS]", add_special=False))
    assert tokenizer.decode(tokenizer.encode("The lazy dog"), skip_special=True) == "the lazy dog"


def test_a_word_of_more_than_a_hundred_characters_is_unknown() -> None:
    tokenizer = load_tokenizer(word_piece_metadata(trained_word_piece()))
    assert 1 not in tokenizer.encode("a" * 100, add_special=False)
    assert tokenizer.encode("a" * 101 + " a", add_special=False)[0] == 1


def test_old_files_name_only_cls_and_sep() -> None:
    found = word_piece_metadata(trained_word_piece(), bos_token_id=None, cls_token_id=2)
    assert load_tokenizer(found).encode("") == [2, 3]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"unknown_token_id": None}, "no valid unknown token"),  # the default is 100
        ({"bos_token_id": 10**6}, "names no valid id"),
        ({"seperator_token_id": 10**6}, "names no valid id"),
        ({"seperator_token_id": "3"}, "names no valid id"),
        ({"normalizer.lowercase": "yes"}, "must be true or false"),
    ],
)
def test_a_damaged_word_piece_vocabulary_is_refused(changes: dict, message: str) -> None:
    tokens = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "▁a"]
    given = {"tokens": tokens, "token_type": np.array([3, 3, 3, 3, 1])}
    with pytest.raises(TokenizerError, match=message):
        load_tokenizer(word_piece_metadata(trained_word_piece(), **(given | changes)))


def test_odd_pieces_do_no_harm() -> None:
    tokens = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "▁a", "▁a", "\0", "▁\0", "", "▁", "▁\ud800", "##a"]
    given = {"tokens": tokens, "token_type": np.array([3] * 4 + [1] * 8)}
    tokenizer = load_tokenizer(word_piece_metadata(trained_word_piece(), **given))
    assert tokenizer.encode("a \0 b ##a") == [2, 4, 1, 1, 1, 4, 3]


# ---- unigram


def test_unigrams_are_sentencepieces() -> None:
    library, _ = trained_unigram()
    tokenizer = load_tokenizer(unigram_metadata())
    for text in TEXTS:
        assert tokenizer.encode(text, add_special=False) == library.encode(text), text
    first, last = library.bos_id(), library.eos_id()
    assert tokenizer.encode("the dog") == [first, *library.encode("the dog"), last]
    assert tokenizer.encode("the </s>", parse_special=True)[-2:] == [last, last]
    assert last not in tokenizer.encode("the </s>", add_special=False)


def test_unigrams_equal_tokenizers() -> None:
    """Compare with Hugging Face's unigram tokenizer, set up as for XLM-RoBERTa.

    Its normaliser loses marks after replaced characters. Texts for which it differs from SentencePiece's
    normaliser are left out.
    """
    from tokenizers import Regex, Tokenizer, normalizers, pre_tokenizers
    from tokenizers.models import Unigram

    library, charsmap = trained_unigram()
    metadata = unigram_metadata()
    pieces = zip(metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.scores"].tolist(), strict=True)
    theirs = Tokenizer(Unigram(list(pieces), unk_id=library.unk_id()))
    precompiled = normalizers.Precompiled(charsmap)
    theirs.normalizer = normalizers.Sequence([precompiled, normalizers.Replace(Regex(" {2,}"), " ")])
    theirs.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace()]
    )
    tokenizer, normalised, n = load_tokenizer(metadata), CharsMap(charsmap), 0
    for text in TEXTS:
        same = " ".join(normalised(text).split()) == " ".join(precompiled.normalize_str(text).split())
        if not same or any(token in text for token in ("<s>", "<user>", "\u0085")):
            continue
        n += 1
        assert tokenizer.encode(text, add_special=False) == theirs.encode(text).ids, text
    assert n > 0.85 * len(TEXTS)


def test_without_an_unknown_piece_the_key_names_it() -> None:
    library, _ = trained_unigram()
    types = unigram_metadata()["tokenizer.ggml.token_type"].copy()
    types[library.unk_id()] = 3
    tokenizer = load_tokenizer(unigram_metadata(token_type=types, unknown_token_id=library.unk_id()))
    assert tokenizer.encode("\u1234", add_special=False) == library.encode("\u1234")


@given(st.binary(max_size=200), st.text(max_size=30))
@settings(max_examples=300, deadline=None)
def test_any_charsmap_is_refused_or_does_no_harm(blob: bytes, text: str) -> None:
    try:
        normalised = CharsMap(blob)(text)
    except TokenizerError:
        return
    assert len(normalised) <= 256 * len(text)


@given(st.integers(0, 240_000), st.integers(0, 255))
@settings(max_examples=100, deadline=None)
def test_a_damaged_charsmap_does_no_harm(at: int, byte: int) -> None:
    _, charsmap = trained_unigram()
    damaged = bytearray(charsmap)
    damaged[at % len(damaged)] = byte
    try:
        normalise = CharsMap(bytes(damaged))
    except TokenizerError:
        return
    for text in NASTY:
        normalise(text)


def test_memory_of_texts_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    _, charsmap = trained_unigram()
    expected = [CharsMap(charsmap)(text) for text in TEXTS]
    monkeypatch.setattr("hotset.text.charsmap.REMEMBERED", 5)
    normalise = CharsMap(charsmap)
    assert [normalise(text) for text in TEXTS] == expected
    tracemalloc.start()
    try:
        normalise("".join(map(chr, range(0x4E00, 0x9E00))))
        n_bytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert n_bytes < 1 << 18  # 20,480 steps would take ten times as much
