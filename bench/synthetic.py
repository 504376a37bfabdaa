"""Writes synthetic models of any size and type with random weights, dense and sparse ones.

usage: python bench/synthetic.py OUT.gguf --shape 7b --type q4_0 [--vocab FILE.gguf | --n-vocab 32000]
       python bench/synthetic.py OUT.powerinfer.gguf --kind bamboo --shape bamboo7 [--plain OUT.gguf]
       python bench/synthetic.py OUT.gguf --shape smallthinker-4b --idle 0.6
       python bench/synthetic.py OUT.gguf --shape gemma3n-e2b

With --kind, neurons fire with given probabilities, hot and cold ones by a power law, and the PowerInfer file
has predictors that know them (planted.py). The plain file has bitwise the same weights, and keys with its
activation; engines that ignore those keys run it at the same speed. With --idle, a shape with experts is
written as a plain file of SmallThinker's architecture, in which this share of the experts' neurons does not
fire.

Speed depends on shapes, types and bytes, not on trained values. The quantised values are random bytes; scales
are drawn so that weights have the magnitude of trained ones, 1/sqrt(inputs), and activations stay finite at
any depth. The random generator limits the speed: a 7B file in Q4_0 takes seconds.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import math
import os
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist
from typing import Literal, get_args

import numpy as np
import planted
from planted import CONSTANT, Moments, PlantedFFN, Skew, encode

from hotset.formats.gguf import GGUFWriter, ValueType, open_gguf
from hotset.formats.quants import TYPES, GGMLType, dequantize, row_bytes

EPSILON = 1e-5
E8M0_ONE = 128  # the exponent of 1 in MXFP4, whose codes are doubled
SAMPLE_BLOCKS = 256  # blocks that determine the scale of a type
SLICE_BYTES = 16 << 20  # filled by one thread at a time, from its own stream of random numbers
FLOATS = (GGMLType.F32, GGMLType.F16, GGMLType.BF16)
LLAMA_FTYPES = {"F32": 0, "F16": 1, "Q4_0": 2, "Q4_1": 3, "Q8_0": 7, "Q5_0": 8, "Q5_1": 9, "Q2_K": 10}
LLAMA_FTYPES |= {"Q3_K": 12, "Q4_K": 15, "Q5_K": 17, "Q6_K": 18, "IQ4_NL": 25, "IQ4_XS": 30, "BF16": 32}
LLAMA_FTYPES |= {"MXFP4": 38, "TQ1_0": 36, "TQ2_0": 37, "IQ1_S": 24, "IQ1_M": 31, "IQ2_XXS": 19, "IQ2_XS": 20}
LLAMA_FTYPES |= {"IQ2_S": 28, "IQ3_XXS": 23, "IQ3_S": 26}


@dataclass(frozen=True)
class Shape:
    """The sizes of a model. d: width of the residual stream; ff: neurons per layer, or per expert.

    experts: per layer, 0: none; used: per token. head: channels per head, 0: the width over the heads.
    """

    d: int
    ff: int
    layers: int
    heads: int
    kv_heads: int
    experts: int = 0
    used: int = 0
    head: int = 0

    @property
    def head_dim(self) -> int:
        return self.head or self.d // self.heads

    def matrices(self, n_vocab: int) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Yield the name and shape (inputs, outputs, experts) of every matrix of the file."""
        d, heads, kv = self.d, self.head_dim * self.heads, self.head_dim * self.kv_heads
        yield "token_embd", (d, n_vocab)
        yield "output", (d, n_vocab)
        suffix, each = ("_exps", (self.experts,)) if self.experts else ("", ())
        for i in range(self.layers):
            for name, shape in (
                ("attn_q", (d, heads)),
                ("attn_k", (d, kv)),
                ("attn_v", (d, kv)),
                ("attn_output", (heads, d)),
                *([("ffn_gate_inp", (d, self.experts))] if self.experts else []),
                (f"ffn_gate{suffix}", (d, self.ff, *each)),
                (f"ffn_up{suffix}", (d, self.ff, *each)),
                (f"ffn_down{suffix}", (self.ff, d, *each)),
            ):
                yield f"blk.{i}.{name}", shape


SHAPES = {
    "135m": Shape(576, 1536, 30, 9, 3),  # SmolLM2; no K-quant fits its rows
    "1b": Shape(2048, 5632, 22, 32, 4),  # TinyLlama
    "7b": Shape(4096, 11008, 32, 32, 32),  # Llama 2
    "mistral": Shape(4096, 14336, 32, 32, 8),
    "13b": Shape(5120, 13824, 40, 40, 40),
    "bamboo7": Shape(4096, 14336, 32, 32, 8),  # Mistral's
    "b3": Shape(3200, 8640, 26, 32, 32),
    "demo": Shape(2048, 8192, 10, 32, 8),
    "qwen3-30b": Shape(2048, 768, 48, 32, 4, experts=128, used=8, head=128),
    "olmoe": Shape(2048, 1024, 16, 16, 16, experts=64, used=8),
    "gpt-oss-20b": Shape(2880, 2880, 24, 64, 8, experts=32, used=4, head=64),
    "smallthinker-4b": Shape(1536, 768, 32, 12, 2, experts=32, used=4),
    "gemma3n-e2b": Shape(2048, 8192, 30, 8, 2, head=256),
}
GEMMA3N = "gemma3n-e2b"
N_STREAMS, N_EMBD_LAYER, LAUREL_RANK, N_SHARED_KV, N_TOP_K = 4, 256, 64, 10, 10  # of E2B

# The additions of a sparse model's layers to each channel of the residual stream, whose variance is 1 at
# first.
FFN_VARIANCE, ATTENTION_VARIANCE = 0.4, 0.1
POSITION_SPREAD = 0.3  # standard deviation of learned positions
LOGIT_SPREAD = 4.0  # of logits: about as decided as a trained model

Kind = Literal["llama", "bamboo", "opt", "falcon", "falcon40"]


@dataclass(frozen=True)
class SparseKind:
    """The properties of a sparse architecture that matter for its file.

    plain: the architecture named in the plain file. norms: per layer. drelu: the up projection passes a ReLU.
    """

    architecture: str
    plain: str
    norms: tuple[str, ...] = ("attn_norm", "ffn_norm")
    gated: bool = True
    drelu: bool = False
    layer_norm: bool = False
    fused_qkv: bool = False
    biased: bool = False
    positions: bool = False
    tied: bool = False

    @property
    def up_moments(self) -> tuple[float, float]:
        """Return mean and mean square of the gate's factor: N(0, 1), its ReLU, or 1 without a gate."""
        if not self.gated:
            return 1.0, 1.0
        return ((2 * np.pi) ** -0.5, 0.5) if self.drelu else (0.0, 1.0)


KINDS: dict[Kind, SparseKind] = {
    "llama": SparseKind("llama", "llama"),
    "bamboo": SparseKind("bamboo", "llama", drelu=True),
    "opt": SparseKind("opt", "opt", gated=False, layer_norm=True, biased=True, positions=True, tied=True),
    "falcon": SparseKind("falcon", "falcon", ("attn_norm",), gated=False, layer_norm=True, fused_qkv=True),
    "falcon40": SparseKind(
        "falcon", "falcon", ("attn_norm", "attn_norm_2"), gated=False, layer_norm=True, fused_qkv=True
    ),
}


def _unit_scales(type: GGMLType, rng: np.random.Generator) -> np.ndarray:
    """Return blocks of random values with a root mean square of about 1: [SAMPLE_BLOCKS], structured.

    Fields d, m and dmin are factors of the rest of a block, or are added to it; _put_scale handles types that
    store such a number differently.
    """
    facts = TYPES[type]
    assert facts.block is not None
    assert facts.block.names is not None
    data = rng.integers(0, 256, SAMPLE_BLOCKS * facts.block_bytes, np.uint8)
    blocks = data.view(facts.block)
    for name in _scale_fields(facts.block):
        _put_scale(blocks, name, np.ones(SAMPLE_BLOCKS))
    if "m" in facts.block.names:  # x = d * q + m: center it
        blocks["m"] = 0
        blocks["m"] = -np.median(dequantize(data, type, (facts.block_size, SAMPLE_BLOCKS)))
    values = dequantize(data, type, (facts.block_size, SAMPLE_BLOCKS)).astype(np.float64)
    factor = rng.uniform(0.7, 1.3, SAMPLE_BLOCKS) / np.sqrt(1.03 * np.mean(values**2))
    factor *= rng.choice([-1.0, 1.0], SAMPLE_BLOCKS)  # K-quants are not centred, so half of them are negated
    unit = np.zeros(SAMPLE_BLOCKS, [(name, np.float64) for name in _scale_fields(facts.block)])
    for name in unit.dtype.names or ():
        unit[name] = blocks["m"] * factor if name == "m" else factor
    return unit


def _scale_fields(block: np.dtype) -> list[str]:
    names = block.names or ()
    return [name for name in ("d", "m", "dmin", "e") if name in names] or ["scales"]


def _put_scale(blocks: np.ndarray, name: str, scale: np.ndarray) -> None:
    if name == "e":  # MXFP4: the nearest power of two
        blocks["e"] = E8M0_ONE + np.rint(np.log2(np.abs(scale)))
    elif name == "scales":  # IQ1_M: the high bits of four words
        pieces = scale.astype(np.float16).view(np.uint16)[:, None] >> np.arange(0, 16, 4, dtype=np.uint16)
        blocks["scales"] = (blocks["scales"] & np.uint16(0x0FFF)) | pieces << np.uint16(12)
    else:
        blocks[name] = scale.astype(np.float16)


def _filler(
    type: GGMLType, magnitude: float, rng: np.random.Generator
) -> Callable[[np.ndarray, np.random.Generator], None]:
    """Return a function that fills bytes (whole blocks) with weights of the given root mean square."""
    if type in FLOATS:
        pool = (rng.standard_normal(1 << 16) * magnitude).astype(np.float32)
        if type == GGMLType.BF16:
            stored = (pool.view(np.uint32) >> 16).astype(np.uint16)
        else:
            stored = pool.astype(np.float32 if type == GGMLType.F32 else np.float16)

        def fill_floats(out: np.ndarray, rng: np.random.Generator) -> None:
            values = out.view(stored.dtype)
            np.take(stored, rng.integers(0, 1 << 16, len(values), np.uint16), out=values)

        return fill_floats

    unit = _unit_scales(type, rng)
    block = TYPES[type].block
    assert block is not None

    def fill_blocks(out: np.ndarray, rng: np.random.Generator) -> None:
        out[:] = rng.integers(0, 1 << 64, -(-len(out) // 8), np.uint64).view(np.uint8)[: len(out)]
        blocks = out.view(block)
        chosen = rng.integers(0, SAMPLE_BLOCKS, len(blocks), np.uint16)
        for name in unit.dtype.names or ():
            _put_scale(blocks, name, (unit[name] * magnitude)[chosen])

    return fill_blocks


def random_matrix(
    type: GGMLType,
    n_in: int,
    n_out: int,
    seed: int | Sequence[int],
    pool: ThreadPoolExecutor,
    magnitude: float | None = None,
) -> np.ndarray:
    """Return rows of random weights, as stored: uint8 [n_out, row_bytes(type, n_in)].

    magnitude: their root mean square; 1/sqrt(n_in) by default. A seed gives the same bytes for any number of
    threads.
    """
    seeds = np.random.SeedSequence(seed)
    fill = _filler(type, magnitude or n_in**-0.5, np.random.default_rng(seeds.spawn(1)[0]))
    data = np.empty((n_out, row_bytes(type, n_in)), np.uint8)
    flat = data.reshape(-1)
    block_bytes = TYPES[type].block_bytes
    step = SLICE_BYTES // block_bytes * block_bytes
    slices = [flat[start : start + step] for start in range(0, len(flat), step)]
    rngs = [np.random.Generator(np.random.SFC64(child)) for child in seeds.spawn(len(slices))]
    list(pool.map(fill, slices, rngs))
    return data


def add_vocabulary(writer: GGUFWriter, n_vocab: int) -> None:
    """Add a SentencePiece vocabulary of n_vocab pieces: 3 control tokens, 256 bytes, and invented words."""
    words = ("\u2581" + "".join(letters) for letters in itertools.product("aeioubdgklmnprst", repeat=5))
    control, n_bytes = ["<unk>", "<s>", "</s>"], 256
    tokens = control + [f"<0x{i:02X}>" for i in range(n_bytes)]
    tokens += itertools.islice(words, n_vocab - len(tokens))
    n_words = len(tokens) - len(control) - n_bytes
    writer.add("tokenizer.ggml.model", "llama")
    writer.add("tokenizer.ggml.tokens", tokens)
    writer.add("tokenizer.ggml.scores", -np.arange(len(tokens), dtype=np.float32))
    types = [2, 3, 3] + [6] * n_bytes + [1] * n_words  # unknown, control, byte, normal
    writer.add("tokenizer.ggml.token_type", np.array(types, np.int32))
    writer.add("tokenizer.ggml.unknown_token_id", 0)
    writer.add("tokenizer.ggml.bos_token_id", 1)
    writer.add("tokenizer.ggml.eos_token_id", 2)


def copy_vocabulary(writer: GGUFWriter, path: Path) -> int:
    """Add the tokenizer of another GGUF file; return its number of tokens."""
    with open_gguf(path) as source:
        for key, value in source.metadata.items():
            if key.startswith("tokenizer."):
                writer.add(key, value, ValueType(source.metadata_types[key][-1]))
        tokens = source.metadata["tokenizer.ggml.tokens"]
    assert isinstance(tokens, list)
    return len(tokens)


def add_keys(
    writer: GGUFWriter,
    architecture: str,
    shape: Shape,
    type: GGMLType,
    n_vocab: int,
    vocabulary: Path | None,
    n_ctx: int,
    of_layers: Mapping[str, Sequence[int]] | None = None,
) -> int:
    """Add the keys of every architecture and the tokenizer; return the number of tokens.

    of_layers: keys whose values differ between layers.
    """
    writer.add("general.name", f"synthetic {writer.path.stem}")
    writer.add("general.file_type", LLAMA_FTYPES[type.name])
    writer.add("general.quantization_version", 2)
    for key, value in {
        "context_length": n_ctx,
        "embedding_length": shape.d,
        "block_count": shape.layers,
        "feed_forward_length": shape.ff,
        "rope.dimension_count": shape.head_dim,
        "attention.head_count": shape.heads,
        "attention.head_count_kv": shape.kv_heads,
        **(of_layers or {}),
    }.items():
        writer.add(f"{architecture}.{key}", value)
    if vocabulary is not None:
        return copy_vocabulary(writer, vocabulary)
    add_vocabulary(writer, n_vocab)
    return n_vocab


def add_llama(
    writer: GGUFWriter, shape: Shape, type: GGMLType, n_vocab: int, vocabulary: Path | None, n_ctx: int
) -> int:
    """Add the keys, the tokenizer and the norms of a llama or Mixtral; return the number of tokens."""
    n_vocab = add_keys(writer, "llama", shape, type, n_vocab, vocabulary, n_ctx)
    writer.add("llama.rope.freq_base", 10000.0)
    if shape.head:
        writer.add("llama.attention.key_length", shape.head)
        writer.add("llama.attention.value_length", shape.head)
    if shape.experts:
        writer.add("llama.expert_count", shape.experts)
        writer.add("llama.expert_used_count", shape.used)
    writer.add("llama.attention.layer_norm_rms_epsilon", EPSILON)
    norms = ["output_norm"]
    norms += [f"blk.{i}.{name}" for i in range(shape.layers) for name in ("attn_norm", "ffn_norm")]
    for name in norms:
        writer.add_tensor(f"{name}.weight", np.ones(shape.d, np.float32), GGMLType.F32)
    return n_vocab


def write_model(
    path: Path,
    shape: Shape,
    type: GGMLType,
    n_vocab: int = 32000,
    vocabulary: Path | None = None,
    n_ctx: int = 8192,
    seed: int = 0,
    type_of: Callable[[str], GGMLType] | None = None,
) -> None:
    """Write a dense model, or an MoE model like Mixtral; memory: one matrix at a time.

    Every matrix has the given type (norms and routers are F32). vocabulary: a GGUF file whose tokenizer is
    copied; otherwise n_vocab pieces are invented. n_ctx: the context in the file's keys, in tokens. type_of:
    the type of each matrix by its name; None: `type`.
    """
    writer = GGUFWriter(path, "llama")
    n_vocab = add_llama(writer, shape, type, n_vocab, vocabulary, n_ctx)
    of_routers = lambda name: GGMLType.F32 if name.endswith("ffn_gate_inp") else type  # noqa: E731
    _add_matrices(writer, dict(shape.matrices(n_vocab)), type_of or of_routers, seed)


def write_gemma3n(
    path: Path,
    shape: Shape,
    type: GGMLType,
    n_vocab: int = 32000,
    vocabulary: Path | None = None,
    n_ctx: int = 8192,
    seed: int = 0,
) -> None:
    """Write a model of Gemma 3n's architecture, otherwise like write_model.

    Matrices that quantisers do not quantise (streams, branches of low rank) are F16, or F32 if they are
    small. Random gates are normally distributed: 5% are above the threshold, as the architecture intends.
    """
    writer = GGUFWriter(path, "gemma3n")
    n_vocab = add_keys(writer, "gemma3n", shape, type, n_vocab, vocabulary, n_ctx)
    for key, value in {
        "rope.freq_base": 1e6,
        "attention.key_length": shape.head,
        "attention.value_length": shape.head,
        "attention.layer_norm_rms_epsilon": 1e-6,
        "attention.sliding_window": 512,
        "attention.shared_kv_layers": N_SHARED_KV,
        "altup.num_inputs": N_STREAMS,
        "embedding_length_per_layer_input": N_EMBD_LAYER,
        "final_logit_softcapping": 30.0,
        "activation_sparsity_scale": [
            NormalDist().inv_cdf(0.95) if i < N_TOP_K else -math.inf for i in range(shape.layers)
        ],
    }.items():
        writer.add(f"gemma3n.{key}", value)
    d, n, width = shape.d, N_STREAMS, N_EMBD_LAYER
    matrices = {name: of for name, of in shape.matrices(n_vocab) if name != "output"}
    matrices["per_layer_token_embd"] = width * shape.layers, n_vocab
    floats = {"altup_proj": (d, d, n - 1), "altup_unembd_proj": (d, d, n - 1)}
    floats["per_layer_model_proj"] = d, width * shape.layers
    vectors = {"output_norm": d, "per_layer_proj_norm": width}
    for blk in (f"blk.{i}." for i in range(shape.layers)):
        matrices |= {f"{blk}inp_gate": (d, width), f"{blk}proj": (width, d)}
        floats |= {f"{blk}laurel_l": (d, LAUREL_RANK), f"{blk}laurel_r": (LAUREL_RANK, d)}
        floats |= {f"{blk}altup_router": (d, n), f"{blk}altup_predict_coef": (n, n * n)}
        floats[f"{blk}altup_correct_coef"] = n, n
        vectors |= dict.fromkeys((f"{blk}attn_q_norm", f"{blk}attn_k_norm"), shape.head)
        of_width = ("attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm", "laurel_post_norm")
        of_width += ("post_norm", "altup_router_norm", "altup_correct_scale")
        vectors |= dict.fromkeys([blk + name for name in of_width], d)
    for name, size in vectors.items():
        writer.add_tensor(f"{name}.weight", np.ones(size, np.float32), GGMLType.F32)

    def type_of(name: str) -> GGMLType:
        if name not in floats:
            return type
        return GGMLType.F32 if min(floats[name][:2]) < LAUREL_RANK else GGMLType.F16

    _add_matrices(writer, matrices | floats, type_of, seed)


def _add_matrices(
    writer: GGUFWriter,
    matrices: Mapping[str, tuple[int, ...]],
    type_of: Callable[[str], GGMLType],
    seed: int,
) -> None:
    """Add random matrices, by name the inputs, outputs and number, and write the file."""
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for i, (name, of) in enumerate(matrices.items()):

            def fill(name: str = name, of: tuple[int, ...] = of, seed: int = seed + i) -> np.ndarray:
                return random_matrix(type_of(name), of[0], math.prod(of[1:]), seed, pool)

            writer.add_tensor(f"{name}.weight", fill, type_of(name), of)
        writer.write()


SMALLTHINKER = SparseKind("smallthinker", "smallthinker")


def write_idle_experts(
    path: Path,
    shape: Shape,
    type: GGMLType,
    *,
    idle: float = 0.6,
    n_vocab: int = 32000,
    vocabulary: Path | None = None,
    n_ctx: int = 8192,
    seed: int = 0,
) -> None:
    """Write an MoE model of SmallThinker's architecture with a share `idle` of idle neurons in each expert.

    All neurons fire equally often. Types: planted.TYPES_OF_PLANTED.
    """
    if type not in planted.TYPES_OF_PLANTED:
        raise ValueError(f"a sparse model cannot be {type.name}")
    name = SMALLTHINKER.architecture
    writer = GGUFWriter(path, name)
    n_vocab = add_keys(writer, name, shape, type, n_vocab, vocabulary, n_ctx)
    for key, value in {
        "expert_count": shape.experts,
        "expert_used_count": shape.used,
        "expert_feed_forward_length": shape.ff,
        "expert_gating_func": 2,  # a sigmoid
    }.items():
        writer.add(f"{name}.{key}", value)
    writer.add(f"{name}.attention.layer_norm_rms_epsilon", EPSILON)
    writer.add(f"{name}.rope.freq_base", 1.5e6)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        model = SparseModel(writer, shape, type, SMALLTHINKER, pool, seed)
        model.add_ends(n_vocab, n_ctx)
        for i in range(shape.layers):
            model.add_attention(i)
            model.add_experts(i, idle)
        writer.write()


class SparseModel:
    """A writer of a sparse model's tensors. No layer writes to the constant channels."""

    def __init__(
        self,
        writer: GGUFWriter,
        shape: Shape,
        type: GGMLType,
        facts: SparseKind,
        pool: ThreadPoolExecutor,
        seed: int,
    ) -> None:
        self.writer, self.shape, self.type, self.facts = writer, shape, type, facts
        self.pool, self.seed = pool, seed

    def stream(self, layer: int) -> Moments:
        """Return the residual stream before the FFN of a layer; attention averages to almost nothing."""
        embedded = 1 + (POSITION_SPREAD**2 if self.facts.positions else 0.0)
        grown = FFN_VARIANCE * layer / self.shape.layers
        return Moments(np.sqrt(embedded + grown).item(), self.shape.d)

    def add_ends(self, n_vocab: int, n_ctx: int) -> None:
        """Add the embeddings, and the tensors after the last layer."""
        d = self.shape.d
        self.matrix("token_embd", d, n_vocab, 1.0, first_channels=CONSTANT)
        if self.facts.positions:  # row = position + 2
            self.matrix("position_embd", d, n_ctx + 2, POSITION_SPREAD, first_channels=0 * CONSTANT)
        spread = LOGIT_SPREAD * d**-0.5
        if self.facts.tied:  # random signs; otherwise the most likely next token would be the token itself
            self.norm("output_norm", spread * self._rng("output_norm").choice([-1.0, 1.0], d))
        else:
            self.norm("output_norm", np.ones(d))
            self.matrix("output", d, n_vocab, spread)

    def add_attention(self, i: int) -> None:
        d, kv = self.shape.d, self.shape.d // self.shape.heads * self.shape.kv_heads
        for norm in self.facts.norms:
            self.norm(f"blk.{i}.{norm}", np.ones(d))
        parts = (
            {"attn_qkv": d + 2 * kv} if self.facts.fused_qkv else {"attn_q": d, "attn_k": kv, "attn_v": kv}
        )
        for name, n_out in parts.items():
            self.matrix(f"blk.{i}.{name}", d, n_out)
            if self.facts.biased:
                self._bias(f"blk.{i}.{name}", n_out, 0.1)
        spread = (ATTENTION_VARIANCE / self.shape.layers) ** 0.5
        self.matrix(f"blk.{i}.attn_output", d, d, spread * d**-0.5, silent_rows=len(CONSTANT))
        if self.facts.biased:
            self._bias(f"blk.{i}.attn_output", d, 0.1 * spread, silent=len(CONSTANT))

    def add_ffn(self, i: int, ffn: PlantedFFN, plain: bool) -> None:
        d, ff, type, pool = self.shape.d, self.shape.ff, self.type, self.pool
        blk, add = f"blk.{i}", self.writer.add_tensor
        if self.facts.gated:
            self.matrix(f"{blk}.ffn_up", d, ff, first_channels=0 * CONSTANT)
        fires = "ffn_gate" if self.facts.gated else "ffn_up"
        add(f"{blk}.{fires}.weight", lambda: ffn.gate(type, pool), type, (d, ff))
        down, down_shape = ("ffn_down", (ff, d)) if plain else ("ffn_down_t", (d, ff))
        add(f"{blk}.{down}.weight", lambda: ffn.down(type, not plain, pool), type, down_shape)
        if self.facts.biased:
            self._bias(f"{blk}.ffn_up", ff, 0.0)  # zero, because the predictor has no bias
            self._bias(
                f"{blk}.{down}", d, 0.1 * (FFN_VARIANCE / self.shape.layers) ** 0.5, silent=len(CONSTANT)
            )
        if not plain:
            add(f"{blk}.fc1.weight", lambda: ffn.fc1(type), type, (d, ffn.hidden))
            add(f"{blk}.fc2.weight", lambda: ffn.fc2(type), type, (ffn.hidden, ff))

    def add_experts(self, i: int, idle: float) -> None:
        """Add experts in which `idle` of the neurons do not fire: constant channels are their gates' bias."""
        shape, blk = self.shape, f"blk.{i}"
        d, ff, n = shape.d, shape.ff, shape.experts
        quantile = NormalDist().inv_cdf(1 - idle)
        bias = quantile * self.stream(i).sigma * math.sqrt(1 - len(CONSTANT) / d)
        square = (quantile**2 + 1) * (1 - idle) + quantile * NormalDist().pdf(quantile)  # of a ReLU's result
        spread = math.sqrt(FFN_VARIANCE / shape.layers * shape.used / (ff * square))
        router = self._rng(f"{blk}.ffn_gate_inp").standard_normal((n, d), np.float32) * d**-0.5
        self.writer.add_tensor(f"{blk}.ffn_gate_inp.weight", router, GGMLType.F32, (d, n))
        self.matrix(
            f"{blk}.ffn_gate_exps",
            d,
            ff,
            first_channels=CONSTANT,
            first_scale=bias / len(CONSTANT),
            experts=n,
        )
        self.matrix(f"{blk}.ffn_up_exps", d, ff, first_channels=0 * CONSTANT, experts=n)
        self.matrix(f"{blk}.ffn_down_exps", ff, d, spread, silent_rows=len(CONSTANT), experts=n)

    def _rng(self, name: str) -> np.random.Generator:
        return np.random.default_rng([self.seed, zlib.crc32(name.encode())])

    def matrix(
        self,
        name: str,
        n_in: int,
        n_out: int,
        magnitude: float | None = None,
        first_channels: np.ndarray | None = None,
        silent_rows: int = 0,
        first_scale: float = 1.0,
        experts: int = 0,
    ) -> None:
        """Add random weights.

        first_channels, times first_scale: the first values of each row; silent_rows: the number of zero rows,
        per expert if there are `experts`.
        """

        def fill() -> np.ndarray:
            seed = [self.seed, zlib.crc32(name.encode())]
            data = random_matrix(self.type, n_in, n_out * max(experts, 1), seed, self.pool, magnitude)
            if first_channels is not None:
                block = encode(first_channels[None], np.full((1, 1), first_scale), self.type)
                data[:, : block.shape[1]] = block
            data.reshape(-1, n_out, data.shape[1])[:, :silent_rows] = encode(
                np.zeros((1, n_in), np.int8), np.ones((1, n_in // len(CONSTANT))), self.type
            )
            return data

        shape = (n_in, n_out, experts) if experts else (n_in, n_out)
        self.writer.add_tensor(f"{name}.weight", fill, self.type, shape)

    def _bias(self, name: str, n: int, magnitude: float, silent: int = 0) -> None:
        # The transposed matrix has the same bias.
        values = magnitude * self._rng(name.replace("_t", "")).standard_normal(n, np.float32)
        values[:silent] = 0
        self.writer.add_tensor(f"{name}.bias", values, GGMLType.F32)

    def norm(self, name: str, weight: np.ndarray) -> None:
        self.writer.add_tensor(f"{name}.weight", weight.astype(np.float32), GGMLType.F32)
        if self.facts.layer_norm:
            self.writer.add_tensor(f"{name}.bias", np.zeros(len(weight), np.float32), GGMLType.F32)


def write_sparse_model(
    path: Path,
    shape: Shape,
    type: GGMLType,
    *,
    kind: Kind = "llama",
    plain: bool = False,
    density: float = 0.1,
    skew: Skew = "power",
    rank: int = 256,
    margin: float = 0.0,
    hot_first: bool = False,
    n_vocab: int = 32000,
    vocabulary: Path | None = None,
    n_ctx: int = 2048,
    seed: int = 0,
) -> list[np.ndarray]:
    """Write a model whose neurons fire as planted; return their probabilities, float [ff] per layer.

    density: mean probability that a neuron's gate fires (for opt and falcon: its up projection). With dReLU
    half of these have a value, because up fires half of the time. hot_first: neurons are in order of
    probability. rank, margin: see PlantedFFN. plain: write a plain GGUF file without predictors, otherwise
    PowerInfer's; a seed gives the same weights in both. Types: planted.TYPES_OF_PLANTED.
    """
    facts = KINDS[kind]
    if type not in planted.TYPES_OF_PLANTED:
        raise ValueError(f"a sparse model cannot be {type.name}")
    architecture = facts.plain if plain else facts.architecture
    writer = GGUFWriter(path, architecture, dialect="gguf" if plain else "powerinfer")
    n_vocab = add_keys(writer, architecture, shape, type, n_vocab, vocabulary, n_ctx)
    writer.add(f"{architecture}.attention.layer_norm_{'' if facts.layer_norm else 'rms_'}epsilon", EPSILON)
    if not facts.positions:
        writer.add(f"{architecture}.rope.freq_base", 10000.0)
    if plain:
        writer.add(f"{architecture}.hidden_activation", "relu")
        if facts.drelu:
            writer.add("hotset.up_activation", "relu")
    else:
        writer.add("powerinfer.sparse_threshold", 0.0)

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        model = SparseModel(writer, shape, type, facts, pool, seed)
        model.add_ends(n_vocab, n_ctx)
        probabilities = []
        for i in range(shape.layers):
            model.add_attention(i)
            ffn = PlantedFFN(
                shape.d,
                shape.ff,
                density=density,
                skew=skew,
                rank=rank,
                hot_first=hot_first,
                margin=margin,
                stream=model.stream(i),
                variance=FFN_VARIANCE / shape.layers,
                up=facts.up_moments,
                seed=np.random.SeedSequence([seed, i]),
            )
            model.add_ffn(i, ffn, plain)
            probabilities.append(ffn.probabilities)
        writer.write()
    return probabilities


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("--shape", choices=SHAPES, default="7b")
    for name in ("d", "ff", "layers", "heads", "kv-heads", "experts", "used", "head"):
        parser.add_argument(f"--{name}", type=int, help="overrides the shape's")
    types = [name.lower() for name in LLAMA_FTYPES]
    parser.add_argument("--type", choices=types, default="q4_0")
    vocabulary = parser.add_mutually_exclusive_group()
    vocabulary.add_argument("--vocab", type=Path, help="GGUF file to copy the tokenizer from")
    vocabulary.add_argument("--n-vocab", type=int, default=32000, help="size of an invented one (32000)")
    parser.add_argument("--ctx", type=int, default=8192, help="context in the file's keys (8192)")
    parser.add_argument("--seed", type=int, default=0)
    sparse = parser.add_argument_group("sparse models")
    sparse.add_argument("--idle", type=float, help="share of the experts' neurons that do not fire")
    sparse.add_argument("--kind", choices=KINDS, help="OUT is a PowerInfer file of this architecture")
    sparse.add_argument("--plain", type=Path, metavar="FILE", help="also write it as a plain GGUF file")
    sparse.add_argument("--active", type=float, default=0.1, help="share of neurons that fire (0.1)")
    sparse.add_argument(
        "--skew", choices=get_args(Skew), default="power", help="hot and cold neurons, or not"
    )
    sparse.add_argument("--rank", type=int, default=256, help="of the gate; the predictor's is 2 * it + 32")
    sparse.add_argument(
        "--margin", type=float, default=0.0, help="standard deviations by which a predictor fires earlier"
    )
    sparse.add_argument("--hot-first", action="store_true", help="neurons in order of hotness")
    args = parser.parse_args()
    given = {field.name: getattr(args, field.name) for field in dataclasses.fields(Shape)}
    shape = dataclasses.replace(SHAPES[args.shape], **{k: v for k, v in given.items() if v is not None})
    type = GGMLType[args.type.upper()]
    start = time.perf_counter()
    common = {"n_vocab": args.n_vocab, "vocabulary": args.vocab, "n_ctx": args.ctx, "seed": args.seed}
    paths = [args.out]
    if args.idle is not None:
        write_idle_experts(args.out, shape, type, idle=args.idle, **common)
    elif args.kind is None and args.shape == GEMMA3N:
        write_gemma3n(args.out, shape, type, **common)
    elif args.kind is None:
        write_model(args.out, shape, type, **common)
    else:
        paths += [args.plain] if args.plain else []
        for path in paths:
            write_sparse_model(
                path,
                shape,
                type,
                kind=args.kind,
                plain=path == args.plain,
                density=args.active,
                skew=args.skew,
                rank=args.rank,
                margin=args.margin,
                hot_first=args.hot_first,
                **common,
            )
    for path in paths:
        print(f"{path}: {path.stat().st_size / 1e9:.2f} GB")
    print(f"{time.perf_counter() - start:.0f} seconds")


if __name__ == "__main__":
    main()
