"""Runs the program as users do: an answer, a server with requests, a killed pull that resumes.

    python tests/platforms/program.py MODEL PROMPT ANSWER [emulated]

ANSWER is the answer of another platform, 16 tokens. Needs hotset with its server; exits with 1 at the first
error. An emulated processor may need longer for a JSON schema than the server allows.
"""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))

from fake_hub import FakeHub

HOTSET = [sys.executable, "-m", "hotset.cli.main"]
PATIENCE = 900.0  # seconds: this may be an emulator on a busy machine


def main() -> None:
    model, prompt, answer, *how = sys.argv[1:]
    check_run(model, prompt, answer)
    check_serve(model, is_emulated=how == ["emulated"])
    with tempfile.TemporaryDirectory(prefix="hötset 模型 ", ignore_cleanup_errors=True) as folder:
        check_killed_pull(Path(folder))
    print("hotset run, serve, and pull after a kill: right")


def expect(right: bool, wrong: str) -> None:
    if not right:
        sys.exit(wrong)


def check_run(model: str, prompt: str, answer: str) -> None:
    command = [*HOTSET, "run", "-m", model, prompt, "--temp", "0", "-n", "16", "--json"]
    done = subprocess.run(
        command,
        capture_output=True,
        encoding="utf-8",
        timeout=PATIENCE,
        stdin=subprocess.DEVNULL,
        check=False,
    )
    expect(done.returncode == 0, f"hotset run failed: {done.stderr}")
    said = json.loads(done.stdout)["text"]
    expect(said == answer, f"hotset run answered {said!r}, and elsewhere {answer!r}")
    print(f"hotset run: {said!r}", flush=True)


@contextmanager
def serving(model: str) -> Iterator[str]:
    """Start a server, and yield its address when it is ready."""
    command = [*HOTSET, "serve", model, "--port", "0", "--alias", "checked"]
    with subprocess.Popen(
        command, stderr=subprocess.PIPE, encoding="utf-8", stdin=subprocess.DEVNULL
    ) as process:
        try:
            assert process.stderr is not None
            printed = ""
            for line in process.stderr:
                printed += line
                if listening := re.search(r"listening on (http://\S+?:\d+)", line):
                    threading.Thread(target=process.stderr.read, daemon=True).start()
                    while not _is_ready(listening[1]):
                        expect(process.poll() is None, "hotset serve ended before it was ready")
                        time.sleep(0.2)
                    yield listening[1]
                    return
            expect(False, f"hotset serve ended: {printed}")
        finally:
            process.kill()


def check_serve(model: str, *, is_emulated: bool) -> None:
    with serving(model) as address:
        body = {
            "model": "checked", "messages": [{"role": "user", "content": "Hello"}],
            "max_tokens": 8, "temperature": 0,
        }  # fmt: skip
        whole = _post(f"{address}/v1/chat/completions", body)
        text = json.loads(whole)["choices"][0]["message"]["content"]
        events = _post(f"{address}/v1/chat/completions", body | {"stream": True}).decode().split("\n\n")
        chunks = [json.loads(one[6:]) for one in events if one.startswith("data: {")]
        pieces = "".join(one["choices"][0]["delta"].get("content") or "" for one in chunks if one["choices"])
        expect(bool(text) and pieces == text, f"the stream says {pieces!r}, the whole reply {text!r}")
        number = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "integer"}}}
        held = "held"
        try:
            said = json.loads(_post(f"{address}/v1/chat/completions", body | {"response_format": number}))
            int(said["choices"][0]["message"]["content"])
        except urllib.error.HTTPError as error:
            held = json.loads(error.read())["error"]["message"]
            expect(is_emulated and "does not compile within" in held, f"a JSON schema: {held}")
    print(f"hotset serve: {text!r}, whole and as a stream; a JSON schema: {held}", flush=True)


def _is_ready(address: str) -> bool:
    try:
        return bool(_reply(f"{address}/health"))
    except OSError:  # the model is still being loaded
        return False


def _post(url: str, body: dict[str, Any]) -> bytes:
    return _reply(
        urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    )


def _reply(request: str | urllib.request.Request) -> bytes:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(request, timeout=PATIENCE) as reply:
        return reply.read()  # type: ignore[no-any-return]


def check_killed_pull(home: Path) -> None:
    """Kill a pull from a local server after half of the file; the next pull must fetch the rest."""
    data = b"GGUF" + random.Random(0).randbytes(3 << 20)
    name = "model-Q4_0.gguf"
    halted, killed = threading.Event(), threading.Event()

    def half(request: BaseHTTPRequestHandler) -> None:
        request.send_response(200)
        request.send_header("Content-Length", str(len(data)))
        request.end_headers()
        request.wfile.write(data[: 2 << 20])
        request.wfile.flush()
        halted.set()
        killed.wait(PATIENCE)

    with FakeHub() as hub:
        hub.repositories["owner/model"] = {name: data}
        hub.answers[name] = half
        pull = [*HOTSET, "pull", "hf:owner/model"]
        settings = {**os.environ, "HF_ENDPOINT": hub.url, "HOTSET_HOME": str(home), "NO_PROXY": "127.0.0.1"}
        settings.pop("HF_HUB_OFFLINE", None)
        with subprocess.Popen(pull, env=settings, stdin=subprocess.DEVNULL) as process:
            expect(halted.wait(PATIENCE), "hotset pull asked for no file")
            _wait_for_part(home, process)
            process.kill()
        killed.set()
        expect(not list(home.rglob(name)), "a download that was killed left a whole file")
        del hub.answers[name]
        done = subprocess.run(pull, env=settings, timeout=PATIENCE, stdin=subprocess.DEVNULL, check=False)
        expect(done.returncode == 0, "hotset pull failed after the kill")
        found = list(home.rglob(name))
        expect(len(found) == 1 and found[0].read_bytes() == data, f"after the kill there is {found}")
        ranges = [range_ for path, range_, _ in hub.asked(name) if range_]
        expect(bool(ranges) and ranges[-1] != "bytes=0-", f"the second pull began anew: {ranges}")
    print(f"hotset pull: killed after half, went on with {ranges[-1]}", flush=True)


def _wait_for_part(home: Path, process: subprocess.Popen[bytes]) -> None:
    """Wait until part of the file is on the disk."""
    while process.poll() is None:
        if any(path.is_file() and path.stat().st_size >= 1 << 20 for path in home.rglob("*")):
            return
    sys.exit("hotset pull ended before it was killed")


if __name__ == "__main__":
    main()
