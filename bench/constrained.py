"""Answers of a real model in the form of JSON schemas: are all of them valid, and what do masks cost?

    python bench/constrained.py [MODEL] [-n 200] [--seed 0] [--json]

The schemas are from tests/support/json_schemas.py, with some that a typical program needs; half of the
answers are greedy. Answers that are truncated by the token limit are counted separately, because they cannot
be valid.

The cost is the time per token that masks take in the engine's thread (finding them, applying them, accepting
the token). It is compared with the fastest tenth of the steps of the same run, on one stream: on a busy
machine other programs lengthen both, but steps more.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np

import hotset
from hotset.text.constraint import GrammarConstraint

sys.path.append(str(Path(__file__).parents[1] / "tests" / "support"))
from json_schemas import SCHEMAS

WORD = {"type": "string", "minLength": 1, "maxLength": 24}
ASKED: dict[str, dict[str, Any]] = {
    **SCHEMAS,
    # A model that keeps writing zeros never ends a number of unlimited length.
    "number": {"type": "number", "minimum": 0, "maximum": 99.75, "multipleOf": 0.25},
    "person": {
        "type": "object",
        "properties": {
            "name": WORD,
            "age": {"type": "integer", "minimum": 0, "maximum": 120},
            "email": {"type": "string", "pattern": "^[a-z]{1,12}@[a-z]{1,12}\\.(com|org)$"},
            "tags": {"type": "array", "items": WORD, "maxItems": 4},
            "address": {"$ref": "#/$defs/address"},
        },
        "required": ["name", "age", "email", "tags", "address"],
        "additionalProperties": False,
        "$defs": {
            "address": {
                "type": "object",
                "properties": {"city": WORD, "zip": {"type": "string", "pattern": "^[0-9]{5}$"}},
                "required": ["city", "zip"],
                "additionalProperties": False,
            }
        },
    },
    "orders": {
        "type": "array",
        "items": {
            "type": "object",
            "properties": {
                "item": {"enum": ["tea", "coffee", "cake"]},
                "price": {"type": "number", "minimum": 0, "maximum": 99.75, "multipleOf": 0.25},
                "paid": {"anyOf": [{"type": "boolean"}, {"type": "null"}]},
            },
            "required": ["item", "price", "paid"],
            "additionalProperties": False,
        },
        "minItems": 1,
        "maxItems": 4,
    },
}


class Clock:
    """A clock of the seconds in some methods, for all objects of their classes. now: the time source."""

    def __init__(self, now: Callable[[], float]) -> None:
        self.now = now
        self.seconds: list[float] = []

    def watch(self, kind: type, name: str) -> None:
        method = getattr(kind, name)

        def timed(*args: Any, **more: Any) -> Any:
            begun = self.now()
            try:
                return method(*args, **more)
            finally:
                self.seconds.append(self.now() - begun)

        setattr(kind, name, timed)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", default="smollm2-135m")
    parser.add_argument("-n", type=int, default=200, help="answers")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--max-tokens", type=int, default=400)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()

    clock, steps = Clock(time.thread_time), Clock(time.perf_counter)
    for kind, name in (
        (GrammarConstraint, "look_ahead"),
        (GrammarConstraint, "mask"),
        (GrammarConstraint, "accept"),
    ):
        clock.watch(kind, name)
    names = list(ASKED)
    whole = cut = wrong = tokens = 0
    with hotset.load(args.model) as model:
        steps.watch(type(model.backend), "step")
        for i in range(args.n):
            name = names[i % len(names)]
            schema = ASKED[name]
            question = f"Give me an example of JSON that this schema describes: {json.dumps(schema)}"
            greedy = {"temperature": 0} if i // len(names) % 2 else {}
            answer = model.chat(
                [{"role": "user", "content": question}],
                json_schema=schema,
                seed=args.seed + i,
                max_tokens=args.max_tokens,
                **greedy,
            ).completion
            tokens += len(answer.tokens)
            if answer.finish_reason != "stop":
                cut += 1
                continue
            try:
                jsonschema.validate(json.loads(answer.text), schema)
                whole += 1
            except (ValueError, jsonschema.ValidationError) as error:
                wrong += 1
                print(f"{name}, seed {args.seed + i}: {answer.text!r}: {error}", file=sys.stderr)
        step = float(np.quantile(steps.seconds, 0.1))
    result = {
        "answers": args.n,
        "valid": whole,
        "cut": cut,
        "wrong": wrong,
        "tokens": tokens,
        "step_ms": 1e3 * step,
        "mask_us_per_token": 1e6 * sum(clock.seconds) / max(tokens, 1),
        "share_of_a_step": sum(clock.seconds) / max(tokens, 1) / step,
        "longest_mask_ms": 1e3 * float(np.max(clock.seconds)),
    }
    if args.json:
        print(json.dumps(result, indent=2))
    else:
        print("\n".join(f"{key:20} {value:.4g}" for key, value in result.items()))
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
