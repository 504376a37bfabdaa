"""`hotset launch`: start a coding agent or an editor with a model of this machine.

It uses a running server. Otherwise it starts one, and stops it with the tool. It prints every setting. A file
of the user is changed only after a yes. The file gets its old bytes back when the tool ends, or at the next
launch.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from hotset.cli import options
from hotset.cli.client import (
    URL,
    NoModelServerError,
    api_key,
    fetched,
    is_address,
    is_hotset,
    no_model_server,
    running,
)
from hotset.cli.console import say, warn
from hotset.cli.default_model import default_model
from hotset.cli.launch_tools import TOOLS, ServerAddress, Setup, backup_of, tool_of, with_arguments
from hotset.cli.progress import ProgressBar
from hotset.cli.serve import check_installed, model_name
from hotset.errors import HotsetError, ModelNotFoundError
from hotset.escaping import clause, escaped
from hotset.files import write_whole
from hotset.formats.gguf import open_gguf
from hotset.loader.decide import DEFAULT_N_CTX
from hotset.memory import free_memory
from hotset.model.cost import Cost
from hotset.model.decoder import describe
from hotset.model.supported import read_config
from hotset.storage import catalogue, find_created, resolve

_FREE = "http://127.0.0.1:PORT"  # shown by --print for a server that would be started
_CONTEXT = 32768  # tokens of a new server's context, for the prompts of agents
_SHORT_CONTEXT = 16384  # a smaller context causes a warning
_SHARE_OF_FREE = 0.5  # of the memory next to the model, for the cache of a default context
_LONGEST_NAME = 1000  # characters of a model's name
_LONGEST_CONTEXT = 1 << 31  # tokens of a context that a server may claim
_LOOK_SECONDS = 0.1  # between two checks whether the new server is ready
_KEY = "HOTSET_API_KEY"


def launch(
    tool: Annotated[str, typer.Argument(help=f"One of {', '.join(TOOLS)}.", show_default=False)],
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="[-- ARGUMENTS]", help="Of the tool itself.")
    ] = None,
    model: Annotated[str | None, options.option("--model -m", options.MODEL_HELP)] = None,
    url: Annotated[str | None, options.option("--url", "A running server.", usual=URL)] = None,
    ctx_size: Annotated[
        int | None,
        options.option(
            "--ctx-size -c",
            "Tokens of the context, if a server is started.",
            usual="32768, or as many as the model and the memory allow.",
            min=1,
        ),
    ] = None,
    show: Annotated[bool, options.option("--print", "Print the settings, and start nothing.")] = False,
    yes: Annotated[bool, options.option("--yes -y", "Change files of the tool without asking.")] = False,
) -> None:
    """Start a coding agent or an editor on a local model: a server is started unless one runs."""
    chosen = tool_of(tool)
    program = shutil.which(chosen.program)
    if program is None and not show:
        raise HotsetError(f"{chosen.what} ({chosen.program}) is not installed: {chosen.page} says how.")
    if program is not None and not os.path.isabs(program):  # Windows searches the current folder first
        raise HotsetError(
            f"The current folder has a program {program}, which is not started: remove it first."
        )
    if url is not None and not is_address(url):
        raise typer.BadParameter(
            "it must begin with http:// or https:// and name a host.", param_hint="--url"
        )
    with contextlib.ExitStack() as stack:
        found = _found(url, model)
        name = model or (default_model() if found is None else "")
        if found is None and show:
            n_ctx = ctx_size or _context(name, _known(name))
            say(f"No server runs. One for {name} would be started on a free port (PORT), with -c {n_ctx}.")
            found = ServerAddress(url=_FREE, model=_served_name(name), n_ctx=n_ctx, key=api_key())
        if found is None:
            with ProgressBar() as bar:
                path = resolve(name, progress=bar)
            found = stack.enter_context(started_server(name, ctx_size or _context(name, path)))
        if found.n_ctx is not None and found.n_ctx < _SHORT_CONTEXT:
            warn(
                f"the context is {found.n_ctx} tokens; coding agents often need {_CONTEXT}. Choose a model "
                f"with a longer one, or start the server with -c {_CONTEXT}."
            )
        setup = chosen.setup(found)
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="hotset-launch-")))
        command = with_arguments(setup, arguments or [], folder)
        for line in shown(setup, command):
            say(line)
        if program is None or show:
            return
        write_whole({folder / name: text for name, text in setup.scratch.items()}, sync=False)
        stack.enter_context(_edited(setup, yes=yes))
        env = {name: value for name, value in (os.environ | setup.env).items() if value is not None}
        code = _run([program, *command[1:]], env)
    raise typer.Exit(code)


# ---- the server ----


def _known(name: str) -> Path | None:
    """Return the file of a model, None for one that would be fetched.

    Raises ModelNotFoundError for any other name.
    """
    entry = catalogue.find(name)
    try:
        return resolve(name, download=False)
    except ModelNotFoundError:
        if entry is not None or catalogue.canonical(name).startswith("hf:"):
            return None
        raise


def _served_name(name: str) -> str:
    path = _known(name)
    return name if path is None else model_name(path, name)


def _context(name: str, path: Path | None) -> int:
    """Return the tokens of a context for agents.

    It is the context with which the model was created, or as many tokens as its training and the memory
    allow. path: None for a model that is not on this machine.
    """
    made = find_created(name)
    if path is None or (made is not None and made[1].load.get("n_ctx")):
        return _CONTEXT if made is None else int(made[1].load["n_ctx"])
    with open_gguf(path) as gguf:
        config = read_config(gguf)
        per_token = Cost(describe(config, gguf.tensors), gguf.tensors).kv_bytes_per_token("f16")
        room = _SHARE_OF_FREE * max(free_memory() - gguf.nbytes, 0)
    n = min(_CONTEXT, config.n_ctx_train)
    while n > DEFAULT_N_CTX and n * per_token > room:
        n = max(n // 2, DEFAULT_N_CTX)
    return n


def _found(url: str | None, model: str | None) -> ServerAddress | None:
    """Return the server at `url`, or at the default address, or None if one has to be started.

    Raises HotsetError for a server that lacks the model, wants a key, or does not answer at `url`.
    """
    try:
        at, key = running(url)
        return _running(at, model, key)
    except NoModelServerError as error:
        if url is not None:
            raise
        if not error.is_silent:
            warn(f"{str(error).rstrip('.')}; a new server is started.")
    return None


def _running(url: str, model: str | None, key: str) -> ServerAddress:
    """Return the server at an address. Raises HotsetError if its reply or its models do not fit."""
    models = _models(url, key)
    name = model or next((one.name for one in models.values() if one.is_loaded), next(iter(models)))
    if name not in models:
        known = clause(", ".join(list(models)[:8]))
        raise HotsetError(
            f"A server runs at {url}, and has no model {clause(name)!r} but {known}: "
            "name one of them, or stop it."
        )
    say(f"The server at {url} answers, with {name}.")
    return ServerAddress(url=url, model=name, n_ctx=models[name].n_ctx, key=key)


@dataclass(frozen=True)
class _Listed:
    """A model in the list of a server. n_ctx: tokens of its context, None if the server does not say."""

    name: str
    n_ctx: int | None
    is_loaded: bool

    @staticmethod
    def of(entry: Any) -> _Listed | None:
        """Return an entry of the list; None if its name cannot be an argument or a variable of a tool."""
        name = entry.get("id") if isinstance(entry, dict) else None
        if not isinstance(name, str) or not 0 < len(name) <= _LONGEST_NAME or escaped(name) != name:
            return None
        n_ctx, status = entry.get("max_model_len"), entry.get("status")
        is_count = isinstance(n_ctx, int) and not isinstance(n_ctx, bool) and 0 < n_ctx <= _LONGEST_CONTEXT
        state = status.get("value", "loaded") if isinstance(status, dict) else "loaded"
        return _Listed(name, n_ctx if is_count else None, state == "loaded")


def _models(url: str, key: str) -> dict[str, _Listed]:
    """Return the models that a server lists, at least one, by name. Raises as `fetched` does."""
    try:
        reply = json.loads(fetched(url, "/v1/models", key))
    except (ValueError, RecursionError):
        raise no_model_server(url, "its list of models is not JSON") from None
    entries = reply.get("data") if isinstance(reply, dict) else None
    if not isinstance(entries, list):
        raise no_model_server(url, 'its list of models has no array "data"')
    models = {one.name: one for one in map(_Listed.of, entries) if one is not None}
    if not models:
        raise no_model_server(url, "it lists no model with a usable name")
    return models


def _with(ctx_size: int | None) -> str:
    return "" if ctx_size is None else f" with -c {ctx_size}"


@contextlib.contextmanager
def started_server(model: str, ctx_size: int | None) -> Iterator[ServerAddress]:
    """Yield a new server of a model on a free port of this machine. It ends with the tool."""
    check_installed()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    more = () if ctx_size is None else ("--ctx-size", str(ctx_size), "--contexts", "1")
    say(f"No server runs: starting one of {model} at {url}{_with(ctx_size)} ...")
    with tempfile.TemporaryFile() as log:
        command = [sys.executable, "-P", "-m", "hotset.cli.main", "serve", model, "--port", str(port), *more]
        # The server has its own process group: Ctrl-C is only for the tool.
        server = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, **_OWN_GROUP)
        try:
            while not is_hotset(url):
                if server.poll() is not None:
                    log.seek(0)
                    said = log.read().decode(errors="replace").strip().splitlines()
                    raise HotsetError(f"The server did not start: {said[-1] if said else 'it said nothing'}")
                time.sleep(_LOOK_SECONDS)
            yield _running(url, None, api_key())
        finally:
            server.terminate()
            server.wait()


_OWN_GROUP: dict[str, Any] = (
    {"creationflags": subprocess.CREATE_NEW_PROCESS_GROUP}  # type: ignore[attr-defined,unused-ignore]
    if sys.platform == "win32"
    else {"start_new_session": True}
)


# ---- the tool ----


def shown(setup: Setup, command: list[str]) -> Iterator[str]:
    """Yield lines that show the settings, quoted for a POSIX shell."""
    for name, value in setup.env.items():
        yield f"  {name} is not set" if value is None else f"  {name}={shlex.quote(_hidden(value))}"
    for name, text in setup.scratch.items():
        yield f"  a file {name}, for this run:"
        yield from (f"    {_hidden(line)}" for line in text.splitlines())
    for path, text in setup.edits.items():
        yield f"  changes {path}, until the tool ends:"
        yield from (f"    {_hidden(line)}" for line in _added(path, text))
    yield f"  {shlex.join(command)}"


def _hidden(text: str) -> str:
    key = os.environ.get(_KEY)
    return text.replace(key, "(the key)") if key else text


def _added(path: Path, new: str) -> list[str]:
    """Return the lines that are added to a JSON file; for a new file, all lines."""
    try:
        old = set(path.read_text("utf-8").splitlines())
    except OSError:
        old = set()
    return [f"+ {line}" for line in new.splitlines() if line not in old]


@contextlib.contextmanager
def _edited(setup: Setup, *, yes: bool) -> Iterator[None]:
    """Change the user's files for the tool, and restore them. Raises HotsetError if the user says no."""
    if not setup.edits:
        yield
        return
    if not yes and not typer.confirm("Change it?", err=True):
        raise HotsetError("Nothing was changed or started.")
    for path, text in setup.edits.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        backup = backup_of(path)
        if not backup.exists():  # otherwise a launch was killed, and the backup has the original
            _write_as(path, backup, path.read_bytes() if path.exists() else b"")
        _write_as(path, path, text.encode())
        written = path.stat().st_mtime_ns
        os.utime(backup, ns=(written, written))
    try:
        yield
    finally:
        for path, text in setup.edits.items():
            _restore(path, text)


def _write_as(model: Path, path: Path, data: bytes) -> None:
    """Write a file with the permissions of another one, if that exists."""
    try:
        mode = stat.S_IMODE(model.stat().st_mode)
    except FileNotFoundError:
        write_whole({path: data})
        return
    write_whole({path: data}, mode=mode)
    path.chmod(mode)  # sets permissions that the umask removed


def _restore(path: Path, written: str) -> None:
    """Restore the bytes that a file had before.

    written: the launch's version: a file that has been changed since then stays.
    """
    backup = backup_of(path)
    if path.exists() and path.read_bytes() != written.encode():
        say(f"{path} was changed in the meantime and stays as it is; what it was before is in {backup}.")
    elif backup.stat().st_size:
        backup.replace(path)
    else:  # the file did not exist
        path.unlink(missing_ok=True)
        backup.unlink()


def _run(command: list[str], env: dict[str, str]) -> int:
    """Run the tool and return its exit code; Ctrl-C is only for the tool."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        # The tool's process handles the signal again.
        return subprocess.run(command, env=env, check=False, **_GETS_INTERRUPTS).returncode
    finally:
        signal.signal(signal.SIGINT, before)


def _take_interrupts() -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)


_GETS_INTERRUPTS: dict[str, Any] = {} if sys.platform == "win32" else {"preexec_fn": _take_interrupts}
