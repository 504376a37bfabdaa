"""The clients of OpenAI, Anthropic and Ollama send an image to HOST: MODEL and API_KEY are set too."""

from __future__ import annotations

import base64
import os
import struct
import zlib

import anthropic
import ollama
import openai

HOST, MODEL, KEY = (os.environ[name] for name in ("HOST", "MODEL", "API_KEY"))


def png(width: int, height: int) -> bytes:
    """Return an image of one colour."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    rows = zlib.compress((b"\0" + b"\x20\x80\xc0" * width) * height)
    parts = (chunk(b"IHDR", head), chunk(b"IDAT", rows), chunk(b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


DATA = base64.b64encode(png(40, 20)).decode()
URL = f"data:image/png;base64,{DATA}"
text = {"type": "text", "text": "What is this?"}

chat = openai.OpenAI(base_url=f"{HOST}/v1", api_key=KEY, max_retries=0)
content = [{"type": "image_url", "image_url": {"url": URL}}, text]
answer = chat.chat.completions.create(
    model=MODEL, messages=[{"role": "user", "content": content}], max_tokens=8, temperature=0
)
n_tokens = answer.usage.prompt_tokens
assert answer.choices[0].finish_reason in ("stop", "length")
words = chat.chat.completions.create(
    model=MODEL, messages=[{"role": "user", "content": [text]}], max_tokens=1, temperature=0
)
assert n_tokens >= words.usage.prompt_tokens + 16  # of the image

part = [{"type": "input_image", "image_url": URL}, {"type": "input_text", "text": text["text"]}]
response = chat.responses.create(
    model=MODEL, input=[{"role": "user", "content": part}], max_output_tokens=16, temperature=0
)
assert response.usage.input_tokens == n_tokens

source = {"type": "base64", "media_type": "image/png", "data": DATA}
message = anthropic.Anthropic(base_url=HOST, api_key=KEY, max_retries=0).messages.create(
    model=MODEL, max_tokens=8,
    messages=[{"role": "user", "content": [{"type": "image", "source": source}, text]}],
)  # fmt: skip
assert message.usage.input_tokens + (message.usage.cache_read_input_tokens or 0) >= n_tokens

client = ollama.Client(host=HOST, headers={"Authorization": f"Bearer {KEY}"}, trust_env=False)
told = {"role": "user", "content": text["text"], "images": [png(40, 20)]}
found = client.chat(model=MODEL, messages=[told], options={"temperature": 0, "num_predict": 8})
assert found.prompt_eval_count == n_tokens
assert "vision" in client.show(MODEL).capabilities
print("OpenAI chat and responses, Anthropic, Ollama: an image each")
