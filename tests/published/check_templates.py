"""`make test-published`: conversations rendered by the chat templates in llama.cpp's source.

    python tests/published/check_templates.py FOLDER

prints a table. It shows for each template and conversation whether the template accepts it (`.`), drops a
text (`-`) or refuses it (`x`): first the unchanged conversation, then hotset's rewritten one. For
conversations that a template accepts, transformers is the oracle.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from hotset.errors import TokenizerError
from hotset.generation import checked_messages
from hotset.text.chat import ChatTemplate
from hotset.text.messages import rendered

FOLDER = Path(os.environ.get("TEMPLATES", "templates"))
MOST_REFUSED = 10
Message = dict[str, Any]


def said(role: str, n: int = 1) -> Message:
    return {"role": role, "content": f"the text {n} of {role}"}


def called(*cities: str) -> Message:
    calls = [
        {
            "id": f"call{city:X<5.5}",
            "type": "function",
            "function": {"name": "get_weather", "arguments": json.dumps({"city": city})},
        }
        for city in cities
    ]
    return {"role": "assistant", "content": "", "tool_calls": calls}


def result(city: str) -> Message:
    return {
        "role": "tool",
        "tool_call_id": f"call{city:X<5.5}",
        "name": "get_weather",
        "content": f"{len(city)} degrees",
    }


def function(name: str, **properties: str) -> dict[str, Any]:
    schema = {key: {"type": kind, "description": f"the {key}"} for key, kind in properties.items()}
    parameters = {"type": "object", "properties": schema, "required": [*schema][:1]}
    return {
        "type": "function",
        "function": {"name": name, "description": f"What {name} does", "parameters": parameters},
    }


TOOLS = [function("get_weather", city="string"), function("get_time", city="string", utc="boolean")]
SYSTEM, USER, ANSWER, NEXT = said("system"), said("user"), said("assistant"), said("user", 2)
PARTS = [{"type": "text", "text": "one part"}, {"type": "text", "text": " and another"}]
LATE = [SYSTEM, USER, ANSWER, said("system", 2), NEXT]
ONE, TWO = [USER, called("Paris"), result("Paris")], [USER, called("Paris", "Zurich")]
RESULTS = [SYSTEM, *TWO, result("Paris"), result("Zurich")]
CONVERSATIONS: dict[str, tuple[list[Message], list[dict[str, Any]] | None]] = {
    "system first": ([SYSTEM, USER], None),
    "system later": ([USER, ANSWER, SYSTEM, NEXT], None),
    "developer": ([said("developer"), USER], None),
    "two users in a row": ([USER, NEXT], None),
    "assistant first": ([ANSWER, USER], None),
    "text parts": ([{"role": "user", "content": PARTS}], None),
    "tools": ([SYSTEM, USER], TOOLS),
    "one call": (ONE[:2], TOOLS),
    "two calls": (TWO, TOOLS),
    "results with tools": (RESULTS, TOOLS),
    "results without tools": (ONE, None),
    "a call required": ([USER], TOOLS),
    "result, then user": ([SYSTEM, *ONE, NEXT], TOOLS),
}


def paths(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.jinja"))


def with_objects(messages: Sequence[Message]) -> list[Message]:
    """Return the messages with the arguments of calls as objects."""
    found = json.loads(json.dumps(messages))
    for message in found:
        for call in message.get("tool_calls", ()):
            call["function"]["arguments"] = json.loads(call["function"]["arguments"])
    return found


def of_itself(template: ChatTemplate, messages: Sequence[Message], tools: Any) -> str | None:
    """Return the text of unchanged messages; None if the template refuses them."""
    plain = checked_messages(messages)
    for given in (with_objects(plain), plain):
        try:
            return template.render(given, True, tools)
        except TokenizerError:
            pass
    return None


def of_hotset(template: ChatTemplate, messages: Sequence[Message], tools: Any) -> str | None:
    try:
        return rendered(template, checked_messages(messages), tools=tools)
    except TokenizerError:
        return None


def texts_of(messages: Sequence[Message], tools: Any) -> Iterator[str]:
    """Yield the texts of a conversation that a prompt must contain."""
    for message in checked_messages(messages):
        yield message["content"]
        for call in message.get("tool_calls", ()):
            yield json.loads(call["function"]["arguments"])["city"]
    yield from (tool["function"]["name"] for tool in tools or ())


def mark(text: str | None, messages: Sequence[Message], tools: Any) -> str:
    if text is None:
        return "x"
    return "." if all(part in text for part in texts_of(messages, tools)) else "-"


def table(folder: Path) -> tuple[list[str], int, int]:
    """Return the lines, and the numbers of requests refused without and with hotset's rewriting."""
    names = ", ".join(f"{i} {name}" for i, name in enumerate(CONVERSATIONS, 1))
    lines = [names, f"{'':52}{'of itself':15}hotset"]
    n_before = n_after = 0
    for path in paths(folder):
        with ChatTemplate(path.read_text(), "<s>", "</s>") as template:
            before = after = ""
            for messages, tools in CONVERSATIONS.values():
                before += mark(of_itself(template, messages, tools), messages, tools)
                after += mark(of_hotset(template, messages, tools), messages, tools)
            lines.append(f"{path.stem:52}{before:15}{after}  {template.folding}".rstrip())
        n_before, n_after = n_before + before.count("x"), n_after + after.count("x")
    return lines, n_before, n_after


PATHS = paths(FOLDER)
each = pytest.mark.parametrize("path", PATHS, ids=[path.stem for path in PATHS])


@pytest.fixture
def template(path: Path) -> Iterator[ChatTemplate]:
    with ChatTemplate(path.read_text(), "<s>", "</s>") as found:
        yield found


def test_there_are_templates() -> None:
    assert len(PATHS) >= 70, f"no templates in {FOLDER}: name their folder by TEMPLATES"


def test_few_conversations_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    lines, n_before, n_after = table(FOLDER)
    with capsys.disabled():
        print("\n" + "\n".join(lines), f"refused: {n_before} of itself, {n_after} by hotset", sep="\n")
    assert n_after <= MOST_REFUSED


@each
def test_an_accepted_conversation_is_not_changed(template: ChatTemplate) -> None:
    more = {
        "a long one": ([*RESULTS, ANSWER, NEXT], TOOLS),
        "plain": ([USER, ANSWER, NEXT], None),
        "late": (LATE, None),
    }
    for name, (messages, tools) in (CONVERSATIONS | more).items():
        own = of_itself(template, messages, tools)
        if mark(own, messages, tools) == ".":
            assert of_hotset(template, messages, tools) == own, name


@each
def test_text_equals_transformers(template: ChatTemplate) -> None:
    oracle = pytest.importorskip("transformers.utils.chat_template_utils")
    n_compared = 0
    for messages, tools in CONVERSATIONS.values():
        plain = checked_messages(messages)
        for given in (with_objects(plain), plain):
            try:
                text = oracle.render_jinja_template(
                    conversations=[given], tools=tools, chat_template=template.source,
                    add_generation_prompt=True, bos_token="<s>", eos_token="</s>",
                )[0][0]  # fmt: skip
            except Exception:  # a template can make it raise anything
                continue
            if mark(text, messages, tools) == ".":
                assert of_hotset(template, messages, tools) == text
                n_compared += 1
            break
    assert n_compared or template.folding.empty_tools or template.folding.named_functions


CALLS = [SYSTEM, *TWO, result("Paris"), result("Zurich"), NEXT, ANSWER, said("user", 3)]
SYSTEMS = [SYSTEM, said("system", 3), USER, ANSWER, said("system", 2), NEXT, said("user", 3), ANSWER, NEXT]
TURNS = [(CALLS, [2, 6, 8], TOOLS), (SYSTEMS, [3, 7, 9], None)]  # conversations, where answers begin, tools


@each
def test_a_turn_is_a_prefix_of_the_next(template: ChatTemplate) -> None:
    """Check rewritten conversations of templates whose text of an ordinary conversation has this property."""
    ordinary = [[SYSTEM, USER], [SYSTEM, USER, ANSWER, NEXT]]
    if any(of_itself(template, one, None) is None for one in ordinary):
        ordinary = [one[1:] for one in ordinary]
    for conversation, cuts, tools in TURNS:
        turns = [conversation[:cut] for cut in cuts]
        if all(mark(of_itself(template, turn, tools), turn, tools) == "." for turn in turns):
            continue
        known = tools or ([] if template.folding.empty_tools else None)
        own = [template.render(one, False, known, **template.folding.variables(known)) for one in ordinary]
        texts = [rendered(template, turn, False, tools=tools) for turn in turns]
        if own[1].startswith(own[0]):
            assert texts[1].startswith(texts[0])
            assert texts[2].startswith(texts[1])


if __name__ == "__main__":
    found, before, after = table(Path(sys.argv[1]))
    print("\n".join(found), f"refused: {before} of itself, {after} by hotset", sep="\n")
