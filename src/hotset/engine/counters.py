"""What an engine has done since it was made, and how full it is: numbers for monitoring."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Counters:
    """Counts, which only grow, and below them the state of the moment.

    steps, step_seconds: batches that a backend computed. cancelled_steps: those that were ended before.
    prompt_tokens: computed of prompts (again, where a sequence had lost its pages). reused_tokens: of prompts
    that were in the cache; restored_tokens: those of them that were read from the disk before.
    generated_tokens. answer_steps: in which a sequence got tokens, summed over sequences. drafted_tokens:
    that were verified; accepted_tokens: that were right. preemptions: sequences that lost their pages to
    others.
    finished: came to their end ("stop", "length"). cancelled, timed_out, failed: did not. refused: found the
    queue full.

    running, waiting: sequences. pages: of the cache; pages_used: by running sequences; pages_cached: by none,
    with a prefix that can be found.
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
    pages: int = 0
    pages_used: int = 0
    pages_cached: int = 0
