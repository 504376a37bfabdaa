"""Errors as clients receive them: without paths of the server and without Python names."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from api_schemas import SCHEMAS
from tiny_server import MESSAGES, client_of, write_model

from hotset import errors
from hotset.server.errors import invalid_body, problem_of, without_folders
from hotset.text.chat import ChatTemplate

# Their messages quote the client's request or contain only hotset's own text.
CLIENTS_OWN = (
    errors.InvalidRequestError, errors.TokenizerError, errors.ContextLengthError, errors.QueueFullError
)  # fmt: skip
KINDS = [
    kind
    for kind in vars(errors).values()
    if isinstance(kind, type) and issubclass(kind, errors.HotsetError) and kind not in CLIENTS_OWN
]


@pytest.mark.parametrize("kind", KINDS)
def test_no_error_has_a_path_of_the_server(kind: type[errors.HotsetError]):
    message = "'/srv/models/x.gguf' and C:\\models\\y.gguf are damaged (/etc/z.json); see https://a.b/c"
    error = kind.__new__(kind)
    Exception.__init__(error, message)
    told = "'x.gguf' and y.gguf are damaged (z.json); see https://a.b/c"
    assert problem_of(error).message == told


def test_a_process_of_templates_that_cannot_start_is_no_fault_of_the_request(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("sys.executable", "/srv/no/such/python")
    with pytest.raises(errors.TokenizerError) as raised, ChatTemplate("x") as template:
        template.render(MESSAGES)
    problem = problem_of(raised.value)
    assert (problem.status, problem.retry_after) == (503, 5)
    assert "(python: " in problem.message


def test_a_known_file_may_have_spaces_in_its_folder():
    assert without_folders("/a b/c d.gguf is damaged", Path("/a b/c d.gguf")) == "c d.gguf is damaged"


async def test_messages_about_damaged_adapters_and_truncated_models_do_not_name_a_folder(tmp_path: Path):
    folder = tmp_path / "my models"
    folder.mkdir()
    path = write_model(folder / "tiny.gguf")
    (folder / "bad.gguf").write_bytes(b"GGUF" + bytes(40))

    async with client_of(path, lora_dir=str(folder)) as (client, _):
        reply = await client.post("/v1/load_lora_adapter", json={"lora_path": "bad.gguf"})
        assert reply.status_code == 400
        assert "bad.gguf" in reply.text
        assert str(tmp_path) not in reply.text
        assert "my models" not in reply.text
        path.write_bytes(path.read_bytes()[:64])
        for schema in SCHEMAS:
            for stream in (False, True):
                reply = await client.post(schema.url, json=schema.body(stream=stream, temperature=0))
                assert "tiny.gguf was cut short" in reply.text, reply.text
                assert str(tmp_path) not in reply.text


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (
            {"type": "literal_error", "loc": ("body", "tool_choice", "NamedTool", "type"),
             "msg": "Input should be 'function'", "input": "x", "ctx": {"expected": "'function'"}},
            "tool_choice.type must be one of function, not 'x'",
        ),
        (
            {"type": "union_tag_invalid", "loc": ("body", "input", 1),
             "ctx": {"discriminator": "_kind()", "expected_tags": "'message'"}, "input": {}},
            "input.1 must have a 'type' that is one of 'message', not {}",
        ),
        (
            {"type": "string_type", "loc": ("body", "stop", "function-after[one(), str]"),
             "msg": "Input should be a valid string", "input": 3},
            "stop must be a text, not 3",
        ),
    ],
)  # fmt: skip
def test_a_message_has_no_python_names(error: dict[str, Any], message: str):
    assert json.loads(json.dumps(invalid_body([error]).message)) == message
