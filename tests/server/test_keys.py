"""API keys with names and limits: requests and tokens per minute, models, and who may manage them."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from typing import Any

import pytest
from tiny_server import MESSAGES, client_of, client_to, write_model

import hotset
from hotset.server.catalogue import Catalogue
from hotset.server.key_limits import Bucket, Holder
from hotset.server.keys import NamedKey, read_keys
from hotset.server.models import Models
from hotset.server.settings import ServerSettings
from hotset.settings import LoadSettings

GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 4, "ignore_eos": True}
BODY = {"model": "tiny", "prompt": "hello"} | GREEDY


def keys_of(tmp_path: Path, text: str) -> tuple[NamedKey, ...]:
    path = tmp_path / "keys.toml"
    path.write_text(text)
    return read_keys(path)


def of(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def test_a_bucket_refills_within_a_minute() -> None:
    now = [0.0]
    bucket = Bucket(60, lambda: now[0])
    for _ in range(60):
        assert bucket.wait(1) == 0
        bucket.take(1)
    assert bucket.wait(1) == 1
    now[0] = 0.5
    assert bucket.wait(1) == 0.5
    now[0] = 1
    assert bucket.wait(1) == 0
    bucket.take(121)
    assert bucket.wait(1) == 121, "what was used beyond it comes in first"
    now[0] = 1e6
    assert bucket.wait(60) == 0
    assert bucket.wait(61) == 1, "a longer rest saves nothing up"


async def test_keys_of_a_file(path: Path, tmp_path: Path) -> None:
    sha = hashlib.sha256(b"hashed").hexdigest()
    named = keys_of(
        tmp_path,
        f"[alice]\nkey = 'open'\nrequests_per_minute = 2\n[bob]\nsha256 = '{sha}'\ntokens_per_minute = 10\n"
        "[carol]\nkey = 'other'\nmodels = ['none']\n",
    )
    log = tmp_path / "log"

    async with client_of(path, api_keys=("plain",), named_keys=named, request_log=str(log)) as (client, _):

        async def status(key: str, where: str = "/v1/completions") -> int:
            if where == "/v1/completions":
                return (await client.post(where, json=BODY, headers=of(key))).status_code
            return (await client.get(where, headers=of(key))).status_code

        assert [await status(key) for key in ("wrong", "", "plain", "open")] == [401, 401, 200, 200]
        assert [await status("open", "/v1/models"), await status("open", "/v1/models")] == [200, 429]
        refused = await client.post("/v1/completions", json=BODY, headers=of("open"))
        assert refused.json()["error"]["code"] == "rate_limit_exceeded"
        assert "alice" in refused.json()["error"]["message"]
        assert 1 <= int(refused.headers["retry-after"]) <= 30
        assert [await status("hashed"), await status("hashed")] == [200, 429], "ten tokens were used"
        assert await status("plain") == 200, "others have their own"
        assert await status("other") == 404
        listed = (await client.get("/v1/models", headers=of("other"))).json()
        assert listed["data"] == []
        chat = {"model": "tiny", "messages": MESSAGES}
        replies = [
            await client.post("/api/chat", json=chat, headers=of("other")),
            await client.post("/api/show", json={"model": "tiny"}, headers=of("other")),
            await client.get("/v1/models/tiny", headers=of("other")),
        ]
        assert [reply.status_code for reply in replies] == [404] * 3
        unnamed = await client.get("/props", headers=of("other"))
        assert unnamed.status_code == 400
        assert "tiny" not in unnamed.text
    clients = [json.loads(line)["client"] for line in log.read_text().splitlines()]
    assert clients.count("alice") == 2, "refused ones have no name: they were not let in"
    assert {"key 0", "bob", "carol"} <= set(clients)


async def test_keys_of_several_models(path: Path, tmp_path: Path) -> None:
    """A key cannot cause the load of a model that it may not use, nor manage without permission."""
    write_model(tmp_path / "other.gguf", n_layer=1)
    named = keys_of(tmp_path, "[alice]\nkey = 'a'\nmodels = ['Other']\nmanages = false\n[root]\nkey = 'r'\n")
    catalogue = Catalogue({"tiny": path, "other": tmp_path / "other.gguf"})
    catalogue.scan()
    load = LoadSettings(device="cpu", n_threads=1, n_ctx=256)

    models = Models(catalogue, ServerSettings(named_keys=named), load=load, budget=1 << 30)
    async with client_to(models) as client:
        refused = await client.post("/v1/completions", json=BODY, headers=of("a"))
        unknown = await client.post("/v1/completions", json=BODY | {"model": "none"}, headers=of("a"))
        assert refused.status_code == unknown.status_code == 404
        assert refused.text.replace("'tiny'", "'none'") == unknown.text, "which of them exists stays secret"
        assert models.states() == {}
        allowed = BODY | {"model": "other"}
        assert (await client.post("/v1/completions", json=allowed, headers=of("a"))).status_code == 200
        for key, status in (("a", 403), ("r", 200)):
            reply = await client.post("/models/unload", json={"model": "other"}, headers=of(key))
            assert reply.status_code == status
        listed = (await client.get("/api/tags", headers=of("a"))).json()["models"]
        assert [one["name"] for one in listed] == ["other"]
        assert (await client.post("/v1/completions", json=BODY, headers=of("r"))).status_code == 200
        text = {"content": "hello"}  # no model is named; this key may not use the last used one
        (slot,) = [slot for slot in models.slots.values() if slot.name == "tiny"]
        used = slot.used
        assert (await client.post("/tokenize", json=text, headers=of("a"))).status_code == 200
        assert slot.used == used
        over = {"model": "other", "keep_alive": 0}
        done = (await client.post("/api/generate", json=over, headers=of("a"))).json()
        assert done["done_reason"] == "load", "this key may not unload"
        over = {"model": "tiny", "keep_alive": 0}
        assert (await client.post("/api/generate", json=over, headers=of("a"))).status_code == 404
        assert slot.state == "loaded"
        assert (await client.post("/v1/completions", json=allowed, headers=of("a"))).status_code == 200
        for key, seen in (("a", {"other"}), ("r", {"tiny", "other"})):
            text = (await client.get("/metrics", headers=of(key))).text
            assert set(re.findall(r'model="(.*?)"', text)) == seen
            assert "hotset_ready 1.0" in text


async def test_a_key_for_some_models_cannot_manage_others(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOTSET_HOME", str(tmp_path / "home"))
    named = keys_of(tmp_path, "[alice]\nkey = 'a'\nmodels = ['own']\n[root]\nkey = 'r'\n")
    catalogue = Catalogue({"tiny": path, "own": path})
    catalogue.scan()

    models = Models(catalogue, ServerSettings(named_keys=named), budget=1 << 30)
    async with client_to(models) as client:

        async def status(key: str, where: str, method: str = "POST", **body: Any) -> int:
            return (await client.request(method, where, json=body, headers=of(key))).status_code

        assert await status("r", "/api/copy", source="tiny", destination="alias") == 200
        assert await status("r", "/api/create", model="made", **{"from": "tiny", "system": "x"}) == 200
        for name in ("tiny", "alias", "made"):
            assert await status("a", "/models/load", model=name) == 404
            assert await status("a", "/models/unload", model=name) == 404
            assert await status("a", "/api/copy", source=name, destination="mine") == 404
            assert await status("a", "/api/delete", "DELETE", model=name) == 404
        assert await status("a", "/api/copy", source="own", destination="alias") == 404
        assert await status("a", "/api/create", model="made", **{"from": "own", "system": "x"}) == 404
        assert models.states() == {}
        assert catalogue.aliases == {"alias": "tiny"}
        assert await status("a", "/api/copy", source="own", destination="mine") == 200
        assert await status("a", "/api/delete", "DELETE", model="mine") == 200


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "no key in it"),
        ("alice = 'k'", "is a table"),
        ("[alice]", "needs a key"),
        ("[alice]\nkey = 'k'\nsha256 = 'x'", "needs a key"),
        ("[alice]\nkey = 'a b'", "letters, digits"),
        ("[alice]\nsha256 = 'abc'", "64 hex digits"),
        ("[alice]\nkey = 'k'\nrequest_per_minute = 3", "did you mean requests_per_minute"),
        ("[alice]\nkey = 'k'\nrequests_per_minute = 0", "requests_per_minute"),
        ("[alice]\nkey = 'k'\nmodels = 'tiny'", "list of names"),
        ("[alice]\nkey = 'k'\nmanages = 'no'", "manages"),
        ("[alice]\nkey = 'k'\n[bob]\nkey = 'k'", "a key twice"),
        ("[alice", "not a TOML"),
    ],
)
def test_a_wrong_file_of_keys_is_refused(text: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(hotset.InvalidRequestError, match=said):
        keys_of(tmp_path, text)


def test_a_key_lets_a_server_listen_for_other_machines() -> None:
    key = NamedKey(name="alice", sha256="0" * 64)
    assert ServerSettings(host="0.0.0.0", named_keys=(key,)).has_keys
    assert Holder.of(key).may_ask("any")
