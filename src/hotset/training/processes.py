"""The processes started by torchrun, which share the work of one run."""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch


@contextmanager
def torchrun_processes(*, on_gpu: bool) -> Iterator[tuple[int, int]]:
    """Yield this process's number, and how many torchrun started: 0 and 1 without torchrun.

    torch.distributed is available inside, and its threads have ended afterwards.
    """
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world == 1:
        yield 0, 1
        return
    if torch.distributed.is_initialized():  # the surrounding program did so, and also ends it
        yield torch.distributed.get_rank(), world
        return
    # torch.distributed.nn uses the process group as a default argument. If an optimizer imports it first,
    # after init_process_group, it keeps the group forever. The group's threads then hold tensors when the
    # interpreter ends, and abort the process.
    importlib.import_module("torch.distributed.nn")
    # The other processes wait while the first one generates text, perhaps for hours.
    torch.distributed.init_process_group("nccl" if on_gpu else "gloo", timeout=timedelta(days=30))
    try:
        yield torch.distributed.get_rank(), world
    finally:
        torch.distributed.destroy_process_group()


def wait_for_all(n_processes: int) -> None:
    """Wait until every process has reached this point."""
    if n_processes > 1:
        torch.distributed.barrier()
