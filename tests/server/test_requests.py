"""Requests as clients send them, each with one variation (tests/data/requests/matrix.json).

A row has the API schema, the fields that differ from a plain request, and the ignored fields. A row for a
refusal has its status and a part of its message.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from api_schemas import SCHEMAS
from tiny_server import Serving, write_model
from waiting import WATCHDOG

from hotset.server.ignored import HEADER, Ignored, client_type
from hotset.server.logs import MOST_NOTICES, Notices
from hotset.server.rows import MAX_IGNORED

ROWS = json.loads((Path(__file__).parents[1] / "data/requests/matrix.json").read_text("utf-8"))
BY_NAME = {schema.name: schema for schema in SCHEMAS}
PYTHON = ("NamedTool", "_kind", "()", "Body", "dict", "NoneType", " None", "Union")
"""Python words that no message contains."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    path = write_model(tmp_path_factory.mktemp("model") / "tiny.gguf", **{"llama.context_length": 2048})
    with Serving(path, load={"n_ctx": 2048}) as served:
        yield served


def posted(server: Serving, url: str, body: dict[str, Any], **headers: str) -> httpx.Response:
    content = json.dumps(body)  # with escapes, because UTF-8 cannot encode surrogates
    where = f"http://127.0.0.1:{server.port}{url}"
    return httpx.post(where, content=content, headers=headers, timeout=WATCHDOG)


@pytest.mark.parametrize("row", ROWS, ids=[f"{row['schema']}: {row['kind']}" for row in ROWS])
def test_a_request_of_a_client(server: Serving, row: dict[str, Any]) -> None:
    schema = BY_NAME[row["schema"]]
    if any(word in json.dumps(row["body"]) for word in ("schema", "guided", "structured", "format")):
        pytest.importorskip("llguidance")
    reply = posted(server, schema.url, schema.body(temperature=0, max_tokens=4) | row["body"])
    assert reply.status_code == row.get("status", 200), reply.text
    if reply.status_code == 200:
        assert sorted(filter(None, reply.headers.get(HEADER, "").split(", "))) == row.get("ignored", [])
    else:
        message = schema.error(reply)
        assert row["says"] in message
        assert not [word for word in PYTHON if word in message]


@pytest.mark.parametrize("schema", SCHEMAS, ids=repr)
def test_names_of_ignored_fields_are_escaped_and_limited(server: Serving, schema: Any) -> None:
    odd = {f"a\r\nx-evil: 1\ud800é{i}" + "y" * 300: {} for i in range(3 * MAX_IGNORED)}
    reply = posted(server, schema.url, schema.body(temperature=0, max_tokens=1) | odd)
    assert reply.status_code == 200, reply.text
    names = reply.headers[HEADER].split(", ")
    assert 0 < len(names) <= MAX_IGNORED
    assert len(reply.headers[HEADER]) < 4096
    assert "x-evil" not in reply.headers
    assert all(name.isascii() and name.isprintable() for name in names)


def test_an_ignored_field_is_logged_once_per_type_of_client(
    server: Serving, caplog: pytest.LogCaptureFixture
) -> None:
    def lines() -> list[str]:
        return [record.getMessage() for record in caplog.records if "zap" in record.getMessage()]

    body = {"model": "tiny", "prompt": "a", "max_tokens": 1, "temperature": 0, "zap": 1}
    for agent in ("one/1.0", "one/2.0 (linux)", "two"):
        posted(server, "/v1/completions", body, **{"user-agent": agent})
    assert lines() == [
        f"{one} sends zap, which is ignored: hotset does not know it" for one in ("one", "two")
    ]


def test_a_long_request_of_unknown_fields(server: Serving) -> None:
    body = {"model": "tiny", "prompt": "a", "max_tokens": 1, "temperature": 0}
    odd = {f"{'unknown_field' * 4}{i:06}": i for i in range(58_000)}
    assert 4 << 20 > len(json.dumps(body | odd)) > 3_900_000
    plain, reply = (posted(server, "/v1/completions", one) for one in (body, body | odd))
    assert reply.status_code == 200, reply.text
    assert reply.json()["choices"] == plain.json()["choices"]
    assert reply.headers[HEADER].split(", ") == list(odd)[:MAX_IGNORED]
    reply = posted(server, "/v1/completions", body | {f"unknown_field_{i:06}": i for i in range(130_000)})
    assert reply.status_code == 413
    assert "more than 65536 texts, lists and objects" in reply.text


def test_the_log_remembers_a_limited_number_of_fields(monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []
    monkeypatch.setattr("hotset.server.logs.log.warning", lambda _, line: lines.append(line))
    notices = Notices()
    for i in range(MOST_NOTICES):
        ignored = Ignored(f"client-{i}", notices, is_strict=False)
        for n in range(2 * MAX_IGNORED):
            ignored.add(f"field-{n}", "hotset does not know it")
        assert len(ignored.headers[HEADER].split(", ")) == MAX_IGNORED
    assert len(lines) == len(set(lines)) == MOST_NOTICES == 1000


@pytest.mark.parametrize("schema", SCHEMAS, ids=repr)
def test_refusals_name_ignored_fields_too(server: Serving, schema: Any) -> None:
    fault = {"id_slot": 99} if schema.is_chat or schema.name == "completions" else {"stop": ["x"] * 99}
    reply = posted(server, schema.url, schema.body(temperature=0, max_tokens=1) | fault | {"zap": 1})
    assert reply.status_code == 400, reply.text
    assert schema.error(reply)
    assert reply.headers[HEADER] == "zap"


def test_types_of_clients_are_short() -> None:
    assert client_type("claude-cli/2.1 (external, cli)") == "claude-cli"
    assert client_type("\x1b[31m") == client_type("") == "a client"
    assert len(client_type("x" * 1000)) == 40
