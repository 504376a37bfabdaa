"""What runs in the process that tries a grammar before the model's own process takes it.

`constraint.py` starts it by its path, with the folder of llguidance and limits as arguments. A grammar comes
in on stdin, {"kind": ..., "text": ..., "around": ..., "marks": [...]}, and what llguidance makes of it goes
out: {"grammar": ...}, or {"error": ...}. Inside llguidance a grammar may take minutes, gigabytes or the whole
stack: here it takes this process.

Nothing of hotset is imported, and nothing heavy: a request waits for it.
"""

from __future__ import annotations

import json
import re
import sys
import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

MAX_MASK_SECONDS = 0.1  # that finding the allowed tokens once may take: a hundred times what it does
_STACK_BYTES = 2 << 20  # a quarter of what a thread of the model's process has
_TRIED_TOKENS = 32  # bytes that are gone along

# Spaces between the parts of JSON are for models to choose, but not without end: a weak one goes on forever.
JSON_SPACE = r"( |\n[ \t]{0,20})"

# Of GBNF: what "." and escapes must not be looked for in, and these themselves.
_GBNF_PARTS = re.compile(r'"(?:\\.|[^"\\])*"|\[(?:\\.|[^\]\\])*\]|#[^\n]*|\.', re.DOTALL)
_GBNF_ESCAPE = re.compile(r"\\(?:u([0-9A-Fa-f]{4})|U([0-9A-Fa-f]{8})|.)", re.DOTALL)


def compiled(kind: str, text: str) -> str:
    """The grammar as llguidance wants it. Raises ValueError for what is none."""
    from llguidance import LLMatcher

    if kind == "json_schema":
        schema = json.loads(text, parse_constant=_no_constant)
        if not isinstance(schema, dict | bool):
            raise ValueError("a schema is an object, or true or false")
        if isinstance(schema, bool):
            schema = {} if schema else {"not": {}}
        space: JsonCompileOptions = {"whitespace_pattern": JSON_SPACE}
        return LLMatcher.grammar_from_json_schema(json.dumps(schema), defaults=space)
    if kind == "regex":
        return LLMatcher.grammar_from_regex(text)
    if re.search(r"(?m)^\s*root\s*::=", text):
        from llguidance.gbnf_to_lark import gbnf_to_lark

        try:
            text = gbnf_to_lark(_GBNF_PARTS.sub(_gbnf_part, text.strip() + "\n"))
        except Exception as error:  # among them a plain Exception, for a rule that is not there
            raise ValueError(str(error)) from None
    elif not re.search(r"(?m)^\s*start\b[^:\n]*:", text):
        raise ValueError(
            "it has neither a rule 'root ::=', as GBNF begins, nor a rule 'start:', as Lark does"
        )
    return LLMatcher.grammar_from_lark(text)


def surrounded(grammar: str, around: str | None) -> str:
    """A grammar within another, in whose Lark it is `@answer`."""
    if around is None:
        return grammar
    inner = json.loads(grammar)["grammars"] if grammar.startswith("{") else [{"lark_grammar": grammar}]
    inner[0]["name"] = "answer"
    return json.dumps({"grammars": [{"lark_grammar": around}, *inner]})


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


def _gbnf_part(match: re.Match[str]) -> str:
    """A part of GBNF as llguidance's converter understands it."""
    part = match[0]
    if part == ".":
        return r"[^\x00]"  # the converter's own would end at a line's end
    return part if part[0] == "#" else _GBNF_ESCAPE.sub(_gbnf_escape, part)


def _gbnf_escape(match: re.Match[str]) -> str:
    if match[1] is None and match[2] is None:
        return match[0]
    code = int(match[1] or match[2], 16)
    if code > sys.maxunicode or 0xD800 <= code < 0xE000:
        return match[0]
    return rf"\x{code:02x}" if code < 128 else chr(code)  # the converter drops zeros of longer ones


class _Bytes:
    """A vocabulary of bytes, an end of text, and marks: that of the model would take long to hand over."""

    bos_token_id = None
    eos_token_id = 256

    def __init__(self, marks: list[str]) -> None:
        self.tokens = [bytes([i]) for i in range(255)] + [b"", b"\xff<end>", b"\xff<mark>"]
        self.tokens += [b"\xff" + mark.encode("utf-8", "replace") for mark in marks]

    def __call__(self, text: str) -> list[int]:
        return list(text.encode("utf-8", "replace"))


def tried(grammar: str, marks: list[str]) -> str | None:
    """What is wrong with it, or None. Goes some bytes along, as answers would."""
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

    grammar = re.sub(r"<\[\d+\]>", "<[257]>", grammar)  # ids of the model's own
    matcher = LLMatcher(
        LLTokenizer(TokenizerWrapper(_Bytes(marks))),
        grammar,
        log_level=0,
        limits=LLParserLimits(verbose_errors=False),
    )
    for _ in range(_TRIED_TOKENS):
        if matcher.is_error():
            break
        begun = time.thread_time()
        mask = matcher.compute_bitmask()
        if time.thread_time() - begun > MAX_MASK_SECONDS:
            return f"too slow: it takes more than {MAX_MASK_SECONDS:g} s to find what may come next"
        if matcher.is_stopped():
            break
        allowed = [i for i in range(8 * len(mask)) if mask[i // 8] >> i % 8 & 1 and i != _Bytes.eos_token_id]
        if not allowed:
            break
        matcher.consume_token(allowed[len(allowed) // 2])
    error = matcher.get_error().split("\n<")[0]  # what follows is the parser's state
    if error in ("NoExtension", "NoExtensionBias"):
        return "there is no text that follows it"
    return error or None


def _limit(max_seconds: int, max_bytes: int) -> None:
    with suppress(ImportError):  # Windows: the parent looks at the clock
        import resource

        for name, value in (
            ("RLIMIT_CORE", 0),
            ("RLIMIT_CPU", max_seconds),
            ("RLIMIT_AS", max_bytes),
        ):
            with suppress(AttributeError, OSError, ValueError):
                resource.setrlimit(getattr(resource, name), (value, value))


def main(home: str, max_seconds: str, max_bytes: str) -> None:
    _limit(int(max_seconds), int(max_bytes))
    sys.path.append(home)
    request = json.loads(sys.stdin.buffer.read())
    answer: dict[str, Any] = {}

    def work() -> None:
        try:
            grammar = surrounded(compiled(request["kind"], request["text"]), request["around"])
            error = tried(grammar, request["marks"])
            answer.update({"grammar": grammar} if error is None else {"error": error})
        except MemoryError:
            pass
        except RecursionError:
            answer["error"] = "it is nested too deep"
        except ValueError as error:
            answer["error"] = str(error)

    threading.stack_size(_STACK_BYTES)
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    sys.stdout.buffer.write(json.dumps(answer).encode())


if __name__ == "__main__":
    main(*sys.argv[1:])
