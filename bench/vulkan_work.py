"""The work of a token on a Vulkan device: bytes of weights, dispatches, and the predicted time.

usage: python bench/vulkan_work.py [--launch 4] [--share 0.85]

Models of real sizes are files with a header and a hole, which is not read. Dispatches are counted by the
planner (backends/vulkan/budget.py), which a test compares with recorded ones. llama.cpp's are counted from
its graph and the fusions of its Vulkan backend (LLAMA_CPP below). The predicted time is the planner's: bytes
over a share of the data sheet's bandwidth, plus the launches of all dispatches in sequence. If rows are
skipped, a line of memory is still read if any of its rows is.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from synthetic import SHAPES, Shape

from hotset.backends.vulkan.budget import dispatches
from hotset.backends.vulkan.planning import model_facts
from hotset.formats.gguf import open_gguf
from hotset.formats.quants import GGMLType
from hotset.model.config import config_from_gguf
from hotset.model.decoder import describe

sys.path.append(str(Path(__file__).parents[1] / "tests" / "support"))

from header_files import tensors_of, write_header

N_VOCAB, N_CTX = 32000, 4096
FIRED = 0.1  # of the neurons of b7
ROW_BYTES = 16  # of a row in a tile, next to its neighbours' bytes (backends/vulkan/weights.py)
LINES = (32, 64)  # bytes that are read at once: NVIDIA's sectors, others' lines
# GB/s from the makers' data sheets, and bytes of a line. Radeon 780M: two channels of DDR5-5600.
DEVICES = {
    "RTX 4090": (1008.0, 32), "RX 7900 XTX": (960.0, 64), "Arc B580": (456.0, 64), "Radeon 780M": (89.6, 64),
}  # fmt: skip


@dataclass(frozen=True)
class LlamaCpp:
    """Dispatches of a layer of ggml-vulkan at commit 0c1e57098 for one token, flash attention on.

    A layer, after fusion (ggml_vk_build_graph): RMS_NORM+MUL; three MUL_MAT; ROPE; ROPE+VIEW+SET_ROWS;
    SET_ROWS; FLASH_ATTN_EXT and its split_k_reduce; MUL_MAT+ADD; RMS_NORM+MUL; and of a dense model two
    MUL_MAT, GLU, MUL_MAT+ADD. In an MoE model the head norms are in the rotations, and there are MUL_MAT of
    the router, topk_moe, two MUL_MAT_ID, GLU, MUL_MAT_ID+MUL, and the fused sum of experts and residual.
    quantized: inputs that are rounded to Q8_1 by a dispatch of its own (ggml_vk_should_use_mmvq), by maker.
    Once: two GET_ROWS, the ADD that they part from its MUL_MAT, the last norm and the output, whose input
    AMD's devices round too.
    """

    layer: int
    quantized: dict[str, int]

    def of(self, n_layer: int, maker: str) -> int:
        return n_layer * (self.layer + self.quantized.get(maker, 0)) + 5 + (maker == "AMD")


LLAMA_CPP = {
    "7B Q4_0": LlamaCpp(15, {"NVIDIA": 1, "AMD": 4}),
    "30B-A3B Q4_K": LlamaCpp(18, {"AMD": 3}),
}


def write_model(path: Path, architecture: str, shape: Shape, type: GGMLType) -> None:
    """Write a file with a hole instead of its tensors."""
    tensors, more = list(tensors_of(architecture, shape, type, N_VOCAB)), {}
    if architecture == "qwen3moe":
        more["expert_feed_forward_length"] = shape.ff
        names = (f"blk.{i}.{name}" for i in range(shape.layers) for name in ("attn_q_norm", "attn_k_norm"))
        tensors += [(name, (shape.head_dim,), GGMLType.F32) for name in names]
    write_header(path, architecture, shape, tensors, N_CTX, **more)


def work_of(architecture: str, shape: Shape, type: GGMLType, fired: float) -> tuple[int, int]:
    """Return the bytes of weights that a token reads, and its dispatches."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "model.gguf")
        write_model(path, architecture, shape, type)
        with open_gguf(path) as model:
            graph = describe(config_from_gguf(model), model.tensors)
            facts = model_facts(graph, model.tensors, "f16", N_CTX // 64, 512)
            read = facts.output_bytes + sum(layer.fixed_bytes - layer.idle_bytes for layer in facts.layers)
            for ffn in graph.ffns if fired < 1 else ():
                idle = sum(part.matrix_bytes(model.tensors) for part in (ffn.up, ffn.down))
                read -= int((1 - fired) * idle)
            return read, dispatches(graph, model.tensors).total()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--launch", type=float, default=4.0, help="microseconds per dispatch (4)")
    parser.add_argument(
        "--share", type=float, default=0.85, help="of the bandwidth that kernels reach (0.85)"
    )
    args = parser.parse_args()
    models = {
        "7B Q4_0": ("llama", SHAPES["7b"], GGMLType.Q4_0, 1.0),
        "`b7` at 10%": ("bamboo", SHAPES["7b"], GGMLType.Q4_0, FIRED),
        "30B-A3B Q4_K": ("qwen3moe", SHAPES["qwen3-30b"], GGMLType.Q4_K, 1.0),
    }
    print("| model | GB of weights | dispatches | llama.cpp's (NVIDIA, AMD) |", *(f"{n} |" for n in DEVICES))
    print("|---|---:|---:|---:|" + "---:|" * len(DEVICES))
    for name, how in models.items():
        read, n = work_of(*how)
        by_line = {line: work_of(*how[:3], 1 - (1 - how[3]) ** (line // ROW_BYTES))[0] for line in LINES}
        peer = LLAMA_CPP.get(name)
        layers = how[1].layers
        counted = "" if peer is None else f"{peer.of(layers, 'NVIDIA')}, {peer.of(layers, 'AMD')}"
        row = [name, f"{read / 1e9:.2f}", str(n), counted]
        for gb, line in DEVICES.values():
            row.append(f"{1 / (by_line[line] / (args.share * gb * 1e9) + n * args.launch * 1e-6):.0f}")
        print("| " + " | ".join(row) + " |")


if __name__ == "__main__":
    main()
