"""`hotset mcp`: the models of this machine as tools of the Model Context Protocol."""

from __future__ import annotations

import asyncio
import gc

from hotset.cli import options
from hotset.cli.default_model import default_model
from hotset.cli.progress import ProgressBar
from hotset.storage import resolve


def mcp(
    model: options.OptionalModel = None,
    *,
    loading: options.ModelOptions,
) -> None:
    """Serve chat and embeddings to an MCP client: over standard input and output."""
    from hotset.cli.serve import check_installed

    check_installed(("mcp", "mcp_types", "anyio", "jsonschema"), "hotset mcp needs", "mcp")
    from hotset.cli import mcp_server

    gc.freeze()
    settings = loading.settings(max_sequences=1)
    name = model or default_model()
    with ProgressBar() as bar:
        path = resolve(name, progress=bar)
    asyncio.run(mcp_server.serve(mcp_server.LocalModels(name, path, settings)))
