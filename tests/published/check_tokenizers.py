"""`make test-published`: the tokenizer.json files of Gemma 3, Llama 2 and Qwen 3, from packages of npm.

On 2,000 seeded texts, hotset and the library `tokenizers` give the same ids and the same decoded text.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from text_corpus import texts
from tokenizers import Tokenizer as Library

from hotset.convert.hf_tokenizer import tokenizer_keys
from hotset.text.tokenizer import load_tokenizer

FOLDER = Path(os.environ.get("TOKENIZERS", "tokenizers"))
N_TEXTS = 2000


@pytest.mark.parametrize("name", ["gemma3", "llama2", "qwen3"])
def test_ids_and_text_equal_the_librarys(name: str):
    folder = FOLDER / f"tokenizer-{name}" / "models"
    content = json.loads((folder / "tokenizer.json").read_bytes())
    library = Library.from_file(str(folder / "tokenizer.json"))
    tokenizer = load_tokenizer(tokenizer_keys(folder, {"vocab_size": library.get_vocab_size()}))
    # Users may write any other token. Tokens that end an answer are special for hotset.
    shown = [one["content"] for one in content["added_tokens"] if not tokenizer.is_special(one["id"])]
    for text in texts(N_TEXTS, shown):
        ids = library.encode(text).ids
        assert tokenizer.encode(text) == ids, text
        assert tokenizer.decode(ids, skip_special=True) == library.decode(ids), text
