"""The converter: shards, types, tokenizers, and what it refuses. (test_architectures compares the logits.)"""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hotset.errors import (
    FormatError,
    HotsetError,
    InvalidRequestError,
    ModelNotFoundError,
    TokenizerError,
    UnsupportedModelError,
)
from hotset.formats.gguf import GGUFFile, open_gguf
from hotset.formats.hf import CLASSES, PRE_TOKENIZERS, convert_hf
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
    """Replaces entries of a JSON file; None removes one."""
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
    sentence = "the cat in the  hat 🦙 naïve\n"
    assert load_tokenizer(gguf.metadata).encode(sentence) == [1, *theirs.encode(sentence)]

    sentencepiece.SentencePieceTrainer.train(
        input=str(text), model_prefix=str(checkpoint / "tokenizer"), vocab_size=40, model_type="unigram",
        hard_vocab_limit=False, minloglevel=2,
    )  # fmt: skip
    with pytest.raises(TokenizerError, match="not BPE"):
        converted(checkpoint)


@pytest.mark.parametrize("steps", PRE_TOKENIZERS)
def test_every_known_pre_tokenizer_means_what_the_reader_takes_it_for(
    checkpoint: Path, steps: tuple[tuple[str, ...], bool]
) -> None:
    from tokenizers import Regex, Tokenizer, pre_tokenizers

    found: list[Any] = []
    for step in steps[0]:
        if step == "digits":
            found.append(pre_tokenizers.Digits(individual_digits=True))
        elif step != "bytelevel":
            found.append(pre_tokenizers.Split(Regex(step), "isolated"))
    found.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex="bytelevel" in steps[0]))
    theirs = Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
    theirs.pre_tokenizer = pre_tokenizers.Sequence(found)
    theirs.save(str(checkpoint / "tokenizer.json"))
    content = json.loads((checkpoint / "tokenizer.json").read_text())
    edit(checkpoint / "tokenizer.json", model=content["model"] | {"ignore_merges": steps[1]})
    gguf = converted(checkpoint)
    assert gguf.metadata["tokenizer.ggml.pre"] == PRE_TOKENIZERS[steps]
    ours = load_tokenizer(gguf.metadata)
    assert ours.encode(NASTY, add_special=False, parse_special=True) == theirs.encode(NASTY).ids


def test_llama3_template_adds_bos(checkpoint: Path) -> None:
    template = {
        "type": "Sequence",
        "processors": [
            {"type": "ByteLevel", "trim_offsets": False},
            {
                "type": "TemplateProcessing",
                "single": [{"SpecialToken": {"id": "<|begin|>"}}, {"Sequence": {}}],
            },
        ],
    }
    edit(checkpoint / "tokenizer.json", post_processor=template)
    edit(checkpoint / "tokenizer_config.json", add_bos_token=None)
    assert converted(checkpoint).metadata["tokenizer.ggml.add_bos_token"] is True
    edit(checkpoint / "tokenizer.json", post_processor=None)
    assert converted(checkpoint).metadata["tokenizer.ggml.add_bos_token"] is False


def test_older_spellings_of_rope_and_windows(checkpoint: Path) -> None:
    edit(
        checkpoint / "config.json", rope_parameters=None, rope_theta=500.0,
        rope_scaling={"type": "linear", "factor": 2.0}, sliding_window=16, use_sliding_window=True,
        max_window_layers=2,
    )  # fmt: skip
    config = config_from_gguf(converted(checkpoint))
    assert config.windows == (0, 0, 16)
    assert config.rope.freq == pytest.approx([500 ** (-2 * i / 16) / 2 for i in range(8)], rel=1e-6)


def test_a_tied_output_is_not_stored_twice(checkpoint: Path) -> None:
    edit(checkpoint / "config.json", tie_word_embeddings=True)
    assert "output.weight" not in converted(checkpoint).tensors


@pytest.mark.parametrize(
    ("entries", "error", "sentence"),
    [
        (
            {"architectures": ["MambaForCausalLM"]},
            UnsupportedModelError,
            "'MambaForCausalLM'.*LlamaForCausalLM",
        ),
        ({"architectures": None}, UnsupportedModelError, "architecture None"),
        ({"quantization_config": {"bits": 4}}, UnsupportedModelError, "quantised"),
        ({"hidden_act": "swiglu"}, HotsetError, "'swiglu' is not known"),
        ({"hidden_act": "fatrelu"}, FormatError, "hidden_act_param"),
        ({"hidden_size": "96"}, FormatError, "hidden_size in config.json must be a number"),
        ({"num_hidden_layers": None}, FormatError, "num_hidden_layers"),
        ({"num_hidden_layers": -1}, FormatError, "integer from 1"),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, UnsupportedModelError, "'dynamic'"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, UnsupportedModelError, "partial_rotary_factor"),
        ({"head_dim": 15}, FormatError, "not whole heads of 15"),
    ],
)
def test_configurations_that_are_refused(
    checkpoint: Path, entries: dict[str, Any], error: type[HotsetError], sentence: str
) -> None:
    edit(checkpoint / "config.json", **entries)
    with pytest.raises(error, match=sentence):
        converted(checkpoint)
    assert [p.name for p in checkpoint.parent.iterdir()] == ["hf"]


def test_missing_files(tmp_path: Path, checkpoint: Path) -> None:
    with pytest.raises(ModelNotFoundError, match=r"config\.json"):
        convert_hf(tmp_path / "nowhere", tmp_path / "out.gguf")
    with pytest.raises(InvalidRequestError, match="F32, F16"):
        convert_hf(checkpoint, tmp_path / "out.gguf", "q4_k")
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
    ("entries", "sentence"),
    [
        ({"model": {"type": "WordPiece", "vocab": {}}}, "not byte-level BPE"),
        ({"model": {"vocab": {"a": 0}}}, "damaged"),
        ({"model": {"vocab": {"a": 2**40}, "merges": []}}, "numbers its"),
        ({"normalizer": {"type": "Lowercase"}}, "'Lowercase'"),
        ({"pre_tokenizer": {"type": "Whitespace"}}, "unknown step 'Whitespace'"),
        ({"pre_tokenizer": {"type": "Split", "behavior": "Isolated", "pattern": {"Regex": "a+"}}}, r"a\+"),
    ],
)
def test_tokenizers_that_are_refused(checkpoint: Path, entries: dict[str, Any], sentence: str) -> None:
    edit(checkpoint / "tokenizer.json", **entries)
    with pytest.raises(TokenizerError, match=sentence):
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
def test_any_json_gives_a_file_or_a_sentence(checkpoint: Path, file: str, data: st.DataObject) -> None:
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
    from hotset.model.config import ARCHITECTURES

    assert set(CLASSES.values()) <= set(ARCHITECTURES)
