"""Fixtures of the tests of stored models."""

from __future__ import annotations

from collections.abc import Iterator

import huggingface_hub.constants
import huggingface_hub.file_download
import pytest
from fake_hub import FakeHub


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    """Yield the only hub that the process can reach, with a token for it."""
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    with FakeHub() as fake:
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", fake.url)
        template = fake.url + "/{repo_id}/resolve/{revision}/{filename}"
        for module in (huggingface_hub.constants, huggingface_hub.file_download):
            if hasattr(module, "HUGGINGFACE_CO_URL_TEMPLATE"):
                monkeypatch.setattr(module, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setenv("HF_TOKEN", "hf_secret")
        yield fake
