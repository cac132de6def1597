"""nf4.load and nf4.save: a checkpoint as its tensors by name, and back."""

from __future__ import annotations

import importlib.util
import json
import os
from pathlib import Path

import ml_dtypes
import nf4
import numpy as np
import pytest
from checkpoint_helpers import random_weight
from nf4.checkpoint import FormatError, OutputRefused, QuantizeOptions, quantize_checkpoint
from nf4.cli import main

CONFIG = {"hidden_size": 128, "dtype": "bfloat16"}  # of no model that transformers would build
NAMES = ("model.layers.0.mlp.up_proj.weight", "model.layers.1.mlp.up_proj.weight")


def same(found, expected) -> bool:
    """Equal to the bit, in the same layout."""
    if isinstance(expected, nf4.Weight):
        parts = [(getattr(found, p.name), getattr(expected, p.name)) for p in expected.parts()]
        settings = ("shape", "dtype", "group_size", "layout", "format", "blocksize")
        alike = all(getattr(found, n, None) == getattr(expected, n, None) for n in settings)
        return alike and type(found) is type(expected) and all(same(*pair) for pair in parts)
    found, expected = np.asarray(found), np.asarray(expected)
    return found.dtype == expected.dtype and found.tobytes() == expected.tobytes()


def weights(kind: str, **options) -> dict:
    dense = [random_weight((64, 128), "bfloat16", seed) for seed in range(2)]
    if kind == "int4":
        made = [nf4.quantize_int4(each, **options) for each in dense]
    else:
        made = [nf4.quantize(each, format=kind, **options) for each in dense]
    return dict(zip(NAMES, made, strict=True))


def others() -> dict:
    return {
        "model.embed_tokens.weight": random_weight((10, 128), "bfloat16"),
        "model.norm.weight": np.ones(128, np.float32),
        "steps": np.array(7, np.int64),
        "flags": np.array([True, False]),
        "halves": np.arange(4, dtype=np.float16),
        "bytes": np.arange(6, dtype=ml_dtypes.float8_e4m3fn),
        "empty": np.zeros((0, 3), np.float64),
    }


KINDS = {
    "nf4": ("nf4", {}),
    "flat": ("nf4", {"nested_blocksize": 0, "blocksize": 32}),
    "fp4": ("fp4", {"blocksize": 256}),
    "gptq": ("int4", {"layout": "gptq", "group_size": 32, "symmetric": False}),
    "gptq_v2": ("int4", {"layout": "gptq_v2", "group_size": 64}),
    "awq": ("int4", {"layout": "awq", "group_size": 32}),
    "row": ("int4", {"layout": "awq", "group_size": -1, "symmetric": False}),
    "compressed-tensors": ("int4", {"layout": "compressed-tensors", "group_size": 32}),
    "with zeros": (
        "int4", {"layout": "compressed-tensors", "group_size": 32, "symmetric": False}
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_a_directory_comes_back(tmp_path, kind):
    format, options = KINDS[kind]
    given = weights(format, **options) | others()
    nf4.save(tmp_path / "model", given, config=CONFIG)
    found = nf4.load(tmp_path / "model")
    assert found.keys() == given.keys()
    for name, each in given.items():
        assert same(found[name], each), name
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    assert config["quantization_config"] and config["hidden_size"] == 128
    for command in ("inspect", "verify"):
        assert main([command, str(tmp_path / "model")]) == 0
    nf4.save(tmp_path / "again", found, config=config)
    for name in ("model.safetensors", "config.json"):
        first, second = (tmp_path / folder / name for folder in ("model", "again"))
        assert first.read_bytes() == second.read_bytes()


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "gptq_v2"])
def test_a_file_comes_back(tmp_path, kind):
    format, options = KINDS[kind]
    given, path = weights(format, **options) | others(), tmp_path / "model.safetensors"
    nf4.save(path, given)
    found = nf4.load(path)
    assert all(same(found[name], each) for name, each in given.items())
    assert os.listdir(tmp_path) == [path.name]


def test_without_a_config_the_directory_says_the_layout(tmp_path):
    given = weights("int4", layout="gptq_v2", group_size=32)
    nf4.save(tmp_path / "model", given)
    assert all(same(each, given[name]) for name, each in nf4.load(tmp_path / "model").items())


def test_act_order_and_weights_without_zeros(tmp_path):
    name, weight = next(iter(weights("int4", layout="gptq", group_size=32).items()))
    g_idx = np.random.default_rng(0).permutation(np.arange(128) // 32).astype(np.int32)
    given = {"layout": "gptq", "shape": (64, 128), "group_size": 32}
    ordered = nf4.Int4Tensor(**given, packed=weight.packed, scales=weight.scales, g_idx=g_idx)
    nf4.save(tmp_path / "model", {name: ordered})
    found = nf4.load(tmp_path / "model")[name]
    assert same(found.g_idx, g_idx) and same(found.zeros, weight.zeros)
    assert same(nf4.dequantize(found), nf4.dequantize(ordered))


def test_of_what_the_command_made(tmp_path):
    dense = {name: random_weight((64, 128), "float32", 3) for name in NAMES}
    nf4.save(tmp_path / "dense", dense, config=CONFIG)
    quantize_checkpoint(tmp_path / "dense", tmp_path / "expected", QuantizeOptions())
    made = {name: nf4.quantize(array) for name, array in dense.items()}
    nf4.save(tmp_path / "found", made)
    found, expected = (tmp_path / n / "model.safetensors" for n in ("found", "expected"))
    read = nf4.load(expected)
    assert all(same(read[name], each) for name, each in nf4.load(found).items())


def test_tensors_of_torch(tmp_path):
    torch = pytest.importorskip("torch")
    dense = torch.randn(64, 128, dtype=torch.bfloat16)
    q = nf4.quantize(dense)
    given = {
        "a.weight": q,
        "b.weight": dense.T,  # not contiguous
        "c": torch.arange(3),
        "d": torch.zeros(2, dtype=torch.float8_e4m3fn),
        "e": torch.nn.Parameter(torch.ones(3)),
        "f": torch.tensor([1.0]).half(),
    }
    nf4.save(tmp_path / "m.safetensors", given)
    found = nf4.load(tmp_path / "m.safetensors")
    assert same(nf4.dequantize(found["a.weight"]), nf4.dequantize(q).view(torch.int16).numpy().view(
        ml_dtypes.bfloat16))  # fmt: skip
    assert found["b.weight"].shape == (128, 64)
    assert same(found["b.weight"].view(np.int16), dense.T.contiguous().view(torch.int16).numpy())
    assert same(found["e"], np.ones(3, np.float32)) and found["d"].dtype == ml_dtypes.float8_e4m3fn


def test_lazy_signs_of_torch_are_written(tmp_path):
    torch = pytest.importorskip("torch")
    given = {dtype: torch._neg_view(torch.ones(2, dtype=dtype))
             for dtype in (torch.float32, torch.bfloat16)}  # fmt: skip
    nf4.save(tmp_path / "m.safetensors", {str(dtype): each for dtype, each in given.items()})
    for found in nf4.load(tmp_path / "m.safetensors").values():
        assert found.astype(np.float32).tolist() == [-1, -1]
    nf4.save(tmp_path / "c.safetensors", {"a": torch.tensor([1 + 2j]).conj()})
    assert nf4.load(tmp_path / "c.safetensors")["a"] == 1 - 2j


UNREADABLE = {
    "a, of float8_e4m3fnuz, cannot": lambda torch: torch.zeros(2, dtype=torch.float8_e4m3fnuz),
    "a, of float8_e8m0fnu, cannot": lambda torch: torch.zeros(2).to(torch.float8_e8m0fnu),
    "a, of quint8, cannot": lambda torch: torch.quantize_per_tensor(
        torch.zeros(2), 1.0, 0, torch.quint8
    ),
    "a is of layout torch.sparse_coo": lambda torch: torch.zeros(2).to_sparse(),
    "a is on meta": lambda torch: torch.zeros(2, device="meta"),
}


@pytest.mark.parametrize("said", UNREADABLE)
def test_tensors_of_torch_that_numpy_cannot_hold_are_named(tmp_path, said):
    torch = pytest.importorskip("torch")
    with pytest.raises(nf4.InvalidArgument, match=said):
        nf4.save(tmp_path / "m.safetensors", {"a": UNREADABLE[said](torch)})
    assert os.listdir(tmp_path) == []


def test_a_config_that_is_not_json_is_refused(tmp_path):
    circular: dict = {}
    circular["x"] = circular
    for config in ({"x": object()}, {(1, 2): 3}, circular):
        with pytest.raises(nf4.InvalidArgument, match="config cannot be written as JSON"):
            nf4.save(tmp_path / "model", others(), config=config)
    with pytest.raises(nf4.InvalidArgument, match="config is .*; expected a dict"):
        nf4.save(tmp_path / "model", others(), config=[1])
    assert os.listdir(tmp_path) == []


def reordered() -> nf4.Int4Tensor:
    plain = next(iter(weights("int4", layout="gptq", group_size=32).values()))
    g_idx = np.repeat(np.arange(4, dtype=np.int32), 32)[::-1].copy()
    return nf4.reorder(nf4.Int4Tensor(
        layout="gptq", shape=plain.shape, group_size=32, packed=plain.packed, scales=plain.scales,
        zeros=plain.zeros, g_idx=g_idx,
    ))  # fmt: skip


REFUSED = {
    "a.weight is reordered": lambda: {"a.weight": reordered()},
    'expected a name with ".weight"': lambda: {
        "a": weights("int4", layout="awq", group_size=32)[NAMES[0]]
    },
    "of integers and others": lambda: {
        **weights("int4", layout="awq", group_size=32), "a.weight": weights("nf4")[NAMES[0]],
    },
    "of several layouts": lambda: {
        "a.weight": weights("int4", layout="awq", group_size=32)[NAMES[0]],
        "b.weight": weights("int4", layout="gptq", group_size=32)[NAMES[0]],
    },
    "b.weight cannot become awq, which has one group size": lambda: {
        "a.weight": weights("int4", layout="awq", group_size=32)[NAMES[0]],
        "b.weight": weights("int4", layout="awq", group_size=64)[NAMES[0]],
    },
    "a is of type str": lambda: {"a": "tensor"},
    "a is of complex128": lambda: {"a": np.ones(2, complex)},
    "a: absmax is of uint8; expected fp32": lambda: {
        "a": nf4.QuantizedTensor(packed=np.zeros(32, np.uint8), absmax=np.zeros(1, np.uint8),
                                 shape=(1, 64))
    },
    "a would not be read: it has absmax": lambda: {"a.absmax": np.zeros(3), "a": np.zeros(3)},
    "tensors has the key 1; expected names": lambda: {1: np.zeros(2)},
    "half of a surrogate pair": lambda: {"a\ud800": np.zeros(2)},
    "tensors has '__metadata__', which": lambda: {"__metadata__": np.zeros(2)},
    "a and a.absmax would both be stored as 'a.absmax'": lambda: {
        "a": nf4.quantize(np.ones(64, np.float32)), "a.absmax": np.zeros(2),
    },
    "a.qweight and a.weight would both be stored as 'a.qweight'": lambda: {
        "a.qweight": np.zeros(2),
        "a.weight": weights("int4", layout="awq", group_size=32)[NAMES[0]],
    },
    "a.weight has a codebook of its own": lambda: {
        "a.weight": nf4.quantize(np.ones(64, np.float32), codebook=np.arange(16, dtype=np.float32))
    },
}  # fmt: skip


@pytest.mark.parametrize("said", REFUSED)
def test_what_no_checkpoint_holds_is_refused(tmp_path, said):
    with pytest.raises(nf4.InvalidArgument, match=said):
        nf4.save(tmp_path / "model", REFUSED[said]())
    assert os.listdir(tmp_path) == []


def test_what_a_file_cannot_say_is_refused(tmp_path):
    with pytest.raises(nf4.InvalidArgument, match="another layout or group size; expected a direc"):
        nf4.save(tmp_path / "m.safetensors", weights("int4", layout="gptq_v2", group_size=32))
    with pytest.raises(nf4.InvalidArgument, match="config is given"):
        nf4.save(tmp_path / "m.safetensors", {}, config={})
    assert os.listdir(tmp_path) == []


def test_nothing_is_replaced_unasked(tmp_path):
    for path in (tmp_path / "model", tmp_path / "m.safetensors"):
        nf4.save(path, weights("nf4"))
        before = nf4.load(path)
        with pytest.raises(OutputRefused, match="exists already"):
            nf4.save(path, others())
        assert nf4.load(path).keys() == before.keys()
        nf4.save(path, others(), replace=True)
        assert nf4.load(path).keys() == others().keys()


def test_a_fault_is_named(tmp_path):
    given = weights("nf4")
    nf4.save(tmp_path / "m.safetensors", given)
    data = (tmp_path / "m.safetensors").read_bytes()
    (tmp_path / "short.safetensors").write_bytes(data[:-1])
    with pytest.raises(FormatError, match="short.safetensors"):
        nf4.load(tmp_path / "short.safetensors")
    with pytest.raises(OSError):
        nf4.load(tmp_path / "absent")


@pytest.mark.interop
def test_transformers_loads_what_was_saved(tmp_path: Path):
    for package in ("torch", "transformers", "accelerate", "bitsandbytes"):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    import transformers

    config = transformers.LlamaConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, vocab_size=50, architectures=["LlamaForCausalLM"],
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config)
    tensors = {
        name: nf4.quantize(tensor) if name.endswith("_proj.weight") else tensor
        for name, tensor in model.state_dict().items()
    }
    nf4.save(tmp_path / "model", tensors, config=config.to_dict())
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    import bitsandbytes as bnb

    kinds = [type(m) for m in loaded.modules() if isinstance(m, bnb.nn.Linear4bit)]
    assert len(kinds) == 7
