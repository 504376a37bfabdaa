"""`hotset serve` of a tiny model that follows a script, for the loops of agent libraries.

    python scripted_serve.py FORM FOLDER [options of hotset serve]

FORM is one of tool calls (docs/guides/serve.md). To a question the model calls get_weather in this form; to
the result of a function it answers with that result. A grammar makes it write so.
"""

from __future__ import annotations

import json
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.append(str(HERE.parent / "support"))

from byte_models import write_model  # noqa: E402
from published_calls import GLM, INVOKE, KIMI, QWEN, TEMPLATES, V3, V31, J  # noqa: E402

from hotset.api import Model  # noqa: E402
from hotset.cli.main import main  # noqa: E402
from hotset.engine.sampler import SamplingParams  # noqa: E402
from hotset.generation import Generation  # noqa: E402
from hotset.outputs import Reading  # noqa: E402

CALLS = {
    "deepseek-v3": f"<｜tool▁calls▁begin｜>{V3.format(J)}<｜tool▁calls▁end｜>",
    "deepseek-v3.1": f"<｜tool▁calls▁begin｜>{V31.format(J)}<｜tool▁calls▁end｜>",
    "gemma4": '<|tool_call>call:get_weather{city:<|"|>Rome<|"|>,days:2}<tool_call|>', "glm": GLM,
    "harmony": f"<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{J}<|call|>",
    "hermes": f'<tool_call>\n{{"name": "get_weather", "arguments": {J}}}\n</tool_call>',
    "kimi": f"<|tool_calls_section_begin|>{KIMI.format(0, J)}<|tool_calls_section_end|>",
    "lfm2": '<|tool_call_start|>[get_weather(city="Rome", days=2)]<|tool_call_end|>',
    "llama": f'{{"name": "get_weather", "parameters": {J}}}',
    "minimax": f"<minimax:tool_call>\n{INVOKE}</minimax:tool_call>",
    "mistral": f"[TOOL_CALLS]get_weather[ARGS]{J}", "qwen": QWEN,
}  # fmt: skip
TEMPLATE = (
    "{{ tools | tojson }}{% for m in messages %}{{ '\n' + m.role }}:{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ c.function | tojson }}{% endfor %}{% endfor %}{{ '\n' }}assistant:"
)


def write(form: str, folder: Path) -> Path:
    """Write a model whose template has the marks of the form."""
    # A template without marks that knows no tools has Hermes' form; the one here knows them.
    marks = {**dict(TEMPLATES), "hermes": "<tool_call>"}[form]
    keys = {"tokenizer.chat_template": f"{TEMPLATE}{{# {marks} #}}", "llama.context_length": 8192}
    return write_model(folder / f"{form}.gguf", **keys)


def follow_script(call: str) -> None:
    prepare = Model.prepare

    def scripted(
        self: Model,
        tokens: list[int],
        params: SamplingParams,
        *args: Any,
        reading: Reading = Reading(),  # noqa: B008
        **how: Any,
    ) -> Generation:
        results = re.findall(r"^tool:(.*)$", self.tokenizer.decode(tokens), re.MULTILINE)
        text = f"I am told: {results[-1]}" if results else call
        params = replace(params, grammar=f"start: {json.dumps(text, ensure_ascii=False)}")
        return prepare(self, tokens, params, *args, reading=replace(reading, around=None), **how)

    Model.prepare = scripted  # type: ignore[method-assign]


if __name__ == "__main__":
    form, folder, *options = sys.argv[1:]
    follow_script(CALLS[form])
    sys.argv = ["hotset", "serve", str(write(form, Path(folder))), *options]
    main()
