"""Preparation of messages for a chat template: calls of functions, and an answer that was begun.

OpenAI's clients write the arguments of a call as a text of JSON. Most templates need an object, which they
write as JSON themselves; some need the text. Templates first get the object, and if they reject it the text.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, NamedTuple

from hotset.errors import ContextLengthError, InvalidRequestError
from hotset.parameters import shown
from hotset.text.chat import ChatTemplate
from hotset.text.folding import AS_TEXT, Folding, folded
from hotset.text.image_text import (
    NO_TOKEN,
    NOTE,
    GivenImage,
    ImageSource,
    PlacedImage,
    PromptTokens,
    as_parts,
    images_of,
    placeholders_in,
    split,
)
from hotset.text.plain_text import PlainText
from hotset.text.renderer import RefusedError
from hotset.text.tokenizer import Tokenizer


def checked_calls(message: Mapping[str, Any], i: int) -> dict[str, Any]:
    """Return message `i` with its calls of functions checked and completed, in the form of OpenAI's clients.

    Raises InvalidRequestError for invalid calls.
    """
    checked = dict(message)
    calls = checked.pop("tool_calls", None)
    if not calls:  # without the key: templates test whether it exists
        return checked
    if not isinstance(calls, list):
        raise InvalidRequestError(f"the tool_calls of message {i} must be a list, not {shown(calls)}")
    checked["tool_calls"] = [_checked_call(call, i, n) for n, call in enumerate(calls)]
    if checked.get("content") is None:
        checked["content"] = ""
    return checked


def _checked_call(call: Any, i: int, n: int) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise InvalidRequestError(
            f'call {n} of message {i} must be an object with a "function" that has a "name" and "arguments"'
        )
    arguments = function.get("arguments")
    if arguments is None:
        arguments = "{}"
    if not isinstance(arguments, str | Mapping):
        raise InvalidRequestError(
            f"the arguments of call {n} of message {i} must be a text with JSON in it, not {shown(arguments)}"
        )
    return {"type": "function", **call, "function": {**function, "arguments": arguments}}


class Opening(NamedTuple):
    """The beginning of an answer; the names are vLLM's and Hugging Face's.

    By default the answer continues a last message of the assistant, and otherwise begins a new message.
    add_generation_prompt: True always begins a new one, False neither begins nor continues one.
    continue_final_message: whether the last message is continued.
    """

    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None

    def continues(self, messages: Sequence[Mapping[str, Any]]) -> bool:
        """Return whether the last message is continued.

        Raises InvalidRequestError if the two fields contradict each other, or if the assistant did not write
        the message to continue."""
        is_assistant = messages[-1]["role"] == "assistant"
        if self.continue_final_message is None:
            return is_assistant and self.add_generation_prompt is None
        if self.continue_final_message and self.add_generation_prompt:
            raise InvalidRequestError(
                "add_generation_prompt begins a message of the assistant, and continue_final_message "
                "continues one; leave one of them out"
            )
        if self.continue_final_message and not is_assistant:
            raise InvalidRequestError(
                "continue_final_message needs a last message of the assistant, and the role of the last one "
                f"is {shown(messages[-1]['role'])}"
            )
        return self.continue_final_message


BY_LAST_ROLE = Opening()


def encoded(
    template: ChatTemplate,
    tokenizer: Tokenizer,
    most: int,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None = None,
    opening: Opening = BY_LAST_ROLE,
    images: ImageSource | None = None,
    **variables: Any,
) -> list[int]:
    """Return the token ids of a conversation up to the answer, with BOS if the model's texts have it.

    Only the template writes special tokens; their spelling in messages and tools is plain text.
    messages: results of `checked_calls`. most: see Tokenizer.encode, which raises ContextLengthError.
    images: of the model; with images in the messages, the result is a PromptTokens.
    Raises InvalidRequestError for a last message that cannot be continued. Errors of `rendered` pass through.
    """
    plain = PlainText(tokenizer, most)
    how = {"tools": tools, "images": images, **variables}
    text = _up_to_answer(template, messages, opening, plain.protected, how)

    def ids_of(text: str, after_image: bool = False) -> list[int]:
        return list(
            tokenizer.encode(
                text, add_special=False, parse_special=True, most=most, restored=plain.restored,
                after_image=after_image,
            )
        )  # fmt: skip

    given = {name: image for message in messages for name, image in images_of(message["content"]).items()}
    first = tokenizer.text_bos_id
    if given and images is not None:
        return _encoded_with_images(split(text), given, images, ids_of, first, most)
    tokens = ids_of(text)
    # Most templates write BOS themselves, and it must occur only once.
    if first is not None and tokens[:1] != [first]:
        tokens.insert(0, first)
    return tokens


def _encoded_with_images(
    parts: Sequence[str],
    given: Mapping[str, GivenImage],
    source: ImageSource,
    ids_of: Callable[[str, bool], list[int]],
    bos_id: int | None,
    most: int,
) -> PromptTokens:
    """Return the ids of a rendered conversation. parts: texts, and placeholders of images, in turn.

    A text between the tokens of two images is encoded as a whole, as between two special tokens. Raises
    ContextLengthError before it decodes an image after `most` tokens.
    """
    tokens, placed = PromptTokens(), []
    text = ""
    for i, part in enumerate(parts):
        if i % 2 == 0:
            text += part
            continue
        if len(tokens) > most:
            raise ContextLengthError(
                f"the images have more than {len(tokens)} tokens, which do not fit in the context of {most}; "
                "send fewer or smaller images, or load the model with a larger n_ctx",
                n_tokens=len(tokens),
                n_ctx=most,
            )
        firsts = []
        for piece in source.pieces(given[part]):
            if isinstance(piece, str):
                text += piece
                continue
            tokens += _begun(tokens, ids_of(text, bool(tokens)) if text else [], bos_id)
            text = ""
            firsts.append(len(tokens))
            tokens += [NO_TOKEN] * piece
        placed.append(PlacedImage(given[part], tuple(firsts)))
    tokens += _begun(tokens, ids_of(text, bool(tokens)) if text else [], bos_id)
    tokens.images = tuple(placed)
    return tokens


def _begun(before: Sequence[int], tokens: list[int], bos_id: int | None) -> list[int]:
    """Return further tokens of a prompt, with BOS if they are the first ones."""
    return tokens if before or bos_id is None or tokens[:1] == [bos_id] else [bos_id, *tokens]


def text_of(
    template: ChatTemplate,
    tokenizer: Tokenizer,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None = None,
    opening: Opening = BY_LAST_ROLE,
    images: ImageSource | None = None,
    **variables: Any,
) -> str:
    """Return the text that `encoded` turns into tokens, without BOS, which an encoder of prompts adds.

    An image is the marker of the model's family, or a note.
    """
    how = {"tools": tools, "images": images, **variables}
    marker = NOTE if images is None else images.marker
    text = marker.join(split(_up_to_answer(template, messages, opening, _unchanged, how))[::2])
    first = tokenizer.text_bos_id
    return text if first is None else text.removeprefix(tokenizer.piece(first))


def _unchanged(value: Any) -> Any:
    return value


def _up_to_answer(
    template: ChatTemplate,
    messages: Sequence[Mapping[str, Any]],
    opening: Opening,
    protected: Callable[[Any], Any],
    how: Mapping[str, Any],
) -> str:
    """Return the rendered conversation up to the beginning of the answer."""
    if opening.continues(messages):
        return _left_open(template, messages, protected, how)
    return rendered(
        template, messages, opening.add_generation_prompt is not False, protected=protected, **how
    )


def _left_open(
    template: ChatTemplate,
    messages: Sequence[Mapping[str, Any]],
    protected: Callable[[Any], Any],
    how: Mapping[str, Any],
) -> str:
    """Render a conversation up to the end of its last message, without the mark that closes it.

    A random text after the message locates its end: no template can mistake that text for the end itself.
    """
    *before, last = messages
    if "tool_calls" in last:
        raise InvalidRequestError(
            "the last message calls functions and cannot be continued; add the results of the calls"
        )
    end = secrets.token_hex(16)
    text = rendered(
        template, [*before, {**last, "content": last["content"] + end}], False, protected=protected, **how
    )
    head, *rest = text.split(end)
    # Templates strip white space from the beginning of an answer, and reasoning that a client left in it.
    own = protected(last["content"]).rpartition("</think>")[2].lstrip()
    if len(rest) != 1 or not head.endswith(own):
        raise InvalidRequestError(
            "the last message is from the assistant, but this model's chat template changes it, so it cannot "
            "be continued; end with a message of the user"
        )
    return head


def rendered(
    template: ChatTemplate,
    messages: Sequence[Mapping[str, Any]],
    add_generation_prompt: bool = True,
    tools: Sequence[Mapping[str, Any]] | None = None,
    protected: Callable[[Any], Any] = _unchanged,
    images: ImageSource | None = None,
    **variables: Any,
) -> str:
    """Render results of `checked_calls`, rewritten as the template needs (text/folding.py).

    If the template still rejects them, they are rendered as texts of two alternating roles.
    protected: returns the value to render in place of plain data, such as messages and tools consist of.
    images: of the model, for messages with images, whose placeholders are in the result.
    Raises the errors of ChatTemplate.render.
    """
    named = _with_names(messages)
    known = protected(tools)

    def made(folding: Folding, given: Sequence[dict[str, Any]]) -> str:
        found, shown_tools, more = folded(folding, template.form, given, known)

        def render(messages: Sequence[dict[str, Any]]) -> str:
            return template.render(messages, add_generation_prompt, shown_tools, **more, **variables)

        return render(found) if images is None else _rendered_with_images(found, images, render)

    as_objects = _protected(_with_arguments(named, _as_object), protected)
    if not tools and _is_ordinary(as_objects):
        # Nearly every template accepts these. Trying first saves the first answer from waiting for the probe.
        with suppress(RefusedError):
            text = made(Folding(), as_objects)
            if images is not None or as_objects[-1]["content"].strip() in text:
                return text
    forms = [as_objects]
    if any("tool_calls" in message for message in messages):
        forms.append(_protected(_with_arguments(named, _as_text), protected))
    refusal: RefusedError | None = None
    for folding in (template.folding, replace(template.folding, **AS_TEXT)):
        for given in forms:
            try:
                return made(folding, given)
            except RefusedError as error:
                refusal = refusal or error
    assert refusal is not None
    raise refusal


def _rendered_with_images(
    messages: Sequence[dict[str, Any]],
    source: ImageSource,
    render: Callable[[Sequence[dict[str, Any]]], str],
) -> str:
    """Render messages with placeholders of images; the result has each of them once, in order.

    Contents with images are first given as parts, as published templates of vision models expect them. A
    template that does not write a marker for each image gets texts with markers in them. Raises RefusedError
    if it leaves out an image there, too.
    """
    wanted = placeholders_in(messages)
    if not wanted:
        return render(messages)
    as_lists = [{**message, "content": as_parts(message.get("content"))} for message in messages]
    texts = [
        part["text"].strip()
        for message in as_lists
        if isinstance(message["content"], list)
        for part in message["content"]
        if part["type"] == "text"
    ]
    with suppress(RefusedError):
        text = render(as_lists)
        between = text.split(source.marker)
        if len(between) == len(wanted) + 1 and all(one in text for one in texts):
            return "".join(piece for pair in zip(between, [*wanted, ""], strict=True) for piece in pair)
    marked = [{**message, "content": _marked(message.get("content"), source)} for message in messages]
    text = render(marked)
    if split(text)[1::2] != wanted:
        raise RefusedError("the chat template leaves out an image; set another one with chat_template")
    return text


def _marked(content: Any, source: ImageSource) -> Any:
    """Return a content whose placeholders are surrounded by the text around the family's marker."""
    if isinstance(content, list):
        return [{**part, "text": _marked(part.get("text"), source)} for part in content]
    if not isinstance(content, str):
        return content
    before, _, after = source.plain_marker.partition(source.marker)
    return "".join(f"{before}{one}{after}" if i % 2 else one for i, one in enumerate(split(content)))


def _is_ordinary(messages: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether the messages are alternating questions and answers, without calls."""
    roles = ("user", "assistant")
    return all(
        message["role"] == roles[i % 2] and "tool_calls" not in message for i, message in enumerate(messages)
    )


def _protected(
    messages: Sequence[Mapping[str, Any]], protected: Callable[[Any], Any]
) -> list[dict[str, Any]]:
    return [
        {key: value if key == "role" else protected(value) for key, value in message.items()}
        for message in messages
    ]


def _with_names(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Add to results the name of the called function, which templates write and clients leave out."""
    names: dict[Any, str] = {}
    found = []
    for message in messages:
        for call in message.get("tool_calls", ()):
            if isinstance(call.get("id"), str):
                names[call["id"]] = call["function"]["name"]
        id = message.get("tool_call_id")
        name = names.get(id) if message["role"] == "tool" and isinstance(id, str) else None
        found.append({"name": name, **message} if name else dict(message))
    return found


def _with_arguments(messages: Sequence[Mapping[str, Any]], form: Any) -> list[Mapping[str, Any]]:
    return [
        {
            **message,
            "tool_calls": [
                {**call, "function": {**call["function"], "arguments": form(call["function"]["arguments"])}}
                for call in message["tool_calls"]
            ],
        }
        if "tool_calls" in message
        else message
        for message in messages
    ]


def _as_object(arguments: str | Mapping[str, Any]) -> Any:
    """Return the object that a text of JSON holds; otherwise the text, as a model wrote it."""
    if isinstance(arguments, Mapping):
        return arguments
    try:
        value = json.loads(arguments or "{}", strict=False)
    except (ValueError, RecursionError):
        return arguments
    return value if isinstance(value, dict) else arguments


def _as_text(arguments: str | Mapping[str, Any]) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
