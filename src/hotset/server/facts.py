"""GET /props, /plan and /metrics: the model and its settings, its placement, and the counters."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

from fastapi import APIRouter, Request, Response
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from hotset.backends.base import BLOCK_SIZE
from hotset.engine.sampler import SamplingParams
from hotset.report.placement import memory_dict, placement_dict
from hotset.server.llama_replies import generation_settings
from hotset.server.metrics import OfHolder
from hotset.server.shapes import documented_as
from hotset.server.streams import HOLDER, host_of, serving
from hotset.storage.store import shards

router = APIRouter()


@router.get("/props")
async def props(http: Request) -> dict[str, Any]:
    """Return llama-server's fields; `hotset` has the fields that only hotset knows."""
    service = await serving(http, http.query_params.get("model"), required=False)
    model = service.model
    tokenizer, choice = model.tokenizer, model.sparsity
    return {
        "default_generation_settings": {
            "n_ctx": model.n_ctx,
            "params": generation_settings(SamplingParams(**service.sampling)),
        },
        "total_slots": model.engine.max_sequences,
        "model_alias": service.name,
        "model_path": model.gguf.path.name,
        "chat_template": model.chat_template.source,
        "bos_token": tokenizer.piece(tokenizer.bos_id),
        "eos_token": tokenizer.piece(tokenizer.eos_id),
        "modalities": {"vision": model.images is not None, "audio": False},
        "build_info": f"hotset {version('hotset')}",
        "hotset": {
            "architecture": model.config.architecture,
            "backend": model.backend.name,
            "n_threads": model.backend.n_threads,
            "kv_type": model.kv_type,
            "n_layers": model.config.n_layer,
            "n_ff": list(model.config.n_ff),
            "has_zeros": model.config.has_zeros,
            "sparsity": {
                "mode": choice.mode,
                "predictor": str(choice.spec) if choice.spec else None,
                "reason": choice.reason,
                "notes": list(model.notes),
            },
            "bytes_per_token": round(model.bytes_per_token),
            "max_queue": service.settings.max_queue,
            "max_tokens": service.settings.max_tokens,
        },
    }


@router.get("/plan")
async def plan(http: Request) -> dict[str, Any]:
    """Return the plan of `hotset plan --json` with measured memory.

    `placement` is null if only the CPU computes, `ram` if files are mapped.
    """
    service = await serving(http, http.query_params.get("model"), required=False)
    model = service.model
    n_blocks = model.engine.scheduler.pool.n_blocks
    return {
        "placement": placement_dict(model.placement) if model.placement is not None else None,
        "ram": model.ram.as_dict() if model.ram is not None else None,
        "memory": memory_dict(await service.in_thread(model.device_memory)),
        "layers": model.config.n_layer,
        "file_bytes": sum(shard.stat().st_size for shard in shards(model.gguf.path)),
        "cache": {
            "type": model.kv_type,
            "blocks": n_blocks,
            "tokens": n_blocks * BLOCK_SIZE,
            "bytes": n_blocks * BLOCK_SIZE * model.cost.kv_bytes_per_token(model.kv_type),
            "states": model.backend.n_states,
            "state_bytes": model.backend.n_states * model.cost.state_bytes,
        },
    }


@router.get("/metrics", response_class=Response, responses=documented_as("text/plain"))
async def metrics(http: Request) -> Response:
    """Return metrics for Prometheus, of the models that the key may use."""
    registry, holder = host_of(http).metrics.registry, http.scope.get(HOLDER)
    found = generate_latest(registry if holder is None else OfHolder(registry, holder))
    return Response(found, media_type=CONTENT_TYPE_LATEST)
