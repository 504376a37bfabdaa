"""Replicas on the nodes of a cluster: equal texts, reused prefixes, and a machine that dies."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from byte_models import write_model
from conftest import Nodes

import hotset

LONGEST = 240  # tokens of a context; a token is a byte
PROMPTS = [f"{i} is a prompt of its own, " * (1 + i % 3) for i in range(16)]
BODY = {"model": "tiny", "max_tokens": 60, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model") / "tiny.gguf")


@pytest.fixture(scope="module")
def expected(path: Path) -> list[str]:
    with hotset.load(path, n_ctx=LONGEST, n_threads=1) as model:
        answers = model.generate_many(PROMPTS, max_tokens=60, temperature=0, ignore_eos=True)
        return [answer.text for answer in answers]


@contextmanager
def serving(path: Path, nodes: Nodes, *options: str) -> Iterator[str]:
    """Run `hotset serve`, and yield its address once it answers."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "hotset.cli.main", "serve", str(path), "-a", "tiny", "--port", str(port)]
    command += [
        "-t", "1", "-c", str(LONGEST), "--contexts", "16", "--grace", "5", "--ray", nodes.address,
        *options,
    ]  # fmt: skip
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        until = time.monotonic() + 120
        while True:
            assert process.poll() is None
            assert time.monotonic() < until
            try:
                if httpx.get(f"{url}/health", timeout=10).status_code == 200:
                    break
            except httpx.TransportError:
                pass
            time.sleep(0.2)
        yield url
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            assert process.wait(60) == 0
        finally:
            process.kill()


async def asked(client: httpx.AsyncClient, prompt: str, stream: bool) -> str:
    """Return the text of a completion, or the code of the error."""
    reply = await client.post("/v1/completions", json=BODY | {"prompt": prompt, "stream": stream})
    if not stream:
        found = reply.json()
        return str(found["choices"][0]["text"] if "choices" in found else found["error"]["code"])
    events = [line.removeprefix("data: ") for line in reply.text.splitlines() if line.startswith("data: {")]
    parsed = [json.loads(one) for one in events]
    if "error" in parsed[-1]:
        return str(parsed[-1]["error"]["code"])
    return "".join(one["choices"][0]["text"] for one in parsed)


async def all_asked(url: str, times: int = 1) -> list[str]:
    async with httpx.AsyncClient(base_url=url, timeout=120) as client:
        work = [asked(client, prompt, i % 2 == 0) for _ in range(times) for i, prompt in enumerate(PROMPTS)]
        return list(await asyncio.gather(*work))


def counts(url: str, name: str) -> dict[str, float]:
    """Return the values of a counter by replica."""
    found: dict[str, float] = {}
    pattern = re.compile(name + r'\{(?:.*,)?replica="(\w+)"\} (\S+)')
    for line in httpx.get(f"{url}/metrics", timeout=30).text.splitlines():
        if match := pattern.fullmatch(line):
            found[match[1]] = found.get(match[1], 0.0) + float(match[2])
    return found


@pytest.mark.parametrize("n", [1, 3])
def test_the_text_of_one_machine(path: Path, expected: list[str], nodes: Nodes, n: int):
    with serving(path, nodes, "--replicas", str(n)) as url:
        assert asyncio.run(all_asked(url)) == expected
        generated = counts(url, "hotset_generated_tokens_total")
        assert len(generated) == n
        assert min(generated.values()) > 0
        assert sum(generated.values()) == 16 * 60


def test_a_machine_that_dies_in_mid_load(path: Path, expected: list[str], nodes: Nodes):
    """Answer every request, possibly with an error, and then replace the lost replica."""
    with serving(path, nodes, "--replicas", "3") as url:  # one on each node, so the dying node has one
        assert asyncio.run(all_asked(url)) == expected
        before = set(counts(url, "hotset_ready"))
        assert len(before) == 3

        async def load() -> tuple[list[str], float]:
            work = asyncio.create_task(all_asked(url, 8))
            await asyncio.sleep(0.5)
            nodes.kill("b")
            killed = time.monotonic()
            async with httpx.AsyncClient(base_url=url, timeout=60) as client:
                assert await asked(client, PROMPTS[0], False) == expected[0]
            return await work, time.monotonic() - killed

        found, seconds = asyncio.run(load())
        nodes.add("b")
        n_lost = found.count("not_ready")
        print(f"{n_lost} of {len(found)} lost, all ended {seconds:.1f} s after the kill")
        assert n_lost < len(found) / 2
        wrong = [(i, text) for i, text in enumerate(found) if text not in (expected[i % 16], "not_ready")]
        assert not wrong
        until = time.monotonic() + 60
        while len(counts(url, "hotset_ready")) < 3:
            assert time.monotonic() < until, "the replica that died is not replaced"
            time.sleep(0.5)
        assert len(set(counts(url, "hotset_ready")) & before) == 2
        assert asyncio.run(all_asked(url)) == expected


def conversations(url: str, n_turns: int = 3) -> int:
    """Return the number of cached tokens of 8 conversations, which take turns."""

    async def work() -> int:
        cached = 0
        async with httpx.AsyncClient(base_url=url, timeout=120) as client:
            texts = [f"{i}" * 70 for i in range(8)]
            for _ in range(n_turns):
                for i, text in enumerate(texts):
                    body = BODY | {"prompt": text, "max_tokens": 2}
                    usage = (await client.post("/v1/completions", json=body)).json()["usage"]
                    cached += usage["prompt_tokens_details"]["cached_tokens"]
                    texts[i] += f"{i}, " * 20
        return cached

    return asyncio.run(work())


def test_conversations_find_their_prefix_again(path: Path, nodes: Nodes):
    with serving(path, nodes, "--replicas", "1") as url:
        alone = conversations(url)
    assert alone > 0
    with serving(path, nodes, "--replicas", "2") as url:
        assert conversations(url) >= 0.9 * alone
        assert min(counts(url, "hotset_generated_tokens_total").values()) > 0
