"""The catalogue file: its entries, their names, their downloads, and the script that checks it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from fake_hub import FakeHub
from paths import ROOT

from hotset.errors import ModelNotFoundError
from hotset.model.architectures import ARCHITECTURES
from hotset.storage import catalogue, hub, resolve, store

LISTED = [entry for entry in catalogue.ENTRIES if entry.quant]
DATA = b"GGUF" + bytes(2000)


@pytest.fixture
def served(home: Path, hub: FakeHub) -> FakeHub:
    return hub


def test_entries_are_well_formed() -> None:
    names = [name for entry in catalogue.ENTRIES for name in (entry.name, *entry.aliases)]
    assert len(names) == len(set(names))
    assert all(name == name.lower() for name in names)
    for entry in LISTED:
        assert store.is_repository(entry.repo), entry.name
        assert entry.page == f"https://huggingface.co/{entry.repo}"
        assert hub.type_of(f"m-{entry.quant}.gguf") == entry.quant, entry.name
        assert entry.architecture in ("", *ARCHITECTURES), entry.name
        assert entry.size == 0 or entry.size > 10**7
        assert entry.file is None
        assert entry.is_checked or "not checked yet" in entry.needs


def test_the_documentation_has_every_name() -> None:
    text = (ROOT / "docs/reference/models.md").read_text("utf-8")
    assert [entry.name for entry in LISTED if f"`{entry.name}`" not in text] == []


def test_needs_follow_from_the_size() -> None:
    for entry in LISTED:
        if entry.size:
            n = int(entry.needs.split()[0])
            assert store.fits(entry.size, n * 2**30), entry.name


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("Gemma3:4B", "gemma-3-4b"),
        ("gemma3:4b:Q8_0", "gemma-3-4b:Q8_0"),
        ("qwen3-8b:Q8_0", "qwen3-8b:Q8_0"),
        ("hf.co/Owner/Repo:Q4_K_M", "hf:Owner/Repo:Q4_K_M"),
        ("huggingface.co/Owner/Repo", "hf:Owner/Repo"),
        ("nothing:4b", "nothing:4b"),
        ("m.gguf", "m.gguf"),
    ],
)
def test_canonical_names(name: str, expected: str) -> None:
    assert catalogue.canonical(name) == expected


def test_find_knows_aliases_and_quantisations() -> None:
    entry = catalogue.BY_NAME["qwen3-8b"]
    for name in ("qwen3-8b", "Qwen3:8B", "qwen3-8b:q6_k", "qwen3:8b:UD-Q4_K_XL"):
        assert catalogue.find(name) is entry
    assert catalogue.find("qwen3-8b:nonsense") is None
    assert catalogue.find_repository(entry.repo) is None  # it is one of several files there


def test_a_pull_takes_the_quantisation_that_is_listed_or_named(served: FakeHub) -> None:
    entry = catalogue.BY_NAME["qwen3-8b"]
    served.repositories[entry.repo] = {f"Qwen3-8B-{kind}.gguf": DATA for kind in ("Q4_K_M", "Q8_0", "BF16")}
    path = resolve("qwen3:8b")
    assert path == store.models_folder() / "qwen3-8b" / "Qwen3-8B-Q4_K_M.gguf"
    served.requests.clear()
    for name in ("qwen3-8b", "QWEN3:8B", "qwen3-8b:q4_k_m"):
        assert resolve(name, download=False) == path
    assert served.requests == []
    larger = resolve("qwen3-8b:Q8_0")
    assert larger.name == "Qwen3-8B-Q8_0.gguf"
    assert resolve("qwen3-8b", download=False) == path
    assert resolve("qwen3-8b:Q8_0", download=False) == larger
    with pytest.raises(ModelNotFoundError, match="has no file Q5_K_M"):
        resolve("qwen3-8b:Q5_K_M")
    # Under its repository's name it is a separate model.
    assert resolve(f"hf.co/{entry.repo}:Q8_0").parent.name == entry.repo.replace("/", "--")


def test_one_that_was_pulled_in_another_quantisation_is_found(served: FakeHub) -> None:
    entry = catalogue.BY_NAME["qwen3-8b"]
    served.repositories[entry.repo] = {"Qwen3-8B-Q8_0.gguf": DATA}
    path = resolve("qwen3-8b:Q8_0")
    assert resolve("qwen3-8b", download=False) == path


def test_the_script_compares_the_file_with_the_hub(tmp_path: Path) -> None:
    entries = {
        "right": {"repo": "a/right", "quant": "Q4_0", "size": 0, "architecture": "", "licence": "mit"},
        "gone": {"repo": "a/gone", "quant": "Q4_0", "size": 5, "architecture": "llama", "licence": ""},
        "other": {"repo": "a/other", "quant": "Q4_0", "size": 5, "architecture": "llama", "licence": "mit"},
        "strange": {"repo": "a/strange", "quant": "Q4_0", "size": 5, "architecture": "", "licence": ""},
    }
    file = tmp_path / "catalogue.json"
    rows = [
        {"name": name, **entry, "aliases": [], "checked": "2026-01-01"} for name, entry in entries.items()
    ]
    file.write_text(json.dumps(rows))
    with FakeHub() as fake:
        facts = {
            "a/right": ("llama", "mit"), "a/other": ("qwen3", "apache-2.0"), "a/strange": ("new", "mit"),
        }  # fmt: skip
        fake.repositories = {repo: {"m-Q4_0.gguf": DATA, "m-Q8_0.gguf": DATA * 2} for repo in facts}
        fake.details = {
            repo: {"gguf": {"architecture": kind}, "tags": [f"license:{licence}"]}
            for repo, (kind, licence) in facts.items()
        }
        environment = os.environ | {"HF_ENDPOINT": fake.url, "HF_HUB_OFFLINE": "0", "NO_PROXY": "127.0.0.1"}
        script = [
            sys.executable,
            str(ROOT / "packaging" / "check_catalogue.py"),
            "--write",
            "--file",
            str(file),
        ]
        done = subprocess.run(script, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stderr
    right, gone, other, strange = done.stdout.splitlines()
    assert right == "right: as on the hub"
    assert gone.startswith("gone: The Hugging Face hub has no repository a/gone")
    assert other == "other: its architecture is 'qwen3', not 'llama'; its licence is 'apache-2.0', not 'mit'"
    assert strange == "strange: hotset does not run the architecture 'new'"
    written = {row["name"]: row for row in json.loads(file.read_text())}
    assert (written["right"]["size"], written["right"]["architecture"]) == (len(DATA), "llama")
    assert written["right"]["checked"] > "2026-01-01"
    assert [written[name]["checked"] for name in ("gone", "other", "strange")] == [None, None, None]


@pytest.mark.parametrize(
    ("memory", "name"),
    [(1, "smollm2-135m"), (2, "smollm2-135m"), (4, "qwen3.5-0.8b"), (8, "qwen3.5-4b"), (128, "qwen3.5-4b")],
)
def test_the_default_model_takes_at_most_half_of_the_memory(memory: int, name: str) -> None:
    entry = catalogue.default_for(memory * 2**30)
    assert entry.name == name
    assert entry.licence == "apache-2.0"
    assert entry.unsupported is None
