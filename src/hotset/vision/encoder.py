"""The image encoder of a model: from a picture to the embeddings of its image tokens, on the CPU."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np

from hotset.backends.base import BLOCK_SIZE, Batch
from hotset.backends.cpu.backend import CpuBackend, new_runtime
from hotset.backends.decoded import decoded_vector
from hotset.backends.stage import BackendOptions
from hotset.errors import InvalidRequestError, StepCancelledError, UnsupportedModelError
from hotset.formats.gguf import GGUFFile, open_gguf
from hotset.model.vision.config import NEWLINE, VisionConfig, config_of_encoder
from hotset.model.vision.graph import describe_encoder
from hotset.model.vision.tensors import EncoderTensors
from hotset.text.image_text import Detail
from hotset.vision.layouts import Layout, ScaledSizes, in_rows, layout_of, scaled_sizes
from hotset.vision.patches import Patches, steps_of
from hotset.vision.pictures import Picture

_FIRST_PATCHES = 1024  # for images of a free size, until one needs more


class ImageEncoder:
    """An open image encoder. Several threads may use it, in turn.

    n_embd: the width of the text model's embedding. n_layers: the first layers of the text model whose
    results get a part of the rows of images, which are 1 + n_layers times as wide. causal: whether its tokens
    of an image see only those before them; False: all of one image (Gemma 3). marker: the text of an
    image in published chat templates, which the pieces of its layout replace. plain_marker: its text for a
    template without images.
    """

    def __init__(self, gguf: GGUFFile, threads: int | None = None) -> None:
        self._file, self.weights = gguf, EncoderTensors(gguf)
        self.config: VisionConfig = config_of_encoder(gguf, self.weights.tensors)
        self.graph = describe_encoder(self.config, self.weights.tensors)
        family = self.config.family
        self.n_embd, self.n_layers = self.config.n_out, len(self.config.deep)
        self.causal = self.config.causal
        self.marker, self.plain_marker = family.marker, family.plain_marker
        self._lock = threading.Lock()
        self._runtime = new_runtime(threads)
        self._backend: CpuBackend | None = None
        self._closed = False
        try:
            of_square = (self.config.side // self.config.patch) ** 2
            fixed = family.sizes not in ("free", "edge", "budget")
            self._reserve(of_square + self.config.has_class if fixed else _FIRST_PATCHES)
        except BaseException:
            self.close()
            raise

    @classmethod
    def open(cls, path: Path, *, n_embd: int, threads: int | None = None) -> Self:
        """Open the file of an encoder, llama.cpp's mmproj. threads: None for every core.

        n_embd: the width of the text model's embedding. Raises UnsupportedModelError if the file holds
        another kind of encoder, or one for a model of another width, and the errors of `open_gguf`.
        """
        gguf = open_gguf(path)
        try:
            encoder = cls(gguf, threads)
        except BaseException:
            gguf.close()
            raise
        if encoder.n_embd != n_embd:
            encoder.close()
            raise UnsupportedModelError(
                f"{path} makes embeddings of {encoder.n_embd} numbers, but the model needs {n_embd}: the "
                "encoder belongs to another model"
            )
        return encoder

    @property
    def nbytes(self) -> int:
        """Return the bytes of the weights, and of the memory for the largest image."""
        weights = sum(info.nbytes for info in self.weights.tensors.values())
        backend = self._backend
        if backend is None:
            return weights
        n_patches = max(self._most_patches, backend.max_batch)
        cache = 2 * 4 * self.config.tower.n_embd * backend.n_blocks * BLOCK_SIZE
        rows = 4 * self.config.n_input * n_patches
        return weights + rows + (backend.workspace_bytes + cache) * n_patches // backend.max_batch

    @property
    def _most_patches(self) -> int:
        return self.config.most // self.config.patch**2

    def layout(self, picture: Picture, detail: Detail = "auto", max_tokens: int | None = None) -> Layout:
        """Return the picture's place in the prompt. max_tokens: most image tokens; None: no limit.

        Raises InvalidRequestError if the picture cannot have so few tokens, or its sides differ too much.
        """
        return layout_of(self.config, self._sizes(picture, detail, max_tokens))

    def encode(
        self,
        picture: Picture,
        detail: Detail = "auto",
        max_tokens: int | None = None,
        stops: Callable[[], bool] = lambda: False,
    ) -> np.ndarray:
        """Return the embeddings of the picture's image tokens, float32 [n_tokens, n_embd * (1 + n_layers)].

        They are bitwise identical for any number of threads. stops: returns whether to end before the next
        step. Raises the errors of `layout`, and StepCancelledError then and after `cancel`.
        """
        sizes = self._sizes(picture, detail, max_tokens)
        parts = []
        with self._lock:
            for step in steps_of(self.config, picture.pixels, sizes):
                found = self._run(step, stops)
                parts.append(found.copy() if step.order is None else found[step.order])
        rows = np.concatenate(parts)
        if sizes.kept is None:
            return rows
        return in_rows(self.config, sizes, rows, decoded_vector(self.weights, NEWLINE))

    def cancel(self) -> None:
        """End the step in flight, from any thread."""
        if (backend := self._backend) is not None:
            backend.cancel()

    def close(self) -> None:
        """End the threads and close the file. Safe to call twice."""
        self.cancel()
        with self._lock:
            self._closed = True
            if self._backend is not None:
                self._backend.close()
            self._backend = None
            self._runtime.close()
            self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _sizes(self, picture: Picture, detail: Detail, max_tokens: int | None) -> ScaledSizes:
        height, width, _ = picture.pixels.shape
        return scaled_sizes(self.config, height, width, detail, max_tokens)

    def _reserve(self, n_patches: int) -> CpuBackend:
        """Return a backend with room for a step of n_patches."""
        if self._backend is None or self._backend.max_batch < n_patches:
            if self._backend is not None:
                self._backend.close()
                self._backend = None  # the larger one may not fit in memory; then the next step makes one
                rounded = 1 << (n_patches - 1).bit_length()
                n_patches = max(n_patches, min(rounded, self._most_patches))
            options = BackendOptions(n_blocks=-(-n_patches // BLOCK_SIZE), max_batch=n_patches, kv_type="f32")
            self._backend = CpuBackend(self.weights, self.graph, options, runtime=self._runtime)
        return self._backend

    def _run(self, step: Patches, stops: Callable[[], bool]) -> np.ndarray:
        """Return the embeddings of a step's image tokens, valid until the next step. Raises as `encode`."""
        if self._closed:
            raise InvalidRequestError("the image encoder has been closed; load the model again")
        backend = self._reserve(len(step.rows))
        if stops():  # after the reservation: `cancel` reaches only the backend that is there
            raise StepCancelledError
        return backend.run(batch_of(step, self.config.merge**2), step.rows)


def batch_of(step: Patches, n_merged: int) -> Batch:
    """Return the batch of a step. n_merged: patches of an image token."""
    n = len(step.rows)
    return Batch(
        step.tokens,
        np.arange(n, dtype=np.int32),
        np.zeros(n, np.int32),
        np.arange(-(-n // BLOCK_SIZE), dtype=np.int32)[None],
        np.arange(n_merged - 1, n - step.n_class, n_merged, dtype=np.int32),
        rotary=step.rotary,
        groups=step.groups,
    )
