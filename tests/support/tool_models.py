"""Models with scripted replies: function calls, reasoning."""

from __future__ import annotations

from hotset.api import Model
from hotset.backends.base import Batch, StepResult

EOS = 257
HERMES = (
    "{% if tools %}<tool_call>{{ tools | tojson }}\n{% endif %}{% for m in messages %}{{ m.role }}:"
    "{{ m.content }}{% for c in m.tool_calls or [] %}{{ c.function.name }}{{ c.function.arguments | tojson }}"
    "{% endfor %}\n{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
)
THINKS = HERMES + "{% if add_generation_prompt and not closed %}<think>\n{% endif %}{# </think> #}"
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather", "description": "The weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Rome", "Oslo"]}, "days": {"$ref": "#/$defs/days"}},
            "required": ["city", "days"], "additionalProperties": False,
            "$defs": {"days": {"type": "integer", "minimum": 1, "maximum": 7}},
        },
    },
}  # fmt: skip
CLOCK = {
    "type": "function",
    "function": {"name": "clock", "parameters": {"type": "object", "properties": {}}},
}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome", "days": 2}}\n</tool_call>'


def written(model: Model, text: str) -> None:
    """Make the model reply with this text from now on."""
    ids = [*text.encode(), EOS]
    step = model.backend.step
    next_of: dict[int, tuple[int, int]] = {}  # by sequence: the next position, and its byte

    def scripted(batch: Batch) -> StepResult:
        result = step(batch)
        for row, output in enumerate(batch.outputs):
            sequence, position = int(batch.sequences[output]), int(batch.positions[output])
            expected, n = next_of.get(sequence, (-1, 0))
            n = n if position == expected else 0
            next_of[sequence] = position + 1, n + 1
            result.logits[row] = -50.0
            result.logits[row, ids[min(n, len(ids) - 1)]] = 50.0
        return result

    model.backend.step = scripted  # type: ignore[method-assign]
