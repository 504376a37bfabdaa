"""The converter: shards, types, tokenizers and refused input; test_architectures compares the logits."""

from __future__ import annotations

import json
import os
import random
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from killed import kill_while_it_writes, needs_unnamed_files

from hotset.convert import hf
from hotset.convert.hf import convert_hf
from hotset.convert.hf_config import CLASSES
from hotset.convert.hf_tokenizer import NAMES, tokenizer_keys
from hotset.errors import (
    FormatError,
    HotsetError,
    InvalidRequestError,
    ModelNotFoundError,
    TokenizerError,
    UnsupportedModelError,
)
from hotset.formats.gguf import GGUFFile, open_gguf
from hotset.formats.quants import GGMLType, dequantize
from hotset.model.config import config_from_gguf
from hotset.model.decoder import describe
from hotset.text.tokenizer import load_tokenizer

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
tiny_models = pytest.importorskip("tiny_models")

INNER_KEYS = ["type", "rope_type", "factor", "rope_theta", "vocab", "merges", "id", "content", "special"]
INNER_KEYS += ["pretokenizers", "pattern", "Regex", "behavior", "processors", "single", "name", "template"]
FUZZED_KEYS = {
    "config.json": ["head_dim", "rope_scaling", "sliding_window", "layer_types", "hidden_act_param"],
    "tokenizer.json": ["normalizer", "post_processor"],
    "tokenizer_config.json": ["unk_token", "chat_template"],
}
NASTY = "the then 1234  in\tthe\n\n naïve 🦙🚀 日本語 it's IT'S e\u0301 <|end|> <|user|>"


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    recipe = tiny_models.RECIPES["llama"]
    tiny_models.save(recipe, tiny_models.build(recipe), tmp_path / "hf")
    return tmp_path / "hf"


def converted(folder: Path, type: GGMLType | str = GGMLType.F32) -> GGUFFile:
    convert_hf(folder, folder.parent / "out.gguf", type)
    return open_gguf(folder.parent / "out.gguf")


def values(gguf: GGUFFile, name: str) -> np.ndarray:
    info = gguf.tensors[name]
    return dequantize(gguf.data(name), info.type, info.shape)


def edit(path: Path, **entries: Any) -> None:
    """Replace entries of a JSON file; None removes one."""
    content = json.loads(path.read_text()) | entries
    path.write_text(json.dumps({key: value for key, value in content.items() if value is not None}))


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "float64"])
def test_shards_of_every_float_type(tmp_path: Path, dtype: str) -> None:
    recipe = tiny_models.RECIPES["qwen2"]
    model = tiny_models.build(recipe).to(getattr(torch, dtype))
    tiny_models.save(recipe, model, tmp_path / "hf", max_shard_size="200KB")
    assert len(list((tmp_path / "hf").glob("*.safetensors"))) > 2
    gguf = converted(tmp_path / "hf")
    down = model.model.layers[2].mlp.down_proj.weight.detach().float().numpy()
    assert np.array_equal(values(gguf, "blk.2.ffn_down.weight"), down)
    bias = model.model.layers[0].self_attn.q_proj.bias.detach().float().numpy()
    assert np.array_equal(values(gguf, "blk.0.attn_q.bias"), bias)
    describe(config_from_gguf(gguf), gguf.tensors)


@pytest.mark.parametrize(
    ("type", "name", "tolerance"),
    [("F16", "F16", 2**-11), ("bf16", "BF16", 2**-8), (GGMLType.Q8_0, "Q8_0", None)],
)
def test_types(checkpoint: Path, type: GGMLType | str, name: str, tolerance: float | None) -> None:
    exact = converted(checkpoint)
    stored = converted(checkpoint, type)
    for tensor, info in stored.tensors.items():
        matrix = len(info.shape) > 1
        assert info.type.name == (name if matrix else "F32")
        expected, found = values(exact, tensor), values(stored, tensor)
        if not matrix:
            assert np.array_equal(found, expected)
        elif tolerance is not None:
            np.testing.assert_allclose(found, expected, rtol=tolerance, atol=1e-7)
        else:  # half a step of the block's scale, max / 127, and the scale's own rounding to float16
            blocks = np.abs(expected.reshape(-1, 32)).max(1, keepdims=True)
            error = np.abs(found - expected).reshape(-1, 32)
            assert (error <= blocks / 127 * 0.51 + blocks * 2**-11).all()


def test_rows_that_blocks_do_not_divide_become_f16(tmp_path: Path) -> None:
    recipe = tiny_models.RECIPES["llama"]
    tiny_models.save(recipe, tiny_models.build(recipe, intermediate_size=72), tmp_path / "hf")
    gguf = converted(tmp_path / "hf", GGMLType.Q8_0)
    assert gguf.tensors["blk.0.ffn_down.weight"].type == GGMLType.F16
    assert gguf.tensors["blk.0.ffn_up.weight"].type == GGMLType.Q8_0


def test_the_tokenizer_comes_along(checkpoint: Path) -> None:
    theirs = tiny_models.save_tokenizer(checkpoint)
    gguf = converted(checkpoint)
    assert gguf.metadata["tokenizer.ggml.pre"] == "gpt-2"
    assert gguf.metadata["tokenizer.ggml.bos_token_id"] == 300
    assert gguf.metadata["tokenizer.ggml.eos_token_id"] == 301
    assert gguf.metadata["tokenizer.ggml.add_bos_token"]
    assert "<|user|>" in str(gguf.metadata["tokenizer.chat_template"])
    types = gguf.metadata["tokenizer.ggml.token_type"]
    assert isinstance(types, np.ndarray)
    assert types[[0, 300, 301, 302, 303, 319]].tolist() == [1, 3, 3, 4, 5, 5]
    ours = load_tokenizer(gguf.metadata)
    assert ours.encode(NASTY, parse_special=True) == [300, *theirs.encode(NASTY).ids]


def test_sentencepiece_comes_along(checkpoint: Path) -> None:
    import sentencepiece

    text = checkpoint / "text.txt"
    text.write_text("the cat then sat on the mat; it is 12 o'clock in the inn\n" * 50)
    sentencepiece.SentencePieceTrainer.train(
        input=str(text), model_prefix=str(checkpoint / "tokenizer"), vocab_size=300, model_type="bpe",
        byte_fallback=True, normalization_rule_name="identity", remove_extra_whitespaces=False,
        minloglevel=2,
    )  # fmt: skip
    added = [
        {"id": 300, "content": "<|im_start|>", "special": True},
        {"id": 303, "content": "<x>", "special": False},
    ]
    edit(checkpoint / "tokenizer.json", added_tokens=added)
    edit(checkpoint / "tokenizer_config.json", bos_token="<s>", eos_token="</s>")
    gguf = converted(checkpoint)
    assert gguf.metadata["tokenizer.ggml.model"] == "llama"
    assert gguf.metadata["tokenizer.ggml.add_space_prefix"]
    assert [gguf.metadata[f"tokenizer.ggml.{k}_token_id"] for k in ("bos", "eos")] == [1, 2]
    types = gguf.metadata["tokenizer.ggml.token_type"]
    assert isinstance(types, np.ndarray)
    assert types[[0, 1, 3, 258, 259, 300, 301, 303, 319]].tolist() == [2, 3, 6, 6, 1, 3, 5, 4, 5]
    theirs = sentencepiece.SentencePieceProcessor(model_file=str(checkpoint / "tokenizer.model"))
    message = "the cat in the  hat 🦙 naïve\n"
    assert load_tokenizer(gguf.metadata).encode(message) == [1, *theirs.encode(message)]


WORDS = [
    "the",
    "cat",
    "sat",
    "on",
    "Größe",
    "naïve",
    "日本",
    "🦙",
    "12",
    "o'clock",
    "  ",
    "   ",
    "\n",
    "\t",
    "▁",
    "x▁y",
]
WORDS += ["<start_of_turn>", "<tool>", "<start", "of_turn>", "\u3000", "ﬁ", "…", ";", "don't", "<s>", "<unk>"]


def spaced_texts(n: int, seed: int) -> list[str]:
    rng = random.Random(seed)
    seps = ["", " ", " ", "  ", "    "]
    return [
        "".join(rng.choice(WORDS) + rng.choice(seps) for _ in range(rng.randint(0, 9))) for _ in range(n)
    ] + [rng.choice(seps) + rng.choice(WORDS) + rng.choice(seps) for _ in range(n // 4)]


def trained_model(folder: Path, **options: Any) -> Any:
    """Train a SentencePiece model with these options, and save it as folder/tokenizer.model."""
    import sentencepiece

    folder.mkdir(exist_ok=True)
    messages = [text for text in spaced_texts(400, 5) if text.strip()]
    settings = {"model_type": "bpe", "vocab_size": 420, "normalization_rule_name": "identity"}
    settings |= {
        "byte_fallback": True,
        "character_coverage": 1.0,
        "hard_vocab_limit": False,
        "minloglevel": 2,
    }
    with (folder / "tokenizer.model").open("wb") as file:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(messages), model_writer=file, **settings | options
        )
    return sentencepiece.SentencePieceProcessor(model_file=str(folder / "tokenizer.model"))


USER: dict[str, Any] = {"user_defined_symbols": ["<start_of_turn>", "<tool>", "  ", "\n"]}
SENTENCEPIECE_OPTIONS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "spaces as they are": {"remove_extra_whitespaces": False},
    "no prefix": {"add_dummy_prefix": False, "remove_extra_whitespaces": False},
    "no prefix, fewer spaces": {"add_dummy_prefix": False},
    "user-defined": {**USER, "remove_extra_whitespaces": False},
    "user-defined, fewer spaces": USER,
    "user-defined, no prefix": {**USER, "remove_extra_whitespaces": False, "add_dummy_prefix": False},
    "user-defined, no prefix, fewer spaces": {**USER, "add_dummy_prefix": False},
    "no bytes": {"byte_fallback": False, "character_coverage": 0.98, "vocab_size": 120},
    "no bytes, user-defined": {**USER, "byte_fallback": False, "character_coverage": 0.98, "vocab_size": 120},
    "control": {"control_symbols": ["<ctl>", "<tool>"]},
    "other ids": {"unk_id": 3, "bos_id": 2, "eos_id": 1, "pad_id": 0},
    "no bos, no eos": {"bos_id": -1, "eos_id": -1},
    "digits": {"split_digits": True, "remove_extra_whitespaces": False},
    "pieces of spaces": {"allow_whitespace_only_pieces": True, "remove_extra_whitespaces": False},
}


@pytest.mark.parametrize("name", SENTENCEPIECE_OPTIONS)
def test_a_sentencepiece_model_keeps_its_options(tmp_path: Path, name: str) -> None:
    """Compare ids with SentencePiece's for tokenizer.model files trained with various options."""
    theirs = trained_model(tmp_path / "hf", **SENTENCEPIECE_OPTIONS[name])
    ours = load_tokenizer(tokenizer_keys(tmp_path / "hf", {"vocab_size": 500}))
    for text in spaced_texts(1200, 6):
        assert ours.encode(text, add_special=False) == theirs.encode(text), text
        assert ours.fewest_tokens(text) <= len(theirs.encode(text))
    expected = (theirs.bos_id(), theirs.eos_id(), theirs.unk_id(), theirs.pad_id())
    found = (ours.bos_id, ours.eos_id, ours.unk_id, ours.pad_id)
    assert tuple(-1 if id is None else id for id in found) == expected
    assert ours.add_bos == (theirs.bos_id() >= 0)


def test_a_user_defined_piece_is_one_token_and_not_special(tmp_path: Path) -> None:
    theirs = trained_model(tmp_path / "hf", **USER, remove_extra_whitespaces=False)
    ours = load_tokenizer(tokenizer_keys(tmp_path / "hf", {"vocab_size": 500}))
    user = theirs.piece_to_id("<start_of_turn>")
    assert ours.encode("the<start_of_turn>cat", add_special=False).count(user) == 1
    assert ours.is_user_defined(user)
    for parse in (False, True):  # also with control tokens in the text
        ids = ours.encode("the <start_of_turn>cat  sat", add_special=False, parse_special=parse)
        assert ids == theirs.encode("the <start_of_turn>cat  sat")
        assert ours.decode(ids) == "the <start_of_turn>cat  sat"
    ids = ours.encode("<s>the<tool>cat</s>", parse_special=True, add_special=False)
    assert ids == [1, *theirs.encode("the<tool>cat"), 2]
    assert ours.decode(ids, skip_special=True) == "the<tool>cat"
    # A token whose text ends an answer becomes a control token, so a user's text never becomes it.
    ends = trained_model(tmp_path / "hf", user_defined_symbols=["<end_of_turn>"])
    stopping, end = load_tokenizer(tokenizer_keys(tmp_path / "hf", {"vocab_size": 500})), "<end_of_turn>"
    assert ends.piece_to_id(end) in ends.encode(f"cat{end}")
    assert ends.piece_to_id(end) in stopping.encode(f"cat{end}", parse_special=True)
    assert ends.piece_to_id(end) not in stopping.encode(f"cat{end}")
    inside = ours.encode_inside(" cat<tool>")
    assert b"".join(map(ours.token_bytes, inside)) == b" cat<tool>"
    assert inside[-1] == theirs.piece_to_id("<tool>")


def test_tokenizer_config_extends_a_sentencepiece_model(tmp_path: Path) -> None:
    theirs = trained_model(tmp_path / "hf", **USER)
    user, n = theirs.piece_to_id("<start_of_turn>"), theirs.vocab_size()
    added = {
        str(user): {"content": "<start_of_turn>", "special": True},
        str(n): {"content": "<x>", "special": False},
    }
    (tmp_path / "hf" / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": added}))
    ours = load_tokenizer(tokenizer_keys(tmp_path / "hf", {"vocab_size": 500}))
    assert ours.is_special(user)
    assert user not in ours.encode("<start_of_turn>")
    assert ours.encode("the<x>", add_special=False)[-1] == n
    (tmp_path / "hf" / "tokenizer_config.json").write_text('{"added_tokens_decoder": {"3": 4}}')
    with pytest.raises(TokenizerError, match=r"added tokens in .* are damaged"):
        tokenizer_keys(tmp_path / "hf", {"vocab_size": 500})
    added = {str((1 << 24) - 1): {"content": "<x>", "special": False}}
    (tmp_path / "hf" / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": added}))
    with pytest.raises(TokenizerError, match="added token has the id 16777215, and the model only 500"):
        tokenizer_keys(tmp_path / "hf", {"vocab_size": 500})
    (tmp_path / "hf" / "tokenizer_config.json").unlink()
    (tmp_path / "hf" / "tokenizer.json").write_text(
        '{"added_tokens": [{"id": 1e999, "content": "x", "special": true}]}'
    )
    with pytest.raises(TokenizerError, match=r"added tokens in .* are damaged"):
        tokenizer_keys(tmp_path / "hf", {"vocab_size": 500})


@pytest.mark.parametrize(
    "literal", [r"'\ud800'", "{1, 2}", "+" * 100_000 + "1", "(" * 5000 + "1" + ")" * 5000, "'a", "1 + 1"]
)
def test_a_damaged_vocabulary_of_rwkv_is_refused(tmp_path: Path, literal: str) -> None:
    path = tmp_path / "rwkv_vocab_v20230424.txt"
    path.write_text(f"1 'a' 1\n2 {literal} 3\n")
    with pytest.raises(TokenizerError, match="txt is damaged: "):
        tokenizer_keys(tmp_path, {"vocab_size": 500})
    path.write_text("1 'a' 1\n2 b'\\xe4' 1\n")
    assert tokenizer_keys(tmp_path, {"vocab_size": 3})["tokenizer.ggml.tokens"] == ["<s>", "a", "\\xe4"]


@pytest.mark.parametrize("id", ["1e999", "-1e999", "NaN", '"x"'])
def test_ids_other_than_numbers_are_refused(tmp_path: Path, merging: dict[str, Any], id: str) -> None:
    steps = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}
    added = [{"id": 7, "content": "x", "special": True}]
    text = json.dumps(merging | {"pre_tokenizer": steps, "added_tokens": added})
    (tmp_path / "tokenizer.json").write_text(text.replace('"id": 7', f'"id": {id}'))
    with pytest.raises(TokenizerError, match=r"tokenizer.json is damaged"):
        tokenizer_keys(tmp_path, {"vocab_size": 5000})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"model_type": "unigram"}, "is a unigram model, not BPE"),
        ({"model_type": "char"}, "is a char model, not BPE"),
        ({"model_type": "word"}, "is a word model, not BPE"),
        ({"normalization_rule_name": "nmt_nfkc"}, "normalization_rule_name other than identity"),
        ({"normalization_rule_name": "nfkc_cf"}, "normalization_rule_name other than identity"),
        ({"treat_whitespace_as_suffix": True}, "treat_whitespace_as_suffix"),
    ],
)
def test_sentencepiece_models_that_are_refused(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    trained_model(tmp_path / "hf", **options)
    with pytest.raises(TokenizerError, match=f"{message}.*is not supported"):
        tokenizer_keys(tmp_path / "hf", {"vocab_size": 500})


def test_sentencepiece_models_that_change_what_they_decode_are_refused(tmp_path: Path) -> None:
    (tmp_path / "rules.tsv").write_text("0041\t0042\n")
    trained_model(tmp_path / "hf", denormalization_rule_tsv=str(tmp_path / "rules.tsv"))
    with pytest.raises(TokenizerError, match=r"denormalizer_spec\), which is not supported"):
        tokenizer_keys(tmp_path / "hf", {"vocab_size": 500})


def test_sentencepiece_models_without_visible_spaces_are_refused(tmp_path: Path) -> None:
    trained_model(tmp_path / "hf")
    with (tmp_path / "hf" / "tokenizer.model").open("ab") as file:
        file.write(b"\x1a\x02\x28\x00")  # escape_whitespaces: messages that come twice are merged
    with pytest.raises(TokenizerError, match=r"escape_whitespaces false\), which is not supported"):
        tokenizer_keys(tmp_path / "hf", {"vocab_size": 500})


def test_a_damaged_sentencepiece_model_gives_keys_or_a_message(tmp_path: Path) -> None:
    trained_model(tmp_path / "hf", **USER)
    path, rng = tmp_path / "hf" / "tokenizer.model", random.Random(0)
    whole = path.read_bytes()
    for _ in range(400):
        damaged = bytearray(whole)
        for _ in range(rng.randint(1, 3)):
            at = rng.randrange(len(damaged))
            damaged[at : at + rng.randint(0, 2)] = rng.randbytes(rng.randint(0, 2))
        path.write_bytes(damaged)
        message = ""
        try:
            load_tokenizer(tokenizer_keys(path.parent, {"vocab_size": 500})).encode("the <tool>  cat")
        except TokenizerError as error:
            message = str(error)
        assert "\n" not in message


BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
LAST = BYTES | {"use_regex": False}
CONTIGUOUS = {"type": "Punctuation", "behavior": "Contiguous"}
DIGIT, DIGITS = ({"type": "Digits", "individual_digits": each} for each in (True, False))


def split(pattern: str, behavior: str = "Isolated") -> dict[str, Any]:
    invert = behavior == "Removed"
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": behavior, "invert": invert}


CL100K = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
QWEN2 = CL100K.replace("{1,3}", "")
QWEN35 = QWEN2.replace(r"?\p{L}+", r"?[\p{L}\p{M}]+").replace(r"[^\s\p{L}\p{N}]", r"[^\s\p{L}\p{M}\p{N}]")
O200K = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TEKKEN = O200K.replace(r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?", "").replace("{1,3}", "")
CJK = split("[一-龥ࠀ-一가-퟿]+")
DEEPSEEK_LETTERS = (  # escapes: normalisation would make other letters of these
    r"\s?"
    "[A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕἠ-ὅὈ-Ὅὐ"
    "-ὗὙὛὝὟ-\u1f7dᾀ-ᾴᾶ-ᾼ\u1fbeῂ-ῄῆ-ῌῐ-\u1fd3ῖ-\u1fdbῠ-Ῥῲ-ῴῶ-ῼℂℇℊ-ℓℕℙ-ℝℤ\u2126ℨ\u212a-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎ"
    "ↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃]+"
)
DEEPSEEK3 = (  # it contains real line feeds
    "[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+|[^\r\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+"
    "| ?[\\p{P}\\p{S}]+[\r\n]*|\\s*[\r\n]+|\\s+(?!\\S)|\\s+"
)
PUBLISHED: dict[str, tuple[list[dict[str, Any]], str]] = {
    "GPT-2": ([BYTES], "gpt-2"),
    "SmolLM": ([DIGIT, BYTES], "smollm"),
    "Falcon 40B": ([CONTIGUOUS, BYTES, split("[0-9][0-9][0-9]")], "falcon"),
    "Llama 3": ([split(CL100K), LAST], "dbrx"),
    "Phi 4": ([split(CL100K, "Removed"), LAST], "dbrx"),
    "Qwen 2": ([split(QWEN2), LAST], "qwen2"),
    "Qwen 3.5": ([split(QWEN35), LAST], "qwen35"),
    "gpt-oss": ([split(O200K), LAST], "gpt-4o"),
    "MiniMax": ([split(O200K, "Removed"), LAST], "gpt-4o"),
    "Mistral Nemo": ([split(TEKKEN), LAST], "tekken"),
    "DeepSeek V2": (
        [
            *(split("[\r\n]"), split(DEEPSEEK_LETTERS), split(r"\s?[!-/:-~！-／：-～‘-‟　-。]+")),
            *(split(r"\s+$"), CJK, DIGIT, LAST),
        ],
        "deepseek-llm",
    ),
    "DeepSeek Coder": (
        [split("[\r\n]"), split(r"\s?\p{L}+"), split(r"\s?\p{P}+"), CJK, DIGIT, LAST],
        "deepseek-coder",
    ),
    "DeepSeek V3": (
        [split(r"\p{N}{1,3}"), split("[一-龥぀-ゟ゠-ヿ]+"), split(DEEPSEEK3), LAST],
        "deepseek-v3",
    ),
}
"""Model → the steps of the pre-tokenizer in its tokenizer.json (without ignore_merges), and the name."""

ALPHABETS = [
    *(
        "abcxyz",
        "ABCXYZ",
        "sTdmLv'’",
        "0123456789",
        "٣٤½Ⅷ",
        " ",
        " \n\t\r",
        "\u00a0\u3000\u2028",
        ".,;:!?()[]{}/",
    ),
    *(
        "+-*=<>^~|`$€",
        "éßñÄ",
        "ЖжЯя",
        "αΩἀ",
        "你好世界",
        "ひらがなカタ",
        "한국어",
        "नमस्ते",
        "e\u0301n\u0303",
        "👩‍💻🦙🇩🇪",
    ),
    *("！，。", "ＡＢａｂ１２", "שלום", "สวัสดี", "\x00\x7f\ufffd"),
]


def random_texts(n: int, seed: int) -> list[str]:
    """Return texts of runs of characters of one kind, so that cuts fall between or within runs."""
    rng = random.Random(seed)
    runs = lambda: "".join(rng.choices(rng.choice(ALPHABETS), k=rng.randint(1, 6)))  # noqa: E731
    return ["".join(runs() for _ in range(rng.randint(1, 12))) for _ in range(n)]


@pytest.fixture(scope="module")
def merging() -> dict[str, Any]:
    """Return a tokenizer.json whose merges ignore words, so that the tokens show every division of a text."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    trainer = trainers.BpeTrainer(
        vocab_size=3000, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False,
        special_tokens=["<|end|>"],
    )  # fmt: skip
    tokenizer.train_from_iterator(random_texts(3000, 1), trainer)
    return json.loads(tokenizer.to_str())


def keys_of(tokenizer: dict[str, Any], folder: Path, **settings: Any) -> dict[str, Any]:
    folder.mkdir(exist_ok=True)
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return tokenizer_keys(folder, {"vocab_size": 5000})


@pytest.mark.parametrize("model", PUBLISHED)
def test_published_pre_tokenizers_are_converted(tmp_path: Path, merging: dict[str, Any], model: str) -> None:
    from tokenizers import Tokenizer

    steps, name = PUBLISHED[model]
    merging = merging | {"pre_tokenizer": {"type": "Sequence", "pretokenizers": steps}}
    merging["normalizer"] = {"type": "Sequence", "normalizers": []}  # as in DeepSeek's file
    keys = keys_of(merging, tmp_path)
    assert keys["tokenizer.ggml.pre"] == name
    ours, theirs = load_tokenizer(keys), Tokenizer.from_str(json.dumps(merging))
    texts = random_texts(1500, 2)
    expected = [encoded.ids for encoded in theirs.encode_batch(texts, add_special_tokens=False)]
    assert [ours.encode(text, add_special=False) for text in texts] == expected
    for other in set(NAMES.values()) - {name, "llama-bpe" if name == "dbrx" else ""}:  # others differ
        keys["tokenizer.ggml.pre"] = other
        other_way = load_tokenizer(keys)
        assert any(other_way.encode(t, add_special=False) != e for t, e in zip(texts, expected, strict=True))


def test_every_name_is_published() -> None:
    assert {name for _, name in PUBLISHED.values()} | {"llama-bpe"} == set(NAMES.values())


def test_a_pre_tokenizer_may_be_one_step(tmp_path: Path, merging: dict[str, Any]) -> None:
    assert keys_of(merging | {"pre_tokenizer": BYTES}, tmp_path)["tokenizer.ggml.pre"] == "gpt-2"
    nested = {"type": "Sequence", "pretokenizers": [{"type": "Sequence", "pretokenizers": [DIGIT]}, BYTES]}
    assert keys_of(merging | {"pre_tokenizer": nested}, tmp_path)["tokenizer.ggml.pre"] == "smollm"


def test_falcon_7b_is_known(tmp_path: Path, merging: dict[str, Any]) -> None:
    steps = {"type": "Sequence", "pretokenizers": [CONTIGUOUS, BYTES, DIGITS, split("[0-9][0-9][0-9]")]}
    assert keys_of(merging | {"pre_tokenizer": steps}, tmp_path)["tokenizer.ggml.pre"] == "falcon"


@pytest.mark.parametrize(
    ("steps", "message"),
    [
        ([split(CL100K)], "no step 'ByteLevel'"),
        ([split(CL100K), LAST | {"add_prefix_space": True}], "unknown step 'ByteLevel'"),
        ([LAST, split(CL100K)], "unknown step 'Split'"),  # of letters for bytes
        ([split(r"\p{N}{1,3}", "Removed"), LAST], "unknown step 'Split'"),  # removes all other characters
        ([split(CL100K, "MergedWithNext"), LAST], "unknown step 'Split'"),
        ([CONTIGUOUS | {"behavior": "Isolated"}, BYTES], "unknown step 'Punctuation'"),
        ([split(CL100K), BYTES], "is not known"),
        ([LAST], "is not known"),
    ],
)
def test_pre_tokenizers_that_are_refused(
    tmp_path: Path, merging: dict[str, Any], steps: list[dict[str, Any]], message: str
) -> None:
    with pytest.raises(TokenizerError, match=message):
        keys_of(merging | {"pre_tokenizer": {"type": "Sequence", "pretokenizers": steps}}, tmp_path)


@pytest.mark.parametrize(
    ("model", "without", "with_it"), [("gpt-oss", "gpt-4o", "gpt-4o"), ("Llama 3", "dbrx", "llama-bpe")]
)
def test_words_that_are_tokens_despite_merges(
    tmp_path: Path, merging: dict[str, Any], model: str, without: str, with_it: str
) -> None:
    """Accept ignore_merges with a name that does not imply it (gpt-oss) if merges lead to every token."""
    from tokenizers import Tokenizer

    tokenizer = merging | {"pre_tokenizer": {"type": "Sequence", "pretokenizers": PUBLISHED[model][0]}}
    ignoring = tokenizer | {"model": tokenizer["model"] | {"ignore_merges": True}}
    assert keys_of(tokenizer, tmp_path)["tokenizer.ggml.pre"] == without
    keys = keys_of(ignoring, tmp_path)
    assert keys["tokenizer.ggml.pre"] == with_it
    ours, theirs = load_tokenizer(keys), Tokenizer.from_str(json.dumps(ignoring))
    for text in random_texts(300, 3):
        assert ours.encode(text, add_special=False) == theirs.encode(text, add_special_tokens=False).ids
    unled = {**ignoring["model"]["vocab"], "qzqz": 3000}  # a token that no merge reaches
    ignoring["model"] = ignoring["model"] | {"vocab": unled}
    if without == with_it:
        with pytest.raises(TokenizerError, match="is known with another ignore_merges only"):
            keys_of(ignoring, tmp_path)
    else:
        assert load_tokenizer(keys_of(ignoring, tmp_path)).encode("qzqz", add_special=False) == [3000]


@pytest.mark.parametrize("entry", ["dropout", "continuing_subword_prefix", "end_of_word_suffix"])
def test_settings_of_byte_level_bpe_that_have_no_key(
    tmp_path: Path, merging: dict[str, Any], entry: str
) -> None:
    model = merging["model"] | {entry: 0.1 if entry == "dropout" else "@"}
    with pytest.raises(TokenizerError, match=f"{entry} in tokenizer"):
        keys_of(merging | {"pre_tokenizer": BYTES, "model": model}, tmp_path)


@pytest.mark.parametrize(
    ("template", "settings"),
    [
        ("<|begin|> $A", {}),  # Llama 3
        ("$A <|user|>", {"bos_token": None}),  # Qwen3 Embedding: <|endoftext|>, and eos is <|im_end|>
        ("<|user|> $A <|end|>", {"eos_token": {"content": "<|end|>"}}),
        ("<|begin|> $A <|end|>", {"add_bos_token": False, "add_eos_token": False}),
        ("$A", {"add_eos_token": True}),
        ("<|begin|> <|user|> $A", {"bos_token": None}),  # GLM 4: no key for two
    ],
)
def test_special_tokens_around_a_text_equal_the_template(
    checkpoint: Path, template: str, settings: dict[str, Any]
) -> None:
    from tokenizers import Tokenizer, processors

    theirs = Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
    special = [(token, theirs.token_to_id(token)) for token in ("<|begin|>", "<|end|>", "<|user|>")]
    around = processors.TemplateProcessing(single=template, pair=f"{template} $B", special_tokens=special)
    theirs.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=False), around])
    theirs.save(str(checkpoint / "tokenizer.json"))
    edit(checkpoint / "tokenizer_config.json", **{"add_bos_token": None, "bos_token": "<|begin|>"} | settings)
    ours = load_tokenizer(converted(checkpoint).metadata)
    plain = theirs.encode("the inn", add_special_tokens=False).ids
    if settings.get("add_bos_token") is False or template.startswith("<|begin|> <|user|>"):
        assert ours.encode("the inn") == plain
    elif template == "$A":
        assert ours.encode("the inn") == [*plain, 301]
    else:
        assert ours.encode("the inn") == theirs.encode("the inn").ids
    assert {ours.eos_id, ours.eot_id} >= {301}  # end tokens of the configuration are kept
    assert 301 in ours.stop_ids


def test_older_spellings_of_rope_and_windows(tmp_path: Path) -> None:
    checkpoint, recipe = tmp_path / "hf", tiny_models.RECIPES["qwen2"]
    tiny_models.save(recipe, tiny_models.build(recipe), checkpoint)
    edit(
        checkpoint / "config.json", rope_parameters=None, rope_theta=500.0,
        rope_scaling={"type": "linear", "factor": 2.0}, sliding_window=16, use_sliding_window=True,
        max_window_layers=2, layer_types=None,
    )  # fmt: skip
    config = config_from_gguf(converted(checkpoint))
    assert tuple(layer.window for layer in config.layers) == (0, 0, 16)
    assert config.layers[0].rope.freq == pytest.approx([500 ** (-2 * i / 16) / 2 for i in range(8)], rel=1e-6)


@pytest.mark.parametrize(
    ("entries", "error", "message"),
    [
        ({"architectures": ["Plamo2ForCausalLM"]}, UnsupportedModelError, "'Plamo2F.*PlamoForCausalLM"),
        ({"architectures": None}, UnsupportedModelError, "no list 'architectures'"),
        ({"quantization_config": {"bits": 4}}, UnsupportedModelError, "quantised"),
        ({"hidden_act": "swiglu"}, HotsetError, "'swiglu' is unknown"),
        ({"hidden_act": "fatrelu"}, FormatError, "hidden_act_param"),
        ({"hidden_size": "96"}, FormatError, "hidden_size in config.json must be a number"),
        ({"num_hidden_layers": None}, FormatError, "num_hidden_layers"),
        ({"num_hidden_layers": -1}, FormatError, "integer from 1"),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, UnsupportedModelError, "'dynamic'"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, UnsupportedModelError, "partial_rotary_factor"),
        ({"head_dim": 15}, FormatError, "heads of 15 channels"),
        ({"head_dim": 14}, FormatError, r"self_attn.k_proj.weight .* is \[32, 96\], which its config.json"),
        (
            {"intermediate_size": 161},
            UnsupportedModelError,
            r"ffn_gate.weight has the shape \[96, 160\]",
        ),
        ({"vocab_size": 319}, FormatError, r"is \[320, 96\], and its config.json says \[319, 96\]"),
        ({"num_hidden_layers": 2}, UnsupportedModelError, r"not known: model\.layers\.2\."),
    ],
)
def test_configurations_that_are_refused(
    checkpoint: Path, entries: dict[str, Any], error: type[HotsetError], message: str
) -> None:
    edit(checkpoint / "config.json", **entries)
    with pytest.raises(error, match=message):
        converted(checkpoint)
    assert [p.name for p in checkpoint.parent.iterdir()] == ["hf"]


def header_edited(path: Path, edit: Any) -> None:
    """Change the header of a safetensors file."""
    raw = path.read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    header = json.loads(raw[8 : 8 + length])
    edit(header)
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + raw[8 + length :])


WILL_NOT_LOAD = "would become a file that does not load"


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"rms_norm_eps": 2.0}, r"layer_norm_rms_epsilon is 2.0, outside 0 to 1"),
        ({"rms_norm_eps": -1e-5}, r"layer_norm_rms_epsilon is .*, outside 0 to 1"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e20}}, r"rope\.freq_base"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 0}}, r"rope\.freq_base"),
        ({"rope_parameters": {"rope_type": "linear", "factor": -2.0}}, r"rope\.scaling\.factor"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 2.0, "beta_fast": 0}}, "yarn_beta_fast"),
    ],
)
def test_file_that_will_not_load_is_not_written(
    checkpoint: Path, entries: dict[str, Any], message: str
) -> None:
    edit(checkpoint / "config.json", **entries)
    with pytest.raises(HotsetError, match=f"{WILL_NOT_LOAD}: .*{message}"):
        converted(checkpoint)
    assert [p.name for p in checkpoint.parent.iterdir()] == ["hf"]


@pytest.mark.parametrize(
    ("missing", "message"),
    [
        ("model.layers.1.mlp.up_proj.weight", r"blk\.1\.ffn_up\.weight"),
        ("model.layers.2.self_attn.k_proj.weight", r"blk\.2\.attn_k\.weight"),
        ("model.norm.weight", r"output_norm\.weight"),
    ],
)
def test_a_missing_tensor_is_noticed_before_anything_is_written(
    checkpoint: Path, missing: str, message: str
) -> None:
    header_edited(checkpoint / "model.safetensors", lambda header: header.pop(missing))
    with pytest.raises(UnsupportedModelError, match=f"{WILL_NOT_LOAD}: .*{message}"):
        converted(checkpoint)
    assert [p.name for p in checkpoint.parent.iterdir()] == ["hf"]


def test_tokens_are_made_for_an_embedding_that_is_there(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check the embedding before the tokens: a hostile vocab_size would pad the tokenizer to gigabytes."""
    monkeypatch.setattr(hf, "tokenizer_keys", lambda *_: pytest.fail("tokens have been made"))
    edit(checkpoint / "config.json", vocab_size=1 << 24)
    with pytest.raises(FormatError, match=r"of the checkpoint is \[320, .* \[16777216, "):
        converted(checkpoint)
    header_edited(checkpoint / "model.safetensors", lambda header: header.pop("model.embed_tokens.weight"))
    header_edited(checkpoint / "model.safetensors", lambda header: header.pop("lm_head.weight"))
    edit(checkpoint / "config.json", tie_word_embeddings=True)
    with pytest.raises(UnsupportedModelError, match="the checkpoint lacks its embedding"):
        converted(checkpoint)
    assert [p.name for p in checkpoint.parent.iterdir()] == ["hf"]


def test_a_tokenizer_that_does_not_load_is_not_written(checkpoint: Path) -> None:
    edit(checkpoint / "tokenizer_config.json", add_bos_token=True, bos_token="nobody", eos_token="nobody")
    edit(checkpoint / "config.json", bos_token_id=None, eos_token_id=None)
    with pytest.raises(TokenizerError, match=f"{WILL_NOT_LOAD}: .*bos_token_id"):
        converted(checkpoint)


def test_heads_that_are_too_large_are_not_written(tmp_path: Path) -> None:
    recipe = tiny_models.RECIPES["llama"]
    model = tiny_models.build(recipe, head_dim=1024, num_attention_heads=1, num_key_value_heads=1)
    tiny_models.save(recipe, model, tmp_path / "hf")
    with pytest.raises(UnsupportedModelError, match=f"{WILL_NOT_LOAD}: .*heads of 1024 channels"):
        converted(tmp_path / "hf")


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"data_offsets": [float("inf"), float("inf")]}, "model.norm.weight wrongly"),
        ({"data_offsets": [0, float("inf")]}, "model.norm.weight wrongly"),
        ({"data_offsets": [-4, 380]}, "model.norm.weight wrongly"),
        ({"data_offsets": ["0", "384"]}, "model.norm.weight wrongly"),
        ({"data_offsets": [0, 1, 2]}, "model.norm.weight wrongly"),
        ({"data_offsets": [False, True]}, "model.norm.weight wrongly"),
        ({"shape": [96, *[1] * 64]}, "model.norm.weight wrongly"),
        ({"shape": [96.0]}, "model.norm.weight wrongly"),
        ({"shape": [1 << 61, 1 << 61]}, "cut short or damaged"),
        ({"shape": "96"}, "model.norm.weight wrongly"),
        ({"shape": {"96": 1}}, "model.norm.weight wrongly"),
        ({"dtype": ["F32"]}, "model.norm.weight wrongly"),
    ],
)
def test_safetensors_with_odd_numbers(checkpoint: Path, changes: dict[str, Any], error: str) -> None:
    header_edited(
        checkpoint / "model.safetensors", lambda header: header["model.norm.weight"].update(changes)
    )
    with pytest.raises(FormatError, match=error):
        converted(checkpoint)


def test_a_layer_has_a_number_of_a_few_digits(checkpoint: Path) -> None:
    name = f"model.layers.{'1' * 5000}.mlp.up_proj.weight"

    def rename(header: dict[str, Any]) -> None:
        header[name] = header.pop("model.layers.1.mlp.up_proj.weight")

    header_edited(checkpoint / "model.safetensors", rename)
    with pytest.raises(UnsupportedModelError, match=r"not known: model\.layers\.1111") as error:
        converted(checkpoint)
    assert len(str(error.value)) < 400


LLAMA3_ROPE = {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    "rope",
    [
        LLAMA3_ROPE | {"factor": 0},
        LLAMA3_ROPE | {"high_freq_factor": 1.0},
        LLAMA3_ROPE | {"rope_theta": 0},
        LLAMA3_ROPE | {"rope_theta": -3.0},
        {"rope_type": "yarn", "factor": 2.718281828459045, "mscale": 1.0, "mscale_all_dim": -10.0},
    ],
)
def test_a_scaling_that_divides_by_zero(checkpoint: Path, rope: dict[str, Any]) -> None:
    edit(checkpoint / "config.json", rope_parameters={"original_max_position_embeddings": 32} | rope)
    with pytest.raises(FormatError, match="divides by zero"):
        converted(checkpoint)


def test_small_files_of_a_checkpoint_are_regular_short_and_text(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    template = checkpoint / "chat_template.jinja"
    template.mkdir()
    with pytest.raises(FormatError, match=r"chat_template\.jinja is not a regular file"):
        converted(checkpoint)
    template.rmdir()
    template.write_bytes(b"{{ '\xff' }}")
    with pytest.raises(FormatError, match=r"chat_template\.jinja is not UTF-8"):
        converted(checkpoint)
    template.unlink()
    for name in ("config.json", "tokenizer.json"):
        path = checkpoint / name
        whole = path.read_bytes()
        path.unlink()
        os.mkfifo(path)
        with pytest.raises(FormatError, match=f"{name} is not a regular file"):
            converted(checkpoint)
        path.unlink()
        path.write_bytes(whole)
    (checkpoint / "vocab.json").write_text("{}")
    (checkpoint / "merges.txt").mkdir()
    (checkpoint / "tokenizer.json").rename(checkpoint / "elsewhere.json")
    with pytest.raises(FormatError, match=r"merges\.txt is not a regular file"):
        converted(checkpoint)
    (checkpoint / "tokenizer.model").mkdir()
    with pytest.raises(FormatError, match=r"tokenizer\.model is not a regular file"):
        converted(checkpoint)


def test_missing_files(tmp_path: Path, checkpoint: Path) -> None:
    with pytest.raises(ModelNotFoundError, match=r"config\.json"):
        convert_hf(tmp_path / "nowhere", tmp_path / "out.gguf")
    with pytest.raises(InvalidRequestError, match="'q9_k' is not known; it must be one of f32, f16"):
        convert_hf(checkpoint, tmp_path / "out.gguf", "q9_k")
    (checkpoint / "model.safetensors").unlink()
    with pytest.raises(ModelNotFoundError, match=r"model\.safetensors"):
        convert_hf(checkpoint, tmp_path / "out.gguf")


def test_an_untied_checkpoint_needs_its_output(checkpoint: Path) -> None:
    path = checkpoint / "model.safetensors"
    raw = path.read_bytes()
    path.write_bytes(raw.replace(b'"lm_head.weight"', b'"xx_head.weight"'))
    with pytest.raises(UnsupportedModelError, match=r"lacks lm_head\.weight"):
        converted(checkpoint)
    path.write_bytes(raw.replace(b'"model.norm.weight"', b'"model.mean.weight"'))
    with pytest.raises(UnsupportedModelError, match=r"not known: model\.mean\.weight"):
        converted(checkpoint)


@pytest.mark.parametrize("damage", ["cut", "length", "header", "offsets", "dtype", "entry", "empty"])
def test_damaged_safetensors(checkpoint: Path, damage: str) -> None:
    path = checkpoint / "model.safetensors"
    raw = path.read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    header, body = json.loads(raw[8 : 8 + length]), raw[8 + length :]
    norm = header["model.norm.weight"]
    if damage == "offsets":
        norm["data_offsets"] = [0, 2**70]
    elif damage == "dtype":
        norm["dtype"] = "I32"
    elif damage == "entry":
        header["model.norm.weight"] = [1]
    text = json.dumps(header).encode()
    raw = struct.pack("<Q", len(text)) + text + body
    raw = {
        "cut": raw[:-10],
        "length": b"\xff" * 8 + raw,
        "header": raw[:20] + b"\xff" + raw[21:],
        "empty": b"",
    }.get(damage, raw)
    path.write_bytes(raw)
    with pytest.raises((FormatError, UnsupportedModelError), match=r"model\.safetensors"):
        converted(checkpoint)
    assert [p.name for p in checkpoint.parent.iterdir()] == ["hf"]


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"model": {"type": "WordLevel", "vocab": {}}}, "not byte-level BPE"),
        ({"model": {"vocab": {"a": 0}}}, "damaged"),
        ({"model": {"vocab": {"a": 2**40}, "merges": []}}, "numbers its"),
        ({"normalizer": {"type": "Lowercase"}}, "'Lowercase'"),
        ({"pre_tokenizer": {"type": "Whitespace"}}, "unknown step 'Whitespace'"),
        ({"pre_tokenizer": {"type": "Split", "behavior": "Isolated", "pattern": {"Regex": "a+"}}}, r"a\+"),
    ],
)
def test_tokenizers_that_are_refused(checkpoint: Path, entries: dict[str, Any], message: str) -> None:
    edit(checkpoint / "tokenizer.json", **entries)
    with pytest.raises(TokenizerError, match=message):
        converted(checkpoint)


def test_a_tokenizer_with_more_tokens_than_the_model_is_refused(checkpoint: Path) -> None:
    tokenizer = json.loads((checkpoint / "tokenizer.json").read_text())
    tokenizer["added_tokens"].append({"id": 320, "content": "<|more|>", "special": True})
    edit(checkpoint / "tokenizer.json", added_tokens=tokenizer["added_tokens"])
    with pytest.raises(TokenizerError, match="321 tokens, the model only 320"):
        converted(checkpoint)


junk = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=6)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.sampled_from(INNER_KEYS), inner, max_size=3)
    ),
    max_leaves=6,
)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.sampled_from(["config.json", "tokenizer.json", "tokenizer_config.json"]), st.data())
def test_any_json_gives_a_file_or_one_message(checkpoint: Path, file: str, data: st.DataObject) -> None:
    whole = (checkpoint / file).read_text()
    content = json.loads(whole)
    keys = [*content, *FUZZED_KEYS[file]]
    changes = data.draw(st.dictionaries(st.sampled_from(keys), junk, min_size=1, max_size=2))
    (checkpoint / file).write_text(json.dumps(content | changes))
    try:
        convert_hf(checkpoint, checkpoint.parent / "out.gguf")
    except HotsetError as error:
        message = str(error)
    else:
        message = ""
    finally:
        (checkpoint / file).write_text(whole)
    assert "\n" not in message


def test_every_class_has_a_row() -> None:
    from hotset.model.architectures import ARCHITECTURES

    same_class = {  # and names that another converter writes
        "nemotron_h_moe": {"nemotron_h"}, "nomic-bert": {"nomic-bert-moe"},
        "bitnet": {"bitnet-25", "bitnet-b1.58"},
    }  # fmt: skip
    found = {row.architecture for row in CLASSES.values()}
    assert found.union(*(same_class[name] for name in found & same_class.keys())) == set(ARCHITECTURES)


# ---- other files of a checkpoint -----------------------------------------------------------------------


@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_torch_files(checkpoint: Path, dtype: str, zipped: bool) -> None:
    """Check that pytorch_model*.bin in two shards give the same file as safetensors."""
    from safetensors.torch import load_file, save_file

    state = {k: v.to(getattr(torch, dtype)) for k, v in load_file(checkpoint / "model.safetensors").items()}
    save_file(state, checkpoint / "model.safetensors")
    expected = converted(checkpoint, "bf16")
    contents = {name: expected.data(name).copy() for name in expected.tensors}
    (checkpoint / "model.safetensors").unlink()
    names = sorted(state)
    weight_map = {}
    for i, part in enumerate((names[::2], names[1::2])):
        file = f"pytorch_model-{i + 1:05d}-of-00002.bin"
        weight_map |= dict.fromkeys(part, file)
        torch.save({n: state[n] for n in part}, checkpoint / file, _use_new_zipfile_serialization=zipped)
    (checkpoint / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": weight_map}))
    found = converted(checkpoint, "bf16")
    assert found.tensors.keys() == contents.keys()
    assert all(np.array_equal(found.data(name), data) for name, data in contents.items())


def test_gpt2_files_without_tokenizer_json(checkpoint: Path) -> None:
    """Read vocab.json and merges.txt, as OPT ships them."""
    tokenizer = json.loads((checkpoint / "tokenizer.json").read_text())
    expected = load_tokenizer(converted(checkpoint).metadata)
    vocabulary = tokenizer["model"]["vocab"] | {t["content"]: t["id"] for t in tokenizer["added_tokens"]}
    merges = [m if isinstance(m, str) else " ".join(m) for m in tokenizer["model"]["merges"]]
    (checkpoint / "vocab.json").write_text(json.dumps(vocabulary))
    (checkpoint / "merges.txt").write_text("#version: 0.2\n" + "\n".join(merges) + "\n")
    (checkpoint / "tokenizer.json").unlink()
    gguf = converted(checkpoint)
    types = gguf.metadata["tokenizer.ggml.token_type"]
    assert isinstance(types, np.ndarray)
    assert types[[0, 300, 301]].tolist() == [1, 3, 3]
    text = NASTY.replace("<|user|>", "")
    assert load_tokenizer(gguf.metadata).encode(text) == expected.encode(text)


# ---- PowerInfer's format -------------------------------------------------------------------------------

SPARSE = {
    "llama": ("llama-relu", "llama"),
    "bamboo": ("bamboo", "bamboo"),
    "prosparse": ("prosparse", "llama"),
    "falcon-7b": ("falcon-7b", "falcon"),
    "falcon-40b": ("falcon-40b", "falcon"),
    "opt": ("opt", "opt"),
}


def save_predictors(folder: Path, d: int, n_ff: int, threshold: float | None = 0.1) -> list[dict[str, Any]]:
    """Save random predictors of ranks 32, 48 and 64 with torch, and return them."""
    folder.mkdir()
    generator = torch.Generator().manual_seed(7)
    states = []
    for layer, rank in enumerate((32, 48, 64)):
        fc1 = torch.randn(rank, d, generator=generator) / d**0.5
        fc2 = torch.randn(n_ff, rank, generator=generator)
        states.append({"fc1.weight": fc1, "fc2.weight": fc2})
        torch.save(states[-1], folder / f"model_{layer}.pt")
    if threshold is not None:
        (folder / "config.json").write_text(json.dumps({"sparse_threshold": threshold}))
    return states


def masked_logits(
    model: Any, states: list[dict[str, Any]], threshold: float, tokens: np.ndarray
) -> np.ndarray:
    """Run transformers' own modules, with neurons set to zero whose score is below the threshold.

    The predictor reads the residual stream after attention (the input of the FFN's norm), but for Falcon the
    input of the layer.
    """
    hooks, seen = [], {}
    layers = getattr(model, "transformer", getattr(model, "model", None))
    layers = getattr(layers, "decoder", layers)
    layers = layers.h if hasattr(layers, "h") else layers.layers
    for i, (layer, state) in enumerate(zip(layers, states, strict=True)):
        mlp = getattr(layer, "mlp", layer)
        down = getattr(mlp, "down_proj", getattr(mlp, "dense_4h_to_h", getattr(mlp, "fc2", None)))
        norm = getattr(layer, "post_attention_layernorm", getattr(layer, "final_layer_norm", None))
        reader = layer if hasattr(mlp, "dense_4h_to_h") else norm

        def remember(_: Any, inputs: Any, i: int = i) -> None:
            seen[i] = inputs[0]

        def mask(_: Any, inputs: Any, i: int = i, state: dict[str, Any] = state) -> Any:
            scores = torch.relu(seen[i] @ state["fc1.weight"].T) @ state["fc2.weight"].T
            return inputs[0] * (scores.reshape(inputs[0].shape) >= threshold)

        hooks += [reader.register_forward_pre_hook(remember), down.register_forward_pre_hook(mask)]
    with torch.no_grad():
        logits = model(torch.tensor(tokens)[None]).logits[0].numpy()
    for hook in hooks:
        hook.remove()
    return logits


def reference_logits(gguf: GGUFFile, tokens: np.ndarray) -> np.ndarray:
    """Return the logits of the reference backend, with the predictor of the file if it has one."""
    from hotset.backends.base import Batch
    from hotset.backends.reference import ReferenceBackend
    from hotset.model.predictor import Predictor

    config = config_from_gguf(gguf)
    predictor = None
    if gguf.dialect == "powerinfer":
        predictor = Predictor("mlp", (config.sparse_threshold,) * config.n_layer)
    backend = ReferenceBackend(gguf, describe(config, gguf.tensors, predictor), n_blocks=2)
    n = len(tokens)
    arrays = (tokens, np.arange(n), np.zeros(n), [[0, 1]], np.arange(n))
    return backend.step(Batch(*(np.array(a, np.int32) for a in arrays))).logits


def sparse_model(name: str) -> tuple[Any, Any]:
    recipe = tiny_models.RECIPES[SPARSE[name][0]]
    relu = {"activation": "relu"} if SPARSE[name][1] == "falcon" else {}
    return recipe, tiny_models.build(recipe, **relu)


@pytest.mark.parametrize("name", SPARSE)
def test_powerinfer_files_equal_the_masked_model(tmp_path: Path, name: str) -> None:
    recipe, model = sparse_model(name)
    tiny_models.save(recipe, model, tmp_path / "hf")
    states = save_predictors(tmp_path / "pred", 96, 160)
    out = tmp_path / "out.powerinfer.gguf"
    convert_hf(tmp_path / "hf", out, "f32", predictors=tmp_path / "pred")
    with open_gguf(out) as gguf:
        assert (gguf.dialect, gguf.architecture) == ("powerinfer", SPARSE[name][1])
        assert gguf.metadata["powerinfer.sparse_threshold"] == pytest.approx(0.1)
        assert gguf.tensors["blk.1.ffn_down_t.weight"].shape == (96, 160)
        assert gguf.tensors["blk.1.fc1.weight"].shape == (96, 48)
        assert config_from_gguf(gguf).activation.threshold == pytest.approx(0.1 * (name == "prosparse"))
        tokens = np.random.default_rng(3).integers(0, tiny_models.VOCABULARY, 60)
        expected = masked_logits(model, states, 0.1, tokens)
        dense = model(torch.tensor(tokens)[None]).logits[0].detach().numpy()
        assert np.abs(dense - expected).max() > 0.05 * np.abs(expected).max()  # the mask matters
        assert np.abs(reference_logits(gguf, tokens) - expected).max() < 1e-4 * np.abs(expected).max()


def test_types_of_a_powerinfer_file(tmp_path: Path) -> None:
    """Compare converting to a quantised type with converting to F32 and then quantising."""
    from hotset.formats.requantize import quantize

    recipe, model = sparse_model("llama")
    tiny_models.save(recipe, model, tmp_path / "hf")
    save_predictors(tmp_path / "pred", 96, 160, threshold=None)
    convert_hf(tmp_path / "hf", tmp_path / "f32.gguf", "f32", predictors=tmp_path / "pred")
    for type in ("q4_0", "q8_0"):
        convert_hf(tmp_path / "hf", tmp_path / "direct.gguf", type, predictors=tmp_path / "pred")
        quantize(tmp_path / "f32.gguf", tmp_path / "quantised.gguf", type)
        with open_gguf(tmp_path / "direct.gguf") as one, open_gguf(tmp_path / "quantised.gguf") as other:
            assert {n: (t.type, t.shape) for n, t in one.tensors.items()} == {
                n: (t.type, t.shape) for n, t in other.tensors.items()
            }
            assert all(np.array_equal(one.data(n), other.data(n)) for n in one.tensors)
            assert one.metadata["general.file_type"] == other.metadata["general.file_type"]


def test_drelu_llamas_are_bamboos_to_powerinfer(tmp_path: Path) -> None:
    recipe = tiny_models.RECIPES["llama-relu"]
    tiny_models.save(recipe, tiny_models.build(recipe), tmp_path / "hf")
    save_predictors(tmp_path / "pred", 96, 160)
    convert_hf(tmp_path / "hf", tmp_path / "o.gguf", predictors=tmp_path / "pred", activation="drelu")
    with open_gguf(tmp_path / "o.gguf") as gguf:
        assert gguf.architecture == "bamboo"
        assert config_from_gguf(gguf).activation.up == "relu"


@pytest.mark.parametrize(
    ("recipe", "change", "message"),
    [
        ("llama", None, "activation of the checkpoint is silu, and PowerInfer's format holds llama"),
        ("falcon-7b", None, "is gelu, and PowerInfer's format holds falcon models with relu only"),
        ("qwen2", None, "has no qwen2 models, only llama, bamboo"),
        ("llama-relu", "missing", r"lacks the predictor of layer 1, model_1\.pt"),
        ("llama-relu", "shape", r"model_2\.pt holds .* fc2\.weight \[160, rank\]"),
        ("llama-relu", "threshold", "sparse_threshold in .* must be a number"),
    ],
)
def test_powerinfer_files_that_are_refused(
    tmp_path: Path, recipe: str, change: str | None, message: str
) -> None:
    row = tiny_models.RECIPES[recipe]
    tiny_models.save(row, tiny_models.build(row), tmp_path / "hf")
    states = save_predictors(tmp_path / "pred", 96, 160)
    if change == "missing":
        (tmp_path / "pred" / "model_1.pt").unlink()
    elif change == "shape":
        torch.save(states[2] | {"fc2.weight": torch.zeros(159, 64)}, tmp_path / "pred" / "model_2.pt")
    elif change == "threshold":
        (tmp_path / "pred" / "config.json").write_text('{"sparse_threshold": "low"}')
    with pytest.raises(HotsetError, match=message):
        convert_hf(tmp_path / "hf", tmp_path / "out.gguf", predictors=tmp_path / "pred")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["hf", "pred"]


# ---- hot-first order -----------------------------------------------------------------------------------


@pytest.mark.parametrize("dialect", ["gguf", "powerinfer"])
@pytest.mark.parametrize("name", ["llama", "opt"])
def test_profile_changes_only_the_order_of_neurons(tmp_path: Path, name: str, dialect: str) -> None:
    from hotset.convert.reorder import reorder
    from hotset.sparsity.profile import Profile, profile_path
    from hotset.sparsity.sidecar import fingerprint

    recipe, model = sparse_model(name)
    tiny_models.save(recipe, model, tmp_path / "hf")
    save_predictors(tmp_path / "pred", 96, 160)
    how: dict[str, Any] = {"predictors": tmp_path / "pred"} if dialect == "powerinfer" else {}
    convert_hf(tmp_path / "hf", tmp_path / "plain.gguf", "f32", **how)
    rng = np.random.default_rng(5)
    counts = [rng.integers(0, 101, 160).astype(np.uint64) for _ in range(3)]
    with open_gguf(tmp_path / "plain.gguf") as plain:
        profile = Profile(tuple(counts), 100, fingerprint(plain), ("text",))
        written = convert_hf(tmp_path / "hf", tmp_path / "hot.gguf", "f32", profile=profile, **how)
        (tmp_path / "other").mkdir()
        reorder(tmp_path / "plain.gguf", tmp_path / "other" / "hot.gguf", profile)
        with open_gguf(tmp_path / "hot.gguf") as hot, open_gguf(tmp_path / "other" / "hot.gguf") as expected:
            assert all(np.array_equal(hot.data(n), expected.data(n)) for n in expected.tensors)
            for key in ("hotset.n_always", "hotset.neuron_order"):
                assert np.array_equal(hot.metadata[key], expected.metadata[key])
            assert written.n_always == tuple(int((c >= 60).sum()) for c in counts)
            moved = Profile.open(profile_path(tmp_path / "hot.gguf"))
            moved.check_model(fingerprint(hot))
            assert all((np.diff(c.astype(int)) <= 0).all() for c in moved.counts)
    wrong = Profile(tuple(counts[:2]), 100, "x", ("text",))
    with pytest.raises(InvalidRequestError, match="2 layers of 160 neurons, and the checkpoint 3 of 160"):
        convert_hf(tmp_path / "hf", tmp_path / "no.gguf", profile=wrong, **how)


def test_a_profile_orders_gate_and_up_of_one_matrix(tmp_path: Path) -> None:
    from hotset.convert.reorder import reorder
    from hotset.sparsity.profile import Profile
    from hotset.sparsity.sidecar import fingerprint

    recipe = tiny_models.RECIPES["phi3-relu"]
    plain_path = tiny_models.to_gguf(recipe, tiny_models.build(recipe), tmp_path)
    rng = np.random.default_rng(5)
    counts = [rng.integers(0, 101, 160).astype(np.uint64) for _ in range(3)]
    tokens = rng.integers(0, tiny_models.VOCABULARY, 40)
    (tmp_path / "other").mkdir()
    with open_gguf(plain_path) as plain:
        profile = Profile(tuple(counts), 100, fingerprint(plain), ("text",))
        convert_hf(tmp_path, tmp_path / "hot.gguf", "f32", profile=profile)
        reorder(plain_path, tmp_path / "other" / "hot.gguf", profile)
        order = np.argsort(-counts[1].astype(int), kind="stable")
        before = values(plain, "blk.1.ffn_up.weight")
        expected = reference_logits(plain, tokens)
    for path in (tmp_path / "hot.gguf", tmp_path / "other" / "hot.gguf"):
        with open_gguf(path) as hot:
            after = values(hot, "blk.1.ffn_up.weight")
            assert np.array_equal(after[:160], before[:160][order])
            assert np.array_equal(after[160:], before[160:][order])
            found = reference_logits(hot, tokens)
            assert np.abs(found - expected).max() < 1e-4 * np.abs(expected).max()


# ---- the process and the command -----------------------------------------------------------------------

MEASURE = """
import resource, sys
from hotset.convert.hf import convert_hf
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
convert_hf(sys.argv[1], sys.argv[2], "q8_0")
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


@pytest.fixture(scope="module")
def big(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a checkpoint of 340 MB of zeros, stored as a hole in the file."""
    folder = tmp_path_factory.mktemp("big")
    d, n_ff, n_vocab = 1024, 32768, 65536
    config = {
        "architectures": ["LlamaForCausalLM"], "hidden_size": d, "intermediate_size": n_ff,
        "vocab_size": n_vocab,
        "num_hidden_layers": 1, "num_attention_heads": 8, "max_position_embeddings": 64, "rms_norm_eps": 1e-5,
        "hidden_act": "silu", "tie_word_embeddings": True,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    shapes = {f"self_attn.{x}_proj": (d, d) for x in "qkvo"}
    shapes |= {"mlp.gate_proj": (n_ff, d), "mlp.up_proj": (n_ff, d), "mlp.down_proj": (d, n_ff)}
    shapes |= {"input_layernorm": (d,), "post_attention_layernorm": (d,)}
    shapes = {f"model.layers.0.{stem}.weight": shape for stem, shape in shapes.items()}
    shapes |= {"model.embed_tokens.weight": (n_vocab, d), "model.norm.weight": (d,)}
    header, at = {}, 0
    for name, shape in shapes.items():
        n_bytes = 2 * int(np.prod(shape))
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [at, at + n_bytes]}
        at += n_bytes
    text = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + at)
    assert at > 320e6
    return folder


def test_memory_does_not_grow_with_the_checkpoint(big: Path, tmp_path: Path) -> None:
    """Measure the peak resident memory, which includes mapped pages."""
    run = subprocess.run(
        [sys.executable, "-c", MEASURE, str(big), str(tmp_path / "out.gguf")],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert int(run.stdout) * 1024 < 250e6


@needs_unnamed_files
def test_a_killed_process_leaves_nothing(big: Path, tmp_path: Path) -> None:
    code = "import sys; from hotset.convert.hf import convert_hf; convert_hf(*sys.argv[1:], 'q8_0')"
    kill_while_it_writes(code, big, tmp_path / "out.gguf")
    assert list(tmp_path.iterdir()) == []
    convert_hf(big, tmp_path / "out.gguf", "q8_0")
    assert [path.name for path in tmp_path.iterdir()] == ["out.gguf"]


def run_command(*arguments: object) -> tuple[int, str, str]:
    from typer.testing import CliRunner

    from hotset.cli.main import app

    result = CliRunner().invoke(app, ["convert", *map(str, arguments)])
    return result.exit_code, result.stdout, " ".join(result.stderr.split())


def test_command(tmp_path: Path) -> None:
    recipe, model = sparse_model("llama")
    tiny_models.save(recipe, model, tmp_path / "hf")
    save_predictors(tmp_path / "pred", 96, 160)
    out = tmp_path / "out.gguf"
    code, printed, err = run_command(
        tmp_path / "hf", out, "--type", "Q4_0", "--predictors", tmp_path / "pred", "--json"
    )
    assert code == 0, err
    assert json.loads(printed) == {"path": str(out), "size": out.stat().st_size, "type": "q4_0"}
    code, _, err = run_command(tmp_path / "hf", out, "--tensor-type", "ffn_up=q8_0", "--activation", "silu")
    assert code == 0, err
    assert f"Wrote {out}" in err
    with open_gguf(out) as gguf:
        assert gguf.tensors["blk.0.ffn_up.weight"].type == GGMLType.Q8_0
        assert config_from_gguf(gguf).activation.gate == "silu"
    code, _, err = run_command(tmp_path / "hf", out, "--powerinfer")
    assert code == 2
    assert "needs predictors" in err
    code, _, err = run_command(tmp_path / "hf", out, "--type", "q9")
    assert code == 2
    assert "'q9' is not known" in err
