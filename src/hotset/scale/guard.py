"""Authentication of the front at a replica: a shared secret in a header."""

from __future__ import annotations

import hmac

from starlette.datastructures import Headers
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from hotset.server.streams import API_KEY

SECRET, CLIENT = "x-hotset-front", "x-hotset-client"  # headers of the front


class FromFront:
    """Middleware that accepts only requests with the front's secret, and takes the client from the front."""

    def __init__(self, app: ASGIApp, secret: str) -> None:
        self._app, self._secret = app, secret.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            headers = Headers(scope=scope)
            if not hmac.compare_digest(headers.get(SECRET, "").encode(), self._secret):
                refused = PlainTextResponse("this is a replica; ask the server in front of it\n", 403)
                await refused(scope, receive, send)
                return
            scope[API_KEY] = headers.get(CLIENT, "")
        await self._app(scope, receive, send)
