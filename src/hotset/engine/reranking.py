"""The input text of a reranker for a query and a document, and documents sorted by score.

The reference is llama.cpp's server (format_prompt_rerank in tools/server/server-common.cpp).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hotset.errors import InvalidRequestError, TokenizerError
from hotset.parameters import shown
from hotset.text.plain_text import PlainText
from hotset.text.tokenizer import Tokenizer

TEMPLATE_KEY = "tokenizer.chat_template.rerank"
"""The metadata key of the template with {query} and {document}."""


@dataclass(frozen=True)
class RankedDocument:
    """A document with its score. index: its position in the request."""

    index: int
    score: float
    document: str


def reranking_tokens(
    metadata: Mapping[str, Any],
    tokenizer: Tokenizer,
    most: int,
    query: str,
    documents: Sequence[str],
    most_in_all: int | None = None,
) -> Iterator[list[int]]:
    """Yield the token ids of the query with each document, in the file's template or else concatenated.

    Special tokens spelled in a query or document are treated as plain text. most: the context in tokens, as
    in Tokenizer.encode. most_in_all: limit for all texts together, each with the query. Raises
    ContextLengthError, InvalidRequestError if an input is not a text or the limit is exceeded, and
    TokenizerError if the template lacks a placeholder.
    """
    if isinstance(documents, str):
        raise InvalidRequestError('documents must be a list of texts, such as ["Paris is in France."]')
    for text in (query, *documents):
        if not isinstance(text, str) or not text:
            raise InvalidRequestError(
                f"the query and each document must be a non-empty text, not {shown(text)}"
            )
    template = metadata.get(TEMPLATE_KEY)
    if template is not None and not (
        isinstance(template, str) and all(part in template for part in ("{query}", "{document}"))
    ):
        raise TokenizerError(
            f"The file's {TEMPLATE_KEY} lacks {{query}} or {{document}}: fetch or convert it again."
        )
    between, n_tokens = _between(metadata, tokenizer), 0
    for document in documents:
        if template is None:
            tokens = _joined(tokenizer, between, most, query, document)
        else:
            tokens = _filled(template, tokenizer, most, query, document)
        n_tokens += len(tokens)
        if most_in_all is not None and n_tokens > most_in_all:
            raise InvalidRequestError(
                f"the documents have more than {most_in_all} tokens in total, counting the query with each; "
                "send them in several requests"
            )
        yield tokens


def _filled(template: str, tokenizer: Tokenizer, most: int, query: str, document: str) -> list[int]:
    plain = PlainText(tokenizer, most)
    parts = {"{query}": plain.protected(query), "{document}": plain.protected(document)}
    text = re.sub(r"\{(query|document)\}", lambda found: str(parts[found[0]]), template)
    return tokenizer.encode(text, add_special=False, parse_special=True, most=most, restored=plain.restored)


def _between(metadata: Mapping[str, Any], tokenizer: Tokenizer) -> list[int]:
    """Return the tokens between a query and a document: EOS, and a separator if the tokenizer adds one.

    RoBERTa's tokenizer adds one, for example. WordPiece's separator is its EOS.
    """
    end = [tokenizer.eos_id] if tokenizer.add_eos and tokenizer.eos_id is not None else []
    if metadata.get("tokenizer.ggml.add_sep_token") is not True or metadata["tokenizer.ggml.model"] == "bert":
        return end
    separator = metadata.get("tokenizer.ggml.seperator_token_id", tokenizer.eos_id)  # the key's own spelling
    return [*end, separator] if type(separator) is int and 0 <= separator < tokenizer.n_vocab else end


def _joined(tokenizer: Tokenizer, between: list[int], most: int, query: str, document: str) -> list[int]:
    """Return [BOS] query [EOS] [SEP] document [EOS], with the special tokens that the file adds."""
    first = tokenizer.encode(query, add_special=False, most=most)
    second = tokenizer.encode(document, add_special=False, most=most)
    begin = [tokenizer.bos_id] if tokenizer.add_bos and tokenizer.bos_id is not None else []
    end = [tokenizer.eos_id] if tokenizer.add_eos and tokenizer.eos_id is not None else []
    return [*begin, *first, *between, *second, *end]


def ranked(scores: np.ndarray, documents: Sequence[str], top_n: int | None) -> list[RankedDocument]:
    """Return the top_n documents by descending score; equal scores keep their order.

    scores: [n_documents, n_labels]; the first label counts.
    """
    order = sorted(range(len(documents)), key=lambda i: -float(scores[i, 0]))
    return [RankedDocument(i, float(scores[i, 0]), documents[i]) for i in order[:top_n]]
