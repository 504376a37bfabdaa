"""`make test-clients`: clients that people use, against `hotset serve` on a real socket.

build/clients has an environment, packages for Node, and a log for each client. Most clients get a
server with the tiny random model of the tests. LangChain's tests, llm-comply and the recorded requests of
coding agents (replay.py) get one with SmolLM2 of the store. The agent libraries get one for each form of tool
calls, whose model follows a script. One server has a model that sees.

    .venv/bin/python tests/clients/run.py [NAME ...]
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
WORK = ROOT / "build" / "clients"
BIN = WORK / "venv" / "bin"
KEY = "a-key-of-the-tests"
LOADED_SECONDS = 300

sys.path.append(str(HERE.parent / "support"))
from byte_models import write_model  # noqa: E402
from scripted_serve import CALLS  # noqa: E402
from tiny_vision import N_EMBD, shared_encoder  # noqa: E402


@dataclass(frozen=True)
class Server:
    """A running server. url: its address. model: the name of its model."""

    url: str
    model: str
    environment: dict[str, str] = field(init=False)

    def __post_init__(self) -> None:
        said = {"HOST": self.url, "BASE_URL": f"{self.url}/v1", "MODEL": self.model, "API_KEY": KEY}
        object.__setattr__(self, "environment", os.environ | said | {"NO_PROXY": "127.0.0.1"})


@contextmanager
def served(*command: str | Path, name: str) -> Iterator[Server]:
    """Start a server by a command with the options of `hotset serve`, and yield it with its model loaded."""
    log = WORK / f"serve-{name}.log"
    with log.open("w") as out:
        process = subprocess.Popen(
            [*command, "--alias", name, "--port", "0"], stdout=out, stderr=subprocess.STDOUT,
            env=os.environ | {"HOTSET_API_KEY": KEY},
        )  # fmt: skip
    try:
        yield Server(_url(process, log), name)
    finally:
        process.terminate()
        process.wait(60)


def _url(process: subprocess.Popen[bytes], log: Path) -> str:
    end = time.monotonic() + LOADED_SECONDS
    while time.monotonic() < end:
        said = log.read_text()
        if process.poll() is not None:
            sys.exit(f"the server ended at once:\n{said}")
        if "is loaded" in said:
            return str(re.findall(r"http://[0-9.:]+", said)[0])
        time.sleep(0.1)
    sys.exit(f"the server did not load its model; see {log}")


def openai_node(server: Server) -> list[str]:
    (WORK / "openai_client.mjs").write_text((HERE / "openai_client.mjs").read_text())  # next to its packages
    return ["node", str(WORK / "openai_client.mjs")]


def ollama(server: Server) -> list[str]:
    return [str(BIN / "python"), str(HERE / "ollama_client.py")]


def llm(server: Server) -> list[str]:
    home = WORK / "llm"
    home.mkdir(exist_ok=True)
    (home / "extra-openai-models.yaml").write_text(
        f"- model_id: hotset\n  model_name: {server.model}\n  api_base: {server.environment['BASE_URL']}\n"
        "  api_key_name: hotset\n"
    )
    server.environment["LLM_USER_PATH"] = str(home)
    return ["sh", str(HERE / "llm_client.sh"), str(BIN / "llm")]


def langchain(server: Server) -> list[str]:
    # One loop for all: the client keeps its connections from test to test.
    loops = ["asyncio_mode=auto", "asyncio_default_test_loop_scope=session"]
    options = [
        "-c", os.devnull, "--noconftest", "-p", "no:cacheprovider", "-q", "-rs", "--tb=short",
        "--benchmark-disable",
    ]  # fmt: skip
    options += [part for loop in loops for part in ("-o", loop)]
    return [str(BIN / "python"), "-m", "pytest", *options, str(HERE / "langchain_chat.py")]


def llama_index(server: Server) -> list[str]:
    return [str(BIN / "python"), str(HERE / "llama_index_client.py")]


def schemathesis(server: Server) -> list[str]:
    server.environment["SCHEMATHESIS_HOOKS"] = "schemathesis_hooks"
    server.environment["PYTHONPATH"] = str(HERE)
    checks = "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance"
    command = [str(BIN / "schemathesis"), "--config-file", str(HERE / "schemathesis.toml")]
    command += ["run", f"{server.url}/openapi.json", "--seed", "1", "-n", "30"]
    command += ["--phases", "coverage,fuzzing", "--continue-on-failure", "--checks", checks]
    return [*command, "-H", f"Authorization: Bearer {KEY}", "--max-time", "150", "--warnings", "off"]


def llm_comply(server: Server) -> list[str]:
    return [str(BIN / "python"), str(HERE / "comply.py"), str(BIN / "llm-comply")]


def agents(server: Server) -> list[str]:
    return [str(BIN / "python"), str(HERE / "agent_loops.py")]


def recorded(server: Server) -> list[str]:
    return [str(BIN / "python"), str(HERE / "replay.py")]


def images(server: Server) -> list[str]:
    return [str(BIN / "python"), str(HERE / "image_clients.py")]


TINY: dict[str, Callable[[Server], list[str]]] = {
    "openai-node": openai_node, "ollama": ollama, "llm": llm, "llama-index": llama_index,
    "schemathesis": schemathesis,
}  # fmt: skip
SMOLLM2: dict[str, Callable[[Server], list[str]]] = {
    "recorded": recorded, "llm-comply": llm_comply, "langchain": langchain,
}  # fmt: skip
SCRIPTED: dict[str, Callable[[Server], list[str]]] = {"agents": agents}
SEEING: dict[str, Callable[[Server], list[str]]] = {"images": images}


def main(names: list[str]) -> int:
    """Run the clients; return 0 if all of them passed."""
    known = [*TINY, *SMOLLM2, *SCRIPTED, *SEEING]
    unknown = set(names) - set(known)
    if unknown:
        sys.exit(f"there is no client {sorted(unknown)[0]!r}; there are {', '.join(known)}")
    serve, python = [ROOT / ".venv/bin/hotset", "serve"], ROOT / ".venv/bin/python"
    servers = [
        (TINY, [*serve, write_model(WORK / "tiny.gguf")], "tiny"),
        (SMOLLM2, [*serve, "smollm2-135m", "--max-tokens", "1024", "-c", "8192"], "smollm2-135m"),
        (SEEING, [*serve, seeing(WORK / "seeing")], "seeing"),
        *((SCRIPTED, [python, HERE / "scripted_serve.py", form, WORK], form) for form in CALLS),
    ]
    failed = 0
    for clients, command, model in servers:
        wanted = [client for client in clients if not names or client in names]
        if wanted:
            with served(*command, name=model) as server:
                failed += sum(not content(client, clients[client], server) for client in wanted)
    return 1 if failed else 0


def seeing(folder: Path) -> Path:
    """Write a tiny random model with the projector of one next to it. Return the model's path."""
    folder.mkdir(exist_ok=True)
    made = shared_encoder("llava", WORK)
    (folder / "mmproj-tiny-f32.gguf").write_bytes(made.read_bytes())
    return write_model(folder / "tiny.gguf", n_embd=N_EMBD, **{"llama.context_length": 1024})


def content(name: str, command: Callable[[Server], list[str]], server: Server) -> bool:
    """Run a client, and print the outcome."""
    log = WORK / f"{name}-{server.model}.log"
    began = time.monotonic()
    with log.open("w") as out:
        ended = subprocess.run(
            command(server), stdout=out, stderr=subprocess.STDOUT, env=server.environment, cwd=WORK
        )
    lines = [line for line in log.read_text().splitlines() if line.strip()]
    verdict = "ok    " if ended.returncode == 0 else "FAILED"
    seconds, last = time.monotonic() - began, lines[-1] if lines else ""
    print(f"{verdict} {name:11} {server.model:13} {seconds:5.0f} s  {last}", flush=True)
    if ended.returncode:
        print(*(f"       {line}" for line in lines[-30:]), sep="\n", flush=True)
    return ended.returncode == 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
