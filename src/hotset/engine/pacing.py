"""How much of a prompt a step takes while answers run beside it, learned from how long steps last."""

from __future__ import annotations

PROMPT_SECONDS = 0.1
_FIRST = 64  # tokens, until something was measured
_FEWEST = 16  # a prompt must come to its end, on whatever machine


class PromptShare:
    """The number of prompt tokens beside which the next token of a running answer comes in time.

    seconds: that a prompt may add to a step; where a step of answers alone takes longer, that long. n_max: of
    tokens in a step. What a token costs differs by a factor of a thousand between machines and models, so it
    is measured: a step that took too long shrinks the share at once, one that took its whole share and less
    time lets it grow.
    """

    def __init__(self, seconds: float, n_max: int) -> None:
        self.n_tokens = min(_FIRST, n_max)
        self._seconds = seconds
        self._n_max = n_max
        self._fewest = min(_FEWEST, n_max)
        self._answers = 0.0  # seconds of a step without a prompt

    def note(self, n_prompt: int, n_answers: int, seconds: float) -> None:
        """Takes in a step with that many tokens of prompts, beside that many of answers."""
        if not n_prompt:
            self._answers = seconds
            return
        allowed = max(self._seconds, self._answers)
        added = max(seconds - (self._answers if n_answers else 0.0), 1e-6)
        fitting = n_prompt * allowed / added
        if added > allowed:
            self.n_tokens = max(int(fitting), self._fewest)
        elif n_prompt >= self.n_tokens:  # a smaller one says little: much of a step costs the same for any
            self.n_tokens = min(int(fitting), 2 * self.n_tokens, self._n_max)
