"""`make test-peers`: files of image encoders go both ways between hotset and llama.cpp.

The checks use every recipe of tests/support/tiny_vision.py. llama.cpp must compute hotset's embeddings from
the file that hotset makes of the checkpoint, and hotset the same embeddings from the file of llama.cpp's
converter. The images need no scaling.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file, save_file
from tiny_vision import N_EMBD, RECIPES, image_of, save_checkpoint

from hotset.convert.projector import convert_projector
from hotset.formats.gguf import GGUFWriter, copy_metadata, open_gguf
from hotset.vision import ImageEncoder, Picture
from hotset.vision.layouts import scaled_sizes
from hotset.vision.patches import images_of

HERE = Path(__file__).resolve().parent
LLAMA_CPP = Path(os.environ.get("LLAMA_CPP", "llama.cpp"))
TOLERANCE = 5e-3  # of the largest value: its GELU is a table in F16
SIZES = ((40, 100), (64, 64))
# LLaVA only by a script that its documentation calls legacy, InternVL only as its authors publish it.
NOT_CONVERTED = ("llava", "llava-next", "internvl")
OTHER_WINDOW = ("qwen2.5vl",)  # it reads no window size and uses the published one


@pytest.fixture(scope="session")
def encode(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the program llama_cpp_encode.cpp, built against llama-cpp-python's libraries."""
    found = importlib.util.find_spec("llama_cpp")
    assert found is not None
    assert found.origin is not None
    libraries, out = Path(found.origin).parent / "lib", tmp_path_factory.mktemp("encode") / "encode"
    include = [f"-I{LLAMA_CPP / folder}" for folder in ("tools/mtmd", "include", "ggml/include", "vendor")]
    linked = [f"-L{libraries}", "-lmtmd", "-lllama", "-lggml", "-lggml-base", f"-Wl,-rpath,{libraries}"]
    source = HERE / "llama_cpp_encode.cpp"
    subprocess.run(["c++", "-std=c++17", "-O1", *include, source, "-o", out, *linked], check=True)
    return out


# It has the norms of InternVL's large encoder only with the published sizes.
@pytest.fixture(params=[name for name in RECIPES if name != "internvl-6b"])
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def checkpoint(name: str, tmp_path: Path) -> Path:
    save_checkpoint(RECIPES[name], tmp_path / "checkpoint")
    if name in OTHER_WINDOW:  # larger than these images
        path = tmp_path / "checkpoint/config.json"
        config = json.loads(path.read_text())
        config["vision_config"]["window_size"] = 112
        path.write_text(json.dumps(config))
    if RECIPES[name].has_tokenizer:
        (tmp_path / "checkpoint/tokenizer_config.json").write_text("{}")
    if name == "gemma3":  # it knows the names of transformers 4
        given = tmp_path / "checkpoint/preprocessor_config.json"
        given.write_text(json.dumps(json.loads(given.read_text()) | {"image_seq_length": 16}))
        path = tmp_path / "checkpoint/model.safetensors"
        old = {
            re.sub(
                r"^(model\.)?vision_tower\.(vision_model\.)?", "vision_tower.vision_model.", tensor
            ): values
            for tensor, values in load_file(path).items()
        }
        save_file(old, path)
    return tmp_path / "checkpoint"


def encoded(path: Path, size: tuple[int, int]) -> tuple[np.ndarray, np.ndarray, int]:
    """Return hotset's embeddings of an image, its normalised pixels, and the image tokens of a row."""
    picture = Picture.of(image_of(size))
    with ImageEncoder.open(path, n_embd=N_EMBD) as encoder:
        config = encoder.config
        [image] = images_of(config, picture.pixels, scaled_sizes(config, *size, "low", None))
        mean, std = np.float32(config.mean), np.float32(config.std)
        if config.family.by_axis:  # its graph begins with 2 * x - 1
            mean, std = mean - std, 2 * std
        pixels = (image.astype(np.float32) / 255 - mean) / std
        found = encoder.encode(picture, "low")
    return (found[:-1] if config.has_newline else found), pixels, image.shape[1] // config.token_side


def as_llama_cpp_reads_it(path: Path, out: Path) -> Path:
    """Write a copy for llama.cpp, which gives patch i the learned position i.

    In the checkpoints this position belongs to the patch before it, and the first one to the class.
    """
    with open_gguf(path) as gguf:
        writer = GGUFWriter(out, None)
        copy_metadata(gguf, writer)
        for name, info in gguf.tensors.items():
            data = gguf.data(name).copy()
            if name == "v.position_embd.weight":
                data = np.roll(data.reshape(info.shape[1], -1), -1, axis=0).reshape(-1)
            writer.add_tensor(name, data, info.type, info.shape)
        writer.write()
    return out


def test_llama_cpp_computes_the_same(name: str, checkpoint: Path, tmp_path: Path, encode: Path) -> None:
    path = theirs_path = tmp_path / "ours.gguf"
    convert_projector(checkpoint, path, "f32")
    if name in ("llava", "llava-next", "internvl"):
        theirs_path = as_llama_cpp_reads_it(path, tmp_path / "rolled.gguf")
    for size in SIZES:
        ours, pixels, columns = encoded(path, size)
        pixels.tofile(tmp_path / "pixels")
        height, width, _ = pixels.shape
        command = [encode, theirs_path, tmp_path / "pixels", tmp_path / "out", str(width), str(height)]
        subprocess.run(command, check=True, capture_output=True)
        theirs = np.fromfile(tmp_path / "out", np.float32).reshape(-1, ours.shape[1])
        if name.startswith("pixtral"):  # each row ends with a token of the text model, except the last one
            at = np.arange(len(theirs))
            theirs = theirs[at % (columns + 1) != columns]
        elif name.startswith("llava"):  # it leaves out the first patch instead of the class
            ours, theirs = ours[1:], theirs[:-1]
        assert np.abs(ours - theirs).max() < TOLERANCE * np.abs(ours).max(), size


@pytest.fixture(scope="session")
def converter() -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(
        [sys.executable, HERE / "llama_cpp_convert.py", LLAMA_CPP],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
    ) as process:  # fmt: skip
        yield process
        process.terminate()


def test_their_converter_writes_the_same(
    name: str, checkpoint: Path, tmp_path: Path, converter: subprocess.Popen[str]
) -> None:
    ours, theirs = tmp_path / "ours.gguf", tmp_path / "mmproj-theirs.gguf"
    convert_projector(checkpoint, ours, "f32")
    assert converter.stdin is not None
    assert converter.stdout is not None
    print(json.dumps([str(checkpoint), str(theirs), "--mmproj"]), file=converter.stdin, flush=True)
    error = json.loads(converter.stdout.readline())
    assert bool(error) is (name in NOT_CONVERTED), error
    if error:
        return
    with open_gguf(ours) as one, open_gguf(theirs) as other:
        # Their converter skips the text model of a checkpoint with the names of transformers 5.
        assert one.tensors.keys() - {"v.token_embd.img_break"} == other.tensors.keys()
    found, expected = (encoded(path, SIZES[1])[0] for path in (theirs, ours))
    # Their file has Gemma's projection in F16.
    assert np.abs(found - expected).max() <= (1e-3 * np.abs(expected).max() if name == "gemma3" else 0)
