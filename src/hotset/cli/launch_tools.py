"""Settings that direct programs to a server: arguments, variables, and files if a program needs them."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hotset.errors import HotsetError, InvalidRequestError
from hotset.files import read_small_text
from hotset.parameters import shown

_MAX_SETTINGS = 4 << 20  # bytes of a file of settings
BACKUP = ".before-hotset"  # the suffix of a backup of a file that a launch has changed
_NAME = "hotset"  # the server's name in the tools' own settings


@dataclass(frozen=True, kw_only=True)
class ServerAddress:
    """A server for tools.

    url: without a path. model: the name in requests. n_ctx: tokens of its context, if known. key: what
    clients send; any text if the server needs none.
    """

    url: str
    model: str
    n_ctx: int | None
    key: str


@dataclass(frozen=True, kw_only=True)
class Setup:
    """The start of a tool.

    env: variables; None: unset. scratch: files for this run, by the name that `command` has in braces
    ("{NAME}"). edits: the user's own files, with their contents while the tool runs.
    """

    command: tuple[str, ...]
    env: Mapping[str, str | None] = field(default_factory=dict)
    scratch: Mapping[str, str] = field(default_factory=dict)
    edits: Mapping[Path, str] = field(default_factory=dict)


def _claude(server: ServerAddress) -> Setup:
    models = ("MODEL", "DEFAULT_OPUS_MODEL", "DEFAULT_SONNET_MODEL", "DEFAULT_HAIKU_MODEL")
    return Setup(
        command=("claude",),
        env={
            "ANTHROPIC_BASE_URL": server.url,
            "ANTHROPIC_AUTH_TOKEN": server.key,
            "ANTHROPIC_API_KEY": None,  # the tool would send it in place of the token
            **{f"ANTHROPIC_{name}": server.model for name in models},
            "CLAUDE_CODE_SUBAGENT_MODEL": server.model,
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
            "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",  # it differs in each request: no prefix is cached
            # By default Claude Code repeats a request after 300 s, because it does not count `ping` events.
            "CLAUDE_STREAM_IDLE_TIMEOUT_MS": "1800000",
        },
    )


def _codex(server: ServerAddress) -> Setup:
    settings = {
        "model_provider": _NAME,
        f"model_providers.{_NAME}.name": _NAME,
        f"model_providers.{_NAME}.base_url": f"{server.url}/v1",
        f"model_providers.{_NAME}.wire_api": "responses",
        f"model_providers.{_NAME}.env_key": "HOTSET_API_KEY",
        "model": server.model,
        "web_search": "disabled",  # only a provider can run this tool
        **({} if server.n_ctx is None else {"model_context_window": server.n_ctx}),
    }
    # Values are TOML, which includes JSON's texts and numbers.
    arguments = (part for name, value in settings.items() for part in ("-c", f"{name}={json.dumps(value)}"))
    return Setup(command=("codex", *arguments), env={"HOTSET_API_KEY": server.key})


def _opencode(server: ServerAddress) -> Setup:
    # OpenCode reserves `output` tokens for an answer, and shortens a conversation that needs them.
    limit = {} if server.n_ctx is None else {"limit": {"context": server.n_ctx, "output": server.n_ctx // 4}}
    settings = {
        "$schema": "https://opencode.ai/config.json",
        "model": f"{_NAME}/{server.model}",
        "provider": {
            _NAME: {
                "npm": "@ai-sdk/openai-compatible",
                "name": _NAME,
                "options": {"baseURL": f"{server.url}/v1", "apiKey": server.key},
                "models": {server.model: {"name": server.model, **limit}},
            }
        },
    }
    return Setup(command=("opencode",), env={"OPENCODE_CONFIG_CONTENT": json.dumps(settings)})


def _aider(server: ServerAddress) -> Setup:
    return Setup(
        command=("aider", "--model", f"openai/{server.model}", "--no-show-model-warnings"),
        env={"OPENAI_API_BASE": f"{server.url}/v1", "OPENAI_API_KEY": server.key},
    )


def _qwen(server: ServerAddress) -> Setup:
    return Setup(
        command=("qwen", "--auth-type", "openai"),
        env={
            "OPENAI_BASE_URL": f"{server.url}/v1",
            "OPENAI_API_KEY": server.key,
            "OPENAI_MODEL": server.model,
        },
    )


def _continue(server: ServerAddress) -> Setup:
    model = {
        "name": server.model, "provider": "openai", "model": server.model, "apiBase": f"{server.url}/v1",
        "apiKey": server.key, "roles": ["chat", "edit", "apply"],
    }  # fmt: skip
    settings = {"name": _NAME, "version": "0.0.1", "schema": "v1", "models": [model]}  # JSON is YAML
    return Setup(
        command=("cn", "--config", "{config.yaml}"),
        scratch={"config.yaml": json.dumps(settings, indent=2) + "\n"},
    )


def _zed(server: ServerAddress) -> Setup:
    path = zed_settings().resolve()  # so that a link stays a link
    model = {
        "name": server.model,
        "max_tokens": server.n_ctx or 8192,
        "capabilities": {"tools": True, "images": False},
    }
    added = {
        "language_models": {
            "openai_compatible": {_NAME: {"api_url": f"{server.url}/v1", "available_models": [model]}}
        },
        "agent": {"default_model": {"provider": _NAME, "model": server.model}},
    }
    settings = _merged(_read_settings(path), added)
    # Zed takes a provider's key from the variable with the provider's name.
    return Setup(
        command=("zed", "--wait"),
        env={"HOTSET_API_KEY": server.key},
        edits={path: json.dumps(settings, indent=2, ensure_ascii=False) + "\n"},
    )


@dataclass(frozen=True)
class LaunchTool:
    """A tool that can be launched. what: its title. program: its command. page: its installation page."""

    what: str
    program: str
    page: str
    setup: Callable[[ServerAddress], Setup]


TOOLS = {
    "claude": LaunchTool("Claude Code", "claude", "https://code.claude.com/docs", _claude),
    "codex": LaunchTool("Codex CLI", "codex", "https://github.com/openai/codex", _codex),
    "opencode": LaunchTool("OpenCode", "opencode", "https://opencode.ai", _opencode),
    "qwen": LaunchTool("Qwen Code", "qwen", "https://github.com/QwenLM/qwen-code", _qwen),
    "aider": LaunchTool("Aider", "aider", "https://aider.chat", _aider),
    "continue": LaunchTool("Continue's cn", "cn", "https://docs.continue.dev", _continue),
    "zed": LaunchTool("Zed", "zed", "https://zed.dev", _zed),
}


def zed_settings() -> Path:
    """Return the path of Zed's user settings."""
    if sys.platform == "win32":
        return (
            Path(os.environ.get("APPDATA") or Path.home() / "AppData" / "Roaming") / "Zed" / "settings.json"
        )
    base = os.environ.get("XDG_CONFIG_HOME") if sys.platform != "darwin" else None
    return Path(base or Path.home() / ".config") / "zed" / "settings.json"


def _read_settings(path: Path) -> dict[str, Any]:
    """Return the settings in a JSON file with comments and trailing commas; {} if the file does not exist.

    If a launch did not end, it returns the settings before that launch. Raises InvalidRequestError, also if
    the file was changed after that launch.
    """
    backup = backup_of(path)
    if backup.exists() and path.exists() and not _is_untouched(path, backup):
        raise HotsetError(
            f"{path} was changed since an earlier launch, and {backup.name} next to it is the older version; "
            "delete the one that you do not want, and start again"
        )
    try:
        text = read_small_text(backup if backup.exists() else path, _MAX_SETTINGS)
    except FileNotFoundError:
        return {}
    try:
        found = json.loads(without_comments(text) or "{}")
    except (ValueError, RecursionError) as error:
        raise HotsetError(f"{path} is not understood ({shown(str(error))}); nothing was changed") from None
    if not isinstance(found, dict):
        raise HotsetError(f"{path} has no object of settings; nothing was changed")
    return found


def _is_untouched(path: Path, backup: Path) -> bool:
    """Return whether a file is unchanged since a launch wrote it, or equal to its backup."""
    return path.stat().st_mtime_ns == backup.stat().st_mtime_ns or path.read_bytes() == backup.read_bytes()


def backup_of(path: Path) -> Path:
    """Return the path of the backup of a user's file while a launch has changed it.

    It is empty if the user had no file. Its time is the time at which the launch wrote the user's file.
    """
    return path.with_name(path.name + BACKUP)


_PARTS = re.compile(r'("(?:\\.|[^"\\])*")|//[^\n]*|/\*.*?\*/|,(?=(?:\s|//[^\n]*|/\*.*?\*/)*[}\]])', re.DOTALL)


def without_comments(text: str) -> str:
    """Return JSON from JSON with comments and trailing commas."""
    return _PARTS.sub(lambda found: found[1] or "", text).strip()


def _merged(settings: Mapping[str, Any], added: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(settings)
    for name, value in added.items():
        old = merged.get(name)
        merged[name] = _merged(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return merged


def tool_of(name: str) -> LaunchTool:
    """Return the tool with this name. Raises InvalidRequestError for an unknown name."""
    if name not in TOOLS:
        raise InvalidRequestError(f"the tool must be one of {', '.join(TOOLS)}, not {shown(name)}")
    return TOOLS[name]


def with_arguments(setup: Setup, arguments: Sequence[str], folder: Path) -> list[str]:
    """Return the command line, with the scratch files in `folder`."""
    places = {f"{{{name}}}": str(folder / name) for name in setup.scratch}
    return [*(places.get(part, part) for part in setup.command), *arguments]
