"""Properties of every API schema: each test runs for each schema, by means of its adapter (api_schemas.py).

test_server_openai.py, test_server_responses.py, test_server_anthropic.py and test_server_ollama.py test the
properties of one schema.
"""

from __future__ import annotations

import asyncio
import json
import re
import socket
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from api_schemas import SCHEMAS, ApiSchema, both
from cases import quick_are
from published_calls import PUBLISHED, TEMPLATES, TOOLS
from tiny_server import MESSAGES, Serving, client_of, held_steps, with_template
from tool_models import CALL, CLOCK, HERMES, THINKS, WEATHER, written
from waiting import WATCHDOG, until

import hotset
from hotset.errors import InvalidRequestError
from hotset.sampling_parameters import RULES
from hotset.server.answers import AnswerRequest
from hotset.server.logs import MOST_NOTICES
from hotset.server.service import Service

BEGUN = [{"role": "user", "content": "ok"}, {"role": "assistant", "content": "Well, "}]
N = 24
SHORT = {"temperature": 0, "max_tokens": N}
ARGUMENTS = {"city": "Rome", "days": 2}


def each(*names: str, **having: bool) -> pytest.MarkDecorator:
    """Parametrize a test over the schemas with these names and attributes; without arguments, over all."""
    found = [
        schema
        for schema in SCHEMAS
        if (not names or schema.name in names)
        and all(bool(getattr(schema, key)) == value for key, value in having.items())
    ]
    return pytest.mark.parametrize("schema", found, ids=repr)


async def refused(
    client: httpx.AsyncClient, schema: ApiSchema, body: dict[str, Any], status: int = 400
) -> str:
    """Return the message of a refusal. The body is sent without the addition of a model's name."""
    reply = await client.post(schema.url, content=json.dumps(body))
    assert reply.status_code == status, reply.text
    return schema.error(reply)


# ---- text ----


@each()
async def test_an_answer_and_its_stream_equal_the_models_own(
    model: hotset.Model, schema: ApiSchema, client: httpx.AsyncClient
):
    expected = schema.expected(model, **SHORT)

    found = await both(client, schema, schema.body(**SHORT))
    assert (found.text, found.reasoning, found.calls) == (expected.text, "", [])
    assert found.reason == expected.finish_reason == "length"
    assert (found.prompt_tokens, found.tokens) == (expected.prompt_tokens, N)
    assert found.logprobs == []
    assert not found.reasoning_tokens


# Each one changes the tiny model's text, so that an ignored field is noticed.
SAMPLING: tuple[dict[str, Any], ...] = (
    {"top_p": 0.3}, {"top_k": 2}, {"min_p": 0.5}, {"frequency_penalty": 1.5}, {"presence_penalty": 1.5},
    {"repetition_penalty": 1.8}, {"repetition_penalty": 1.8, "penalty_last_n": 2},
    {"logit_bias": {"65": 100}}, {"seed": 12}, {"temperature": 2.5}, {"max_tokens": 9},
    {"top_n_sigma": 0.9}, {"typical_p": 0.4}, {"xtc_probability": 1.0},
    {"xtc_probability": 1.0, "xtc_threshold": 0.05}, {"dynatemp_range": 1.2},
    {"dynatemp_range": 1.2, "dynatemp_exponent": 3.0}, {"mirostat": 1}, {"mirostat": 2},
    {"mirostat": 2, "mirostat_tau": 2.0}, {"mirostat": 2, "mirostat_eta": 0.9},
    {"dry_multiplier": 5.0, "dry_allowed_length": 0},
)  # fmt: skip

# These change only a text with repetitions.
SELDOM_SEEN: tuple[dict[str, Any], ...] = (
    {"dry_multiplier": 5.0}, {"dry_multiplier": 5.0, "dry_base": 1.0},
    {"dry_multiplier": 5.0, "dry_penalty_last_n": 6},
    {"dry_multiplier": 5.0, "dry_sequence_breakers": ["e", "fg"]},
)  # fmt: skip


@each()
async def test_sampling_fields_reach_the_sampler(
    model: hotset.Model, schema: ApiSchema, client: httpx.AsyncClient, service: Service
):
    known = schema.sampling.keys()

    asked: list[AnswerRequest] = []
    ask = service.ask

    async def asking(request: AnswerRequest) -> Any:
        asked.append(request)
        seeded = request if "seed" in known else replace(request, params=replace(request.params, seed=1))
        return await ask(seeded)

    service.ask = asking  # type: ignore[method-assign]
    plain = {"temperature": 1.3, "seed": 11, "max_tokens": 40, "ignore_eos": True}
    plain = {key: value for key, value in plain.items() if key in known}
    cases = [{}, *(case for case in SAMPLING if case.keys() <= known)]
    texts = set()
    for case in (*cases, *(case for case in SELDOM_SEEN if case.keys() <= known)):
        found, _ = await schema.whole(client, schema.body(**plain | case))
        meant = plain | case
        if bias := meant.get("logit_bias"):
            meant["logit_bias"] = {int(token): one for token, one in bias.items()}
        assert asked[-1].params == hotset.SamplingParams(**meant), case
        if "seed" in known:
            assert found.text == schema.expected(model, **meant).text, case
            if case not in SELDOM_SEEN:
                texts.add(found.text)
    assert len(texts) in (0, len(cases))
    assert len(cases) > 3


@each()
async def test_a_null_is_an_absent_field(schema: ApiSchema, client: httpx.AsyncClient):
    """Clients send every field that they know, and newer clients know more."""

    body = schema.body(**SHORT)
    nulls = dict.fromkeys([*(schema.body_type.model_fields.keys() - body.keys()), "some_newer_field"])
    assert await both(client, schema, body | nulls) == await both(client, schema, body)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("several", [False, True])
@each("chat", "completions", "messages", "ollama-chat", "ollama-generate")
async def test_a_stop_string_ends_an_answer(
    model: hotset.Model,
    schema: ApiSchema,
    several: bool,
    stream: bool,
    client: httpx.AsyncClient,
    service: Service,
):
    text = schema.expected(model, **SHORT).text
    stop = text[5:7]
    given: Any = ["never at all", stop] if several or schema.name == "messages" else stop

    body = schema.body(stop=given, **SHORT)
    found = await (schema.streamed(client, body) if stream else both(client, schema, body))
    assert (found.text, found.reason) == (text[: text.index(stop)], "stop")
    if schema.name == "messages":
        _, raw = await schema.whole(client, body)
        assert raw["stop_sequence"] == stop
    engine = service.model.engine
    while engine.has_work:
        await asyncio.sleep(0.001)
    assert engine.scheduler.pool.n_available == engine.scheduler.pool.n_blocks


@each(has_logprobs=True)
async def test_logprobs_equal_the_models(model: hotset.Model, schema: ApiSchema, client: httpx.AsyncClient):
    expected = schema.expected(model, logprobs=2, **SHORT)

    found = await both(client, schema, schema.body(logprobs=2, **SHORT))
    assert found.text == expected.text
    assert found.logprobs == [one.logprob for one in expected.logprobs]


@each(counts_cached=True)
async def test_cached_tokens_are_in_the_usage(schema: ApiSchema, client: httpx.AsyncClient):
    body = schema.body([{"role": "user", "content": "once upon a time " * 10}], **SHORT)
    first, again = [(await schema.whole(client, body))[0] for _ in range(2)]
    assert (first.cached, again.cached) == (0, 128)
    assert first.prompt_tokens == again.prompt_tokens > 128


@each()
async def test_an_answer_follows_a_schema(path: Path, schema: ApiSchema):
    pytest.importorskip("llguidance")

    async with client_of(path) as (client, _):
        found = await both(client, schema, schema.body(form={"type": "boolean"}, **SHORT))
        assert found.text in ("true", "false")
        assert found.reason == "stop"


@each(is_chat=True)
async def test_system_messages_come_first(model: hotset.Model, schema: ApiSchema, client: httpx.AsyncClient):
    messages = [{"role": "system", "content": "be brief"}, *MESSAGES]
    expected = model.chat(messages, **SHORT).content

    found = await both(client, schema, schema.body(messages, **SHORT))
    assert found.text == expected


# ---- reasoning and tools ----


@each(has_tools=True)
async def test_reasoning_text_and_calls_are_separate(tmp_path: Path, schema: ApiSchema):
    pytest.importorskip("llguidance")

    async with with_template(tmp_path, THINKS) as (client, service):
        written(service.model, f"look it up\n</think>\n\nLet me see.\n{CALL}")
        body = schema.body(tools=[WEATHER, CLOCK], temperature=0, max_tokens=200)
        found = await both(client, schema, body)
        assert (found.reasoning.strip(), found.text.strip()) == ("look it up", "Let me see.")
        assert found.calls == [("get_weather", ARGUMENTS)]
        assert found.reason == "calls"
        assert found.reasoning_tokens is None or 8 <= found.reasoning_tokens < found.tokens
        # The model's call and its result are part of the next request.
        _, raw = await schema.whole(client, body)
        messages = [*MESSAGES, *schema.called(raw, "rain")]
        body = schema.body(messages, tools=[WEATHER, CLOCK], temperature=0, max_tokens=200)
        again = await both(client, schema, body)
        assert again.prompt_tokens > found.prompt_tokens
        if schema.name == "messages":
            only = {key: body[key] for key in ("model", "messages", "tools")}
            counted = await client.post("/v1/messages/count_tokens", json=only)
            assert counted.json() == {"input_tokens": again.prompt_tokens}


@each(has_tools=True)
async def test_several_calls_or_one(tmp_path: Path, schema: ApiSchema):
    pytest.importorskip("llguidance")

    async with with_template(tmp_path, HERMES) as (client, service):
        written(service.model, f"{CALL}\n{CALL.replace('Rome', 'Oslo')}")
        asked = {"tools": [WEATHER], "temperature": 0, "max_tokens": 300}
        found = await both(client, schema, schema.body(**asked))
        assert [arguments["city"] for _, arguments in found.calls] == ["Rome", "Oslo"]
        if schema.chooses_tools:
            found = await both(client, schema, schema.body(**asked, single=True))
            assert found.calls == [("get_weather", ARGUMENTS)]
        assert found.reason == "calls"


@pytest.mark.parametrize("choice", ["any", "get_weather"])
@each(chooses_tools=True)
async def test_a_required_call(tmp_path: Path, schema: ApiSchema, choice: str):
    """The tiny model writes its own text, which is a call."""
    pytest.importorskip("llguidance")

    async with with_template(tmp_path, HERMES) as (client, _):
        asked = {"tools": [WEATHER], "choice": choice, "single": True}
        found = await both(client, schema, schema.body(**asked, temperature=0, max_tokens=900))
        assert found.reason == "calls"
        ((name, arguments),) = found.calls
        assert name == "get_weather"
        assert arguments["city"] in ("Rome", "Oslo")
        assert 1 <= arguments["days"] <= 7


@pytest.mark.parametrize("name", quick_are(list(dict(TEMPLATES))[::3], dict(TEMPLATES)))
async def test_a_form_of_calls_is_read_in_every_schema(tmp_path: Path, name: str):
    """The tiny model's tokens are bytes, so every character and every mark arrives in pieces."""
    pytest.importorskip("llguidance")
    marks = next(template for form, template in TEMPLATES if form == name)
    emitted, text, calls = next((e, t, c) for form, e, t, c in PUBLISHED if form == name)
    tools = [
        {"type": "function", "function": {"name": key, "parameters": {"type": "object", **schema}}}
        for key, schema in TOOLS.items()
    ]

    async with with_template(tmp_path, HERMES.replace("<tool_call>", "") + f"{{# {marks} #}}") as (
        client,
        service,
    ):
        written(service.model, emitted)
        for schema in SCHEMAS:
            if schema.has_tools:
                found = await both(client, schema, schema.body(tools=tools, temperature=0, max_tokens=900))
                assert (found.text, found.calls) == (text, calls), schema


# ---- answers that were begun ----


@each(is_chat=True)
async def test_an_answer_is_continued(model: hotset.Model, schema: ApiSchema, client: httpx.AsyncClient):
    prompt = model.encode("<|im_start|>user:ok\n<|im_start|>assistant:Well, ", parse_special=True)
    expected = model.generate(prompt, **SHORT).text
    assert model.encode_chat(BEGUN) == prompt
    assert model.chat(BEGUN, **SHORT).content == expected

    found = await both(client, schema, schema.body(BEGUN, **SHORT))
    assert (found.text, found.prompt_tokens) == (expected, len(prompt))


@each(is_chat=True)
async def test_messages_that_cannot_be_continued_are_refused(tmp_path: Path, schema: ApiSchema):
    """The causes are calls without results, and a message that the template changes."""
    async with with_template(tmp_path, HERMES.replace("{{ m.content }}", "{{ m.content | upper }}")) as (
        client,
        service,
    ):
        written(service.model, f"</think>{CALL}")
        _, raw = await schema.whole(client, schema.body(tools=[WEATHER], temperature=0, max_tokens=200))
        called = schema.called(raw, "")[:-1]
        message = await refused(client, schema, schema.body([*BEGUN[:1], *called], **SHORT))
        assert "add the results of the calls" in message
        message = await refused(client, schema, schema.body(BEGUN, **SHORT))
        assert "this model's chat template changes it" in message


CITY = {"enum": ["Rome", "Oslo"]}


def continuing(schema: ApiSchema, begun: str, **more: Any) -> dict[str, Any]:
    return schema.body([*BEGUN[:1], {"role": "assistant", "content": begun}], **more)


@each(is_chat=True)
@pytest.mark.parametrize(("begun", "rest"), [('"Ro', 'me"'), ('"', 'Oslo"'), ('"Rome"', "")])
async def test_a_form_applies_to_a_continued_text_and_its_rest(
    tmp_path: Path, schema: ApiSchema, begun: str, rest: str
):
    pytest.importorskip("llguidance")

    async with with_template(tmp_path, HERMES) as (client, service):
        written(service.model, rest)
        found = await both(client, schema, continuing(schema, begun, form=CITY, **SHORT))
        assert (found.text, found.reason) == (rest, "stop")
        message = await refused(client, schema, schema.body(BEGUN, form=CITY, **SHORT))
        assert "does not begin as the JSON schema of the answer requires" in message


@each(is_chat=True)
@pytest.mark.parametrize(
    ("begun", "written_text", "thoughts"),
    [
        ("<think>\nTwo", ' cities.\n</think>"Rome"', "cities."),
        ("<think>\nTwo.\n</think>\n", '"Rome"', ""),
    ],
)
async def test_a_form_applies_after_continued_reasoning(
    tmp_path: Path, schema: ApiSchema, begun: str, written_text: str, thoughts: str
):
    pytest.importorskip("llguidance")

    async with with_template(tmp_path, THINKS) as (client, service):
        written(service.model, written_text)
        found = await both(client, schema, continuing(schema, begun, form=CITY, temperature=0))
        assert (found.text, found.reasoning.strip()) == ('"Rome"', thoughts)


@each(is_chat=True, chooses_tools=True)
async def test_a_required_call_follows_a_continued_text(tmp_path: Path, schema: ApiSchema):
    pytest.importorskip("llguidance")

    async with with_template(tmp_path, HERMES) as (client, service):
        written(service.model, "ok" + CALL[2:])  # not a call without the constraint
        body = schema.body(BEGUN, tools=[WEATHER], choice="any", temperature=0, max_tokens=200)
        found = await both(client, schema, body)
        assert (found.text, found.calls) == ("", [("get_weather", ARGUMENTS)])


@each()
async def test_stop_token_ids_end_the_answer(tmp_path: Path, schema: ApiSchema):
    async with with_template(tmp_path, HERMES) as (client, service):
        written(service.model, "abcdef")
        body = schema.body(**SHORT)
        found = await both(client, schema, body | {"stop_token_ids": [ord("z"), ord("d")]})
        assert (found.text, found.reason) == ("abc", "stop")
        assert (await both(client, schema, body)).text == "abcdef"


# ---- names of models ----

NAMES = ("tiny:latest", "tiny[1m]", "gpt-4o-mini", "claude-haiku-4-5-20251001", "other:8b", "tiny:8b")


@each()
async def test_one_model_answers_to_any_name(path: Path, schema: ApiSchema, caplog: pytest.LogCaptureFixture):
    body = schema.body(**SHORT)

    async with client_of(path) as (client, _):
        expected, _ = await schema.whole(client, body)
        for _ in range(2):
            for name in NAMES:
                found, _ = await schema.whole(client, body | {"model": name})
                assert found.text == expected.text, name
    lines = [record.getMessage() for record in caplog.records if record.name == "hotset.server"]
    assert lines == [f"requests name the model {name!r}; 'tiny' answers them" for name in NAMES[2:]]


async def test_names_of_models_in_the_log_are_limited(path: Path, caplog: pytest.LogCaptureFixture):
    """Clients choose the names: the log escapes them and remembers a limited number."""
    async with client_of(path) as (_, service):
        for i in range(MOST_NOTICES + 5):
            assert service.at_once(f"a\n{i}", [], required=True) is service
        assert service.at_once("x" * 10**6, [], required=True) is service
    lines = [record.getMessage() for record in caplog.records if record.name == "hotset.server"]
    assert len(lines) <= MOST_NOTICES
    assert max(map(len, lines)) < 500
    assert not any("\n" in line for line in lines)


# ---- refusals ----


@each()
async def test_a_wrong_number_has_the_message_of_the_library(schema: ApiSchema, client: httpx.AsyncClient):
    for one in RULES:
        outside = [] if one.low is None else [one.low - 3]
        outside += [] if one.high is None else [one.high + 1]
        for value in (*outside, "warm", True, []):
            with pytest.raises(InvalidRequestError) as raised:
                hotset.SamplingParams(**{one.name: value})
            body, message = schema.body(**SHORT), str(raised.value)
            assert await refused(client, schema, body | {one.name: value}) == message
            body["options"] = {one.name: value}
            assert await refused(client, schema, body) == f"options.{message}"


@each()
def test_the_document_has_the_ranges_of_numbers(schema: ApiSchema):
    fields = schema.body_type.model_json_schema()["properties"]
    for one in RULES:
        number = fields[one.name]["anyOf"][0]
        assert (number.get("minimum"), number.get("maximum")) == (one.least, one.high), one.name


@each()
async def test_wrong_fields_are_refused_by_name(schema: ApiSchema, client: httpx.AsyncClient):
    body = schema.body(**SHORT)
    for name, value in (("temperature", -1), ("temperature", "warm"), ("top_p", 1.5)):
        assert name in await refused(client, schema, schema.body(**SHORT | {name: value}))
    if not schema.name.startswith("ollama"):  # in Ollama's schema 0 means no limit
        assert "1, not 0" in await refused(client, schema, schema.body(temperature=0, max_tokens=0))
    for wrong in (3, {}):
        assert schema.subject in await refused(client, schema, body | {schema.subject: wrong})
    reply = await client.post(schema.url, content=b"{")
    assert (reply.status_code, schema.error(reply)[:8]) == (400, "the body")
    reply = await client.get(schema.url)
    assert reply.status_code == 405
    assert schema.url in schema.error(reply)


FIELDS: dict[str, Any] = {"frobnicate": 3, "num_ctx": 4096, "cache_prompt": "true", "user": 5, "store": False}


@pytest.mark.parametrize("stream", [False, True])
@each()
async def test_ignored_fields_are_named_in_a_header(
    schema: ApiSchema, stream: bool, client: httpx.AsyncClient
):

    body = schema.body(**SHORT) | {"stream": stream}
    plain = await client.post(schema.url, json=body)
    assert "x-hotset-ignored" not in plain.headers
    reply = await client.post(schema.url, json=body | FIELDS | {"metadata": None})
    assert reply.status_code == 200, reply.text
    assert sorted(reply.headers["x-hotset-ignored"].split(", ")) == ["frobnicate", "num_ctx"]


@each()
async def test_a_strict_server_refuses_ignored_fields(path: Path, schema: ApiSchema):
    async with client_of(path, strict_requests=True) as (client, _):
        body = schema.body(**SHORT)
        for name in ("frobnicate", "num_ctx"):
            message = await refused(client, schema, body | {name: 3})
            assert message.startswith(f"the parameter {name} is not supported: ")
        await schema.whole(client, body | {"user": 5})


@each()
async def test_a_prompt_that_is_too_long_is_refused(schema: ApiSchema, client: httpx.AsyncClient):
    """Check the limit of bytes before tokenization, and the limit of tokens."""

    n_fitting = 256 if schema.name == "completions" else 245  # with the template's tokens they do not fit
    words = r"maximum context length is 256 tokens, and the prompt has (\d+) tokens"
    if schema.name == "messages":
        words = r"prompt is too long: (\d+) tokens > (?:256|255) maximum"
    for n in (5000, n_fitting):
        messages = [{"role": "user", "content": "x" * n}]
        message = await refused(client, schema, schema.body(messages, **SHORT))
        found = re.search(words, message)
        assert found is not None, message
        assert int(found[1]) >= n


@each(is_chat=True)
async def test_unknown_roles_are_refused(schema: ApiSchema, client: httpx.AsyncClient):
    for role in ("wizard", "", 3):
        messages = [*MESSAGES, {"role": role, "content": "x"}]
        message = await refused(client, schema, schema.body(messages, **SHORT))
        assert message.startswith(f"{schema.subject}.1")
        assert "role" in message


@each(is_chat=True)
async def test_a_text_model_refuses_pictures(schema: ApiSchema, client: httpx.AsyncClient):
    url = {"url": "https://example.org/a.png"}
    picture: dict[str, Any] = {"content": [{"type": "image_url", "image_url": url}]}
    if schema.name == "messages":
        picture = {"content": [{"type": "image", "source": {"type": "url"} | url}]}
    elif schema.name == "responses":
        picture = {"content": [{"type": "input_image", "image_url": url["url"]}]}
    elif schema.name == "ollama-chat":
        picture = {"content": "", "images": ["aGk="]}

    body = schema.body([{"role": "user"} | picture], **SHORT)
    message = await refused(client, schema, body, 400)
    assert message.startswith("this model reads only text: there is no projector next to tiny.gguf")


@each()
async def test_the_servers_limits_apply_to_answers(path: Path, schema: ApiSchema):
    async with client_of(path, max_tokens=5) as (client, _):
        for limit in ({}, {"max_tokens": 6}, {"max_tokens": 32_000}):
            found = await both(client, schema, schema.body(temperature=0, **limit))
            assert (found.tokens, found.reason) == (5, "length")
    async with client_of(path, max_seconds=0.0) as (client, _):
        assert "longer than this server gives" in await refused(client, schema, schema.body(**SHORT), 503)
        if schema.name == "chat":
            reply = await client.post(schema.url, json=schema.body(**SHORT))
            assert reply.json()["error"]["code"] == "timeout"


@each()
async def test_a_full_server_and_one_that_shuts_down_refuse_requests(path: Path, schema: ApiSchema):
    async with client_of(path, max_queue=0) as (client, service):
        with held_steps(service.model):
            request = AnswerRequest(messages=MESSAGES, params=hotset.SamplingParams(seed=1), stream=True)
            answers = [await service.ask(request) for _ in range(4)]
            reply = await client.post(schema.url, json=schema.body(**SHORT))
            assert reply.status_code == 429
            assert int(reply.headers["retry-after"]) >= 1
            assert schema.error(reply)
            assert reply.json()["error"] == schema.error(reply) or '"rate_limit_error"' in reply.text
            for answer in answers:
                answer.close()
        while service.model.engine.has_work:
            await asyncio.sleep(0.001)
        await schema.whole(client, schema.body(**SHORT))
        service.stopping = True
        assert "shutting down" in await refused(client, schema, schema.body(**SHORT), 503)
        service.stopping = False


# ---- answers that do not finish ----


@each()
async def test_a_stream_that_fails_ends_with_an_error(
    schema: ApiSchema, client: httpx.AsyncClient, service: Service
):

    body = schema.body(stream=True, temperature=0, max_tokens=200)
    asking = asyncio.create_task(client.post(schema.url, json=body))
    while not service.n_open:
        await asyncio.sleep(0)
    service.end_answers()
    assert "shut down" in schema.failure((await asking).text)


@pytest.mark.parametrize("stream", [False, True])
@each()
def test_a_disconnected_client_ends_its_answer(path: Path, schema: ApiSchema, stream: bool):
    with Serving(path) as server, held_steps(server.model) as held:
        content = json.dumps(schema.body(stream=stream, **SHORT)).encode()
        head = f"POST {schema.url} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(content)}\r\n\r\n"
        with socket.create_connection(("127.0.0.1", server.port), timeout=WATCHDOG) as connection:
            connection.sendall(head.encode() + content)
            assert held.begun.wait(WATCHDOG)
        until(lambda: not server.service.n_open)
        held.gate.set()
        server.wait_until_idle()


@each(keep_alive=True)
def test_a_waiting_stream_sends_keep_alive_events(path: Path, schema: ApiSchema) -> None:
    """They keep the timers of agents from expiring before the first token."""
    with Serving(path, keep_alive_seconds=0.01) as server, held_steps(server.model) as held:
        lines = []
        body = schema.body(stream=True, **SHORT) | schema.usage_wanted
        with server.client.stream("POST", schema.url, json=body) as reply:
            for line in reply.iter_lines():
                lines.append(line)
                if lines.count(schema.keep_alive) == 5:
                    held.gate.set()
        assert lines.count(schema.keep_alive) >= 5
        found = schema.read_stream("".join(f"{line}\n" for line in lines))
        assert (found.text, found.tokens) == (schema.expected(server.model, **SHORT).text, N)
