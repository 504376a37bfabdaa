"""Several models in one server: loaded and unloaded within a memory budget, without effect on requests."""

from __future__ import annotations

import asyncio
import gc
import json
import random
import threading
import time
import weakref
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from tiny_server import MESSAGES, Serving, client_to, write_model
from waiting import until

import hotset
from hotset.errors import InvalidRequestError
from hotset.formats.gguf import GGUFFile, open_gguf
from hotset.loader.build import open_model
from hotset.server import models as models_module
from hotset.server.app import create_app
from hotset.server.catalogue import Catalogue
from hotset.server.model_settings import ModelsFile, until_unloaded
from hotset.server.models import Models
from hotset.server.pulls import Pulls, full_name
from hotset.server.settings import ServerSettings
from hotset.server.slots import LoadError, bytes_of
from hotset.settings import LoadSettings
from hotset.storage import aliases, store

NAMES = ("one", "two", "three")
PROMPTS = [f"{word} {i}" for i, word in enumerate(("hello", "well", "so", "which"))]
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 6, "ignore_eos": True}
LOAD = LoadSettings(device="cpu", n_threads=1, max_sequences=4, n_ctx=256, max_batch=64)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder of three models that answer differently."""
    folder = tmp_path_factory.mktemp("models")
    for i, name in enumerate(NAMES, 1):
        write_model(folder / f"{name}.gguf", n_layer=i)
    return folder


@pytest.fixture(scope="module")
def facts(folder: Path) -> dict[str, Any]:
    """Return, by model, the bytes that it needs, and its answer to each prompt without a server."""
    found = {}
    for name in NAMES:
        with hotset.load(folder / f"{name}.gguf", LOAD) as model:
            texts = {prompt: model.generate(prompt, **GREEDY).text for prompt in PROMPTS}
            found[name] = {"bytes": bytes_of(model), "texts": texts}
    return found


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return an empty store of models."""
    monkeypatch.setenv("HOTSET_HOME", str(tmp_path / "home"))
    store.models_folder().mkdir(parents=True)
    return store.models_folder()


def room_for(facts: dict[str, Any], *names: str) -> int:
    return sum(facts[name]["bytes"] for name in names)


def models_of(folder: Path | None, budget: int, settings: dict[str, Any] | None = None, **how: Any) -> Models:
    """Return the models of a folder or, without one, of the store. how: arguments of Models."""
    catalogue = Catalogue({}, folder=folder, with_store=folder is None, file=how.pop("file", None))
    catalogue.scan()
    catalogue.check()
    return Models(catalogue, ServerSettings(**(settings or {})), load=LOAD, budget=budget, **how)


@asynccontextmanager
async def serving(*args: Any, **how: Any) -> AsyncIterator[tuple[httpx.AsyncClient, Models]]:
    """Yield a client of a server of several models."""
    models = models_of(*args, **how)
    async with client_to(models) as client:
        yield client, models


async def answer(
    client: httpx.AsyncClient, model: str, prompt: str = PROMPTS[0], **more: Any
) -> httpx.Response:
    body = {"model": model, "prompt": prompt} | GREEDY | more
    return await client.post("/v1/completions", json=body)


async def changes(models: Models, done: Callable[[], bool]) -> None:
    """Wait until `done` is true."""
    async with asyncio.timeout(60):
        while not done():
            await models.changed()


def states(models: Models) -> dict[str, str]:
    return {name: state["value"] for name, state in models.states().items()}


async def test_a_damaged_file_is_read_again_after_a_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    opened: list[Path] = []

    def counted(path: Path) -> GGUFFile:
        opened.append(path)
        return open_gguf(path)

    monkeypatch.setattr("hotset.server.catalogue.open_gguf", counted)
    path = tmp_path / "tiny.gguf"
    path.write_bytes(b"GGUF")
    catalogue = Catalogue({"tiny": path})
    assert [catalogue.facts(path) for _ in range(3)] == [None] * 3
    assert len(opened) == 1
    write_model(path)
    assert [catalogue.facts(path) is not None for _ in range(3)] == [True] * 3
    assert len(opened) == 2


async def test_200_requests_over_three_models_with_room_for_two(folder: Path, facts: dict[str, Any]) -> None:
    """Check every answer, and that memory always stays within the budget."""
    budget = room_for(facts, "two", "three")
    assert budget < room_for(facts, *NAMES)
    rng = random.Random(7)
    requests = [(rng.choice(NAMES), rng.choice(PROMPTS)) for _ in range(200)]
    most = []

    async with serving(folder, budget, settings={"max_queue": 200}) as (client, models):

        async def watch() -> None:
            while True:
                most.append(sum(slot.n_bytes for slot in models.slots.values()))
                await models.changed()

        watching = asyncio.create_task(watch())
        at_once = asyncio.Semaphore(24)

        async def one(name: str, prompt: str) -> None:
            async with at_once:
                reply = await answer(client, name, prompt)
            assert reply.status_code == 200, reply.text
            assert reply.json()["model"] == name
            assert reply.json()["choices"][0]["text"] == facts[name]["texts"][prompt]

        await asyncio.gather(*(one(*request) for request in requests))
        watching.cancel()
        text = (await client.get("/metrics")).text
        lines = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
        unloads = sum(float(n) for name, n in lines.items() if name.startswith("hotset_model_unloads_total"))
        print("unloads", unloads)
        assert unloads >= 1
        assert float(lines['hotset_answers_total{reason="length"}']) == 200
        assert sorted(states(models).values()) == ["loaded", "loaded"]
    assert 0 < max(most) <= budget


def test_an_unloaded_model_leaves_nothing(folder: Path, facts: dict[str, Any]) -> None:
    """Check that its objects are freed without the garbage collector and its file is unmapped."""
    was_enabled = gc.isenabled()

    async def work() -> None:
        async with serving(folder, room_for(facts, *NAMES)) as (client, models):
            assert (await answer(client, "two")).status_code == 200
            service = models.slots["two"].service
            assert service is not None
            model = service.model
            parts = model, model.engine, model.backend, model.weights, model.gguf, model.tokenizer, service
            gone = [weakref.ref(part) for part in parts]
            del service, model, parts
            gc.collect()  # cycles of the client
            gc.disable()
            reply = await client.post("/models/unload", json={"model": "two"})
            assert reply.json() == {"success": True}
            assert states(models) == {}
            # A thread releases the model slightly after its result is available.
            until(lambda: all(ref() is None for ref in gone), "something of the model is left")
            if (maps := Path("/proc/self/maps")).is_file():
                assert str(folder / "two.gguf") not in maps.read_text()
            assert (await answer(client, "two")).status_code == 200, "it is loaded again"

    try:
        asyncio.run(work())
    finally:
        if was_enabled:
            gc.enable()


async def test_the_least_recently_used_model_is_unloaded(folder: Path, facts: dict[str, Any]) -> None:
    async with serving(folder, room_for(facts, "two", "three")) as (client, models):
        for name in ("one", "two", "one", "three"):
            assert (await answer(client, name)).status_code == 200
        assert states(models) == {"one": "loaded", "three": "loaded"} or (
            room_for(facts, "one", "three") > models.budget
        )
        assert (await client.get("/props")).json()["model_alias"] == "three", "the last one, by default"


async def test_a_model_that_answers_is_not_unloaded(folder: Path, facts: dict[str, Any]) -> None:
    """Another model that needs its memory waits, and later requests for it wait too. All are answered."""
    async with serving(folder, room_for(facts, "three")) as (client, models):
        assert (await answer(client, "three")).status_code == 200
        held: list[Any] = []
        assert models.at_once("three", held, required=True) is not None  # a request that continues
        other = asyncio.create_task(answer(client, "one"))
        await changes(models, lambda: models.slots["three"].is_victim)
        again = asyncio.create_task(answer(client, "three", PROMPTS[1]))
        await changes(models, lambda: len(models.slots["three"].waiting) == 1)
        assert models.slots["three"].state == "loaded"
        assert not other.done()
        models.release(held[0])
        assert (await other).json()["choices"][0]["text"] == facts["one"]["texts"][PROMPTS[0]]
        assert (await again).json()["choices"][0]["text"] == facts["three"]["texts"][PROMPTS[1]]


async def test_a_cancelled_request_keeps_the_other_model_loaded(folder: Path, facts: dict[str, Any]) -> None:
    """Cancel a request that waits for memory: the other model's requests are answered."""
    async with serving(folder, room_for(facts, "three")) as (client, models):
        assert (await answer(client, "three")).status_code == 200
        held: list[Any] = []
        assert models.at_once("three", held, required=True) is not None
        other = asyncio.create_task(answer(client, "one"))
        await changes(models, lambda: models.slots["three"].is_victim)
        behind = asyncio.create_task(answer(client, "three"))
        await changes(models, lambda: len(models.slots["three"].waiting) == 1)
        other.cancel()
        await asyncio.gather(other, return_exceptions=True)
        assert (await behind).status_code == 200, "beside the request that goes on"
        await changes(models, lambda: states(models) == {"three": "loaded"})
        models.release(held[0])
        assert models.slots["three"].holds == 0
        assert not models.slots["one"].waiting


def test_events_of_a_load(folder: Path, facts: dict[str, Any]) -> None:
    """/models/events reports changes of models, to a client that receives them immediately."""
    with Serving(models_of(folder, room_for(facts, *NAMES))) as serving:
        with serving.client.stream("GET", "/models/events") as stream:
            lines = stream.iter_lines()
            assert serving.client.post("/models/load", json={"model": "three"}).json() == {"success": True}
            seen: list[str] = []
            while seen[-1:] != ["loaded"]:
                if (line := next(lines)).startswith("data: "):
                    event = json.loads(line.removeprefix("data: "))
                    assert event["model"] == "three"
                    seen.append(event["value"])
        assert list(dict.fromkeys(seen))[-2:] == ["loading", "loaded"]


async def test_a_failed_load_does_not_affect_the_other_models(
    folder: Path, facts: dict[str, Any], tmp_path: Path
) -> None:
    for name in NAMES[:2]:
        (tmp_path / f"{name}.gguf").symlink_to(folder / f"{name}.gguf")
    content = (folder / "three.gguf").read_bytes()
    (tmp_path / "torn.gguf").write_bytes(content[: len(content) // 2])
    (tmp_path / "strange.gguf").write_bytes(content.replace(b"llama", b"lxxma"))

    async with serving(tmp_path, room_for(facts, *NAMES)) as (client, models):
        assert (await answer(client, "one")).status_code == 200
        for name, said in (("torn", "cut short"), ("strange", "lxxma")):
            first, second = await asyncio.gather(answer(client, name), answer(client, name))
            for reply in (first, second, await answer(client, name)):
                error = reply.json()["error"]
                assert (reply.status_code, error["code"]) == (500, "model_load_failed"), reply.text
                assert f"the model '{name}' could not be loaded" in error["message"]
                assert said in error["message"]
                assert str(tmp_path) not in error["message"]
        assert str(tmp_path) not in (await client.get("/models")).text
        chat = await client.post("/api/chat", json={"model": "torn", "messages": MESSAGES})
        assert "could not be loaded" in chat.json()["error"]
        assert states(models)["one"] == "loaded", "nothing made room for what cannot be loaded"
        assert (await answer(client, "two")).status_code == 200
        text = (await client.get("/metrics")).text
        assert 'hotset_model_loads_total{model="torn",result="failed"}' in text


async def test_a_draft_model_counts_for_the_memory_of_all_models(
    folder: Path, facts: dict[str, Any], tmp_path: Path
) -> None:
    draft = folder / "one.gguf"
    path = _written(tmp_path / "models.toml", f'[models.two]\nload = {{ draft = "{draft}" }}')
    needed = facts["two"]["bytes"] + draft.stat().st_size

    for budget in (needed, 1 << 33):
        async with serving(folder, budget, file=ModelsFile.read(path)) as (client, models):
            reply = await answer(client, "two")
            if reply.status_code == 200:
                assert reply.json()["choices"][0]["text"] == facts["two"]["texts"][PROMPTS[0]]
                assert needed < models.slots["two"].n_bytes <= budget
            else:
                assert (reply.status_code, reply.json()["error"]["code"]) == (503, "out_of_memory")
                assert budget <= needed


async def test_a_model_that_is_too_large_is_refused(
    folder: Path, facts: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(models_module, "FAILED_SECONDS", 0.0)
    async with serving(folder, room_for(facts, "one")) as (client, models):
        for _ in range(2):
            assert (await answer(client, "one")).status_code == 200
            reply = await answer(client, "three")
            assert reply.status_code == 503
            assert reply.json()["error"]["code"] == "out_of_memory"
            assert "--max-memory" in reply.json()["error"]["message"]
        assert states(models)["one"] == "loaded", "what it needs is known: nothing was unloaded in vain"


@pytest.mark.parametrize(
    "name",
    [
        "none", "../one", "../../etc/passwd", "/etc/passwd", "one.gguf/../two", "file:///etc/passwd",
        "hf:owner/repository", "smollm2-135m", "one\x00", "o" * 5000, "*", "{folder}/one.gguf", "~/one", "",
    ],
)  # fmt: skip
async def test_a_name_is_never_a_path(name: str, folder: Path, facts: dict[str, Any]) -> None:
    """A name is one of the server's models or unknown: no file is opened or fetched."""
    named = name.replace("{folder}", str(folder))

    async with serving(folder, room_for(facts, *NAMES)) as (client, models):
        missing = 400 if not named else 404
        assert (await answer(client, named)).status_code == missing
        for path, body in (
            ("/api/chat", {"messages": MESSAGES}), ("/api/show", {}), ("/models/load", {}),
            ("/models/unload", {}), ("/v1/messages", {"messages": MESSAGES, "max_tokens": 1}),
        ):  # fmt: skip
            reply = await client.post(path, json={"model": named} | body)
            assert reply.status_code in ((400, 404) if not named else (404,)), (path, reply.text)
        deleted = await client.request("DELETE", "/api/delete", json={"model": named})
        assert deleted.status_code == missing, deleted.text
        assert states(models) == {}


async def test_lists(folder: Path, facts: dict[str, Any]) -> None:
    async with serving(folder, room_for(facts, *NAMES)) as (client, _):
        assert (await client.get("/health")).json() == {"status": "ok"}
        listed = (await client.get("/v1/models")).json()["data"]
        assert {one["id"]: one["status"] for one in listed} == {name: {"value": "unloaded"} for name in NAMES}
        assert (await client.get("/models")).json()["data"] == listed
        assert (await client.get("/api/ps")).json() == {"models": []}
        no_name = await client.get("/props")
        assert no_name.status_code == 400
        assert "name a model" in no_name.json()["error"]["message"]
        asked = {"model": "two:latest", "prompt": "hello", "stream": False, "keep_alive": "1h"}
        assert (
            await client.post("/api/generate", json=asked | {"options": {"num_predict": 2, "temperature": 0}})
        ).is_success
        (running,) = (await client.get("/api/ps")).json()["models"]
        assert (running["name"], running["context_length"]) == ("two", 256)
        assert not running["expires_at"].startswith("9999")
        one = (await client.get("/v1/models/two")).json()
        status = one["status"]
        assert (status["value"], status["memory"]) == ("loaded", facts["two"]["bytes"])
        assert 0 < status["cache"] < status["memory"]
        tags = {one["name"]: one for one in (await client.get("/api/tags")).json()["models"]}
        assert sorted(tags) == sorted(NAMES)
        shown = [(await client.post("/api/show", json={"model": name})).json() for name in ("one", "two")]
        assert [show["template"] for show in shown] == [shown[1]["template"]] * 2
        assert [show["details"]["family"] for show in shown] == ["llama", "llama"]
        assert (await client.get("/props", params={"model": "two"})).json()["model_alias"] == "two"
        assert (await client.post("/tokenize", json={"content": "a", "model": "one"})).is_success


async def test_keep_alive(folder: Path, facts: dict[str, Any]) -> None:
    async with serving(folder, room_for(facts, *NAMES), keep_alive=0.0) as (client, models):
        assert (await answer(client, "one")).status_code == 200
        await changes(models, lambda: not models.states())  # the server's default: immediately
        stays = {
            "model": "two",
            "prompt": "hello",
            "stream": False,
            "options": {"num_predict": 2, "temperature": 0},
        }
        reply = await client.post("/api/generate", json=stays | {"keep_alive": -1})
        assert reply.is_success, reply.text
        assert (await answer(client, "two")).status_code == 200
        assert states(models) == {"two": "loaded"}
        reply = await client.post("/api/generate", json={"model": "two", "keep_alive": 0})
        assert reply.json()["done_reason"] == "unload"
        assert states(models) == {}
        reply = await client.post("/api/generate", json={"model": "two", "keep_alive": "1m"})
        assert reply.json()["done_reason"] == "load"
        assert states(models) == {"two": "loaded"}
        wrong = await client.post("/api/generate", json=stays | {"keep_alive": "soon"})
        assert wrong.status_code == 400
        assert "keep_alive" in wrong.json()["error"]
        reply = await client.post("/api/generate", json={"model": "two", "keep_alive": "0h0m"})
        assert reply.json()["done_reason"] == "unload"
        unloads = 'hotset_model_unloads_total{model="one",reason="idle"} 1.0'
        assert unloads in (await client.get("/metrics")).text


async def test_pinned_models_and_settings_per_model(
    folder: Path, facts: dict[str, Any], tmp_path: Path
) -> None:
    (tmp_path / "own.jinja").write_text("{{ bos_token }}{% for m in messages %}<{{ m.content }}>{% endfor %}")
    path = tmp_path / "models.toml"
    path.write_text(f"""
        max_memory = 0.5
        keep_alive = "2m"
        [default]
        load = {{ n_ctx = 192 }}
        [models.three]
        aliases = ["gpt-4o", "big"]
        pinned = true
        load = {{ n_ctx = 128 }}
        sampling = {{ temperature = 0, max_tokens = 3 }}
        [models.mine]
        model = "{folder / "one.gguf"}"
        template = "own.jinja"
    """)
    file = ModelsFile.read(path)
    assert (file.max_memory, file.keep_alive) == (0.5, 120.0)

    budget = room_for(facts, "two", "three")
    async with serving(folder, budget, file=file) as (client, models):
        assert states(models) == {"three": "loaded"}, "a pinned one is there at the start"
        for _ in range(2):
            for name in ("two", "mine"):
                assert (await answer(client, name)).status_code == 200
        assert states(models)["three"] == "loaded"
        assert models.slots["three"].expires is None
        reply = await client.post("/api/generate", json={"model": "big", "keep_alive": 0})
        assert reply.json()["done_reason"] == "load"
        assert states(models)["three"] == "loaded", "a pinned one stays"
        short = await client.post("/v1/completions", json={"model": "GPT-4o", "prompt": "hello"})
        assert short.json()["model"] == "three"
        assert short.json()["usage"]["completion_tokens"] == 3
        plain = await client.post("/v1/chat/completions", json={"model": "big", "messages": MESSAGES})
        again = await client.post("/v1/chat/completions", json={"model": "big", "messages": MESSAGES})
        assert plain.json()["choices"][0] == again.json()["choices"][0], "temperature 0"
        longer = {"model": "big", "prompt": "hello", "max_tokens": 5, "ignore_eos": True}
        reply = await client.post("/v1/completions", json=longer)
        assert reply.json()["usage"]["completion_tokens"] == 5, "a request's own value counts"
        props = {
            name: (await client.get("/props", params={"model": name})).json() for name in ("big", "mine")
        }
        assert props["big"]["default_generation_settings"]["n_ctx"] == 128
        assert props["big"]["default_generation_settings"]["params"]["temperature"] == 0
        assert props["mine"]["default_generation_settings"]["n_ctx"] == 192
        assert props["mine"]["chat_template"].startswith("{{ bos_token }}{% for m in messages %}<")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("max_memory = 'much'", "max_memory"),
        ("budget = 3", "has no 'budget'"),
        ("[models.one]\npined = true", "did you mean pinned"),
        ("[models.one]\nload = { n_ctx = 0 }", "models.one"),
        ("[models.one]\nload = { progress = 1 }", "has no 'progress'"),
        ("[models.one]\nsampling = { temperature = -1 }", "temperature"),
        ("[models.one]\nsampling = { logprobs = 3 }", "has no 'logprobs'"),
        ("[models.one]\nkeep_alive = 'x'", "keep_alive"),
        ("[models.one]\naliases = ['../up']", "a name has letters"),
        ("[models.one]\ntemplate = 'none.jinja'", "none.jinja"),
        ("[default]\npinned = true", "no model, aliases or pinned"),
        ("models = 3", "models is a table"),
        ("[models.one", "not a TOML file"),
        ("[models.four]", "is about no model that is here"),
        ("[models.one]\naliases = ['two']", "names 'two' too"),
    ],
)
def test_a_wrong_file_of_models_is_refused(text: str, said: str, folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "models.toml"
    path.write_text(text)
    with pytest.raises(InvalidRequestError, match=said):
        models_of(folder, 1, file=ModelsFile.read(path))


def test_contradictory_settings_are_refused(folder: Path, tmp_path: Path) -> None:
    path = _written(tmp_path / "m.toml", "[models.one]\nload = { device = 'reference' }")
    catalogue = Catalogue({}, folder=folder, file=ModelsFile.read(path))
    with pytest.raises(InvalidRequestError, match="reference"):
        Models(catalogue, load=LoadSettings(ram_budget=1.0), budget=1)


def test_durations() -> None:
    given = [0, "0", 5, "5", 1.5, "10m", "1h30m", "300ms", "24h", -1, "-1", "-1s", 1e300]
    seconds = [until_unloaded(one) for one in given]
    inf = float("inf")
    assert seconds == [0, 0, 5, 5, 1.5, 600, 5400, 0.3, 86400, inf, inf, inf, inf]
    for wrong in ("", "m", "5 m", "1d", "nan", float("nan"), "1" * 40, "1m" * 100, "9" * 50_000, True):
        began = time.perf_counter()
        with pytest.raises(InvalidRequestError, match="keep_alive"):
            until_unloaded(wrong)
        assert time.perf_counter() - began < 0.5, "a client's text is refused before it is searched"


async def test_management_needs_a_key_or_this_machine(folder: Path, facts: dict[str, Any]) -> None:
    asked = [
        ("POST", "/models/load"),
        ("POST", "/models/unload"),
        ("POST", "/api/pull"),
        ("DELETE", "/api/delete"),
    ]
    local = {"host": "localhost"}

    async def status(client: httpx.AsyncClient, where: tuple[str, str], **headers: str) -> int:
        body = {"model": "none"} | ({"stream": False} if "pull" in where[1] else {})
        return (await client.request(*where, json=body, headers=local | headers)).status_code

    budget = room_for(facts, "one")
    elsewhere = {"allowed_hosts": ("*",), "cors_origins": ("*",)}
    async with serving(folder, budget, settings=elsewhere) as (client, models):
        for where in asked:
            assert await status(client, where) == 404
            assert await status(client, where, origin="https://page.example") == 403
            for by_proxy in ("x-forwarded-for", "x-forwarded-proto", "x-real-ip", "via"):
                assert await status(client, where, **{by_proxy: "10.0.0.5"}) == 403
        for address in (("10.0.0.5", 7), None):  # None: the client has reset the connection
            transport = httpx.ASGITransport(create_app(models), client=address)  # type: ignore[arg-type]
            async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as remote:
                for where in asked:
                    assert await status(remote, where) == 403
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as remote:
            assert (await remote.get("/v1/models")).status_code == 200
    async with serving(folder, budget, settings={"api_keys": ("secret",)}) as (_, models):
        transport = httpx.ASGITransport(create_app(models), client=("10.0.0.5", 7))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as remote:
            for where in asked:
                assert await status(remote, where) == 401
                assert await status(remote, where, authorization="Bearer secret") == 404


async def test_copy_and_delete(facts: dict[str, Any], home: Path, folder: Path, tmp_path: Path) -> None:
    for name in NAMES[:2]:
        (home / f"{name}.gguf").write_bytes((folder / f"{name}.gguf").read_bytes())
    outside = tmp_path / "outside.gguf"
    outside.write_bytes((folder / "three.gguf").read_bytes())
    file = ModelsFile.read(
        _written(tmp_path / "m.toml", f"[models.three]\nmodel = '{outside}'\naliases = ['3']")
    )

    async with serving(None, room_for(facts, *NAMES), file=file) as (client, models):

        async def copy(source: str, destination: str) -> int:
            body = {"source": source, "destination": destination}
            return (await client.post("/api/copy", json=body)).status_code

        async def delete(name: str) -> int:
            return (await client.request("DELETE", "/api/delete", json={"model": name})).status_code

        assert await copy("one", "gpt/small:8b") == 200
        assert (await answer(client, "GPT/small:8b")).json()["model"] == "one"
        assert await copy("none", "other") == 404
        assert await copy("one", "two") == 409
        assert [await copy("one", bad) for bad in ("../up", "a b", "/etc/x", "x" * 200)] == [400] * 4
        assert aliases.read() == {"gpt/small:8b": "one"}
        assert await delete("gpt/small:8b") == 200
        assert (await answer(client, "gpt/small:8b")).status_code == 404
        assert await delete("one") == 200
        assert not (home / "one.gguf").exists()
        assert (await answer(client, "one")).status_code == 404
        assert "one" not in states(models)
        assert [await delete("three"), await delete("3"), await delete("one")] == [403, 403, 404]
        assert outside.is_file()
        assert (await answer(client, "3")).json()["model"] == "three"


def _written(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


async def test_a_model_that_is_added_later_is_found(
    facts: dict[str, Any], home: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(None, room_for(facts, "one")) as (client, _):
        assert (await answer(client, "one")).status_code == 404
        (home / "one.gguf").write_bytes((folder / "one.gguf").read_bytes())
        monkeypatch.setattr(models_module, "SCAN_SECONDS", 0.0)  # as if a second had passed
        assert (await answer(client, "one")).status_code == 200


async def test_too_many_waiting_requests_are_refused(folder: Path, facts: dict[str, Any]) -> None:
    async with serving(folder, room_for(facts, "three"), settings={"max_queue": 2}) as (client, models):
        assert (await answer(client, "three")).status_code == 200
        held: list[Any] = []
        assert models.at_once("three", held, required=True) is not None  # "two" waits for its memory
        waiting = [asyncio.create_task(answer(client, "two")) for _ in range(2)]
        await changes(models, lambda: "two" in models.slots and len(models.slots["two"].waiting) == 2)
        refused = await answer(client, "two")
        assert refused.status_code == 429
        assert "retry-after" in refused.headers
        models.release(held[0])
        assert [(await one).status_code for one in waiting] == [200, 200]


async def test_shutdown_answers_waiting_requests(folder: Path, facts: dict[str, Any]) -> None:
    async with serving(folder, room_for(facts, "three")) as (client, models):
        assert (await answer(client, "three")).status_code == 200
        held: list[Any] = []
        assert models.at_once("three", held, required=True) is not None  # "two" waits for its memory
        waiting = asyncio.create_task(answer(client, "two"))
        await changes(models, lambda: "two" in models.slots and len(models.slots["two"].waiting) == 1)
        models.stopping = True
        models.end_answers()
        reply = await waiting
        assert reply.status_code == 503
        assert "shut down" in reply.json()["error"]["message"]
        assert (await client.get("/health")).status_code == 503
        models.release(held[0])


class _Fetch:
    """Replaces `storage.fetch.pull`: reports progress until it may finish or is cancelled."""

    def __init__(self, home: Path, content: bytes) -> None:
        self.home, self.content, self.cancelled, self.goes_on, self.calls = home, content, 0, False, []

    def __call__(self, name: str, *, progress: Any) -> Path:
        self.calls.append(name)
        if name == "hf:owner/none":
            raise hotset.DownloadError("the repository does not exist")
        try:
            progress.say("Choosing it.")
            for done in range(10**6):
                progress.advance("it.gguf", min(done, 100), 100)
                if self.goes_on:
                    break
        except BaseException:
            self.cancelled += 1
            raise
        (self.home / "it.gguf").write_bytes(self.content)
        return self.home / "it.gguf"


async def test_pull(facts: dict[str, Any], home: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fetch = _Fetch(home, (folder / "one.gguf").read_bytes())
    monkeypatch.setattr("hotset.storage.fetch.pull", fetch)

    async with serving(None, room_for(facts, "one")) as (client, _):
        fetch.goes_on = True
        reply = await client.post("/api/pull", json={"model": "hf.co/owner/it"})
        lines = [json.loads(line) for line in reply.text.splitlines()]
        assert lines[0] == {"status": "pulling manifest"}
        assert lines[-1] == {"status": "success"}
        assert fetch.calls == ["hf:owner/it"]
        assert (await answer(client, "it")).status_code == 200
        failed = await client.post("/api/pull", json={"name": "hf:owner/none", "stream": False})
        assert failed.status_code == 500
        assert "does not exist" in failed.json()["error"]
        failed = await client.post("/api/pull", json={"name": "hf:owner/none"})
        assert json.loads(failed.text.splitlines()[-1]) == {"error": "the repository does not exist"}


def test_a_message_about_a_load_names_no_folder() -> None:
    path = Path("/a b/models/x.gguf")
    error = hotset.FormatError(
        f"{path} and '/etc/other/y.json' are cut short; see https://a.b/c/d, and/or C:/z/e"
    )
    said = "x.gguf and 'y.json' are cut short; see https://a.b/c/d, and/or e"
    assert str(LoadError.of("x", path, error)) == f"the model 'x' could not be loaded: {said}"


async def test_memory_for_an_adapter_is_released_with_its_model(folder: Path, facts: dict[str, Any]) -> None:
    """Another model is unloaded for the adapter, and in the same time the adapter's own model."""
    async with serving(folder, room_for(facts, "one", "two")) as (client, models):
        for name in ("one", "two"):
            assert (await answer(client, name)).status_code == 200
        one, unload = models.slots["one"], models._unload
        assert one.service is not None
        model = weakref.ref(one.service.model)

        async def unload_both(slot: Any, reason: str) -> None:
            await unload(slot, reason)
            await unload(one, reason)

        models._unload = unload_both  # type: ignore[method-assign]
        await models._grow(one, model, 1000)
        assert (one.state, one.n_bytes, models.slots["two"].n_bytes) == ("unloaded", 0, 0)


async def test_a_path_is_not_fetched(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine's folders are not searched for a client."""
    monkeypatch.setattr("hotset.storage.fetch.pull", lambda *_, **__: pytest.fail("a path is looked for"))

    async with client_to(models_of(folder, 1)) as client:
        for name in ("/", str(folder), "~", "~root", ".", "../x", "a/../../x"):
            reply = await client.post("/api/pull", json={"model": name})
            assert (reply.status_code, "not a path" in reply.text) == (400, True), reply.text
    assert full_name("gemma3:4b") == "gemma3:4b"
    assert full_name("owner/re.po:Q4_K_M") == "owner/re.po:Q4_K_M"


async def test_a_cancelled_pull_accepts_no_more_clients(monkeypatch: pytest.MonkeyPatch) -> None:
    goes_on = threading.Event()
    calls: list[str] = []

    def pull(name: str, *, progress: Any) -> None:
        calls.append(name)
        goes_on.wait()
        progress.say("Choosing it.")

    monkeypatch.setattr("hotset.storage.fetch.pull", pull)

    pulls = Pulls()
    first = pulls.states("it")
    await anext(first)
    await first.aclose()  # type: ignore[attr-defined]
    second = pulls.states("it")
    state = asyncio.ensure_future(anext(second))
    await asyncio.sleep(0)
    assert len(calls) == 1
    goes_on.set()
    assert (await state)["status"]
    async for _ in second:
        pass
    assert len(calls) == 2, "it was fetched anew"


async def test_a_pull_ends_with_its_last_client(
    home: Path, facts: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    fetch = _Fetch(home, b"")
    monkeypatch.setattr("hotset.storage.fetch.pull", fetch)

    async with serving(None, room_for(facts, "one")) as (client, _):
        body = {"model": "hf:owner/it", "stream": False}
        pulls = [asyncio.create_task(client.post("/api/pull", json=body)) for _ in range(2)]
        running = client._transport.app.state.pulls._running  # type: ignore[attr-defined]
        async with asyncio.timeout(60):
            while not (fetch.calls and next(iter(running.values())).n_clients == 2):
                await asyncio.sleep(0.01)
        pulls[0].cancel()
        await asyncio.gather(pulls[0], return_exceptions=True)
        assert not fetch.cancelled
        assert len(fetch.calls) == 1, "one fetch serves both"
        pulls[1].cancel()
        await asyncio.gather(pulls[1], return_exceptions=True)
        until(lambda: fetch.cancelled == 1, "the fetch goes on")


async def test_the_memory_of_a_load_is_known_before_it(
    folder: Path, facts: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only files that changed are read again for it."""
    opened: list[str] = []

    def noted(path: Path, settings: LoadSettings) -> Any:
        opened.append(path.stem)
        return open_model(path, settings)

    monkeypatch.setattr("hotset.server.slots.open_model", noted)

    async with serving(folder, room_for(facts, *NAMES)) as (client, _):

        async def entries() -> dict[str, Any]:
            return {one["id"]: one for one in (await client.get("/v1/models")).json()["data"]}

        before = await entries()
        assert before == await entries()
        assert sorted(opened) == sorted(NAMES)
        (await answer(client, "two")).raise_for_status()
        needs, loaded = before["two"]["meta"]["needs"], (await entries())["two"]
        assert "needs" not in loaded["meta"]
        assert loaded["max_model_len"] == before["two"]["max_model_len"] == 256
        assert loaded["status"]["cache"] == needs["cache"]
        assert needs["weights"] + needs["cache"] == needs["memory"] <= loaded["status"]["memory"]
        assert needs["weights"] == pytest.approx(loaded["status"]["weights"], rel=0.5)


async def test_a_model_is_loaded_with_a_requested_context_and_each_load_is_reported(
    folder: Path, facts: dict[str, Any]
) -> None:
    told: list[str] = []

    async with serving(folder, room_for(facts, *NAMES), report=told.append) as (client, models):

        async def load(**body: Any) -> httpx.Response:
            return await client.post("/models/load", json={"model": "one", **body})

        async def entry() -> dict[str, Any]:
            found: dict[str, Any] = (await client.get("/v1/models/one")).json()
            return found

        assert (await entry())["meta"]["has_zeros"] is False
        assert (await load(n_ctx=128)).json() == {"success": True}
        await changes(models, lambda: states(models).get("one") == "loaded")
        one = await entry()
        status = one["status"]
        assert one["max_model_len"] == 128
        assert 0 < status["cache"] < status["memory"] - status["weights"]
        assert (await load(n_ctx=128)).status_code == 200
        assert (await load()).status_code == 200
        refused = await load(n_ctx=64)
        assert refused.status_code == 409
        assert "unload it" in refused.json()["error"]["message"]
        assert (await load(n_ctx=0)).status_code == 400
        await client.post("/models/unload", json={"model": "one"})
        assert (await load(n_ctx=64)).status_code == 200
        await changes(models, lambda: states(models).get("one") == "loaded")
        assert (await entry())["max_model_len"] == 64
    assert [line.split(" in ")[0] for line in told] == [
        "INFO:     one is loaded", "INFO:     one is unloaded (by a request)", "INFO:     one is loaded"
    ]  # fmt: skip
    assert "context 128 tokens" in told[0]


async def test_the_catalogue_is_searched(folder: Path, home: Path, facts: dict[str, Any]) -> None:
    assert not list(home.iterdir())

    async with serving(folder, room_for(facts, *NAMES)) as (client, _):

        async def found(words: str) -> list[dict[str, Any]]:
            reply = await client.get("/models/catalogue", params={"q": words})
            models: list[dict[str, Any]] = reply.json()["data"]
            return models

        assert {one["has_zeros"] for one in await found("")} == {True, False}
        (one,) = await found("SmolLM2 135m")
        assert (one["id"], one["is_stored"]) == ("smollm2-135m", False)
        assert await found("no such model") == []
