"""Makes synthetic models: llama-shaped GGUF files of any size and type, filled with random weights.

usage: python bench/synthetic.py OUT.gguf --shape 7b --type q4_0 [--vocab FILE.gguf | --n-vocab 32000]

Speed depends on shapes, types and bytes, not on what a model has learned. The quantised values are random
bytes; scales are drawn so that weights have the magnitude of trained ones, 1/sqrt(inputs), and activations
stay finite at any depth. Filling is bound by the random generator: a 7B file in Q4_0 takes seconds.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from hotset.formats.gguf import GGUFWriter, ValueType, open_gguf
from hotset.formats.quants import TYPES, GGMLType, dequantize, row_bytes

SAMPLE_BLOCKS = 256  # blocks from which the scale of a type is found
SLICE_BYTES = 16 << 20  # filled by one thread at a time, from its own stream of random numbers
FLOATS = (GGMLType.F32, GGMLType.F16, GGMLType.BF16)
LLAMA_FTYPES = {"F32": 0, "F16": 1, "Q4_0": 2, "Q4_1": 3, "Q8_0": 7, "Q5_0": 8, "Q5_1": 9, "Q2_K": 10}
LLAMA_FTYPES |= {"Q3_K": 12, "Q4_K": 15, "Q5_K": 17, "Q6_K": 18, "IQ4_NL": 25, "IQ4_XS": 30, "BF16": 32}


@dataclass(frozen=True)
class Shape:
    """d: width of the residual stream; ff: neurons per layer."""

    d: int
    ff: int
    layers: int
    heads: int
    kv_heads: int

    def matrices(self, n_vocab: int) -> Iterator[tuple[str, int, int]]:
        """Name, inputs and outputs of every matrix of the file."""
        d, kv = self.d, self.d // self.heads * self.kv_heads
        yield "token_embd", d, n_vocab
        yield "output", d, n_vocab
        for i in range(self.layers):
            for name, n_in, n_out in (
                ("attn_q", d, d),
                ("attn_k", d, kv),
                ("attn_v", d, kv),
                ("attn_output", d, d),
                ("ffn_gate", d, self.ff),
                ("ffn_up", d, self.ff),
                ("ffn_down", self.ff, d),
            ):
                yield f"blk.{i}.{name}", n_in, n_out


SHAPES = {
    "135m": Shape(576, 1536, 30, 9, 3),  # SmolLM2; its rows suit no K-quant
    "1b": Shape(2048, 5632, 22, 32, 4),  # TinyLlama
    "7b": Shape(4096, 11008, 32, 32, 32),  # Llama 2
    "mistral": Shape(4096, 14336, 32, 32, 8),  # Mistral, Bamboo
    "13b": Shape(5120, 13824, 40, 40, 40),
}


def _unit_scales(type: GGMLType, rng: np.random.Generator) -> np.ndarray:
    """Blocks of random values with a root mean square of about 1: [SAMPLE_BLOCKS], structured.

    Fields d, m and dmin are what the rest of a block is multiplied by, or what is added to it.
    """
    facts = TYPES[type]
    assert facts.block is not None
    assert facts.block.names is not None
    data = rng.integers(0, 256, SAMPLE_BLOCKS * facts.block_bytes, np.uint8)
    blocks = data.view(facts.block)
    for name in _scale_fields(facts.block):
        blocks[name] = 1
    if "m" in facts.block.names:  # x = d * q + m: centre it
        blocks["m"] = 0
        blocks["m"] = -np.median(dequantize(data, type, (facts.block_size, SAMPLE_BLOCKS)))
    values = dequantize(data, type, (facts.block_size, SAMPLE_BLOCKS)).astype(np.float64)
    factor = rng.uniform(0.7, 1.3, SAMPLE_BLOCKS) / np.sqrt(np.mean(values**2))
    factor *= rng.choice([-1.0, 1.0], SAMPLE_BLOCKS)  # K-quants are not centred: half of them the other way
    unit = np.zeros(SAMPLE_BLOCKS, [(name, np.float64) for name in _scale_fields(facts.block)])
    for name in unit.dtype.names or ():
        unit[name] = blocks[name] * factor
    return unit


def _scale_fields(block: np.dtype) -> list[str]:
    return [name for name in ("d", "m", "dmin") if name in (block.names or ())]


def _filler(
    type: GGMLType, magnitude: float, rng: np.random.Generator
) -> Callable[[np.ndarray, np.random.Generator], None]:
    """A function that fills bytes (whole blocks) with weights of the given root mean square."""
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
            blocks[name] = (unit[name] * magnitude).astype(np.float16)[chosen]

    return fill_blocks


def random_matrix(type: GGMLType, n_in: int, n_out: int, seed: int, pool: ThreadPoolExecutor) -> np.ndarray:
    """Rows of random weights of magnitude 1/sqrt(n_in), as stored: uint8 [n_out, row_bytes(type, n_in)].

    The same seed gives the same bytes on any number of threads.
    """
    seeds = np.random.SeedSequence(seed)
    fill = _filler(type, n_in**-0.5, np.random.default_rng(seeds.spawn(1)[0]))
    data = np.empty((n_out, row_bytes(type, n_in)), np.uint8)
    flat = data.reshape(-1)
    block_bytes = TYPES[type].block_bytes
    step = SLICE_BYTES // block_bytes * block_bytes
    slices = [flat[start : start + step] for start in range(0, len(flat), step)]
    rngs = [np.random.Generator(np.random.SFC64(child)) for child in seeds.spawn(len(slices))]
    list(pool.map(fill, slices, rngs))
    return data


def add_vocabulary(writer: GGUFWriter, n_vocab: int) -> None:
    """A SentencePiece vocabulary of n_vocab pieces: three control tokens, 256 bytes, and made-up words."""
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
    """The tokenizer of another GGUF file; returns its number of tokens."""
    with open_gguf(path) as source:
        for key, value in source.metadata.items():
            if key.startswith("tokenizer."):
                writer.add(key, value, ValueType(source.metadata_types[key][-1]))
        tokens = source.metadata["tokenizer.ggml.tokens"]
    assert isinstance(tokens, list)
    return len(tokens)


def write_model(
    path: Path,
    shape: Shape,
    type: GGMLType,
    n_vocab: int = 32000,
    vocabulary: Path | None = None,
    n_ctx: int = 8192,
    seed: int = 0,
) -> None:
    """Writes a dense model. Every matrix has the given type (norms are F32); memory: one matrix at a time.

    vocabulary: a GGUF file whose tokenizer is copied; else one of n_vocab pieces is made up. n_ctx: the
    context that the file claims, in tokens.
    """
    writer = GGUFWriter(path, "llama")
    writer.add("general.name", f"synthetic {path.stem}")
    writer.add("general.file_type", LLAMA_FTYPES[type.name])
    writer.add("general.quantization_version", 2)
    for key, value in {
        "context_length": n_ctx,
        "embedding_length": shape.d,
        "block_count": shape.layers,
        "feed_forward_length": shape.ff,
        "rope.dimension_count": shape.d // shape.heads,
        "attention.head_count": shape.heads,
        "attention.head_count_kv": shape.kv_heads,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.freq_base": 10000.0,
    }.items():
        writer.add(f"llama.{key}", value)
    if vocabulary is None:
        add_vocabulary(writer, n_vocab)
    else:
        n_vocab = copy_vocabulary(writer, vocabulary)

    norms = ["output_norm"]
    norms += [f"blk.{i}.{name}" for i in range(shape.layers) for name in ("attn_norm", "ffn_norm")]
    for name in norms:
        writer.add_tensor(f"{name}.weight", np.ones(shape.d, np.float32), GGMLType.F32)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for i, (name, n_in, n_out) in enumerate(shape.matrices(n_vocab)):

            def fill(n_in: int = n_in, n_out: int = n_out, seed: int = seed + i) -> np.ndarray:
                return random_matrix(type, n_in, n_out, seed, pool)

            writer.add_tensor(f"{name}.weight", fill, type, (n_in, n_out))
        writer.write()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("--shape", choices=SHAPES, default="7b")
    for name in ("d", "ff", "layers", "heads", "kv-heads"):
        parser.add_argument(f"--{name}", type=int, help="overrides the shape's")
    types = [name.lower() for name in LLAMA_FTYPES]
    parser.add_argument("--type", choices=types, default="q4_0")
    vocabulary = parser.add_mutually_exclusive_group()
    vocabulary.add_argument("--vocab", type=Path, help="GGUF file to copy the tokenizer from")
    vocabulary.add_argument("--n-vocab", type=int, default=32000, help="size of a made-up one (32000)")
    parser.add_argument("--ctx", type=int, default=8192, help="context that the file claims (8192)")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    given = {field.name: getattr(args, field.name) for field in dataclasses.fields(Shape)}
    shape = dataclasses.replace(SHAPES[args.shape], **{k: v for k, v in given.items() if v is not None})
    type = GGMLType[args.type.upper()]
    write_model(args.out, shape, type, args.n_vocab, args.vocab, args.ctx, args.seed)
    print(f"{args.out}: {args.out.stat().st_size / 1e9:.2f} GB")


if __name__ == "__main__":
    main()
