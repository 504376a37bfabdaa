"""Tokenizers trained on a few sentences, as metadata of a GGUF file."""

from __future__ import annotations

import io
import json
from functools import cache

import numpy as np
import pytest

CORPUS = [
    "The quick brown fox jumps over the lazy dog. It's 1234 times they're here, we'll see!\n",
    "def main(argv):\n    for i in range(10):\n        print('hello world', i)\n    return 0\n\n",
    "Die Größe der Äpfel; où êtes-vous? Привет мир, как дела. 你好世界 こんにちは 안녕하세요 👋🏽 🦙\n",
] * 20


NASTY = [
    "",
    " ",
    "   ",
    "\n",
    "\n\n \n",
    "\t\t x",
    "a\r\nb",
    " \x0b\x0c ",
    "Hello",
    "  Hello,  world!! ",
    "\nHello\n",
    "I'm he's THEY'RE we'll o'clock '90s 'S 'LL ’s",
    "1 12 123 1234 1,000,000 3.14 0x1F ½ Ⅷ ٣٤٥",
    "e\u0301 n\u0303 Z̸̧̢̼͇ é",
    "नमस्ते दुनिया สวัสดี",
    "שלום مرحبا \u202ertl\u202c",
    "你好，世界！測試 こんにちは カタカナ 안녕",
    "👨‍👩‍👧‍👦 👩🏽‍💻 🏳️‍🌈 🇩🇪 1️⃣ ❤️",
    "\u200b\u200d\ufeff\u00a0\u3000\u2028\u0085",
    "\x00a\x00\x01\x7f\ufffd\uffff\U0010ffff",
    "def f(x):\n    if x:\n\t\treturn {'a': [1]}\n\n\n",
    "for(;;){x+=a[i]*b;}//",
    "<html>&amp;</html>",
    "C:\\n\\t \\",
    "snake_case CamelCase HTTPServer iPhone",
    "a" * 3000,
    "ab" * 500,
    "é" * 300,
    " " * 400,
    "\n" * 100,
    "7" * 200,
    "🦙" * 50,
    " \n" * 50,
    "▁ ▁▁a",
    "Ġ Ċ",
    "<0x0A>",
    "<s> </s> <unk>",
    "<|im_start|>hi<|im_end|>",
    "<|im_",
    "''''",
]


@cache
def _trained_bpe():
    """Return a vocabulary trained here: (pieces in the order of their ids, merges as "left right")."""
    from tokenizers import Tokenizer
    from tokenizers.models import BPE
    from tokenizers.pre_tokenizers import ByteLevel
    from tokenizers.trainers import BpeTrainer

    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    trainer = BpeTrainer(vocab_size=700, initial_alphabet=ByteLevel.alphabet(), show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    model = json.loads(tokenizer.to_str())["model"]
    pieces = sorted(model["vocab"], key=model["vocab"].get)
    return pieces, [m if isinstance(m, str) else " ".join(m) for m in model["merges"]]


def bpe_metadata(pre="gpt-2", **changes):
    pieces, merges = _trained_bpe()
    specials = ["<|im_start|>", "<|im_end|>", "<|endoftext|>"]
    tokens = [*pieces, *specials, "    "]
    metadata = {
        "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": pre, "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": np.array([1] * len(pieces) + [3] * 3 + [4], dtype=np.int32),
        "tokenizer.ggml.merges": merges, "tokenizer.ggml.bos_token_id": tokens.index("<|im_start|>"),
        "tokenizer.ggml.eos_token_id": tokens.index("<|im_end|>"),
    }  # fmt: skip
    metadata |= {f"tokenizer.ggml.{key}": value for key, value in changes.items()}
    return {key: value for key, value in metadata.items() if value is not None}


@cache
def _trained_sentencepiece():
    """Return (serialised model, pieces, scores, types), trained here by the library."""
    sentencepiece = pytest.importorskip("sentencepiece")
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS), model_writer=model, model_type="bpe", vocab_size=600,
        byte_fallback=True, character_coverage=1.0,
        normalization_rule_name="identity", remove_extra_whitespaces=False,
        user_defined_symbols=["<user>"], minloglevel=2,
    )  # fmt: skip
    library = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
    n = library.vocab_size()
    kinds = (
        (library.is_unknown, 2), (library.is_control, 3), (library.is_unused, 5), (library.is_byte, 6),
    )  # fmt: skip
    types = [next((kind for test, kind in kinds if test(id)), 1) for id in range(n)]
    types[library.piece_to_id("<user>")] = 4
    return (
        library, [library.id_to_piece(i) for i in range(n)], [library.get_score(i) for i in range(n)], types,
    )  # fmt: skip


def sentencepiece_metadata(**changes):
    _, pieces, scores, types = _trained_sentencepiece()
    metadata = {
        "tokenizer.ggml.model": "llama", "tokenizer.ggml.tokens": pieces,
        "tokenizer.ggml.scores": np.array(scores, dtype=np.float32),
        "tokenizer.ggml.token_type": np.array(types, dtype=np.int32), "tokenizer.ggml.unknown_token_id": 0,
    }  # fmt: skip
    metadata |= {f"tokenizer.ggml.{key}": value for key, value in changes.items()}
    return {key: value for key, value in metadata.items() if value is not None}


SPECIALS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]  # of BERT, ids 0 to 4


@cache
def trained_word_piece(*, lowercase: bool = True, strips: bool | None = None):
    """Return the library's tokenizer, trained here; some characters are in no piece."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordPiece
    from tokenizers.normalizers import BertNormalizer
    from tokenizers.pre_tokenizers import BertPreTokenizer
    from tokenizers.processors import TemplateProcessing
    from tokenizers.trainers import WordPieceTrainer

    tokenizer = Tokenizer(WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = BertNormalizer(lowercase=lowercase, strip_accents=strips)
    tokenizer.pre_tokenizer = BertPreTokenizer()
    trainer = WordPieceTrainer(
        vocab_size=300, special_tokens=SPECIALS, limit_alphabet=120, show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.post_processor = TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    return tokenizer


@cache
def trained_unigram():
    """Return (SentencePiece's processor, its charsmap): a unigram model with nmt_nfkc, trained here."""
    sentencepiece = pytest.importorskip("sentencepiece")
    from hotset.convert.hf_tokenizer import _merged, proto_fields

    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS), model_writer=model, model_type="unigram", vocab_size=260,
        character_coverage=0.99, normalization_rule_name="nmt_nfkc", hard_vocab_limit=False,
        user_defined_symbols=["<user>"], minloglevel=2,
    )  # fmt: skip
    fields = list(proto_fields(model.getvalue()))
    charsmap = dict(proto_fields(_merged(fields, 3)))[2]
    return sentencepiece.SentencePieceProcessor(model_proto=model.getvalue()), bytes(charsmap)


def unigram_metadata(**changes):
    library, charsmap = trained_unigram()
    n = library.vocab_size()
    types = [2 if library.is_unknown(i) else 3 if library.is_control(i) else 1 for i in range(n)]
    types[library.piece_to_id("<user>")] = 4
    metadata = {
        "model": "t5",
        "tokens": [library.id_to_piece(i) for i in range(n)],
        "scores": np.array([library.get_score(i) for i in range(n)], np.float32),
        "token_type": np.array(types, np.int32),
        "precompiled_charsmap": np.frombuffer(charsmap, np.uint8),
        "add_space_prefix": True,
        "remove_extra_whitespaces": True,
        "bos_token_id": library.bos_id(),
        "eos_token_id": library.eos_id(),
        "add_bos_token": True,
        "add_eos_token": True,
    } | changes
    return {f"tokenizer.ggml.{key}": value for key, value in metadata.items() if value is not None}


def word_piece_metadata(tokenizer, **changes):
    """Return the metadata of the library's tokenizer."""
    ids = tokenizer.get_vocab()
    tokens = sorted(ids, key=ids.get)
    spelled = [t if t in SPECIALS else t.removeprefix("##") if t[:2] == "##" else f"▁{t}" for t in tokens]
    metadata = {
        "model": "bert",
        "tokens": spelled,
        "token_type": np.array([3 if token in SPECIALS else 1 for token in tokens], np.int32),
        "bos_token_id": 2,
        "seperator_token_id": 3,
        "unknown_token_id": 1,
    } | changes
    return {f"tokenizer.ggml.{key}": value for key, value in metadata.items() if value is not None}
