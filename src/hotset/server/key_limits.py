"""The remaining limits of the holders of API keys."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from hotset.escaping import clause
from hotset.parameters import shown
from hotset.server.errors import RequestError
from hotset.server.keys import NamedKey

_SECONDS = 60.0
_NAMES_SHOWN = 8  # in a message


class Bucket:
    """An allowance that refills by `per_minute` each minute. seconds: the clock, replaced by tests."""

    def __init__(self, per_minute: float, seconds: Callable[[], float] = time.monotonic) -> None:
        self._most = self._level = per_minute
        self._clock = seconds
        self._at = seconds()

    def wait(self, n: float) -> float:
        """Return the seconds until n may be used; 0: now."""
        now = self._clock()
        self._level = min(self._most, self._level + (now - self._at) * self._most / _SECONDS)
        self._at = now
        return max(0.0, (n - self._level) * _SECONDS / self._most)

    def take(self, n: float) -> None:
        """Use n, even if fewer are left."""
        self._level -= n


@dataclass(eq=False)
class Holder:
    """The holder of a key, with its remaining limits."""

    name: str
    digest: bytes
    models: frozenset[str] = frozenset()
    manages: bool = True
    requests: Bucket | None = None
    tokens: Bucket | None = None

    @classmethod
    def of(cls, key: NamedKey) -> Holder:
        requests, tokens = (
            None if most is None else Bucket(most)
            for most in (key.requests_per_minute, key.tokens_per_minute)
        )
        models = frozenset(name.lower() for name in key.models)
        return cls(key.name, bytes.fromhex(key.sha256), models, key.manages, requests, tokens)

    def check(self) -> None:
        """Count a request. Raises RequestError (429) if the requests or tokens of this minute are used up."""
        for bucket, what, n in ((self.requests, "requests", 1.0), (self.tokens, "tokens", 1.0)):
            if bucket is not None and (seconds := bucket.wait(n)) > 0:
                raise RequestError(
                    f"the key {self.name!r} has used its {what} of this minute; ask again in "
                    f"{max(round(seconds), 1)} s",
                    429,
                    code="rate_limit_exceeded",
                    retry_after=seconds,
                )
        if self.requests is not None:
            self.requests.take(1)

    def may_ask(self, model: str) -> bool:
        return not self.models or model.lower() in self.models

    def not_served(self, name: str) -> RequestError:
        """Return the error for a model that the key may not use, or that does not exist.

        The holder learns neither which of the two it is, nor the names of other models.
        """
        return RequestError(
            f"the model {clause(shown(name))} is not served to the key {self.name!r}, which may use "
            f"{self.shown}",
            404,
            param="model",
            code="model_not_found",
        )

    @property
    def shown(self) -> str:
        """Return the names of its models, for a message."""
        names = sorted(self.models)
        more = len(names) - _NAMES_SHOWN
        return ", ".join(map(repr, names[:_NAMES_SHOWN])) + (f" and {more} more" if more > 0 else "")
