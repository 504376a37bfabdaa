"""Texts of a conversation that spell special tokens, and must remain plain text in the prompt.

A rendered prompt is one text, in which the template's special tokens become ids. The texts of a user, a tool
or a document must not become special tokens: they could end their own turn and begin a system message. So a
spelling inside a conversation is replaced by a placeholder before the template is rendered. After that it is
restored, in the parts between special tokens. Tokens that a file calls user-defined are tokens in every text.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from hotset.errors import ContextLengthError
from hotset.text.tokenizer import Tokenizer


class PlainText:
    """The placeholders of one conversation: unpredictable digits, which no filter changes.

    most: the maximum number of tokens of the conversation; a spelling is at least one.
    """

    def __init__(self, tokenizer: Tokenizer, most: int) -> None:
        self._tokenizer, self._most = tokenizer, most
        self._mark = f"{secrets.randbits(64):020}"
        self._placeholder = re.compile(rf"{self._mark}-(\d+)-")
        self._n_found = 0

    def protected(self, value: Any) -> Any:
        """Return plain data with placeholders in its texts. Raises ContextLengthError for too many."""
        if isinstance(value, str):
            return self._protected_text(value)
        if isinstance(value, Mapping):
            return {self.protected(key): self.protected(item) for key, item in value.items()}
        if isinstance(value, Sequence):
            return [self.protected(item) for item in value]
        return value

    def restored(self, text: str) -> str:
        """Return the text with each placeholder replaced by the spelling."""
        if not self._n_found:
            return text
        return self._placeholder.sub(lambda found: self._tokenizer.piece(int(found[1])), text)

    def _protected_text(self, text: str) -> str:
        before, parts = self._n_found, []
        for part, id in self._tokenizer.special_parts(text):
            if id is not None and self._tokenizer.is_special(id):
                self._n_found += 1
                part = f"{self._mark}-{id}-"
            parts.append(part)
            if self._n_found > self._most:
                raise ContextLengthError(
                    f"the messages spell more special tokens than the context of {self._most} has; shorten "
                    "them, or load the model with a larger n_ctx",
                    n_tokens=self._n_found,
                    n_ctx=self._most,
                )
        return "".join(parts) if self._n_found > before else text
