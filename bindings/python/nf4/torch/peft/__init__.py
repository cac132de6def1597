"""Makes PEFT's tuners work over 4-bit weights: NF4Linear and Int4Linear, and LoRA over
bitsandbytes' Linear4bit if libnf4 serves that.

Importing nf4.torch is enough. As soon as PEFT is loaded, before or after nf4.torch, its code reads
and writes the weight of libnf4's layers as a dense one (dense_weight.py), and these functions are
replaced:
    tuners.lora.layer.Linear.forward, tuners.lora.bnb.Linear4bit.forward
                        fused layer and adapter with one backward pass (layers.py)
    their merge and unmerge
                        now also change an NF4Linear (merging.py)
    utils.integrations.dequantize_module_weight
                        DoRA reads a weight by it
    PeftModel.get_nb_trainable_parameters and that of PeftMixedModel
                        they count bytes as parameters (counting.py)
    tuners.lora.layer.ParamWrapper, tuners.tuners_utils.BaseTuner._inject_parameters
                        target_parameters of experts (experts.py)

Functions whose source replacements.py does not know, and patched ones, are left alone; so is
everything over other base layers.
"""

from __future__ import annotations

import warnings
from typing import NamedTuple

from nf4.torch._import_watch import ImportWatch
from nf4.torch._replacing import Replaced
from nf4.torch.peft import replacements
from nf4.torch.peft.replacements import LINEAR, LINEAR4BIT, MIXED_MODEL, MODEL

# Functions are replaced after these modules are loaded; the first one needs all of LINEAR.
_WHEN = {"peft.tuners.lora.model": LINEAR} | {
    each: each for each in (LINEAR4BIT, MODEL, MIXED_MODEL)
}


class Served(NamedTuple):
    """The functions of PEFT that are replaced in this process, and those that are unknown."""

    functions: list[str]
    left_alone: list[str]


_replaced: list[Replaced] = []
_left_alone: list[str] = []


def served() -> Served:
    names = [each.name for each in _replaced if each.name.startswith("peft.")]
    return Served(names, list(_left_alone))  # not `weight` of libnf4's layers


def _loaded(name: str) -> None:
    """Never raises, because the error would reach whoever imports PEFT."""
    try:
        if _WHEN[name] == LINEAR:
            replacements.replace_weights(_replaced)
            replacements.replace_dequantize(_replaced, _left_alone)
            replacements.replace_experts(_replaced, _left_alone)
        replacements.replace(_WHEN[name], _replaced, _left_alone)
    except Exception as error:
        warnings.warn(f"libnf4 does not serve {_WHEN[name]}: {error!r}", stacklevel=2)


_watch = ImportWatch(_WHEN, lambda name: _loaded(name))


def register() -> Served:
    """Replaces PEFT's functions now or as soon as it is loaded; a second call changes nothing."""
    _watch.start()
    return served()


def unregister() -> None:
    """Restores PEFT's functions, for example to compare. Patches made since stay."""
    _watch.stop()
    for each in reversed(_replaced):
        each.give_back()
    _replaced.clear()
    _left_alone.clear()
