"""llm-comply's checks of OpenAI's chat, Anthropic's messages and responses, except the ones for vision.

    python comply.py PATH_OF_LLM_COMPLY

BASE_URL, MODEL and API_KEY are in the environment. A check runs up to three times: answers are sampled,
and some answers of such a small model do not finish.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

FORMATS = ("openai-chat", "anthropic", "open-responses")
# A request without a model is invalid for these checks. A server of one model answers it.
ACCEPTED = ("chat-error-handling", "error-handling")
COMMAND = [sys.argv[1], "-u", os.environ["BASE_URL"], "-k", os.environ["API_KEY"], "-m", os.environ["MODEL"]]
COMMAND += ["-H", "anthropic-version:2023-06-01", "--timeout", "300", "--json"]


def results(form: str, points: list[str]) -> dict[str, dict[str, Any]]:
    """Return the results of some checks; an empty list means all."""
    only = ["-f", ",".join(points)] if points else []
    ran = subprocess.run([*COMMAND, "--format", form, *only], capture_output=True, text=True)
    return {one["id"]: one for one in json.loads(ran.stdout)["results"]}


failed, counts = [], []
for form in FORMATS:
    found: dict[str, dict[str, Any]] = {}
    left: list[str] = []
    for _ in range(3):
        found |= results(form, left)
        left = [
            id
            for id, one in found.items()
            if one["status"] == "failed" and "image-input" not in id and id not in ACCEPTED
        ]
        if not left:
            break
    failed += [found[id] for id in left]
    n_passed = sum(one["status"] == "passed" for one in found.values())
    counts.append(f"{form} {n_passed} of {len(found)}")
print(json.dumps(failed, indent=1) if failed else ", ".join(counts))
sys.exit(bool(failed))
