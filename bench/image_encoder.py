"""How long does an image take? Encoders of real shapes with random weights, on the CPU.

    python bench/image_encoder.py --shape smolvlm-256m --type f16
    python bench/image_encoder.py --shape qwen2.5-vl-3b --type q8_0 --side 448 --llama-cpp build/bin

Prints the median seconds of one step: a tile, or an image of --side pixels. They include scaling, which
llama.cpp does not time. --llama-cpp FOLDER runs the same file in llama-mtmd-cli of this folder, in turn, and
prints the median ratio of the rounds. --keep FILE keeps the encoder's file. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from PIL import Image

sys.path.append(str(Path(__file__).parents[1] / "tests" / "support"))
from byte_models import write_model

from hotset.cores import usable_cores
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


def of_llama_cpp(program: Path, mmproj: Path, image: Path, n_embd: int, threads: int) -> list[float]:
    """Return the seconds of the encoder's steps that llama-mtmd-cli prints, of one image.

    program: llama-mtmd-cli. n_embd: the width of the text model, which has one layer.
    """
    text = mmproj.with_name("text.gguf")
    if not text.exists():
        write_model(text, n_embd=n_embd, n_layer=1, **{"llama.context_length": 4096})
    command = [program, "-m", text, "--mmproj", mmproj, "--image", image, "-p", "?", "-n", "1", "-c", "4096"]
    command += ["-t", str(threads), "--jinja", "--no-mmproj-offload"]
    done = subprocess.run(
        list(map(str, command)), capture_output=True, check=False, text=True, errors="replace"
    )
    found = re.findall(r"mtmd batch encoding done in (\d+) ms", done.stdout + done.stderr)
    if not found:
        print(done.stderr[-2000:], file=sys.stderr)
        sys.exit(f"{program} printed no time of an encoder (exit status {done.returncode})")
    return [int(n) / 1000 for n in found]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--shape", choices=SHAPES, default="smolvlm-256m")
    parser.add_argument("--type", default="f16", help="f32, f16, bf16, q8_0 or q4_0")
    parser.add_argument("--side", type=int, help="pixels of an image of a free size")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--keep", type=Path, help="keep the encoder's file here")
    parser.add_argument("--llama-cpp", type=Path, help="the folder of llama-mtmd-cli")
    args = parser.parse_args()
    shape = SHAPES[args.shape]
    side = shape.side if args.side is None or shape.projector == "idefics3" else args.side
    with TemporaryDirectory() as folder:
        path = args.keep or Path(folder) / "mmproj.gguf"
        write(shape, path, GGMLType[args.type.upper()])
        with ImageEncoder.open(path, n_embd=shape.n_out, threads=args.threads) as encoder:
            pixels = np.random.default_rng(1).integers(0, 256, (side, side, 3), np.uint8)
            picture, ours, theirs = Picture.of(pixels), list[float](), list[float]()
            image = Path(folder) / "image.png"
            Image.fromarray(pixels).save(image)
            for _ in range(args.repeat + 1):  # the first one is slower
                start = time.perf_counter()
                n_tokens = len(encoder.encode(picture))
                n_patches = n_tokens * shape.merge**2
                # SmolVLM enlarges the image to 16 tiles, and the whole image is one more.
                n_steps = n_patches // shape.n_patches if shape.projector == "idefics3" else 1
                ours.append((time.perf_counter() - start) / n_steps)
                if args.llama_cpp is not None:
                    program, threads = args.llama_cpp / "llama-mtmd-cli", args.threads or usable_cores()
                    steps = of_llama_cpp(program, path, image, shape.n_out, threads)
                    theirs.append(statistics.fmean(steps))
            del ours[:1], theirs[:1]
            seconds, n_patches = statistics.median(ours), n_patches // n_steps
            products = 2 * shape.multiplications(n_patches) / seconds
            print(f"{args.shape} {args.type}: {n_steps} steps of {n_patches} patches")
            print(f"{seconds:.3f} s ({products / 1e9:.0f} GFLOP/s), memory {encoder.nbytes / 2**20:.0f} MiB")
    if theirs:
        ratios = [b / a for a, b in zip(ours, theirs, strict=True)]
        print(
            f"llama.cpp {statistics.median(theirs):.3f} s: hotset is {statistics.median(ratios):.2f} "
            f"({min(ratios):.2f} to {max(ratios):.2f}) times as fast"
        )
    result = {"shape": args.shape, "type": args.type, "n_patches": n_patches, "seconds": seconds}
    print(json.dumps(result | {"seconds_of_all": ours, "llama_cpp_seconds_of_all": theirs}))


if __name__ == "__main__":
    main()
