"""Does transformers load what `nf4 quantize` writes, for every model that it has?

    python tools/check_architectures.py [--jobs N] [--layers N] [--by modules|names] [CLASS...]
    python tools/check_architectures.py --run [--jobs N] [CLASS...]

Each model class is built on torch's meta device with its default configuration. Its tensors are
named as save_pretrained names them. What nf4 quantize makes of them, once by the model's modules
and once by tensor names alone, is given to transformers' own quantizer and loader, still without
data. A class fails unless exactly the modules that transformers replaces get a 4-bit weight with
all its parts, of shape [outputs, inputs]. --layers 4 takes a third of the time and leaves most
kinds of layers in. tools/known_models.py writes what names do not show. With --run each class is
run on the CPU after quantize_model instead, as tiny_models.py says.
"""

from __future__ import annotations

import argparse
import collections
import copy
import dataclasses
import functools
import math
import multiprocessing
import os
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from unittest import mock

os.environ |= {"HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}

import torch  # noqa: E402
import transformers  # noqa: E402
from nf4.checkpoint import meta_model  # noqa: E402
from nf4.checkpoint.architecture import Model  # noqa: E402
from nf4.checkpoint.header import TensorInfo  # noqa: E402
from nf4.checkpoint.rules import Rules, is_transposed, model_types  # noqa: E402
from nf4.checkpoint.skips import SkipMatcher  # noqa: E402
from transformers.core_model_loading import (  # noqa: E402
    convert_and_load_state_dict_in_model,
    revert_weight_conversion,
)
from transformers.models.auto import modeling_auto  # noqa: E402
from transformers.pytorch_utils import Conv1D  # noqa: E402

WAYS = ("modules", "names")
_TIME_LIMIT = 300
_DEPTHS = {
    *("num_hidden_layers", "num_layers", "num_decoder_layers", "n_layer", "n_layers"),
    *("encoder_layers", "decoder_layers"),
}
Shapes = dict[str, tuple[int, ...]]


@dataclasses.dataclass
class Architecture:
    """A model class with a configuration, and a checkpoint of it: name -> shape."""

    kind: type[transformers.PreTrainedModel]
    config: transformers.PretrainedConfig
    shapes: Shapes
    model: Model

    @property
    def types(self) -> frozenset[str]:
        return model_types(self.config.to_dict())


@dataclasses.dataclass
class Choice:
    """What nf4 quantize writes: the names of the 4-bit weights, with whether the dense weight is
    transposed first, and llm_int8_skip_modules."""

    weights: dict[str, bool]
    skip: list[str]

    def skipped(self, model: Model) -> frozenset[str]:
        """The linear layers that llm_int8_skip_modules skips."""
        matcher = SkipMatcher(model.linear, sys.maxsize)
        return frozenset(module for entry in self.skip for module in matcher.skipped(entry))


@dataclasses.dataclass
class Outcome:
    """error: why the class could not be built. problems: way -> why it does not load.
    quantized: way -> the number of 4-bit weights."""

    name: str
    error: str | None = None
    problems: dict[str, list[str]] = dataclasses.field(default_factory=dict)
    quantized: dict[str, int] = dataclasses.field(default_factory=dict)


RUN = "run"


def class_names() -> list[str]:
    """The model classes that transformers' Auto classes lead to."""
    mappings = [value for key, value in vars(modeling_auto).items() if key.endswith("_NAMES")]
    found: set[str] = set()
    for names in (names for mapping in mappings for names in mapping.values()):
        found.update([names] if isinstance(names, str) else names or ())
    return sorted(name for name in found if _is_model(getattr(transformers, name, None)))


def _is_model(value: object) -> bool:
    return isinstance(value, type) and issubclass(value, transformers.PreTrainedModel)


def stored(model: transformers.PreTrainedModel) -> Shapes:
    """The tensors that save_pretrained writes: no tied ones, and by the names of the hub."""
    left_out = {*(model.all_tied_weights_keys or ()), *(model._keys_to_ignore_on_save or ())}
    state = {name: tensor for name, tensor in model.state_dict().items() if name not in left_out}
    written = revert_weight_conversion(model, state)
    return {name: tuple(tensor.shape) for name, tensor in written.items()}


def _limit_layers(config: transformers.PretrainedConfig, layers: int) -> None:
    for key, value in list(vars(config).items()):
        if isinstance(value, transformers.PretrainedConfig):
            _limit_layers(value, layers)
        elif key in _DEPTHS and isinstance(value, int):
            setattr(config, key, min(value, layers))


def architecture(name: str, layers: int | None = None) -> Architecture:
    """Build a class with its default configuration, but at most `layers` layers in a stack. Raises
    whatever its constructor raises."""
    kind = getattr(transformers, name)
    config = kind.config_class()
    if layers is not None:
        _limit_layers(config, layers)
    model = meta_model.build(kind, copy.deepcopy(config))
    shapes = stored(model)
    matrices = {n: s for n, s in shapes.items() if len(s) == 2 and n.endswith(".weight")}
    answer = meta_model.LoadPlan(model).answer(matrices)
    return Architecture(kind, config, shapes, Model.from_answer(name, answer))


def infos(shapes: Shapes) -> list[TensorInfo]:
    return [TensorInfo(name, "F32", s, 0, 4 * math.prod(s)) for name, s in shapes.items()]


def choose(found: Architecture, way: str) -> Choice:
    """As nf4.checkpoint.convert chooses."""
    model = found.model if way == "modules" else None
    rules = Rules(found.types, model=model, shapes=found.shapes)
    tensors = infos(found.shapes)
    weights = {
        info.name: is_transposed(info.name, rules.types)
        for info in tensors
        if rules.dense_reason(info) is None
    }
    dense = [info for info in tensors if info.name not in weights]
    return Choice(weights, rules.skip_modules(dense, weights, [found.kind.__name__]))


def _checkpoint(found: Architecture, choice: Choice) -> dict[str, torch.Tensor]:
    """The tensors of the 4-bit checkpoint, without data. In place of its scales, the shape of
    absmax says how a weight is stored: (transposed, outputs, inputs)."""
    state: dict[str, torch.Tensor] = {}
    for name, shape in found.shapes.items():
        if name not in choice.weights:
            state[name] = torch.empty(shape, device="meta")
            continue
        packed = (math.prod(shape) + 1) // 2
        state[name] = torch.empty((packed, 1), dtype=torch.uint8, device="meta")
        transposed = choice.weights[name]
        stored_as = (int(transposed), *(shape[::-1] if transposed else shape))
        state[f"{name}.absmax"] = torch.empty(stored_as, device="meta")
        for part in ("quant_map", "quant_state.bitsandbytes__nf4"):
            state[f"{name}.{part}"] = torch.empty(1, device="meta")
    return state


def _expected_absmax(layer: Any) -> tuple[int, ...]:
    """As _checkpoint's, of a bitsandbytes.nn.Linear4bit that transformers made of a module."""
    return (int(issubclass(layer.source_cls, Conv1D)), layer.out_features, layer.in_features)


def problems(found: Architecture, choice: Choice) -> list[str]:
    """Why transformers with bitsandbytes does not load a checkpoint; empty if it does."""
    import bitsandbytes
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.modeling_utils import LoadStateDictConfig
    from transformers.quantizers.quantizer_bnb_4bit import Bnb4BitHfQuantizer

    settings = transformers.BitsAndBytesConfig(
        load_in_4bit=True, llm_int8_skip_modules=choice.skip, bnb_4bit_quant_type="nf4"
    )
    quantizer = Bnb4BitHfQuantizer(settings, pre_quantized=True)
    model = meta_model.build(found.kind, copy.deepcopy(found.config))
    quantizer.preprocess_model(model, device_map=None)
    names = {module: name for name, module in model.named_modules()}
    replaced = {name for m, name in names.items() if isinstance(m, bitsandbytes.nn.Linear4bit)}
    loaded: set[str] = set()
    transposed: set[str] = set()

    def from_prequantized(data: Any, quantized_stats: Mapping[str, Any], **options: Any) -> Any:
        if len(quantized_stats) == 3:
            layer = options["module"]
            loaded.add(names[layer])
            if tuple(quantized_stats["weight.absmax"].shape) != _expected_absmax(layer):
                transposed.add(names[layer])
        return torch.nn.Parameter(data, requires_grad=False)

    with mock.patch.object(bitsandbytes.nn.Params4bit, "from_prequantized", from_prequantized):
        info, _ = convert_and_load_state_dict_in_model(
            model,
            _checkpoint(found, choice),
            LoadStateDictConfig(
                hf_quantizer=quantizer,
                device_map={"": "meta"},
                weight_mapping=get_model_conversion_mapping(model, None, quantizer),
            ),
        )
    not_stored = {*(model.all_tied_weights_keys or ()), *(model._keys_to_ignore_on_save or ())}
    missing = info.missing_keys - not_stored
    return [
        *(f"{name}: replaced, but its weight is dense" for name in sorted(replaced - loaded)),
        *(f"{name}: 4-bit, but not replaced" for name in sorted(loaded - replaced)),
        *(f"{name}: stored transposed" for name in sorted(transposed)),
        *(f"{name}: unexpected" for name in sorted(info.unexpected_keys)),
        *(f"{name}: missing" for name in sorted(missing)),
        *(f"{name}: error on loading" for name in sorted(info.conversion_errors)),
        *(f"{entry[0]}: another shape" for entry in sorted(info.mismatched_keys, key=str)),
        *([] if len(loaded) == len(choice.weights) else ["not every 4-bit weight is loaded"]),
    ]


def _run(name: str) -> Outcome:
    import tiny_models

    error, problem, count = tiny_models.run(getattr(transformers, name), _limit_layers)
    return Outcome(name, error, {RUN: [problem] if problem else []}, {RUN: count})


def check(name: str, ways: Sequence[str] = WAYS, layers: int | None = None) -> Outcome:
    """Judge one class; layers as of architecture."""
    if RUN in ways:
        return _run(name)
    outcome = Outcome(name)
    try:
        found = architecture(name, layers)
    except Exception as error:
        outcome.error = f"{type(error).__name__}: {str(error).strip().splitlines()[0][:100]}"
        return outcome
    verdicts: dict[object, list[str]] = {}
    for way in ways:
        choice = choose(found, way)
        effect = frozenset(choice.weights.items()), choice.skipped(found.model)
        if effect not in verdicts:
            verdicts[effect] = problems(found, choice) if choice.weights else []
        outcome.quantized[way] = len(choice.weights)
        outcome.problems[way] = verdicts[effect]
    return outcome


def _limited(name: str, ways: Sequence[str], layers: int | None) -> Outcome:
    def expired(*_: object) -> None:
        raise TimeoutError(f"longer than {_TIME_LIMIT} s")

    signal.signal(signal.SIGALRM, expired)
    signal.alarm(_TIME_LIMIT)
    try:
        return check(name, ways, layers)
    except Exception as error:
        return Outcome(name, problems={way: [f"{type(error).__name__}: {error}"] for way in ways})
    finally:
        signal.alarm(0)


def quiet() -> None:
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()


def outcomes(
    names: list[str], ways: Sequence[str], layers: int | None, jobs: int
) -> Iterator[Outcome]:
    """Check classes in `jobs` processes."""
    context = multiprocessing.get_context("spawn")
    with context.Pool(jobs, quiet, maxtasksperchild=100) as pool:
        yield from pool.imap_unordered(functools.partial(_limited, ways=ways, layers=layers), names)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("classes", nargs="*", metavar="CLASS", help="(default: all)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), metavar="N")
    parser.add_argument("--by", choices=WAYS, nargs="+", default=WAYS, help="(default: both)")
    parser.add_argument("--layers", type=int, metavar="N", help="at most N layers in a stack")
    parser.add_argument("--run", action="store_true", help="run each after quantize_model")
    args = parser.parse_args()
    ways = [RUN] if args.run else args.by
    failed = collections.Counter[str]()
    nothing = collections.Counter[str]()
    unbuilt = loaded = 0
    said, fails = ("not run dense", "do not run") if args.run else ("not built", "do not load")
    names = args.classes or class_names()
    for done, outcome in enumerate(outcomes(names, ways, args.layers, args.jobs), 1):
        if done % 50 == 0:
            print(f"{done} of {len(names)} classes", file=sys.stderr, flush=True)
        if outcome.error is not None:
            unbuilt += 1
            print(f"{outcome.name}: {said}: {outcome.error}", flush=True)
            continue
        loaded += 1
        for way in ways:
            nothing[way] += outcome.quantized.get(way) == 0
            failed[way] += bool(outcome.problems[way])
            for problem in outcome.problems[way][:3]:
                print(f"{outcome.name}: by {way}: {problem}", flush=True)
    print(f"transformers {transformers.__version__}: {loaded} classes judged, {unbuilt} not")
    for way in ways:
        print(f"by {way}: {failed[way]} {fails}, {nothing[way]} have nothing to quantize")
    return 1 if failed.total() else 0


if __name__ == "__main__":
    sys.exit(main())
