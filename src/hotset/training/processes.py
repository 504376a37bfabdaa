"""The processes that torchrun starts, which share the work of one run."""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch


@contextmanager
def torchrun_processes(*, on_gpu: bool) -> Iterator[tuple[int, int]]:
    """Number of this process, and how many torchrun started: 0 and 1 without it.

    torch.distributed is set up inside, and its threads have ended behind it.
    """
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world == 1:
        yield 0, 1
        return
    if torch.distributed.is_initialized():  # by a program around this one, which also ends it
        yield torch.distributed.get_rank(), world
        return
    # Functions of this module have the group as the default of an argument. Where an optimizer is the first
    # to import it, which is behind init_process_group, they keep the group for ever; its threads then still
    # hold tensors when the interpreter ends, and abort the process.
    importlib.import_module("torch.distributed.nn")
    # The others wait for the first one while it writes text, which may take it hours.
    torch.distributed.init_process_group("nccl" if on_gpu else "gloo", timeout=timedelta(days=30))
    try:
        yield torch.distributed.get_rank(), world
    finally:
        torch.distributed.destroy_process_group()


def wait_for_all(n_processes: int) -> None:
    """Until every process has come as far as this one."""
    if n_processes > 1:
        torch.distributed.barrier()
