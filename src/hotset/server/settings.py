"""Settings of a server: where it listens, who may use it, and the limits of a request."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from hotset.engine.sampler import SamplingParams
from hotset.errors import InvalidRequestError
from hotset.parameters import choice, flag, real_number, shown, text, whole_number
from hotset.server.keys import NamedKey
from hotset.server.mcp.file import McpServer

LOG_FORMS = ("json", "text", "short")
LOOPBACK_NAMES = ("localhost", "127.0.0.1", "[::1]")


@dataclass(frozen=True, kw_only=True)
class ServerSettings:
    """The settings of a server. Raises InvalidRequestError, which names the wrong field and the reason.

    host, port: where it listens; port 0 takes any free one. socket: a Unix socket in place of them.
    tls_cert, tls_key: files in PEM format, for HTTPS.
    api_keys: each of these gives access; required if it listens for other machines, unless allow_no_api_key.
    named_keys: more keys, with limits.
    cors_origins: pages of these origins ("https://chat.example", or "*") may use it from a browser.
    allowed_hosts: names of the server, in addition to the loopback names and `host`.

    max_queue: sequences that may wait in addition to the running ones; later requests are refused with
    429. max_answers: the largest `n`, times prompts, of a request. max_tokens: the longest answer; None: the
    context limits it. max_seconds: how long an answer may take; None: no limit.
    reasoning_budget, reasoning_budget_message: as in SamplingParams, for requests that leave them out.
    max_head_seconds: time for a request's head to arrive. max_body_bytes, max_nesting: limits of its JSON.
    max_body_seconds: time for the body to arrive. max_held_bytes: of long bodies of all unfinished requests;
    each client gets half of the amount that others leave. keep_alive_seconds: between two signs of life in a
    stream. max_write_seconds: that a client may leave a reply, or a piece of a stream, unread.
    grace_seconds: time for running answers to finish at a shutdown.
    request_log: a file that gets a line for each request ("-": stderr), in `log_form`: json, text or short.
    otlp_traces_endpoint: URL of an OpenTelemetry collector, which gets a span for each request; None: no
    spans.
    slot_save_path: the folder in which /slots saves; None: nothing is saved.
    mcp_servers: servers whose tools the page offers to clients that may manage models.
    lora_dir: the folder that clients may load adapters from; None: they cannot load any.
    strict_requests: refuse fields that have no effect.
    allow_remote_images: fetch images that messages give by address, except from private addresses.
    trusted_proxies: addresses or networks of proxies whose X-Forwarded-For header names the client; the
    header of others is ignored.
    """

    host: str = "127.0.0.1"
    port: int = 8080
    socket: str | None = None
    tls_cert: str | None = None
    tls_key: str | None = None
    api_keys: tuple[str, ...] = ()
    named_keys: tuple[NamedKey, ...] = ()
    allow_no_api_key: bool = False
    cors_origins: tuple[str, ...] = ()
    allowed_hosts: tuple[str, ...] = ()
    max_queue: int = 64
    max_answers: int = 16
    max_tokens: int | None = None
    max_seconds: float | None = None
    reasoning_budget: int | None = None
    reasoning_budget_message: str | None = None
    request_log: str | None = None
    log_form: str = "json"
    otlp_traces_endpoint: str | None = None
    slot_save_path: str | None = None
    lora_dir: str | None = None
    mcp_servers: tuple[McpServer, ...] = ()
    trusted_proxies: tuple[str, ...] = ()
    strict_requests: bool = False
    allow_remote_images: bool = False
    max_head_seconds: float = 30.0
    max_body_bytes: int = 32 << 20
    max_nesting: int = 64
    max_held_bytes: int = 256 << 20
    max_body_seconds: float = 60.0
    keep_alive_seconds: float = 5.0
    max_write_seconds: float = 60.0
    grace_seconds: float = 30.0

    def __post_init__(self) -> None:
        text("host", self.host)
        whole_number("port", self.port, 0, 65535)
        for name in ("allow_no_api_key", "strict_requests", "allow_remote_images"):
            flag(name, getattr(self, name))
        for name in ("api_keys", "cors_origins", "allowed_hosts", "trusted_proxies"):
            for value in getattr(self, name):
                if not text(name, value).strip():
                    raise InvalidRequestError(
                        f"one of the {name.replace('_', ' ')} is empty; give a value, or leave it out"
                    )
        choice("log_form", self.log_form, LOG_FORMS)
        if self.otlp_traces_endpoint is not None:
            _check_collector(self.otlp_traces_endpoint)
        if (self.tls_cert is None) != (self.tls_key is None):
            raise InvalidRequestError("HTTPS needs both a certificate and its key: tls_cert and tls_key")
        for key in self.api_keys:
            if not key.isascii() or not key.isprintable() or " " in key:
                raise InvalidRequestError(
                    "an API key has characters that a header cannot carry; use letters, digits and signs"
                )
        for origin in self.cors_origins:
            if origin != "*" and not origin.partition("://")[2]:
                raise InvalidRequestError(
                    f"an origin looks like https://chat.example (or *, for all), not like {shown(origin)}"
                )
        self._check_limits()
        for proxy in self.trusted_proxies:
            _check_network(proxy)
        if self.max_tokens is not None:
            whole_number("max_tokens", self.max_tokens, 1)
        SamplingParams(**self.sampling)
        if self.max_seconds is not None:
            real_number("max_seconds", self.max_seconds, 0)
        if not self.is_local and not self.has_keys and not self.allow_no_api_key:
            raise InvalidRequestError(
                f"on {self.host} other machines can reach the server; give it an API key (--api-key-file, or "
                "HOTSET_API_KEY), or say --allow-no-api-key to let everyone in"
            )

    def _check_limits(self) -> None:
        for name, low in (
            ("max_queue", 0),
            ("max_answers", 1),
            ("max_body_bytes", 1),
            ("max_nesting", 1),
            ("max_held_bytes", 1),
        ):
            whole_number(name, getattr(self, name), low)
        for name in ("head", "body", "write"):
            real_number(f"max_{name}_seconds", getattr(self, f"max_{name}_seconds"), 0)
        for name in ("keep_alive_seconds", "grace_seconds"):
            real_number(name, getattr(self, name), 0)

    @property
    def sampling(self) -> dict[str, Any]:
        """Return the fields of SamplingParams for requests that leave them out."""
        names = ("reasoning_budget", "reasoning_budget_message")
        return {name: value for name in names if (value := getattr(self, name)) is not None}

    @property
    def has_keys(self) -> bool:
        return bool(self.api_keys or self.named_keys)

    @property
    def is_local(self) -> bool:
        """Return whether only this machine can reach it."""
        if self.socket is not None or self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host.strip("[]")).is_loopback
        except ValueError:
            return False

    @property
    def serves_any_address(self) -> bool:
        """Return whether it listens on every address of this machine, so that its names are not known."""
        return self.host in ("", "0.0.0.0", "::", "[::]")


def _check_collector(given: str) -> None:
    try:
        parts = urlsplit(given)
        is_url = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 1) > 0
    except ValueError:
        is_url = False
    if not is_url:
        raise InvalidRequestError(
            "a collector of traces is an address such as http://localhost:4318/v1/traces (OTLP over HTTP), "
            f"not {shown(given)}"
        )


def _check_network(given: str) -> None:
    try:
        ipaddress.ip_network(given)
    except ValueError:
        raise InvalidRequestError(
            f"a trusted proxy is an address or a network, such as 10.0.0.5 or 10.0.0.0/8, not {shown(given)}"
        ) from None
