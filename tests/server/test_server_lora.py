"""Adapters (LoRA) over HTTP: chosen by requests, listed, loaded and unloaded."""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from api_schemas import SCHEMAS
from byte_models import write_model
from tiny_adapters import random_pairs, write_adapter
from tiny_server import ClientAndService, client_of, client_to
from waiting import WATCHDOG

from hotset.engine.sampler import SamplingParams
from hotset.formats.gguf import open_gguf
from hotset.formats.lora import AdapterFile, LoraAdapter
from hotset.formats.quants import GGMLType
from hotset.model.config import config_from_gguf
from hotset.model.decoder import describe
from hotset.server.catalogue import Catalogue
from hotset.server.model_settings import ModelsFile
from hotset.server.models import Models
from hotset.server.settings import ServerSettings
from hotset.server.streams import ClientGoneError
from hotset.settings import LoadSettings

GREEDY = {"temperature": 0, "max_tokens": 8}
BY_PATH = {schema.url: schema for schema in SCHEMAS}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("lora")
    with open_gguf(write_model(folder / "tiny.gguf")) as gguf:
        graph = describe(config_from_gguf(gguf), gguf.tensors)
        for seed, name in enumerate(("one", "two")):
            write_adapter(folder / f"{name}.gguf", random_pairs(graph, gguf.tensors, seed=seed), alpha=2.0)
    return folder


def serving(folder: Path, *lora: str, **settings: Any) -> ClientAndService:
    paths = [str(folder / one) for one in lora]
    return client_of(folder / "tiny.gguf", load={"lora": paths}, **settings)


async def asked(client: httpx.AsyncClient, path: str = "/v1/completions", **more: Any) -> Any:
    """Return an answer's text."""
    found, _ = await BY_PATH[path].whole(client, BY_PATH[path].body(**GREEDY) | more)
    return found.text


async def test_requests_choose_adapters(folder: Path) -> None:
    """Use number, name, and in every API schema the model's name; concurrent requests give the same."""
    async with serving(folder, "one.gguf", "two.gguf:0") as (client, _):
        chosen: list[dict[str, Any]] = [
            {}, {"lora": []}, {"lora": [{"id": 0, "scale": 1}]}, {"lora": [{"id": "two", "scale": 0.5}]},
            {"lora": [{"id": 1, "scale": 0.5}]}, {"lora": [{"id": 0, "scale": 0.5}, {"id": 1}]},
            {"model": "tiny:two"}, {"lora": [{"id": "two"}]},
        ]  # fmt: skip
        one_by_one = [await asked(client, **each) for each in chosen]
        assert await asyncio.gather(*(asked(client, **each) for each in chosen)) == one_by_one
        default, none, one, half, same, both, named, two = one_by_one
        assert (default, half, named) == (one, same, two)  # by default the first has a scale of 1
        assert len({none, one, half, both, two}) == 5
        for path in BY_PATH:
            plain, other = await asked(client, path), await asked(client, path, model="tiny:two")
            assert plain != other, path
        listed = (await client.get("/v1/models")).json()["data"]
        assert [each["id"] for each in listed] == ["tiny", "tiny:one", "tiny:two"]
        assert listed[2]["parent"] == "tiny"


async def test_missing_adapters_are_errors(folder: Path) -> None:
    wrong: list[tuple[str, dict[str, Any], int, str]] = [
        ("/v1/completions", {"lora": [{"id": 7}]}, 400, "no adapter 7; the loaded ones are 0"),
        ("/v1/completions", {"lora": [{"id": "none"}]}, 400, "no adapter 'none'"),
        ("/v1/completions", {"lora": [{"id": 0, "scale": 1e9}]}, 400, "scale of an adapter"),
        ("/v1/completions", {"lora": {"id": 0}}, 400, "lora"),
        ("/v1/completions", {"lora": [{"id": 0}] * 101}, 400, "lora"),
        ("/v1/completions", {"model": "tiny:none"}, 404, "no adapter 'none'"),
        ("/v1/embeddings", {"model": "tiny:one", "input": "a"}, 404, "'tiny:one' is not served"),
    ]

    async with serving(folder, "one.gguf") as (client, _):
        for path, body, status, message in wrong:
            reply = await client.post(path, json={"model": "tiny", "prompt": "hello", **body})
            assert reply.status_code == status, reply.text
            assert message in reply.json()["error"]["message"]


async def test_adapters_are_loaded_scaled_and_unloaded(folder: Path) -> None:
    (folder / "link").symlink_to("/etc/passwd")
    async with serving(folder, lora_dir=str(folder)) as (client, service):
        plain = await asked(client)
        assert (await client.get("/lora-adapters")).json() == []
        given = {"lora_name": "first", "lora_path": "one.gguf"}
        loaded = await client.post("/v1/load_lora_adapter", json=given)
        entry = {"id": 0, "name": "first", "path": "one.gguf", "scale": 0.0}
        assert (loaded.status_code, loaded.json()) == (200, entry)
        assert await asked(client) == plain  # a loaded adapter is not used by default
        chosen = await asked(client, model="tiny:first")
        assert chosen != plain
        listed = (await client.get("/v1/models/tiny:first")).json()
        assert (listed["id"], listed["root"], listed["parent"]) == ("tiny:first", "first", "tiny")
        assert (await client.get("/v1/models/tiny:second")).status_code == 404
        scaled = await client.post("/lora-adapters", json=[{"id": 0, "scale": 1}])
        assert scaled.json() == (await client.get("/lora-adapters")).json() == [entry | {"scale": 1.0}]
        assert await asked(client) == chosen
        assert (await client.post("/lora-adapters", json=[])).json() == [entry]
        assert await asked(client) == plain
        again = await client.post("/v1/load_lora_adapter", json=given | {"lora_name": "second"})
        assert (again.status_code, "is loaded already" in again.text) == (400, True)
        taken = await client.post("/v1/load_lora_adapter", json=given | {"lora_path": "two.gguf"})
        assert (taken.status_code, "is called 'first' already" in taken.text) == (400, True)
        gone = await client.post("/v1/unload_lora_adapter", json={"lora_name": "first"})
        assert (gone.status_code, gone.json()) == (200, entry)
        assert (await client.get("/lora-adapters")).json() == []
        assert service.model.adapters.nbytes == 0
        for path, body, message in (
            ("load", given | {"lora_path": "none"}, "there is no such adapter"),
            ("load", given | {"lora_path": "/etc/passwd"}, "there is no such adapter"),
            ("load", given | {"lora_path": "../" * 20 + "etc/passwd"}, "there is no such adapter"),
            ("load", given | {"lora_path": "link"}, "there is no such adapter"),
            ("load", given | {"lora_path": "a\0b"}, "there is no such adapter"),
            ("load", given | {"lora_path": "a" * 3000}, "there is no such adapter"),
            ("load", given | {"lora_path": "tiny.gguf"}, "is not an adapter"),
            ("load", given | {"lora_name": "a/b"}, "lora_name"),
            ("load", {"lora_name": "a"}, "lora_path"),
            ("unload", {"lora_name": "first"}, "no adapter 'first'"),
            ("unload", {"lora_name": "first", "lora_int_id": 0}, "no adapter 'first'"),
            ("unload", {}, "lora_name is missing"),
        ):
            reply = await client.post(f"/v1/{path}_lora_adapter", json=body)
            assert reply.status_code == 400, reply.text
            assert message in reply.json()["error"]["message"]
        wrong = await client.post("/lora-adapters", json=[{"id": 3, "scale": 1}])
        assert wrong.status_code == 400
        assert "no adapter 3" in wrong.json()["error"]["message"]


async def test_a_disconnected_client_ends_the_load(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reading, left = threading.Event(), threading.Event()
    ended: list[BaseException | None] = []
    read = AdapterFile.read

    def slow(file: AdapterFile, check: Callable[[], object]) -> LoraAdapter:
        reading.set()
        assert left.wait(WATCHDOG)
        try:
            return read(file, check)
        except BaseException as error:
            ended.append(error)
            raise

    monkeypatch.setattr(AdapterFile, "read", slow)

    async with serving(folder, lora_dir=str(folder)) as (client, service):
        changes: list[int] = []  # of memory
        service.model.adapters.change_memory = changes.append
        given = {"lora_path": "one.gguf"}
        asking = asyncio.create_task(client.post("/v1/load_lora_adapter", json=given))
        await asyncio.to_thread(reading.wait)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        left.set()
        while len(changes) < 2:
            await asyncio.sleep(0.002)
        assert sum(changes) == 0 < changes[0]
        assert [type(error) for error in ended] == [ClientGoneError]
        assert (await client.get("/lora-adapters")).json() == []
        loaded = await client.post("/v1/load_lora_adapter", json=given)
        assert loaded.status_code == 200, loaded.text


async def test_without_a_folder_clients_cannot_load_adapters(folder: Path) -> None:
    async with serving(folder) as (client, _):
        reply = await client.post("/v1/load_lora_adapter", json={"lora_path": str(folder / "one.gguf")})
        assert (reply.status_code, "--lora-dir" in reply.text) == (403, True)


async def test_a_requests_default_adapters_are_chosen_when_it_is_queued(folder: Path) -> None:
    """An adapter may be unloaded between the preparation of a request and its queueing."""
    async with serving(folder, "one.gguf") as (_, service):
        model = service.model
        sequence = model.engine.prepare(model.encode("hello"), SamplingParams(temperature=0, max_tokens=2))
        model.adapters.unload("one")
        model.thread.submit(sequence)
        while sequence.finish_reason is None:
            await asyncio.sleep(0.01)
        assert sequence.error is None


async def test_who_may_change_adapters(folder: Path) -> None:
    """Keys that may manage; without keys only this machine, and no page of another origin."""
    async with serving(folder) as (client, _):
        for path, body in (
            ("/lora-adapters", []),
            ("/v1/load_lora_adapter", {"lora_path": str(folder / "one.gguf")}),
            ("/v1/unload_lora_adapter", {"lora_name": "one"}),
        ):
            reply = await client.post(path, json=body, headers={"x-forwarded-for": "10.0.0.1"})
            assert reply.status_code == 403, path
        assert (await client.get("/lora-adapters")).json() == []


async def test_models_in_a_file_have_their_own_adapters(folder: Path) -> None:
    """The paths in `load = { lora = [...] }` are relative to the file's folder."""
    text = """
    [models.tiny]
    load = { lora = ["one.gguf:0", "two.gguf"] }
    [models.plain]
    model = "tiny.gguf"
    """
    (folder / "models.toml").write_text(text)
    file = ModelsFile.read(folder / "models.toml")
    assert file.models["tiny"].load["lora"] == [
        [str(folder / "one.gguf"), 0.0],
        [str(folder / "two.gguf"), 1.0],
    ]

    catalogue = Catalogue({"tiny": folder / "tiny.gguf"}, file=file)
    catalogue.scan()
    models = Models(catalogue, load=LoadSettings(device="cpu", n_threads=1), budget=1 << 33)
    async with client_to(models) as client:
        plain = await asked(client, model="plain")
        two = await asked(client)
        assert await asked(client, model="tiny:two") == two != plain
        assert await asked(client, lora=[]) == plain
        assert len({plain, two, await asked(client, model="tiny:one")}) == 3
        listed = await client.get("/lora-adapters?model=tiny")
        assert [(each["name"], each["scale"]) for each in listed.json()] == [("one", 0.0), ("two", 1.0)]


def test_adapters_count_for_the_memory_of_all_models(folder: Path) -> None:
    """An idle model is unloaded for an adapter, which is refused if the models in use leave no room."""
    catalogue = Catalogue(dict.fromkeys(("tiny", "other"), folder / "tiny.gguf"))
    catalogue.scan()
    load = LoadSettings(device="cpu", n_threads=1, n_ctx=256)
    given = {"lora_name": "first", "lora_path": "one.gguf", "model": "tiny"}

    async def whole(room: Callable[[int, int], int]) -> tuple[int, Models]:
        """Return the status of loading an adapter while another model is idle.

        room: gives the budget for the bytes of a model and of the adapter.
        """
        models = Models(catalogue, ServerSettings(lora_dir=str(folder)), load=load, budget=1 << 33)
        async with client_to(models) as client:
            for name in ("other", "tiny"):
                await asked(client, model=name)
            slot = models.slots["tiny"]
            before = slot.n_bytes
            with open_gguf(folder / "one.gguf") as gguf:
                adapter = sum(info.nbytes for info in gguf.tensors.values())
            models.budget = room(before, adapter)
            reply = await client.post("/v1/load_lora_adapter", json=given)
            if reply.status_code == 200:
                assert slot.n_bytes == before + adapter
                for again in (given, given | {"lora_path": "none"}):
                    assert (await client.post("/v1/load_lora_adapter", json=again)).status_code == 400
                assert slot.n_bytes == before + adapter
                unload = {"lora_name": "first", "model": "tiny"}
                assert (await client.post("/v1/unload_lora_adapter", json=unload)).status_code == 200
            else:
                assert reply.json()["error"]["code"] == "out_of_memory"
                assert "--max-memory" in reply.json()["error"]["message"]
            assert slot.n_bytes == before
            listed = await client.get("/lora-adapters?model=tiny")
            assert listed.json() == []
        return reply.status_code, models

    for room, status, unloads in (
        (lambda model, adapter: 2 * model + adapter, 200, 0),
        (lambda model, adapter: model + adapter, 200, 1),
        (lambda model, adapter: model + adapter - 1, 503, 1),
    ):
        found, models = asyncio.run(whole(room))
        count = models.metrics.registry.get_sample_value(
            "hotset_model_unloads_total", {"model": "other", "reason": "memory"}
        )
        assert (found, count or 0) == (status, unloads)


def test_an_adapter_counts_with_its_bytes_in_memory(folder: Path) -> None:
    """Quantized adapters are decoded, so the file is smaller."""
    with open_gguf(folder / "tiny.gguf") as gguf:
        graph = describe(config_from_gguf(gguf), gguf.tensors)
        pairs = random_pairs(graph, gguf.tensors, rank=32, names=lambda name: "attn" in name)
        path = write_adapter(folder / "blocks.gguf", pairs, type=GGMLType.Q8_0)
    with open_gguf(path) as gguf:
        floats = sum(4 * math.prod(info.shape) for info in gguf.tensors.values())
    assert floats > 2 * path.stat().st_size
    load = LoadSettings(device="cpu", n_threads=1, n_ctx=256)
    found = {}

    async def whole(lora: list[str]) -> None:
        file = _models_file(folder, lora)
        catalogue = Catalogue({"tiny": folder / "tiny.gguf"}, file=file)
        catalogue.scan()
        models = Models(catalogue, load=load, budget=1 << 33)
        async with client_to(models) as client:
            await asked(client)
            found[len(lora)] = models.slots["tiny"].n_bytes
            if lora:
                body = {"lora_name": "blocks", "model": "tiny"}
                assert (await client.post("/v1/unload_lora_adapter", json=body)).status_code == 200
                assert models.slots["tiny"].n_bytes == found[0]

    for lora in ([], ["blocks.gguf"]):
        asyncio.run(whole(lora))
    assert found[1] - found[0] == floats


def _models_file(folder: Path, lora: list[str]) -> ModelsFile:
    (folder / "own.toml").write_text(f"[models.tiny]\nload = {{ lora = {lora!r} }}")
    return ModelsFile.read(folder / "own.toml")
