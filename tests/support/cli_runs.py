"""Runs the command line: in this process, in another process, or at a terminal."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import typer
from tiny_gguf import write_llama

from hotset.cli import main as cli
from hotset.formats.quants import GGMLType

needs_core = pytest.mark.skipif(find_spec("hotset._core") is None, reason="the native core is not built")


CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def write_model(
    path: Path,
    *,
    template: bool = True,
    architecture: str = "llama",
    n_ctx: int = 512,
    type: GGMLType = GGMLType.Q8_0,
    keys: dict[str, Any] | None = None,
) -> Path:
    """Write a random llama whose vocabulary is printable ASCII, a newline, special tokens and two merges."""
    tokens = [chr(c) for c in range(33, 127)] + ["Ġ", "Ċ", "<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    tokens += ["th", "Ġt"]
    return write_llama(
        path, architecture=architecture, n_head=2, n_head_kv=1, n_vocab=len(tokens), n_ctx=n_ctx, tied=True,
        type_of=lambda name: type, spread=lambda name: 1.0,
        keys={
            "general.name": "Tiny Random", "general.license": "mit", "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.pre": "gpt-2", "tokenizer.ggml.tokens": tokens,
            "tokenizer.ggml.token_type": [1] * 96 + [3] * 3 + [1] * 2,
            "tokenizer.ggml.merges": ["t h", "Ġ t"], "tokenizer.ggml.eos_token_id": 98,
            "tokenizer.ggml.bos_token_id": 96, "tokenizer.ggml.add_bos_token": False,
            "tokenizer.chat_template": CHATML if template else None,
            **(keys or {}),
        },
        seed=7,
    )  # fmt: skip


COMMAND = [sys.executable, "-m", "hotset.cli.main"]


def hotset(
    *arguments: object,
    stdin: str | bytes | None = "",
    env: dict[str, str] | None = None,
    returns: int | None = 0,
) -> subprocess.CompletedProcess[str]:
    """Run `hotset` in a new process. returns: the expected exit status; None: any."""
    data = stdin.encode() if isinstance(stdin, str) else stdin
    done = subprocess.run(
        [*COMMAND, *map(str, arguments)], input=data, capture_output=True, timeout=120,
        env={**os.environ, **(env or {})},
    )  # fmt: skip
    assert returns in (None, done.returncode), done.stderr.decode()
    return subprocess.CompletedProcess(done.args, done.returncode, done.stdout.decode(), done.stderr.decode())


def inside(*arguments: object, stdin: str = "", returns: int | None = 0) -> subprocess.CompletedProcess[str]:
    """Run `hotset` within this process, which saves the time to start one. returns: as for `hotset`."""
    from typer.testing import CliRunner

    from hotset.cli.main import app

    texts = list(map(str, arguments))
    done = CliRunner().invoke(app, texts, input=stdin, prog_name="hotset")
    assert returns in (None, done.exit_code), done.stderr
    return subprocess.CompletedProcess(texts, done.exit_code, done.stdout, done.stderr)


def answer(*arguments: object, stdin: str = "") -> dict[str, Any]:
    """Return the JSON of `hotset run` with the reference backend."""
    done = inside("run", *arguments, "--device", "reference", "--json", stdin=stdin)
    result: dict[str, Any] = json.loads(done.stdout)
    return result


class Terminal:
    """A user at a pseudo-terminal: types, and waits for text on the screen."""

    prompt = r"> $"

    def __init__(self, *arguments: object, env: dict[str, str] | None = None) -> None:
        import pty

        pid, self.fd = pty.fork()
        if pid == 0:
            os.environ.update({"TERM": "dumb", "COLUMNS": "100", **(env or {})})
            os.execv(COMMAND[0], [*COMMAND, *map(str, arguments)])
        self.pid = pid
        self.screen = ""

    def wait_for(self, pattern: str, seconds: float = 60) -> re.Match[str]:
        import select

        end = time.monotonic() + seconds
        while not (match := re.search(pattern, self.screen)):
            assert time.monotonic() < end, f"{pattern!r} does not come; the screen shows:\n{self.screen}"
            if select.select([self.fd], [], [], 0.1)[0]:
                try:
                    data = os.read(self.fd, 65536)
                except OSError:  # Linux: the other end is closed
                    data = b""
                assert data, f"{pattern!r} did not come; the screen showed:\n{self.screen}"
                self.screen = self.shown(self.screen + data.decode(errors="replace"))
        self.screen = self.screen[match.end() :]
        return match

    def shown(self, output: str) -> str:
        return output

    def type(self, text: str) -> None:
        os.write(self.fd, text.encode())

    def reply(self, pattern: str, text: str) -> None:
        """Wait for the pattern, then type the text."""
        self.wait_for(pattern)
        self.type(text)

    def leave(self, text: str = "\x04") -> None:
        """End the chat with this input at the next prompt, and check the exit status."""
        self.reply(self.prompt, text)
        assert self.exit_code() == 0

    def exit_code(self, seconds: float = 30) -> int:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                return os.waitstatus_to_exitcode(status)
            try:
                os.set_blocking(self.fd, False)
                self.screen += os.read(self.fd, 65536).decode(errors="replace")
            except (BlockingIOError, OSError):
                pass
            time.sleep(0.02)
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        raise AssertionError(f"it does not end; the screen shows:\n{self.screen}")


needs_pty = pytest.mark.skipif(sys.platform == "win32", reason="Windows has no pseudo-terminals of this kind")


CHAT = ("--device", "reference", "--temp", "0")
PROMPT = Terminal.prompt
ANSWERED = r"\[prompt \d+ tokens.*\]"


def reach(url: str) -> dict[str, str]:
    """Return the environment in which only this hub is used."""
    return {"HF_ENDPOINT": url, "HF_HUB_OFFLINE": "0", "NO_PROXY": "127.0.0.1"}


TEXT = "the quick brown fox jumps over the lazy dog; " * 12
REFERENCE = ("--device", "reference")
PROSE = (
    "The quick brown fox, which jumps over the lazy dog, is not as quick as it was; 42 steps, e.g.\n\nNow."
)


def talking(tmp_path: Path, answer: str) -> dict[str, str]:
    """Return an environment in which every model gives this answer."""
    (tmp_path / "sitecustomize.py").write_text(
        "import hotset.text.tokenizer as t\n"
        f"ANSWER = {answer!r}\n"
        "class Decoder:\n"
        "    def __init__(self, *_): self.at = 0\n"
        "    def push(self, id): self.at += 3; return ANSWER[self.at - 3 : self.at]\n"
        "    def flush(self): return ''\n"
        "t.StreamDecoder = Decoder\n"
    )
    return {"PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])}


def columns_of(terminal: Terminal, columns: int) -> None:
    import fcntl
    import struct
    import termios

    fcntl.ioctl(terminal.fd, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))


@cache
def command_of(subcommand: str) -> Any:
    return typer.main.get_command(cli.app).get_command(None, subcommand)


def options_of(subcommand: str) -> set[str]:
    """Return every option of a subcommand, including spellings of other programs."""
    command = command_of(subcommand)
    parser = command.make_parser(typer.Context(command))
    return {*parser._short_opt, *parser._long_opt}


def split_command(words: list[str]) -> tuple[str, list[str]]:
    """Return the subcommand of a command line, or "", and the other words."""
    words = cli.as_options(words)
    n = 2 if words[:1] == ["sparse"] else 1
    return " ".join(words[:n]), words[n:]
