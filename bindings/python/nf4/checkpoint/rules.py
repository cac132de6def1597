"""Decides which weights of a dense model become 4-bit, and writes that for transformers.

transformers replaces nn.Linear and Conv1D, not their subclasses, by 4-bit layers, except those
that llm_int8_skip_modules names. It must replace exactly the modules whose weights are 4-bit, or
the model does not load. architecture.Model says which it can replace. Without one, rules by name
decide, with the exceptions in known_models.py; in doubt they leave a tensor dense.
"""

from __future__ import annotations

import dataclasses
import fnmatch
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from nf4.checkpoint.architecture import Model, UnknownModel, ask
from nf4.checkpoint.dtypes import FILE_TO_NF4
from nf4.checkpoint.header import TensorInfo
from nf4.checkpoint.known_models import KNOWN, Known
from nf4.checkpoint.skips import SkipMatcher, is_simple, skip_entries
from nf4.checkpoint.stacks import is_stack
from nf4.checkpoint.weights import Survey

# nn.Embedding modules whose names do not contain "embed".
_EMBEDDINGS = {"wte", "wpe", "shared", "relative_attention_bias"}
# Output layers, often tied to the embeddings; trained anew for each task; sensitive.
_HEADS = {
    "lm_head",
    "embed_out",
    "vocab_projector",
    "generator_lm_head",
    "output_projection",
    "unembedding_projection",
    "lm_loss",
    "score",
    "classifier",
    "qa_outputs",
    "seq_relationship",
}
_HEAD_SUFFIXES = ("predictions.decoder", "lm_head.decoder", "pred_layer.proj")
_TOP_LEVEL_HEADS = {"proj_out", "output", "decoder"}
_ROUTERS = {"gate", "router", "shared_expert_gate"}
# transformers keeps these in float32 (PreTrainedModel._keep_in_fp32_modules), so they are never
# converted.
_KEPT_IN_FP32 = {
    "wo": {"t5", "mt5", "umt5", "udop", "pop2piano"},
    "qformer": {"blip-2", "instructblip", "instructblipvideo"},
    "indexer": {"deepseek_v32", "deepseek_v4", "glm_moe_dsa"},
}
# Models with Conv1D layers: a dense file holds [inputs, outputs], a 4-bit one [outputs, inputs].
_CONV1D_MODELS = {"gpt2", "openai-gpt", "imagegpt", "decision_transformer", "clvp", "clvp_decoder"}
_CONV1D_LAYERS = {"c_attn", "c_proj", "c_fc", "q_attn"}
# Models whose linear layers are of a subclass of nn.Linear.
_LINEAR_SUBCLASSES = {"falcon": "FalconLinear", "ibert": "QuantLinear"}
# Heads that a model's file lacks if they are tied, by the end of the class name.
_ABSENT_HEADS = {
    "ForCausalLM": ("lm_head",),
    "LMHeadModel": ("lm_head",),
    "ForConditionalGeneration": ("lm_head", "proj_out"),
    "ForMaskedLM": (
        "lm_head",
        "lm_head.decoder",
        "predictions.decoder",
        "vocab_projector",
        "generator_lm_head",
    ),
    "ForPreTraining": ("predictions.decoder",),
}


def module_of(tensor: str) -> str:
    """Returns the module that a weight belongs to: its name without the last part."""
    return tensor.rpartition(".")[0]


def is_matrix(info: TensorInfo) -> bool:
    """Tells if this tensor is a matrix named as the weight of a module."""
    return len(info.shape) == 2 and info.name.endswith(".weight") and len(info.name) > 7


def matrix_shapes(found: Survey, types: Collection[str]) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of all matrices in a dense file, including those that are 4-bit or FP8:
    name -> shape."""
    dense = {name: info.shape for name, info in found.dense.items() if is_matrix(info)}
    dense |= {name: weight.shape for name, weight in found.fp8.items()}
    return dense | {
        name: transposed_if_conv1d(name, w.shape, types)
        for name, w in found.weights.items()
        if not is_stack(w)
    }


def architectures(config: Mapping[str, Any]) -> list[str]:
    """Returns the class names in config.json."""
    value = config.get("architectures")
    return [name for name in value if isinstance(name, str)] if isinstance(value, list) else []


def matches(pattern: str, module: str) -> bool:
    """Tells if a pattern of --skip or --only names this module. A pattern is a sequence of whole
    name parts ("lm_head", "layers.0"); with *, ? or [] it is a glob over the whole name."""
    if any(mark in pattern for mark in "*?["):
        return fnmatch.fnmatchcase(module, pattern)
    return f".{pattern}." in f".{module}."


def model_types(config: Mapping[str, Any]) -> frozenset[str]:
    """Returns every model_type of config.json: the model's own and those of its parts."""
    found: set[str] = set()
    queue: list[Any] = [config]
    while queue:
        value = queue.pop()
        if isinstance(value, list):
            queue += value
        elif isinstance(value, dict):
            queue += value.values()
            if isinstance(value.get("model_type"), str):
                found.add(value["model_type"])
    return frozenset(found)


def is_transposed(weight: str, types: Collection[str]) -> bool:
    """Tells if a weight is stored as [inputs, outputs] when it is dense, as Conv1D's are. types:
    from model_types."""
    layer = module_of(weight).rpartition(".")[2]
    return layer in _CONV1D_LAYERS and not _CONV1D_MODELS.isdisjoint(types)


def transposed_if_conv1d(
    weight: str, shape: tuple[int, ...], types: Collection[str]
) -> tuple[int, ...]:
    """Returns the shape of a 4-bit weight from that of the dense one, or the reverse: swapped if
    is_transposed."""
    return shape[::-1] if is_transposed(weight, types) else shape


def _is_embedding(parts: list[str]) -> bool:
    last = parts[-1]
    if last in _EMBEDDINGS or last.endswith(("_emb", "_token", "_tokens")):
        return True
    return any("embed" in part.lower() for part in parts)


def _is_head(module: str, parts: list[str]) -> bool:
    if not _HEADS.isdisjoint(parts) or module in _TOP_LEVEL_HEADS:
        return True
    return any(f".{module}".endswith(f".{suffix}") for suffix in _HEAD_SUFFIXES)


def untied(config: Mapping[str, Any], found: Survey) -> dict[str, Any]:
    """Returns config.json for a checkpoint with these weights. An output head in 4 bits or FP8
    beside embeddings that are dense or in FP8 has a weight of its own, even if config.json says
    that they are tied."""
    key = "tie_word_embeddings"
    modules = [module_of(name) for name in (*found.weights, *found.fp8)]
    has_head = any(_is_head(module, module.split(".")) for module in modules)
    others = (*found.dense, *found.fp8)
    if not (has_head and any(_is_embedding(module_of(n).split(".")) for n in others)):
        return dict(config)
    parts = {
        name: {**part, key: False}
        for name, part in config.items()
        if isinstance(part, dict) and part.get(key)
    }
    return {**config, **parts, key: False}


def _dense_by_quality(module: str) -> str | None:
    """Says why a layer stays dense though transformers could load it in 4 bits."""
    parts = module.split(".")
    if _is_head(module, parts):
        return "output head"
    if parts[-1] in _ROUTERS or "router" in parts[-2:]:
        return "router"
    if any(part.startswith("lora_") for part in parts):
        return "LoRA adapter"
    return None


def _dense_by_name(module: str, types: Collection[str]) -> str | None:
    """Says why, judged by its name, this is not a layer that transformers replaces."""
    parts = module.split(".")
    if _is_embedding(parts):
        return "embedding"
    if "norm" in parts[-1].lower():
        return "norm"
    if "experts" in parts:
        return "expert, which transformers fuses"
    for part, kept in _KEPT_IN_FP32.items():
        if part in parts and not kept.isdisjoint(types):
            return "kept in float32 by transformers"
    return None


@dataclasses.dataclass(frozen=True)
class Rules:
    """Decides which dense tensors of a checkpoint become 4-bit.

    types   the model_types of config.json
    skip    patterns of modules to leave dense besides the default ones
    only    if not empty: patterns of the modules to quantize, instead of the default rules
    model   how transformers loads these tensors; None: rules by name
    shapes  the shapes of the checkpoint's tensors, which show what is not an nn.Linear
    """

    types: frozenset[str] = frozenset()
    skip: tuple[str, ...] = ()
    only: tuple[str, ...] = ()
    model: Model | None = None
    shapes: Mapping[str, tuple[int, ...]] = dataclasses.field(default_factory=dict)

    def dense_reason(self, info: TensorInfo) -> str | None:
        """Says why a dense tensor stays dense; None if it becomes 4-bit."""
        module = module_of(info.name)
        if not module or not info.name.endswith(".weight"):
            return "not a weight of a module"
        if len(info.shape) != 2:
            return f"{len(info.shape)}-D"
        if info.dtype not in FILE_TO_NF4:
            return f"dtype {info.dtype}"
        if info.elements == 0:
            return "empty"
        if any(matches(pattern, module) for pattern in self.skip):
            return "--skip"
        if self.only and not any(matches(pattern, module) for pattern in self.only):
            return "not in --only"
        reason = self.not_loadable(
            info.name, transposed_if_conv1d(info.name, info.shape, self.types)
        )
        if reason is None and self.model is not None:
            if self.model.modules[info.name] in self.model.read_by_owners:
                return "read by the code around it"
        return reason or (None if self.only else self._dense_by_default(module, info.name))

    def not_loadable(self, name: str, shape: tuple[int, ...]) -> str | None:
        """Says why transformers does not load this weight in 4 bits; None if it does, as far as is
        known. shape: (outputs, inputs)."""
        if self.model is not None:
            return self._dense_by_model(name, self.model)
        return self._dense_by_structure(module_of(name), shape)

    def _dense_by_model(self, name: str, model: Model) -> str | None:
        conv1d = model.modules[name] in model.conv1d
        if conv1d != is_transposed(name, self.types):
            return "Conv1D of an unknown model" if conv1d else "not Conv1D"
        return model.reasons[name]

    def _dense_by_structure(self, module: str, shape: tuple[int, ...]) -> str | None:
        """Says why, judged by the tensors beside it and known_models.py, this is not a layer that
        transformers replaces."""
        owner, _, last = module.rpartition(".")
        if last == "out_proj" and f"{owner}.in_proj_weight" in self.shapes:
            return "nn.MultiheadAttention"
        for model_type, layer in _LINEAR_SUBCLASSES.items():
            if model_type in self.types:
                return f"{layer}, which transformers does not replace"
        for found in self._known():
            if any(matches(pattern, module) for pattern in found.dense):
                return "no layer that transformers replaces"
        if self.shapes.get(f"{module}.bias", shape[:1]) != shape[:1]:
            return "its bias is not that of a linear layer"
        return None

    def _dense_by_default(self, module: str, name: str) -> str | None:
        """Says why the default rules leave this weight dense."""
        if self.model is None:
            return _dense_by_name(module, self.types) or _dense_by_quality(module)
        if self.model.modules[name] in self.model.dense_by_default:
            return "dense by transformers' default"
        return _dense_by_quality(module)

    def unmatched(self, modules: Iterable[str]) -> list[str]:
        """Returns the patterns that name none of `modules`, which are probably typing errors."""
        names = list(modules)
        return [p for p in self.skip + self.only if not any(matches(p, name) for name in names)]

    def skip_modules(
        self, dense: Iterable[TensorInfo], quantized: Iterable[str], architectures: Iterable[str]
    ) -> list[str]:
        """Returns llm_int8_skip_modules for these dense tensors and these names of 4-bit weights:
        every module with a dense matrix, and the model's modules whose weights the file lacks."""
        weights = [info.name for info in dense if is_matrix(info)]
        if self.model is not None:
            modules = self.model.modules
            converted = {modules[name] for name in quantized if name in modules}
            left = {modules.get(name) or module_of(name) for name in weights}
            return skip_entries((left | self.model.linear) - converted, converted)
        left = {module_of(name) for name in weights}
        converted = {module_of(name) for name in quantized}
        absent = {entry for found in self._known() for entry in found.skip}
        absent |= _absent_heads(architectures, left | converted)
        return skip_entries(left, converted, absent)

    def _known(self) -> list[Known]:
        return [KNOWN[name] for name in sorted(self.types) if name in KNOWN]


def _absent_heads(architectures: Iterable[str], modules: Iterable[str]) -> set[str]:
    """Returns the output layers that these classes may have, if `modules` has none of them."""
    matcher = SkipMatcher(modules)
    found: set[str] = set()
    for architecture in architectures:
        for ending, heads in _ABSENT_HEADS.items():
            if architecture.endswith(ending) and not any(map(matcher.first, heads)):
                found.update(heads)
    return found


def dense_linear(
    dense: Iterable[TensorInfo], quantized: Collection[str], architectures: Iterable[str]
) -> list[str]:
    """Returns the modules with a dense matrix that may be linear layers, and the output layers that
    a checkpoint lacks because they are tied. quantized: the modules with 4-bit weights."""
    left = {module_of(info.name) for info in dense if is_matrix(info)}
    left = {module for module in left if not _is_embedding(module.split("."))}
    return sorted(left | _absent_heads(architectures, left.union(quantized)))


def choose_rules(
    config: Mapping[str, Any], found: Survey, skip: tuple[str, ...] = (), only: tuple[str, ...] = ()
) -> tuple[Rules, str]:
    """Returns the rules for a checkpoint with this config.json, and a phrase on their basis: the
    modules of the model if an installed transformers can build it, else tensor names."""
    types = model_types(config)
    shapes = {name: info.shape for name, info in found.dense.items()}
    try:
        others = {name: shape for name, shape in shapes.items() if len(shape) != 2}
        weights = [name for name, weight in found.weights.items() if is_stack(weight)]
        model = ask(config, matrix_shapes(found, types), others, weights)
    except UnknownModel as error:
        return Rules(types, skip, only, None, shapes), f"tensor names: {error}"
    return Rules(types, skip, only, model, shapes), f"the modules of {model.name}"


def replaced_dense(model: Model, found: Survey, skip: object) -> list[str]:
    """Returns the modules that transformers replaces by 4-bit layers though their weights are
    dense. skip: llm_int8_skip_modules; None: the modules that transformers skips by default. Empty
    if the list has entries that SkipMatcher cannot evaluate."""
    skipped = set(model.dense_by_default)
    if skip is not None:
        if not isinstance(skip, list) or not all(isinstance(e, str) for e in skip):
            return []
        matcher = SkipMatcher(model.linear)
        skipped = {module for entry in skip for module in matcher.skipped(entry)}
        if matcher.exhausted or not all(map(is_simple, skip)):
            return []
    dense = {model.modules[name] for name, info in found.dense.items() if is_matrix(info)}
    return sorted((dense & model.linear) - skipped)
