"""nf4.torch.load and empty_model of a folder that is not trusted: transformers gets nothing to
fetch or to run, and reads no file that was not checked."""

from __future__ import annotations

import copy
import json
import os
import warnings
from pathlib import Path

import nf4
import pytest
import torch_cases

pytestmark = [pytest.mark.interop, pytest.mark.usefixtures("seeded")]
torch_cases.require("torch", "transformers")

import huggingface_hub  # noqa: E402
import nf4.torch  # noqa: E402
import torch  # noqa: E402
import transformers  # noqa: E402
from experts_cases import qwen3  # noqa: E402
from int4_models import checkpoint  # noqa: E402
from nf4.checkpoint import FormatError  # noqa: E402
from nf4.checkpoint.model_config import model_config  # noqa: E402
from nf4.torch import quantize_model  # noqa: E402
from nf4.torch.distributed import empty_model, load_checkpoint  # noqa: E402
from safetensors.torch import save_file  # noqa: E402
from torch import nn  # noqa: E402
from transformers.integrations import hub_kernels  # noqa: E402

TOKENS = torch.arange(14).view(2, 7)


def _integers(folder: Path) -> None:
    checkpoint(folder, "gptq")


def _experts(folder: Path) -> None:
    model = qwen3()
    quantize_model(model, experts=True)
    model.save_pretrained(folder)


# Whatever builds a model of an untrusted folder.
WAYS = {
    "load, integers": (_integers, nf4.torch.load),
    "load, experts": (_experts, nf4.torch.load),
    "empty_model": (_integers, empty_model),
}


@pytest.fixture(params=WAYS)
def way(request, tmp_path):
    """A folder with a model, and what builds it."""
    made, load = WAYS[request.param]
    made(tmp_path / "m")
    return tmp_path / "m", load


@pytest.fixture
def fetched(monkeypatch) -> list[str]:
    """Lists what transformers' loader of kernels is asked for."""
    names: list[str] = []

    def load(name: str, *_: object, **__: object) -> None:
        names.append(name)
        raise AssertionError(f"{name} is fetched")

    for function in ("get_kernel", "load_and_register_attn_kernel", "lazy_load_kernel"):
        monkeypatch.setattr(hub_kernels, function, load)
    return names


def _change(folder: Path, name: str = "config.json", **changes: object) -> None:
    path = folder / name
    found = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(found | changes))


@pytest.mark.parametrize("key", ["attn_implementation", "_attn_implementation",
                                 "experts_implementation", "_experts_implementation"])  # fmt: skip
def test_a_kernel_is_refused_by_name(key, way, fetched):
    folder, load = way
    _change(folder, **{key: "someone/kernel@revision"})
    with pytest.raises(FormatError) as caught:
        load(folder)
    assert (
        f"config.json: transformers cannot build the model: {key} is 'someone/kernel@revision'"
        in (str(caught.value))
    )
    assert fetched == []


@pytest.mark.parametrize(
    "changes",
    [
        {"architectures": ["NoSuchModel"]},
        {"architectures": None},
        {"model_type": "bert"},
        {"hidden_size": "wide"},
        {"sub_configs": {"text_config": 1}},
        {"rope_parameters": 5},
        {"dtype": "load"},
        {"transformers_weights": "other.safetensors"},
    ],
    ids=str,
)
def test_a_configuration_that_is_none_is_refused(changes, way):
    folder, load = way
    _change(folder, **changes)
    with pytest.raises(FormatError, match=r"config.json: transformers cannot build the model"):
        load(folder)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (
            {"architectures": ["DetrForObjectDetection"], "model_type": "detr",
             "backbone": "evil/repo", "use_timm_backbone": False, "use_pretrained_backbone": True},
            "backbone is 'evil/repo', a model of its own",
        ),
        (
            {"architectures": ["LlamaForCausalLM"], "model_type": "llama",
             "attn_implementation": "someone/kernel"},
            "attn_implementation is 'someone/kernel', which names code to fetch",
        ),
        (
            {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 7},
            "hidden size",
        ),
        (
            {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": -1},
            "negative dimension",
        ),
    ],
    ids=["backbone", "kernel", "no configuration", "no model"],
)  # fmt: skip
def test_load_checkpoint_asks_no_model_that_fetches(config, reason, tmp_path, fetched, monkeypatch):
    """The tensor's name is not the model's, so that the model of config.json is asked for it."""

    def downloaded(*_: object, **__: object) -> None:
        raise AssertionError("something is fetched")

    monkeypatch.setattr(huggingface_hub.file_download, "hf_hub_download", downloaded)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", downloaded)
    monkeypatch.setattr("transformers.utils.hub.hf_hub_download", downloaded)
    save_file({"other.weight": torch.ones(4, 4)}, tmp_path / "model.safetensors")
    _change(tmp_path, **config)
    with pytest.raises(FormatError, match="transformers cannot build the model: ") as caught:
        load_checkpoint(nn.Linear(4, 4), tmp_path)
    assert reason in str(caught.value)
    assert fetched == []


KEYS = {"to_dict": 1, "from_dict": 2, "self": 3, "fields": 4, "__class__": 5, "__deepcopy__": 6,
        "dequantize": 7}  # fmt: skip


@pytest.mark.parametrize("made", [_integers, _experts])
def test_keys_of_the_quantization_replace_nothing(made, tmp_path):
    made(tmp_path / "m")
    stored = json.loads((tmp_path / "m" / "config.json").read_text())["quantization_config"]
    _change(tmp_path / "m", quantization_config=stored | KEYS)
    model = nf4.torch.load(tmp_path / "m")
    assert dict(model.config.quantization_config) == stored | KEYS
    assert not getattr(model.config.quantization_config, "dequantize", False)
    model.save_pretrained(tmp_path / "again")
    again = json.loads((tmp_path / "again" / "config.json").read_text())["quantization_config"]
    assert again == stored | KEYS
    copy.deepcopy(model.config)


def test_from_pretrained_with_such_keys(tmp_path):
    _experts(tmp_path / "m")
    stored = json.loads((tmp_path / "m" / "config.json").read_text())["quantization_config"]
    _change(tmp_path / "m", quantization_config=stored | KEYS)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "m")
    assert model.config.quantization_config.to_dict() == stored | KEYS


@pytest.mark.parametrize("value", ["nope", "int4", ["x"], {"a": 1}, 5], ids=str)
def test_a_compute_dtype_that_is_none_is_refused(value, tmp_path):
    model = qwen3()
    quantize_model(model)
    model.save_pretrained(tmp_path)
    stored = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    _change(tmp_path, quantization_config=stored | {"bnb_4bit_compute_dtype": value})
    for options in ({}, {"compute_dtype": "fp32"}):
        with pytest.raises(FormatError, match=r"config.json: bnb_4bit_compute_dtype is .*float32"):
            empty_model(tmp_path, **options)


def test_from_pretrained_names_a_compute_dtype_that_is_none(tmp_path):
    _experts(tmp_path)
    stored = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    _change(tmp_path, quantization_config=stored | {"bnb_4bit_compute_dtype": ["x"]})
    with pytest.raises(ValueError, match="bnb_4bit_compute_dtype is "):
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path)


def test_known_implementations_load(way, fetched):
    folder, load = way
    for given, expected in (("eager", "eager"), ("flash_attention_2", "sdpa")):
        _change(folder, attn_implementation=given)
        assert load(folder).config._attn_implementation == expected
    assert fetched == []


def test_an_adapter_is_not_applied(way):
    folder, load = way
    (folder / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    with pytest.raises(FormatError, match=r"adapter_config.json: this is an adapter of PEFT"):
        load(folder)
    for name in os.listdir(folder):
        if not name.startswith("adapter"):
            (folder / name).unlink()
    with pytest.raises(FormatError, match=r"call peft.PeftModel.from_pretrained\(model, folder\)"):
        load(folder)


def test_no_other_file_is_read(way, monkeypatch):
    """Pickles, code, other weights, and a distributed checkpoint, which from_pretrained takes."""
    folder, load = way
    expected = load(folder)
    for name in ("pytorch_model.bin", "training_args.bin", "spk_dict.pt", ".metadata", "model.py",
                 "configuration_llama.py", "chat_template.jinja", "__0_0.distcp"):  # fmt: skip
        (folder / name).write_bytes(b"\x80\x04never read")
    os.mkdir(folder / "custom_generate")
    (folder / "custom_generate" / "generate.py").write_text("raise SystemExit('it is run')")
    os.mkfifo(folder / "processor_config.json")

    def unpickled(*_: object, **__: object) -> None:
        raise AssertionError("something is unpickled")

    monkeypatch.setattr(torch, "load", unpickled)
    loaded = load(folder)
    assert loaded.config.to_dict() == expected.config.to_dict()
    assert loaded.config.name_or_path == str(folder)
    assert loaded.name_or_path == str(folder)


def test_generation_config(way):
    folder, load = way
    _change(folder, "generation_config.json", max_new_tokens=7, eos_token_id=[3, 4])
    found = load(folder).generation_config
    assert (found.max_new_tokens, found.eos_token_id) == (7, [3, 4])
    (folder / "generation_config.json").unlink()
    os.mkfifo(folder / "generation_config.json")
    with pytest.warns(UserWarning, match=r"generation_config.json is not used: .* a FIFO, not"):
        load(folder)
    (folder / "generation_config.json").unlink()
    _change(folder, eos_token_id=5)  # as models before generation_config.json have it
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        assert load(folder).generation_config.eos_token_id == 5


def test_dtype_of_the_weights_where_config_has_none(tmp_path):
    checkpoint(tmp_path / "m", "gptq")
    _change(tmp_path / "m", dtype=None)
    assert nf4.torch.load(tmp_path / "m").get_input_embeddings().weight.dtype == torch.float32


def test_configurations_of_transformers_pass_whole():
    """Every class, with its first values, passes as it is without the filter."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    compared = 0
    for model_type in CONFIG_MAPPING:
        try:
            kind = CONFIG_MAPPING[model_type]
            stored = json.loads(kind().to_json_string(use_diff=False))
            expected = kind.from_dict(kind._decode_special_floats(stored))
        except Exception:  # noqa: BLE001  what needs other packages, or has no first values
            continue
        passed = model_config(type("Kind", (), {"config_class": kind}), stored)
        assert passed.to_dict() == expected.to_dict(), model_type
        compared += 1
    assert compared > 500
