"""POST /api/create: a created model gives the same answers as its messages and parameters in a request."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import httpx
import pytest
from tiny_server import client_to, key_of, write_model

from hotset.server.catalogue import Catalogue
from hotset.server.models import Models
from hotset.server.settings import ServerSettings
from hotset.settings import LoadSettings
from hotset.storage import aliases, created, store

LOAD = LoadSettings(device="cpu", n_threads=1, max_sequences=4, n_ctx=256, max_batch=64)
EXAMPLES = [{"role": "user", "content": "one?"}, {"role": "assistant", "content": "two."}]
CREATE: dict[str, Any] = {
    "model": "brief", "from": "base", "system": "Be brief.", "messages": EXAMPLES,
    "parameters": {"temperature": 0, "num_predict": 5, "stop": ["~~", "END"], "num_ctx": 128},
}  # fmt: skip
ASKED = [{"role": "user", "content": "Why?"}]


def serving(**settings: Any) -> AbstractAsyncContextManager[httpx.AsyncClient]:
    catalogue = Catalogue({}, with_store=True)
    catalogue.scan()
    return client_to(Models(catalogue, ServerSettings(**settings), load=LOAD, budget=1 << 30))


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a store with one model."""
    monkeypatch.setenv("HOTSET_HOME", str(tmp_path))
    store.models_folder().mkdir(parents=True)
    write_model(store.models_folder() / "base.gguf")
    return tmp_path


async def test_a_created_model_answers_like_its_messages(home: Path) -> None:
    async with serving() as client:
        assert (await client.post("/api/create", json=CREATE | {"stream": False})).json() == {
            "status": "success"
        }
        assert [one["id"] for one in (await client.get("/v1/models")).json()["data"]] == ["base", "brief"]
        before = [{"role": "system", "content": "Be brief."}, *EXAMPLES]
        greedy = {"temperature": 0, "max_tokens": 5, "stop": ["~~", "END"]}

        async def chat(model: str, messages: list[dict[str, str]], **more: Any) -> tuple[str, int]:
            reply = await client.post(
                "/v1/chat/completions", json={"model": model, "messages": messages} | more
            )
            body = reply.json()
            return body["choices"][0]["message"]["content"], body["usage"]["prompt_tokens"]

        expected = await chat("base", [*before, *ASKED], **greedy)
        assert await chat("brief", ASKED) == expected
        ollama = (
            await client.post("/api/chat", json={"model": "brief:latest", "messages": ASKED, "stream": False})
        ).json()
        assert (ollama["message"]["content"], ollama["prompt_eval_count"]) == expected
        body = {"model": "brief", "messages": ASKED, "max_tokens": 5}
        reply = (await client.post("/v1/messages", json=body)).json()
        assert "".join(part["text"] for part in reply["content"]) == expected[0]
        counted = (
            await client.post("/v1/messages/count_tokens", json={"model": "brief", "messages": ASKED})
        ).json()
        assert counted == {"input_tokens": expected[1]}
        # A request's own system message and parameters take effect.
        own = [{"role": "system", "content": "Sing."}, *ASKED]
        assert await chat("brief", own, max_tokens=2) == await chat(
            "base", [own[0], *EXAMPLES, *ASKED], **greedy | {"max_tokens": 2}
        )
        props = (await client.get("/props?model=brief")).json()
        assert props["default_generation_settings"]["n_ctx"] == 128
        assert props["default_generation_settings"]["params"]["temperature"] == 0


async def test_created_models_are_shown_changed_and_deleted(home: Path) -> None:
    async with serving() as client:
        assert (await client.post("/api/create", json=CREATE)).text == '{"status":"success"}\n'
        for loaded in (False, True):
            if loaded:
                await client.post(
                    "/v1/chat/completions", json={"model": "brief", "messages": ASKED, "max_tokens": 1}
                )
            shown = (await client.post("/api/show", json={"model": "brief"})).json()
            assert shown["modelfile"].startswith(
                'FROM base\nSYSTEM """Be brief."""\nPARAMETER temperature 0\n'
            )
            assert shown["parameters"].splitlines()[2:4] == ["stop ~~", "stop END"]
            assert "Be brief." in shown["template"]
        text = "FROM base\nPARAMETER num_predict 3"
        assert (
            await client.post("/api/create", json={"name": "brief", "modelfile": text})
        ).status_code == 200
        body = {"model": "brief", "messages": ASKED, "temperature": 0}
        reply = await client.post("/v1/chat/completions", json=body)
        assert reply.status_code == 200, reply.text
        usage = reply.json()["usage"]
        assert usage["completion_tokens"] <= 3
        assert usage["prompt_tokens"] < 30  # the messages were removed
        assert (await client.request("DELETE", "/api/delete", json={"model": "brief"})).status_code == 200
        assert (await client.post("/v1/chat/completions", json=body)).status_code == 404
        assert created.read() == {}
        assert (store.models_folder() / "base.gguf").exists()


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        ({"model": "x"}, 400, "from is missing"),
        ({"model": "x", "from": "none"}, 404, "is not served here"),
        ({"model": "x", "from": "/etc/passwd"}, 404, "is not served here"),
        ({"model": "x", "modelfile": "FROM ./base.gguf"}, 404, "is not served here"),
        ({"model": "x", "modelfile": "FROM base\nADAPTER /etc/passwd"}, 403, "start it with --lora-dir"),
        ({"model": "../x", "from": "base"}, 400, "a name has letters"),
        ({"model": "base", "from": "base"}, 400, "is called 'base' already"),
        ({"model": "x", "from": "base", "parameters": {"heat": 1}}, 400, "there is no PARAMETER 'heat'"),
        ({"model": "x", "from": "base", "template": "{{ .Prompt }}"}, 400, "template of Go"),
        ({"model": "x", "from": "base", "system": 'a """\nb'}, 400, "no three quotation marks"),
        ({"model": "x", "from": "base\nSYSTEM b"}, 400, "a name no line break"),
        ({"model": "x", "from": "base", "files": {}}, 400, "files"),
        ({"model": "x", "from": "base", "messages": [{"role": "robot", "content": ""}]}, 400, "role"),
    ],
)
async def test_wrong_models_are_refused(home: Path, body: dict[str, Any], status: int, message: str) -> None:
    async with serving() as client:
        reply = await client.post("/api/create", json=body)
        assert reply.status_code == status, reply.text
        assert message in reply.json()["error"]
        assert created.read() == {}


async def test_text_and_parameters_are_stored_as_sent(home: Path) -> None:
    body = {
        "model": "x",
        "from": "base",
        "system": "a\r\nb",
        "parameters": {"stop": ["\n\n", " "], "seed": []},
    }

    async with serving() as client:
        reply = await client.post("/api/create", json=body)
        assert reply.status_code == 200, reply.text
        made = created.read()["x"]
        assert made.sampling == {"stop": ["\n\n", " "]}
        assert made.modelfile.startswith('FROM base\nSYSTEM """a\nb"""\n')
        reply = await client.post(
            "/api/create", content=b'{"model": "y", "from": "base", "system": "\\ud800"}'
        )
        assert reply.status_code == 400, reply.text


async def test_models_created_at_the_same_time_are_all_stored(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = {module: module.read for module in (created, aliases)}
    for module, now in read.items():

        def slowly(now: Callable[[], Any] = now) -> Any:
            found = now()
            time.sleep(0.02)
            return found

        monkeypatch.setattr(module, "read", slowly)

    async with serving() as client:
        posts = [client.post("/api/create", json={"model": f"m{i}", "from": "base"}) for i in range(5)]
        posts += [client.post("/api/copy", json={"source": "base", "destination": f"a{i}"}) for i in range(5)]
        assert {reply.status_code for reply in await asyncio.gather(*posts)} == {200}
    assert set(created.read()) == {f"m{i}" for i in range(5)}
    assert set(aliases.read()) == {f"a{i}" for i in range(5)}


async def test_a_key_creates_models_only_from_and_instead_of_models_that_it_may_use(home: Path) -> None:
    (home / "models" / "other.gguf").write_bytes((home / "models" / "base.gguf").read_bytes())
    aliases.add("theirs", "other")
    aliases.add("ours", "base")
    async with serving(named_keys=(key_of("a", models=("base", "mine")),)) as client:
        cases = ("Theirs", "base", 404), ("ours", "base", 200), ("mine", "other", 404), ("mine", "base", 200)
        for name, base, status in cases:
            body = {"model": name, "from": base}
            reply = await client.post("/api/create", json=body, headers={"authorization": "Bearer a"})
            assert reply.status_code == status, reply.text
    assert set(created.read()) == {"ours", "mine"}


async def test_a_name_that_the_server_already_has_is_refused(home: Path) -> None:
    catalogue = Catalogue({"mine": home / "models" / "base.gguf"})
    catalogue.scan()
    host = Models(catalogue, ServerSettings(), load=LOAD, budget=1 << 30)
    async with client_to(host) as client:
        reply = await client.post("/api/create", json={"model": "MINE", "from": "mine"})
        assert (reply.status_code, created.read()) == (400, {})


async def test_creating_needs_permission_to_manage(home: Path) -> None:
    async with serving() as client:
        reply = await client.post("/api/create", json=CREATE, headers={"origin": "https://elsewhere.example"})
        assert reply.status_code == 403
