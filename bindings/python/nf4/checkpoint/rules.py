"""Which weights of a dense model become 4-bit, and how transformers is told.

transformers turns every nn.Linear into a 4-bit layer except those that its skip list names.
A file knows names and shapes, not modules, so these rules go by the names that the models of
transformers use. They err towards leaving a tensor dense: each dense matrix is listed in
llm_int8_skip_modules, so a layer that could have been 4-bit still loads exactly, while a 4-bit
tensor where the model has no linear layer would not load at all.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import re
from collections.abc import Iterable

from nf4.checkpoint.dtypes import FILE_TO_NF4
from nf4.checkpoint.header import TensorInfo

# nn.Embedding modules whose names do not say "embed".
_EMBEDDINGS = {"wte", "wpe", "shared", "relative_attention_bias", "word_emb", "pos_emb"}
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
# Kept in float32 by transformers (PreTrainedModel._keep_in_fp32_modules), so never converted.
_KEPT_IN_FP32 = {
    "wo": {"t5", "mt5", "umt5", "udop", "pop2piano"},
    "qformer": {"blip-2", "instructblip", "instructblipvideo"},
    "indexer": {"deepseek_v32", "deepseek_v4", "glm_moe_dsa"},
}
# Models whose linear layers are Conv1D: the file holds [in, out], a 4-bit layer [out, in].
_CONV1D_MODELS = {"gpt2", "openai-gpt", "imagegpt", "decision_transformer"}
_CONV1D_LAYERS = {"c_attn", "c_proj", "c_fc", "q_attn"}
# Heads that are not stored when tied, but that the model has: by the class in config.json.
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
    """The module that a weight belongs to: its name without the last part."""
    return tensor.rpartition(".")[0]


def matches(pattern: str, module: str) -> bool:
    """Does a pattern of --skip or --only name this module? A pattern is a run of whole
    name parts ("lm_head", "layers.0"); with *, ? or [] it is a glob over the whole name."""
    if any(mark in pattern for mark in "*?["):
        return fnmatch.fnmatchcase(module, pattern)
    return f".{pattern}." in f".{module}."


def is_conv1d(module: str, model_type: str | None) -> bool:
    """Is the dense weight of this module stored transposed?"""
    return model_type in _CONV1D_MODELS and module.rpartition(".")[2] in _CONV1D_LAYERS


def _is_embedding(parts: list[str]) -> bool:
    return parts[-1] in _EMBEDDINGS or any("embed" in part.lower() for part in parts)


def _is_head(module: str, parts: list[str]) -> bool:
    if not _HEADS.isdisjoint(parts) or module in _TOP_LEVEL_HEADS:
        return True
    return any(f".{module}".endswith(f".{suffix}") for suffix in _HEAD_SUFFIXES)


def _default_reason(module: str, model_type: str | None) -> str | None:
    parts = module.split(".")
    if _is_embedding(parts):
        return "embedding"
    if any("norm" in part.lower() for part in parts[-1:]):
        return "norm"
    if _is_head(module, parts):
        return "output head"
    if parts[-1] in _ROUTERS:
        return "router"
    if "experts" in parts:
        return "expert, which transformers fuses"
    if any(part in parts and model_type in types for part, types in _KEPT_IN_FP32.items()):
        return "kept in float32 by transformers"
    if any(part.startswith("lora_") for part in parts):
        return "LoRA adapter"
    return None


@dataclasses.dataclass(frozen=True)
class Rules:
    """skip: patterns of modules left dense besides the default ones. only: if not empty, the
    patterns of the modules to quantize, in place of the default rules."""

    model_type: str | None = None
    skip: tuple[str, ...] = ()
    only: tuple[str, ...] = ()

    def dense_reason(self, info: TensorInfo) -> str | None:
        """Why a dense tensor stays dense; None if it becomes 4-bit."""
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
        if self.only:
            return None if any(matches(p, module) for p in self.only) else "not in --only"
        return _default_reason(module, self.model_type)

    def unmatched(self, modules: Iterable[str]) -> list[str]:
        """The patterns that name none of `modules`: most likely typing errors."""
        names = list(modules)
        return [p for p in self.skip + self.only if not any(matches(p, name) for name in names)]


# The regular expressions that are run, though a file brings them: names, what re.escape makes
# of names, one ".*" at most, and "$" at the end. None of them takes long or fails to compile.
_PLAIN = r"(?:[\w .:/-]|\\[^\w])*"
_SIMPLE = re.compile(rf"{_PLAIN}(?:(?<!\\)\.\*{_PLAIN})?\$?")


def is_simple(entry: str) -> bool:
    """Can an entry of llm_int8_skip_modules be judged in full?"""
    return _SIMPLE.fullmatch(entry) is not None


def _skip_pattern(entry: str) -> re.Pattern[str] | None:
    return re.compile(rf"(?:{entry})(?:(?<=\.)|(?=\.|$))") if is_simple(entry) else None


def skips(entry: str, modules: Iterable[str]) -> list[str]:
    """Which of `modules` an entry of llm_int8_skip_modules keeps transformers from converting:
    the rule of transformers.quantizers.quantizers_utils.should_convert_module. An entry that
    is not simple is taken for a suffix only."""
    pattern = _skip_pattern(entry)
    return [m for m in modules if m.endswith(entry) or (pattern and pattern.match(m))]


def _entry(module: str, quantized: list[str]) -> str:
    """The entry that skips `module` and none of `quantized`: its name (all experts of a layer
    share one), or a regular expression for exactly it where the name would catch others."""
    layer, experts, _ = module.partition(".experts.")
    if experts and not skips(f"{layer}.experts", quantized):
        return f"{layer}.experts"
    if skips(module, quantized):
        return f"{re.escape(module)}$"
    return module


def skip_list(
    dense: Iterable[TensorInfo], quantized: Iterable[str], architectures: Iterable[str]
) -> list[str]:
    """llm_int8_skip_modules: every module with a dense matrix, and the tied output layers that
    the model has though no file holds them. `quantized` are modules."""
    converted = list(quantized)
    modules = {
        module_of(info.name)
        for info in dense
        if len(info.shape) == 2 and info.name.endswith(".weight") and module_of(info.name)
    }
    entries = {_entry(module, converted) for module in modules}
    for architecture in architectures:
        for ending, heads in _ABSENT_HEADS.items():
            stored = any(skips(head, [*modules, *converted]) for head in heads)
            if architecture.endswith(ending) and not stored:
                entries.update(heads)
    return sorted(entries)
