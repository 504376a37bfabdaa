"""Chat templates of well-known formats by name, for files that have none or a broken one.

A format has marks around the messages of each role. `named` looks a format up. `pointed_to` finds the format
whose marks are tokens of a vocabulary.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from hotset.errors import InvalidRequestError, did_you_mean
from hotset.parameters import shown

Marks = tuple[str, str]
"""Texts before and after a message; `{role}` stands for its role."""


@dataclass(frozen=True, kw_only=True)
class TurnFormat:
    """The marks of a format.

    tokens: a vocabulary with all of them points to the format; empty if the marks are plain text.
    turns: marks by role. other: the marks of further roles; None: the template rejects them. A system message
    without marks becomes the beginning of the next message.
    head: text before the first message. trims: whether white space around contents is removed.
    """

    tokens: tuple[str, ...] = ()
    turns: Mapping[str, Marks] = field(default_factory=dict)
    other: Marks | None = None
    head: str = ""
    trims: bool = False

    @property
    def source(self) -> str:
        """Return the format as a Jinja template."""
        content = "message['content'] | trim" if self.trims else "message['content']"
        # JSON objects are valid Jinja expressions.
        return f"""\
{{%- set turns = {json.dumps(self.turns, ensure_ascii=False)} -%}}
{{%- set other = {json.dumps(self.other, ensure_ascii=False) if self.other else "none"} -%}}
{{{{- {json.dumps(self.head, ensure_ascii=False)} -}}}}
{{%- set first = '' -%}}
{{%- if not (turns['system'] or other) and messages[0]['role'] == 'system' -%}}
{{%- set first, messages = messages[0]['content'] + '\\n\\n', messages[1:] -%}}
{{%- endif -%}}
{{%- for message in messages -%}}
{{%- set marks = turns[message['role']] or other -%}}
{{%- if not marks %}}{{{{ raise_exception('There is no role ' + message['role'] + '.') }}}}{{% endif -%}}
{{{{- marks[0].replace('{{role}}', message['role']) + (first if loop.first else '') -}}}}
{{{{- ({content}) + marks[1] -}}}}
{{%- endfor -%}}
{{%- if add_generation_prompt -%}}
{{{{- (turns['assistant'] or other)[0].replace('{{role}}', 'assistant') -}}}}
{{%- endif -%}}
"""


_INST = {"user": ("[INST] ", "[/INST]"), "assistant": (" ", "</s>")}
_TEKKEN = {"user": ("[INST]", "[/INST]"), "assistant": ("", "</s>")}
_COMMAND = "<|START_OF_TURN_TOKEN|><|{}_TOKEN|>"
_COMMAND_END = "<|END_OF_TURN_TOKEN|>"

# The first format whose tokens are all in a vocabulary counts: some have another format's marks too.
FORMATS: Mapping[str, TurnFormat] = {
    "phi4": TurnFormat(
        tokens=("<|im_start|>", "<|im_sep|>"),
        other=("<|im_start|>{role}<|im_sep|>", "<|im_end|>"),
    ),
    "gemma": TurnFormat(
        tokens=("<start_of_turn>",),
        turns={
            "user": ("<start_of_turn>user\n", "<end_of_turn>\n"),
            "assistant": ("<start_of_turn>model\n", "<end_of_turn>\n"),
        },
        trims=True,
    ),
    "llama3": TurnFormat(
        tokens=("<|start_header_id|>",),
        other=("<|start_header_id|>{role}<|end_header_id|>\n\n", "<|eot_id|>"),
        trims=True,
    ),
    "llama4": TurnFormat(
        tokens=("<|header_start|>",),
        other=("<|header_start|>{role}<|header_end|>\n\n", "<|eot|>"),
        trims=True,
    ),
    "deepseek": TurnFormat(
        tokens=("<｜User｜>", "<｜Assistant｜>"),
        turns={
            "system": ("", "\n\n"),
            "user": ("<｜User｜>", ""),
            "assistant": ("<｜Assistant｜>", "<｜end▁of▁sentence｜>"),
        },
    ),
    "command-r": TurnFormat(
        tokens=("<|START_OF_TURN_TOKEN|>",),
        turns={
            "system": (_COMMAND.format("SYSTEM"), _COMMAND_END),
            "user": (_COMMAND.format("USER"), _COMMAND_END),
            "assistant": (_COMMAND.format("CHATBOT"), _COMMAND_END),
        },
    ),
    "granite": TurnFormat(
        tokens=("<|start_of_role|>",),
        other=("<|start_of_role|>{role}<|end_of_role|>", "<|end_of_text|>\n"),
    ),
    "glm4": TurnFormat(tokens=("[gMASK]", "<|user|>"), other=("<|{role}|>\n", ""), head="[gMASK]<sop>"),
    "phi3": TurnFormat(tokens=("<|user|>", "<|end|>"), other=("<|{role}|>\n", "<|end|>\n")),
    "mistral-v7": TurnFormat(
        tokens=("[SYSTEM_PROMPT]", "[INST]"),
        turns={"system": ("[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]"), **_TEKKEN},
    ),
    "mistral": TurnFormat(tokens=("[INST]",), turns=_INST),
    "chatml": TurnFormat(tokens=("<|im_start|>",), other=("<|im_start|>{role}\n", "<|im_end|>\n")),
    "llama2": TurnFormat(turns={"user": ("<s>[INST] ", " [/INST]"), "assistant": (" ", " </s>")}, trims=True),
    "zephyr": TurnFormat(other=("<|{role}|>\n", "</s>\n")),
    "vicuna": TurnFormat(
        turns={"system": ("", "\n\n"), "user": ("USER: ", "\n"), "assistant": ("ASSISTANT: ", "</s>\n")}
    ),
    "alpaca": TurnFormat(
        turns={
            "system": ("", "\n\n"),
            "user": ("### Instruction:\n", "\n\n"),
            "assistant": ("### Response:\n", "\n\n"),
        }
    ),
}  # fmt: skip
DEFAULT = "chatml"
"""The format for a vocabulary that points to none."""


def pointed_to(tokens: Collection[str]) -> str | None:
    """Return the name of the format whose marks are tokens of a vocabulary; None if no format fits."""
    known = set(tokens)
    return next((name for name, one in FORMATS.items() if one.tokens and known.issuperset(one.tokens)), None)


def by_vocabulary(tokens: Collection[str]) -> TurnFormat:
    """Return the format for a file without a template."""
    return FORMATS[pointed_to(tokens) or DEFAULT]


def named(template: str) -> str:
    """Return the text of a chat template, given by name or as a text.

    Raises InvalidRequestError for an empty text, and for a name that is not in FORMATS.
    """
    name = template.strip()
    if name in FORMATS:
        return FORMATS[name].source
    if "{" in template:
        return template
    known = ", ".join(sorted(FORMATS))
    meant = did_you_mean(name.lower(), {one: one for one in FORMATS})
    raise InvalidRequestError(
        f"there is no chat template {shown(name)} ({meant or f'names are {known}'}); a text is Jinja, with {{"
    )
