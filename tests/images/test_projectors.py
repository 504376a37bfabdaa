"""Files of image encoders next to models: found, opened, counted and used."""

from __future__ import annotations

import io
import json
import shutil
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from byte_models import PRINTABLE, write_model

import hotset
from hotset.errors import HotsetError, InvalidRequestError
from hotset.images import PICTURE_BYTES
from hotset.storage import elsewhere, store
from hotset.storage.hub import HubFile, select_files
from hotset.storage.projectors import best, projector_of

tiny_vision = pytest.importorskip("tiny_vision")
Image = pytest.importorskip("PIL.Image")

HOW: dict[str, Any] = {"device": "cpu", "n_threads": 2, "n_ctx": 1024}


@pytest.fixture(params=["idefics3", "gemma3", "qwen2.5vl", "qwen3vl", "llava-next", "internvl", "gemma4"])
def seeing(request: pytest.FixtureRequest, tmp_path: Path, run_folder: Path) -> Path:
    """Return a text model with the projector of a tiny random model next to it."""
    shutil.copy(tiny_vision.shared_encoder(request.param, run_folder), tmp_path / "mmproj-model-f16.gguf")
    return write_text_model(tmp_path)


def write_text_model(folder: Path) -> Path:
    keys = {"llama.context_length": 1024}
    return write_model(folder / "tiny.gguf", n_embd=tiny_vision.N_EMBD, **keys)


def image_file(size: tuple[int, int], kind: str = "PNG") -> bytes:
    file = io.BytesIO()
    Image.fromarray(tiny_vision.image_of(size)).save(file, kind)
    return file.getvalue()


def asks(image: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [{"type": "image", "image": image}, {"type": "text", "text": "?"}]}]


def bits(model: hotset.Model, image: Any) -> tuple[list[Any], int]:
    found = model.chat(asks(image), temperature=0, max_tokens=6, logprobs=1, logit_bias=PRINTABLE).completion
    return [(one.token, one.logprob) for one in found.logprobs], found.timings.reused_tokens


def test_a_model_reads_images_with_the_file_next_to_it(seeing: Path, tmp_path: Path):
    file = image_file((130, 61))
    with hotset.load(seeing, **HOW, cache_dir=tmp_path / "cache", cache_disk=1) as model:
        assert model.images is not None
        first, n_reused = bits(model, file)
        assert n_reused == 0
        path = tmp_path / "a.png"
        path.write_bytes(file)
        for image in (path, str(path), Image.open(path), file):
            assert bits(model, image)[0] == first
        assert model.images.counts.encoded == 1
        assert bits(model, image_file((64, 64)))[0] != first
        assert model.decided.reserved.images > model.decided.settings.image_cache_bytes + PICTURE_BYTES
    for how in ({"max_batch": 300}, {"cache_dir": tmp_path / "cache", "cache_disk": 1}):
        with hotset.load(seeing, **HOW | how) as model:
            assert bits(model, file)[0] == first


def test_a_limit_of_tokens_shortens_a_prompt(seeing: Path):
    n_tokens = []
    for limit in (None, 64):
        with hotset.load(seeing, **HOW, image_max_tokens=limit) as model:
            n_tokens.append(model.encode_chat(asks(image_file((130, 61)))).count(-1))
    assert n_tokens[1] <= min(64, n_tokens[0])


@pytest.mark.parametrize("data", [b"", b"GIF89a", b"\x89PNG\r\n\x1a\n" + bytes(40), b"hello"])
def test_a_damaged_image_is_one_clear_error(seeing: Path, data: bytes):
    with hotset.load(seeing, **HOW) as model, pytest.raises(InvalidRequestError) as error:
        model.chat(asks(data), temperature=0)
    assert "image" in str(error.value)


def test_no_mmproj_leaves_the_file_out(seeing: Path):
    with hotset.load(seeing, **HOW, no_mmproj=True) as model:
        assert model.images is None
        with pytest.raises(InvalidRequestError, match="no_mmproj leaves its projector out"):
            model.chat(asks(image_file((9, 20))), temperature=0)


def test_a_projector_of_another_model(tmp_path: Path, run_folder: Path):
    """Check that a file next to the model is left out with a warning, and that a named one is an error."""
    projector = tmp_path / "mmproj.gguf"
    shutil.copy(tiny_vision.shared_encoder("idefics3", run_folder), projector)
    path = write_model(tmp_path / "tiny.gguf")
    with pytest.warns(UserWarning, match="belongs to another model"):
        model = hotset.load(path, **HOW)
    with model:
        assert model.images is None
        with pytest.raises(InvalidRequestError, match="belongs to another model"):
            model.chat(asks(image_file((9, 20))), temperature=0)
        assert str(tmp_path) not in model.decided.blind
    with pytest.raises(HotsetError, match="belongs to another model"):
        hotset.load(path, **HOW, mmproj=projector)
    with pytest.raises(InvalidRequestError, match="cannot be combined"):
        hotset.load(path, **HOW, mmproj=projector, no_mmproj=True)


def test_text_keeps_its_bits_with_a_projector(seeing: Path):
    found = []
    for more in ({}, {"no_mmproj": True}):
        with hotset.load(seeing, **HOW, **more) as model:
            found.append(model.logits(np.arange(1, 200)))
    np.testing.assert_array_equal(*found)


# ---- names


@pytest.mark.parametrize(
    ("names", "model", "expected"),
    [
        (["mmproj-SmolVLM-256M-f16.gguf", "mmproj-other-7b.gguf"], "SmolVLM-256M-Instruct-Q8_0.gguf", 0),
        (["mmproj-model-f32.gguf", "mmproj-model-f16.gguf"], "gemma-3-4b-it-Q4_0.gguf", 1),
        (["mmproj-7b-Q8_0.gguf", "mmproj-3b-f16.gguf"], "Qwen2.5-VL-7B-Q4_K_M.gguf", 0),
    ],
)
def test_the_best_of_several_projectors(names: list[str], model: str, expected: int):
    assert best(names, model, any_name=True) == names[expected]


def test_a_folder_of_several_models_needs_a_fitting_name(tmp_path: Path):
    for name in ("one-1b.gguf", "two-2b.gguf", "mmproj-two-f16.gguf"):
        (tmp_path / name).write_bytes(b"GGUF")
    assert projector_of(tmp_path / "two-2b.gguf") == tmp_path / "mmproj-two-f16.gguf"
    assert projector_of(tmp_path / "one-1b.gguf") is None
    assert [path.name for path in store.complete_models(tmp_path)] == ["one-1b.gguf", "two-2b.gguf"]


def test_the_projector_of_a_model_of_ollama(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("OLLAMA_MODELS", str(tmp_path))
    monkeypatch.delenv("HOTSET_ELSEWHERE", raising=False)
    layers, blobs = [], []
    for kind, data in (("model", b"GGUF 1"), ("projector", b"GGUF 2")):
        digest = sha256(data).hexdigest()
        blobs.append(tmp_path / "blobs" / f"sha256-{digest}")
        blobs[-1].parent.mkdir(exist_ok=True)
        blobs[-1].write_bytes(data)
        layers.append({"mediaType": f"application/vnd.ollama.image.{kind}", "digest": f"sha256:{digest}"})
    manifest = tmp_path / "manifests/registry.ollama.ai/library/llava/latest"
    manifest.parent.mkdir(parents=True)
    manifest.write_text(json.dumps({"layers": layers}))
    assert projector_of(blobs[0]) == elsewhere.projector_of(blobs[0]) == blobs[1]
    assert [model.name for model in elsewhere.list_models() if model.source == "Ollama"] == ["llava:latest"]


def test_a_pull_brings_the_projector_along(monkeypatch: pytest.MonkeyPatch):
    names = ("model-Q4_K_M.gguf", "model-Q8_0.gguf", "mmproj-model-f32.gguf", "mmproj-model-f16.gguf")
    files = [HubFile(name, 1 << 20, None) for name in names]
    monkeypatch.setattr("hotset.storage.hub.repository_files", lambda _: ("main", files))
    found = select_files("owner/repository", "Q4_K_M")
    assert {file.path for file in found.files} == {"model-Q4_K_M.gguf", "mmproj-model-f16.gguf"}
    assert found.model == "model-Q4_K_M.gguf"
