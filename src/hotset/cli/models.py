"""The subcommands of the store: pull, list, show, rm."""

from __future__ import annotations

import re
from collections.abc import Sequence, Sized
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hotset.cli import options
from hotset.cli.console import print_json, print_table, say
from hotset.cli.progress import ProgressBar
from hotset.errors import HotsetError, InvalidRequestError, ModelNotFoundError
from hotset.files import expanded
from hotset.report.bars import percent
from hotset.storage import aliases, catalogue, created, elsewhere, on_this_machine, resolve, store
from hotset.storage.projectors import projector_of
from hotset.storage.store import StoredModel
from hotset.units import human_count, human_size

if TYPE_CHECKING:
    from hotset.formats.gguf import GGUFFile
    from hotset.model.config import ModelConfig
    from hotset.model.cost import Cost

_LONGEST_LIST = 8  # elements of a key that are shown completely
_LONGEST_VALUE = 300  # characters of a key or a name; --json shows all of them


def pull(
    name: Annotated[str, typer.Argument(help="A name ('hotset list --all'), or hf:owner/repository[:file].")],
    everything: Annotated[
        bool,
        typer.Option("--all", help="Fetch every file of the repository, not just the model and activation/."),
    ] = False,
    check: Annotated[
        bool,
        typer.Option("--check", help="Check local files, and fetch those again whose checksum is wrong."),
    ] = False,
    json: options.Json = False,
) -> None:
    """Fetch a model into the store; an interrupted pull continues where it stopped."""
    from hotset.storage import fetch

    entry = catalogue.find(name)
    if entry and entry.unsupported:
        say(f"Note: {entry.unsupported}.")
    with ProgressBar() as bar:
        path = fetch.pull(name, everything=everything, check=check, progress=bar)
    size = sum(part.stat().st_size for part in store.shards(path))
    if json:
        print_json({"name": name, "path": str(path), "size": size})
    else:
        say(f"{human_size(size)} in {path}")
        say(f"Run it with: hotset run {name}")


def list_command(
    everything: Annotated[bool, typer.Option("--all", help="List the models of the catalogue too.")] = False,
    architectures: Annotated[
        bool,
        typer.Option("--architectures", help="List the architectures that hotset runs, instead of models."),
    ] = False,
    json: options.Json = False,
) -> None:
    """List the models on this machine, or the supported architectures.

    They include models of Ollama, LM Studio and the Hugging Face cache, created models and aliases.
    """
    if architectures:
        _list_architectures(json)
        return
    memory = store.usable_memory()
    local = on_this_machine()
    items = _local_items(local, memory)
    if everything:
        items += _catalogue_items({model.name.partition(":")[0] for model in local}, memory)
    if json:
        print_json(items)
        return
    if not items:
        say(
            f"No models in {store.models_folder()} yet: 'hotset run' fetches a small one, "
            "'hotset list --all' shows the catalogue, 'hotset pull NAME' fetches from it."
        )
        return
    columns = ["name", ">size", "fits in memory", "kind", "where"]
    rows = [
        [
            item["name"],
            human_size(item["size"]) if item["size"] else "?",
            "?" if item["fits"] is None else "yes" if item["fits"] else "no",
            item["kind"],
            _where(item)
            if item["local"]
            else ("not here yet" if not item["unsupported"] else "cannot run yet"),
        ]
        for item in items
    ]
    if everything:
        columns.append("notes")
        rows = [[*row, item["needs"] or ""] for row, item in zip(rows, items, strict=True)]
    print_table(columns, rows)


def _item(model: StoredModel, memory: int) -> dict[str, Any]:
    """Return the entry of a model in the list. memory: bytes that models can use."""
    return {
        "name": model.name,
        "size": model.size,
        "local": True,
        "source": model.source or "store",
        "path": str(model.path),
        "dialect": model.dialect,
        "relu": model.relu,
        "kind": catalogue.kind_of(model.name, relu=model.relu),
        "fits": store.fits(model.size, memory),
        "needs": None,
        "unsupported": None,
    }


def _item_of(base: str, memory: int) -> dict[str, Any]:
    """Return the entry of a created model's or alias's base, without a size if it is not on this machine."""
    with suppress(HotsetError, OSError):
        return _item(store.describe(resolve(base, download=False), base), memory)
    nothing = dict.fromkeys(("size", "path", "dialect", "fits", "needs", "unsupported"))
    return nothing | {"local": True, "relu": False, "kind": catalogue.kind_of(base)}


def _local_items(local: Sequence[StoredModel], memory: int) -> list[dict[str, Any]]:
    """Return the entries of local models, of models created from them, and of aliases."""
    items = [_item(model, memory) for model in local]
    by_name = {item["name"].lower(): item for item in items}
    made = [(name, one.base, "created from") for name, one in created.read().items()]
    made += [(name, model, "alias of") for name, model in aliases.read().items()]
    for name, base, how in made:
        of = by_name.get(base.lower()) or _item_of(base, memory)
        items.append(of | {"name": name, "source": f"{how} {base}"})
        by_name.setdefault(name.lower(), items[-1])
    return items


def _catalogue_items(here: set[str], memory: int) -> list[dict[str, Any]]:
    """Return the entries of the catalogue for models that are not on this machine."""
    return [
        {
            "name": entry.name,
            "size": entry.size or None,
            "local": False,
            "path": None,
            "repository": entry.repo,
            "file": entry.file,
            "relu": entry.relu,
            "kind": catalogue.kind_of(entry.name),
            "fits": store.fits(entry.size, memory) if entry.size else None,
            "quantisation": entry.quant or None,
            "licence": entry.licence or None,
            "page": entry.page,
            "checked": entry.is_checked,
            "needs": entry.needs,
            "unsupported": entry.unsupported,
        }
        for entry in catalogue.ENTRIES
        if entry.name not in here
    ]


def _where(item: dict[str, Any]) -> str:
    return "here" if item["source"] == "store" else str(item["source"])


def _list_architectures(json: bool) -> None:
    from hotset.model.supported import supported

    rows = [asdict(row) for row in supported()]
    if json:
        print_json(rows)
    else:
        columns = ["architecture", "kind", "sparsity", "compared with"]
        print_table(columns, [list(row.values()) for row in rows])


def cp(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="A model of this machine: a name, or a file.")
    ],
    name: Annotated[str, typer.Argument(metavar="NAME", help="The second name.")],
) -> None:
    """Give a model a second name; its file is not copied."""
    resolve(model, download=False)
    name = aliases.untagged(name)
    taken = (*(one.name for one in on_this_machine()), *created.read(), *aliases.read())
    if name.lower() in {one.lower() for one in taken}:
        raise InvalidRequestError(f"a model is called '{name}' already; choose another name")
    path = expanded(model)
    aliases.add(name, str(path.resolve()) if path.exists() else aliases.find(model) or model)
    say(f"Run it with: hotset run {name}")


def rm(
    names: Annotated[
        list[str], typer.Argument(metavar="NAME...", help="Models of the store, created models, aliases.")
    ],
    json: options.Json = False,
) -> None:
    """Delete models from the store, created models, or aliases."""
    deleted: list[dict[str, Any]] = []
    for name in names:
        if store.find_local(name) is None and (what := _forgotten(name)) is not None:
            deleted.append({"name": name, "files": [], "freed": 0, "dependents": []})
            if not json:
                say(f"Deleted {name}, {what} stays.")
            continue
        if store.find_local(name) is None and (other := elsewhere.find(name)) is not None:
            raise ModelNotFoundError(f"'{name}' is a model of {other.source}: delete it there.")
        dependents = _dependents(name)
        files, freed = store.remove(name)
        paths = [str(path) for path in files]
        deleted.append({"name": name, "files": paths, "freed": freed, "dependents": dependents})
        if not json:
            say(f"Deleted {name}: {len(files)} file{'s' if len(files) != 1 else ''}, {human_size(freed)}.")
            if dependents:
                say(
                    f"Made of it, and without a file now: {', '.join(dependents)}. Fetch or copy the model "
                    "again, or delete these names too."
                )
    if json:
        print_json(deleted)


def _forgotten(name: str) -> str | None:
    """Delete a created model or an alias. Return its kind and the model that stays, in words, or None."""
    if created.remove(name):
        return "which was created; the model that it is made of"
    model = aliases.find(name)
    if model is None:
        return None
    aliases.remove(aliases.untagged(name))
    return f"an alias; {model}"


def _dependents(name: str) -> list[str]:
    """Return the created models and aliases that use the file of a stored model."""
    found = store.find_local(name)
    if found is None:
        return []
    led = [(known, one.base) for known, one in created.read().items()] + list(aliases.read().items())
    names = {found.name.lower()}
    for known, base in led:
        with suppress(HotsetError):  # several models have this name
            if base.lower() in names or store.local_path(base) == found.path:
                names.add(known.lower())
    return [known for known, _ in led if known.lower() in names - {found.name.lower()}]


def show(
    model: options.ModelName,
    tensors: Annotated[bool, typer.Option("--tensors", help="List every tensor too.")] = False,
    metadata: Annotated[bool, typer.Option("--metadata", help="List every metadata key too.")] = False,
    activation: options.Activation = None,
    json: options.Json = False,
) -> None:
    """Show the facts of a model file; nothing is loaded."""
    from hotset.formats.gguf import open_gguf

    path = resolve(model, download=False)
    with open_gguf(path) as gguf:
        facts = describe(gguf, path, activation)
        listed: list[dict[str, Any]] = [
            {"name": t.name, "type": t.type.name, "shape": list(t.shape), "nbytes": t.nbytes}
            for t in gguf.tensors.values()
        ]
        keys = {key: _shown(value) for key, value in gguf.metadata.items()}
    if json:
        facts["metadata"] = keys
        if tensors:
            facts["tensors"] = listed
        print_json(facts)
        return
    print_table(["fact", "value"], _fact_rows(facts), title=path.name)
    if metadata:
        rows = [[key, str(value)] for key, value in keys.items()]
        print_table(["key", "value"], rows, title="metadata", limit=_LONGEST_VALUE)
    if tensors:
        rows = [
            [t["name"], t["type"], " x ".join(map(str, t["shape"])), human_size(t["nbytes"])] for t in listed
        ]
        title = "tensors (innermost dimension first)"
        print_table(["tensor", "type", "shape", ">size"], rows, title=title, limit=_LONGEST_VALUE)


def describe(gguf: GGUFFile, path: Path, activation: str | None = None) -> dict[str, Any]:
    """Return the facts of a file as plain values. Most of them exist for unsupported architectures, too."""
    from hotset.errors import HotsetError
    from hotset.model.cost import Cost
    from hotset.model.decoder import describe as describe_graph
    from hotset.model.supported import read_config

    types: dict[str, dict[str, int]] = {}
    for tensor in gguf.tensors.values():
        kind = types.setdefault(tensor.type.name, {"tensors": 0, "bytes": 0})
        kind["tensors"] += 1
        kind["bytes"] += tensor.nbytes
    meta = gguf.metadata
    tokens = meta.get("tokenizer.ggml.tokens")

    facts: dict[str, Any] = {
        "path": str(path),
        "shards": len(gguf.paths),
        "format": f"GGUF version {gguf.version}"
        if gguf.dialect == "gguf"
        else f"{gguf.dialect} {gguf.version}",
        "architecture": gguf.architecture,
        "name": _text(meta.get("general.name")),
        "license": _text(meta.get("general.license")),
        "size": gguf.nbytes,
        "parameters": gguf.n_parameters,
        "types": dict(sorted(types.items(), key=lambda item: -item[1]["bytes"])),
        "tokenizer": _text(meta.get("tokenizer.ggml.model")),
        "pre_tokenizer": _text(meta.get("tokenizer.ggml.pre")),
        "vocabulary": len(tokens) if isinstance(tokens, Sized) and not isinstance(tokens, str) else None,
        "chat_template": "tokenizer.chat_template" in meta,
    }
    if (projector := projector_of(path)) is not None:
        facts["projector"] = {"path": str(projector), "size": projector.stat().st_size}
    try:
        config = read_config(gguf, activation=activation)
        cost = Cost(describe_graph(config, gguf.tensors), gguf.tensors)
        sparsity = _sparsity(gguf, config)
    except HotsetError as error:
        facts["runs"] = False
        facts["reason"] = str(error)
        return facts
    layer = config.layers[0]
    facts |= {
        "runs": True,
        "context": config.n_ctx_train,
        "layers": config.n_layer,
        "embedding": config.n_embd,
        "feed_forward": sorted({layer.n_ff for layer in config.layers} - {0}) or [0],
        "heads": config.n_head,
        "kv_heads": config.n_head_kv,
        "head_size": config.head_dim,
        "latent": None
        if config.latent is None
        else {"channels": config.latent.rank, "query_channels": config.latent.rank_q or None},
        "window": max(layer.window for layer in config.layers),
        "activation": _activation(config),
        "gated": layer.gated,
        "rope": None
        if layer.rope is None
        else {
            "kind": layer.rope.kind,
            "base": meta.get(f"{gguf.architecture}.rope.freq_base"),
            "scaling": _text(meta.get(f"{gguf.architecture}.rope.scaling.type")),
            "channels": layer.rope.n_rot,
        },
        "learned_positions": config.first_position is not None,
        "active_parameters": cost.active_parameters,
        "experts": _experts(config, cost),
        "kv_bytes_per_token": cost.kv_bytes_per_token("f16"),
        "recurrent": {"layers": config.n_recurrent, "state_bytes": cost.state_bytes}
        if config.n_recurrent
        else None,
        "sparsity": sparsity,
    }
    return facts


def _experts(config: ModelConfig, cost: Cost) -> dict[str, Any] | None:
    """Return the facts of MoE layers. token_cycle: bytes of the experts that a token reads, in all layers."""
    layers = [layer for layer in config.layers if layer.experts is not None]
    if not layers or layers[0].experts is None:
        return None
    experts = layers[0].experts
    return {
        "count": experts.n,
        "used": experts.n_used,
        "neurons": sorted({layer.n_ff for layer in layers}),
        "shared_neurons": experts.n_ff_shared,
        "layers": len(layers),
        "token_cycle": cost.token_cycle,
    }


def _latent_row(latent: dict[str, Any] | None) -> str | None:
    if latent is None:
        return None
    queries = latent["query_channels"]
    more = f", and queries of one of {queries}" if queries else ""
    return f"keys and values are made of a vector of {latent['channels']} channels{more}"


def _expert_rows(facts: dict[str, Any]) -> list[list[str]]:
    experts = facts["experts"]
    if experts is None:
        return []
    neurons = ", ".join(map(str, experts["neurons"]))
    shared = f", and {experts['shared_neurons']} that all share" if experts["shared_neurons"] else ""
    return [
        ["active", f"{human_count(facts['active_parameters'])} parameters for a token"],
        [
            "experts",
            f"{experts['count']} of {neurons} neurons in {experts['layers']} layers{shared}; a token has "
            f"{experts['used']}",
        ],
        ["token cycle", f"{human_size(experts['token_cycle'])} of experts are read for a token"],
    ]


def _recurrent_text(facts: dict[str, Any]) -> str | None:
    recurrent = facts["recurrent"]
    if recurrent is None:
        return None
    return (
        f"{recurrent['layers']} of the layers have a state: "
        f"{human_size(recurrent['state_bytes'])} for a sequence"
    )


def _thresholds(gguf: GGUFFile, config: ModelConfig) -> dict[str, Any] | None:
    """Return the thresholds file next to a model, and its expected gain on this machine."""
    from hotset.errors import HotsetError
    from hotset.placement.channel_rates import plan_here
    from hotset.sparsity.thresholds import Thresholds, thresholds_path

    path = thresholds_path(gguf.path)
    if not path.is_file():
        return None
    try:
        found = Thresholds.open(path)
        found.check_model(gguf, config.n_layer)
        gain = plan_here(gguf, config, found).as_dict() if found.knows_kept else None
    except HotsetError as error:
        return {"path": str(path), "reason": str(error)}
    return {"path": str(path), "mode": found.mode, "prompts": found.prompts, "gain": gain}


def _sparsity(gguf: GGUFFile, config: ModelConfig) -> dict[str, Any]:
    """Return how a file runs by default and why, its own predictor, and the files next to it."""
    from hotset.formats.powerinfer import activation_files, gpu_index_file
    from hotset.sparsity.modes import choose
    from hotset.sparsity.predictors import n_always

    choice = choose(config, gguf.tensors)
    facts: dict[str, Any] = {"mode": choice.mode, "reason": choice.reason, "predictor": None}
    facts["thresholds"] = _thresholds(gguf, config)
    if not config.has_zeros:
        return facts
    parts = [t for t in gguf.tensors.values() if re.fullmatch(r"blk\.\d+\.fc[12](_exps)?\.weight", t.name)]
    ranks = [t.shape[1] for t in parts if ".fc1" in t.name and len(t.shape) > 1]
    if ranks:
        n_bytes = sum(t.nbytes for t in parts)
        facts["predictor"] = {
            "kind": "mlp",
            "ranks": ranks,
            "types": sorted({t.type.name for t in parts}),
            "bytes": n_bytes,
            "share": n_bytes / gguf.nbytes,
            "threshold": config.sparse_threshold,
            "reads": config.predictor_input,
        }
    head = n_always(gguf, config)
    beside = {"activation_counts": activation_files(gguf.path), "gpu_index": gpu_index_file(gguf.path)}
    facts["n_always"] = list(head) if any(head) else None
    facts |= {name: str(found) if found else None for name, found in beside.items()}
    facts["built"] = [{"path": str(p), "size": p.stat().st_size} for p in store.sidecars(gguf.path)]
    return facts


def _activation(config: ModelConfig) -> str:
    activation = config.activation
    text = str(activation.gate)
    if activation.top_k is not None:
        n = sum(layer.activation.top_k is not None for layer in config.layers)
        text += f", in {n} of the layers behind a Gaussian top-k"
    if activation.up:
        text += f" on the gate, {activation.up} on up"
    return text + (f", threshold {activation.threshold:g}" if activation.threshold else "")


def _range(values: Sequence[int]) -> str:
    low, high = min(values), max(values)
    return str(low) if low == high else f"{low} to {high}"


def _sparsity_rows(facts: dict[str, Any]) -> list[list[str]]:
    rows = [["by default", facts["reason"]]]
    predictor = facts["predictor"]
    if predictor:
        reads = {"ffn_inp": "after attention", "layer_input": "as it enters the layer"}[predictor["reads"]]
        rows.append(
            [
                "predictor",
                f"{predictor['kind']} of rank {_range(predictor['ranks'])}, {', '.join(predictor['types'])}, "
                f"{human_size(predictor['bytes'])}: {percent(predictor['share'])} of the file; "
                f"threshold {predictor['threshold']:g}, reads the residual stream {reads}",
            ]
        )
    if thresholds := facts["thresholds"]:
        gained = (
            thresholds.get("reason")
            or (thresholds["gain"] or {"told": "what they gain was not measured"})["told"]
        )
        rows.append(["thresholds", f"{thresholds['path']} (--sparsity threshold): {gained}"])
    if facts.get("n_always"):
        rows.append(["hot head", f"{_range(facts['n_always'])} neurons of a layer need no prediction"])
    rows += [["activation counts", facts.get("activation_counts")], ["GPU index", facts.get("gpu_index")]]
    rows += [["built by hotset", f"{b['path']} ({human_size(b['size'])})"] for b in facts.get("built", [])]
    return rows


def _fact_rows(facts: dict[str, Any]) -> list[list[str]]:
    types = ", ".join(
        f"{name} {kind['tensors']} ({human_size(kind['bytes'])})" for name, kind in facts["types"].items()
    )
    shards = f" in {facts['shards']} shards" if facts["shards"] > 1 else ""
    tokenizer = f"{facts['tokenizer']}" + (f" ({facts['pre_tokenizer']})" if facts["pre_tokenizer"] else "")
    rows = [
        ["path", facts["path"]],
        ["format", facts["format"] + shards],
        ["architecture", facts["architecture"]],
        ["name", facts["name"]],
        ["license", facts["license"]],
        ["size", human_size(facts["size"])],
        ["parameters", human_count(facts["parameters"])],
        ["tensor types", types],
        ["tokenizer", f"{tokenizer}, {facts['vocabulary']} tokens" if facts["tokenizer"] else None],
        ["chat template", "yes" if facts["chat_template"] else "no"],
    ]
    if (projector := facts.get("projector")) is not None:
        rows.append(["images", f"by {Path(projector['path']).name} ({human_size(projector['size'])})"])
    if not facts["runs"]:
        return [*[r for r in rows if r[1]], ["runs here", f"no: {facts['reason']}"]]
    rope = facts["rope"]
    n_ff = ", ".join(str(n or "none") for n in facts["feed_forward"])
    rows += [
        ["context", f"{facts['context']} tokens"],
        ["layers", str(facts["layers"])],
        ["width", f"{facts['embedding']}, feed-forward {n_ff}"],
        [
            "heads",
            f"{facts['heads']}, {facts['kv_heads']} for keys and values, {facts['head_size']} channels each"
            if facts["heads"]
            else "none: no layer has attention",
        ],
        ["latent", _latent_row(facts["latent"])],
        ["window", f"{facts['window']} tokens" if facts["window"] else None],
        ["activation", facts["activation"] + ("" if facts["gated"] else ", no gate")],
        [
            "positions",
            f"RoPE {rope['kind']}, {rope['channels']} channels, base {rope['base'] or 10000:g}"
            + (f", scaling {rope['scaling']}" if rope["scaling"] else "")
            if rope
            else "learned"
            if facts["learned_positions"]
            else "none",
        ],
        *_expert_rows(facts),
        ["KV cache", f"{human_size(facts['kv_bytes_per_token'])} per token in F16"],
        ["recurrent", _recurrent_text(facts)],
        *_sparsity_rows(facts["sparsity"]),
    ]
    return [row for row in rows if row[1]]


def _shown(value: Any) -> Any:
    """Return a metadata value for JSON; long lists, at any depth, are shortened."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if not isinstance(value, list):
        return value
    if len(value) > _LONGEST_LIST:
        return f"[{', '.join(str(_shown(item)) for item in value[:4])}, ... {len(value)} in all]"
    return [_shown(item) for item in value]


def _text(value: Any) -> str | None:
    """Return a metadata value as text; None stays None."""
    return value if value is None or isinstance(value, str) else str(_shown(value))
