"""The JSON of a request on its way to a route: a thread parses and checks a long one.

This takes up to a quarter of a second (json_limits.py), in which the event loop would answer no client. The
thread does it for one body at a time, and clients take turns.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import Request, Response
from fastapi.routing import APIRoute
from pydantic import BaseModel, ValidationError
from starlette.exceptions import HTTPException

from hotset.errors import QueueFullError
from hotset.server.errors import Problem, RequestError, invalid_body, problem_of
from hotset.server.ignored import ignored_of
from hotset.server.json_limits import loads
from hotset.server.preparation import LONG_BYTES
from hotset.server.rows import ignored_fields
from hotset.server.streams import ClientGoneError, client_of, dropped_header, host_of, while_connected


class RefusedBodyError(HTTPException):
    """A body that the route does not accept.

    FastAPI passes on no other kind of error from `Request.json`. model: the name of the model in the body, if
    it has one.
    """

    def __init__(self, problem: Problem, model: str | None = None) -> None:
        super().__init__(problem.status, problem.message)
        self.problem, self.model = problem, model


class BodyRoute(APIRoute):
    """A route that gets its body from `BodyRequest.json`. Pass it to a router as `route_class`."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handler = super().get_route_handler()
        model: Any = self.body_field.field_info.annotation if self.body_field is not None else None

        async def handled(http: Request) -> Response:
            response = await handler(BodyRequest(http, model))
            response.headers.update({**ignored_of(http).headers, **dropped_header(http)})
            return response

        return handled


class BodyRequest(Request):
    """A request whose `json` is the checked model of the route."""

    def __init__(self, http: Request, model: type[BaseModel] | None) -> None:
        super().__init__(http.scope, http.receive)
        self._model = model

    async def json(self) -> Any:
        body = await self.body()
        if len(body) <= LONG_BYTES:
            return self._checked(body)
        turns = host_of(self).preparation.bodies()
        try:
            return await while_connected(self, turns.run(client_of(self), self._checked, body))
        except QueueFullError as error:
            raise RefusedBodyError(problem_of(error)) from None
        except ClientGoneError:
            raise RefusedBodyError(Problem(499, "the client is gone")) from None

    def _checked(self, body: bytes) -> Any:
        """Return the checked body. Raises RefusedBodyError."""
        try:
            given = loads(body)
            if self._model is None:
                return given
            checked, ignored = self._model.model_validate(given), ignored_of(self)
            for name, reason in ignored_fields(checked):
                ignored.add(name, reason)
                if ignored.is_full:
                    break
            return checked
        except ValidationError as error:
            found = error.errors(include_url=False)
            problem = invalid_body([{**one, "loc": ("body", *one["loc"])} for one in found])
            model = given.get("model") if isinstance(given, dict) else None
            raise RefusedBodyError(problem, model if isinstance(model, str) else None) from None
        except RequestError as error:
            raise RefusedBodyError(problem_of(error)) from None
