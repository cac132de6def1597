"""nf4 verify of integer weights: scales, zero points, g_idx, config.json."""

from __future__ import annotations

import checkpoint_helpers as helpers
import int4_checkpoints as models
import int4_oracle as oracle
import numpy as np
import pytest
from int4_checkpoints import LAYER, Case
from nf4.checkpoint import audit

Tensors = dict[str, np.ndarray]


def _with_scale(case: Case, value: float) -> Tensors:
    stored = models.tensors(case.weights()[LAYER])
    name = f"{LAYER}.{models.names(case.layout)['scales']}"
    scales = stored[name].copy()
    scales[1, 1] = value
    return stored | {name: scales}


@pytest.mark.parametrize(
    ("value", "severity", "phrase"),
    [
        (np.nan, "fault", "scales: 1 of 32 are NaN"),
        (np.inf, "fault", "scales: 1 of 32 are infinite"),
        (0.0, "warning", "scales: 1 of 32 are 0"),
        (-1.0, "warning", "scales: 1 of 32 are negative"),
    ],
)
@pytest.mark.parametrize("layout", oracle.LAYOUTS)
def test_verify_judges_scales(layout, value, severity, phrase, tmp_path):
    source = models.write(tmp_path / "q", _with_scale(Case(layout), value), Case(layout).config)
    (finding,) = audit(str(source))[1]
    assert finding.severity == severity and finding.tensor == f"{LAYER}.weight"
    assert finding.reason.startswith(phrase)


def test_verify_warns_where_zero_points_cannot_tell_gptq_from_gptq_v2(tmp_path):
    for layout in ("gptq", "gptq_v2"):
        source = Case(layout, symmetric=False).folder(tmp_path / layout)
        assert models.findings("fault", source) == []
        warning = models.findings("warning", source)[0]
        assert "cannot tell gptq from gptq_v2" in warning and layout in warning
    assert models.findings("warning", Case("gptq").folder(tmp_path / "symmetric")) == []


def test_verify_suspects_the_other_version_where_config_does_not_say_symmetric(tmp_path):
    case = Case("gptq_v2")
    stored = models.tensors(case.weights()[LAYER])
    config = {**case.config, "checkpoint_format": "gptq", "sym": False}
    source = models.write(tmp_path / "q", stored, config)
    assert any(
        "look like those of a symmetric weight in gptq_v2" in w
        for w in models.findings("warning", source)
    )


def test_verify_warns_of_zero_points_that_programs_read_differently(tmp_path):
    for layout, expected in (("gptq", True), ("gptq_v2", False)):
        source = Case(layout, symmetric=False).folder(tmp_path / layout)
        found = [
            w for w in models.findings("warning", source) if "zero points are 0, which borrow" in w
        ]
        assert bool(found) == expected


def test_verify_warns_of_a_g_idx_that_config_denies(tmp_path):
    source = Case("gptq", act_order=True).folder(tmp_path / "q", desc_act=False)
    assert models.findings("fault", source) == []
    assert any("no act order" in warning for warning in models.findings("warning", source))


@pytest.mark.parametrize("layout", oracle.LAYOUTS)
def test_verify_compares_the_configuration_with_the_weights(layout, tmp_path):
    case = Case(layout)
    stored = models.tensors(case.weights()[LAYER])
    missing = models.write(tmp_path / "missing", stored, None)
    assert "it has 4-bit weights, but no quantization_config" in models.findings("fault", missing)
    dense = models.write(tmp_path / "dense", helpers.dense_tensors("float16"), case.config)
    assert models.findings("fault", dense) == ["it has a quantization_config, but no 4-bit weights"]
    if layout in ("awq", "compressed-tensors"):
        key = "modules_to_not_convert" if layout == "awq" else "ignore"
        listed = models.write(tmp_path / "listed", stored, case.config | {key: [LAYER]})
        assert models.findings("fault", listed) == [
            f"{key} has '{LAYER}', which leaves the 4-bit {LAYER} dense"
        ]


def test_verify_warns_of_dense_layers_that_compressed_tensors_would_compress(tmp_path):
    """Unless a pattern may name them, which is not run."""
    case = Case("compressed-tensors")
    stored = models.tensors(case.weights()[LAYER])
    stored["model.layers.0.gate.weight"] = helpers.random_weight((4, 64), "float16")
    lacking = ["ignore lacks lm_head, whose weight is dense"]
    lacking.append("ignore lacks model.layers.0.gate, whose weight is dense")
    for number, (ignore, warnings) in enumerate(
        [
            ([], lacking),
            (["lm_head"], lacking[1:]),
            (["lm_head", "model.layers.0.gate"], []),
            (["re:.*gate", "lm_head"], []),
        ]
    ):
        source = models.write(tmp_path / f"{number}", stored, case.config | {"ignore": ignore})
        assert (
            models.findings("warning", source) == warnings
            and models.findings("fault", source) == []
        )
