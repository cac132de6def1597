"""Replaces PEFT's functions whose source is known and that nobody else has patched."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping
from typing import Any

from nf4.torch import _replacing
from nf4.torch._replacing import Replaced, found
from nf4.torch.modules import Int4Linear, NF4Linear
from nf4.torch.peft import counting, layers, merging
from nf4.torch.peft.dense_weight import WeightOfLayer

CHECKED = "0.18.0 to 0.21.2"  # the versions whose source was read
LINEAR, LINEAR4BIT = "peft.tuners.lora.layer", "peft.tuners.lora.bnb"
MODEL, MIXED_MODEL = "peft.peft_model", "peft.mixed_model"
_INTEGRATIONS, _DEQUANTIZE = "peft.utils.integrations", "dequantize_module_weight"
_TUNERS, _INJECT = "peft.tuners.tuners_utils", "_inject_parameters"
# The first digits of the SHA-256 of the functions' sources, by module.
KNOWN: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    LINEAR: {
        "Linear.forward": ("ec0a80f5c5ce05f5",),
        "Linear.merge": ("4fd45bf818b48207", "660acdb14ddefcc6"),
        "Linear.unmerge": ("7b9ea81fbe6e5077",),
    },
    LINEAR4BIT: {
        "Linear4bit.forward": ("ba53967c7f857438",),
        "Linear4bit.merge": ("bd1ec4e49bdf039d",),
        "Linear4bit.unmerge": ("4cb203ee55edebd7",),
    },
    MODEL: {"PeftModel.get_nb_trainable_parameters": ("0ac0ba5f0a3bc865",)},
    MIXED_MODEL: {"PeftMixedModel.get_nb_trainable_parameters": ("e51800f0672cc812",)},
}
EXPERTS_CHECKED = "0.21.2"
# The functions of target_parameters, by module. All of them are replaced, or none.
EXPERTS: Mapping[str, Mapping[str, str]] = {
    LINEAR: {
        "ParamWrapper.get_param": "793dbc2ab92fd8a6",
        "ParamWrapper.forward": "704fb56e52604110",
        "ParamWrapper.merge": "3ae95ee0ab6efe90",
        "ParamWrapper.unmerge": "6f86faffa70bedb9",
    },
    _TUNERS: {f"BaseTuner.{_INJECT}": "10d38624f40b5393"},
}
_DEQUANTIZE_DIGESTS = ("745bb18021ab7aff",)


def _maker(module: Any, name: str) -> Callable[[Any], Any]:
    """Returns a function that makes a method's replacement from the original."""
    of_class, _, method = name.partition(".")
    if method == "forward":
        return lambda original: layers.forward(original, getattr(module, of_class))
    if method == "merge":
        to_merge = module.check_adapters_to_merge
        return lambda original: merging.merge(original, to_merge)
    return merging.unmerge if method == "unmerge" else counting.counted


def replace(module_name: str, replaced: list[Replaced], left_alone: list[str]) -> None:
    """Replaces the methods of a loaded module."""
    module = sys.modules[module_name]
    for name, digests in KNOWN[module_name].items():
        method = found(module, name)
        if not _replacing.is_known(method, digests):
            left_alone.append(f"{module_name}.{name}")
            continue
        owner = found(module, name.rpartition(".")[0])
        ours = _maker(module, name)(method)
        replaced.append(Replaced.by(f"{module_name}.{name}", owner, ours))


def replace_experts(replaced: list[Replaced], left_alone: list[str]) -> None:
    """Replaces the functions of target_parameters in loaded modules."""
    from nf4.torch.peft import experts  # not at the top: it imports torch._dynamo

    methods = [
        (sys.modules[module], name, digest)
        for module, names in EXPERTS.items()
        for name, digest in names.items()
    ]
    unknown = [
        f"{module.__name__}.{name}"
        for module, name, digest in methods
        if not _replacing.is_known(found(module, name), (digest,))
    ]
    left_alone += unknown
    if unknown:
        tuner = found(sys.modules[_TUNERS], "BaseTuner")
        if callable(found(tuner, _INJECT)):
            ours = experts.warn_of(found(tuner, _INJECT), unknown[0], EXPERTS_CHECKED)
            replaced.append(Replaced.by(f"{_TUNERS}.BaseTuner.{_INJECT}", tuner, ours))
        return
    for module, name, _ in methods:
        of_class, _, method = name.partition(".")
        make: Callable[..., Any] = getattr(experts, method.removeprefix("_"))
        if method == "merge":
            make = functools.partial(make, to_merge=module.check_adapters_to_merge)
        owner = found(module, of_class)
        ours = make(found(module, name))
        replaced.append(Replaced.by(f"{module.__name__}.{name}", owner, ours))


def replace_weights(replaced: list[Replaced]) -> None:
    """Replaces the attribute `weight` of libnf4's layers, for PEFT's code."""
    for each in (NF4Linear, Int4Linear):
        ours = WeightOfLayer(vars(each).get("weight"))
        replaced.append(Replaced.by(f"nf4.torch.{each.__name__}.weight", each, ours))


def replace_dequantize(replaced: list[Replaced], left_alone: list[str]) -> None:
    """Replaces dequantize_module_weight in all loaded modules of PEFT that have it; later ones
    import it from the module that defines it."""
    original = getattr(sys.modules.get(_INTEGRATIONS), _DEQUANTIZE, None)
    if not _replacing.is_known(original, _DEQUANTIZE_DIGESTS):
        left_alone.append(f"{_INTEGRATIONS}.{_DEQUANTIZE}")
        return
    ours = merging.dequantized(original)
    for name, module in list(sys.modules.items()):
        if name.split(".")[0] == "peft" and vars(module).get(_DEQUANTIZE) is original:
            replaced.append(Replaced.by(f"{name}.{_DEQUANTIZE}", module, ours))
