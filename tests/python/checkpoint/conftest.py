"""Fixtures of the checkpoint tests."""

from __future__ import annotations

import json

import pytest
from nf4.checkpoint import architecture


def _answer(request: str, name: str) -> dict:
    from nf4.checkpoint import meta_model

    return meta_model.answer(json.loads(request))


@pytest.fixture
def in_process(monkeypatch):
    """Build models in this process and not in a child, which takes seconds to import torch."""
    monkeypatch.setattr(architecture, "_run", _answer)
