"""`hotset serve`: the models that a command line selects, and refused command lines."""

from __future__ import annotations

import asyncio
import math
from pathlib import Path
from typing import Any

import pytest
from byte_models import write_model
from cli_runs import inside

from hotset.server.models import Models
from hotset.server.service import Service
from hotset.storage import store

GIB = 1 << 30


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOTSET_HOME", str(tmp_path / "home"))
    store.models_folder().mkdir(parents=True)
    return store.models_folder()


@pytest.fixture
def folder(tmp_path: Path, home: Path) -> Path:
    folder = tmp_path / "models"
    folder.mkdir()
    for name in ("one", "two"):
        write_model(folder / f"{name}.gguf", n_layer=1)
    write_model(home / "kept.gguf", n_layer=1)
    return folder


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Return a list that receives the services for which `serve` would listen."""
    found: list[Any] = []
    monkeypatch.setattr("hotset.server.listen.listen", lambda host, _: found.append(host))
    return found


def served(begun: list[Any], *words: object) -> Models:
    inside("serve", *map(str, words))
    (host,) = begun
    assert isinstance(host, Models)
    return host


def names(models: Models) -> list[str]:
    return sorted(model.name for model in models.catalogue.models)


def test_a_single_model_is_served(folder: Path, begun: list[Any]) -> None:
    inside("serve", str(folder / "one.gguf"), "-a", "mine")
    (service,) = begun
    assert isinstance(service, Service)
    assert (service.name, service.aliases) == ("mine", ("one",))


def test_without_a_model_the_store_is_served(folder: Path, begun: list[Any]) -> None:
    models = served(begun, "--max-memory", "2", "--keep-alive", "1h")
    assert names(models) == ["kept"]
    assert models.budget == 2 * GIB
    assert models.keep_alive == 3600


def test_the_memory_for_models_is_printed(folder: Path, begun: list[Any]) -> None:
    done = inside("serve", str(folder / "one.gguf"), str(folder / "two.gguf"), "--max-memory", "1")
    assert "2 models; memory limit for loaded models: 1.0 GiB" in done.stderr


def test_several_models_are_served_with_aliases(folder: Path, begun: list[Any]) -> None:
    models = served(begun, folder / "one.gguf", folder / "two.gguf", "-a", "gpt-4o=two", "--keep-alive", "-1")
    assert names(models) == ["one", "two"], "the store's are not"
    assert models.catalogue.find("GPT-4o:latest") == models.catalogue.find("two")
    assert models.first == ("one", "two")
    assert math.isinf(models.keep_alive)


def test_a_folder_is_served(folder: Path, begun: list[Any]) -> None:
    models = served(begun, folder)
    assert names(models) == ["one", "two"]
    assert models.first == (), "they are loaded when a request names them"
    assert models.budget > 0


def test_a_file_of_models_is_read(folder: Path, begun: list[Any], tmp_path: Path) -> None:
    path = tmp_path / "m.toml"
    path.write_text(
        'max_memory = 3\n[models.mine]\nmodel = "models/one.gguf"\n[models.kept]\nload = {n_ctx = 64}'
    )
    models = served(begun, "--models-file", path, "--ctx-size", "128")
    assert names(models) == ["kept", "mine"]
    assert models.budget == 3 * GIB
    lengths = {model.name: model.n_ctx for model in asyncio.run(models.listed())}
    assert lengths == {"kept": 64, "mine": 128}


def test_mcp_servers_are_named_by_a_file(
    folder: Path, begun: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "mcp.json"
    file.write_text('{"mcpServers": {"files": {"command": "npx", "autoApprove": ["read"]}}}')
    words = ("serve", str(folder / "one.gguf"), "--mcp", str(file))
    assert "files: autoApprove has no effect here" in " ".join(inside(*words).stderr.split())
    assert [one.name for one in begun[0].settings.mcp_servers] == ["files"]
    monkeypatch.setattr("hotset.cli.serve.find_spec", lambda name: None if name == "mcp" else name)
    done = inside(*words, returns=1)
    assert "need mcp; install it with: pip install '.[serve,mcp]'" in " ".join(done.stderr.split())
    assert len(begun) == 1


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("{folder}", "-a", "mine"), "write mine=MODEL"),
        (("{folder}/one.gguf", "{folder}/two.gguf", "--replicas", "2"), "one machine"),
        (("{folder}", "--keep-alive", "soon"), "--keep-alive must be a number of seconds, or a duration"),
        (("{folder}", "--lora", "{folder}/one.gguf"), "for one model"),
        (("{folder}/one.gguf", "{folder}/none.gguf"), "no file"),
        (("{folder}", "--models-file", "{folder}/one.gguf"), "larger|TOML|UTF-8"),
        (("{folder}", "--alias", "x=none"), "no model that is here"),
        (("{folder}/one.gguf", "{folder}/../again/one.gguf"), "both called"),
        (("{folder}/one.gguf", "--mcp", "{folder}/one.gguf"), "no JSON|UTF-8|larger"),
        (("{folder}/one.gguf", "-a", "a=one"), "with one model write --alias NAME"),
        (("{folder}/one.gguf", "--lora", "nope.gguf"), "there is no adapter"),
        (("{folder}/one.gguf", "--lora", "{folder}"), "has no adapter_config.json"),
        (
            ("{folder}/one.gguf", "--cache-disk", "1G"),
            "--cache-disk requires --cache-dir or --slot",
        ),
    ],
)
def test_wrong_arguments_are_refused(
    words: tuple[str, ...], said: str, folder: Path, begun: list[Any]
) -> None:
    (folder.parent / "again").mkdir()
    write_model(folder.parent / "again" / "one.gguf", n_layer=1)
    done = inside("serve", *(word.replace("{folder}", str(folder)) for word in words), returns=None)
    assert done.returncode in (1, 2), done.stdout
    assert any(part in " ".join(done.stderr.replace("│", " ").split()) for part in said.split("|")), (
        done.stderr
    )
    assert not begun
