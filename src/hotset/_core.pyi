"""Types of the native core (csrc/bindings.cpp)."""

import numpy as np

PAGE_SIZE: int

def isa() -> str: ...
def available_isas() -> list[str]: ...
def read_bandwidth(data: np.ndarray, n_threads: int) -> float: ...
def linear(type: int, data: np.ndarray, rows: int, x: np.ndarray, isa: str | None = None) -> np.ndarray: ...
def dequantize(type: int, data: np.ndarray, rows: int, cols: int) -> np.ndarray: ...

NormFacts = tuple[bool, np.ndarray, np.ndarray | None, float]  # layer norm?, weight, bias, eps
Part = tuple[int, np.ndarray, np.ndarray | None, int]  # type, data, bias, buffer of the result

class Plan:
    def __init__(
        self, max_tokens: int, n_pages: int, max_pages: int, n_threads: int, isa: str | None = None
    ) -> None: ...
    @property
    def isa(self) -> str: ...
    def buffer(self, width: int, outputs: bool) -> int: ...
    def rope(self, neox: bool, n_rot: int, frequencies: list[float], magnitude: float) -> int: ...
    def embed(
        self, type: int, data: np.ndarray, rows: int, positions: bool, first_row: int, out: int
    ) -> None: ...
    def select(self, x: int, out: int) -> None: ...
    def norm(
        self,
        layer: bool,
        weight: np.ndarray,
        bias: np.ndarray | None,
        eps: float,
        n_head: int,
        x: int,
        out: int,
    ) -> None: ...
    def linear(
        self,
        x: int,
        norm: NormFacts | None,
        parts: list[Part],
        residual: int,
        gated: bool,
        activation: tuple[int, float] | None,  # kind, threshold
    ) -> None: ...
    def neurons(
        self,
        x: int,
        norm: NormFacts | None,
        gate: Part | None,
        up: Part,
        activation: tuple[int, float],
        up_activation: int | None,
        predictor: tuple[int, float, int] | None,  # buffer of scores, threshold, first
        sparse: bool,
        out: int,
    ) -> None: ...
    def axpy(
        self,
        x: int,
        type: int,
        data: np.ndarray,
        scales: np.ndarray | None,
        bias: np.ndarray | None,
        residual: int,
        sparse: bool,
        out: int,
    ) -> None: ...
    def sign_scores(self, x: int, rows: np.ndarray, bias: np.ndarray | None, out: int) -> None: ...
    def mask(self, x: int, scores: int, threshold: float, first: int, out: int) -> None: ...
    def rotate(self, x: int, out: int, n_head: int, head_dim: int, rope: int) -> None: ...
    def attention(
        self,
        q: int,
        k: int,
        v: int,
        out: int,
        n_head: int,
        n_head_kv: int,
        head_dim: int,
        head_dim_v: int,
        scale: float,
        window: int,
        rope: int,
        q_norm: tuple[np.ndarray, float] | None,
        k_norm: tuple[np.ndarray, float] | None,
        kv_type: int,
        k_cache: np.ndarray,
        v_cache: np.ndarray,
        k_scale: np.ndarray | None,
        v_scale: np.ndarray | None,
    ) -> None: ...
    def activate(self, kind: int, threshold: float, x: int, out: int) -> None: ...
    def add(self, a: int, b: int, out: int) -> None: ...
    def multiply(self, a: int, b: int, out: int) -> None: ...
    def finish(self) -> None: ...
    def run(
        self,
        tokens: np.ndarray,
        positions: np.ndarray,
        sequences: np.ndarray,
        pages: np.ndarray,
        outputs: np.ndarray,
    ) -> None: ...
    def rows(self, buffer: int) -> np.ndarray: ...
    def op_seconds(self) -> np.ndarray: ...
    def op_counts(self) -> np.ndarray: ...
