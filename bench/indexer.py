"""What does a step cost far beyond the top-k of an indexer? DeepSeek V3.2's shapes in few layers.

usage: python bench/indexer.py FILE.gguf [--layers 2] [--type q4_0] [--depths 4096,32768] [--tokens 1]
       [--rounds 20] [--threads N]

Writes FILE if it does not exist: the attention, the indexer and the FFNs of DeepSeek V3.2 with random
weights. The first layer is dense; the others have 16 of the 256 experts, of which a token reads eight and the
shared one, as in the original. Keys and values before a token are random numbers, because a prompt of this
length takes hours. Each round computes --tokens tokens of one sequence at each depth, as in decoding (1) or
in a prompt, so that a busy machine slows all equally.
Prints the measured read bandwidth first, then a Markdown table and one line of JSON.
"""

from __future__ import annotations

import argparse
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from peers import bandwidth_reader, machine, print_json, print_table
from synthetic import EPSILON, LLAMA_FTYPES, add_vocabulary, random_matrix

from hotset.backends.base import BLOCK_SIZE, Batch
from hotset.backends.cpu.backend import CpuBackend
from hotset.backends.stage import BackendOptions
from hotset.formats.gguf import GGUFWriter, open_gguf
from hotset.formats.quants import GGMLType
from hotset.model.config import config_from_gguf
from hotset.model.cost import Cost, index_bytes
from hotset.model.decoder import describe
from hotset.model.operations import Attention, Indexer

D, HEADS, NOPE, ROT, V_DIM, RANK, RANK_Q = 7168, 128, 128, 64, 128, 512, 1536
FF, EXPERT_FF, EXPERTS, USED = 18432, 2048, 16, 8
INDEX_HEADS, INDEX_DIM, TOP_K = 64, 128, 2048
N_VOCAB = 1024

KEYS = {
    "context_length": 163840, "embedding_length": D, "feed_forward_length": FF, "vocab_size": N_VOCAB,
    "attention.head_count": HEADS, "attention.head_count_kv": 1,
    "attention.layer_norm_rms_epsilon": EPSILON, "rope.freq_base": 10000.0, "rope.dimension_count": ROT,
    "attention.q_lora_rank": RANK_Q, "attention.kv_lora_rank": RANK, "attention.key_length": RANK + ROT,
    "attention.value_length": RANK, "attention.key_length_mla": NOPE + ROT,
    "attention.value_length_mla": V_DIM, "attention.indexer.head_count": INDEX_HEADS,
    "attention.indexer.key_length": INDEX_DIM, "attention.indexer.top_k": TOP_K,
    "leading_dense_block_count": 1, "expert_count": EXPERTS, "expert_used_count": USED,
    "expert_shared_count": 1, "expert_feed_forward_length": EXPERT_FF, "expert_weights_scale": 2.5,
    "expert_weights_norm": True, "expert_gating_func": 2,
}  # fmt: skip


def write(path: Path, n_layer: int, type: GGMLType) -> None:
    """Write a file of DeepSeek V3.2's architecture with random weights."""
    writer = GGUFWriter(path, "deepseek32")
    writer.add("general.name", f"synthetic {path.stem}")
    writer.add("general.file_type", LLAMA_FTYPES[type.name])
    for key, value in (KEYS | {"block_count": n_layer}).items():
        writer.add(f"deepseek32.{key}", value)
    add_vocabulary(writer, N_VOCAB)
    matrices = {"token_embd": (D, N_VOCAB), "output": (D, N_VOCAB)}
    vectors, ones = {}, {"output_norm": D}
    for i in range(n_layer):
        blk = f"blk.{i}."
        matrices |= {
            f"{blk}attn_q_a": (D, RANK_Q), f"{blk}attn_q_b": (RANK_Q, HEADS * (NOPE + ROT)),
            f"{blk}attn_kv_a_mqa": (D, RANK + ROT), f"{blk}attn_k_b": (NOPE, RANK, HEADS),
            f"{blk}attn_v_b": (RANK, V_DIM, HEADS), f"{blk}attn_output": (HEADS * V_DIM, D),
            f"{blk}indexer.attn_q_b": (RANK_Q, INDEX_HEADS * INDEX_DIM),
            f"{blk}indexer.attn_k": (D, INDEX_DIM), f"{blk}indexer.proj": (D, INDEX_HEADS),
        }  # fmt: skip
        ones |= {f"{blk}attn_norm": D, f"{blk}ffn_norm": D, f"{blk}attn_q_a_norm": RANK_Q}
        ones |= {f"{blk}attn_kv_a_norm": RANK, f"{blk}indexer.k_norm": INDEX_DIM}
        vectors[f"{blk}indexer.k_norm.bias"] = INDEX_DIM
        if i == 0:
            matrices |= {f"{blk}ffn_gate": (D, FF), f"{blk}ffn_up": (D, FF), f"{blk}ffn_down": (FF, D)}
            continue
        vectors[f"{blk}exp_probs_b.bias"] = EXPERTS
        for suffix, each in (("_exps", (EXPERTS,)), ("_shexp", ())):
            matrices |= {f"{blk}ffn_{name}{suffix}": (D, EXPERT_FF, *each) for name in ("gate", "up")}
            matrices[f"{blk}ffn_down{suffix}"] = EXPERT_FF, D, *each
        matrices[f"{blk}ffn_gate_inp"] = D, EXPERTS
    for name, n in ones.items():
        writer.add_tensor(f"{name}.weight", np.ones(n, np.float32), GGMLType.F32)
    for name, n in vectors.items():
        writer.add_tensor(name, np.zeros(n, np.float32), GGMLType.F32)
    with ThreadPoolExecutor(2) as pool:
        for i, (name, (n_in, *n_out)) in enumerate(matrices.items()):
            stored = GGMLType.F32 if name.endswith(("ffn_gate_inp", "indexer.proj")) else type

            def fill(stored: GGMLType = stored, of: tuple[int, int] = (n_in, int(np.prod(n_out))),
                     seed: int = i) -> np.ndarray:  # fmt: skip
                return random_matrix(stored, *of, seed, pool)

            writer.add_tensor(f"{name}.weight", fill, stored, (n_in, *n_out))
        writer.write()


def fill_cache(backend: CpuBackend, seed: int = 0) -> None:
    """Fill every KV block with other random numbers. F16 only: their bytes need no scales."""
    rng, n_bytes = np.random.default_rng(seed), backend.block_nbytes
    pool = rng.standard_normal(n_bytes).astype(np.float16).view(np.uint8)
    for block in range(backend.n_blocks):
        first = 2 * int(rng.integers(0, n_bytes // 2))
        backend.write_block(block, pool[first : first + n_bytes].tobytes())


def tokens_at(depth: int, n_tokens: int, n_blocks: int) -> Batch:
    """Return n tokens from position `depth`; position p is in block p // BLOCK_SIZE."""
    zeros = np.zeros(n_tokens, np.int32)
    blocks = np.arange(n_blocks, dtype=np.int32)[None]
    return Batch(zeros + 7, depth + np.arange(n_tokens, dtype=np.int32), zeros, blocks, zeros[:1])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", type=Path)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--type", default="q4_0")
    parser.add_argument("--depths", default="4096,32768")
    parser.add_argument("--tokens", type=int, default=1, help="of a step")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--threads", type=int)
    args = parser.parse_args()
    if not args.file.exists():
        write(args.file, args.layers, GGMLType[args.type.upper()])
    depths = [int(depth) for depth in args.depths.split(",")]
    n_blocks = -(-(max(depths) + args.tokens) // BLOCK_SIZE)
    with open_gguf(args.file) as gguf:
        graph = describe(config_from_gguf(gguf), gguf.tensors)
        cost = Cost(graph, gguf.tensors)
        options = BackendOptions(
            n_blocks=n_blocks, max_batch=max(args.tokens, BLOCK_SIZE), n_threads=args.threads
        )
        backend = CpuBackend(gguf, graph, options)
        fill_cache(backend)
        read = bandwidth_reader(args.file, backend.n_threads)
        bandwidth = max(read() for _ in range(5))
        print(f"read bandwidth: {bandwidth / 1e9:.1f} GB/s on {backend.n_threads} threads")
        batches = [tokens_at(depth, args.tokens, n_blocks) for depth in depths]
        seconds: list[list[float]] = [[] for _ in depths]
        for round_ in range(args.rounds + 2):
            for batch, own in zip(batches, seconds, strict=True):
                start = time.perf_counter()
                backend.step(batch)
                if round_ >= 2:
                    own.append(time.perf_counter() - start)
        backend.close()
    indexers = [op for op in graph.ops if isinstance(op, Indexer)]
    attention = [op for op in graph.ops if isinstance(op, Attention)]
    rows, found = [], {}
    ratios = [statistics.median(b / a for a, b in zip(seconds[0], own, strict=True)) for own in seconds]
    for depth, own, ratio in zip(depths, seconds, ratios, strict=True):
        n_bytes, median = cost.bytes_per_token(depth, "f16"), statistics.median(own)
        of_index = sum(index_bytes(op, "f16") * (depth + 1) for op in indexers)
        share = n_bytes / median / bandwidth if args.tokens == 1 else None
        rows.append([
            f"{depth:,}", f"{n_bytes / 1e6:,.0f}", f"{of_index / 1e6:.1f}",
            f"{sum(op.n_visible(depth) for op in attention) / len(attention):,.0f}",
            f"{1e3 * median:.1f}", f"{ratio:.2f}×", "" if share is None else f"{share:.0%}",
        ])  # fmt: skip
        found[depth] = {"bytes_per_token": n_bytes, "index_bytes": of_index, "seconds": median,
                        "ratio": ratio, "share_of_bandwidth": share}  # fmt: skip
    print_table(
        ("depth", "MB a token", "of index keys", "keys seen", "ms", f"÷ {depths[0]:,}", "bandwidth"), rows
    )
    print_json("indexer", machine=machine(), tokens=args.tokens, bandwidth=bandwidth, depths=found)


if __name__ == "__main__":
    main()
