"""Puts the server's model into the requests of schemathesis: otherwise hardly any would get an answer.

Answers are short, since schemathesis checks only their structure, in thousands of requests.
"""

from __future__ import annotations

import os

import schemathesis

MODEL = os.environ["MODEL"]
MOST_TOKENS = 8


@schemathesis.hook
def map_body(context, body):
    if not isinstance(body, dict):
        return body
    if isinstance(body.get("model"), str):
        body["model"] = MODEL
    for name in ("max_tokens", "max_completion_tokens", "max_output_tokens"):
        if isinstance(body.get(name), int) and body[name] > MOST_TOKENS:
            body[name] = MOST_TOKENS
    return body


@schemathesis.hook
def map_path_parameters(context, path_parameters):
    if isinstance(path_parameters, dict) and "name" in path_parameters:
        path_parameters["name"] = MODEL
    return path_parameters
