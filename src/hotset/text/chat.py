"""Chat templates: from messages to the text that a model was trained to continue.

A template is a Jinja program in the model file. hotset runs it with Hugging Face's options, extensions,
filters and globals, so the text is the same to the byte. The template is not trusted: it runs in Jinja's
sandbox, on plain data, in a process that is ended if it exceeds its limits (renderer.py).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from hotset.errors import TokenizerError
from hotset.text import turn_formats
from hotset.text.folding import Folding
from hotset.text.probing import probed
from hotset.text.renderer import Renderer
from hotset.text.tokenizer import Tokenizer
from hotset.text.tool_calls import Form, form_of

log = logging.getLogger("hotset.text")

MAX_SOURCE_CHARS = 1 << 20
"""The maximum length of a template in characters (the longest published ones have about 30,000)."""


class ChatTemplate:
    """A compiled chat template. Use it as a context manager or call `close`: it keeps a process.

    source: the Jinja text. bos_token, eos_token: values of the template's variables of these names.
    is_fallback: the file has no template, and its vocabulary chose this one. renderer: a renderer whose
    process was started earlier.

    Raises TokenizerError for a source that does not compile, exceeds the limits, or is too long.
    """

    def __init__(
        self,
        source: str,
        bos_token: str = "",
        eos_token: str = "",
        *,
        is_fallback: bool = False,
        renderer: Renderer | None = None,
    ) -> None:
        if len(source) > MAX_SOURCE_CHARS:
            raise TokenizerError(
                f"The chat template has {len(source)} characters, and at most {MAX_SOURCE_CHARS} are "
                "accepted: use another file."
            )
        self.source = source
        self.bos_token = bos_token
        self.eos_token = eos_token
        self.is_fallback = is_fallback
        self._renderer = renderer or Renderer()
        try:
            self._renderer.compile(source)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End the process; safe to call twice."""
        self._renderer.close()

    def __enter__(self) -> ChatTemplate:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        **variables: Any,
    ) -> str:
        """Return the text of a conversation, to be encoded with `parse_special=True, add_special=False`.

        messages: OpenAI-shaped, {"role": ..., "content": ...}. add_generation_prompt: end with the head of
        the assistant's turn. tools: JSON schemas of functions. variables: further variables of the template,
        such as enable_thinking. Raises TokenizerError if the template rejects the messages, fails, or
        exceeds its limits.
        """
        for message in messages:
            if not isinstance(message, Mapping) or "role" not in message:
                raise TokenizerError(
                    'Every message of a chat must be an object with a "role" and a "content".'
                )
        given = {
            "messages": messages,
            "tools": tools,
            "documents": documents,
            "add_generation_prompt": add_generation_prompt,
            **variables,
        }
        try:
            return self._renderer.render(_plain(self._variables(given)))
        except (TypeError, ValueError, RecursionError) as error:  # variables that JSON cannot hold
            raise TokenizerError(
                "The messages of a chat must be plain data, as JSON has it "
                f"({type(error).__name__}: {error})."
            ) from None

    @cached_property
    def form(self) -> Form:
        """Return the form in which the model writes calls of functions."""
        return form_of(self.source)

    @cached_property
    def folding(self) -> Folding:
        """Probe the template once, log the rewritings that it needs, and return them."""
        try:
            folding = probed(self._texts, self.form)
        except TokenizerError as error:
            log.warning("The chat template was not probed, and gets conversations as they are. %s", error)
            return Folding()
        if folding != Folding():
            log.info("Conversations are rewritten for the chat template: %s.", folding)
        return folding

    def _texts(self, conversations: Sequence[Mapping[str, Any]]) -> list[str | None]:
        return self._renderer.render_all(
            [self._variables({"add_generation_prompt": True, **one}) for one in conversations]
        )

    def _variables(self, given: Mapping[str, Any]) -> dict[str, Any]:
        own = {"bos_token": self.bos_token, "eos_token": self.eos_token, "xml_tools": given["tools"]}
        return {"documents": None, **own, **given}  # xml_tools is SmolLM3's name for tools


def chat_template(
    metadata: Mapping[str, Any],
    tokenizer: Tokenizer,
    name: str | None = None,
    *,
    renderer: Renderer | None = None,
) -> ChatTemplate:
    """Return the chat template of a GGUF file (`tokenizer.chat_template`).

    If the file has none, return the format that its vocabulary suggests, or ChatML, and log its name.

    name: one of the file's further templates (`tokenizer.chat_template.<name>`, such as "tool_use"); see
    `chat_template_names`. renderer: see ChatTemplate. Raises TokenizerError for a name that the file does
    not have, and if ChatTemplate raises it.
    """
    key = "tokenizer.chat_template" + (f".{name}" if name else "")
    source = metadata.get(key)
    if name and source is None:
        known = ", ".join(chat_template_names(metadata)) or "none"
        raise TokenizerError(f"The file has no chat template named {name!r} (it has: {known}).")
    if source is not None and not isinstance(source, str):
        raise TokenizerError(f"The file's {key} is not a text: fetch or convert it again.")
    bos, eos = tokenizer.piece(tokenizer.bos_id), tokenizer.piece(tokenizer.eos_id)
    if not source:
        found = turn_formats.pointed_to(tokenizer.vocabulary)
        format = found or turn_formats.DEFAULT
        why = "by its vocabulary" if found else "the vocabulary points to no format"
        log.info("The model has no chat template, and gets %s (%s); chat_template chooses.", format, why)
        source = turn_formats.by_vocabulary(tokenizer.vocabulary).source
        return ChatTemplate(source, bos, eos, is_fallback=True, renderer=renderer)
    return ChatTemplate(source, bos, eos, renderer=renderer)


def chat_template_names(metadata: Mapping[str, Any]) -> list[str]:
    """Return the names of a file's further chat templates, in alphabetical order."""
    prefix = "tokenizer.chat_template."
    return sorted(key.removeprefix(prefix) for key in metadata if key.startswith(prefix))


def _plain(value: Any) -> Any:
    """Return `value` in plain JSON types, since the rendering process receives JSON."""
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, Mapping):
        return {_plain(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    for kind in (str, int, float):
        if isinstance(value, kind):
            return kind(value)
    return f"<{type(value).__name__}>"
