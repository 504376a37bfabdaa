"""Drafters for tests, whose drafts are partly right as their random numbers say, and their models.

The fixture `steady` makes drafting independent of measured seconds.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from collections.abc import Sequence as Many
from pathlib import Path
from typing import Any

import pytest
from byte_models import vocabulary, write_model, write_sparse
from tiny_gguf import write_llama

import hotset
from hotset.engine.draft_model import OfModel
from hotset.engine.sequence import Sequence
from hotset.engine.speculation import Draft, StepTimes
from hotset.formats.gguf import open_gguf
from hotset.generation import Completion
from hotset.model.config import config_from_gguf
from hotset.model.thresholds import LayerThresholds
from hotset.sparsity.thresholds import Calibrated, Thresholds, thresholds_path


@pytest.fixture(autouse=True)
def steady(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the measured seconds: 1 + 0.05 n for a step of n tokens, 0 for drafting."""
    note = StepTimes.note
    monkeypatch.setattr(StepTimes, "note", lambda self, n, _: note(self, n, 1 + 0.05 * n))
    monkeypatch.setattr(OfModel, "seconds_per_token", 0.0)


SMALL: dict[str, Any] = {"device": "cpu", "n_ctx": 256, "n_threads": 2, "n_seqs": 4}
SOURCE = Path(hotset.__file__).with_name("units.py").read_text("utf-8")
PROMPTS = [SOURCE[i : i + 40 + i // 2] for i in range(0, 240, 30)]  # several blocks each
KINDS: list[dict[str, Any]] = [
    {"temperature": 0, "logprobs": 2},
    {"temperature": 0.7, "logprobs": 0},
    {"temperature": 0.5, "repetition_penalty": 1.1, "penalty_last_n": -1, "stop": ("qq", "zz")},
]


def answers(model: hotset.Model, kind: dict[str, Any]) -> list[Completion]:
    """Return the answers to some prompts one by one, and then to all prompts at once."""
    found = [model.generate(text, seed=i, max_tokens=30, **kind) for i, text in enumerate(PROMPTS[:2])]
    return found + model.generate_many(PROMPTS, seed=5, max_tokens=30, **kind)


def essence(found: list[Completion]) -> list[Any]:
    return [(one.text, one.tokens, one.logprobs, one.finish_reason) for one in found]


def assert_drafts_change_nothing(
    path: Path,
    drafts: dict[str, Any],
    plain: dict[str, Any] | None = None,
    *,
    kinds: Many[dict[str, Any]] = KINDS,
    **both: Any,
) -> hotset.Model:
    """Compare the answers without and with the settings `drafts`; return the closed model that drafted."""
    with (
        hotset.load(path, **SMALL | both | (plain or {})) as alone,
        hotset.load(path, **SMALL | both | drafts) as drafting,
    ):
        for kind in kinds:
            assert essence(answers(drafting, kind)) == essence(answers(alone, kind))
        counted = drafting.thread.counters()
        assert counted.drafted_tokens >= counted.accepted_tokens > 0
    return drafting


class Guesser:
    """Drafts the tokens of `answer` for a sequence, each with probability `right`, otherwise another token.

    `answer` gives all or some tokens that follow the prompt. Drafts may be longer or shorter than the
    requested maximum.
    """

    name = "guesser"
    seconds_per_token = 0.0

    def __init__(
        self, answer: Callable[[Sequence], Many[int]], n_vocab: int, right: float, seed: int = 0
    ) -> None:
        self._answer, self._n_vocab, self._right = answer, n_vocab, right
        self._random = random.Random(seed)
        self.n_drafted = 0
        self.forgotten: set[Sequence] = set()

    def draft(self, wanted: Many[tuple[Sequence, int]]) -> list[Draft]:
        return [self._draft(sequence, self._random.randint(0, n)) for sequence, n in wanted]

    def _draft(self, sequence: Sequence, n: int) -> Draft:
        done = len(sequence.tokens) - sequence.n_prompt
        tokens = list(self._answer(sequence)[done : done + n])
        for i in range(len(tokens)):
            if self._random.random() > self._right:
                tokens[i] = (tokens[i] + self._random.randrange(1, self._n_vocab)) % self._n_vocab
        self.n_drafted += len(tokens)
        return Draft(tokens, [1] * len(tokens))

    def forget(self, sequence: Sequence) -> None:
        self.forgotten.add(sequence)

    def reset(self) -> None:
        pass

    def close(self) -> None:
        pass


def dense(folder: Path) -> Path:
    return write_model(folder / "dense.gguf")


def sparse(folder: Path) -> Path:
    return write_sparse(folder / "sparse.gguf", ranks=(16, 16))


def experts(folder: Path) -> Path:
    return write_llama(
        folder / "experts.gguf",
        experts=(8, 2),
        keys=(keys := vocabulary()),
        n_vocab=len(keys["tokenizer.ggml.tokens"]),
    )


def write_thresholds(path: Path) -> None:
    layer = LayerThresholds(gate=0.1, attn_in=0.3, attn_out=0.1, ffn_in=0.3, down_in=0.05)
    with open_gguf(path) as gguf:
        n_layer = config_from_gguf(gguf).n_layer
        Thresholds(Calibrated.of(gguf), (layer,) * n_layer, "dense", True).save(thresholds_path(path))
