"""Indexers: the keys that a token attends to in contexts beyond the indexer's top-k.

Logits and chosen keys are compared with transformers', at one to eight times the top-k. Ties, caches of every
type, chunks, prefixes and budgets are compared with the reference or with the same tokens in one step.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from backend_runs import batch, cpu_backend, tokens
from cases import quick_are
from derived_bounds import Oracle
from drafters import Guesser, steady
from fuzz import fuzz_reads
from made_once import made_once
from recurrent_runs import N_CTX as ENGINE_CTX
from recurrent_runs import Unsteady, ask, assert_are_of_one_step, drain, prompt
from tiny_gguf import with_other_keys

import hotset
from hotset import _core
from hotset.backends.cpu.backend import CpuBackend
from hotset.backends.reference import chosen_blocks
from hotset.backends.torch.graph import TorchGraph
from hotset.convert.hf_config import HFConfig
from hotset.engine.engine import Engine
from hotset.engine.speculation import Speculator
from hotset.errors import ContextLengthError, FormatError, UnsupportedModelError
from hotset.formats.gguf import GGUFFile, ValueType, open_gguf
from hotset.load_parameters import MOST_DRAFTED
from hotset.model.config import config_from_gguf
from hotset.model.cost import Cost, index_slots
from hotset.model.decoder import describe
from hotset.model.operations import Attention, Indexer
from hotset.placement import ram

torch = pytest.importorskip("torch")
tiny_models = pytest.importorskip("tiny_models")
from transformers_oracle import (  # noqa: E402
    BACKENDS,
    BLOCKS_EACH,
    LENGTHS,
    N_CTX,
    PLANS,
    TOLERANCE,
    open_backend,
    relative_error,
    run,
)

__all__ = ["steady"]  # the fixture


@dataclass(frozen=True)
class Indexed:
    """A tiny model whose indexer chooses: a recipe, and settings with a small top-k and many heads.

    With few heads all of them may be negative for several keys, whose scores are then equal; transformers
    leaves open which of these it chooses. indexer: the class of transformers' indexer.
    """

    recipe: str
    settings: dict[str, Any]
    indexer: str


MODELS = {
    "deepseek32": Indexed("deepseek32", {"index_topk": 18, "index_n_heads": 16}, "DeepseekV32Indexer"),
    "deepseek32-tied": Indexed(
        "deepseek32-tied", {"index_topk": 5, "index_n_heads": 24, "index_head_dim": 40}, "DeepseekV32Indexer"
    ),
    "glm-dsa": Indexed("glm-dsa", {"index_topk": 18, "index_n_heads": 16}, "GlmMoeDsaIndexer"),
    "glm-dsa-shared": Indexed(
        "glm-dsa",
        {
            "index_topk": 18, "index_n_heads": 16, "num_hidden_layers": 4,
            "indexer_types": ["full", "shared", "full", "shared"],
        },
        "GlmMoeDsaIndexer",
    ),
    "deepseek4": Indexed("deepseek4", {"index_topk": 5, "index_n_heads": 16}, "DeepseekV4Indexer"),
    "deepseek4-streams": Indexed(
        "deepseek4-streams", {"index_topk": 3, "index_n_heads": 18}, "DeepseekV4Indexer"
    ),
    "qwen4exp": Indexed("qwen4exp", {"indexer_budget": 20, "indexer_n_heads": 16}, "Qwen4ExpTextQSAIndexer"),
    "qwen4exp-pairs": Indexed(
        "qwen4exp-pairs", {"indexer_budget": 18, "indexer_n_heads": 18, "indexer_compress_ratio": 3},
        "Qwen4ExpTextQSAIndexer",
    ),
}  # fmt: skip
NAMES = quick_are(("deepseek32", "glm-dsa-shared", "deepseek4", "qwen4exp"), list(MODELS))


def file_of(name: str, run_folder: Path) -> Path:
    return tiny_models.shared_gguf(MODELS[name].recipe, run_folder, **MODELS[name].settings)


@pytest.fixture(params=NAMES)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def gguf(name: str, run_folder: Path) -> Iterator[GGUFFile]:
    with open_gguf(file_of(name, run_folder)) as gguf:
        yield gguf


@dataclass
class Expected:
    """A text, its logits by transformers, and the keys that each indexer chose: [n_tokens, n_keys] flags."""

    text: np.ndarray
    logits: np.ndarray
    chosen: list[np.ndarray]


def flags_of(found: Any, n_tokens: int, size: int) -> np.ndarray:
    """Return the chosen keys of one text as flags: of tokens, or of compressed blocks."""
    found = found[0]
    if found.dtype == torch.bool:  # Qwen4-Exp's mask of tokens
        return found.reshape(n_tokens, n_tokens).numpy()
    flags = np.zeros((n_tokens, n_tokens // size), bool)
    for t, numbers in enumerate(found.tolist()):
        flags[t, [i for i in numbers if 0 <= i < (t + 1) // size]] = True
    return flags


@pytest.fixture
def expected(name: str, gguf: GGUFFile, run_folder: Path) -> list[Expected]:
    model, rng = MODELS[name], np.random.default_rng(0)
    texts = [rng.integers(0, tiny_models.VOCABULARY, n) for n in LENGTHS]
    indexing = config_from_gguf(gguf).indexing
    assert indexing is not None
    size = indexing.size if "deepseek4" in name else 1

    def compute(path: Path) -> None:
        theirs = tiny_models.build(tiny_models.EXPERTS[model.recipe], **model.settings)
        chosen: list[Any] = []
        for module in theirs.modules():
            if type(module).__name__ == model.indexer:
                module.register_forward_hook(lambda _module, _inputs, out: chosen.append(out))
        arrays = {}
        for i, text in enumerate(texts):
            chosen.clear()
            with torch.no_grad():
                arrays[f"logits{i}"] = theirs(torch.tensor(text)[None]).logits[0].numpy()
            arrays[f"chosen{i}"] = np.stack([flags_of(each, len(text), size) for each in chosen])
        with path.open("wb") as file:
            np.savez(file, **arrays)

    with np.load(made_once(run_folder / f"indexer-{name}.npz", compute)) as found:
        return [
            Expected(text, found[f"logits{i}"], list(found[f"chosen{i}"])) for i, text in enumerate(texts)
        ]


def indexers(gguf: GGUFFile, n_ctx: int = N_CTX) -> list[Indexer]:
    graph = describe(config_from_gguf(gguf).for_context(n_ctx), gguf.tensors)
    return [op for op in graph.ops if isinstance(op, Indexer)]


def seen_tokens(op: Indexer, numbers: np.ndarray, *, compressed: bool) -> np.ndarray:
    """Return chosen blocks [n_tokens, top_k] as flags of blocks, or of tokens and those after the blocks."""
    n = len(numbers)
    flags = np.zeros((n, n // op.size if compressed else n), bool)
    for t, row in enumerate(numbers.astype(int)):
        blocks = row[row >= 0]
        assert (np.diff(blocks) > 0).all()
        if compressed:
            flags[t, blocks] = True
            continue
        for block in blocks:
            flags[t, block * op.size : (block + 1) * op.size] = True
        flags[t, (t + 1) // op.size * op.size : t + 1] = True
    return flags


# ---- transformers


@pytest.mark.parametrize("plan", quick_are(("mixed",), list(PLANS)))
@pytest.mark.parametrize("backend_name", BACKENDS)
def test_logits_equal_transformers(
    gguf: GGUFFile, expected: list[Expected], backend_name: str, plan: str
) -> None:
    assert indexers(gguf)
    with closing(open_backend(backend_name, gguf)) as backend:
        found = run(backend, [each.text for each in expected], PLANS[plan])
    for ours, theirs in zip(found, expected, strict=True):
        assert relative_error(ours, theirs.logits) < TOLERANCE


@pytest.mark.parametrize("backend_name", BACKENDS)
def test_chosen_keys_equal_transformers(
    name: str, gguf: GGUFFile, expected: list[Expected], backend_name: str
) -> None:
    ops, (one, *_) = indexers(gguf), expected
    step = batch([(one.text, 0, [2, 0, 1])], tuple(op.out.name for op in ops)).with_states_of_rows(0)
    with closing(open_backend(backend_name, gguf)) as backend:
        taps = backend.step(step).taps
    assert len(ops) == len(one.chosen)
    for op, theirs in zip(ops, one.chosen, strict=True):
        ours = seen_tokens(op, taps[op.out.name], compressed="deepseek4" in name)
        np.testing.assert_array_equal(ours, theirs)
        assert ours.sum(axis=1).max() < len(one.text) / 3  # it leaves out most keys


def test_training_equals_transformers(gguf: GGUFFile, expected: list[Expected]) -> None:
    graph = describe(config_from_gguf(gguf).for_context(N_CTX), gguf.tensors)
    n = 80
    ids = np.stack([each.text[:n] for each in expected[:2]])
    ours = TorchGraph(gguf, graph).logits(torch.tensor(ids)).detach().numpy()
    assert relative_error(ours, np.concatenate([each.logits[:n] for each in expected[:2]])) < TOLERANCE


# ---- the operation


@pytest.mark.parametrize("isa", _core.available_isas())
@pytest.mark.parametrize("kv_type", ["f32", "f16", "q8_0", "q4_0"])
@pytest.mark.parametrize(("size", "top_k"), [(1, 7), (1, 300), (4, 5), (6, 3), (70, 2)])
def test_ties_are_broken_as_in_the_reference(kv_type: str, isa: str, size: int, top_k: int) -> None:
    """Choose among scores that are small whole numbers, of which many are equal and some are not numbers."""
    n, n_head, dim, n_blocks = 450, 3, 32, 8
    rng = np.random.default_rng(size)
    q, k = rng.integers(-1, 2, (n, n_head, dim)), rng.integers(-1, 2, (n, dim))
    k[:, 1:] = 0
    k[:, 0] *= 127  # a Q8_0 block stores it exactly
    if kv_type == "q4_0":  # it rounds: only products of one channel, and of equal keys, are exact
        k, q[:, :, 1:] = np.abs(k), 0
    weights = rng.integers(-1, 2, (n, n_head)).astype(np.float32)
    weights[5] = weights[401] = np.nan
    plan = _core.Plan(n, n_blocks, n_blocks, _core.Runtime(3), isa)

    def rows(values: np.ndarray) -> int:
        out = plan.buffer(values.reshape(n, -1).shape[1], False)
        data = np.ascontiguousarray(values, np.float32).reshape(-1).view(np.uint8)
        plan.add("embed", weight=(0, data), of="token", first_row=0, out=out)
        return int(out)

    slots, out = index_slots(size) * n_blocks, plan.buffer(top_k, False)
    n_bytes = {"f32": 4 * dim, "f16": 2 * dim, "q8_0": dim, "q4_0": dim // 2}[kv_type]
    cache: dict[str, Any] = {"k_cache": np.zeros(slots * n_bytes, np.uint8)}
    if kv_type.startswith("q"):
        cache["k_scale"] = np.zeros(slots * 2, np.uint8)
    plan.add(
        "indexer", q=rows(q), k=rows(k), weights=rows(weights), n_head=n_head, head_dim=dim, size=size,
        out=out, kv_type=kv_type, **cache,
    )  # fmt: skip
    plan.finish()
    ids, table = np.arange(n, dtype=np.int32), np.arange(n_blocks, dtype=np.int32)[None, ::-1].copy()
    found = []
    for first, last in ((0, 400), (400, 401), (401, 403), (403, n)):
        at = ids[first:last]
        plan.run(at, at, np.zeros_like(at), table, np.arange(len(at), dtype=np.int32))
        found.append(np.array(plan.rows(out)))
    keys = k[size - 1 :: size].astype(np.float32)
    expected = np.full((n, top_k), -1)
    for t in range(n):
        dots = np.maximum(q[t] @ keys[: (t + 1) // size].T, 0)
        numbers = chosen_blocks(weights[t] @ dots, top_k)
        expected[t, : len(numbers)] = numbers
    np.testing.assert_array_equal(np.concatenate(found), expected)


def test_equal_scores_choose_the_first() -> None:
    scores = np.array([0.0, 2.0, -0.0, np.nan, 2.0, -1.0, 0.0, 2.0])
    assert chosen_blocks(scores, 2).tolist() == [1, 4]
    assert chosen_blocks(scores, 5).tolist() == [0, 1, 2, 4, 7]
    assert chosen_blocks(scores, 7).tolist() == [0, 1, 2, 4, 5, 6, 7]
    assert chosen_blocks(scores, 20).tolist() == list(range(8))


# ---- caches

WIDE = {  # heads that quantised caches can store
    "deepseek32": {"index_head_dim": 64, "qk_nope_head_dim": 32, "qk_rope_head_dim": 32, "v_head_dim": 32},
    "deepseek4": {"index_head_dim": 32},
    "qwen4exp": {"indexer_head_dim": 32, "head_dim": 32},
}
KV_TYPES = ("f16", "q8_0", "q4_0", "q8_0/q4_0", "q4_0/f16")


@pytest.mark.parametrize("kv_type", quick_are(("f16", "q8_0/q4_0"), KV_TYPES))
@pytest.mark.parametrize("of", WIDE)
def test_every_cache_holds_keys_by_position(of: str, kv_type: Any, run_folder: Path) -> None:
    """Compare each operation with the reference; chunks of any size do not change results."""
    path = tiny_models.shared_gguf(MODELS[of].recipe, run_folder, **MODELS[of].settings | WIDE[of])
    with open_gguf(path) as gguf:
        graph = describe(config_from_gguf(gguf), gguf.tensors)
        how: dict[str, Any] = {"n_blocks": 4, "n_states": 2, "max_batch": 140, "kv_type": kv_type}
        backend = cpu_backend(gguf, graph, n_threads=2, **how)
        oracle = Oracle(gguf, graph, **how)
        ids, names, rows = tokens(140), tuple(value.name for value in graph.values), []
        for i, (at, end) in enumerate(((0, 66), (66, 67), (67, 140))):
            step = batch([(ids[at:end], at, [2, 0, 3])], names).with_states_of_rows(i)
            found = backend.step(step)
            oracle.check(step, found)
            rows.append(found.logits.copy())
        whole = backend.step(batch([(ids, 0, [1, 2, 0])]).with_states_of_rows(0)).logits
        np.testing.assert_array_equal(np.concatenate(rows), whole)
        backend.close()


@pytest.mark.parametrize("kv_type", quick_are(("f16",), ["f32", "f16"]))
def test_short_contexts_have_the_same_bits_with_an_indexer(gguf: GGUFFile, kv_type: Any) -> None:
    """Check a text that is as long as an indexer leaves out nothing, and one that is longer."""
    config = config_from_gguf(gguf)
    assert config.indexing is not None
    n = config.indexing.n_ctx
    plain = config.for_context(n)
    assert plain.indexing is None
    assert config.for_context(n + 1).indexing is not None
    found = []
    for each in (plain, config):
        graph = describe(each, gguf.tensors)
        how: dict[str, Any] = {"n_blocks": 3, "n_states": 2, "max_batch": 150, "kv_type": kv_type}
        with closing(cpu_backend(gguf, graph, n_threads=2, **how)) as backend:
            for length in (n, 150):
                step = batch([(tokens(length), 0, [0, 2, 1])]).with_states_of_rows(0)
                found.append(backend.step(step).logits.copy())
    short, dense, same, longer = found
    np.testing.assert_array_equal(short, same)
    np.testing.assert_array_equal(longer[:n], short)
    assert relative_error(longer, dense) > 1e-3  # it does leave out keys


@pytest.mark.parametrize("n_threads", [1, 3])
def test_bits_depend_on_no_cut_and_no_neighbour(gguf: GGUFFile, n_threads: int) -> None:
    texts = [tokens(n, n) for n in LENGTHS]
    graph = describe(config_from_gguf(gguf), gguf.tensors)
    how: dict[str, Any] = {"n_blocks": BLOCKS_EACH * 3, "n_states": 6, "max_batch": 256, "kv_type": "f16"}
    with closing(cpu_backend(gguf, graph, n_threads=1, **how)) as alone:
        whole = [run(alone, [text], [[(0, len(text))]])[0] for text in texts]
    with closing(cpu_backend(gguf, graph, n_threads=n_threads, **how)) as backend:
        for plan in PLANS.values():
            for found, expected in zip(run(backend, texts, plan), whole, strict=True):
                np.testing.assert_array_equal(found, expected)


# ---- an engine


def engine_backend(gguf: GGUFFile, **options: Any) -> CpuBackend:
    graph = describe(config_from_gguf(gguf), gguf.tensors)
    how = {"n_blocks": 16, "n_states": 40, "max_batch": 256, "kv_type": "f16", "n_threads": 2}
    return cpu_backend(gguf, graph, **how | options)


def test_preempted_and_cancelled_sequences_keep_their_bits(gguf: GGUFFile) -> None:
    unsteady = Unsteady(engine_backend(gguf, n_blocks=4, max_batch=50), seed=3)
    engine = Engine(unsteady, ENGINE_CTX)  # type: ignore[arg-type]
    asked = [ask(engine, prompt(60, i), seed=i, max_tokens=100) for i in range(3)]
    drain(engine)
    assert engine.counters().preemptions > 0
    assert unsteady.n_cancelled > 10
    for sequence, rows in asked:
        assert_are_of_one_step(engine_backend(gguf), sequence, rows)


def test_drafted_tokens_that_turn_wrong_leave_no_trace(gguf: GGUFFile) -> None:
    engine = Engine(engine_backend(gguf), ENGINE_CTX)
    first, _ = ask(engine, prompt(100), temperature=0, max_tokens=50)
    drain(engine)
    guesser = Guesser(lambda _: first.generated, 260, 0.8)
    engine = Engine(engine_backend(gguf), ENGINE_CTX, speculator=Speculator(guesser, MOST_DRAFTED))
    sequence, rows = ask(engine, prompt(100), temperature=0, max_tokens=50)
    drain(engine)
    assert engine.counters().accepted_tokens > 0
    assert sequence.tokens == first.tokens
    assert_are_of_one_step(engine_backend(gguf), sequence, rows)


# ---- models


def long_text(n: int) -> list[int]:
    return tokens(n, 5).tolist()


def test_a_model_reuses_prefixes_and_a_cache_on_disk(gguf: GGUFFile, tmp_path: Path) -> None:
    ids, how = long_text(200), {"device": "cpu", "n_threads": 2, "n_ctx": 256}
    asked = {"max_tokens": 20, "temperature": 0, "logprobs": 3}
    with hotset.load(gguf.path, **how) as model:
        first, again = (model.generate(ids, **asked) for _ in range(2))
    assert first.timings.reused_tokens == 0
    assert again.timings.reused_tokens == 192
    assert (first.tokens, first.logprobs) == (again.tokens, again.logprobs)
    for n_reused in (0, 192):  # the second load finds the blocks of the first
        with hotset.load(gguf.path, cache_dir=tmp_path, cache_disk=0.1, **how) as model:
            found = model.generate(ids, **asked)
            assert found.timings.reused_tokens == n_reused
            assert (found.tokens, found.logprobs) == (first.tokens, first.logprobs)


def test_a_memory_budget_changes_no_bit(gguf: GGUFFile, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ram, "own_memory", lambda: 0)
    monkeypatch.setattr(ram, "PROGRAM", 0)
    ids, settings = long_text(150), {"n_ctx": 256, "device": "cpu", "n_threads": 2}
    with hotset.load(gguf.path, **settings) as mapped:
        expected = mapped.logits(ids)
    budget = fuzz_reads.least_budget(gguf.path, **settings)
    with hotset.load(gguf.path, **settings, ram_budget=budget) as under:
        np.testing.assert_array_equal(under.logits(ids), expected)


def test_contexts_decide_whether_there_is_an_indexer(name: str, gguf: GGUFFile) -> None:
    indexing = config_from_gguf(gguf).indexing
    assert indexing is not None
    costs = []
    for n_ctx in (indexing.n_ctx, indexing.n_ctx + 1, None):
        with hotset.load(gguf.path, device="cpu", n_threads=1, n_ctx=n_ctx) as model:
            assert any(isinstance(op, Indexer) for op in model.graph.ops) == (n_ctx != indexing.n_ctx)
            costs.append(model.cost.kv_bytes_per_token("f16"))
    n_own = len(set(indexing.owners) - {None})
    assert (
        costs[1]
        == costs[2]
        == costs[0] + n_own * -(-2 * indexing.head_dim * index_slots(indexing.size) // 64)
    )
    assert name != "glm-dsa-shared" or n_own == 2


def test_costs_stop_growing_at_the_top_k(gguf: GGUFFile) -> None:
    graph = describe(config_from_gguf(gguf), gguf.tensors)
    (op, *_) = (op for op in graph.ops if isinstance(op, Attention) and op.chosen is not None)
    (index, *_) = (op for op in graph.ops if isinstance(op, Indexer))
    assert op.n_visible(3 * index.n_ctx) <= index.n_ctx + op.window
    cost = Cost(graph, gguf.tensors)
    reads = [cost.kv_bytes_read(depth, "f16") for depth in (index.n_ctx, 1000, 2000)]
    assert reads[0] < reads[1] < reads[2]
    assert cost.flops_per_token(2000) > cost.flops_per_token(1000)


def changed(gguf: GGUFFile, out: Path, **keys: Any) -> GGUFFile:
    named = {key.replace("__", "."): value for key, value in keys.items()}
    return with_other_keys(gguf.path, out, named, ValueType.UINT32)


def test_a_file_without_indexers_has_short_contexts(gguf: GGUFFile) -> None:
    config = config_from_gguf(gguf)
    assert config.indexing is not None
    assert config.n_ctx_max is None
    stripped = replace_tensors(gguf, lambda name: "indexer" not in name)
    short = config_from_gguf(stripped)
    assert (short.n_ctx_max, short.indexing) == (config.indexing.n_ctx, None)
    describe(short, stripped.tensors)


def replace_tensors(gguf: GGUFFile, keeps: Any) -> Any:
    from types import SimpleNamespace

    tensors = {name: info for name, info in gguf.tensors.items() if keeps(name)}
    return SimpleNamespace(metadata=gguf.metadata, tensors=tensors, dialect="gguf", data=gguf.data)


@pytest.mark.parametrize(
    ("keys", "error", "message"),
    [
        ({"attention__indexer__top_k": 0}, FormatError, "top_k is 0, outside 1"),
        ({"attention__indexer__top_k": (1 << 32) - 1}, FormatError, "top_k is 4294967295, outside 1"),
        ({"attention__indexer__top_k": None}, FormatError, "top_k is missing"),
        ({"attention__indexer__key_length": 4}, UnsupportedModelError, "fewer than the|has the shape"),
        ({"attention__indexer__head_count": 7}, UnsupportedModelError, "has the shape"),
    ],
)
def test_keys_that_are_refused(
    gguf: GGUFFile, tmp_path: Path, keys: dict[str, Any], error: type[Exception], message: str
) -> None:
    with changed(gguf, tmp_path / "m.gguf", **keys) as file, pytest.raises(error, match=message):
        describe(config_from_gguf(file), file.tensors)


@pytest.mark.parametrize("name", ["deepseek32", "glm-dsa-shared", "qwen4exp"])
def test_windows_are_refused_where_tokens_are_chosen(gguf: GGUFFile, tmp_path: Path) -> None:
    with (
        changed(gguf, tmp_path / "m.gguf", attention__sliding_window=8) as file,
        pytest.raises(UnsupportedModelError, match="sliding_window is 8: windows of this architecture"),
    ):
        config_from_gguf(file)


def test_layers_share_the_choice_of_an_earlier_one(run_folder: Path) -> None:
    with open_gguf(file_of("glm-dsa-shared", run_folder)) as gguf:
        graph = describe(config_from_gguf(gguf), gguf.tensors)
        assert [op.layer for op in graph.ops if isinstance(op, Indexer)] == [0, 2]
        chosen = [op.chosen for op in graph.ops if isinstance(op, Attention)]
        assert chosen[0] == chosen[1] != chosen[2] == chosen[3]
        assert not graph.is_layered
        metadata = dict(gguf.metadata)
        metadata["glm-dsa.attention.indexer.types"] = [False, True, True, True]
        broken = replace_tensors(gguf, lambda _: True)
        broken.metadata = metadata
        with pytest.raises(FormatError, match="must be true for the first layer"):
            config_from_gguf(broken)
        del metadata["glm-dsa.attention.indexer.types"]
        metadata["glm-dsa.context_length"] = 1 << 20  # as GLM 5.2
        owners = config_from_gguf(broken).indexing
        assert owners is None  # layers 1 and 2 would have their own, and this file has none in layer 1


def test_entries_of_config_json_say_which_layers_have_an_indexer() -> None:
    entries: dict[str, Any] = {
        "architectures": ["GlmMoeDsaForCausalLM"], "num_hidden_layers": 5, "hidden_size": 64,
        "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 99,
        "kv_lora_rank": 16, "q_lora_rank": 24, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8,
        "v_head_dim": 16, "n_routed_experts": 8, "index_n_heads": 4, "index_head_dim": 16, "index_topk": 8,
    }  # fmt: skip

    def types(**more: Any) -> Any:
        return HFConfig(entries | more).keys("glm-dsa", 1 << 20).get("glm-dsa.attention.indexer.types")

    assert types() is None
    assert types(indexer_types=["full", "full", "shared", "shared", "full"]) == [
        True,
        True,
        False,
        False,
        True,
    ]
    assert types(index_topk_pattern="FSFSSF") == [True, False, True, False, False]
    assert types(index_topk_freq=3) == [True, True, False, False, True]
    for wrong in (["full"] * 4, ["full"] * 4 + ["none"], "FFFFX", [["full"]] * 5, 7):
        with pytest.raises(FormatError, match=r"indexer_types in config\.json must hold"):
            types(indexer_types=wrong)


REFUSALS = [
    *(
        pytest.param(name, "simulated", what, marks=pytest.mark.backend("triton"))
        for name, what in (
            ("deepseek32", "latent attention is computed only on the CPU"),
            ("deepseek4", "models with recurrent layers are computed only on the CPU"),
            ("qwen4exp", "models with recurrent layers are computed only on the CPU"),
        )
    ),
    *(
        pytest.param(name, "vulkan", f"no Vulkan kernel computes {what}", marks=pytest.mark.backend("vulkan"))
        for name, what in (
            ("deepseek32", "Indexer"),
            ("deepseek4", "HyperConnection"),
            ("qwen4exp", "PoolBlocks"),
        )
    ),
]


@pytest.mark.parametrize(("of", "device", "message"), REFUSALS)
def test_devices_refuse_by_name(of: str, device: Any, message: str, run_folder: Path) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        hotset.load(file_of(of, run_folder), device=device, n_ctx=128)


@pytest.mark.backend("vulkan")
def test_a_vulkan_device_names_every_missing_kernel(run_folder: Path) -> None:
    from hotset.backends.vulkan.program import missing_kernel

    with open_gguf(file_of("deepseek32", run_folder)) as gguf:
        graph = describe(config_from_gguf(gguf), gguf.tensors)
        missing = {missing_kernel(op) for op in graph.primitives} - {None}
    assert missing == {"Indexer", "attention to the keys that an indexer chose"}


@pytest.mark.backend("vulkan")
@pytest.mark.parametrize("of", ["deepseek32", "qwen4exp"])
def test_a_vulkan_device_runs_contexts_without_a_choice(of: str, run_folder: Path) -> None:
    """Compare with the CPU: at 16 tokens an indexer leaves out nothing, so no kernel is missing."""
    found = []
    for device in ("cpu", "vulkan"):
        with hotset.load(file_of(of, run_folder), device=device, n_ctx=16) as model:
            answer = model.generate(long_text(8), max_tokens=6, temperature=0, logprobs=0)
            found.append((answer.tokens, [each.logprob for each in answer.logprobs]))
    (tokens_of_cpu, cpu), (tokens_of_vulkan, vulkan) = found
    assert tokens_of_vulkan == tokens_of_cpu
    assert vulkan == pytest.approx(cpu, abs=0.01)


def test_longer_contexts_than_a_stripped_file_allows_are_refused(run_folder: Path, tmp_path: Path) -> None:
    path = file_of("deepseek32", run_folder)
    with_other_keys(path, tmp_path / "m.gguf", {}, without="indexer.").close()
    with pytest.raises(ContextLengthError, match="longer than the 18 positions"):
        hotset.load(tmp_path / "m.gguf", device="cpu", n_ctx=19)
