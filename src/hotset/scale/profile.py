"""`hotset sparse profile --ray`: the sequences of a text in shards, counted on the machines of a cluster.

Sequences are independent and counts are whole numbers. So the profile equals one machine's, however the
sequences are divided. Finished shards are kept, as in a batch (shards.py).
"""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Callable
from dataclasses import replace
from functools import reduce
from pathlib import Path
from typing import Any

import numpy as np

from hotset.api import load_opened
from hotset.errors import InvalidRequestError
from hotset.loader.build import open_model
from hotset.scale.cluster import check_installed, connect, machines
from hotset.scale.shards import check_mark, on_machines, parts_of
from hotset.settings import LoadSettings
from hotset.sparsity.profile import Profile, collect, digest_of
from hotset.sparsity.sidecar import fingerprint

_SHARD = 8  # sequences


def profile_on_ray(
    target: Path,
    tokens: np.ndarray,
    model: str,
    settings: LoadSettings,
    mark: str,
    address: str | None,
    progress: Callable[[int, int], None],
) -> Profile:
    """Collect the profile of the tokens, like `collect`. target: its file; parts are kept next to that.

    tokens: int32 [n] or [n_sequences, n]. model: a name or path that each machine has. mark: the fingerprint
    that its file must have. progress: called with (tokens done, all tokens).
    """
    check_installed("pyarrow", "pandas")
    shards = [tokens] if tokens.ndim == 1 else [tokens[i : i + _SHARD] for i in range(0, len(tokens), _SHARD)]
    settings = replace(settings, progress=None)
    with parts_of(target) as parts:
        asked = f"{mark} {digest_of(tokens)} {settings}"
        check_mark(parts, hashlib.sha256(asked.encode()).hexdigest().encode(), "counts of another text")
        files = [parts / f"{i:08d}.gguf" for i in range(len(shards))]
        missing = [i for i, file in enumerate(files) if not file.exists()]
        n_done = tokens.size - sum(shards[i].size for i in missing)
        if missing:
            progress(n_done, tokens.size)
            connect(address)
            rows = [{"shard": i, "tokens": pickle.dumps(shards[i])} for i in missing]
            args = model, settings, mark
            for row in on_machines(rows, Counting, args, len(machines()), "the profile"):
                found: Profile = pickle.loads(row["profile"])
                found.save(files[row["shard"]])
                n_done += found.n_tokens
                progress(n_done, tokens.size)
        # If a text repeats itself, shards have equal tokens; their index distinguishes them.
        counted = [replace(Profile.open(file), data=(str(i),)) for i, file in enumerate(files)]
    return replace(reduce(Profile.merge, counted), data=(digest_of(tokens),))


class Counting:
    """An actor of Ray Data that counts shards. Raises InvalidRequestError if its machine has another file."""

    def __init__(self, model: str, settings: LoadSettings, mark: str) -> None:
        opened = open_model(model, settings)
        if fingerprint(opened.gguf) != mark:
            opened.gguf.close()
            raise InvalidRequestError(
                f"{opened.gguf.path} differs from the file of the requesting machine; copy that file"
            )
        self._model, self._mark = load_opened(opened), mark

    def __call__(self, shards: dict[str, np.ndarray]) -> dict[str, list[Any]]:
        """Count shards. shards: number and pickled tokens of each. Return number and pickled profile."""
        found = []
        for tokens in shards["tokens"]:
            counted = collect(
                self._model.tap_steps, self._model.config, pickle.loads(tokens), model=self._mark
            )
            found.append(pickle.dumps(counted))
        return {"shard": list(shards["shard"]), "profile": found}
