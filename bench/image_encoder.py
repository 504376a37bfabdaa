"""How long does an image take? Encoders of real shapes with random weights, on the CPU.

    python bench/image_encoder.py --shape smolvlm-256m --type f16
    python bench/image_encoder.py --shape qwen2.5-vl-3b --type q8_0 --side 448

Prints the seconds of one step: a tile, or an image of --side pixels. --keep FILE keeps the encoder's file.
With it, `llama-server --mmproj` and `llama-mtmd-cli` print their time. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from hotset.formats.gguf import GGUFWriter
from hotset.formats.quants import GGMLType
from hotset.vision import ImageEncoder, Picture


@dataclass(frozen=True)
class Shape:
    """The sizes of a published encoder. gated: its FFN has a gate. side: pixels of a tile, or of an image."""

    projector: str
    n_layer: int
    n_embd: int
    n_head: int
    n_ff: int
    patch: int
    merge: int
    side: int
    n_out: int
    gated: bool = False

    @property
    def n_patches(self) -> int:
        return (self.side // self.patch) ** 2

    def multiplications(self, n_patches: int) -> int:
        """Return the multiplications of matrices and of attention to all patches."""
        d = self.n_embd
        layer = 4 * d * d + (3 if self.gated else 2) * d * self.n_ff + 2 * n_patches * d
        return n_patches * (self.n_layer * layer + 3 * self.patch**2 * d)


SHAPES = {
    "smolvlm-256m": Shape("idefics3", 12, 768, 12, 3072, 16, 4, 512, 576),
    "qwen2.5-vl-3b": Shape("qwen2.5vl_merger", 32, 1280, 16, 3420, 14, 2, 448, 2048, gated=True),
}


def tensors(shape: Shape) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield the name and the GGUF shape of each tensor."""
    d, bias = shape.n_embd, shape.projector == "idefics3"
    patches = (shape.patch, shape.patch, 3, d)
    yield "v.patch_embd.weight", patches
    if bias:
        yield "v.patch_embd.bias", (d,)
        yield "v.position_embd.weight", (d, shape.n_patches)
    else:
        yield "v.patch_embd.weight.1", patches
    for i in range(shape.n_layer):
        for norm in ("ln1", "ln2"):
            yield from ((f"v.blk.{i}.{norm}.{kind}", (d,)) for kind in ("weight", "bias")[: 1 + bias])
        matrices = {f"attn_{name}": (d, d) for name in ("q", "k", "v", "out")}
        matrices |= dict.fromkeys(("ffn_gate", "ffn_up")[not shape.gated :], (d, shape.n_ff))
        for name, size in (matrices | {"ffn_down": (shape.n_ff, d)}).items():
            yield f"v.blk.{i}.{name}.weight", size
            yield f"v.blk.{i}.{name}.bias", size[1:]
    yield from ((f"v.post_ln.{kind}", (d,)) for kind in ("weight", "bias")[: 1 + bias])
    merged = shape.merge**2 * d
    if bias:
        yield "mm.model.fc.weight", (merged, shape.n_out)
    else:
        for name, size in (("mm.0", (merged, merged)), ("mm.2", (merged, shape.n_out))):
            yield f"{name}.weight", size
            yield f"{name}.bias", size[1:]


def write(shape: Shape, path: Path, type: GGMLType) -> None:
    """Write an encoder of random weights. type: of its matrices."""
    writer, rng = GGUFWriter(path, "clip"), np.random.default_rng(0)
    numbers = {
        "image_size": shape.side, "patch_size": shape.patch, "embedding_length": shape.n_embd,
        "feed_forward_length": shape.n_ff, "block_count": shape.n_layer, "projection_dim": shape.n_out,
        "attention.head_count": shape.n_head, "attention.layer_norm_epsilon": 1e-6,
        "image_mean": [0.5] * 3, "image_std": [0.5] * 3,
    }  # fmt: skip
    if shape.projector == "idefics3":
        numbers |= {"projector.scale_factor": shape.merge, "preproc_image_size": 4 * shape.side}
    else:
        numbers |= {"n_wa_pattern": 8}
    writer.add("clip.has_vision_encoder", True)
    writer.add("clip.projector_type", shape.projector)
    writer.add("clip.use_silu" if shape.gated else "clip.use_gelu", True)
    for key, value in numbers.items():
        writer.add(f"clip.vision.{key}", value)
    for name, size in tensors(shape):
        values = rng.standard_normal(size[::-1], np.float32) / np.sqrt(size[0] if len(size) == 2 else 100)
        if ".ln" in name or "post_ln.weight" in name:
            values += 1
        blocks = {GGMLType.Q8_0: 32, GGMLType.Q4_0: 32}.get(type, 1)
        is_matrix = len(size) == 2 and "position" not in name
        kind = GGMLType.F16 if size[0] % blocks else type
        writer.add_tensor(name, values, kind if is_matrix else GGMLType.F32)
    writer.write()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--shape", choices=SHAPES, default="smolvlm-256m")
    parser.add_argument("--type", default="f16", help="f32, f16, bf16, q8_0 or q4_0")
    parser.add_argument("--side", type=int, help="pixels of an image of a free size")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--keep", type=Path, help="keep the encoder's file here")
    args = parser.parse_args()
    shape = SHAPES[args.shape]
    side = shape.side if args.side is None or shape.projector == "idefics3" else args.side
    with TemporaryDirectory() as folder:
        path = args.keep or Path(folder) / "mmproj.gguf"
        write(shape, path, GGMLType[args.type.upper()])
        with ImageEncoder.open(path, n_embd=shape.n_out, threads=args.threads) as encoder:
            pixels = np.random.default_rng(1).integers(0, 256, (side, side, 3), np.uint8)
            picture, times = Picture.of(pixels), []
            for _ in range(args.repeat + 1):  # the first one is slower
                start = time.perf_counter()
                n_tokens = len(encoder.encode(picture, "low" if shape.projector == "idefics3" else "auto"))
                times.append(time.perf_counter() - start)
            best, n_patches = min(times[1:]), n_tokens * shape.merge**2
            products = 2 * shape.multiplications(n_patches) / best
            print(f"{args.shape} {args.type}: {n_patches} patches, {n_tokens} image tokens")
            print(f"{best:.3f} s ({products / 1e9:.0f} GFLOP/s), memory {encoder.nbytes / 2**20:.0f} MiB")
    result = {"shape": args.shape, "type": args.type, "n_patches": n_patches, "seconds": best}
    print(json.dumps(result | {"seconds_of_all": times[1:]}))


if __name__ == "__main__":
    main()
