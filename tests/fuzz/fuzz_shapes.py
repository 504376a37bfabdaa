"""Fuzzes whole small models of random shapes: the native plan against the NumPy reference and against itself.

usage: python tests/fuzz/fuzz_shapes.py [--seconds 60] [--seed 0] [--case N] [--verbose]

Shapes are random: architecture, heads, KV heads, head sizes, widths, layers, neurons, experts, tensor types.
So are the cache's type, the mode, the predictor, thresholds, threads, blocks, sequences and the division into
steps. If transformers is installed, tests/support/tiny_models.py adds models with recurrent layers, latent
vectors for keys and other peculiarities of architectures. Each case compares every operation of some steps
with the reference (derived_bounds.Oracle). It also compares the logits bitwise with a second run that has
another number of threads, instruction set and division, a random RAM budget or a bundled file. A seed and a
number identify a case: failures are printed with both, and `--seed S --case N` runs one again. The exit
status is 1 if a case fails.
"""

import argparse
import importlib.util
import itertools
import math
import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

if __name__ == "__main__":  # as pytest does for the tests
    sys.path[:0] = [str(Path(__file__).resolve().parents[1] / folder) for folder in ("support", "")]

from backend_runs import cpu_backend
from derived_bounds import Oracle
from tiny_gguf import write_llama, write_relu

from hotset import _core
from hotset.backends.base import BLOCK_SIZE, Batch
from hotset.convert.hf import convert_hf
from hotset.convert.reorder import reorder
from hotset.errors import InvalidRequestError
from hotset.formats.gguf import GGUFFile, open_gguf
from hotset.formats.overlay import Overlay
from hotset.formats.quants import DECODABLE, ENCODABLE, TYPES, GGMLType
from hotset.model.config import config_from_gguf
from hotset.model.decoder import describe
from hotset.model.graph import Graph
from hotset.model.thresholds import THRESHOLD_NAMES, LayerThresholds, ThresholdName
from hotset.offload.weight_store import StoredWeights, Use, sizes_of
from hotset.sparsity.modes import choose
from hotset.sparsity.preparing import prepare
from hotset.sparsity.thresholds import Calibrated, Thresholds

ENCODED = sorted(t for t in ENCODABLE if not t.name.startswith("IQ"))
ORACLE_ROWS = 3_000  # tokens times heads times layers that the oracle, which is slow, checks
MOST_HEADS = 96
MOST_WIDTH = 1024  # of all heads together


RECIPES = [  # of tiny_models: recurrent layers, latent vectors and other parts that no writer here draws
    *(
        "lfm2",
        "lfm2-untied",
        "lfm2moe",
        "lfm2moe-plain",
        "qwen3next",
        "qwen3next-own-values",
        "qwen35",
        "kimi-linear",
    ),
    *("qwen35moe", "deepseek2-lite", "deepseek2-groups", "deepseek2-v3", "deepseek2-kimi", "gpt-oss"),
    *(
        "smallthinker",
        "smallthinker-windows",
        "turbosparse-mixtral",
        "glm4moe-groups",
        "gemma3-relu",
        "granitemoe",
    ),
]


@dataclass
class Case:
    """A random case: a file, how to run it, and the tokens."""

    path: Path
    mode: str
    predictor: str | None
    kv_type: Any
    sequences: list[np.ndarray]  # the tokens of each sequence
    max_batch: int
    facts: str  # for a person
    layer_thresholds: LayerThresholds | None = None
    thresholded: list[np.ndarray] | None = None  # of each sequence: the tokens that thresholds apply to


def one_of(rng: np.random.Generator, *items: Any) -> Any:
    return items[rng.integers(len(items))]


def random_types(rng: np.random.Generator, columns: dict[str, int], default: int, types: Any) -> Any:
    """Return a type_of for a writer: from one to six types, whose blocks fit the columns of each matrix."""
    some = [types[i] for i in rng.permutation(len(types))[: rng.integers(1, 6)]] + [GGMLType.F32]
    chosen: dict[str, GGMLType] = {}

    def type_of(name: str) -> GGMLType:
        if name not in chosen:
            width = columns.get(name.rpartition(".")[2], default)
            fitting = [t for t in some if width % TYPES[t].block_size == 0]
            chosen[name] = fitting[0] if rng.random() < 0.5 else one_of(rng, *fitting)
        return chosen[name]

    return type_of


@dataclass
class Drawn:
    """A random model file with the modes and predictors that it allows.

    head_step: a divisor of the head sizes. facts: a description for people.
    """

    path: Path
    modes: list[str]
    predictors: list[str | None]
    head_step: int
    facts: str
    n_vocab: int
    threshold_sites: Collection[ThresholdName] = ()


def draw_llama(rng: np.random.Generator, path: Path, with_experts: bool) -> Drawn:
    """Draw a model of llama's family, dense or MoE."""
    unit = int(one_of(rng, 2, 16, 32, 32, 32, 256, 256))
    head_dim = int(one_of(rng, 2, 6, 8, 16, 24, 32, 32, 64, 64, 96, 128, 256))
    n_vocab, n_layer = int(rng.integers(2, 200)), int(rng.integers(1, 4))
    n_ff = unit * int(rng.integers(1, 1 + max(1, (800 if rng.random() < 0.3 else 96) // unit)))
    architecture, keys = "llama" if with_experts else str(one_of(rng, "llama", "qwen2", "qwen3")), {}
    n_embd, most = unit * int(rng.integers(1, 1 + max(1, 256 // unit))), max(1, MOST_WIDTH // head_dim)
    group = int(rng.integers(1, 1 + min(most, one_of(rng, 1, 4, 32))))
    n_head_kv = int(rng.integers(1, 1 + max(1, min(MOST_HEADS, most) // group)))
    if rng.random() < 0.3:
        keys[f"{architecture}.attention.sliding_window"] = int(rng.integers(1, 200))
    if rng.random() < 0.3:
        keys[f"{architecture}.rope.dimension_count"] = 2 * int(rng.integers(1, head_dim // 2 + 1))
    relu = rng.random() < 0.3
    if relu:
        keys[f"{architecture}.hidden_activation"] = str(one_of(rng, "relu", "relu2"))
    elif rng.random() < 0.3 and not with_experts:
        keys[f"{architecture}.hidden_activation"] = str(one_of(rng, "gelu", "gelu_tanh"))
    more = random_experts(rng, keys, relu, unit) if with_experts else {}
    n_head, neuron_major = n_head_kv * group, more.get("down_neuron_major", False)
    columns = {"attn_output": n_head * head_dim, "ffn_down": n_ff}
    columns |= {
        "ffn_down_exps": n_embd if neuron_major else n_ff,
        "ffn_down_shexp": more.get("n_ff_shared", 0),
    }
    write_llama(
        path, architecture=architecture, n_layer=n_layer, n_embd=n_embd, n_ff=n_ff, n_head=n_head,
        n_head_kv=n_head_kv, head_dim=head_dim, n_vocab=n_vocab, n_ctx=4096, tied=bool(rng.integers(2)),
        type_of=random_types(rng, columns, n_embd, sorted(DECODABLE)), keys=keys,
        seed=int(rng.integers(1 << 30)), **more,
    )  # fmt: skip
    modes = ["dense", "exact"] if relu else ["dense"]
    facts = (
        f"{architecture}, {n_layer} layers, width {n_embd}, {n_head}/{n_head_kv} heads of {head_dim}, "
        f"{n_ff} neurons {more} {keys}"
    )
    predictors: list[str | None] = ["svd:4"]
    modes += ["predicted"] if relu and not with_experts else []
    threshold_sites: Collection[ThresholdName] = (
        ("gate", "attn_in", "attn_out") if with_experts else THRESHOLD_NAMES
    )
    return Drawn(path, modes, predictors, head_dim, facts, n_vocab, threshold_sites=threshold_sites)


def random_experts(rng: np.random.Generator, keys: dict[str, Any], relu: bool, unit: int) -> dict[str, Any]:
    """Return the arguments of write_llama for experts, and add their metadata to `keys`."""
    n_expert = int(one_of(rng, 2, 3, 5, 8, 8, 12, 40))
    used = int(rng.integers(1, min(n_expert, 9) + 1))
    more: dict[str, Any] = {"experts": (n_expert, used), "biased": bool(rng.random() < 0.3)}
    if rng.random() < 0.3:
        more["n_ff_shared"] = unit * int(rng.integers(1, 1 + max(1, 96 // unit)))
    if rng.random() < 0.2 and not more["biased"]:
        more["one_by_one"] = True
    elif relu and rng.random() < 0.4:
        more["down_neuron_major"] = True
    keys["llama.expert_gating_func"] = int(rng.integers(1, 4))
    if rng.random() < 0.3:
        keys["llama.expert_weights_scale"] = 2.5
    if keys["llama.expert_gating_func"] != 3 and rng.random() < 0.3:
        keys["llama.expert_weights_norm"] = bool(rng.integers(2))
    return more


def draw_relu(rng: np.random.Generator, path: Path) -> Drawn:
    """Draw a model of PowerInfer's architectures, with or without predictors."""
    unit = int(one_of(rng, 2, 16, 32, 32, 32, 256, 256))
    head_dim = int(one_of(rng, 2, 6, 8, 16, 24, 32, 32, 64, 64, 96, 128, 256))
    n_vocab, n_layer = int(rng.integers(2, 200)), int(rng.integers(1, 4))
    n_ff = unit * int(rng.integers(1, 1 + max(1, (800 if rng.random() < 0.3 else 96) // unit)))
    threshold = float(one_of(rng, -1e30, 0.0, 0.1, 0.3, 1e30))
    dialect = str(one_of(rng, "powerinfer", "gguf"))
    architecture = str(one_of(rng, "llama", "bamboo", "falcon", "opt"))
    n_head = int(one_of(rng, 1, 2, 4, 6, 8, 12, 16, 40, 56, 72))
    head_dim = min(head_dim, max(2, MOST_WIDTH // n_head // 2 * 2))
    step = np.lcm(unit, n_head * 2)
    if step > MOST_WIDTH:  # no type with blocks fits
        step = n_head * 2
    n_embd = int(step * max(1, round(n_head * head_dim / step)))
    head_dim = n_embd // n_head
    divisors = [d for d in range(1, n_head + 1) if n_head % d == 0]
    n_head_kv = n_head if architecture == "opt" else int(one_of(rng, *divisors))
    ranks = tuple(int(x) for x in rng.integers(1, 96, n_layer) * (1 if rng.random() < 0.3 else 32))
    # fc2's columns are the rank of its layer, so blocks may not fit
    columns = {"ffn_down": n_ff, "fc2": 32 if all(rank % 32 == 0 for rank in ranks) else 1}
    write_relu(
        path, architecture, dialect=dialect, two_norms=bool(rng.integers(2)), ranks=ranks,
        threshold=threshold, n_embd=n_embd, n_ff=n_ff, n_head=n_head, n_head_kv=n_head_kv,
        n_vocab=n_vocab, n_ctx=4096, type_of=random_types(rng, columns, n_embd, ENCODED),
        seed=int(rng.integers(1 << 30)),
    )  # fmt: skip
    predictors: list[str | None] = ["svd:4"]
    if dialect == "powerinfer":
        predictors += [None, None]
    facts = (
        f"{architecture} {dialect}, {n_layer} layers, width {n_embd}, {n_head}/{n_head_kv} heads of "
        f"{head_dim}, {n_ff} neurons"
    )
    modes = ["dense", "exact", "predicted"]
    threshold_sites = THRESHOLD_NAMES if dialect == "gguf" else ()
    return Drawn(path, modes, predictors, head_dim, facts, n_vocab, threshold_sites=threshold_sites)


def draw_recipe(rng: np.random.Generator, folder: Path) -> Drawn:
    """Draw a checkpoint of transformers and convert it: recurrent layers, latent vectors, random sizes."""
    import tiny_models

    name = str(one_of(rng, *RECIPES))
    recipe = (tiny_models.RECIPES | tiny_models.EXPERTS)[name]
    settings: dict[str, Any] = {}
    if name.startswith("lfm2"):
        settings = {"conv_L_cache": int(rng.integers(2, 7))}
    elif name.startswith("qwen3"):
        heads = int(rng.integers(1, 5))
        settings = {
            "linear_num_key_heads": heads, "linear_num_value_heads": heads * int(rng.integers(1, 4)),
            "linear_key_head_dim": int(one_of(rng, 8, 16, 24, 32, 64)),
            "linear_value_head_dim": int(one_of(rng, 8, 16, 24, 40, 64)),
            "linear_conv_kernel_dim": int(rng.integers(2, 6)),
        }  # fmt: skip
    elif name.startswith("deepseek2"):
        settings = {
            "qk_nope_head_dim": int(one_of(rng, 8, 16, 24, 32, 64)),
            "qk_rope_head_dim": int(one_of(rng, 2, 8, 16, 32)),
            "v_head_dim": int(one_of(rng, 8, 12, 32, 48)), "kv_lora_rank": int(one_of(rng, 8, 32, 40, 96)),
        }  # fmt: skip
    model = tiny_models.build(recipe, seed=int(rng.integers(1 << 30)), **settings)
    checkpoint, path = folder / "checkpoint", folder / "model.gguf"
    shutil.rmtree(checkpoint, ignore_errors=True)
    tiny_models.save(recipe, model, checkpoint)
    type_ = str(one_of(rng, "f32", "f16", "q8_0", "q4_0", "q5_1"))
    convert_hf(checkpoint, path, type_)
    with open_gguf(path) as gguf:
        config = config_from_gguf(gguf)
    modes = ["dense", "exact"] if config.has_zeros and not config.masked else ["dense"]
    facts = f"{name} {type_} {settings}"
    of_heads = math.gcd(config.head_dim, config.head_dim_v)
    return Drawn(path, modes, [None], of_heads, facts, config.n_vocab)


def random_thresholds(rng: np.random.Generator, names: Collection[ThresholdName]) -> LayerThresholds:
    """Draw thresholds, low or high, for some of the sites."""
    some = {name: float(one_of(rng, 0.0, 0.05, 0.3, 1.0)) for name in names}
    return LayerThresholds(**some)  # type: ignore[arg-type]


def draw(rng: np.random.Generator, folder: Path) -> Case:
    """Draw a random case, and write its file to `folder`."""
    path = folder / "model.gguf"
    kinds = ["llama", "llama", "relu", "relu", "relu", "experts", "experts"]
    kind = one_of(rng, *kinds, *["recipe"] * (importlib.util.find_spec("transformers") is not None))
    match kind:
        case "relu":
            drawn = draw_relu(rng, path)
        case "recipe":
            drawn = draw_recipe(rng, folder)
        case _:
            drawn = draw_llama(rng, path, with_experts=kind == "experts")
    modes = drawn.modes
    mode = str(one_of(rng, *modes))
    predictor = one_of(rng, *drawn.predictors) if mode == "predicted" else None
    kv_types = ["f32", "f16", "q8_0", "q4_0", "q8_0/q4_0"] if drawn.head_step % 32 == 0 else ["f32", "f16"]
    kv_type = str(one_of(rng, *kv_types))
    lengths = one_of(
        rng, [int(rng.integers(1, 30))], [int(rng.integers(30, 700))],
        rng.integers(1, 40, rng.integers(1, 24)).tolist(),
        [*rng.integers(1, 4, rng.integers(1, 200)).tolist(), int(rng.integers(1, 200))],
        [int(rng.integers(520, 1400)), *rng.integers(1, 20, 3).tolist()],
    )  # fmt: skip
    sequences = [rng.integers(0, drawn.n_vocab, n).astype(np.int32) for n in lengths]
    max_batch = max(1, int(one_of(rng, 1, 9, 64, 512, sum(lengths), sum(lengths))))
    if max_batch < 9:  # `patience` limits the number of steps
        sequences = [s[:12] for s in sequences[:3]]
    elif max_batch < 64:
        sequences = [s[:60] for s in sequences[:6]]
    lengths = [len(s) for s in sequences]
    layer_thresholds = (
        random_thresholds(rng, drawn.threshold_sites)
        if drawn.threshold_sites and rng.random() < 0.3
        else None
    )
    thresholded = None if layer_thresholds is None else [rng.random(n) < 0.6 for n in lengths]
    facts = (
        f"{mode} {predictor or ''} kv {kv_type}, {len(lengths)} sequences of {sum(lengths)} tokens, "
        f"batch {max_batch} {layer_thresholds or ''}: {drawn.facts}"
    )
    return Case(
        drawn.path, mode, predictor, kv_type, sequences, max_batch, facts, layer_thresholds, thresholded
    )


def steps(rng: np.random.Generator, case: Case, blocks: list[Any], max_batch: int, patience: int) -> Any:
    """Yield random batches of the case's tokens, each with the (sequence, position) of each logits row."""
    done, n_steps = [0] * len(case.sequences), np.zeros(len(case.sequences), int)
    width = max(len(p) for p in blocks)
    for _ in range(100_000):
        waiting = [i for i in rng.permutation(len(done)).tolist() if done[i] < len(case.sequences[i])]
        if not waiting:
            return
        room, parts = max_batch, []
        for i in waiting:
            left = len(case.sequences[i]) - done[i]
            n = min(left, room, int(one_of(rng, 1, max(1, left // patience), left, left)))
            if n == 0 or (parts and rng.random() < 0.1):
                break
            parts.append((i, done[i], n))
            done[i] += n
            room -= n
        table = np.full((len(parts), width), -1, np.int32)
        for row, (i, _, _) in enumerate(parts):
            table[row, : len(blocks[i])] = blocks[i]
        tokens = np.concatenate([case.sequences[i][at : at + n] for i, at, n in parts])
        owners = np.concatenate([np.full(n, row, np.int32) for row, (_, _, n) in enumerate(parts)])
        where = [(i, position) for i, at, n in parts for position in range(at, at + n)]
        wanted = np.flatnonzero(rng.random(len(tokens)) < one_of(rng, 0.0, 0.3, 1.0, 1.0)).astype(np.int32)
        positions = np.array([position for _, position in where], np.int32)
        thresholded = (
            None
            if case.thresholded is None
            else np.array([case.thresholded[i][position] for i, position in where])
        )
        rows = np.array([i for i, _, _ in parts])
        batch = Batch(tokens, positions, owners, table, wanted, thresholded=thresholded)
        slots = np.stack([2 * rows, 2 * rows + 1], axis=1).astype(np.int32)
        yield batch.with_states_of_rows(n_steps[rows], slots), [where[t] for t in wanted]
        n_steps[rows] += 1
    raise AssertionError("the case does not end")


def prepared(gguf: GGUFFile, case: Case) -> tuple[Overlay, Graph]:
    """Return the weights and the graph with which a backend runs a case."""
    config = config_from_gguf(gguf)
    choice = choose(config, gguf.tensors, case.mode, case.predictor)
    if case.layer_thresholds is not None:
        layers = (case.layer_thresholds,) * config.n_layer
        mode: Any = choice.mode
        thresholds = Thresholds(Calibrated.of(gguf), layers, mode=mode)
        choice = choose(config, gguf.tensors, None, case.predictor, thresholds)
    ready = prepare(gguf, config, choice)
    return ready.weights, describe(config, ready.weights.tensors, ready.predictor, choice.layer_thresholds)


def stored(
    rng: np.random.Generator, weights: Overlay, graph: Graph, sparse: bool, step: int
) -> StoredWeights:
    """Return the weights under a random budget: the necessary rows and a share of the useful ones."""

    def within(n_bytes: int) -> StoredWeights:
        ring = bool(rng.integers(2)) and _core.ring_allowed()
        reader = _core.Reader(ring, int(rng.integers(1, 9)))
        gap = int(one_of(rng, 0, 4096, 65536))
        return StoredWeights(weights, graph, n_bytes, Use(sparse=sparse, step=step), reader=reader, gap=gap)

    sizes = sizes_of(graph, weights.tensors, Use(sparse=sparse, step=step))
    share = float(one_of(rng, 0.0, 0.1, 0.5, 1.0))
    most = sizes.all
    return within(sizes.least_of_all + int(share * max(most - sizes.least_of_all, 0)))


def run_case(seed: int, number: int, folder: Path, say: Any = lambda facts: None) -> None:
    """Run a case. Raise AssertionError, or the error of the code, if it fails."""
    rng = np.random.default_rng([seed, number])
    case = draw(rng, folder)
    say(case.facts)
    with open_gguf(case.path) as gguf:
        weights, graph = prepared(gguf, case)
        config = config_from_gguf(gguf)
        every = tuple(value.name for value in graph.values)
        most_tapped = max(1, ORACLE_ROWS // (config.n_head * config.n_layer))
        n_blocks = sum(-(-len(s) // BLOCK_SIZE) for s in case.sequences)
        common: dict[str, Any] = {
            "n_blocks": n_blocks, "kv_type": case.kv_type, "n_states": 2 * len(case.sequences),
        }  # fmt: skip
        common |= {"max_batch": case.max_batch}

        def run(source: Any, graph: Graph, tapped: bool, **options: Any) -> dict[tuple[int, int], np.ndarray]:
            """Return the logits by sequence and position."""
            free = iter(rng.permutation(n_blocks).tolist())
            blocks = [list(itertools.islice(free, -(-len(s) // BLOCK_SIZE))) for s in case.sequences]
            rates = dict.fromkeys(source.tensors, float(one_of(rng, 0.5, 100.0)))
            given = {**common, "channel_rates": rates, **options}
            backend = cpu_backend(source, graph, **given)
            oracle = Oracle(weights, graph, **common)
            room, rows = most_tapped, {}
            try:
                for batch, where in steps(rng, case, blocks, given["max_batch"], 10):
                    if tapped and room > 0:
                        room -= len(batch.tokens)
                        batch = replace(batch, taps=every)
                    found = backend.step(batch)
                    if batch.taps:
                        oracle.check(batch, found)
                    assert found.logits.shape == (len(where), config.n_vocab)
                    rows.update(zip(where, found.logits.copy(), strict=True))
            finally:
                backend.close()
            return rows

        def isa() -> str:
            return str(one_of(rng, *_core.available_isas(), None) or _core.isa())

        sparse = case.mode != "dense" or case.layer_thresholds is not None
        small = min(case.max_batch, most_tapped)
        first = run(
            weights, graph, True, n_threads=int(rng.integers(1, 5)), isa=isa(), sparse=sparse, max_batch=small
        )

        def compare(what: str, source: Any, graph: Graph, **options: Any) -> None:
            second = run(source, graph, False, n_threads=int(rng.integers(1, 5)), isa=isa(), **options)
            for at in first.keys() & second.keys():
                assert np.isfinite(first[at]).all(), at
                np.testing.assert_array_equal(
                    second[at], first[at], err_msg=f"{what}: sequence and position {at}"
                )

        def bundled() -> None:
            try:
                reorder(gguf.path, folder / "bundled.gguf", None, bundle=True)
            except InvalidRequestError as error:
                if "nothing to bundle" not in str(error):
                    raise
                return
            with open_gguf(folder / "bundled.gguf") as file:
                own, its_graph = prepared(file, case)
                source = stored(rng, own, its_graph, sparse, case.max_batch) if rng.integers(2) else own
                compare("bundled", source, its_graph, sparse=sparse)

        n_tokens = sum(map(len, case.sequences))
        others = [
            lambda: compare("all at once", weights, graph, sparse=sparse, max_batch=n_tokens),
            lambda: compare("read whole", weights, graph, sparse=not sparse),  # it changes nothing
            lambda: compare(
                "budget", stored(rng, weights, graph, sparse, case.max_batch), graph, sparse=sparse
            ),
        ]
        if (
            case.predictor is None and case.layer_thresholds is None
        ):  # a predictor or thresholds belong to the original file, not to the bundle
            others.append(bundled)
        for at in rng.permutation(len(others))[:2]:
            others[at]()


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--case", type=int, help="only this one")
    parser.add_argument("--verbose", action="store_true", help="say each case before it runs")
    args = parser.parse_args()
    failed, end = 0, time.monotonic() + args.seconds
    numbers = itertools.count() if args.case is None else [args.case]
    count = 0
    with tempfile.TemporaryDirectory() as scratch:
        for number in numbers:
            if args.case is None and time.monotonic() > end:
                break
            facts: list[str] = []

            def say(text: str, number: int = number, facts: list[str] = facts) -> None:
                facts.append(text)
                if args.verbose or args.case is not None:
                    print(f"{number}: {text}", flush=True)

            try:
                run_case(args.seed, number, Path(scratch), say)
            except Exception:
                failed += 1
                print(f"--seed {args.seed} --case {number} {facts}", file=sys.stderr)
                traceback.print_exc()
            count += 1
    print(f"{count} models, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
