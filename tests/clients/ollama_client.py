"""Ollama's client: HOST, MODEL and API_KEY are in the environment."""

from __future__ import annotations

import os

import ollama

MODEL = os.environ["MODEL"]
MESSAGES = [{"role": "user", "content": "ok"}]
OPTIONS = {"temperature": 0, "num_predict": 32}

client = ollama.Client(
    host=os.environ["HOST"], headers={"Authorization": f"Bearer {os.environ['API_KEY']}"}, trust_env=False
)
answer = client.chat(model=MODEL, messages=MESSAGES, options=OPTIONS)
text = answer.message.content
assert text
assert answer.done
assert answer.eval_count > 0
assert answer.total_duration >= answer.eval_duration > 0
pieces = list(client.chat(model=MODEL, messages=MESSAGES, options=OPTIONS, stream=True, keep_alive="5m"))
assert "".join(piece.message.content for piece in pieces) == text
assert [piece.done for piece in pieces] == [False] * (len(pieces) - 1) + [True]

assert client.generate(model=MODEL, prompt="ok", options=OPTIONS).response == text
pieces = list(client.generate(model=f"{MODEL}:latest", prompt="ok", options=OPTIONS, stream=True))
assert "".join(piece.response for piece in pieces) == text
assert client.generate(model=MODEL).done_reason == "load"
loading = {"num_ctx": 4096, "num_thread": 2, "num_gpu": 99, "num_batch": 512}  # accepted without effect
answer = client.chat(model=MODEL, messages=MESSAGES, options=OPTIONS | loading)
assert answer.message.content == text
decided = client.chat(model=MODEL, messages=MESSAGES, options=OPTIONS, format={"type": "boolean"})
assert decided.message.content in ("true", "false")

found = client.embed(model=MODEL, input=["ok", "hello"], truncate=True)
assert found.prompt_eval_count > 1
assert len(found.embeddings) == 2
(cut,) = client.embed(model=MODEL, input="ok", dimensions=5).embeddings
assert len(cut) == 5
older = client.embeddings(model=MODEL, prompt="ok").embedding
assert list(older) == list(found.embeddings[0])

(listed,) = client.list().models
assert listed.model == MODEL
assert listed.size > 0
assert listed.modified_at is not None
shown = client.show(MODEL)
assert "completion" in shown.capabilities
assert shown.modelinfo["general.architecture"] == shown.details.family
(running,) = client.ps().models
assert running.model == MODEL

assert client.chat(model="other", messages=MESSAGES).message.content  # a server of one model answers
status = 200
try:
    client.chat(model=MODEL, messages=MESSAGES, options={"mirostat": 3})
except ollama.ResponseError as error:
    status = error.status_code
assert status == 400
print("chat, generate, streams, format, embed, list, show, ps, errors")
