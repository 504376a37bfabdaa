"""Models of Ollama, LM Studio and the Hugging Face cache: found by name, run in place, checked."""

from __future__ import annotations

import json
import os
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
from cli_runs import inside
from file_kinds import needs_links, needs_pipes
from tiny_server import write_model

from hotset.errors import ModelNotFoundError, UnsupportedModelError
from hotset.formats.gguf import open_gguf
from hotset.sparsity import sidecar
from hotset.storage import elsewhere, on_this_machine, resolve, store

WEIGHTS = "application/vnd.ollama.image.model"
ADAPTER = "application/vnd.ollama.image.adapter"
SMALL = b"GGUF and no more"


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Set up an empty home folder of a user, and return it."""
    for name in ("HOTSET_ELSEWHERE", "OLLAMA_MODELS", "HF_HOME", "HF_HUB_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name in ("HOME", "USERPROFILE"):
        monkeypatch.setenv(name, str(tmp_path))
    monkeypatch.setenv("HOTSET_HOME", str(tmp_path / "store"))
    return tmp_path


def put(path: Path, data: bytes = SMALL) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path


def ollama(root: Path, name: str, *layers: tuple[str, bytes]) -> list[Path]:
    """Create a model in Ollama's layout; return the files of its layers."""
    blobs = [put(root / "blobs" / f"sha256-{sha256(data).hexdigest()}", data) for _, data in layers]
    written = [
        {"mediaType": kind, "digest": blob.name.replace("-", ":"), "size": len(data)}
        for (kind, data), blob in zip(layers, blobs, strict=True)
    ]
    put(root / "manifests" / name, json.dumps({"schemaVersion": 2, "layers": written}).encode())
    return blobs


def names() -> dict[str, str]:
    return {model.name: model.source for model in elsewhere.list_models()}


def test_models_of_ollama_have_the_names_that_ollama_gives_them(home: Path):
    root = home / ".ollama" / "models"
    (blob,) = ollama(root, "registry.ollama.ai/library/llama3.2/latest", (WEIGHTS, SMALL))
    ollama(root, "registry.ollama.ai/someone/small/1b-q4_0", (WEIGHTS, SMALL), ("text/plain", b"a licence"))
    ollama(root, "hf.co/owner/Some-GGUF/Q4_K_M", (WEIGHTS, SMALL))
    ollama(root, "registry.ollama.ai/library/cloud/latest", ("application/json", b"{}"))
    assert names() == dict.fromkeys(
        ("llama3.2:latest", "someone/small:1b-q4_0", "hf.co/owner/Some-GGUF:Q4_K_M"), "Ollama"
    )
    for name in ("llama3.2", "llama3.2:latest", "LLAMA3.2", "hf.co/owner/some-gguf:q4_k_m"):
        assert resolve(name, download=False) == blob
    with pytest.raises(ModelNotFoundError):
        resolve("llama3.2:1b", download=False)


@needs_links
@pytest.mark.skipif(not Path("/proc/self/mem").is_file(), reason="needs a file that cannot be read")
def test_an_entry_that_cannot_be_read_hides_no_other(home: Path) -> None:
    """Create a broken link, circular links and an unreadable file in each program's folder."""
    root = home / ".ollama" / "models"
    for name in ("a", "b", "z"):
        ollama(root, f"registry.ollama.ai/library/{name}/latest", (WEIGHTS, SMALL + name.encode()))
    lm_studio = home / ".lmstudio" / "models"
    hub = home / ".cache" / "huggingface" / "hub"
    for name in ("a", "b", "c", "z"):
        put(lm_studio / "owner" / name / "model.gguf")
        put(hub / f"models--hub--{name}" / "snapshots" / "1" / "model.gguf")
    assert len(names()) == 11

    def replace(path: Path, target: str) -> None:
        path.unlink()
        path.symlink_to(target)

    replace(root / "blobs" / f"sha256-{sha256(SMALL + b'a').hexdigest()}", "/proc/self/mem")
    replace(root / "blobs" / f"sha256-{sha256(SMALL + b'b').hexdigest()}", "nowhere")
    replace(lm_studio / "owner" / "a" / "model.gguf", "/proc/self/mem")
    replace(lm_studio / "owner" / "b" / "model.gguf", "model.gguf")
    replace(lm_studio / "owner" / "c" / "model.gguf", "nowhere")
    replace(hub / "models--hub--a" / "snapshots" / "1" / "model.gguf", "/proc/self/mem")
    (hub / "models--hub--b" / "snapshots" / "2").symlink_to("nowhere")
    (hub / "models--hub--c" / "snapshots" / "2").symlink_to("2")
    assert names() == {
        "z:latest": "Ollama", "owner/z": "LM Studio", "hub/b": "Hugging Face cache",
        "hub/c": "Hugging Face cache", "hub/z": "Hugging Face cache",
    }  # fmt: skip


def test_a_model_with_an_adapter_is_not_run_without_it(home: Path):
    root = home / ".ollama" / "models"
    ollama(root, "registry.ollama.ai/library/tuned/latest", (WEIGHTS, SMALL), (ADAPTER, b"GGUF lora"))
    with pytest.raises(UnsupportedModelError, match="'tuned:latest' of Ollama is a model with an adapter"):
        resolve("tuned")


@pytest.mark.parametrize(
    "manifest",
    [
        "", "[]", "null", "{", "[" * 100_000, '{"layers": 3}', '{"layers": [3, null, []]}', "\xff",
        '{"layers": [{"mediaType": [], "digest": {}}]}',
        *(
            json.dumps({"layers": [{"mediaType": WEIGHTS, "digest": digest}]})
            for digest in (
                "sha256:../../../secret.gguf", "../../secret.gguf", "/etc/passwd", "sha256:" + "0" * 64,
                "sha256:" + "G" * 64, "sha256:", "md5:" + "0" * 32, 7, None, "sha256:" + "1" * 64 + "/../x",
            )
        ),
        '{"layers": []}' + " " * (1 << 20),
    ],
)  # fmt: skip
def test_hostile_manifest_is_not_a_model(home: Path, manifest: str):
    """Check that the other models are not affected."""
    root = home / ".ollama" / "models"
    ollama(root, "registry.ollama.ai/library/good/latest", (WEIGHTS, SMALL))
    put(home / "secret.gguf")
    put(root / "manifests" / "registry.ollama.ai" / "library" / "bad" / "latest", manifest.encode("latin-1"))
    assert names() == {"good:latest": "Ollama"}


@needs_pipes
def test_hostile_names_and_blobs_are_not_listed(home: Path):
    root = home / ".ollama" / "models"
    ollama(root, "registry.ollama.ai/library/\x1b[31mred/latest", (WEIGHTS, SMALL))
    ollama(root, "registry.ollama.ai/library/sp ace/latest", (WEIGHTS, SMALL))
    ollama(root, "registry.ollama.ai/library/two/latest", (WEIGHTS, SMALL), (WEIGHTS, SMALL + b"2"))
    ollama(root, "registry.ollama.ai/library/zip/latest", (WEIGHTS, b"PK\x03\x04"))
    (blob,) = ollama(root, "registry.ollama.ai/library/pipe/latest", (WEIGHTS, b"GGUF pipe"))
    blob.unlink()
    os.mkfifo(blob)  # reading it would wait forever
    (blob,) = ollama(root, "registry.ollama.ai/library/folder/latest", (WEIGHTS, b"GGUF folder"))
    blob.unlink()
    blob.mkdir()
    os.mkfifo(put(root / "manifests/registry.ollama.ai/library/p/x").with_name("latest"))
    assert names() == {}


@needs_links
def test_models_of_lm_studio_and_the_hugging_face_cache(home: Path):
    studio, hub = home / ".lmstudio" / "models", home / ".cache" / "huggingface" / "hub"
    one = put(studio / "publisher" / "One-GGUF" / "one-q4.gguf")
    put(studio / "publisher" / "One-GGUF" / "mmproj-one.gguf")
    put(studio / "publisher" / "Two-GGUF" / "two-q4.gguf")
    put(studio / "publisher" / "Two-GGUF" / "two-q8.gguf")
    put(home / ".cache" / "lm-studio" / "models" / "older" / "Three" / "three.gguf")
    blob = put(hub / "models--owner--Four-GGUF" / "blobs" / "abc")
    for revision in ("r1", "r2"):
        link = hub / "models--owner--Four-GGUF" / "snapshots" / revision / "q4" / "four.gguf"
        link.parent.mkdir(parents=True)
        link.symlink_to(blob)
    put(hub / "models--owner--Four-GGUF" / "refs" / "main", b"r1")
    gone = hub / "models--owner--Gone" / "snapshots" / "r" / "gone.gguf"
    gone.parent.mkdir(parents=True)
    gone.symlink_to(home / "nowhere")
    put(hub / "models--owner--Parts" / "snapshots" / "r" / "m-00001-of-00002.gguf")  # without the second part
    assert names() == {
        "older/Three": "LM Studio", "publisher/One-GGUF": "LM Studio",
        "publisher/Two-GGUF:two-q4.gguf": "LM Studio", "publisher/Two-GGUF:two-q8.gguf": "LM Studio",
        "owner/Four-GGUF": "Hugging Face cache",
    }  # fmt: skip
    assert resolve("hf:publisher/one-gguf") == resolve("publisher/One-GGUF") == one
    assert resolve("owner/Four-GGUF").parts[-4:] == ("snapshots", "r1", "q4", "four.gguf")
    with pytest.raises(ModelNotFoundError, match="Several models are called 'publisher/Two-GGUF'"):
        resolve("publisher/Two-GGUF")


def test_folders_follow_the_environment(home: Path, monkeypatch: pytest.MonkeyPatch):
    ollama(home / "a", "registry.ollama.ai/library/a/latest", (WEIGHTS, SMALL))
    put(home / "b" / "hub" / "models--o--b" / "snapshots" / "r" / "b.gguf")
    put(home / "c" / "models--o--c" / "snapshots" / "r" / "c.gguf")
    assert names() == {}
    monkeypatch.setenv("OLLAMA_MODELS", str(home / "a"))
    monkeypatch.setenv("HF_HOME", str(home / "b"))
    assert names() == {"a:latest": "Ollama", "o/b": "Hugging Face cache"}
    monkeypatch.setenv("HF_HUB_CACHE", str(home / "c"))
    assert set(names()) == {"a:latest", "o/c"}
    monkeypatch.setenv("HOTSET_ELSEWHERE", "0")
    assert names() == {}


def test_the_store_comes_first(home: Path):
    own = put(home / "store" / "models" / "owner--Same" / "own.gguf")
    put(home / ".lmstudio" / "models" / "owner" / "Same" / "theirs.gguf")
    ((model,), path) = on_this_machine(), resolve("owner/Same")
    assert (model.name, model.source, path) == ("owner/Same", "", own)


def test_ollamas_model_is_listed_shown_run_and_unchanged(home: Path):
    data = write_model(home / "tiny.gguf").read_bytes()
    root = home / ".ollama" / "models"
    (blob,) = ollama(root, "registry.ollama.ai/library/tiny/1b", (WEIGHTS, data))
    before = sorted(root.rglob("*"))
    listed: list[dict[str, Any]] = json.loads(inside("list", "--json").stdout)
    assert [(item["name"], item["source"], item["path"]) for item in listed] == [
        ("tiny:1b", "Ollama", str(blob))
    ]
    assert "Ollama" in inside("list").stdout
    done = inside("run", "tiny:1b", "hi", "--raw", "-n", "3", "--json", "--temp", "0")
    assert json.loads(done.stdout)["model"] == str(blob)
    assert "is a model of Ollama: delete it there" in inside("rm", "tiny:1b", returns=2).stderr
    assert sorted(root.rglob("*")) == before
    with open_gguf(blob) as gguf:  # what hotset builds from it is kept in hotset's own folder
        assert sidecar.places(gguf, "down", "f") == [store.home() / "cache" / "f" / "down.hotset.gguf"]
