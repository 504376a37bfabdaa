"""Fill in the middle: the order of the marks by family, and the cuts for a small context."""

from __future__ import annotations

from typing import Any

import pytest
from byte_models import byte_letters

from hotset.errors import ContextLengthError, InvalidRequestError
from hotset.text.infill import File, Gap, InfillTokens, encode_gap
from hotset.text.tokenizer import Tokenizer, load_tokenizer

QWEN = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|repo_name|>", "<|file_sep|>")
STARCODER = ("<fim_prefix>", "<fim_middle>", "<fim_suffix>", "<fim_pad>", "<filename>")
DEEPSEEK = ("<｜fim▁hole｜>", "<｜fim▁begin｜>", "<｜fim▁end｜>")
MORE = 1000


def bytes_of(*marks: str, **keys: Any) -> tuple[Tokenizer, dict[str, Any]]:
    """Return a vocabulary of bytes and these marks, and the keys of its file."""
    letters = byte_letters()
    metadata: dict[str, Any] = {
        "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": [*letters, *marks], "tokenizer.ggml.merges": [],
        "tokenizer.ggml.token_type": [1] * 256 + [3] * len(marks),
    }  # fmt: skip
    metadata |= {key if "." in key else f"tokenizer.ggml.{key}": value for key, value in keys.items()}
    return load_tokenizer(metadata), metadata


def spelled(tokenizer: Tokenizer, ids: list[int]) -> str:
    return b"".join(tokenizer.token_bytes(id) for id in ids).decode()


@pytest.mark.parametrize(
    ("marks", "keys", "expected"),
    [
        (QWEN, {}, "<|fim_prefix|>def f(<|fim_suffix|>):\n<|fim_middle|>"),
        (STARCODER, {}, "<fim_prefix>def f(<fim_suffix>):\n<fim_middle>"),
        (DEEPSEEK, {}, "<｜fim▁begin｜>def f(<｜fim▁hole｜>):\n<｜fim▁end｜>"),
        (STARCODER, {"general.name": "Mellum 4b Base"}, "<fim_suffix>):\n<fim_prefix>def f(<fim_middle>"),
        (
            ("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),
            {},
            "<|code_prefix|>def f(<|code_suffix|>):\n<|code_middle|>",
        ),
        (
            ("A", "B", "C"),
            {"fim_pre_token_id": 256, "suffix_token_id": 258, "fim_mid_token_id": 257},
            "Adef f(C):\nB",
        ),
        (
            (*QWEN, "<s>"),
            {"bos_token_id": 261, "add_bos_token": True},
            "<s><|fim_prefix|>def f(<|fim_suffix|>):\n<|fim_middle|>",
        ),
    ],
    ids=["qwen", "starcoder", "deepseek", "mellum", "glm", "keys", "bos"],
)
def test_each_family_has_its_order(marks: tuple[str, ...], keys: dict[str, Any], expected: str):
    tokenizer, metadata = bytes_of(*marks, **keys)
    ids = encode_gap(tokenizer, metadata, Gap(prefix="def f(", suffix="):\n"), MORE)
    assert spelled(tokenizer, ids) == expected


def test_codellama_prompt_equals_its_authors():
    """Encode the prefix with SentencePiece's leading space, and the suffix without."""
    marks = ["▁<PRE>", "▁<SUF>", "▁<MID>", "▁<EOT>"]
    pieces = ["<unk>", "<s>", "</s>", "▁", "a", "b", "▁a", "▁b", *marks]
    metadata = {
        "tokenizer.ggml.model": "llama", "tokenizer.ggml.tokens": pieces,
        "tokenizer.ggml.scores": [0.0] * 3 + [-float(i) for i in range(len(pieces) - 3)],
        "tokenizer.ggml.token_type": [2, 3, 3, *[1] * 5, *[3] * 4],
        "tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.eos_token_id": 2,
    }  # fmt: skip
    tokenizer = load_tokenizer(metadata)
    ids = encode_gap(tokenizer, metadata, Gap(prefix="a", suffix="b"), MORE)
    assert [tokenizer.tokens[id] for id in ids] == ["<s>", "▁<PRE>", "▁a", "▁<SUF>", "b", "▁<MID>"]
    assert tokenizer.vocabulary["▁<EOT>"] in tokenizer.stop_ids


def test_marks_that_a_text_spells_are_text():
    tokenizer, metadata = bytes_of(*QWEN)
    ids = encode_gap(tokenizer, metadata, Gap(prefix=QWEN[2], suffix=QWEN[0], begun=QWEN[1]), MORE)
    assert sum(id >= 256 for id in ids) == 3
    assert spelled(tokenizer, ids) == f"{QWEN[0]}{QWEN[2]}{QWEN[1]}{QWEN[1]}{QWEN[0]}{QWEN[2]}"


def test_a_vocabulary_without_all_three_marks_is_refused():
    for marks in ((), QWEN[:2], (QWEN[0], DEEPSEEK[0], STARCODER[1])):
        tokenizer, metadata = bytes_of(*marks)
        with pytest.raises(InvalidRequestError, match="cannot fill in the middle"):
            encode_gap(tokenizer, metadata, Gap(prefix="a", suffix="b"), MORE)
    hostile = {"fim_pre_token_id": -1, "fim_suf_token_id": 10**30, "fim_mid_token_id": "x"}
    tokenizer, metadata = bytes_of(**hostile)
    assert InfillTokens.of(tokenizer.vocabulary, tokenizer.n_vocab, metadata) is None


def test_other_files_come_before_behind_their_names():
    gap = Gap(prefix="p", suffix="s", begun="b", files=[File("x.py", "one"), File("y.py", "two")], trims=True)
    tokenizer, metadata = bytes_of(*QWEN)
    assert spelled(tokenizer, encode_gap(tokenizer, metadata, gap, MORE)) == (
        "<|repo_name|>repository\n<|file_sep|>x.py\none<|file_sep|>y.py\ntwo<|file_sep|>filename\n"
        "<|fim_prefix|>pb<|fim_suffix|>s<|fim_middle|>"
    )
    tokenizer, metadata = bytes_of(*DEEPSEEK)
    between = "\n\n--- snippet ---\n\n"
    assert spelled(tokenizer, encode_gap(tokenizer, metadata, gap, MORE)) == (
        f"{between}one{between}two{between}<｜fim▁begin｜>pb<｜fim▁hole｜>s<｜fim▁end｜>"
    )
    tokenizer, metadata = bytes_of(*STARCODER, **{"general.basename": "Mellum"})
    assert spelled(tokenizer, encode_gap(tokenizer, metadata, gap, MORE)) == (
        "<filename>x.py\none<filename>y.py\ntwo<filename>filename\n<fim_suffix>s<fim_prefix>pb<fim_middle>"
    )


def test_text_next_to_the_gap_stays():
    tokenizer, metadata = bytes_of(*DEEPSEEK)
    long = "".join(map(str, range(10_000)))

    def parts(prefix: str, suffix: str, most: int, files: tuple[File, ...] = ()) -> tuple[str, str, str]:
        gap = Gap(prefix=prefix, suffix=suffix, files=files, trims=True)
        ids = encode_gap(tokenizer, metadata, gap, most)
        assert len(ids) <= most
        text = spelled(tokenizer, ids)
        context, _, rest = text.partition(DEEPSEEK[1])
        before, _, behind = rest.partition(DEEPSEEK[0])
        return context, before, behind.removesuffix(DEEPSEEK[2])

    assert parts(long, long, 103) == ("", long[-75:], long[:25])
    assert parts(long, "short", 103) == ("", long[-95:], "short")
    assert parts("short", long, 103) == ("", "short", long[:95])
    context, before, behind = parts("p", "s", 105, (File("f", "far" * 99), File("n", "near")))
    assert (before, behind) == ("p", "s")
    assert context.endswith("far\n\n--- snippet ---\n\nnear\n\n--- snippet ---\n\n")
    assert len(context) == 100
    assert parts("", "", 3) == ("", "", "")


def test_oversized_gap_is_refused_unless_trimmed():
    tokenizer, metadata = bytes_of(*QWEN)
    # (encode_gap refuses texts that are certainly too long; the engine refuses the others.)
    for gap in (Gap(prefix="a" * 5000, suffix=""), Gap(prefix="", suffix="a" * 5000)):
        with pytest.raises(ContextLengthError, match="do not fit in the context of 100"):
            encode_gap(tokenizer, metadata, gap, 100)
    with pytest.raises(ContextLengthError, match="do not fit in the context of 100"):
        encode_gap(tokenizer, metadata, Gap(prefix="", suffix="", begun="z" * 98, trims=True), 100)
