"""`hotset launch`: each tool's arguments, the server that it uses, and the user's own files."""

from __future__ import annotations

import json
import os
import socketserver
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest
from cli_runs import hotset, inside, needs_core
from tiny_server import Serving, write_model

from hotset.cli.launch_tools import TOOLS, backup_of, without_comments, zed_settings
from hotset.formats.gguf import open_gguf
from hotset.model.config import config_from_gguf
from hotset.storage import created

# Reports its arguments and its settings.
PROGRAM = """#!{python}
import json, os, sys
from pathlib import Path
config = sys.argv[sys.argv.index("--config") + 1] if "--config" in sys.argv else ""
settings = Path(os.environ["HOME"]) / ".config" / "zed" / "settings.json"
seen = dict(arguments=sys.argv[1:], env=dict(os.environ), config=config and
json.loads(Path(config).read_text()),
            settings=settings.read_text() if settings.exists() else None,
            modes={{path.name: path.stat().st_mode & 0o777
                   for path in settings.resolve().parent.glob("*.json*")}})
Path(os.environ["SEEN"]).write_text(json.dumps(seen))
if "edit" in sys.argv:
    settings.write_text("changed")
sys.exit(7 if "fail" in sys.argv else 0)
"""

pytestmark = pytest.mark.skipif(os.name == "nt", reason="the fake tools are scripts of a POSIX system")


class Tools:
    """Programs with the names of the tools, first in PATH."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.home, self.report = folder / "home", folder / "seen.json"
        (programs := folder / "bin").mkdir()
        self.home.mkdir()
        for tool in TOOLS.values():
            program = programs / tool.program
            program.write_text(PROGRAM.format(python=sys.executable))
            program.chmod(0o755)
        self.settings = self.home / ".config" / "zed" / "settings.json"
        for name, value in {
            "PATH": f"{programs}:{os.environ['PATH']}", "SEEN": str(self.report), "HOME": str(self.home),
            "ANTHROPIC_API_KEY": "of the user",
        }.items():  # fmt: skip
            monkeypatch.setenv(name, value)
        for name in ("XDG_CONFIG_HOME", "HOTSET_API_KEY"):
            monkeypatch.delenv(name, raising=False)

    def seen(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.report.read_text())
        self.report.unlink()
        return found


@pytest.fixture
def tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Tools:
    return Tools(tmp_path, monkeypatch)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Any:
    path = write_model(tmp_path_factory.mktemp("model") / "tiny.gguf")
    with Serving(path) as serving:
        yield serving


def launched(*arguments: object, stdin: str = "", code: int = 0) -> str:
    done = inside("launch", *arguments, stdin=stdin, returns=code)
    return done.stderr


@needs_core
def test_each_tool_gets_the_servers_address(tools: Tools, server: Serving) -> None:
    url = ("--url", server.url)
    launched("claude", *url, "--", "-p", "hello")
    seen = tools.seen()
    assert seen["arguments"] == ["-p", "hello"]
    assert seen["env"]["ANTHROPIC_BASE_URL"] == server.url
    assert seen["env"]["ANTHROPIC_AUTH_TOKEN"] == "none"
    assert {seen["env"][f"ANTHROPIC_{name}MODEL"] for name in ("", "DEFAULT_OPUS_", "DEFAULT_HAIKU_")} == {
        "tiny"
    }
    assert "ANTHROPIC_API_KEY" not in seen["env"]
    assert int(seen["env"]["CLAUDE_STREAM_IDLE_TIMEOUT_MS"]) > 300_000  # less is ignored

    launched("codex", *url, "--", "exec")
    seen = tools.seen()
    pairs = dict(one.split("=", 1) for one in seen["arguments"][1:-1:2])
    assert set(seen["arguments"][:-1:2]) == {"-c"}
    assert seen["arguments"][-1] == "exec"
    assert (pairs["model"], pairs["model_provider"]) == ('"tiny"', '"hotset"')
    assert pairs["model_providers.hotset.base_url"] == f'"{server.url}/v1"'
    assert pairs["model_providers.hotset.wire_api"] == '"responses"'
    assert int(pairs["model_context_window"]) == server.service.model.n_ctx
    assert json.loads(pairs["web_search"]) == "disabled"
    assert seen["env"]["HOTSET_API_KEY"] == "none"

    launched("opencode", *url)
    config = json.loads(tools.seen()["env"]["OPENCODE_CONFIG_CONTENT"])
    assert config["model"] == "hotset/tiny"
    assert config["provider"]["hotset"]["options"]["baseURL"] == f"{server.url}/v1"
    assert list(config["provider"]["hotset"]["models"]) == ["tiny"]

    limit = config["provider"]["hotset"]["models"]["tiny"]["limit"]
    assert limit == {"context": server.service.model.n_ctx, "output": server.service.model.n_ctx // 4}

    launched("qwen", *url, "--", "-p", "hello")
    seen = tools.seen()
    assert seen["arguments"] == ["--auth-type", "openai", "-p", "hello"]
    assert {name: seen["env"][f"OPENAI_{name}"] for name in ("BASE_URL", "API_KEY", "MODEL")} == {
        "BASE_URL": f"{server.url}/v1",
        "API_KEY": "none",
        "MODEL": "tiny",
    }

    launched("aider", *url, "--", "file.py")
    seen = tools.seen()
    assert seen["arguments"][:2] == ["--model", "openai/tiny"]
    assert seen["arguments"][-1] == "file.py"
    assert (seen["env"]["OPENAI_API_BASE"], seen["env"]["OPENAI_API_KEY"]) == (f"{server.url}/v1", "none")

    launched("continue", *url)
    seen = tools.seen()
    assert seen["config"]["models"][0]["apiBase"] == f"{server.url}/v1"
    assert not Path(seen["arguments"][1]).exists()  # the file was for that run


@needs_core
def test_exit_code_equals_the_tools(tools: Tools, server: Serving) -> None:
    launched("aider", "--url", server.url, "--", "fail", code=7)


@needs_core
def test_changed_settings_are_printed_without_the_key(
    tools: Tools, server: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOTSET_API_KEY", "secret-of-mine")
    for tool in TOOLS:
        shown = launched(tool, "--url", server.url, "--print")
        assert "secret-of-mine" not in shown
        assert server.url in shown
        assert not tools.report.exists()
    shown = launched("aider", "--url", server.url, "--print", "--", "--message", "two words")
    assert "--message 'two words'" in " ".join(shown.split()), "a shell can run the printed command"
    launched("opencode", "--url", server.url)
    assert "secret-of-mine" in tools.seen()["env"]["OPENCODE_CONFIG_CONTENT"]


SETTINGS = """// mine
{
  "theme": "One Dark", // "a comment"
  "agent": { "always_allow": true, /* kept */ },
  "url": "http://example.org/a",
}
"""


@needs_core
def test_the_users_settings_are_changed_after_confirmation_and_restored(
    tools: Tools, server: Serving
) -> None:
    tools.settings.parent.mkdir(parents=True)
    tools.settings.write_text(SETTINGS)
    said = launched("zed", "--url", server.url, stdin="n\n", code=1)
    assert "Nothing was changed" in said
    assert tools.settings.read_text() == SETTINGS
    launched("zed", "--url", server.url, "--", ".", stdin="y\n")
    seen = tools.seen()
    assert seen["arguments"] == ["--wait", "."]
    settings = json.loads(seen["settings"])
    assert settings["theme"] == "One Dark"
    assert settings["url"] == "http://example.org/a"
    assert settings["agent"] == {
        "always_allow": True,
        "default_model": {"provider": "hotset", "model": "tiny"},
    }
    provider = settings["language_models"]["openai_compatible"]["hotset"]
    assert provider["api_url"] == f"{server.url}/v1"
    assert provider["available_models"][0]["name"] == "tiny"
    assert tools.settings.read_text() == SETTINGS
    assert not backup_of(tools.settings).exists()
    # A new file of settings is removed afterwards.
    tools.settings.unlink()
    launched("zed", "--url", server.url, "--yes")
    assert tools.seen()["settings"] is not None
    assert not tools.settings.exists()


@needs_core
def test_settings_are_restored_after_a_killed_launch(tools: Tools, server: Serving) -> None:
    tools.settings.parent.mkdir(parents=True)
    tools.settings.write_text('{"language_models": "of the launch before"}')
    backup_of(tools.settings).write_text(SETTINGS)
    os.utime(backup_of(tools.settings), ns=(0, tools.settings.stat().st_mtime_ns))
    launched("zed", "--url", server.url, "--yes")
    assert json.loads(tools.seen()["settings"])["theme"] == "One Dark"
    assert tools.settings.read_text() == SETTINGS


@needs_core
def test_settings_that_were_changed_during_a_launch_are_kept(tools: Tools, server: Serving) -> None:
    tools.settings.parent.mkdir(parents=True)
    tools.settings.write_text(SETTINGS)
    said = launched("zed", "--url", server.url, "--yes", "--", "edit")
    assert "was changed in the meantime" in said
    assert tools.settings.read_text() == "changed"
    assert backup_of(tools.settings).read_text() == SETTINGS
    # The next launch does not replace them either.
    said = launched("zed", "--url", server.url, "--yes", code=1)
    assert "was changed since an earlier launch" in said
    assert tools.settings.read_text() == "changed"
    backup_of(tools.settings).unlink()
    tools.settings.write_text("{}")
    launched("zed", "--url", server.url, "--yes")
    assert tools.settings.read_text() == "{}"


@needs_core
@pytest.mark.parametrize("mode", [0o600, 0o666])
def test_links_and_permissions_are_kept(tools: Tools, server: Serving, tmp_path: Path, mode: int) -> None:
    (own := tmp_path / "dotfiles.json").write_text(SETTINGS)
    own.chmod(mode)
    tools.settings.parent.mkdir(parents=True)
    tools.settings.symlink_to(own)
    launched("zed", "--url", server.url, "--yes")
    seen = tools.seen()
    assert json.loads(seen["settings"])["theme"] == "One Dark"
    assert seen["modes"] == {"dotfiles.json": mode, "dotfiles.json.before-hotset": mode}
    assert tools.settings.is_symlink()
    assert (own.read_text(), own.stat().st_mode & 0o777) == (SETTINGS, mode)
    assert not backup_of(own).exists()


def test_unreadable_settings_are_not_changed(tools: Tools, server: Serving) -> None:
    tools.settings.parent.mkdir(parents=True)
    for text in ("{broken", "[]"):
        tools.settings.write_text(text)
        assert "nothing was changed" in launched("zed", "--url", server.url, "--yes", code=1)
        assert tools.settings.read_text() == text


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"a": "// no", "b": [1, 2,],}', {"a": "// no", "b": [1, 2]}),
        ('// c\n{"a": "x\\"/*", /* , } */ "b": 1, // end\n}', {"a": 'x"/*', "b": 1}),
        ('{"a": ",]"}', {"a": ",]"}),
    ],
)
def test_json_with_comments(text: str, expected: object) -> None:
    assert json.loads(without_comments(text)) == expected


@needs_core
def test_a_server_is_started_and_stopped(
    tools: Tools, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_model(tmp_path / "own.gguf")
    done = hotset(
        "launch",
        "opencode",
        "-m",
        path,
        "--url",
        "http://127.0.0.1:9",
        env={"HOTSET_HOME": str(tmp_path)},
        returns=1,
    )
    assert "No server answers at http://127.0.0.1:9" in done.stderr
    # The default port may belong to another server: only the started server has a model of this name.
    from hotset.cli import client, launch

    # An agent's folder may come from anywhere: the server must not import from it.
    (tmp_path / "typer.py").write_text("raise SystemExit('imported from the current folder')")
    monkeypatch.chdir(tmp_path)
    with launch.started_server(str(path), 64) as server:
        assert (server.model, server.n_ctx) == ("own", 64)
        assert client.is_hotset(server.url)
    assert not client.is_hotset(server.url)
    with (
        pytest.raises(Exception, match=r"The server did not start: .*no file"),
        launch.started_server("none.gguf", None),
    ):
        pass


class _Other(BaseHTTPRequestHandler):
    """A server of another kind, which records the keys that it receives."""

    keys: ClassVar[list[str | None]] = []

    def do_GET(self) -> None:
        self.keys.append(self.headers["Authorization"])
        self.send_response(302 if self.path.startswith("/away") else 200)
        self.send_header("Location", "/v1/models")
        self.end_headers()
        self.wfile.write(b'{"status": "ok", "data": [{"id": "other"}]}')

    def log_message(self, *_: Any) -> None:
        pass


def test_the_key_is_sent_only_to_the_named_server(tools: Tools, monkeypatch: pytest.MonkeyPatch) -> None:
    from hotset.cli import client

    monkeypatch.setenv("HOTSET_API_KEY", "secret")
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    with ThreadingHTTPServer(("127.0.0.1", 0), _Other) as other:
        thread = threading.Thread(target=other.serve_forever, daemon=True)
        thread.start()
        url = f"http://127.0.0.1:{other.server_port}"
        monkeypatch.setattr(client, "URL", url)
        launched("opencode", "--print")
        assert _Other.keys == [None, "Bearer none"], "it does not say that it is hotset"
        _Other.keys.clear()
        launched("opencode", "--url", url, "--print")
        assert _Other.keys == ["Bearer secret"]
        _Other.keys.clear()
        assert "answers 302" in launched("opencode", "--url", f"{url}/away", code=1)
        assert _Other.keys == ["Bearer secret"], "a redirect is not followed"
        other.shutdown()
        thread.join()


class _Odd(socketserver.BaseRequestHandler):
    """A server that sends the same bytes for every request."""

    reply: ClassVar[bytes] = b""

    def handle(self) -> None:
        self.request.recv(1 << 16)
        self.request.sendall(self.reply)


@pytest.fixture(scope="module")
def odd_url() -> Iterator[str]:
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), _Odd) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


def _http(body: bytes | str, status: str = "200 OK", head: str = "") -> bytes:
    body = body if isinstance(body, bytes) else body.encode()
    return f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\n{head}\r\n".encode() + body


_NO_LISTS = ["", "null", "1", '"a"', "[]", "{}", "{", "\x00", "<html></html>", "[" * 100_000, "NaN"]
_NO_ARRAYS = ["null", "true", "7", '"a"', "{}", '{"a": {"id": "a"}}']
_NO_NAMES = ["null", "1", "[]", "{}", '"a"', '{"id": null}', '{"id": 7}', '{"id": ["a"]}', '{"id": ""}',
             '{"id": "a\\u0000b"}', '{"id": "\\ud800"}', '{"id": "a\\nb"}', '{"id": "\\u001b[2J"}',
             '{"id": "%s"}' % ("a" * 2000)]  # fmt: skip
_OK = b"HTTP/1.1 200 OK\r\n"
_ODD_HTTP = [
    b"", b"\r\n", b"hello\r\n\r\n", b"\x16\x03\x01\x02\x00", b"SSH-2.0-OpenSSH_9.2\r\n",
    b"HTTP/9.9 200 OK\r\n\r\n", b"HTTP/1.1 OK\r\n\r\n", b"HTTP/1.1 99 x\r\n\r\n",
    _OK + b"Content-Length: 50\r\n\r\n{", _OK + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n",
    _OK + b"A: b\r\n" * 200 + b"\r\n", _OK + b"A: " + b"x" * 100_000 + b"\r\n\r\n",
    _http('{"data": [{"id": "a"}', head="Content-Encoding: gzip\r\n"), _http(b"\x80"),
]  # fmt: skip
_ODD_STATUSES = [
    "204 No",
    "302 Found",
    "304 Not",
    "400 Bad",
    "403 No",
    "404 Not",
    "418 Tea",
    "500 Oops",
    "999 x",
]
_ODD = [
    *map(_http, _NO_LISTS),
    *(_http(f'{{"data": {one}}}') for one in _NO_ARRAYS),
    *(_http(f'{{"data": [{one}]}}') for one in _NO_NAMES),
    *(_http("[]", status, head) for status in _ODD_STATUSES for head in ("", "Location: http://[\r\n")),
    *_ODD_HTTP,
]


@pytest.mark.parametrize("reply", _ODD, ids=range(len(_ODD)))
def test_odd_reply_of_a_server_gives_one_message(
    tools: Tools, odd_url: str, reply: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_Odd, "reply", reply)
    said = " ".join(launched("claude", "--url", odd_url, "--print", code=1).split())
    assert said.startswith(("error: The program at http", "error: No server answers at http"))
    assert odd_url in said
    assert len(said) < 400
    # Without --url, launch ignores the other server and starts one.
    monkeypatch.setattr("hotset.cli.client.URL", odd_url)
    said = " ".join(launched("claude", "-m", "qwen3-4b", "--print").split())
    assert "would be started on a free port" in said


_ODD_FIELDS = ["null", "true", "-1", "0", "1.5", '"x"', "[]", "{}", "1e400", "9" * 40, '{"value": []}']


@pytest.mark.parametrize("value", _ODD_FIELDS)
@pytest.mark.parametrize("tool", TOOLS)
def test_odd_field_of_a_model_is_ignored(
    tools: Tools, odd_url: str, monkeypatch: pytest.MonkeyPatch, tool: str, value: str
) -> None:
    entry = f'{{"id": "a model/é:latest", "max_model_len": {value}, "status": {value}}}'
    monkeypatch.setattr(_Odd, "reply", _http(f'{{"data": [null, {entry}, {entry}]}}'))
    shown = launched(tool, "--url", odd_url, "--print")
    assert "answers, with a model/é:latest" in " ".join(shown.split())


@pytest.mark.parametrize(
    "url", ["http://", "http://[", "http://:80", "http://a:99999", "http://a:x", "http://a\n", "ftp://a", "a"]
)
def test_url_without_a_host_is_refused(tools: Tools, url: str) -> None:
    assert "--url must begin with http" in launched("claude", "--url", url, code=2)


@pytest.mark.parametrize("key", ["a\nb", "é", "\x01"])
def test_key_that_no_header_carries_is_refused(
    tools: Tools, odd_url: str, monkeypatch: pytest.MonkeyPatch, key: str
) -> None:
    monkeypatch.setenv("HOTSET_API_KEY", key)
    assert "HOTSET_API_KEY must be" in launched("claude", "--url", odd_url, code=1)


@needs_core
def test_print_shows_the_settings_for_a_server_that_would_be_started(
    tools: Tools, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hotset.cli.client.URL", "http://127.0.0.1:9")  # no server listens there
    monkeypatch.setenv("HOTSET_HOME", str(tmp_path / "home"))
    path = write_model(tmp_path / "own.gguf")
    shown = launched("zed", "-m", path, "--print")
    with open_gguf(path) as gguf:
        n_ctx = config_from_gguf(gguf).n_ctx_train
    assert f'"max_tokens": {n_ctx},' in shown  # the model's own context
    assert "http://127.0.0.1:PORT/v1" in shown
    assert f"the context is {n_ctx} tokens; coding agents often need 32768" in " ".join(shown.split())
    assert '"name": "own"' in shown
    shown = launched("zed", "-m", "qwen3-4b", "--print")  # not downloaded
    assert '"max_tokens": 32768,' in shown
    assert "warning" not in shown
    created.add("agent", created.Created(base=str(path), load={"n_ctx": 96}))
    shown = launched("opencode", "-m", "agent", "--print")
    assert '"context": 96' in shown
    assert "there is no model 'nope'" in launched("claude", "-m", "nope", "--print", code=2)


@needs_core
def test_wrong_arguments_are_explained(tools: Tools, server: Serving) -> None:
    assert "the tool must be one of claude, codex," in launched("emacs", code=2)
    said = launched("claude", "--url", server.url, "-m", "large", code=1)
    assert "has no model 'large' but tiny" in said
    assert "must begin with http" in launched("claude", "--url", "localhost:8080", code=2)


def test_a_tool_that_is_not_installed(tools: Tools, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "Aider (aider) is not installed: https://aider.chat says how." in launched("aider", code=1)


def test_a_tool_of_the_current_folder_is_not_started(
    tools: Tools, server: Serving, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "codex").write_text("#!/bin/sh\nexit 7\n")
    (tmp_path / "codex").chmod(0o755)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f".{os.pathsep}{os.environ['PATH']}")  # on Windows this is the default
    assert "has a program ./codex" in launched("codex", "--url", server.url, code=1)


def test_zeds_settings_file_is_found(tools: Tools) -> None:
    assert zed_settings() == tools.settings
