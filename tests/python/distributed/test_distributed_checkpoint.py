"""A model on meta, sharded and loaded by three processes, each its part; what they check is in
checkpoint_checks.py."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch_cases

pytestmark = pytest.mark.interop
torch_cases.require("torch", "transformers")

import checkpoint_checks  # noqa: E402
import checkpoint_models  # noqa: E402
import ranks  # noqa: E402

NAMES = [name for name in vars(checkpoint_checks) if name.startswith("check_")]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, list[str | None]]]:
    data = tmp_path_factory.mktemp("checkpoints")
    checkpoint_models.write_models(data)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CHECKPOINTS", str(data))
        patch.setenv("MALLOC_MMAP_THRESHOLD_", "65536")  # what is freed is no longer resident
        yield ranks.run("checkpoint_checks", NAMES, 3, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("name", NAMES)
def test_checkpoint(name: str, found: dict[str, list[str | None]]) -> None:
    ranks.require_passed(found[name])
