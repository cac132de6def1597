"""nf4.torch.load of MXFP4 and NVFP4: layers, experts, gradients, state_dicts, refusals."""

from __future__ import annotations

import dataclasses
import json
import warnings
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import e2m1_models as models  # noqa: E402
import nf4  # noqa: E402
import nf4.torch  # noqa: E402
from e2m1_checkpoints import CASES, Case  # noqa: E402
from nf4.checkpoint import (  # noqa: E402
    FormatError,
    convert_checkpoint,
    dequantize_checkpoint,
)
from nf4.torch import NF4Experts, NF4Linear  # noqa: E402
from safetensors.torch import load_file  # noqa: E402

# DeepSeek-V4's checkpoints have layers in FP8 beside the experts; test_gpt_oss.py has gpt-oss.
LINEAR = [case for case in CASES if case.name not in ("gpt-oss", "deepseek")]
NVFP4 = next(case for case in LINEAR if case.name == "modelopt" and case.blocksize == 16)
pytestmark = pytest.mark.usefixtures("in_process")


def _dense(folder: Path) -> transformers.PreTrainedModel:
    """The model that transformers makes of the dequantized checkpoint, in fp32."""
    made = folder.with_name("dense")
    dequantize_checkpoint(str(folder), str(made), dtype="fp32")
    return transformers.AutoModelForCausalLM.from_pretrained(made, dtype=torch.float32)


def _tokens() -> torch.Tensor:
    return torch.randint(100, (2, 9), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("case", LINEAR, ids=str)
def test_a_model_computes_as_its_dequantized_one(case, tmp_path):
    folder = models.write(models.llama(), case, tmp_path / "q")
    model = nf4.torch.load(folder, dtype="fp32")
    layers = [each for each in model.modules() if isinstance(each, NF4Linear)]
    assert len(layers) == 14 and {each.format for each in layers} == {case.format}
    expected = models.gradients(_dense(folder), _tokens())
    for found, wanted in zip(models.gradients(model, _tokens()), expected, strict=True):
        assert models.distance(found, wanted) < 2e-6


@pytest.mark.parametrize("case", LINEAR, ids=str)
def test_experts_of_which_a_checkpoint_has_a_matrix_each(case, tmp_path):
    """Gate and up have a global scale each, which the stack keeps."""
    folder = models.write(models.qwen3_moe(), case, tmp_path / "q")
    model = nf4.torch.load(folder, dtype="fp32")
    stacks = [each for each in model.modules() if isinstance(each, NF4Experts)]
    assert len(stacks) == 4
    stack = model.model.layers[0].mlp.experts.gate_up_proj
    assert stack.spec.shape == (4, 192, 64)
    if case.format == "nvfp4":
        assert stack.nested_blocksize == 96 and len(stack.nested_absmax.unique()) == 8
    dense = _moe_of_matrices(folder)
    for found, wanted in zip(
        models.gradients(model, _tokens()), models.gradients(dense, _tokens()), strict=True
    ):
        assert models.distance(found, wanted) < 2e-6
    before = stack.dequantize("fp32")
    stack.requantize(before * 2)
    assert models.distance(stack.dequantize("fp32"), before * 2) < 0.05
    if case.format == "nvfp4":
        assert stack.nested_blocksize == 96 and len(stack.nested_absmax.unique()) == 8
    with pytest.raises(nf4.InvalidArgument, match=r"experts.*to_dense"):
        model.save_pretrained(tmp_path / "s")
    with pytest.raises(FormatError, match=r"experts\.0\.\w+_proj.*cannot become nf4.*--experts"):
        convert_checkpoint(str(folder), str(tmp_path / "nf4"), "nf4")


def _moe_of_matrices(folder: Path) -> transformers.PreTrainedModel:
    made = folder.with_name("dense")
    dequantize_checkpoint(str(folder), str(made), dtype="fp32")
    return transformers.Qwen3MoeForCausalLM.from_pretrained(made, dtype=torch.float32)


def _bytes(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def _same_files(one: Path, other: Path) -> None:
    stored, again = (load_file(each / "model.safetensors") for each in (one, other))
    assert stored.keys() == again.keys()
    for name, tensor in stored.items():
        assert (tensor.dtype, tensor.shape) == (again[name].dtype, again[name].shape), name
        assert _bytes(tensor) == _bytes(again[name]), name


@pytest.mark.parametrize("case", LINEAR, ids=str)
def test_save_pretrained_writes_the_checkpoint_again(case, tmp_path):
    folder = models.write(models.llama(), case, tmp_path / "q")
    nf4.torch.load(folder).save_pretrained(tmp_path / "again")
    _same_files(folder, tmp_path / "again")
    config = json.loads((tmp_path / "again" / "config.json").read_text())
    assert config["quantization_config"] == case.config
    nf4.torch.load(tmp_path / "again")


def _layer(case: Case) -> NF4Linear:
    arrays = case.arrays()
    of_all = None if arrays.of_all is None else torch.tensor([float(arrays.of_all)])
    return NF4Linear.from_quantized(nf4.QuantizedTensor(
        packed=torch.from_numpy(arrays.packed), absmax=torch.from_numpy(arrays.scales),
        nested_absmax=of_all, format=case.format, blocksize=case.blocksize, shape=case.shape,
        scale_rule="divisor" if case.divides else None, dtype="bf16",
    ))  # fmt: skip


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("case", LINEAR, ids=str)
def test_state_dict_round_trip(case, assign):
    layer, (rows, cols) = _layer(case), case.shape
    state = layer.state_dict()
    other = NF4Linear(cols, rows, bias=False, format="nf4")
    other.load_state_dict(state, assign=assign)
    assert (other.format, other.blocksize, other.scale_rule) == (
        layer.format, layer.blocksize, layer.scale_rule
    )  # fmt: skip
    again = other.state_dict()
    assert state.keys() == again.keys()
    assert all(torch.equal(state[key], again[key]) for key in state)
    assert torch.equal(other.dequantize("fp32"), layer.dequantize("fp32"))
    x = torch.randn(3, cols)
    assert torch.equal(other(x), layer(x))


@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
@pytest.mark.parametrize("case", LINEAR, ids=str)
def test_layers_and_their_gradients(case, dtype):
    layer = _layer(case)
    dense = layer.dequantize("fp32")
    assert dense.numpy().tobytes() == case.arrays().dense("fp32", case.divides).tobytes()
    torch.manual_seed(0)
    x = torch.randn(5, case.shape[1]).to(getattr(torch, models.TORCH[dtype])).requires_grad_()
    y = layer(x)
    dy = torch.randn_like(y)
    y.backward(dy)
    tolerance = {"fp32": 2e-6, "fp16": 1e-3, "bf16": 8e-3}[dtype]
    assert models.distance(y, x.detach().double() @ dense.double().T) < tolerance
    assert models.distance(x.grad, dy.double() @ dense.double()) < tolerance


@pytest.mark.parametrize("case", LINEAR, ids=str)
def test_compiled_layers(case):
    """A graph has the scale rule in the number of the format."""
    layer = _layer(case)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    x = torch.randn(5, case.shape[1], requires_grad=True)
    y, expected = compiled(x), layer(x)
    assert torch.equal(y, expected)
    (found,) = torch.autograd.grad(y.sum(), x)
    (wanted,) = torch.autograd.grad(expected.sum(), x)
    assert torch.equal(found, wanted)


@pytest.mark.parametrize("case", LINEAR, ids=str)
def test_operators(case):
    q = _layer(case).quantized
    x = torch.randn(2, 3, case.shape[1])
    dense = nf4.torch.dequantize(q, "fp32")
    assert models.distance(nf4.torch.linear(x, q), x @ dense.T) < 2e-6
    torch.library.opcheck(
        torch.ops.nf4.linear.default,
        (x, None, q.packed, q.absmax, q.nested_absmax, None, None, None, list(q.shape),
         "nvfp4:divisor" if case.divides else case.format, q.blocksize, 0),
        test_utils=("test_schema", "test_faketensor"),
    )  # fmt: skip


@pytest.mark.parametrize("case", LINEAR, ids=str)
def test_a_layer_that_was_quantized_again_is_saved(case, tmp_path):
    model = nf4.torch.load(models.write(models.llama(), case, tmp_path / "q"))
    layer = model.model.layers[0].self_attn.q_proj
    wanted = torch.randn(layer.spec.shape, generator=torch.Generator().manual_seed(0))
    layer.requantize(wanted)
    assert (layer.format, layer.blocksize) == (case.format, case.blocksize)
    assert models.distance(layer.dequantize("fp32"), wanted) < 0.12
    model.save_pretrained(tmp_path / "again")
    again = nf4.torch.load(tmp_path / "again").model.layers[0].self_attn.q_proj
    assert torch.equal(again.dequantize("fp32"), layer.dequantize("fp32"))


def _saved(model: transformers.PreTrainedModel, folder: Path) -> tuple[dict, list[str]]:
    """The tensors that save_pretrained writes, and what it says of global scales."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        model.save_pretrained(folder)
    found = [text for each in said if "global scales" in (text := str(each.message))]
    return load_file(folder / "model.safetensors"), found


@pytest.mark.parametrize("layout", ["compressed-tensors", "modelopt"])
@pytest.mark.parametrize("factor", [0.5, 1.0, 1.3, 5.0, 40.0])
def test_fused_layers_get_one_global_scale_again(layout, factor, tmp_path):
    """As after an adapter is merged into k_proj. The numbers of all layers stay."""
    model = models.llama()
    nf4.torch.quantize_model(model, format="nvfp4", layout=layout)
    attention = model.model.layers[0].self_attn
    attention.k_proj.requantize(factor * attention.k_proj.dequantize("fp32"))
    layers = {name: getattr(attention, name) for name in ("q_proj", "k_proj", "v_proj")}
    expected = {name: layer.dequantize("fp32") for name, layer in layers.items()}
    stored, said = _saved(model, tmp_path)
    name = {"compressed-tensors": "weight_global_scale", "modelopt": "weight_scale_2"}[layout]
    scales = [stored[f"model.layers.0.self_attn.{each}.{name}"].view(()) for each in layers]
    assert not said and len(set(map(float, scales))) == 1
    again = nf4.torch.load(tmp_path).model.layers[0].self_attn
    for name, dense in expected.items():
        assert torch.equal(getattr(again, name).dequantize("fp32"), dense)
        assert torch.equal(layers[name].dequantize("fp32"), dense)  # the model is as it was


def test_fused_layers_that_cannot_share_a_global_scale_are_named(tmp_path):
    model = models.llama()
    nf4.torch.quantize_model(model, format="nvfp4")
    attention = model.model.layers[0].self_attn
    assert _saved(model, tmp_path / "equal")[1] == []
    scale = attention.k_proj.nested_absmax
    for factor in (1.5, 2.0**-20):  # no power of two, and more than the scales of blocks can take
        attention.k_proj.nested_absmax = scale * factor
        stored, said = _saved(model, tmp_path / str(factor))
        assert len(said) == 1
        assert "layers.0.self_attn.q_proj.weight, model.layers.0.self_attn.k_proj" in said[0]
        name = "model.layers.0.self_attn.k_proj.weight_global_scale"
        assert float(stored[name]) == float(scale * factor)


@pytest.mark.parametrize("rule", ["factor", "divisor"])
def test_a_global_scale_is_kept_while_it_fits(rule):
    linear = torch.nn.Linear(64, 6, bias=False)
    layer = NF4Linear.from_linear(linear, format="nvfp4", scale_rule=rule)
    before, dense = layer.quantized, layer.dequantize("fp32")
    layer.requantize(dense)
    assert torch.equal(layer.nested_absmax, before.nested_absmax)
    assert torch.equal(layer.dequantize("fp32"), dense)
    for exponent, steps in ((-60, -60), (-7, -7), (-6, 0), (-1, 0), (1, 1), (60, 60)):
        layer.requantize(dense)
        layer.requantize(dense * 2.0**exponent)
        ratio = layer.nested_absmax / before.nested_absmax
        assert float(ratio if rule == "factor" else 1 / ratio) == 2.0**steps, exponent
        assert models.distance(layer.dequantize("fp32"), dense * 2.0**exponent) < 0.05
    layer.requantize(torch.zeros_like(dense))
    assert torch.equal(layer.dequantize("fp32"), torch.zeros_like(dense))


@pytest.mark.parametrize("rule", ["factor", "divisor"])
@pytest.mark.parametrize("scale", [0.0, -1.0, 1e-45, 1e-38, 1e-37, 1e37, 3e38, np.inf, np.nan])
def test_a_global_scale_out_of_reach_is_replaced(rule, scale):
    torch.manual_seed(0)
    layer = NF4Linear.from_linear(torch.nn.Linear(64, 6), format="nvfp4", scale_rule=rule)
    for largest in (1e-30, 1.0, 1e30):
        dense = torch.randn(6, 64) * largest
        layer.nested_absmax.fill_(scale)
        layer.requantize(dense)
        assert models.distance(layer.dequantize("fp32"), dense) < 0.15


def test_global_scales_of_experts_may_have_any_shape():
    torch.manual_seed(0)
    weight = torch.randn(3, 8, 64)
    made = nf4.torch.quantize(weight, format="nvfp4", nested_blocksize=8)
    made = dataclasses.replace(made, nested_absmax=made.nested_absmax.view(3, 1))
    layer = NF4Experts.from_quantized(made)
    factors = torch.tensor([1.0, 5.0, 0.3]).view(3, 1, 1)
    layer.requantize(weight * factors)
    assert torch.equal(layer.nested_absmax / made.nested_absmax, torch.tensor([[1], [8], [1]]))
    assert models.distance(layer.dequantize("fp32"), weight * factors) < 0.15


def test_to_dense(tmp_path):
    model = nf4.torch.load(models.write(models.llama(), NVFP4, tmp_path / "q"))
    layer = model.model.layers[0].self_attn.q_proj
    expected = layer.dequantize("fp32")
    names = nf4.torch.to_dense(model)
    assert len(names) == 14
    assert torch.equal(model.model.layers[0].self_attn.q_proj.weight.float(), expected.float())
    assert not hasattr(model.config, "quantization_config")


RULES = [
    ("mxfp4", None),
    ("mxfp4", "even"),
    ("mxfp4", "ceil"),
    ("nvfp4", None),
    ("nvfp4", "divisor"),
]


@pytest.mark.parametrize(("format", "rule"), RULES)
def test_quantize_is_that_of_the_core(format, rule):
    dense = torch.randn(6, 64, generator=torch.Generator().manual_seed(0))
    expected = nf4.quantize(dense, format=format, scale_rule=rule)
    options = {"format": format, "scale_rule": rule}
    linear, stack = torch.nn.Linear(64, 6, bias=False), dense.view(2, 3, 64)
    linear.weight.data = dense
    compiled = torch.compile(
        lambda x: nf4.torch.quantize(x, **options).absmax, backend="aot_eager", fullgraph=True
    )
    assert torch.equal(compiled(dense), expected.absmax)
    for made in (
        nf4.torch.quantize(dense, **options),
        NF4Linear.from_linear(linear, **options).quantized,
        NF4Experts.from_dense(stack, **options).quantized,
    ):
        assert (made.format, made.blocksize, made.nested_blocksize) == (
            expected.format, expected.blocksize, 0
        )  # fmt: skip
        for part in ("packed", "absmax", "nested_absmax"):
            ours, theirs = getattr(made, part), getattr(expected, part)
            assert (ours is None) == (theirs is None)
            assert ours is None or torch.equal(ours.view(-1), theirs.view(-1))
    rows = 3 if format == "nvfp4" else 0
    code = format if rule is None else f"{format}:{rule}"
    size = expected.blocksize
    torch.library.opcheck(torch.ops.nf4.quantize.default, (dense, None, code, size, rows))


def test_what_quantize_refuses():
    dense = torch.randn(4, 64)
    for options, said in (
        ({"format": "mxfp4", "scale_rule": "divisor"}, "scale_rule is 'divisor'"),
        ({"format": "nf4", "scale_rule": "even"}, "scale_rule is 'even'; expected None"),
        ({"format": "mxfp4", "blocksize": 64}, "blocksize is 64; expected 32"),
        ({"format": "mxfp4", "nested_blocksize": 256}, "nested_blocksize is 256; expected 0"),
        ({"format": "nvfp4", "blocksize": 64}, "blocksize is 64; expected 16 or 32"),
        ({"format": "e2m1"}, "format is 'e2m1'; expected"),
    ):
        with pytest.raises(nf4.InvalidArgument, match=said):
            nf4.torch.quantize(dense, **options)
