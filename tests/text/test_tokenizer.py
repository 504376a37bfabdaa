"""Tokenizers made only from metadata equal the libraries' own, keep all bytes, and survive damaged files."""

import sys
import threading
import unicodedata

import numpy as np
import pytest
from tiny_tokenizers import (
    NASTY,
    _trained_bpe,
    _trained_sentencepiece,
    bpe_metadata,
    sentencepiece_metadata,
)

from hotset.errors import ContextLengthError, TokenizerError
from hotset.text.pretokenizers import PRE_TOKENIZERS
from hotset.text.tokenizer import load_tokenizer

# --- byte-level BPE


def _reference_bpe(pre_tokenizers):
    """Build a tokenizer of Hugging Face's library with the same vocabulary."""
    from tokenizers import AddedToken, Tokenizer
    from tokenizers.models import BPE
    from tokenizers.pre_tokenizers import Sequence

    pieces, merges = _trained_bpe()
    reference = Tokenizer(BPE({p: i for i, p in enumerate(pieces)}, [tuple(m.split(" ")) for m in merges]))
    reference.pre_tokenizer = Sequence(pre_tokenizers)
    reference.add_special_tokens(["<|im_start|>", "<|im_end|>", "<|endoftext|>"])
    reference.add_tokens([AddedToken("    ", normalized=False)])
    return reference


def _reference_rows():
    """Yield pre-tokenizers as in the tokenizer.json of one model of each family (not from our table)."""
    from tokenizers import Regex
    from tokenizers.pre_tokenizers import ByteLevel, Digits, Split

    raw = ByteLevel(add_prefix_space=False, use_regex=False)
    gpt2 = ByteLevel(add_prefix_space=False, use_regex=True)
    llama3 = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
        r"|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    o200k = (
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
        r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
        r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    return {
        "gpt-2": [gpt2],
        "smollm": [Digits(individual_digits=True), gpt2],
        "smaug-bpe": [Split(Regex(llama3), "isolated"), raw],
        "qwen2": [Split(Regex(llama3.replace(r"\p{N}{1,3}", r"\p{N}")), "isolated"), raw],
        "gpt-4o": [Split(Regex(o200k), "isolated"), raw],
    }


@pytest.mark.parametrize("pre", ["gpt-2", "smollm", "smaug-bpe", "qwen2", "gpt-4o"])
def test_bpe_equals_hugging_face(pre):
    reference = _reference_bpe(_reference_rows()[pre])
    tokenizer = load_tokenizer(bpe_metadata(pre))
    for text in NASTY:
        whole = unicodedata.normalize("NFC", text) if pre == "qwen2" else text
        expected = reference.encode(whole, add_special_tokens=False).ids
        assert tokenizer.encode(text, add_special=False, parse_special=True) == expected, text


@pytest.mark.parametrize("pre", PRE_TOKENIZERS)
def test_every_pre_tokenizer_keeps_every_byte(pre):
    tokenizer = load_tokenizer(bpe_metadata(pre))
    for text in NASTY:
        whole = unicodedata.normalize("NFC", text) if PRE_TOKENIZERS[pre].normalises else text
        assert tokenizer.decode(tokenizer.encode(text, add_special=False)) == whole


SPLITS = {
    "gpt-2": ["Ab", "1234", " 5", "'", "S", " it", "'s", " iPhone", "\n\n ", " x", ",.", "é你"],
    "smollm": [
        "Ab", "1", "2", "3", "4", " ", "5", "'", "S", " it", "'s", " iPhone", "\n\n ", " x", ",.", "é你",
    ],
    "llama-bpe": ["Ab", "123", "4", " ", "5", "'S", " it", "'s", " iPhone", "\n\n", " ", " x", ",.", "é你"],
    "qwen2": ["Ab", *"1234", " ", "5", "'S", " it", "'s", " iPhone", "\n\n", " ", " x", ",.", "é你"],
    "tekken": ["Ab", *"1234", " ", "5", "'S", " it", "'s", " i", "Phone", "\n\n", " ", " x", ",.", "é你"],
    "gpt-4o": ["Ab", "123", "4", " ", "5", "'S", " it's", " i", "Phone", "\n\n", " ", " x", ",.", "é你"],
    "tiny_aya": ["Ab", "1", "234", " ", "5", "'S", " it's", " i", "Phone", "\n\n", " ", " x", ",.", "é你"],
    "deepseek-v3": [
        "Ab", "123", "4", " ", "5", "'S", " it", "'s", " iPhone", "\n\n", " ", " x", ",.", "é", "你",
    ],
}  # fmt: skip


@pytest.mark.parametrize("pre", SPLITS)
def test_where_a_text_is_cut(pre):
    tokenizer = load_tokenizer(bpe_metadata(pre))
    splits = tokenizer.library.pre_tokenizer.pre_tokenize_str("Ab1234 5'S it's iPhone\n\n  x,.é你")
    words = ["Ab1234 5'S it's iPhone\n\n  x,.é你"[begin:end] for _, (begin, end) in splits]
    assert words == SPLITS[pre]


@pytest.mark.parametrize(("architecture", "pre"), [("opt", "gpt-2"), ("falcon", "falcon"), ("llama", "")])
def test_without_a_name_the_architecture_says_where_a_text_is_cut(architecture, pre):
    """PowerInfer's files carry no tokenizer.ggml.pre."""
    text = "It's 12345 `x`, he said...\n"
    splits = [
        load_tokenizer(metadata).library.pre_tokenizer.pre_tokenize_str(text)
        for metadata in (bpe_metadata(None) | {"general.architecture": architecture}, bpe_metadata(pre))
    ]
    assert splits[0] == splits[1]


def test_an_unknown_pre_tokenizer_is_named():
    with pytest.raises(TokenizerError, match="'klingon-bpe'"):
        load_tokenizer(bpe_metadata("klingon-bpe"))


def test_ignore_merges_takes_a_word_whole():
    pieces, _ = _trained_bpe()
    tokens = [*pieces, "qzqz"]  # a token that no merge reaches
    whole = bpe_metadata("llama-bpe", tokens=tokens, token_type=None, bos_token_id=0, eos_token_id=None)
    apart = bpe_metadata("smaug-bpe", tokens=tokens, token_type=None, bos_token_id=0, eos_token_id=None)
    assert load_tokenizer(whole).encode("qzqz", add_special=False) == [len(pieces)]
    assert load_tokenizer(apart).encode("qzqz", add_special=False) == [pieces.index(c) for c in "qzqz"]


def test_special_tokens_are_text_unless_they_are_parsed():
    tokenizer = load_tokenizer(bpe_metadata())
    start, end = tokenizer.bos_id, tokenizer.eos_id
    text = "<|im_start|>user\nhi<|im_end|>"
    plain = tokenizer.encode(text)
    assert not {start, end} & set(plain)
    assert tokenizer.decode(plain) == text
    parsed = tokenizer.encode(text, parse_special=True)
    assert (parsed[0], parsed[-1]) == (start, end)
    assert tokenizer.decode(parsed) == text
    assert tokenizer.decode(parsed, skip_special=True) == "user\nhi"
    # user-defined tokens are always found
    assert tokenizer.encode("x    y").count(tokenizer.vocabulary["    "]) == 1


def test_text_never_merges_into_a_control_token():
    pieces, _ = _trained_bpe()
    control = next(p for p in pieces if len(p) > 2 and p.isalpha() and p.isascii())
    types = [3 if p == control else 1 for p in pieces]
    metadata = bpe_metadata(tokens=pieces, token_type=types, bos_token_id=None, eos_token_id=None)
    tokenizer = load_tokenizer(metadata)
    id = pieces.index(control)
    assert id not in tokenizer.encode(control)
    assert tokenizer.decode(tokenizer.encode(control)) == control
    assert tokenizer.encode(control, parse_special=True) == [id]


@pytest.mark.parametrize(
    ("pre", "changes", "bos", "eos"),
    [
        ("gpt-2", {}, False, False),
        ("llama-bpe", {}, True, False),
        ("tekken", {}, True, False),
        ("llama-bpe", {"add_bos_token": False}, False, False),
        ("gpt-2", {"add_bos_token": True, "add_eos_token": True}, True, True),
        ("llama-bpe", {"bos_token_id": None}, False, False),
    ],
)
def test_bos_and_eos_follow_the_file(pre, changes, bos, eos):
    tokenizer = load_tokenizer(bpe_metadata(pre, **changes))
    plain = tokenizer.encode("hi", add_special=False)
    expected = [tokenizer.bos_id] * bos + plain + [tokenizer.eos_id] * eos
    assert tokenizer.encode("hi") == expected


@pytest.mark.parametrize("bos", [True, False])
def test_rows_of_a_text_begin_as_texts_do(bos):
    tokenizer = load_tokenizer(bpe_metadata(add_bos_token=bos))
    tokens = list(range(3, 14))
    rows = tokenizer.rows(tokens, 4)
    assert rows.dtype == np.int32
    first = [tokenizer.bos_id] * 2 if bos else [3, 7]
    assert rows.tolist() == [[first[0], 4, 5, 6], [first[1], 8, 9, 10]]  # the last three make no whole row
    assert tokens[0] == 3  # a copy
    assert tokenizer.rows(tokens[:3], 4).shape == (0, 4)


def test_bos_wanted_but_not_named():
    with pytest.raises(TokenizerError, match="bos_token_id"):
        load_tokenizer(bpe_metadata(add_bos_token=True, bos_token_id=10**6))


def test_stop_ids():
    tokenizer = load_tokenizer(bpe_metadata())
    assert {tokenizer.tokens[id] for id in tokenizer.stop_ids} == {"<|im_end|>", "<|endoftext|>"}
    pieces, _ = _trained_bpe()
    more = [*pieces, "<|eot_id|>", "</s>", "<|end|>"]
    # both have the type normal: <|eot_id|> becomes a control token; </s> is a piece of HTML
    tokenizer = load_tokenizer(bpe_metadata(tokens=more, token_type=None, bos_token_id=None, eos_token_id=5))
    assert tokenizer.stop_ids == {5, more.index("<|eot_id|>"), more.index("<|end|>")}
    assert more.index("<|eot_id|>") not in tokenizer.encode("<|eot_id|>")
    harmony = [*pieces, "<|end|>", "<|return|>", "<|call|>"]
    tokenizer = load_tokenizer(
        bpe_metadata(tokens=harmony, token_type=None, bos_token_id=None, eos_token_id=None)
    )
    assert tokenizer.stop_ids == {harmony.index("<|return|>"), harmony.index("<|call|>")}


def test_merges_of_tokens_that_are_not_there():
    _, merges = _trained_bpe()
    tokenizer = load_tokenizer(bpe_metadata(merges=[*merges, "zz yy", "justone"]))
    assert tokenizer.encode("hello world") == load_tokenizer(bpe_metadata()).encode("hello world")


@pytest.mark.parametrize("product", ["zz", "z" * 40, "é" * 12])
def test_a_merge_into_more_than_the_longest_token_is_left_out(product, capfd):
    """Skip merges at which the library would panic, with a backtrace at the terminal."""
    pieces = [*(p for p in _trained_bpe()[0] if len(p) == 1), "z" * 39, "é" * 11]
    merges = [f"{product[:-1]} {product[-1]}"]
    changes = {"tokens": pieces, "token_type": None, "bos_token_id": None, "eos_token_id": None}
    expected = load_tokenizer(bpe_metadata(merges=[], **changes)).encode("hello zz")
    assert load_tokenizer(bpe_metadata(merges=merges, **changes)).encode("hello zz") == expected
    assert "panicked" not in capfd.readouterr().err


@pytest.mark.parametrize("value", [1, np.uint8(1), np.bool_(True)])
def test_a_flag_may_be_a_number(value):
    assert load_tokenizer(bpe_metadata(add_eos_token=value)).add_eos


@pytest.mark.parametrize("key", ["eos", "eot", "eom"])
def test_every_key_for_an_end_ends_a_generation(key):
    """Use a token whose text shows no meaning: only the key marks it as an end."""
    others = {"eos_token_id": None, "token_type": None, "tokens": _trained_bpe()[0]}
    named = load_tokenizer(bpe_metadata(**{**others, "bos_token_id": None, f"{key}_token_id": 77}))
    assert named.stop_ids == {77}
    assert getattr(named, f"{key}_id") == 77


# --- SentencePiece


def rwkv_metadata(**changes):
    """Bytes, and some strings of them, spelled as RWKV's files have them."""
    pieces = [b"\n\n", b" the", b"the", b"th", b"\\n", b"'s", b"\xe4\xbd", "你好".encode(), b"  ", b" \t"]
    tokens = ["<s>", *(repr(data)[2:-1] for data in [bytes([i]) for i in range(256)] + pieces), "[PAD267]"]
    types = np.array([3, *[1] * (len(tokens) - 2), 5], np.int32)
    found = {"model": "rwkv", "tokens": tokens, "token_type": types, "bos_token_id": 0, "eot_token_id": 257}
    return {f"tokenizer.ggml.{key}": value for key, value in (found | changes).items()}


def test_rwkv_takes_the_longest_piece_that_fits():
    tokenizer = load_tokenizer(rwkv_metadata())
    pieces = {tokenizer.token_bytes(id): id for id in range(1, 267)}
    assert len(pieces) == 266
    for text in NASTY:
        text = text.encode("utf-8", "replace").decode()
        data, expected = text.encode(), []
        while data:
            longest = max((piece for piece in pieces if data.startswith(piece)), key=len)
            expected.append(pieces[longest])
            data = data[len(longest) :]
        assert tokenizer.encode(text) == expected
        assert tokenizer.decode(expected) == text
        assert tokenizer.fewest_tokens(text) <= len(expected)
    assert tokenizer.encode("the<s>", parse_special=True) == [pieces[b"the"], 0]
    assert tokenizer.encode("<s>") != [0]
    assert tokenizer.stop_ids == {257}


def test_rwkv_drops_unknown_bytes():
    metadata = rwkv_metadata(tokens=["<s>", "a", "ab"], token_type=[3, 1, 1], eot_token_id=None)
    tokenizer = load_tokenizer({key: value for key, value in metadata.items() if value is not None})
    assert tokenizer.encode("ab?a") == [2, 1]
    assert tokenizer.fewest_tokens("?") == 0


def test_sentencepiece_equals_the_original_model():
    library, *_ = _trained_sentencepiece()
    tokenizer = load_tokenizer(sentencepiece_metadata())
    assert (tokenizer.bos_id, tokenizer.eos_id) == (1, 2)
    for text in NASTY:
        expected = library.encode(text)
        assert tokenizer.encode(text, add_special=False) == expected, text
        assert tokenizer.encode(text) == [1, *expected]
        assert tokenizer.decode(tokenizer.encode(text, add_special=False)) == text.replace("▁", " ")


def test_sentencepiece_special_tokens():
    tokenizer = load_tokenizer(sentencepiece_metadata())
    hi = tokenizer.encode("hi", add_special=False)
    assert tokenizer.encode("<s>hi</s>", add_special=False, parse_special=True) == [1, *hi, 2]
    assert not {1, 2} & set(tokenizer.encode("<s>hi</s>", add_special=False))
    user = tokenizer.vocabulary["<user>"]
    assert tokenizer.encode("hi<user>hi", add_special=False) == [
        *hi,
        user,
        *hi,
    ]  # a space after it, as llama.cpp
    assert tokenizer.decode([1, *hi, 2]) == "<s>hi</s>"
    assert tokenizer.decode([1, *hi, 2], skip_special=True) == "hi"
    assert tokenizer.stop_ids == {2}


def test_sentencepiece_without_the_leading_space():
    tokenizer = load_tokenizer(sentencepiece_metadata(add_space_prefix=False))
    assert tokenizer.token_bytes(tokenizer.encode("hello", add_special=False)[0])[:1] == b"h"
    for text in (" x", "x", "  x"):
        assert tokenizer.decode(tokenizer.encode(text, add_special=False)) == text


def test_sentencepiece_without_types_or_with_odd_pieces():
    _, pieces, *_ = _trained_sentencepiece()
    plain = load_tokenizer(sentencepiece_metadata(token_type=None))
    assert plain.decode(plain.encode("hello 🦙", add_special=False)) == "hello 🦙"
    odd = [*pieces[:-3], "", pieces[300], "\udcff"]  # empty, twice, not UTF-8
    tokenizer = load_tokenizer(sentencepiece_metadata(tokens=odd))
    assert tokenizer.decode(tokenizer.encode("hello 🦙", add_special=False)) == "hello 🦙"
    assert tokenizer.token_bytes(len(odd) - 1) == b"\xff"


# --- bytes and streams


@pytest.mark.parametrize("metadata", [bpe_metadata, sentencepiece_metadata])
def test_a_stream_never_shows_half_a_character(metadata):
    tokenizer = load_tokenizer(metadata())
    for text in NASTY:
        ids = tokenizer.encode(text, add_special=False)
        stream = tokenizer.stream()
        parts = [stream.push(id) for id in ids]
        assert stream.flush() == ""
        assert not any("\ufffd" in part for part in parts) or "\ufffd" in text
        whole = b"".join(map(tokenizer.token_bytes, ids)).decode()
        assert "".join(parts) == whole


def test_a_stream_cut_short_ends_in_one_replacement_character():
    tokenizer = load_tokenizer(bpe_metadata())
    letters = [tokenizer.vocabulary[letter] for letter in "ðŁ¦"]  # three of the four bytes of a llama
    assert [tokenizer.token_bytes(id) for id in letters] == [b"\xf0", b"\x9f", b"\xa6"]
    stream = tokenizer.stream()
    assert [stream.push(id) for id in letters] == ["", "", ""]
    assert stream.flush() == "\ufffd"
    assert stream.flush() == ""
    assert stream.push(letters[2]) == "\ufffd"  # no character begins with this byte
    assert stream.push(tokenizer.vocabulary["a"]) == "a"


def test_a_stream_can_leave_out_special_tokens():
    tokenizer = load_tokenizer(bpe_metadata())
    ids = tokenizer.encode("a<|im_end|>b", parse_special=True)
    for skip, expected in ((True, "ab"), (False, "a<|im_end|>b")):
        stream = tokenizer.stream(skip_special=skip)
        assert "".join(map(stream.push, ids)) == expected


@pytest.mark.parametrize("id", [-1, 10**9])
def test_an_id_outside_the_vocabulary(id):
    with pytest.raises(TokenizerError, match="outside the vocabulary"):
        load_tokenizer(bpe_metadata()).decode([id])


@pytest.mark.parametrize("metadata", [bpe_metadata, sentencepiece_metadata])
def test_lone_surrogates_become_replacement_characters(metadata):
    tokenizer = load_tokenizer(metadata())
    assert tokenizer.decode(tokenizer.encode("a\ud800b \ud83e\udd99", add_special=False)) == "a\ufffdb 🦙"


# --- long texts


@pytest.mark.parametrize("metadata", [bpe_metadata, sentencepiece_metadata])
def test_other_threads_run_while_a_long_text_is_tokenized(metadata):
    """Disable switches by time, so that another thread runs only if the interpreter's lock is released."""
    tokenizer, gate, ran = load_tokenizer(metadata()), threading.Lock(), threading.Event()
    tokenizer.encode("hello")
    gate.acquire()

    def wait_and_run() -> None:
        with gate:
            ran.set()

    thread = threading.Thread(target=wait_and_run)
    thread.start()
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e4)
    try:
        gate.release()
        for _ in range(50):  # the system decides when the thread gets a core
            tokenizer.encode("seven hells " * 3000)
            if ran.is_set():
                break
        assert ran.is_set()
    finally:
        sys.setswitchinterval(interval)
        thread.join()


@pytest.mark.parametrize("metadata", [bpe_metadata, sentencepiece_metadata])
def test_the_bytes_of_a_text_say_how_many_tokens_it_has_at_least(metadata):
    tokenizer = load_tokenizer(metadata())
    longest = tokenizer.tokens[max(range(tokenizer.n_vocab), key=lambda id: len(tokenizer.token_bytes(id)))]
    for text in [
        *NASTY,
        "".join(NASTY), "\ud800" * 90, "\ud83e\udd99" * 90, longest * 50,
        *(t * 40 for t in NASTY),
    ]:  # fmt: skip
        for special in (False, True):
            ids = tokenizer.encode(text, add_special=False, parse_special=special)
            assert tokenizer.fewest_tokens(text) <= len(ids), text
            assert tokenizer.encode(text, False, special, most=len(ids)) == ids
    assert tokenizer.fewest_tokens("x" * 100_000) >= 1000
    assert tokenizer.fewest_tokens("") == 0


@pytest.mark.parametrize("metadata", [bpe_metadata, sentencepiece_metadata])
def test_long_tokens_count_only_for_the_bytes_that_they_have(metadata):
    given = metadata()
    given["tokenizer.ggml.tokens"] = [*given["tokenizer.ggml.tokens"], "-" * 1000]
    for name, value in (("scores", 0.0), ("token_type", 4)):
        if f"tokenizer.ggml.{name}" in given:
            given[f"tokenizer.ggml.{name}"] = [*given[f"tokenizer.ggml.{name}"], value]
    tokenizer = load_tokenizer(given)
    assert tokenizer.fewest_tokens("x" * 100_000) >= 1000
    assert tokenizer.fewest_tokens("-" * 100_000) == 100


def test_a_text_of_few_bytes_fits_without_a_look_at_the_vocabulary(monkeypatch):
    tokenizer = load_tokenizer(bpe_metadata())
    monkeypatch.setattr(tokenizer, "fewest_tokens", None)
    assert tokenizer.encode("x" * 100, most=100) == tokenizer.encode("x" * 100)


def test_bytes_that_texts_lose_count_for_no_tokens():
    given = bpe_metadata()
    given["tokenizer.ggml.tokens"] = [
        "[gone]" if one == "z" else one for one in given["tokenizer.ggml.tokens"]
    ]
    tokenizer = load_tokenizer(given)
    assert tokenizer.encode("z" * 100, False) == []
    assert tokenizer.fewest_tokens("z" * 100_000) == 0
    assert tokenizer.fewest_tokens("x" * 100_000) >= 1000


@pytest.mark.parametrize("metadata", [bpe_metadata, sentencepiece_metadata])
def test_a_text_that_cannot_fit_is_not_tokenized(metadata, monkeypatch):
    tokenizer = load_tokenizer(metadata())
    monkeypatch.setattr(tokenizer, "_encode_plain", None)
    with pytest.raises(ContextLengthError, match="tokens or more, which do not fit in the context of 9"):
        tokenizer.encode("x" * 100_000, most=9)


def test_a_vocabulary_that_lacks_bytes_says_nothing_of_the_length():
    pieces, _ = _trained_bpe()
    without = [piece for piece in pieces if piece != "x"]
    tokenizer = load_tokenizer(
        bpe_metadata(tokens=without, token_type=None, merges=[], bos_token_id=None, eos_token_id=None)
    )
    assert tokenizer.encode("x" * 1000, most=0) == []
    types = [3 if piece == "x" else 1 for piece in pieces]  # "x" exists only as a control token
    tokenizer = load_tokenizer(
        bpe_metadata(tokens=pieces, token_type=types, merges=[], bos_token_id=None, eos_token_id=None)
    )
    assert tokenizer.encode("x" * 1000, most=0) == []


# --- damaged files


@pytest.mark.parametrize(
    "changes",
    [
        {"model": None}, {"model": "t5"}, {"model": 7}, {"tokens": None}, {"tokens": []}, {"tokens": [1, 2]},
        {"tokens": "abc"}, {"merges": None}, {"merges": [3]}, {"token_type": [1, 2]}, {"token_type": "x"},
        {"token_type": [0.5] * 10_000}, {"model": "llama"}, {"model": "llama", "scores": [0.0]},
        {"model": "llama", "scores": ["a"] * 1000}, {"model": "llama", "scores": [[0.0], [0.0, 1.0]]},
        {"model": "llama", "scores": [[0.0]] * 1000}, {"model": "llama", "scores": 3.0},
        {"model": "llama", "scores": "0.0"}, {"model": "llama", "scores": np.full(1000, np.nan, np.float32)},
        {"model": ["gpt2"]}, {"model": "x" * 1000}, {"token_type": [[1], [1, 2]]}, {"token_type": 1},
        {"token_type": np.ones((1000, 2), np.int32)}, {"pre": ["gpt-2"]}, {"pre": 3}, {"pre": "x" * 1000},
        {"add_bos_token": np.array([True, False])}, {"add_bos_token": [[1], [2, 3]]},
        {"add_eos_token": "yes"}, {"add_eos_token": 0.5},
        {"model": "llama", "scores": [0.0] * 1000, "add_space_prefix": np.ones(3)}, {"tokens": [["a"]]},
    ],
)  # fmt: skip
def test_damaged_metadata_gives_one_message(changes):
    with pytest.raises(TokenizerError) as error:
        load_tokenizer(bpe_metadata(**changes))
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 300


def test_nonsense_that_can_be_read_is_harmless():
    pieces, _ = _trained_bpe()
    tokenizer = load_tokenizer(
        bpe_metadata(
            tokens=["\udcff", "", *pieces], token_type=[99, -5] + [6] * len(pieces), bos_token_id=-1,
            eos_token_id="x",
        ),
    )  # fmt: skip
    assert tokenizer.bos_id is None
    assert tokenizer.token_bytes(0) == b"\xff"
    assert tokenizer.decode(tokenizer.encode("hello")) == "hello"
