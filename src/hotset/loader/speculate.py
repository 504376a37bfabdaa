"""What drafts tokens for a model, by its settings."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from hotset.engine.lookup import LookupDrafter, LookupText
from hotset.engine.speculation import Speculator
from hotset.errors import InvalidRequestError
from hotset.files import read_small_text

if TYPE_CHECKING:
    from hotset.loader.decide import Decided
    from hotset.text.tokenizer import Tokenizer

_LONGEST_TEXT = 64 << 20  # bytes of a text to look up


def open_speculator(decided: Decided, tokenizer: Callable[[], Tokenizer]) -> Speculator | None:
    """Drafts for a model; None where its settings ask for none, and for a model that generates nothing.

    tokenizer: the model's, made at the call. The caller closes the result. Raises InvalidRequestError for a
    text that cannot be looked up.
    """
    settings = decided.settings
    if settings.drafter == "off" or decided.graph.is_encoder:
        return None
    text = None
    if settings.lookup is not None:
        try:
            read = read_small_text(settings.lookup, _LONGEST_TEXT)
        except FileNotFoundError:
            raise InvalidRequestError(f"there is no text {settings.lookup} to look n-grams up in") from None
        found = tokenizer()
        text = LookupText(found.encode_inside(read), found.n_vocab)
    return Speculator(LookupDrafter(text), settings.draft_max)
