"""The budget of reasoning: which tokens are forced, and when."""

from __future__ import annotations

import pytest
from tiny_tokenizers import bpe_metadata

from hotset.text.output import OutputForm
from hotset.text.reasoning import effort_of
from hotset.text.thinking import ThinkingBudget
from hotset.text.tokenizer import Tokenizer, load_tokenizer

QWEN = "{% if enable_thinking %}{% endif %}<think></think>"
GPT_OSS = "<|channel|><|message|>{{ reasoning_effort }}"


def tokenizer(*specials: str) -> Tokenizer:
    """Return a byte-level tokenizer with more special tokens."""
    metadata = bpe_metadata()
    types = [*metadata["tokenizer.ggml.token_type"], *[3] * len(specials)]
    return load_tokenizer(
        metadata
        | {
            "tokenizer.ggml.tokens": [*metadata["tokenizer.ggml.tokens"], *specials],
            "tokenizer.ggml.token_type": types,
        }
    )


def driven(form: OutputForm, budget: ThinkingBudget | None, wanted: str, n_tokens: int = 200) -> str:
    """Return the answer of a model that wants to write `wanted`, with the forced tokens in between."""
    assert budget is not None
    ids: list[int] = []
    own = list(form.tokenizer.encode(wanted, parse_special=True))
    while own and len(ids) < n_tokens:
        forced = budget.next_token()
        ids.append(own.pop(0) if forced is None else forced)
        budget.accept(ids[-1])
    return form.tokenizer.decode(ids)


@pytest.mark.parametrize("specials", [(), ("<think>", "</think>")])
@pytest.mark.parametrize("n", [1, 5, 12])
def test_the_end_is_forced_when_the_budget_is_used_up(specials: tuple[str, ...], n: int) -> None:
    """Check marks of one and of several tokens, and an opening mark in the prompt."""
    form = OutputForm.of(QWEN, tokenizer(*specials))
    text = "one two three four five six seven eight nine ten eleven twelve"
    said = driven(form, form.thinking(n, " Enough.", "assistant\n<think>\n"), text)
    head, _, rest = said.partition(" Enough.</think>")
    assert len(form.tokenizer.encode(head)) == n
    assert text == head + rest
    opened = driven(form, form.thinking(n, " Enough.", "assistant\n"), f"<think>{text}")
    assert opened == f"<think>{said}"


def test_answer_within_the_budget_is_unchanged() -> None:
    form = OutputForm.of(QWEN, tokenizer())
    for prompt, text in (
        ("assistant\n", "Rome, and a <think> in the midst of it, which is text."),
        ("<think>\n", "Hm.</think>Rome. A long answer that has more tokens than the budget."),
        ("assistant\n", " \n<think>\nHm.\n</think>\n\nRome, <think> and more of it."),
    ):
        assert driven(form, form.thinking(8, "!", prompt), text) == text
    assert OutputForm.of("plain", tokenizer()).thinking(8, "", "<think>") is None
    assert form.thinking(-1, "", "<think>") is form.thinking(None, "", "<think>") is None


def test_a_budget_of_0_ends_the_reasoning_at_once_and_without_a_message() -> None:
    form = OutputForm.of(QWEN, tokenizer())
    assert driven(form, form.thinking(0, "Enough.", "<think>\n"), "Rome") == "</think>Rome"
    assert driven(form, form.thinking(0, "Enough.", "\n"), "<think>Rome") == "<think></think>Rome"


def test_reasoning_that_a_prompt_continues_counts() -> None:
    form = OutputForm.of(QWEN, tokenizer())
    text = "one two three four five six seven eight nine ten"
    ids = form.tokenizer.encode(text)
    whole = driven(form, form.thinking(9, ".", "<think>"), text)
    begun = form.tokenizer.decode(ids[:4])
    rest = driven(form, form.thinking(9, ".", "<think>", n_begun=4), form.tokenizer.decode(ids[4:]))
    assert begun + rest == whole
    assert driven(form, form.thinking(3, ".", "<think>", n_begun=9), "more").startswith(".</think>")


@pytest.mark.parametrize("budget", range(1, 5))
def test_a_character_is_not_cut(budget: int) -> None:
    """Check that a character, here four tokens, is completed; invalid bytes do not delay the end for long."""
    form = OutputForm.of(QWEN, tokenizer())
    said = driven(form, form.thinking(budget, "", "<think>"), "\U0001d11e and more")
    assert said.startswith("\U0001d11e</think>"), said
    limit = form.thinking(budget, "", "<think>")
    assert limit is not None
    lead = form.tokenizer.encode("\U0001d11e")[0]
    n = 0
    while limit.next_token() is None:
        limit.accept(lead)
        n += 1
    assert n <= budget + len("</think>")


def test_a_copy_goes_its_own_way() -> None:
    form = OutputForm.of(QWEN, tokenizer())
    budget = form.thinking(2, "", "<think>")
    assert budget is not None
    other = budget.clone()
    for token in (65, 66):
        other.accept(token)
    assert other.next_token() is not None
    assert budget.next_token() is None


def test_a_token_that_cannot_be_forced_ends_the_budget() -> None:
    form = OutputForm.of(QWEN, tokenizer())
    budget = form.thinking(0, "", "<think>")
    assert budget is not None
    budget.accept(65)
    assert budget.next_token() is None


def test_a_call_ends_reasoning() -> None:
    form = OutputForm.of(QWEN + "<tool_call>\n<function=", tokenizer())
    call = "Hm.<tool_call>\n<function=f>\n<parameter=a>\n1 2 3 4 5 6 7 8 9\n</parameter>"
    text = driven(form, form.thinking(40, "!", "<think>", calls=True), call)
    assert text == call


HEADS = ("<|channel|>", "<|message|>", "<|end|>", "<|start|>")


@pytest.mark.parametrize("calls", [False, True])
def test_harmony_thinks_in_a_channel(calls: bool) -> None:
    form = OutputForm.of(GPT_OSS, tokenizer(*HEADS))
    analysis = "<|channel|>analysis<|message|>"
    text = f"{analysis}one two three four five six"
    budget = form.thinking(3, ".", "<|start|>assistant", calls=calls)
    said = driven(form, budget, text)
    end = ".<|end|><|start|>assistant"
    head = said.removeprefix(analysis).partition(end)[0]
    assert len(form.tokenizer.encode(head)) == 3
    assert (f"{end}<|channel|>final<|message|>" in said) == (not calls)
    if calls:  # it thinks again, and must answer
        assert budget is not None
        again = driven(form, budget, f"{analysis}more and more")
        assert again.startswith(f"{analysis}<|end|><|start|>assistant<|channel|>final<|message|>more")


BOTH = {"reasoning_effort": "low", "thinking_effort": "low"}
EFFORTS = [
    (QWEN, {}, None, {}, None),
    (QWEN, {"reasoning_effort": "low"}, None, {"reasoning_effort": "low"}, 512),
    (QWEN, {"reasoning_effort": "medium"}, None, {"reasoning_effort": "medium"}, 2048),
    (QWEN, {"reasoning_effort": "high"}, None, {"reasoning_effort": "high"}, 8192),
    (QWEN, {"reasoning_effort": "max"}, None, {"reasoning_effort": "max"}, -1),
    (QWEN, {"reasoning_effort": "low"}, 7, {"reasoning_effort": "low"}, 7),
    (QWEN, {"enable_thinking": False}, 7, {"enable_thinking": False, "thinking": False}, 0),
    (QWEN, {}, 0, {"enable_thinking": False, "thinking": False}, 0),
    (QWEN, {"enable_thinking": True}, -1, {"enable_thinking": True, "thinking": True}, -1),
    (GPT_OSS, {"reasoning_effort": "low"}, None, {"reasoning_effort": "low"}, None),
    (GPT_OSS, {"reasoning_effort": "max"}, None, {"reasoning_effort": "high"}, None),
    (GPT_OSS + "'max'", {"reasoning_effort": "max"}, None, {"reasoning_effort": "max"}, None),
    ("{{ thinking_effort }}", {"reasoning_effort": "low"}, None, BOTH, None),
    (GPT_OSS, {"reasoning_effort": "low"}, 9, {"reasoning_effort": "low"}, 9),
]


@pytest.mark.parametrize(("template", "variables", "budget", "told", "limit"), EFFORTS)
def test_an_effort_reaches_the_template_or_becomes_a_budget(
    template: str, variables: dict[str, object], budget: int | None, told: object, limit: int | None
) -> None:
    assert effort_of(template, variables, budget) == (told, limit)


def test_effort_none_turns_thinking_off() -> None:
    for template in (QWEN, GPT_OSS):
        effort = effort_of(template, {"reasoning_effort": "none"}, None)
        assert effort.budget == 0
        assert effort.variables["enable_thinking"] is False
