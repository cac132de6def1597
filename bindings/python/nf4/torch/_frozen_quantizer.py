"""What the quantizers of _nf4_quantizer.py and _int4_quantizer.py share."""

from __future__ import annotations

from transformers.quantizers.base import HfQuantizer


class FrozenQuantizer(HfQuantizer):
    """Of weights that are quantized before, and stay as they are."""

    requires_calibration = True

    def is_serializable(self) -> bool:
        return True

    @property
    def is_trainable(self) -> bool:
        """Adapters are."""
        return True
