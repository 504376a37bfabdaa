"""Models with a recurrent state, which is exact after chunks, reuse, preemption and cancellation.

Every comparison requires equality with the same tokens computed by themselves, in one step, by one thread.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from backend_runs import ISAS, cpu_backend
from cases import quick_are
from drafters import Guesser, steady
from recurrent_runs import N_CTX, Unsteady, ask, assert_are_of_one_step, drain, prompt, score, score_together

import hotset
from hotset.backends.base import BLOCK_SIZE, Batch
from hotset.backends.cpu.backend import CpuBackend
from hotset.backends.reference import ReferenceBackend
from hotset.engine.engine import Engine
from hotset.engine.sequence import Sequence as Request
from hotset.engine.speculation import Speculator
from hotset.errors import InvalidRequestError, OutOfMemoryError, UnsupportedModelError
from hotset.formats.gguf import GGUFFile, open_gguf
from hotset.load_parameters import MOST_DRAFTED
from hotset.model.config import config_from_gguf
from hotset.model.cost import Cost
from hotset.model.decoder import describe
from hotset.settings import LoadSettings
from hotset.sparsity.profile import Counter

pytest.importorskip("torch")
pytest.importorskip("transformers")
tiny_models = pytest.importorskip("tiny_models")
from derived_bounds import Oracle  # noqa: E402

__all__ = ["steady"]  # the fixture

RECIPES = [
    "lfm2", "lfm2moe", "qwen3next", "qwen35moe", "kimi-linear", "deepseek4", "nemotron-h",
    "nemotron-h-moe-latent", "granitehybrid", "falcon-h1", "mamba2", "rwkv6", "rwkv7", "mamba", "jamba",
    "qwen4exp",
]  # fmt: skip
ONE_OF_EACH_STATE = (
    "lfm2moe", "qwen3next", "kimi-linear", "deepseek4", "falcon-h1", "rwkv6", "rwkv7", "mamba", "qwen4exp",
)  # fmt: skip


@pytest.fixture(scope="module", params=quick_are(ONE_OF_EACH_STATE, RECIPES))
def path(request: pytest.FixtureRequest, run_folder: Path) -> Path:
    return tiny_models.shared_gguf(request.param, run_folder)


@pytest.fixture(scope="module")
def gguf(path: Path) -> Iterator[GGUFFile]:
    with open_gguf(path) as gguf:
        yield gguf


def backend(gguf: GGUFFile, **options: Any) -> CpuBackend:
    graph = describe(config_from_gguf(gguf), gguf.tensors)
    how = {"n_blocks": 16, "n_states": 40, "max_batch": 256, "kv_type": "f16", "n_threads": 1}
    return cpu_backend(gguf, graph, **how | options)


def assert_computed_alone(gguf: GGUFFile, sequence: Request, rows: list[np.ndarray]) -> None:
    """Check that an answer's logits equal the logits of its tokens in a fresh cache, in one step."""
    assert_are_of_one_step(backend(gguf), sequence, rows)


# ---- a backend


@pytest.mark.parametrize("n_threads", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_bits_depend_on_no_cut_and_no_neighbour(gguf: GGUFFile, n_threads: int) -> None:
    texts = [prompt(n, n) for n in (150, 70, 3)]
    whole = [score(Engine(backend(gguf), N_CTX), text) for text in texts]
    for max_batch in (1, 2, 5, 64, 67, 256):
        engine = Engine(backend(gguf, max_batch=max_batch, n_threads=n_threads), N_CTX)
        for found, expected in zip(score_together(engine, texts), whole, strict=True):
            np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("isa", ISAS)
def test_every_operation_is_the_references(gguf: GGUFFile, isa: str) -> None:
    graph = describe(config_from_gguf(gguf), gguf.tensors)
    native = backend(gguf, isa=isa, n_threads=2)
    oracle = Oracle(gguf, graph, n_blocks=16, kv_type="f16", n_states=40)
    texts = [prompt(70, 1), prompt(66, 2)]
    table = np.array([[3, 1], [0, 2]], np.int32)
    at, steps = [0, 0], np.zeros(2, np.int32)
    names = tuple(value.name for value in graph.values)
    for parts in ([(0, 61)], [(1, 1), (0, 1)], [(0, 2), (1, 65)], [(0, 6)]):
        batch = _batch(texts, at, parts, table).with_states_of_rows(steps)
        batch = replace(batch, taps=names)
        oracle.check(batch, native.step(batch))
        for row, n in parts:
            at[row] += n
            steps[row] += 1
    assert at == [70, 66]


def test_a_wrong_result_is_found(gguf: GGUFFile) -> None:
    """Check that the oracle's bounds detect an error of one part in two thousand."""
    graph = describe(config_from_gguf(gguf), gguf.tensors)
    text, table = prompt(40, 1), np.array([[3]], np.int32)
    batch = replace(
        _batch([text], [0], [(0, 40)], table).with_states_of_rows(0),
        taps=tuple(value.name for value in graph.values),
    )
    found = backend(gguf).step(batch)
    for op in graph.recurrent:
        wrong = found.taps[op.out.name].copy()
        wrong.flat[np.argmax(np.abs(wrong))] *= np.float32(1.0005)
        spoilt = replace(found, taps={**found.taps, op.out.name: wrong})
        with pytest.raises(AssertionError, match="off by"):
            Oracle(gguf, graph, n_blocks=16, kv_type="f16", n_states=40).check(batch, spoilt)


def _batch(
    texts: Sequence[list[int]], at: list[int], parts: Sequence[tuple[int, int]], table: np.ndarray
) -> Batch:
    ids = [token for row, n in parts for token in texts[row][at[row] : at[row] + n]]
    positions = [i for row, n in parts for i in range(at[row], at[row] + n)]
    owners = [row for row, n in parts for _ in range(n)]
    arrays = (np.array(a, np.int32) for a in (ids, positions, owners))
    return Batch(*arrays, table, np.arange(len(ids), dtype=np.int32))


def test_a_step_can_run_again(gguf: GGUFFile) -> None:
    """Check that a step gives the same result each time: it writes no state that it reads."""
    text, table = prompt(90), np.array([[0, 1]], np.int32)
    for native in (backend(gguf, n_threads=2), reference(gguf)):
        whole = native.step(_batch([text], [0], [(0, 90)], table).with_states_of_rows(0)).logits.copy()
        first = _batch([text], [0], [(0, 66)], table).with_states_of_rows(0)
        second = _batch([text], [66], [(0, 24)], table).with_states_of_rows(1)
        for _ in range(3):
            native.step(first)
        for _ in range(3):
            found = native.step(second).logits
            if isinstance(native, CpuBackend):
                np.testing.assert_array_equal(found, whole[66:])
            else:  # NumPy's matrix products depend on their sizes
                np.testing.assert_allclose(found, whole[66:], rtol=1e-4, atol=1e-4)


def test_more_heads_of_sequences_than_a_phase_has_chunks(gguf: GGUFFile) -> None:
    """Run 200 sequences, of six heads each in models with delta nets, in one step and one by one."""
    n, table = 200, np.arange(200, dtype=np.int32)[:, None]
    texts = [prompt(3, i) for i in range(n)]
    together = backend(gguf, n_blocks=n, n_states=2 * n, max_batch=400, n_threads=2)
    alone = backend(gguf, n_blocks=1, n_states=2)
    first = together.step(_batch(texts, [0] * n, [(i, 2) for i in range(n)], table).with_states_of_rows(0))
    found = [first.logits.reshape(n, 2, -1).copy()]
    second = together.step(_batch(texts, [2] * n, [(i, 1) for i in range(n)], table).with_states_of_rows(1))
    found.append(second.logits[:, None])
    for i in range(0, n, 13):
        expected = alone.step(_batch([texts[i]], [0], [(0, 3)], table[:1]).with_states_of_rows(0)).logits
        np.testing.assert_array_equal(np.concatenate([part[i] for part in found]), expected)


def reference(gguf: GGUFFile) -> ReferenceBackend:
    graph = describe(config_from_gguf(gguf), gguf.tensors)
    return ReferenceBackend(gguf, graph, n_blocks=16, n_states=40)


BROKEN: dict[str, tuple[dict[str, Any], str]] = {
    "no states": ({"states": None}, "needs state slots"),
    "no saves": ({"saves": None}, "needs state slots"),
    "too few": ({"saves": [5]}, "needs state slots|perhaps one"),
    "past the end": ({"saves": [-1, 40]}, "outside the cache's 40 slots"),
    "below": ({"states": [-2]}, "outside the cache's 40 slots"),
    "reads what it writes": ({"states": [7], "positions": [1, 2], "saves": [-1, 7]}, "none that it reads"),
    "writes twice": (
        {"positions": [63, 64], "states": [7], "saves": [3, 3]},
        "write a state only once",
    ),
    "begins in the middle": ({"positions": [1, 2]}, "exactly if it does not begin"),
    "begins with a state": ({"states": [3]}, "exactly if it does not begin"),
    "leaves one out": ({"positions": [0, 2]}, "be consecutive"),
    "saves inside a block": (
        {
            "tokens": [1] * 19, "positions": list(range(19)), "sequences": [0] * 19,
            "saves": [-1, 1, *[-1] * 16, 2],
        },
        "end of a KV block",
    ),
    "comes twice": (
        {
            "tokens": [1, 1, 1], "positions": [0, 0, 1], "sequences": [0, 1, 0], "saves": [-1, -1, 2],
            "states": [-1, -1], "block_tables": [[0, 1], [2, 3]],
        },
        "be consecutive",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", BROKEN)
def test_batches_that_would_spoil_a_state_are_refused(gguf: GGUFFile, what: str) -> None:
    arrays: dict[str, Any] = {
        "tokens": [1, 2], "positions": [0, 1], "sequences": [0, 0], "block_tables": [[0, 1]], "outputs": [1],
        "states": [-1], "saves": [-1, 2],
    }  # fmt: skip
    changed, message = BROKEN[what]
    made = {k: None if v is None else np.array(v, np.int32) for k, v in (arrays | changed).items()}
    for each in (backend(gguf), reference(gguf)):
        with pytest.raises(InvalidRequestError, match=message):
            each.step(Batch(**made))  # type: ignore[arg-type]


# ---- an engine


def test_prefix_continues_from_its_state(gguf: GGUFFile) -> None:
    shared, engine = prompt(140), Engine(backend(gguf), N_CTX)
    first, _ = ask(engine, shared, temperature=0, max_tokens=60)
    drain(engine)
    assert first.n_reused == 0
    for tail, reused in ((prompt(50, 1), 128), (prompt(1, 2), 128)):
        sequence, rows = ask(engine, shared + tail, seed=1, max_tokens=9)
        drain(engine)
        assert sequence.n_reused == reused
        assert_computed_alone(gguf, sequence, rows)
    # Generated tokens are a prefix, too. The second text leaves the shared one inside its second KV block.
    for text, reused in ((first.tokens + prompt(20, 3), 192), (shared[:100] + prompt(60, 4), 64)):
        sequence, rows = ask(engine, text, seed=1, max_tokens=9)
        drain(engine)
        assert sequence.n_reused == reused
        assert_computed_alone(gguf, sequence, rows)


def test_without_a_state_a_prefix_is_computed_again(gguf: GGUFFile) -> None:
    """Use four slots, of which two are needed by a running sequence.

    The latest states replace the others. Among the states of one step, those after longer prefixes replace
    those after shorter ones. KV blocks without a state are not reused.
    """
    engine = Engine(backend(gguf, n_states=4), N_CTX, prompt_seconds=math.inf)
    assert engine.max_sequences == 1
    shared = prompt(220)
    for text, reused in (
        (shared, 0),  # leaves the states after 128 and 192 tokens
        (shared + prompt(5, 1), 192),
        (shared[:140], 128),
        (shared[:100], 0),  # the state after 64 is gone
        (prompt(200, 8), 0),
        (prompt(200, 9), 0),
        (shared + prompt(5, 3), 0),
    ):
        sequence, rows = ask(engine, text, seed=1, max_tokens=5)
        drain(engine)
        assert sequence.n_reused == reused
        assert_computed_alone(gguf, sequence, rows)


def test_answers_of_one_prompt_share_its_state(gguf: GGUFFile) -> None:
    engine = Engine(backend(gguf, n_threads=2), N_CTX)
    asked = [ask(engine, prompt(150), seed=i, max_tokens=40) for i in range(4)]
    drain(engine)
    assert len({tuple(sequence.tokens) for sequence, _ in asked}) == 4
    assert engine.counters().prompt_tokens == 150 + 3 * 22
    for sequence, rows in asked:
        assert_computed_alone(gguf, sequence, rows)


def test_preempted_sequences_come_back_to_their_state(gguf: GGUFFile) -> None:
    for n_states in (8, 40):
        engine = Engine(backend(gguf, n_blocks=4, n_states=n_states, max_batch=50), N_CTX)
        asked = [ask(engine, prompt(60, i), seed=i, max_tokens=100) for i in range(3)]
        drain(engine)
        assert engine.counters().preemptions > 0
        for sequence, rows in asked:
            assert_computed_alone(gguf, sequence, rows)
        assert engine.scheduler.states is not None
        assert engine.scheduler.states.n_available == n_states


@pytest.mark.parametrize("fails", quick_are((True,), [False, True]))
def test_cancelled_and_failed_steps_leave_usable_states(gguf: GGUFFile, fails: bool) -> None:
    unsteady = Unsteady(backend(gguf, n_blocks=9, n_states=12, max_batch=70), seed=3)
    unsteady.fails = fails
    engine = Engine(unsteady, N_CTX)  # type: ignore[arg-type]
    shared = prompt(130)
    asked = []
    for i in range(12):
        asked.append(ask(engine, shared[: 130 - 7 * (i % 4)] + prompt(i, 5), seed=i, max_tokens=30))
        for _ in range(3):
            try:
                engine.step()
            except RuntimeError:
                assert fails
    while engine.has_work:
        try:
            engine.step()
        except RuntimeError:
            assert fails
    assert unsteady.n_cancelled > 10
    done = [(sequence, rows) for sequence, rows in asked if sequence.finish_reason == "length"]
    assert len(done) == 12 if not fails else unsteady.n_failed > 1 and len(done) > 2
    for sequence, rows in done:
        assert_computed_alone(gguf, sequence, rows)
    assert engine.scheduler.states is not None
    assert engine.scheduler.states.n_available == 12


def test_an_interruption_while_a_step_is_collected_undoes_nothing(gguf: GGUFFile) -> None:
    engine = Engine(backend(gguf), N_CTX)
    sequence, rows = ask(engine, prompt(70), seed=0, max_tokens=20)
    assert sequence.sampler is not None
    job, interrupted = sequence.sampler.job, []

    def once_more(logits: np.ndarray, *more: np.ndarray | None) -> Any:
        if len(interrupted) < 3:
            interrupted.append(1)
            raise KeyboardInterrupt
        interrupted.clear()
        return job(logits, *more)

    sequence.sampler.job = once_more  # type: ignore[method-assign]
    n_raised = 0
    while engine.has_work:
        try:
            engine.step()
        except KeyboardInterrupt:
            n_raised += 1
    assert n_raised == 60
    assert_computed_alone(gguf, sequence, rows)


# ---- a model


def test_a_loaded_model_counts_its_states(path: Path) -> None:
    with hotset.load(path, device="cpu", n_threads=2, n_ctx=N_CTX) as model:
        per_state = model.cost.state_bytes
        assert per_state == sum(4 * math.prod(op.state_shape) for op in model.graph.recurrent)
        n_states = model.backend.n_states
        kv = 4 * BLOCK_SIZE * model.cost.kv_bytes_per_token("f16")
        assert n_states == min(2 * 17 + 4, max(12, kv // per_state))
        ids = prompt(100)
        expected = model.logits(ids)
        # Steps outside of the engine have slots of their own, and free them.
        np.testing.assert_array_equal(model.taps(ids, ["logits"])["logits"], expected)
        assert model.engine.scheduler.states is not None
        assert model.engine.scheduler.states.n_available == n_states
        steps = model.tap_steps(prompt(60), ["logits"])
        next(steps)
        with pytest.raises(OutOfMemoryError, match="another text uses the slots"):
            model.taps(ids, ["logits"])
        steps.close()
        np.testing.assert_array_equal(model.taps(ids, ["logits"])["logits"], expected)


def test_show_and_devices_know_of_states(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from typer.testing import CliRunner

    from hotset.cli.main import app

    shown = CliRunner().invoke(app, ["show", str(path)]).stdout
    assert "of the layers have a state: " in " ".join(shown.split())
    facts = json.loads(CliRunner().invoke(app, ["show", str(path), "--json"]).stdout)
    with open_gguf(path) as gguf:
        config = config_from_gguf(gguf)
        cost = Cost(describe(config, gguf.tensors), gguf.tensors)
    assert facts["recurrent"] == {"layers": config.n_recurrent, "state_bytes": cost.state_bytes}
    with pytest.raises(UnsupportedModelError, match="computed only on the CPU; use device='cpu'"):
        hotset.load(path, device="simulated", vram_budget=1.0, n_ctx=N_CTX)


def test_states_count_as_the_cache_does(gguf: GGUFFile) -> None:
    from hotset.loader.decide import context

    config = config_from_gguf(gguf)
    cost = Cost(describe(config, gguf.tensors), gguf.tensors)
    cost.state_bytes = 10_000_000

    free = 1000 + 256 * cost.kv_bytes_per_token("f16") + 12 * cost.state_bytes
    assert context(LoadSettings(n_ctx=256), config, cost, free, 1000, None) == 256
    assert context(LoadSettings(), config, cost, 4 * free, 1000, None) == 256
    with pytest.raises(OutOfMemoryError, match="lower n_ctx"):
        context(LoadSettings(n_ctx=256), config, cost, free - 2000, 1000, None)


def test_a_model_without_attention_has_a_context_for_nothing(run_folder: Path) -> None:
    path = tiny_models.shared_gguf("mamba2", run_folder)
    ids = prompt(100)
    with hotset.load(path, device="cpu") as model:
        assert model.cost.kv_bytes_per_token("f16") == 0
        expected, n_ctx = model.logits(ids), model.n_ctx
    with hotset.load(path, device="cpu", ram_budget=4.0) as model:
        assert model.n_ctx == n_ctx
        np.testing.assert_array_equal(model.logits(ids), expected)


def test_too_few_slots_give_one_message(gguf: GGUFFile) -> None:
    with pytest.raises(OutOfMemoryError, match="too small"):
        Engine(backend(gguf, n_states=3), N_CTX)


def test_layers_without_an_ffn_have_no_statistics_and_no_predictor(run_folder: Path) -> None:
    path = tiny_models.shared_gguf("nemotron-h", run_folder)
    with hotset.load(path, device="cpu", n_ctx=N_CTX) as model:
        found = model.generate("the", max_tokens=3, temperature=0).stats
        assert [layer.layer for layer in found.layers] == [1, 3]
        assert 0.2 < found.active_share < 0.8
        assert [len(counts) for counts in Counter(model.config).counts] == [0, 160, 0, 160, 0]
    with (
        hotset.load(tiny_models.shared_gguf("mamba2", run_folder), device="cpu", n_ctx=N_CTX) as model,
        pytest.raises(UnsupportedModelError, match="the model has no FFN"),
    ):
        Counter(model.config)
    with pytest.raises(InvalidRequestError, match="layers without an FFN"):
        hotset.load(path, device="cpu", sparsity="predicted")


# ---- drafted tokens


@pytest.mark.parametrize("n_states", quick_are((13,), [40, 13]))
def test_drafted_tokens_that_turn_wrong_leave_no_trace(gguf: GGUFFile, n_states: int) -> None:
    """Run three requests at once, whose drafts are right for some tokens.

    Each continues from the state after the last right token. With few slots, drafts are shortened.
    """
    expected = []
    for i, n in enumerate((3, 60, 120)):
        engine = Engine(backend(gguf), N_CTX)
        expected.append(ask(engine, prompt(n, i), seed=i, max_tokens=50, temperature=0.6 * i, logprobs=1)[0])
        drain(engine)
    answers = {tuple(one.tokens[: one.n_prompt]): one.generated for one in expected}
    guesser = Guesser(lambda each: answers.get(tuple(each.tokens[: each.n_prompt]), []), 260, 0.8)
    engine = Engine(
        backend(gguf, n_states=n_states, n_threads=2), N_CTX, speculator=Speculator(guesser, MOST_DRAFTED)
    )
    asked = []
    for i, n in enumerate((3, 60, 120)):
        asked.append(ask(engine, prompt(n, i), seed=i, max_tokens=50, temperature=0.6 * i, logprobs=1))
        engine.step()
    drain(engine)
    for (sequence, rows), other in zip(asked, expected, strict=True):
        assert (sequence.tokens, sequence.logprobs) == (other.tokens, other.logprobs)
        assert_computed_alone(gguf, sequence, rows)
    assert engine.counters().accepted_tokens > 0
    # The prefixes that they leave in the cache are found by other requests.
    longer = [*asked[2][0].tokens, 7, 7]
    again, rows = ask(engine, longer, temperature=0, max_tokens=20)
    drain(engine)
    assert again.n_reused > 0
    assert_computed_alone(gguf, again, rows)


def test_a_recurrent_model_cannot_draft(path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match="cannot take drafted tokens back"):
        hotset.load(path, draft=path, n_ctx=64, device="cpu", n_threads=1)
