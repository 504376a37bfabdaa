"""`hotset ps` and `hotset stop` query a running server; `hotset cp` and `hotset create` name models."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from byte_models import write_model
from cli_runs import inside, needs_core
from tiny_server import Serving

from hotset.server.catalogue import Catalogue
from hotset.server.models import Models
from hotset.server.settings import ServerSettings
from hotset.settings import LoadSettings
from hotset.storage import aliases, resolve

KEY = "sk-hotset"


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Yield the address of a server of two models, neither of which is loaded."""
    monkeypatch.setenv("HOTSET_API_KEY", KEY)
    (folder := tmp_path / "models").mkdir()
    for name in ("one", "two"):
        write_model(folder / f"{name}.gguf", n_layer=1)
    catalogue = Catalogue({}, folder=folder, with_store=False)
    catalogue.scan()
    load = LoadSettings(device="cpu", n_threads=1)
    with Serving(Models(catalogue, ServerSettings(api_keys=(KEY,)), load=load, budget=1 << 30)) as serving:
        yield serving.url


def ask(url: str, model: str) -> None:
    """Let a server load a model, by a request for one token."""
    request = urllib.request.Request(
        f"{url}/v1/completions",
        json.dumps({"model": model, "prompt": "a", "max_tokens": 1, "temperature": 0}).encode(),
        {"Content-Type": "application/json", "Authorization": f"Bearer {KEY}"},
    )
    urllib.request.urlopen(request).close()


@needs_core
def test_ps_lists_loaded_models_and_stop_unloads_them(server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert json.loads(inside("ps", "--url", server, "--json").stdout) == []
    for name in ("one", "two"):
        ask(server, name)
    shown = inside("ps", "--url", server)
    assert [line.split()[0] for line in shown.stdout.splitlines()[-3:] if line.strip()][-2:] == ["one", "two"]
    assert "in 5 min" in shown.stdout
    monkeypatch.setattr("hotset.cli.client.URL", server)  # the address that launch tries
    assert "one is unloaded" in inside("stop", "one").stderr
    assert [one["name"] for one in json.loads(inside("ps", "--json").stdout)] == ["two"]
    done = inside("stop", "three", returns=None)
    assert (done.returncode, "refuses: " in done.stderr, "'three'" in done.stderr) == (1, True, True)
    monkeypatch.setenv("HOTSET_API_KEY", "another")
    done = inside("ps", returns=None)
    assert (done.returncode, "wants an API key" in done.stderr) == (1, True)


@needs_core
def test_a_server_of_one_model_refuses_to_unload_it(tmp_path: Path) -> None:
    with Serving(write_model(tmp_path / "tiny.gguf", n_layer=1)) as serving:
        url = serving.url
        assert [one["name"] for one in json.loads(inside("ps", "--url", url, "--json").stdout)] == ["tiny"]
        done = inside("stop", "tiny", "--url", url, returns=1)
        assert "keeps its only model" in done.stderr


def test_ps_reports_that_no_server_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hotset.cli.client.URL", "http://127.0.0.1:9")
    for more, remedy in (((), "name another address with"), (("--url", "http://127.0.0.1:19"), "leave out")):
        done = inside("ps", *more, returns=1)
        assert f"or {remedy} --url." in " ".join(done.stderr.split())
    inside("stop", "one", "--url", "127.0.0.1:9", returns=2)


def listed() -> dict[str, tuple[str, int]]:
    return {one["name"]: (one["source"], one["size"]) for one in json.loads(inside("list", "--json").stdout)}


def test_cp_gives_a_model_a_second_name(home: Path, model: Path) -> None:
    (home / "models").mkdir(parents=True)
    (home / "models" / "tiny.gguf").symlink_to(model)
    size = model.stat().st_size
    assert "hotset run second" in inside("cp", "tiny", "second:latest").stderr
    inside("cp", "second", "third")
    inside("cp", model, "file")
    assert aliases.read() == {"second": "tiny", "third": "tiny", "file": str(model)}
    assert resolve("file") == model
    assert listed() == {
        "tiny": ("store", size),
        "second": ("alias of tiny", size),
        "third": ("alias of tiny", size),
        "file": (f"alias of {model}", size),
    }
    for taken in ("TINY", "third"):
        assert "already" in inside("cp", "second", taken, returns=2).stderr
    for words in (("cp", "nothing", "name"), ("cp", "tiny", "two words")):
        inside(*words, returns=2)


def test_create_adds_a_file_that_list_shows(home: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(model.parent)
    inside("create", "mine", model.name)
    assert resolve("mine") == model
    assert listed() == {"mine": (f"created from {model}", model.stat().st_size)}
    inside("create", "mine", model.name, "-f", "Modelfile", returns=2)
    model_of_a_file_that_is_gone = {"name": "lost", "size": None}
    aliases.add("lost", "nowhere.gguf")
    rows = json.loads(inside("list", "--json").stdout)
    assert model_of_a_file_that_is_gone.items() <= next(one for one in rows if one["name"] == "lost").items()
