"""Tokenizers that are trained on a few sentences, as metadata of a GGUF file."""

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


@cache
def _trained_bpe():
    """A vocabulary learnt here: (pieces in the order of their ids, merges as "left right")."""
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
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": np.array([1] * len(pieces) + [3] * 3 + [4], dtype=np.int32),
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": tokens.index("<|im_start|>"),
        "tokenizer.ggml.eos_token_id": tokens.index("<|im_end|>"),
    }
    metadata |= {f"tokenizer.ggml.{key}": value for key, value in changes.items()}
    return {key: value for key, value in metadata.items() if value is not None}


@cache
def _trained_sentencepiece():
    """(serialised model, pieces, scores, types), learnt here by the library itself."""
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
        library,
        [library.id_to_piece(i) for i in range(n)],
        [library.get_score(i) for i in range(n)],
        types,
    )


def sentencepiece_metadata(**changes):
    _, pieces, scores, types = _trained_sentencepiece()
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": pieces,
        "tokenizer.ggml.scores": np.array(scores, dtype=np.float32),
        "tokenizer.ggml.token_type": np.array(types, dtype=np.int32),
        "tokenizer.ggml.unknown_token_id": 0,
    }
    metadata |= {f"tokenizer.ggml.{key}": value for key, value in changes.items()}
    return {key: value for key, value in metadata.items() if value is not None}
