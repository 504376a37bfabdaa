"""The counters of an engine and its current load, for monitoring."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Counters:
    """Counts, which only grow, followed by the current state.

    steps, step_seconds: completed steps. cancelled_steps: steps that ended early. prompt_tokens: computed
    prompt tokens, counted again after a preemption. reused_tokens: prompt tokens found in the cache;
    restored_tokens: the part of them that was read from disk. answer_steps: sequences that got tokens, summed
    over all steps. drafted_tokens: drafted tokens that were verified; accepted_tokens: those that were right.
    preemptions: sequences that lost their blocks to others. finished: sequences that ended with "stop" or
    "length"; cancelled, timed_out, failed: other ends. refused: sequences rejected because the queue was
    full.

    running, waiting: sequences. blocks: blocks of the KV cache; blocks_used: blocks of running sequences;
    blocks_cached: unused blocks that prefix caching can still find.
    """

    steps: int = 0
    step_seconds: float = 0.0
    cancelled_steps: int = 0
    prompt_tokens: int = 0
    reused_tokens: int = 0
    restored_tokens: int = 0
    generated_tokens: int = 0
    answer_steps: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    preemptions: int = 0
    finished: int = 0
    cancelled: int = 0
    timed_out: int = 0
    failed: int = 0
    refused: int = 0

    running: int = 0
    waiting: int = 0
    blocks: int = 0
    blocks_used: int = 0
    blocks_cached: int = 0
