"""A query and a document as the text that a reranker scores, and documents in the order of their scores.

llama.cpp's server is the reference (format_prompt_rerank in tools/server/server-common.cpp).
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
"""The key of a file with what is around {query} and {document}."""


@dataclass(frozen=True)
class RankedDocument:
    """A document with its score. index: its place among those that were given."""

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
    """Token ids of each document with the query, as the file's template has them, or else one behind the
    other.

    Special tokens that a query or a document spells are plain text. most: tokens of the context, as of
    Tokenizer.encode. most_in_all: tokens of all these texts, each of which has the query. Raises
    ContextLengthError, InvalidRequestError for what is no text and for more tokens in all, TokenizerError for
    a template without a place for both.
    """
    if isinstance(documents, str):
        raise InvalidRequestError('documents must be a list of texts, such as ["Paris is in France."]')
    for text in (query, *documents):
        if not isinstance(text, str) or not text:
            raise InvalidRequestError(
                f"the query and each document must be a text that is not empty, not {shown(text)}"
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
                f"the documents have more than {most_in_all} tokens in all, with the query in front of each; "
                "send them in several requests"
            )
        yield tokens


def _filled(template: str, tokenizer: Tokenizer, most: int, query: str, document: str) -> list[int]:
    plain = PlainText(tokenizer, most)
    parts = {"{query}": plain.protected(query), "{document}": plain.protected(document)}
    text = re.sub(r"\{(query|document)\}", lambda found: str(parts[found[0]]), template)
    return tokenizer.encode(text, add_special=False, parse_special=True, most=most, restored=plain.restored)


def _between(metadata: Mapping[str, Any], tokenizer: Tokenizer) -> list[int]:
    """What is between a query and a document: what ends a text, and a separator of tokenizers that have one
    beside it, such as RoBERTa's. (WordPiece's separator is what ends a text.)"""
    end = [tokenizer.eos_id] if tokenizer.add_eos and tokenizer.eos_id is not None else []
    if metadata.get("tokenizer.ggml.add_sep_token") is not True or metadata["tokenizer.ggml.model"] == "bert":
        return end
    separator = metadata.get("tokenizer.ggml.seperator_token_id", tokenizer.eos_id)  # so spelled
    return [*end, separator] if type(separator) is int and 0 <= separator < tokenizer.n_vocab else end


def _joined(tokenizer: Tokenizer, between: list[int], most: int, query: str, document: str) -> list[int]:
    """[BOS] query [EOS] [SEP] document [EOS], of which a tokenizer has those that its file asks for."""
    first = tokenizer.encode(query, add_special=False, most=most)
    second = tokenizer.encode(document, add_special=False, most=most)
    begin = [tokenizer.bos_id] if tokenizer.add_bos and tokenizer.bos_id is not None else []
    end = [tokenizer.eos_id] if tokenizer.add_eos and tokenizer.eos_id is not None else []
    return [*begin, *first, *between, *second, *end]


def ranked(scores: np.ndarray, documents: Sequence[str], top_n: int | None) -> list[RankedDocument]:
    """The best first; of equal scores the first. scores: [n_documents, n_labels], of which the first
    counts."""
    order = sorted(range(len(documents)), key=lambda i: -float(scores[i, 0]))
    return [RankedDocument(i, float(scores[i, 0]), documents[i]) for i in order[:top_n]]
