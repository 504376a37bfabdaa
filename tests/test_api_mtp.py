"""Drafts by a model's own layer for multi-token prediction, through the API, on tiny models."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable
from collections.abc import Sequence as Many
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from backend_runs import cpu_backend
from byte_models import write_model
from drafters import KINDS, PROMPTS, SMALL, SOURCE, answers, assert_drafts_change_nothing, essence, steady
from tiny_adapters import random_pairs, write_adapter

import hotset
from hotset.backends.base import BLOCK_SIZE, Batch
from hotset.backends.cpu.backend import CpuBackend
from hotset.engine import mtp
from hotset.engine.draft_model import draw
from hotset.engine.engine import Engine
from hotset.engine.mtp import MtpDrafter
from hotset.engine.sampler import Sampler, SamplingParams
from hotset.engine.sequence import Sequence
from hotset.engine.speculation import Draft
from hotset.errors import InvalidRequestError, StepCancelledError, UnsupportedModelError
from hotset.formats.gguf import open_gguf
from hotset.loader.build import open_model
from hotset.loader.speculate import drafting_bytes, open_speculator
from hotset.model.config import config_from_gguf
from hotset.model.decoder import NEXTN_INPUT, describe, describe_nextn
from hotset.settings import LoadSettings

pytest.importorskip("hotset._core", reason="the native module is not built")
pytest.importorskip("transformers")
nextn_models = pytest.importorskip("nextn_models")

__all__ = ["steady"]  # the fixture, for pytest

N_CTX, N_BLOCKS = 256, 5
SELDOM = ("qwen3next", "qwen35moe")  # similar to qwen35, or to it and glm4moe
NAMES = [
    pytest.param(name, marks=pytest.mark.slow if name in SELDOM else ())
    for name in (*nextn_models.MODELS, nextn_models.NEMOTRON)
]


@pytest.fixture
def path_of(run_folder: Path) -> Callable[[str], Path]:
    return partial(nextn_models.kept_agreeing, run_folder)


@pytest.mark.parametrize("name", NAMES)
def test_drafts_change_nothing(path_of: Callable[[str], Path], name: str) -> None:
    kinds = KINDS if name in ("glm4moe", "qwen35") else KINDS[:2]
    drafting = assert_drafts_change_nothing(path_of(name), {"speculate": "mtp"}, kinds=kinds)
    counted = drafting.thread.counters()
    assert counted.drafted_tokens > counted.accepted_tokens > 0.1 * counted.drafted_tokens


def test_drafts_change_no_answer_with_adapters(path_of: Callable[[str], Path], tmp_path: Path) -> None:
    """Check adapters: the layer drafts without them, but states and blocks include each answer's adapters."""
    path = path_of("qwen35")
    with open_gguf(path) as gguf:
        graph = describe(config_from_gguf(gguf), gguf.tensors)
        pairs = random_pairs(graph, gguf.tensors, names=lambda name: name != "output.weight")
        lora = write_adapter(tmp_path / "a.gguf", pairs, architecture=gguf.architecture, alpha=0.2)
    found = []
    for speculate in ("off", "mtp"):
        with hotset.load(path, lora=lora, speculate=speculate, **SMALL) as model:
            with_it = essence(answers(model, KINDS[0]))
            model.adapters.set_scales({})
            found.append((with_it, essence(answers(model, KINDS[0]))))
    assert found[0] == found[1]
    assert found[0][0] != found[0][1]


class Recorded:
    """The logits that a drafter drew from, by the tokens before them; sequences are greedy."""

    def __init__(self, model: hotset.Model, monkeypatch: pytest.MonkeyPatch) -> None:
        speculator = model.engine.speculator
        assert speculator is not None
        assert isinstance(speculator.drafter, MtpDrafter)
        self.logits: dict[tuple[int, ...], np.ndarray] = {}
        self._model, self._drafter = model, speculator.drafter
        self._draft, self._rows = speculator.drafter.draft, dict[int, list[np.ndarray]]()
        monkeypatch.setattr(speculator.drafter, "draft", self.draft)
        monkeypatch.setattr(mtp, "draw", self.draw)

    def draw(self, draft: Draft, sampler: Sampler, row: np.ndarray) -> bool:
        self._rows.setdefault(id(draft), []).append(row.copy())
        return draw(draft, sampler, row)

    def draft(self, wanted: Many[tuple[Sequence, int]]) -> list[Draft]:
        drafts = self._draft(wanted)
        for (sequence, _), draft in zip(wanted, drafts, strict=True):
            if rows := self._rows.pop(id(draft), None):
                self.logits[tuple(sequence.tokens)] = np.array(rows)
        return drafts

    def check(self) -> None:
        """Compare them with the layer's logits over the whole text, read in one step in a new cache."""
        model, options = self._model, {"n_blocks": N_BLOCKS, "n_threads": 1}
        layer = cpu_backend(model.weights, describe_nextn(model.config, model.weights.tensors), **options)
        whole = cpu_backend(model.weights, model.graph, **options)
        reads, hidden = self._drafter.reads, dict[tuple[int, ...], np.ndarray]()
        for tokens, rows in sorted(self.logits.items(), key=lambda each: -len(each[0])):
            text = next((text for text in hidden if text[: len(tokens)] == tokens), tokens)
            if text not in hidden:
                step = one_row(tokens, 0, reads).with_states_of_rows(0)
                hidden[text] = self._drafter._normed(whole.step(step).taps[reads])
            np.testing.assert_array_equal(logits_of(layer, tokens, hidden[text], len(rows)), rows)
        layer.close()
        whole.close()


def one_row(tokens: Many[int], start: int, tap: str) -> Batch:
    n, blocks = len(tokens), np.arange(N_BLOCKS, dtype=np.int32)[None]
    positions, every = np.arange(start, start + n, dtype=np.int32), np.arange(n, dtype=np.int32)
    return Batch(np.array(tokens, np.int32), positions, np.zeros(n, np.int32), blocks, every, (tap,))


def logits_of(layer: CpuBackend, tokens: tuple[int, ...], hidden: np.ndarray, n: int) -> np.ndarray:
    """Return the logits of n tokens that a layer drafts greedily. hidden: the model's states at `tokens`."""
    found: list[np.ndarray] = []
    part, start, rows = list(tokens[1:]), 1, hidden[: len(tokens) - 1]
    while len(found) < n:
        found.append(layer.run(one_row(part, start, NEXTN_INPUT), rows)[-1].copy())
        start += len(part)
        part, rows = [int(found[-1].argmax())], layer.tapped[NEXTN_INPUT][-1:]
    return np.array(found)


@pytest.mark.parametrize("name", ["glm4moe", "qwen35"])
def test_drafts_equal_the_layer_over_the_whole_text(
    path_of: Callable[[str], Path], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check that drafts depend only on the tokens, whatever is shared, preempted, cancelled or resumed."""
    shared, die = SOURCE[:140], random.Random(3)
    with hotset.load(path_of(name), speculate="mtp", **SMALL | {"n_seqs": 2, "max_batch": 48}) as model:
        recorded, kind = Recorded(model, monkeypatch), {"temperature": 0, "max_tokens": 24}
        model.generate(shared, **kind)
        model.generate_many([shared + text for text in ("", "a", " = 1", "\n\n")], **kind)
        assert model.thread.counters().reused_tokens > 0
        with model.thread.exclusive() as engine:
            for text in PROMPTS[:6]:
                params = SamplingParams(temperature=0, max_tokens=100)
                engine.enqueue(engine.prepare(model.tokenizer.encode(text), params))
            lose(engine, die, monkeypatch)
            while engine.has_work:
                with contextlib.suppress(KeyboardInterrupt):
                    engine.step()
            counted = engine.counters()
        assert counted.cancelled_steps > 5
        assert counted.preemptions > 0
        recorded.check()


def test_blocks_of_tokens_that_were_not_drafted_are_whole(
    path_of: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check the layer's blocks of tokens without drafts: another sequence continues from them."""
    with hotset.load(path_of("glm4moe"), speculate="mtp", **SMALL) as model:
        assert model.engine.speculator is not None
        ids = model.tokenizer.encode(SOURCE[:30])
        with monkeypatch.context() as patch, model.thread.exclusive() as engine:
            patch.setattr(model.engine.speculator, "draft", lambda *_: None)
            params = SamplingParams(temperature=0, max_tokens=110)
            first = engine.enqueue(engine.prepare(ids, params))
            while engine.has_work:
                engine.step()
        recorded = Recorded(model, monkeypatch)
        with model.thread.exclusive() as engine:
            params = SamplingParams(temperature=0, max_tokens=20)
            again = engine.enqueue(engine.prepare(first.tokens[:130], params))
            while engine.has_work:
                engine.step()
        assert again.n_reused == 2 * BLOCK_SIZE
        recorded.check()


def lose(engine: Engine, die: random.Random, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make steps fail at random from now on: cancelled, or interrupted before or between their tokens."""
    step, append = engine.backend.step, engine._append_token
    assert engine.speculator is not None
    assert engine.speculator.reader is not None
    note_step = engine.speculator.reader.note_step

    def stopped(batch: Batch) -> Any:
        if die.random() < 0.1:
            raise StepCancelledError
        return step(batch)

    def noted(*given: Any) -> None:
        note_step(*given)
        if die.random() < 0.1:
            raise KeyboardInterrupt

    def interrupted(*given: Any) -> None:
        append(*given)
        if die.random() < 0.05:
            raise KeyboardInterrupt

    monkeypatch.setattr(engine.backend, "step", stopped)
    monkeypatch.setattr(engine.speculator.reader, "note_step", noted)
    monkeypatch.setattr(engine, "_append_token", interrupted)


def test_blocks_on_the_disk_have_the_layers_part(
    path_of: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = SMALL | {"speculate": "mtp", "cache_dir": tmp_path / "cache"}
    kind: dict[str, Any] = {"temperature": 0, "max_tokens": 24}
    path = path_of("qwen35")
    with hotset.load(path, **settings) as model:
        expected = model.generate(SOURCE[:150], **kind)
    with hotset.load(path, **settings) as model:
        recorded = Recorded(model, monkeypatch)
        assert model.generate(SOURCE[:150], **kind).tokens == expected.tokens
        assert model.thread.counters().restored_tokens >= BLOCK_SIZE
        recorded.check()
    with hotset.load(path, **settings | {"speculate": "off"}) as model:  # its blocks differ
        assert model.generate(SOURCE[:150], **kind).tokens == expected.tokens
        assert model.thread.counters().restored_tokens == 0


def test_under_a_budget_of_memory(path_of: Callable[[str], Path]) -> None:
    path, drafts = path_of("glm4moe"), {"speculate": "mtp", "ram_budget": 3.0}
    assert assert_drafts_change_nothing(path, drafts, kinds=KINDS[:2]).stored is not None
    with open_model(path, LoadSettings(n_ctx=N_CTX, speculate="mtp")) as opened:
        own = sum(info.nbytes for name, info in opened.gguf.tensors.items() if name.startswith("blk.2."))
        output = opened.gguf.tensors["output.weight"].nbytes
        assert own + output < drafting_bytes(opened) < own + output + (33 << 20)


def test_models_that_cannot_draft_are_refused(path_of: Callable[[str], Path], tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match=r"model\.gguf has no layer for multi-token prediction"):
        hotset.load(write_model(tmp_path / "model.gguf"), speculate="mtp", **SMALL)
    path = path_of("glm4moe")
    with pytest.raises(InvalidRequestError, match="cannot be combined with `speculate`"):
        hotset.load(path, speculate="mtp", **SMALL | {"device": "reference"})
    with hotset.load(path, **SMALL) as model:
        settings = LoadSettings(speculate="mtp")
        divided: Any = object()
        with pytest.raises(InvalidRequestError, match="by one process on the CPU"):
            open_speculator(replace(model.decided, settings=settings), divided, lambda: model.tokenizer)
