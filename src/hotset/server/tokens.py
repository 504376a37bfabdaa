"""POST /tokenize and /detokenize, GET /tokenizer_info: in the formats of llama-server and of vLLM."""

from __future__ import annotations

import threading
from typing import Annotated, Any

from fastapi import APIRouter, Request, Response
from pydantic import Field

from hotset.api import Model
from hotset.server.body import BodyRoute
from hotset.server.errors import RequestError
from hotset.server.openai.chat import Message
from hotset.server.replies import JsonReply
from hotset.server.rows import Body, Flag
from hotset.server.shapes import DetokenizeReply
from hotset.server.streams import in_turn, serving, until_left
from hotset.server.tool_fields import MAX_TOOLS

router = APIRouter(route_class=BodyRoute)


MAX_CHARS = 1 << 20
"""Characters of a text to tokenize."""
MAX_TEXT_BYTES = 4 << 20
"""UTF-8 bytes of the text of tokens."""


class TokenizeBody(Body):
    """content is llama-server's, prompt and messages are vLLM's.

    Special tokens spelled in a text are parsed, as in a prompt of /v1/completions, unless parse_special is
    false.
    """

    model: str | None = None
    content: str | None = None
    add_special: Flag | None = None
    parse_special: Flag | None = None
    with_pieces: Flag | None = None
    prompt: str | None = None
    add_special_tokens: Flag | None = None
    return_token_strs: Flag | None = None
    messages: Annotated[list[Message], Field(min_length=1)] | None = None
    add_generation_prompt: Flag | None = None
    continue_final_message: Flag | None = None
    tools: Annotated[list[dict[str, Any]], Field(max_length=MAX_TOOLS)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    def ids(self, model: Model, left: threading.Event) -> list[int]:
        if self.messages is not None:
            return model.encode_chat(
                self.messages,
                self.tools,
                add_generation_prompt=self.add_generation_prompt,
                continue_final_message=self.continue_final_message,
                variables=self.chat_template_kwargs,
                stop=left,
            )
        text, adds = self.content or "", bool(self.add_special)
        if self.prompt is not None:
            text, adds = self.prompt, self.add_special_tokens is not False
        parses = self.parse_special is not False
        if adds:
            return model.tokenizer.encode_prompt(text, parses)
        return model.tokenizer.encode(text, add_special=False, parse_special=parses)

    def check(self) -> None:
        given = [name for name in ("content", "prompt", "messages") if getattr(self, name) is not None]
        if len(given) != 1:
            raise RequestError(
                f"one of content, prompt and messages is needed, not {' and '.join(given) or 'none'}",
                param=given[0] if given else "content",
            )
        text = self.content or self.prompt or ""
        if len(text) > MAX_CHARS:
            raise RequestError(
                f"{given[0]} has {len(text)} characters, and at most {MAX_CHARS} are taken",
                413,
                param=given[0],
                code="body_too_large",
            )


class DetokenizeBody(Body):
    model: str | None = None
    tokens: list[int]


@router.post("/tokenize")
async def tokenize(body: TokenizeBody, http: Request) -> Response:
    model = (await serving(http, body.model, required=False)).model
    body.check()

    def reply(left: threading.Event) -> JsonReply:
        ids = body.ids(model, left)
        found: dict[str, Any] = {"count": len(ids), "max_model_len": model.n_ctx, "tokens": ids}
        if body.with_pieces:
            found["tokens"] = ({"id": id, "piece": _piece(model, id)} for id in ids)
        if body.return_token_strs:
            strings = (model.tokenizer.token_text(id) for id in ids)
            found["token_strs"] = strings
        return JsonReply(found)

    return await until_left(http, reply)


@router.post("/detokenize", responses={200: {"model": DetokenizeReply}})
async def detokenize(body: DetokenizeBody, http: Request) -> Response:
    tokenizer = (await serving(http, body.model, required=False)).model.tokenizer

    def reply() -> JsonReply:
        n_bytes = sum(len(tokenizer.token_bytes(id)) for id in body.tokens)
        if n_bytes > MAX_TEXT_BYTES:
            raise RequestError(
                f"the tokens have {n_bytes} bytes of text, and at most {MAX_TEXT_BYTES} are returned",
                413,
                param="tokens",
                code="body_too_large",
            )
        text = tokenizer.decode(body.tokens)
        return JsonReply(DetokenizeReply.written(content=text, prompt=text))

    return await in_turn(http, reply)


@router.get("/tokenizer_info")
async def tokenizer_info(http: Request) -> dict[str, Any]:
    """Return the entries of a Hugging Face tokenizer_config.json for this tokenizer."""
    model = (await serving(http, http.query_params.get("model"), required=False)).model
    tokenizer, template = model.tokenizer, model.chat_template
    return {
        "tokenizer_class": type(tokenizer).__name__,
        "bos_token": tokenizer.piece(tokenizer.bos_id) or None,
        "eos_token": tokenizer.piece(tokenizer.eos_id) or None,
        "pad_token": tokenizer.piece(tokenizer.pad_id) or None,
        "add_bos_token": tokenizer.add_bos,
        "add_eos_token": tokenizer.add_eos,
        "vocab_size": tokenizer.n_vocab,
        "model_max_length": model.n_ctx,
        "chat_template": template.source,
    }


def _piece(model: Model, id: int) -> str | list[int]:
    """Return a token's text, or its bytes if they are not a text by themselves."""
    piece = model.tokenizer.token_bytes(id)
    try:
        return piece.decode("utf-8")
    except UnicodeDecodeError:
        return list(piece)
