"""The systemd service and the Docker image start existing commands with existing options."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

import pytest
import typer
import yaml
from byte_models import write_model
from cases import quick_are
from paths import ROOT
from waiting import WATCHDOG, until

from hotset.cli.main import app

PACKAGING = ROOT / "packaging"
UNIT = PACKAGING / "systemd" / "hotset.service"
DOCKERFILE = PACKAGING / "docker" / "Dockerfile"
HOTSET = [sys.executable, "-m", "hotset.cli.main"]
KEY = "0123456789abcdef"


def settings_of_unit() -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for line in UNIT.read_text().splitlines():
        if line and line[0] not in "#[":
            name, _, value = line.partition("=")
            found.setdefault(name, []).append(value)
    return found


def instruction(name: str) -> str:
    """Return the last instruction with this name in the Dockerfile, its lines joined."""
    text = re.sub(r"\\\n\s*", "", DOCKERFILE.read_text())
    return re.findall(rf"^{name} (.*)$", text, re.MULTILINE)[-1]


def test_options_exist_in_serve() -> None:
    subcommands = typer.main.get_command(app)
    serve = subcommands.get_command(typer.Context(subcommands), "serve")  # type: ignore[attr-defined]
    known = {option for param in serve.params for option in param.opts}
    started = [*settings_of_unit()["ExecStart"], instruction("ENTRYPOINT"), UNIT.read_text()]
    named = {option for text in started for option in re.findall(r"(?<![\w-])--[a-z][a-z-]+", text)}
    assert {"--api-key-file", "--host", "--port", "--grace"} <= named
    assert named - known - {"--now"} == set()


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not here")
def test_systemd_understands_the_unit(tmp_path: Path) -> None:
    there = tmp_path / UNIT.name
    there.write_text(UNIT.read_text().replace("/opt/hotset/bin/hotset", "/bin/true"))
    done = subprocess.run(["systemd-analyze", "verify", there], capture_output=True, text=True, check=False)
    about = [line for line in done.stderr.splitlines() if "hotset" in line]
    assert (done.returncode, about) == (0, [])
    options = ("security", "--offline=yes", "--threshold=20")  # an exposure of 20 of 100
    done = subprocess.run(["systemd-analyze", *options, there], capture_output=True, text=True, check=False)
    if "unrecognized option" not in done.stderr:
        assert done.returncode == 0, done.stdout[-300:]


def get(url: str, key: str | None = None) -> int:
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {key}"} if key else {})
    try:
        with urllib.request.urlopen(request, timeout=10) as reply:
            return int(reply.status)
    except urllib.error.HTTPError as error:
        return error.code


@pytest.mark.parametrize("room", quick_are(("image",), ["unit", "image"]))
def test_started_server_answers_and_ends(room: str, tmp_path: Path) -> None:
    model = write_model(tmp_path / "tiny.gguf")
    (tmp_path / "api-key").write_text(f"{KEY}\n")
    if room == "unit":
        setting = settings_of_unit()
        (line,) = setting["ExecStart"]
        words = line.replace("${CREDENTIALS_DIRECTORY}", str(tmp_path)).split()
        assert setting["LoadCredential"] == ["api-key:/etc/hotset/api-key"]
        assert words.pop() == "$HOTSET_SERVE"
        assert words.pop(0) == "/opt/hotset/bin/hotset"
    else:
        words = json.loads(instruction("ENTRYPOINT"))
        assert words.pop(0) == "hotset"
        words[words.index("/run/secrets/hotset-api-key")] = str(tmp_path / "api-key")
    command = [*HOTSET, *words, str(model), "--port", "0", "-t", "1", "--device", "reference"]
    environment = {**os.environ, "HOTSET_HOME": str(tmp_path / "home"), "HOTSET_API_KEY": ""}
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment) as process:
        try:
            assert process.stderr is not None
            told, listening = "", None
            while listening is None and (line := process.stderr.readline()):
                told += line
                listening = re.search(r"listening on http://(\S+):(\d+)", line)
            assert listening, told
            assert listening[1] == ("127.0.0.1" if room == "unit" else "0.0.0.0")
            where = f"http://127.0.0.1:{listening[2]}"
            until(lambda: get(f"{where}/health") == 200)
            assert get(f"{where}/v1/models") == 401
            assert get(f"{where}/v1/models", KEY) == 200
            assert health(listening[2]) == 0
            process.send_signal(signal.SIGTERM)
            assert process.wait(WATCHDOG) == 0
            assert health(listening[2]) != 0
        finally:
            process.kill()


def health(port: str) -> int:
    """Return the exit status of the image's health check, run against `port` instead of 8080."""
    words = json.loads(instruction("HEALTHCHECK").partition("CMD ")[2])
    assert words[0] == "python"
    code = words[2].replace("127.0.0.1:8080", f"127.0.0.1:{port}")
    assert code != words[2]
    return subprocess.run(
        [sys.executable, words[1], code], stderr=subprocess.DEVNULL, check=False, timeout=30
    ).returncode


def test_image_runs_as_unprivileged_user() -> None:
    text = DOCKERFILE.read_text()
    last = text[text.rindex("\nFROM ") :]
    user = re.search(r"^USER (\d+):(\d+)$", last, re.MULTILINE)
    assert user
    assert int(user[1]) > 0
    assert f"--uid {user[1]}" in last
    environment = dict(word.split("=", 1) for word in shlex.split(instruction("ENV")))
    assert environment["HOTSET_HOME"] == instruction("VOLUME") == "/var/lib/hotset"
    copied = DOCKERFILE.with_name("Dockerfile.dockerignore").read_text().splitlines()
    root = PACKAGING.parent
    assert all((root / line[1:]).exists() for line in copied if line.startswith("!"))


def test_compose_starts_the_image_with_valid_options() -> None:
    [service] = yaml.safe_load((PACKAGING / "docker" / "compose.yaml").read_text())["services"].values()
    build = service["build"]
    context = (PACKAGING / "docker" / build["context"]).resolve()
    assert context / build["dockerfile"] == DOCKERFILE
    assert service["read_only"]
    assert service["cap_drop"] == ["ALL"]
    assert service["volumes"] == [f"models:{instruction('VOLUME')}"]
    [secret] = service["secrets"]
    assert f"/run/secrets/{secret}" in json.loads(instruction("ENTRYPOINT"))
    [port] = service["ports"]
    assert port.startswith("127.0.0.1:")
    assert port.endswith(f":{instruction('EXPOSE')}")
