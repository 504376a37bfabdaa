"""Translation of an error to a status and a body, in the shape that the caller's client knows.

The path determines the shape: /v1/messages is Anthropic's, /api/ is Ollama's, /v2/ is Cohere's, all other
paths are OpenAI's.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hotset.errors import (
    ContextLengthError,
    HotsetError,
    InvalidRequestError,
    ModelNotFoundError,
    OutOfMemoryError,
    QueueFullError,
    TokenizerError,
)
from hotset.parameters import shown
from hotset.server import shapes
from hotset.server.replies import JsonReply
from hotset.text.renderer import ProcessError

# The folders of an absolute path; not inside a URL, nor a slash without a path.
_FOLDERS = re.compile(r"(?<![\w:/\\.~-])(?:[A-Za-z]:)?[/\\](?:[^\s/\\]+[/\\])+")


def without_folders(message: str, *files: Path) -> str:
    """Return a message for a client: it names files without the server's folders.

    files: these are found in the message even if their folders have spaces.
    """
    for file in files:
        message = message.replace(f"{file.parent}{os.sep}", "")
    return _FOLDERS.sub("", message)


class UnreadableError(ValueError):
    """A validator's error for content that no model reads or writes (modalities.py)."""


class RequestError(HotsetError):
    """A request that is refused. status: HTTP's. param: the field that is wrong. code: for programs.

    retry_after: seconds after which it may be tried again.
    """

    def __init__(
        self,
        message: str,
        status: int = 400,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after: float | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.param, self.code, self.retry_after = status, param, code, retry_after


class NotReadyError(RequestError):
    """The model is not loaded yet, or no longer loaded."""

    def __init__(self, message: str, retry_after: float | None = None) -> None:
        super().__init__(message, 503, code="not_ready", retry_after=retry_after)


@dataclass(frozen=True)
class Problem:
    """An error for a client; the fields have the meaning of RequestError's.

    anthropic: the message for clients of Anthropic's API, if it differs.
    """

    status: int
    message: str
    param: str | None = None
    code: str | None = None
    retry_after: float | None = None
    anthropic: str | None = None

    @property
    def headers(self) -> dict[str, str]:
        if self.status == 501:  # the official clients of OpenAI and Anthropic ask again for any 5xx
            return {"x-should-retry": "false"}
        if self.retry_after is None:
            return {}
        return {"Retry-After": str(max(1, math.ceil(self.retry_after)))}


def problem_of(error: BaseException) -> Problem:
    """Return an error for a client: without the server's paths, and only the kind of an unexpected one."""
    match error:
        case RequestError():
            return Problem(error.status, str(error), error.param, error.code, error.retry_after)
        case ContextLengthError():
            return _too_long(error)
        case InvalidRequestError():
            return Problem(400, str(error), error.param)
        case ProcessError():
            return Problem(503, without_folders(str(error)), code="server_error", retry_after=5)
        case TokenizerError():
            return Problem(400, str(error))
        case ModelNotFoundError():
            return Problem(404, without_folders(str(error)), code="model_not_found")
        case QueueFullError():
            return Problem(429, str(error), code="queue_full", retry_after=error.seconds)
        case OutOfMemoryError():
            return Problem(503, without_folders(str(error)), code="out_of_memory", retry_after=5)
        case HotsetError():
            return Problem(500, without_folders(str(error)), code="server_error")
    return Problem(500, f"the server itself failed, with {type(error).__name__}", code="server_error")


def _too_long(error: ContextLengthError) -> Problem:
    """Return a problem with the words by which clients know that they must shorten a conversation."""
    code = "context_length_exceeded"
    if error.n_tokens is None or error.n_ctx is None:
        return Problem(400, str(error), None, code)
    message = (
        f"this model's maximum context length is {error.n_ctx} tokens, and the prompt has {error.n_tokens} "
        "tokens or more; shorten it, or start the server with a larger context (-c)"
    )
    most = min(error.n_ctx, error.n_tokens - 1)  # the answer needs one token
    return Problem(
        400, message, None, code, anthropic=f"prompt is too long: {error.n_tokens} tokens > {most} maximum"
    )


# What hotset says of a field for the kinds of pydantic errors that speak of Python; names in braces are
# in the error's context.
_COMPLAINTS = {
    "bool_type": "must be true or false",
    "dict_type": "must be a JSON object",
    "list_type": "must be a list",
    "literal_error": "must be one of {expected}",
    "model_type": "must be a JSON object",
    "model_attributes_type": "must be a JSON object",
    "string_type": "must be a text",
    "too_short": "must have {min_length} or more entries",
    "too_long": "must have {max_length} entries at most",
    "union_tag_invalid": "must have a {discriminator} that is one of {expected_tags}",
}


def invalid_body(errors: Sequence[Mapping[str, Any]]) -> Problem:
    """Return one of pydantic's errors as a message that names the field.

    For a union, it takes the error of the alternative that went deepest, and of these our own checks first.
    """

    def weight(one: Mapping[str, Any]) -> tuple[bool, int, bool]:
        return _is_unreadable(one), len(one.get("loc", ())), one.get("type") == "value_error"

    error = max(errors, key=weight, default={})
    where = ".".join(str(part) for part in error.get("loc", ())[1:] if not _is_alternative(part))
    kind = error.get("type")
    if kind in ("extra_forbidden", "none_required"):
        return Problem(
            400, f"the parameter {where} is not supported; leave it out", where, "unsupported_parameter"
        )
    if kind == "missing":
        return Problem(400, f"{where or 'the body'} is missing", where or None, "missing_required_parameter")
    if _is_unreadable(error):
        return Problem(501, f"{where}: {error['ctx']['error']}", where, "not_supported")
    field, message = where or "the body", str(error.get("msg", "it is not valid"))
    if kind == "value_error":  # one of ours, which names the value
        message = message.removeprefix("Value error, ")
    elif kind in _COMPLAINTS:
        message = _COMPLAINTS[kind].format(**error.get("ctx", {})).replace("_kind()", "'type'")
        if kind == "literal_error":
            message = message.replace("'", "").replace(" or ", ", ")
    message = message.replace("Input should be", "must be", 1)
    given = f", not {shown(error['input'])}" if "input" in error and kind != "value_error" else ""
    joint = " " if message.startswith("must ") else ": "
    return Problem(400, f"{field}{joint}{message}{given}", where or None, "invalid_value")


def _is_unreadable(error: Mapping[str, Any]) -> bool:
    return isinstance(error.get("ctx", {}).get("error"), UnreadableError)


def _is_alternative(part: Any) -> bool:
    """Return whether a part of pydantic's path names a Python type of a union, not a field."""
    if not isinstance(part, str):
        return False
    return part in ("str", "int", "float", "bool") or "[" in part or "(" in part or part[:1].isupper()


# -- the shapes ------------------------------------------------------------------------------------

_OPENAI_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
    501: "not_supported_error",  # as llama-server has it
}
_ANTHROPIC_TYPES = _OPENAI_TYPES | {413: "request_too_large", 501: "api_error", 503: "overloaded_error"}


def body_of(problem: Problem, path: str) -> dict[str, Any]:
    """Return the JSON of an error for a client of `path`."""
    if path.startswith("/v1/messages"):
        kind = _ANTHROPIC_TYPES.get(problem.status) or _of_status(problem.status, "api_error")
        return shapes.AnthropicErrorReply.written(
            error=shapes.AnthropicError.written(type=kind, message=problem.anthropic or problem.message)
        )
    if path.startswith("/api/"):
        return shapes.OllamaErrorReply.written(error=problem.message)
    if path.startswith("/v2/"):
        return shapes.CohereErrorReply.written(message=problem.message)
    kind = _OPENAI_TYPES.get(problem.status) or _of_status(problem.status, "server_error")
    error = shapes.OpenAIError.written(
        message=problem.message, type=kind, param=problem.param, code=problem.code
    )
    return shapes.OpenAIErrorReply.written(error=error)


def _of_status(status: int, fault: str) -> str:
    return fault if status >= 500 else "invalid_request_error"


def response_of(problem: Problem, path: str, headers: Mapping[str, str] | None = None) -> JsonReply:
    return JsonReply(
        body_of(problem, path), status_code=problem.status, headers={**problem.headers, **(headers or {})}
    )
