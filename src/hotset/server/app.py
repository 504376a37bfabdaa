"""The application: routes, guards and error handlers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from importlib.metadata import version

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException

from hotset.errors import HotsetError, did_you_mean
from hotset.server import (
    anthropic,
    facts,
    health,
    infill,
    llama_server,
    lora,
    manage,
    modalities,
    ollama,
    rerank,
    saved_slots,
    site,
    tokens,
)
from hotset.server.body import RefusedBodyError
from hotset.server.errors import Problem, invalid_body, problem_of, response_of
from hotset.server.ignored import ignored_of
from hotset.server.logs import Notices
from hotset.server.mcp import routes as mcp
from hotset.server.metrics import RequestCounter
from hotset.server.models import HoldMiddleware, Models
from hotset.server.openai import chat, completions, embeddings, models, responses
from hotset.server.pulls import Pulls
from hotset.server.replies import dumped
from hotset.server.request_log import LogWriter, RequestLog, RequestSink
from hotset.server.security import HeadRequests, secure
from hotset.server.service import Host
from hotset.server.settings import ServerSettings
from hotset.server.shapes import OpenAIErrorReply, errors
from hotset.server.streams import ClientGoneError

ROUTERS = (
    site.router,
    health.router,
    models.router,
    chat.router,
    completions.router,
    infill.router,
    llama_server.router,
    embeddings.router,
    rerank.router,
    rerank.cohere,
    modalities.router,
    responses.router,
    tokens.router,
    saved_slots.router,
    lora.router,
    mcp.router,
    facts.router,
    anthropic.router,
    ollama.router,
)


def create_app(host: Host) -> FastAPI:
    """Return the application of one model's service, or of several models. It starts and closes the host."""

    settings = host.settings
    sinks = _sinks(settings)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        host.start()
        app.state.mcp_clients = await asyncio.to_thread(mcp.opened, settings.mcp_servers)
        try:
            yield
        finally:
            if app.state.mcp_clients is not None:
                await asyncio.to_thread(app.state.mcp_clients.close)
            if isinstance(host, Models):
                app.state.pulls.cancel()
            await host.close()
            for sink in sinks:
                await asyncio.to_thread(sink.close)

    app = FastAPI(
        title="hotset",
        version=version("hotset"),
        lifespan=lifespan,
        openapi_url=None,
        docs_url=None,
        redoc_url=None,
        strict_content_type=False,
        responses=errors(OpenAIErrorReply),
    )
    app.state.host, app.state.mcp_clients, app.state.ignored = host, None, Notices()
    for router in ROUTERS:
        app.include_router(router)
    if isinstance(host, Models):
        app.include_router(manage.router)
        app.state.pulls = Pulls()
        app.add_middleware(HoldMiddleware, models=host)
    _serve_document(app)
    _handle_errors(app)
    secure(app, settings)
    app.add_middleware(RequestCounter, metrics=host.metrics)
    if sinks:
        app.add_middleware(RequestLog, sinks=sinks)
    app.add_middleware(HeadRequests)
    return app


def _sinks(settings: ServerSettings) -> list[RequestSink]:
    """Return the request log and the tracer that the settings name. Raises InvalidRequestError."""
    sinks: list[RequestSink] = []
    if settings.request_log is not None:
        sinks.append(LogWriter(settings.request_log, settings.log_form))
    if settings.otlp_traces_endpoint is not None:
        from hotset.server.tracing import Traces  # OpenTelemetry's SDK is an extra

        sinks.append(Traces(settings.otlp_traces_endpoint))
    return sinks


def _serve_document(app: FastAPI) -> None:
    """Serve /openapi.json. It takes half a second, so a thread makes it once."""
    made: list[bytes] = []
    making = asyncio.Lock()

    @app.get("/openapi.json", include_in_schema=False)
    async def document() -> Response:
        async with making:
            if not made:
                made.append(await asyncio.to_thread(lambda: dumped(app.openapi())))
        return Response(made[0], media_type="application/json")


def _nearest_path(path: str) -> str:
    routes = [route for router in ROUTERS for route in router.routes if isinstance(route, APIRoute)]
    known = {route.path.lower(): route.path for route in routes}
    meant = did_you_mean(path.lower(), known, 0.8)
    return f" ({meant})" if meant else ""


def _handle_errors(app: FastAPI) -> None:
    """Send every error in the shape of the client's API schema, with the names of ignored fields."""

    def reply(http: Request, problem: Problem, headers: Mapping[str, str] | None = None) -> Response:
        return response_of(problem, http.url.path, {**ignored_of(http).headers, **(headers or {})})

    @app.exception_handler(HotsetError)
    async def known(http: Request, error: HotsetError) -> Response:
        return reply(http, problem_of(error))

    @app.exception_handler(Exception)
    async def unknown(http: Request, error: Exception) -> Response:
        return reply(http, problem_of(error))

    @app.exception_handler(RefusedBodyError)
    async def refused(http: Request, error: RefusedBodyError) -> Response:
        problem = error.problem
        if problem.status == 501:
            problem = await modalities.with_model(http, problem, error.model)
        return reply(http, problem)

    @app.exception_handler(RequestValidationError)
    async def invalid(http: Request, error: RequestValidationError) -> Response:
        return reply(http, invalid_body(error.errors()))

    @app.exception_handler(HTTPException)
    async def of_the_library(http: Request, error: HTTPException) -> Response:
        message = str(error.detail)
        if error.status_code == 404:
            message = f"there is nothing at {http.url.path}{_nearest_path(http.url.path)}"
        elif error.status_code == 405:
            allowed = (error.headers or {}).get("Allow", "another method")
            message = f"{http.url.path} does not take {http.method}; use {allowed}"
        return reply(http, Problem(error.status_code, message), error.headers)

    @app.exception_handler(ClientGoneError)
    async def gone(_: Request, __: ClientGoneError) -> Response:
        return Response(status_code=499)  # no client reads it
