"""Classes of transformers in annotations. transformers is not imported for them: it takes seconds,
and need not be installed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

if TYPE_CHECKING:
    from transformers import PreTrainedModel as PreTrainedModel
else:
    PreTrainedModel = nn.Module  # its base, which typing.get_type_hints finds
