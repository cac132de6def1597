"""nf4 convert: integer weights between the layouts, bit for bit."""

from __future__ import annotations

import json

import checkpoint_helpers as helpers
import int4_checkpoints as models
import int4_oracle as oracle
import numpy as np
import pytest
from int4_checkpoints import CASES, LAYER, Case
from nf4.checkpoint import (
    OptionError,
    audit,
    convert_checkpoint,
    dequantize_checkpoint,
)
from nf4.cli import main


def _repacked(weight: oracle.Int4Arrays, to: str, symmetric: bool) -> oracle.Int4Arrays:
    """The weight in another layout, as the oracle packs it; ValueError where that has none."""
    by_row = weight.layout == "compressed-tensors"
    absent = symmetric and to == "compressed-tensors"
    zeros = oracle.zeros_of(weight)
    return oracle.pack(
        to,
        oracle.codes_of(weight),
        None if absent else zeros,
        weight.scales if by_row else weight.scales.T,
        weight.group_size,
        weight.g_idx,
    )


def _expected(case: Case, to: str) -> dict[str, np.ndarray] | None:
    """The tensors of the weights of a case in another layout; None if that cannot hold them."""
    found: dict[str, np.ndarray] = {}
    for module, weight in case.weights().items():
        try:
            found |= models.tensors(_repacked(weight, to, case.symmetric), module)
        except ValueError:
            return None
    return found


@pytest.mark.parametrize("shards", [1, 2])
@pytest.mark.parametrize("to", oracle.LAYOUTS)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_layout_to_every_other(case, to, shards, tmp_path, capsys):
    source, output = case.folder(tmp_path / "q", shards), tmp_path / "out"
    code = main(["convert", str(source), str(output), "--to", to])
    expected = _expected(case, to)
    if case.layout == to:
        assert code == 2 and f"it is in {to} already" in capsys.readouterr().err
    elif expected is None:
        assert code == 3 and f"cannot become {to}: " in capsys.readouterr().err
    if case.layout == to or expected is None:
        assert helpers.listing(tmp_path) == ["q"]
        return
    assert code == 0
    found = helpers.load_all(output)
    for name, array in expected.items():
        dtype = helpers.NUMPY_NAMES[array.dtype.name]
        assert found.pop(name) == (dtype, array.shape, array.tobytes()), name
    before = helpers.load_all(source)
    assert found == {name: before[name] for name in ("lm_head.weight", "model.embed_tokens.weight")}
    assert not any(f.severity == "fault" for f in audit(str(output))[1])


@pytest.mark.parametrize("case", CASES, ids=str)
def test_there_and_back_gives_the_same_bytes(case, tmp_path):
    """By way of each layout that holds the weights; the way back is of the same config.json."""
    source = case.folder(tmp_path / "q")
    ways = [to for to in oracle.LAYOUTS if to != case.layout and _expected(case, to) is not None]
    for to in ways:
        there, back = tmp_path / to, tmp_path / f"{to}-back"
        convert_checkpoint(str(source), str(there), to)
        convert_checkpoint(str(there), str(back), case.layout)
        assert helpers.load_all(back) == helpers.load_all(source)
        dequantize_checkpoint(str(there), str(tmp_path / f"{to}-dense"))
        dequantize_checkpoint(str(back), str(tmp_path / f"{to}-back-dense"))
        dense = helpers.load_all(tmp_path / f"{to}-dense")
        assert dense == helpers.load_all(tmp_path / f"{to}-back-dense")


def test_configurations_are_those_of_the_layouts(tmp_path):
    source = Case("compressed-tensors", 32).folder(tmp_path / "q")
    for to in ("gptq", "gptq_v2", "awq"):
        convert_checkpoint(str(source), str(tmp_path / to), to)
    gptq = {
        "bits": 4,
        "checkpoint_format": "gptq",
        "desc_act": False,
        "dynamic": {"-:^lm_head$": {}},
        "group_size": 32,
        "lm_head": False,
        "pack_dtype": "int32",
        "quant_method": "gptq",
        "sym": True,
    }
    assert helpers.stored_config(tmp_path / "gptq") == gptq
    assert helpers.stored_config(tmp_path / "gptq_v2") == gptq | {"checkpoint_format": "gptq_v2"}
    assert helpers.stored_config(tmp_path / "awq") == {
        "bits": 4,
        "group_size": 32,
        "modules_to_not_convert": ["lm_head"],
        "quant_method": "awq",
        "version": "gemm",
        "zero_point": True,
    }
    convert_checkpoint(str(tmp_path / "awq"), str(tmp_path / "back"), "compressed-tensors")
    back = helpers.stored_config(tmp_path / "back")
    assert back["config_groups"]["group_0"]["weights"]["symmetric"] is True
    assert back["ignore"] == ["lm_head"] and back["format"] == "pack-quantized"
    assert back["config_groups"]["group_0"]["weights"]["group_size"] == 32
    other = json.loads((tmp_path / "back" / "config.json").read_text())
    assert other["architectures"] == ["LlamaForCausalLM"]


def test_between_the_versions_of_gptq_the_rest_of_the_configuration_stays(tmp_path):
    more = {"damp_percent": 0.01, "format": "gptq", "meta": {"quantizer": ["gptqmodel:7.7.0"]}}
    source = Case("gptq").folder(tmp_path / "q", **more)
    convert_checkpoint(str(source), str(tmp_path / "out"), "gptq_v2")
    changed = {"checkpoint_format": "gptq_v2", "format": "gptq_v2"}
    assert helpers.stored_config(tmp_path / "out") == helpers.stored_config(source) | changed


def test_act_order_is_told_to_the_programs(tmp_path, capsys):
    source = Case("gptq", act_order=True).folder(tmp_path / "q")
    arguments = ["convert", str(source), str(tmp_path / "ct"), "--to", "compressed-tensors"]
    assert main(arguments) == 0
    assert "which the package compressed-tensors loads only up to 0.18" in capsys.readouterr().err
    weights = helpers.stored_config(tmp_path / "ct")["config_groups"]["group_0"]["weights"]
    assert weights["actorder"] == "group"
    convert_checkpoint(str(tmp_path / "ct"), str(tmp_path / "back"), "gptq_v2")
    assert helpers.stored_config(tmp_path / "back")["desc_act"] is True


def test_zero_points_that_borrow_are_told(tmp_path, capsys):
    for number, symmetric in enumerate((True, False)):
        source = Case("gptq_v2", symmetric=symmetric).folder(tmp_path / f"q{number}")
        assert main(["convert", str(source), str(tmp_path / f"{number}"), "--to", "gptq"]) == 0
        told = "there are zero points of 0, which borrow" in capsys.readouterr().err
        assert told != symmetric


def test_a_weight_without_act_order_beside_one_with_it_has_a_g_idx_too(tmp_path):
    first = models.tensors(Case("gptq").weights()[LAYER], "a")
    second = models.tensors(Case("gptq", act_order=True).weights()[LAYER], "b")
    source = models.write(tmp_path / "q", first | second, Case("gptq", act_order=True).config)
    convert_checkpoint(str(source), str(tmp_path / "out"), "compressed-tensors")
    found = helpers.load_all(tmp_path / "out")
    for module in "ab":
        assert found[f"{module}.weight_g_idx"][2] == (first | second)[f"{module}.g_idx"].tobytes()


def _group_sizes(layout: str) -> tuple[dict[str, np.ndarray], list[str]]:
    modules = [f"model.layers.{number}.q_proj" for number in range(3)]
    weights = [Case(layout, size).weights()[LAYER] for size in (32, 32, 64)]
    stored: dict[str, np.ndarray] = {}
    for module, weight in zip(modules, weights, strict=True):
        stored |= models.tensors(weight, module)
    return stored, modules


def test_several_group_sizes_are_groups_of_compressed_tensors_alone(tmp_path, capsys):
    stored, modules = _group_sizes("gptq")
    config = Case("gptq").config | {"dynamic": {r"+:.*\.2\..*": {"group_size": 64}}}
    source = models.write(tmp_path / "q", stored, config)
    convert_checkpoint(str(source), str(tmp_path / "ct"), "compressed-tensors")
    groups = helpers.stored_config(tmp_path / "ct")["config_groups"]
    assert [(g["targets"], g["weights"]["group_size"]) for g in groups.values()] == [
        (["Linear"], 32),
        ([modules[2]], 64),
    ]
    assert main(["verify", str(tmp_path / "ct")]) == 0
    capsys.readouterr()
    for path, to in ((source, "awq"), (tmp_path / "ct", "gptq")):
        assert main(["convert", str(path), str(tmp_path / "out"), "--to", to]) == 3
        stderr = capsys.readouterr().err
        assert f"cannot become {to}, which has one group size" in stderr and modules[2] in stderr
    assert helpers.listing(tmp_path) == ["ct", "q"]


def test_a_kv_cache_scheme_is_not_lost_in_silence(tmp_path, capsys):
    source = Case("compressed-tensors").folder(tmp_path / "q", kv_cache_scheme={"num_bits": 8})
    assert main(["convert", str(source), str(tmp_path / "out"), "--to", "awq"]) == 3
    assert "cannot become awq, which has no kv_cache_scheme" in capsys.readouterr().err
    assert helpers.listing(tmp_path) == ["q"]


def test_awq_entries_skip_no_module_whose_name_begins_alike(tmp_path):
    """vLLM looks for an entry within names: "mlp.gate" would also leave mlp.gate_proj dense."""
    module = "model.layers.0.mlp.gate"
    stored = models.tensors(Case("gptq").weights()[LAYER], f"{module}_proj")
    stored[f"{module}.weight"] = helpers.random_weight((4, 64), "float16")
    source = models.write(tmp_path / "q", stored, Case("gptq").config)
    convert_checkpoint(str(source), str(tmp_path / "out"), "awq")
    entries = helpers.stored_config(tmp_path / "out")["modules_to_not_convert"]
    assert entries == ["lm_head", r"model\.layers\.0\.mlp\.gate$"]
    assert main(["verify", str(tmp_path / "out")]) == 0


def test_what_described_the_source_is_not_copied(tmp_path, capsys):
    source = Case("gptq").folder(tmp_path / "q")
    for name in ("quantize_config.json", "quant_config.json", "tokenizer.json"):
        (source / name).write_text("{}")
    assert main(["convert", str(source), str(tmp_path / "out"), "--to", "awq"]) == 0
    assert "not copied: quant_config.json, quantize_config.json" in capsys.readouterr().err
    assert helpers.listing(tmp_path / "out") == [
        "config.json",
        "model.safetensors",
        "tokenizer.json",
    ]


def test_single_files(tmp_path, capsys):
    weight = Case("awq").weights()[LAYER]
    source = tmp_path / "awq.safetensors"
    source.write_bytes(helpers.file_bytes(models.tensors(weight), {"who": "me"}))
    arguments = ["convert", "--json", str(source), str(tmp_path / "out"), "--to", "gptq_v2"]
    assert main(arguments) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["layout"] == "gptq_v2" and report["weights"] == 1
    expected = models.tensors(_repacked(weight, "gptq_v2", True))
    found = helpers.load_all(tmp_path / "out")
    assert {name: data for name, (_, _, data) in found.items()} == {
        name: array.tobytes() for name, array in expected.items()
    }


@pytest.mark.parametrize("to", oracle.LAYOUTS)
def test_other_weights_are_refused(to, model, quantized, tmp_path, capsys):
    for path, what in ((model, "dense"), (quantized, "of bitsandbytes")):
        assert main(["convert", str(path), str(tmp_path / "out"), "--to", to]) == 3
        assert f"nothing to convert: its weights are {what}" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_broken_weights_are_refused_before_anything_is_written(tmp_path, capsys):
    stored = models.tensors(Case("gptq").weights()[LAYER])
    stored[f"{LAYER}.qzeros"] = stored[f"{LAYER}.qzeros"] + 0x11111111
    source = models.write(tmp_path / "q", stored, Case("gptq").config)
    assert main(["convert", str(source), str(tmp_path / "out"), "--to", "awq"]) == 3
    assert "checkpoint_format should be gptq_v2" in capsys.readouterr().err
    assert helpers.listing(tmp_path) == ["q"]


def test_the_layout_is_checked(tmp_path):
    source = Case("gptq").folder(tmp_path / "q")
    with pytest.raises(OptionError, match="layout is 'marlin'; expected gptq, gptq_v2, awq"):
        convert_checkpoint(str(source), str(tmp_path / "out"), "marlin")
