"""Chat templates by name, and the template that a vocabulary suggests."""

from __future__ import annotations

import pytest

from hotset.errors import InvalidRequestError
from hotset.text.chat import ChatTemplate
from hotset.text.turn_formats import FORMATS, named, pointed_to

MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": " Why? "},
    {"role": "assistant", "content": "So."},
    {"role": "user", "content": "Oh."},
]
KNOWN = {
    "chatml": "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n Why? <|im_end|>\n"
    "<|im_start|>assistant\nSo.<|im_end|>\n<|im_start|>user\nOh.<|im_end|>\n<|im_start|>assistant\n",
    "gemma": "<start_of_turn>user\nBe brief.\n\nWhy?<end_of_turn>\n<start_of_turn>model\nSo.<end_of_turn>\n"
    "<start_of_turn>user\nOh.<end_of_turn>\n<start_of_turn>model\n",
    "llama3": "<|start_header_id|>system<|end_header_id|>\n\nBe brief.<|eot_id|>"
    "<|start_header_id|>user<|end_header_id|>\n\nWhy?<|eot_id|>"
    "<|start_header_id|>assistant<|end_header_id|>\n\nSo.<|eot_id|>"
    "<|start_header_id|>user<|end_header_id|>\n\nOh.<|eot_id|>"
    "<|start_header_id|>assistant<|end_header_id|>\n\n",
    "mistral": "[INST] Be brief.\n\n Why? [/INST] So.</s>[INST] Oh.[/INST] ",
    "alpaca": "Be brief.\n\n### Instruction:\n Why? \n\n### Response:\nSo.\n\n"
    "### Instruction:\nOh.\n\n### Response:\n",
}


@pytest.mark.parametrize("name", KNOWN)
def test_known_texts(name: str) -> None:
    with ChatTemplate(named(name)) as template:
        assert template.render(MESSAGES) == KNOWN[name]


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_shows_a_conversation_and_continues_it(name: str) -> None:
    with ChatTemplate(named(name)) as template:
        whole, head = template.render(MESSAGES), template.render(MESSAGES[:2])
        assert all(message["content"].strip() in whole for message in MESSAGES)
        assert whole.startswith(template.render(MESSAGES[:2], False))
        assert whole.startswith(head.rstrip())


@pytest.mark.parametrize(
    ("tokens", "name"),
    [
        (["a", "<|im_start|>", "<|im_end|>"], "chatml"),
        (["<|im_start|>", "<|im_sep|>"], "phi4"),
        (["<bos>", "<start_of_turn>"], "gemma"),
        (["<|start_header_id|>"], "llama3"),
        (["[INST]", "[/INST]"], "mistral"),
        (["[INST]", "[SYSTEM_PROMPT]"], "mistral-v7"),
        (["<|user|>", "<|end|>"], "phi3"),
        (["<|user|>", "<s>"], None),
    ],
)
def test_a_vocabulary_points_to_a_format(tokens: list[str], name: str | None) -> None:
    assert pointed_to(tokens) == name


def test_a_text_is_itself_and_an_unknown_name_is_refused() -> None:
    assert named("{{ messages[0].content }}") == "{{ messages[0].content }}"
    with pytest.raises(InvalidRequestError, match=r"no chat template 'chatlm' \(did you mean chatml"):
        named("chatlm")
    with pytest.raises(InvalidRequestError, match="names are alpaca, chatml"):
        named("")
