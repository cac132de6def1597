"""Does each model of transformers run after quantize_model? For tools/check_architectures.py --run.

A model class is made with random weights: small if its configuration can be made small, else with
its default widths and few layers. It is given tokens, pixels or sound, whichever its forward takes.
A class whose dense model does not run so is not judged. Others must run after quantize_model.
"""

from __future__ import annotations

import copy
import inspect
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
import transformers
from nf4.checkpoint import meta_model
from nf4.errors import InvalidArgument
from nf4.torch import quantize_model

# The most elements of a model that is run.
_LARGEST = 150_000_000
_TOKENS, _VOCABULARY = 8, 1000
# The value of a size in a small configuration, by what its name ends with or is.
_SIZES = {
    64: ("hidden_size", "d_model", "n_embd", "embed_dim", "hidden_dim", "dim", "projection_dim",
         "encoder_hidden_size", "decoder_hidden_size", "embedding_size", "moe_intermediate_size",
         "time_step_rank", "shared_expert_intermediate_size", "out_hidden_size",
         "cross_attention_dim"),
    128: ("intermediate_size", "ffn_dim", "d_ff", "n_inner", "encoder_ffn_dim", "decoder_ffn_dim",
          "mlp_dim"),
    16: ("head_dim", "d_kv", "attention_head_size"),
    4: ("num_attention_heads", "encoder_attention_heads", "decoder_attention_heads", "n_head",
        "num_heads", "n_heads", "num_experts", "num_local_experts", "n_routed_experts"),
    2: ("num_key_value_heads", "num_experts_per_tok"),
}  # fmt: skip
_SMALL = {name: size for size, names in _SIZES.items() for name in names}
# The sizes that are left as they are, from one attempt to the next: the number of heads or the size
# of one may be bound to another.
_LEFT = (frozenset[int](), frozenset({16}), frozenset({2, 4, 16}), frozenset(_SIZES))
_LAYERS = 2


def _shrink(config: transformers.PretrainedConfig, left: frozenset[int]) -> None:
    for key, value in list(vars(config).items()):
        if isinstance(value, transformers.PretrainedConfig):
            _shrink(value, left)
        elif isinstance(value, int) and not isinstance(value, bool):
            if key in _SMALL and _SMALL[key] not in left:
                setattr(config, key, min(value, _SMALL[key]))
            elif key == "vocab_size" or (key.endswith("_token_id") and value >= _VOCABULARY):
                setattr(config, key, min(value, _VOCABULARY - (key != "vocab_size")))


def _configs(
    kind: type[transformers.PreTrainedModel],
    limit_layers: Callable[[transformers.PretrainedConfig, int], None],
) -> Iterator[transformers.PretrainedConfig]:
    for left in _LEFT:
        config = kind.config_class()
        limit_layers(config, _LAYERS)
        _shrink(config, left)
        yield config


def _of_parts(config: Any, names: tuple[str, ...]) -> Any:
    """Returns the first attribute of these that the configuration or a part of it has."""
    due = [config]
    while due:
        each = due.pop(0)
        found = next((getattr(each, n) for n in names if getattr(each, n, None) is not None), None)
        if found is not None:
            return found
        due += [v for v in vars(each).values() if isinstance(v, transformers.PretrainedConfig)]
    return None


def _inputs(model: transformers.PreTrainedModel) -> Iterator[dict[str, Any]]:
    config, taken = model.config, inspect.signature(model.forward).parameters
    tokens = torch.arange(3, 3 + _TOKENS)[None]
    # A cache of so few layers may lack a kind that a model asks for.
    made: dict[str, Any] = {"use_cache": False} if "use_cache" in taken else {}
    if "input_ids" in taken:
        made["input_ids"] = tokens
    if "decoder_input_ids" in taken:
        made["decoder_input_ids"] = tokens
    if "input_values" in taken:
        made["input_values"] = torch.randn(1, 4000)
    if "input_features" in taken:
        bins = _of_parts(config, ("num_mel_bins", "feature_size", "input_dim")) or 80
        length = 2 * (_of_parts(config, ("max_source_positions",)) or 50)
        made["input_features"] = torch.randn(1, bins, length)
    if "pixel_values" in taken:
        size = _of_parts(config, ("image_size",)) or 224
        size = size if isinstance(size, (list, tuple)) else (size, size)
        channels = _of_parts(config, ("num_channels", "in_channels")) or 3
        made["pixel_values"] = torch.randn(1, channels, *size)
    yield made
    # Sound as frames by bins, and text alone for models of several kinds of input.
    if "input_features" in made:
        yield {**made, "input_features": made["input_features"].transpose(1, 2).contiguous()}
    if "input_ids" in made and len(made) > 1:
        yield {
            name: each
            for name, each in made.items()
            if not name.startswith(("pixel", "input_v", "input_f"))
        }
    if "pixel_values" in made and len(made) > 1:
        yield {"pixel_values": made["pixel_values"]}


def _runs(model: transformers.PreTrainedModel, inputs: dict[str, Any]) -> str | None:
    """Returns what is wrong, or None if the model runs."""
    try:
        with torch.no_grad():
            model(**inputs)
    except TimeoutError:
        raise
    except Exception as error:
        return f"{type(error).__name__}: {(str(error).strip() or '-').splitlines()[0][:160]}"
    return None


def _dense(
    kind: type[transformers.PreTrainedModel],
    limit_layers: Callable[[transformers.PretrainedConfig, int], None],
) -> tuple[transformers.PreTrainedModel, dict[str, Any]] | str:
    """Returns a model that runs, and its inputs; or why there is none."""
    why = "-"
    try:
        configs = list(_configs(kind, limit_layers))
    except TimeoutError:
        raise
    except Exception as error:
        return f"no configuration: {type(error).__name__}: {str(error).strip().splitlines()[-1]}"
    for config in configs:
        try:
            elements = sum(
                p.numel() for p in meta_model.build(kind, copy.deepcopy(config)).parameters()
            )
            if elements > _LARGEST:
                raise ValueError(f"{elements} elements")
            model = kind(config).eval()
        except TimeoutError:
            raise
        except Exception as error:
            why = f"{type(error).__name__}: {(str(error).strip() or '-').splitlines()[0][:100]}"
            continue
        for inputs in _inputs(model):
            problem = _runs(model, inputs)
            if problem is None:
                return model, inputs
            why = problem
    return why


def run(
    kind: type[transformers.PreTrainedModel],
    limit_layers: Callable[[transformers.PretrainedConfig, int], None],
) -> tuple[str | None, str | None, int]:
    """(why it is not judged, why it does not run after quantize_model, its 4-bit layers)."""
    torch.manual_seed(0)
    found = _dense(kind, limit_layers)
    if isinstance(found, str):
        return found, None, 0
    model, inputs = found
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            names = quantize_model(model)
        except InvalidArgument as error:
            nothing = "no layer that may become 4-bit" in str(error)
            return None, None if nothing else f"quantize_model: {error}", 0
        return None, _runs(model, inputs), len(names)
