"""Checkpoints with experts in 4 bits: what nf4 quantize, save_pretrained and nf4.save write, and
what reads it."""

from __future__ import annotations

import json
import shutil

import nf4
import numpy as np
import pytest
import torch_cases

pytestmark = [pytest.mark.interop, pytest.mark.usefixtures("seeded", "in_process")]
torch_cases.require("torch", "transformers")

import nf4.torch  # noqa: E402
import torch  # noqa: E402
import transformers  # noqa: E402
from experts_cases import MODELS, dense_twin, gpt_oss, logits, qwen3  # noqa: E402
from nf4.checkpoint import Checkpoint, FormatError  # noqa: E402
from nf4.checkpoint.architecture import UnknownModel  # noqa: E402
from nf4.checkpoint.audit import audit  # noqa: E402
from nf4.checkpoint.convert import dequantize_checkpoint, quantize_checkpoint  # noqa: E402
from nf4.checkpoint.errors import OptionError  # noqa: E402
from nf4.checkpoint.quantize_plan import QuantizeOptions  # noqa: E402
from nf4.cli.inspect import inspect_checkpoint  # noqa: E402
from nf4.torch import NF4Experts, NF4Linear, quantize_model  # noqa: E402
from nf4.torch.distributed import empty_model, load_checkpoint  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402

EXPERTS = QuantizeOptions(experts=True)
STACK = "model.layers.0.mlp.experts.gate_up_proj"


def config_of(folder):
    return json.loads((folder / "config.json").read_text())


def quantized(folder, name="qwen3"):
    """A checkpoint of a quantized model, and that model."""
    model = MODELS[name]()
    quantize_model(model, experts=True)
    model.save_pretrained(folder)
    return model


def change(folder, made):
    """made: from the tensors to others."""
    file = folder / "model.safetensors"
    save_file(made(load_file(file)), file, metadata={"format": "pt"})


@pytest.mark.parametrize("name", MODELS)
def test_nf4_quantize_writes_what_save_pretrained_does(name, tmp_path):
    model = MODELS[name]()
    dense, expected, made = (tmp_path / each for each in ("dense", "expected", "made"))
    # Experts of a layer may be in several files.
    model.save_pretrained(dense, max_shard_size="100KB")
    assert len(list(dense.glob("*.safetensors"))) > 3
    replaced = quantize_model(model, experts=True)
    model.save_pretrained(expected)

    result = quantize_checkpoint(str(dense), str(made), EXPERTS)
    assert result.weights == len(replaced) == 12
    state = load_file(expected / "model.safetensors")
    found = {k: t for file in made.glob("*.safetensors") for k, t in load_file(file).items()}
    assert found.keys() == state.keys()
    for key, each in state.items():
        if "quant_state" in key:
            each, found[key] = (json.loads(bytes(t.tolist())) for t in (each, found[key]))
            assert each == found[key]
        else:
            assert torch.equal(found[key], each), key
    written = config_of(made)["quantization_config"]
    assert written == config_of(expected)["quantization_config"]
    assert written["quant_method"] == "nf4" and "load_in_4bit" not in written
    assert not any("experts" in each for each in written["llm_int8_skip_modules"])
    assert audit(str(made))[1] == audit(str(expected))[1] == []

    table = inspect_checkpoint(str(made), str(dense))
    rows = {row["name"]: row for row in table["tensors"]}
    (stack,) = [row for key, row in rows.items() if key.endswith("0.mlp.experts.down_proj.weight")
                or key.endswith("0.block_sparse_moe.experts.down_proj.weight")]  # fmt: skip
    assert stack["format"] == "nf4" and len(stack["shape"]) == 3
    assert 0.05 < stack["rms_relative_error"] < 0.12

    loaded = nf4.torch.load(made)
    assert sum(isinstance(each, NF4Experts) for each in loaded.modules()) == 4
    assert sum(isinstance(each, NF4Linear) for each in loaded.modules()) == 8
    assert torch.equal(logits(loaded), logits(model))
    loaded.save_pretrained(tmp_path / "again")
    assert load_file(tmp_path / "again" / "model.safetensors").keys() == state.keys()

    dequantize_checkpoint(str(made), str(tmp_path / "back"))
    back = type(model).from_pretrained(tmp_path / "back", dtype=torch.float32)
    torch.testing.assert_close(logits(back), logits(model), rtol=1e-4, atol=1e-5)


def test_inspect_compares_by_the_model(tmp_path, monkeypatch):
    """Of a transposed parameter that is square, nothing else tells the order."""
    model = gpt_oss(intermediate_size=64)
    model.save_pretrained(tmp_path / "dense")
    quantize_model(model, experts=True)
    model.save_pretrained(tmp_path / "made")
    for dense in (tmp_path / "dense", tmp_path / "dense" / "model.safetensors"):
        table = inspect_checkpoint(str(tmp_path / "made"), str(dense))
        assert table["totals"]["rms_relative_error"] < 0.12

    def unknown(request, name):
        raise UnknownModel("none")

    monkeypatch.setattr("nf4.checkpoint.architecture._run", unknown)
    with pytest.raises(FormatError, match="experts are compared by a model of transformers, not"):
        inspect_checkpoint(str(tmp_path / "made"), str(tmp_path / "dense"))


def test_layers_whose_experts_stay_dense(tmp_path):
    """Beside those in 4 bits they are saved as stacks; nf4 quantize copies them as they were."""
    model = qwen3()
    model.save_pretrained(tmp_path / "dense")
    options = {"experts": True, "skip": ("layers.1.mlp.experts",)}
    quantize_model(model, **options)
    model.save_pretrained(tmp_path / "saved")
    quantize_checkpoint(str(tmp_path / "dense"), str(tmp_path / "made"), QuantizeOptions(**options))
    for folder in (tmp_path / "saved", tmp_path / "made"):
        assert audit(str(folder))[1] == []
        assert torch.equal(logits(nf4.torch.load(folder)), logits(model))


def test_dtypes_and_options(tmp_path):
    model = qwen3().bfloat16()
    model.save_pretrained(tmp_path / "dense")
    options = QuantizeOptions("fp4", 128, nested=False, experts=True, storage="bfloat16")
    quantize_checkpoint(str(tmp_path / "dense"), str(tmp_path / "made"), options)
    loaded = nf4.torch.load(tmp_path / "made", device="cpu")
    stack = loaded.get_submodule(STACK)
    assert (stack.format, stack.blocksize, stack.nested_blocksize) == ("fp4", 128, 0)
    assert stack.dequantize().dtype == torch.bfloat16
    quantize_model(model, experts=True, format="fp4", blocksize=128, nested=False)
    assert torch.equal(stack.dequantize(), model.get_submodule(STACK).dequantize())


def test_numpy_round_trip(tmp_path):
    weight = np.random.default_rng(0).standard_normal((3, 8, 64), np.float32)
    tensors = {"experts.up.weight": nf4.quantize(weight), "bias": np.ones(3, np.float32)}
    nf4.save(tmp_path / "made", tensors)
    assert config_of(tmp_path / "made")["quantization_config"]["quant_method"] == "nf4"
    nf4.save(tmp_path / "made.safetensors", tensors)
    for path in (tmp_path / "made", tmp_path / "made.safetensors"):
        found = nf4.load(path)["experts.up.weight"]
        assert found.shape == (3, 8, 64)
        dense = nf4.dequantize(tensors["experts.up.weight"])
        assert np.array_equal(nf4.dequantize(found), dense)
        back = path.with_name(f"back-{path.name}")
        dequantize_checkpoint(str(path), str(back))
        assert np.array_equal(nf4.load(back)["experts.up.weight"], dense)


def test_a_stack_in_the_place_of_its_parameter(tmp_path):
    """As Unsloth keeps it: a Params4bit of three dimensions, without ".weight"."""
    model = quantized(tmp_path / "ours")
    shutil.copytree(tmp_path / "ours", tmp_path / "theirs")
    for part in ("gate_up_proj", "down_proj"):
        change(
            tmp_path / "theirs",
            lambda state, part=part: {
                key.replace(f"experts.{part}.weight", f"experts.{part}"): each
                for key, each in state.items()
            },
        )
    assert STACK in load_file(tmp_path / "theirs" / "model.safetensors")
    assert audit(str(tmp_path / "theirs"))[1] == []
    assert torch.equal(logits(nf4.torch.load(tmp_path / "theirs")), logits(model))


def test_blocks_along_the_outputs_are_refused(tmp_path):
    """Of a transposed parameter a stack in its place has blocks that no kernel reads."""
    quantized(tmp_path, "gpt-oss")
    change(
        tmp_path,
        lambda state: {
            key.replace("experts.down_proj.weight", "experts.down_proj"): each
            for key, each in state.items()
        },
    )
    with pytest.raises(FormatError, match="down_proj': its blocks are along the outputs"):
        nf4.torch.load(tmp_path)
    assert any("blocks are along the outputs" in each.reason for each in audit(str(tmp_path))[1])


def test_experts_that_the_model_has_not(tmp_path):
    quantized(tmp_path)
    other = NF4Experts.from_dense(torch.randn(5, 128, 64)).state_dict()
    change(tmp_path, lambda state: state | {f"{STACK}.{k}": each for k, each in other.items()})
    with pytest.raises(FormatError, match="its shape is .5, 128, 64., but .6, 128, 64. in the mod"):
        nf4.torch.load(tmp_path)
    assert any("another shape in the model" in each.reason for each in audit(str(tmp_path))[1])
    change(tmp_path, lambda state: {
        key.replace("gate_up_proj", "gate_proj"): each for key, each in state.items()
    })  # fmt: skip
    with pytest.raises(FormatError, match="the model has no experts"):
        nf4.torch.load(tmp_path)
    assert any("no experts of the model" in each.reason for each in audit(str(tmp_path))[1])


def test_an_expert_that_is_missing_stays_dense(tmp_path):
    """With all of its layer, whose stacks are computed together."""
    qwen3().save_pretrained(tmp_path / "dense")
    name = "model.layers.0.mlp.experts.3.up_proj.weight"
    change(tmp_path / "dense", lambda state: {k: t for k, t in state.items() if k != name})
    result = quantize_checkpoint(str(tmp_path / "dense"), str(tmp_path / "made"), EXPERTS)
    (warning,) = result.warnings
    assert f"2 stacks of experts stay dense, the first {STACK}: {name} is missing" in warning
    again = quantize_checkpoint(str(tmp_path / "made"), str(tmp_path / "again"), EXPERTS)
    assert (again.weights, again.warnings) == (0, result.warnings)  # not of those in 4 bits
    found = nf4.load(tmp_path / "made")
    assert {key for key, each in found.items() if len(each.shape) == 3} == {
        f"model.layers.1.mlp.experts.{part}_proj.weight" for part in ("gate_up", "down")
    }
    assert "model.layers.0.mlp.experts.0.up_proj.weight" in found


def test_one_stack_of_two_is_refused(tmp_path):
    model = quantized(tmp_path)
    dense = model.get_submodule(STACK).dequantize()
    change(tmp_path, lambda state: {
        key: each for key, each in state.items() if not key.startswith(f"{STACK}.weight")
    } | {STACK: dense})  # fmt: skip
    with pytest.raises(FormatError, match="gate_up_proj is not in 4 bits, as the other experts"):
        nf4.torch.load(tmp_path)
    reasons = [each.reason for each in audit(str(tmp_path))[1]]
    assert any("gate_up_proj, which is computed with it, is not in 4 bits" in r for r in reasons)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"blocksize": 4096, "skip": ("*gate_up_proj",)}, "both or neither"),
        ({"skip": ("*down_prj",)}, "no module matches"),
        ({"format": "int4"}, "experts is True"),
    ],
)
def test_options_that_are_refused(options, message, tmp_path):
    qwen3().save_pretrained(tmp_path / "dense")
    with pytest.raises(OptionError, match=message):
        quantize_checkpoint(
            str(tmp_path / "dense"),
            str(tmp_path / "made"),
            QuantizeOptions(experts=True, **options),
        )
    assert not (tmp_path / "made").exists()


def test_what_names_do_not_tell_is_refused(tmp_path):
    qwen3().save_pretrained(tmp_path)
    with pytest.raises(OptionError, match="by a model of transformers, not by tensor names"):
        quantize_checkpoint(
            str(tmp_path / "model.safetensors"), str(tmp_path / "made.safetensors"), EXPERTS
        )


def test_nan_in_an_expert_is_named(tmp_path):
    model = qwen3()
    model.model.layers[0].mlp.experts.gate_up_proj.data[5, 64 + 3, 4] = float("nan")
    model.save_pretrained(tmp_path / "dense", max_shard_size="100KB")
    name = "model.layers.0.mlp.experts.5.up_proj.weight"
    with Checkpoint(tmp_path / "dense") as dense:
        file = dense.owner[name].path
        assert (
            file != dense.owner[name.replace("experts.5", "experts.0").replace("up", "gate")].path
        )
    with pytest.raises(FormatError, match=f"{name}': NaN at element {3 * 64 + 4} ") as caught:
        quantize_checkpoint(str(tmp_path / "dense"), str(tmp_path / "made"), EXPERTS)
    assert caught.value.path == file
    assert not (tmp_path / "made").exists()


def test_transformers_saves_dense_models_as_before(tmp_path):
    """Of a model whose experts stay dense nothing changes."""
    model = qwen3()
    quantize_model(model)
    model.save_pretrained(tmp_path)
    assert config_of(tmp_path)["quantization_config"]["quant_method"] == "bitsandbytes"
    names = load_file(tmp_path / "model.safetensors").keys()
    assert "model.layers.0.mlp.experts.0.up_proj.weight" in names
    assert isinstance(model, transformers.PreTrainedModel)


def test_dense_experts_are_loaded_one_by_one(tmp_path):
    """From the matrices of a dense checkpoint into the stacks of a dense model on meta."""
    for name, make in MODELS.items():
        model = make()
        model.save_pretrained(tmp_path / name)
        found = empty_model(tmp_path / name)
        load_checkpoint(found, tmp_path / name)
        for key, each in model.state_dict().items():
            assert torch.equal(found.state_dict()[key], each), key
        assert torch.equal(logits(found), logits(model))


@pytest.mark.parametrize("name", MODELS)
def test_a_model_that_is_dense_again_is_saved_as_one(name, tmp_path):
    model = quantized(tmp_path / "quantized", name)
    expected = dense_twin(model).state_dict()
    replaced = nf4.torch.to_dense(model)
    assert len(replaced) == 12 and model.config._experts_implementation == "grouped_mm"
    assert model._weight_conversions is None
    assert not hasattr(model.config, "quantization_config")
    state = model.state_dict()
    assert all(torch.equal(state[key], each) for key, each in expected.items())
    model.save_pretrained(tmp_path / "dense")
    found = type(model).from_pretrained(tmp_path / "dense", dtype=torch.float32)
    assert torch.equal(logits(found), logits(model))


def test_a_model_that_is_dense_again_computes_experts_as_before(tmp_path):
    """By its own implementation, and saved by the conversions that it was loaded with."""
    qwen3().save_pretrained(tmp_path / "dense")
    how = {"experts_implementation": "batched_mm"}
    model = transformers.Qwen3MoeForCausalLM.from_pretrained(tmp_path / "dense", **how)
    conversions = model._weight_conversions
    for _ in range(2):
        quantize_model(model, experts=True)
        assert model.config._experts_implementation == "nf4"
        nf4.torch.to_dense(model)
        assert model.config._experts_implementation == "batched_mm"
        assert model._weight_conversions is conversions
