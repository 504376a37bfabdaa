"""Types of the native core (csrc/bindings/)."""

from typing import Any

import numpy as np

KV_BLOCK_SIZE: int
SAVED_TOKENS: int
LOGIT_GROUP: int

def isa() -> str: ...
def available_isas() -> list[str]: ...
def cache_slots(
    tokens: np.ndarray,
    positions: np.ndarray,
    sequences: np.ndarray,
    kv_blocks: np.ndarray,
    outputs: np.ndarray,
    max_tokens: int,
    n_kv_blocks: int,
    n_vocab: int | None,
) -> np.ndarray: ...
def read_bandwidth(data: np.ndarray, n_threads: int) -> float: ...
def gather_bandwidth(data: np.ndarray, pieces: np.ndarray, piece_bytes: int, n_threads: int) -> float: ...
def linear(type: int, data: np.ndarray, rows: int, x: np.ndarray, isa: str | None = None) -> np.ndarray: ...
def dequantize(type: int, data: np.ndarray, rows: int, cols: int) -> np.ndarray: ...
def quantize(
    from_type: int,
    data: np.ndarray,
    rows: int,
    cols: int,
    to_type: int,
    out: np.ndarray,
    n_threads: int,
    importance: np.ndarray | None = None,
    rows_per_matrix: int = 1,
    first_row: int = 0,
) -> int: ...

class StoredRows:
    """Rows of a store, used in place of a matrix's bytes."""

    @property
    def store(self) -> RowStore: ...
    @property
    def group(self) -> int: ...

Rows = np.ndarray | StoredRows  # bytes of a matrix, or rows of a store

def guard_file(mapping: np.ndarray, descriptor: int) -> int: ...  # csrc/mapped.h
def is_truncated(file: int) -> bool: ...
def unguard_file(file: int) -> None: ...
def map_cached(file: int, begin: int, end: int) -> None: ...
def ring_allowed() -> bool: ...
def reads_directly(path: str) -> bool: ...

class Reader:
    """Reads parts of files, many at a time (csrc/store/reader.h)."""

    def __init__(self, ring: bool, depth: int) -> None: ...
    @property
    def ring(self) -> bool: ...
    @property
    def depth(self) -> int: ...
    @property
    def buffer_bytes(self) -> int: ...
    def read(self, path: str, arrays: list[tuple[int, np.ndarray]]) -> None: ...  # offset, bytes to fill
    def rate(self, path: str, size: int, seconds: float) -> float: ...
    def inject_faults(self, share: float, seed: int, short_only: bool = False) -> None: ...  # for tests

class RowStore:
    """Rows that are read as needed (csrc/store/store.h)."""

    def __init__(self, reader: Reader, gap: int, half_life: int) -> None: ...
    # parts: path, offset of the first row, bytes of a row, distance between rows
    # usual, at_once: rows without a slot that a step typically needs, and most rows that a step needs
    # n_needed: rows that can ever be needed; None: all
    def group(
        self,
        n_rows: int,
        parts: list[tuple[str, int, int, int]],
        usual: int,
        at_once: int,
        n_needed: int | None = None,
    ) -> int: ...
    def allocate(self, bytes: int) -> None: ...
    def touch_ahead(self) -> None: ...  # makes the system provide the memory in the background
    @property
    def least_bytes(self) -> int: ...
    @property
    def most_bytes(self) -> int: ...
    @staticmethod
    def slot_bytes_of(rows: list[int]) -> int: ...  # memory of a row's slot, given the bytes of its parts
    @property
    def is_whole(self) -> bool: ...  # whether every row that can be needed has a slot
    def n_slots(self, group: int) -> int: ...  # rows of the group that can stay
    def expect(
        self, group: int, shares: np.ndarray
    ) -> None: ...  # float32 [n_rows], share of the tokens that need each row
    def preload(self, group: int, rows: np.ndarray) -> None: ...  # int32, rising, at most n_slots
    # per part uint8 [rows * bytes of a row]; rows: int32, rising, at most at_once. Waits for a running
    # step of the runtime, whose plans also use the store
    def copy(self, group: int, rows: np.ndarray, runtime: Runtime | None = None) -> list[np.ndarray]: ...
    # bytes of a part of a row; None if the row is not loaded
    def peek(self, group: int, row: int, part: int, runtime: Runtime | None = None) -> np.ndarray | None: ...
    def rows(self, group: int, part: int) -> StoredRows: ...
    def counts(self) -> tuple[int, int, int, int, float]: ...  # hits, misses, bytes, reads, seconds waited
    def check(self) -> None: ...
    # slots of each group (rows, bytes of a slot, usual) within `bytes`
    @staticmethod
    def slots_in(groups: list[tuple[int, int, int]], bytes: int) -> list[int]: ...

class Stream:
    """Weights that are read again in every step (csrc/store/stream.h)."""

    def __init__(self, reader: Reader) -> None: ...
    def piece(self, parts: list[tuple[str, int, int]]) -> int: ...  # path, offset, bytes of each
    def allocate(self, bytes: int) -> None: ...
    def data(self, piece: int, part: int) -> np.ndarray: ...
    def counts(self) -> tuple[int, int, float]: ...  # bytes, reads, seconds waited
    def check(self) -> None: ...
    @staticmethod
    def room_for(bytes: int) -> int: ...

class Runtime:
    """The thread pool and scratch memory that plans and CPU workers share (csrc/runtime.h)."""

    def __init__(self, n_threads: int) -> None: ...
    @property
    def n_threads(self) -> int: ...
    @property
    def nbytes(self) -> int: ...  # scratch of all threads
    def close(self) -> None: ...  # ends the threads; no step can run afterwards

class Replacement:
    """The replacement policy of a cache (csrc/replacement.h), used by offload/replacement.py."""

    def __init__(self, n_layers: int, n_ids: int, slots: list[int], half_life: int) -> None: ...
    @property
    def n_slots(self) -> int: ...
    def expect(self, layer: int, shares: np.ndarray) -> None: ...  # float32 [n_ids]
    def begin_step(self) -> None: ...
    # int32 [3, n]: slots, 1 for a hit, evicted ids
    def lookup(self, layer: int, ids: np.ndarray, credit: bool) -> np.ndarray: ...
    def drop(self, layer: int, id: int) -> None: ...
    def find(self, layer: int, id: int) -> int: ...
    # hits of each layer from token `first` on
    def replay(self, ids: np.ndarray, counts: np.ndarray, first: int, by_layer: bool) -> list[int]: ...

class Draw:
    """The sampler of one sequence (csrc/draw.h).

    rules: numbers of SamplingParams by name. bias: ordered by token id. tokens: the prompt.
    """

    def __init__(
        self,
        n_vocab: int,
        rules: dict[str, float],
        bias: list[tuple[int, float]],
        breakers: list[list[int]],
        tokens: list[int],
    ) -> None: ...
    @property
    def n_penalised(self) -> int: ...  # different tokens that penalties count
    def accept(self, token: int) -> None: ...
    def adjusted(self, logits: np.ndarray) -> np.ndarray: ...  # with bias, penalties and DRY
    def clone(self) -> Draw: ...

# Sampler, logits, maxima of groups, candidates, allowed tokens as bits and as ids, u, whether XTC applies
# (LogitRow in csrc/draw.h), and the number of largest logits in the logprobs; None: no logprobs.
DrawJob = tuple[
    Draw, np.ndarray, np.ndarray | None, np.ndarray | None, np.ndarray | None, np.ndarray | None, float, bool,
    int | None,
]  # fmt: skip
NOTHING_ALLOWED: int
NOT_NUMBERS: int

# A token per job, or one of the two numbers above, and its logprobs: log(sum(exp(logits))) and the indices of
# the largest logits by falling logit, equal ones by rising index. Each job needs its own Draw.
def draw_tokens(
    jobs: list[DrawJob], runtime: Runtime | None
) -> list[tuple[int, tuple[float, list[int]] | None]]: ...
def row_logprobs(rows: np.ndarray, n_top: int, runtime: Runtime | None) -> list[tuple[float, list[int]]]: ...

# spans: int32 [n, 3]: a lookup, the next lookup of some of its entries, and their number
def optimal_hits(spans: np.ndarray, n_lookups: int, first: int, n_slots: int) -> int: ...

class Plan:
    def __init__(
        self, max_tokens: int, n_kv_blocks: int, max_kv_blocks: int, runtime: Runtime, isa: str | None = None
    ) -> None: ...
    @property
    def isa(self) -> str: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def own_nbytes(self) -> int: ...  # without the runtime's scratch memory
    def buffer(self, width: int, outputs: bool) -> int: ...
    def input(self, out: int) -> None: ...
    # An operation of csrc/ops and its facts: numbers, strings, arrays, buffer numbers, tensors
    # (type, data[, scales]), records (dicts). None means absent.
    def add(self, operation: str, **facts: Any) -> None: ...
    @property
    def n_ops(self) -> int: ...
    def finish(self) -> None: ...
    def run(
        self,
        tokens: np.ndarray,
        positions: np.ndarray,
        sequences: np.ndarray,
        kv_blocks: np.ndarray,
        outputs: np.ndarray,
        x: np.ndarray | None = None,  # float32 [n_tokens, width of the input]
        thresholded: np.ndarray | None = None,  # uint8 [n_tokens]
        states: np.ndarray | None = None,  # as in base.Batch, if an operation has a state
        saves: np.ndarray | None = None,
        scales: np.ndarray | None = None,  # float32 [n_sequences, n_adapters], if the plan has adapters
        rotary: np.ndarray | None = None,  # as in base.Batch
        groups: np.ndarray | None = None,
        image_places: np.ndarray | None = None,  # int32 [n], as in base.ImageRows
        image_rows: np.ndarray | None = None,  # float32 [n, width of the embedding]
    ) -> None: ...
    def cancel(self) -> None: ...
    def rows(self, buffer: int) -> np.ndarray: ...
    # Sums over the operations of the latest step; cells: int32, one per operation, or one per count of each.
    def op_seconds(self, cells: np.ndarray, n_cells: int) -> np.ndarray: ...  # float64 [n_cells]
    def op_counts(self, cells: np.ndarray, n_cells: int) -> np.ndarray: ...  # int64 [n_cells]

class CpuWorkerPlan: ...

class CpuWorker:
    """The CPU worker of a hybrid engine (csrc/cpu_worker.h)."""

    # plan: not finished; it limits the rows per computation. In an MoE layer each expert of a token is a row.
    def __init__(self, plan: Plan, width: int, max_tokens: int, timeout: float) -> None: ...
    # The operations [first_op, end_op) of the plan, which read buffer x and write `sum`.
    def layer(
        self,
        number: int,
        first_op: int,
        end_op: int,
        gates: list[int],  # operations that compute only gates
        of_firing: list[int],  # operations that compute the neurons that fire
        x: int,
        sum: int,
        n_neurons: int,
        neuron_bytes: int,  # bytes of one neuron's weights
        cold: np.ndarray,  # uint8, bit i % 8 of byte i // 8
        predicted: bool,
        scores: int,
    ) -> int: ...
    def experts(
        self,
        number: int,
        first_op: int,
        end_op: int,
        x: int,
        sum: int,
        n_expert: int,
        n_used: int,
        route: int,
    ) -> int: ...
    @property
    def nbytes(self) -> int: ...  # buffers and exchange memory, without the runtime's
    @property
    def plan(self) -> CpuWorkerPlan: ...
    def route(self, layer: int) -> np.ndarray: ...  # int32: the submitted experts
    def start(self) -> None: ...
    def memory(self) -> np.ndarray: ...
    def offsets(self) -> list[int]: ...  # of memory(): request, done, h, bits, out
    def begin(
        self, n_tokens: int, thresholded: np.ndarray | None = None
    ) -> str: ...  # why it cannot begin, or ""
    def end(self) -> str: ...  # why the step failed, or ""
    def poison(self, reason: str) -> None: ...
    def poisoned(self) -> str: ...
    def close(self) -> None: ...
    def submit(self, layer: int) -> None: ...
    def collect(self, layer: int) -> bool: ...  # False: the step was poisoned
    @staticmethod
    def host_functions() -> tuple[int, int]: ...  # addresses of submit and collect, for a device's stream
    def host_argument(self, layer: int) -> int: ...
    def counts(self) -> np.ndarray: ...  # int64 [n_layers, 6]: requests, then all but the last of base.COUNTS
    def seconds(self) -> np.ndarray: ...

# A range of a buffer in a dispatch: offset, size, and whether it is written.
VulkanBinding = tuple[VulkanBuffer, int, int, bool]

class VulkanDevice:
    """An open Vulkan device (csrc/vulkan/device.h). Raises DeviceError if it does not exist or fails."""

    def __init__(
        self, index: int, validate: bool = False, staged: bool = False, cache: bytes = b""
    ) -> None: ...
    def compiled(self) -> bytes: ...  # the driver's pipeline cache; empty if it provides none
    def is_cache_of(self, data: bytes) -> bool: ...  # whether the header names this driver
    @property
    def allocated(self) -> int: ...  # bytes of its live buffers
    @property
    def name(self) -> str: ...
    @property
    def has_integer_dots(self) -> bool: ...  # instructions for dot products of four bytes
    @property
    def tick_nanoseconds(self) -> float: ...  # of its timestamps; 0: it has none
    @property
    def max_range(self) -> int: ...  # bytes of a binding
    @property
    def max_lanes(self) -> int: ...  # of a workgroup
    @property
    def shared_bytes(self) -> int: ...  # of shared memory of a workgroup
    @property
    def max_allocation(self) -> int: ...  # bytes of a buffer
    def limit(self, bytes: int) -> None: ...  # more raises OutOfMemoryError
    def allocate(self, size: int, place: str) -> VulkanBuffer: ...  # device, to_device, from_device
    def kernel(
        self, spirv: np.ndarray, n_buffers: int, push_bytes: int, constants: list[tuple[int, int]]
    ) -> VulkanKernel: ...

class VulkanBuffer:
    """A buffer with its memory (csrc/vulkan/device.h)."""

    @property
    def size(self) -> int: ...
    @property
    def reserved(self) -> int: ...  # bytes of the device's memory
    def write(self, offset: int, data: np.ndarray) -> None: ...  # uint8
    def read(self, offset: int, size: int) -> np.ndarray: ...  # uint8, a copy
    def clear(self) -> None: ...
    def view(self) -> np.ndarray: ...  # uint8, of host-visible memory

class VulkanKernel: ...

class VulkanCancel:
    """Cancels a run of programs from any thread."""

    requested: bool
    def __init__(self) -> None: ...

class VulkanProgram:
    """Dispatches that are recorded once (csrc/vulkan/program.h). ValueError beyond the device's limits."""

    def __init__(self, device: VulkanDevice, timed: bool = False) -> None: ...
    def dispatch(
        self,
        kernel: VulkanKernel,
        bindings: list[VulkanBinding],
        push: bytes,
        groups: tuple[int, int, int],
    ) -> None: ...
    def dispatch_indirect(
        self,
        kernel: VulkanKernel,
        bindings: list[VulkanBinding],
        push: bytes,
        counts: VulkanBuffer,
        offset: int,
    ) -> None: ...
    def cut(self) -> None: ...
    def hand_over(self) -> None: ...  # the CPU sees all earlier writes, and computes
    def wait_for_host(self, layer: int) -> None: ...  # later dispatches read the CPU's answer
    def finish(self) -> None: ...
    # uint64 [dispatches, 2]: ticks of the device at the start and end of each, if timed
    def times(self) -> np.ndarray: ...
    @property
    def n_groups(self) -> int: ...  # of dispatches between two barriers

class VulkanExchange:
    """The memory that a device and a started CPU worker exchange (csrc/vulkan/exchange.h)."""

    def __init__(
        self, worker: CpuWorkerPlan, from_device: VulkanBuffer, to_device: VulkanBuffer, bits_offset: int
    ) -> None: ...

def vulkan_devices(validate: bool) -> list[dict[str, Any]]: ...
def vulkan_fail(
    name: str, n: int, result: int, lasting: bool = False
) -> None: ...  # fails the n-th call of a function, and later ones if lasting, for tests
def vulkan_memory_type(
    heaps: list[tuple[int, int]], types: list[tuple[int, int]], allowed: int, place: str
) -> int | None: ...
def vulkan_late_messages() -> list[str]: ...
def vulkan_tile_bytes(type: int, cols: int) -> tuple[int, int]: ...
def vulkan_rearranged(
    type: int,
    cols: int,
    data: np.ndarray,  # uint8 [n, rows, bytes of a row]
    rows: np.ndarray,  # int32: chosen rows of each matrix
    n_threads: int,
) -> tuple[np.ndarray, np.ndarray]: ...
def vulkan_upload(
    type: int,
    cols: int,
    data: np.ndarray,
    rows: np.ndarray,
    codes: tuple[VulkanBuffer, int],  # and an offset there
    more: tuple[VulkanBuffer, int] | None,
    n_threads: int,
) -> None: ...
def vulkan_place_tokens(
    places: np.ndarray,  # uint32 [3, tokens]: position, number of the sequence, last position; written
    tables: np.ndarray,  # uint32 [tokens, blocks], written
    positions: np.ndarray,
    sequences: np.ndarray,
    kv_blocks: np.ndarray,
) -> int: ...
def vulkan_candidates(pairs: np.ndarray) -> tuple[np.ndarray, np.ndarray]: ...  # of uint32 [n, candidates, 2]
def vulkan_run(
    programs: list[VulkanProgram],
    cancel: VulkanCancel,
    exchange: VulkanExchange | None = None,
    n_tokens: int = 0,  # of the step, for the exchange
) -> None: ...
