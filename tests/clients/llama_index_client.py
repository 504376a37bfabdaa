"""LlamaIndex: BASE_URL, MODEL and API_KEY are in the environment."""

from __future__ import annotations

import asyncio
import os

import openai
from llama_index.core.llms import ChatMessage
from llama_index.embeddings.openai_like import OpenAILikeEmbedding
from llama_index.llms.openai_like import OpenAILike

ENDPOINT = {"api_base": os.environ["BASE_URL"], "api_key": os.environ["API_KEY"]}
MODEL = os.environ["MODEL"]
LIMITS = {"max_tokens": 16, "temperature": 0, "context_window": 4096}
MESSAGES = [ChatMessage(role="system", content="be brief"), ChatMessage(role="user", content="ok")]

chat = OpenAILike(model=MODEL, is_chat_model=True, **ENDPOINT, **LIMITS)
answer = chat.chat(MESSAGES)
assert answer.message.content
assert answer.raw.usage.completion_tokens > 0
assert "".join(piece.delta or "" for piece in chat.stream_chat(MESSAGES)) == answer.message.content
assert asyncio.run(chat.achat(MESSAGES)).message.content == answer.message.content
assert chat.complete("ok").text == chat.chat([ChatMessage(role="user", content="ok")]).message.content

raw = OpenAILike(model=MODEL, is_chat_model=False, **ENDPOINT, **LIMITS)
text = raw.complete("ok").text
assert text
assert "".join(piece.delta or "" for piece in raw.stream_complete("ok")) == text

embedding = OpenAILikeEmbedding(model_name=MODEL, **ENDPOINT)
one = embedding.get_text_embedding("ok")
assert embedding.get_text_embedding_batch(["ok", "hello"])[0] == one

refused = False
try:
    OpenAILike(model=MODEL, is_chat_model=True, **ENDPOINT | {"api_key": "wrong"}, **LIMITS).chat(MESSAGES)
except openai.AuthenticationError:
    refused = True
assert refused
print("chat, stream, async, completions, embeddings, a wrong key")
