"""Checks a 4-bit checkpoint: its files and its values."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator

import numpy as np

from nf4.checkpoint.dtypes import FILE_TO_NF4, NUMPY
from nf4.checkpoint.errors import FormatError
from nf4.checkpoint.kinds import (
    KINDS,
    Kind,
    Problems,
    Settings,
    doubts,
    method_problem,
    settings_of,
    survey,
)
from nf4.checkpoint.leftovers import strangers, without_place
from nf4.checkpoint.model_files import config_problems
from nf4.checkpoint.quantization import config_path, quantization
from nf4.checkpoint.rules import choose_rules, replaced_dense
from nf4.checkpoint.scales import count_problem, scale_byte_problems, scale_problems
from nf4.checkpoint.source import Checkpoint
from nf4.checkpoint.stacks import is_stack
from nf4.checkpoint.steps import nonfinite
from nf4.checkpoint.weights import Survey, Weight
from nf4.info import scale_code
from nf4.tensor import QuantizedTensor


@dataclasses.dataclass(frozen=True)
class Finding:
    """One result of verify. severity: "fault", or "warning" for what is unusual but well defined.
    tensor: None if it is about a file."""

    severity: str
    path: str
    tensor: str | None
    reason: str


@dataclasses.dataclass(frozen=True)
class Report:
    """The result of verify. survey: the tensors; empty if they cannot be parsed. checked_by: what
    determined the layers that transformers loads in 4 bits; empty if nothing did."""

    survey: Survey
    findings: list[Finding]
    checked_by: str = ""


def _decoded_scales(weight: QuantizedTensor) -> np.ndarray:
    """float32 [blocks], as the kernels compute them (nf4.h, THE ARITHMETIC)."""
    outer = np.repeat(weight.nested_absmax, weight.nested_blocksize)[: weight.absmax.size]
    with np.errstate(all="ignore"):
        return weight.nested_code[weight.absmax] * outer + weight.nested_offset


def value_problems(weight: QuantizedTensor) -> list[tuple[str, str]]:
    """(severity, problem) for each fault in the values of a weight."""
    if weight.scale_bytes:
        return list(scale_byte_problems(weight, "absmax", "nested_absmax"))
    found: list[tuple[str, str]] = []
    if weight.codebook is not None:
        found.append(("fault", f"quant_map: not the codebook of {weight.format}"))
    if not weight.nested:
        return [*found, *scale_problems(weight.absmax, "absmax")]
    found += scale_problems(weight.nested_absmax, "nested_absmax")
    if not np.isfinite(weight.nested_code).all():
        found.append(("fault", "nested_quant_map: not finite"))
    elif not np.array_equal(weight.nested_code, scale_code()):
        found.append(("warning", "nested_quant_map: not the one of bitsandbytes"))
    if all(severity == "warning" for severity, _ in found):
        # Rounding in the second quantization can take a block of zeros slightly below 0.
        found += scale_problems(_decoded_scales(weight), "decoded scales", negative="warning")
    return found


def _value_problems(weight: Weight, checkpoint: Checkpoint) -> Problems:
    for kind in KINDS:
        if isinstance(weight, kind.weight):
            return kind.value_problems(weight, checkpoint)
    return value_problems(weight.load(checkpoint))


def _config_problems(checkpoint: Checkpoint, found: Survey) -> Problems:
    settings = settings_of(checkpoint)
    kinds = {type(weight) for weight in found.weights.values()}
    for kind in KINDS:
        if isinstance(settings, kind.settings) or (settings is None and kind.weight in kinds):
            return _problems_of(kind, checkpoint, settings, found)
    return config_problems(checkpoint, found)


def _problems_of(
    kind: Kind, checkpoint: Checkpoint, settings: Settings | None, found: Survey
) -> Problems:
    own = [each for each in found.weights.values() if isinstance(each, kind.weight)]
    if settings is None:
        if checkpoint.directory is not None and checkpoint.config:
            yield "fault", "it has 4-bit weights, but no quantization_config"
        else:
            yield from (("warning", each) for each in doubts(checkpoint, found))
        return
    others = len(found.weights) - len(own)
    if others:
        method = settings.method
        yield "fault", f"the model is quantized by {method!r}, but {others} weights are not"
    if own:
        yield from kind.config_problems(checkpoint, settings, found, [each.module for each in own])
    else:
        yield "fault", "it has a quantization_config, but no 4-bit weights"


def _fault(error: FormatError) -> Finding:
    return Finding("fault", error.path, error.tensor, error.reason)


@contextlib.contextmanager
def _faults_in(findings: list[Finding]) -> Iterator[None]:
    """Append a FormatError to `findings`."""
    try:
        yield
    except FormatError as error:
        findings.append(_fault(error))


def audit(path: str) -> tuple[Survey, list[Finding]]:
    """Returns all faults of a checkpoint, and its tensors (none if it cannot be parsed). Raises
    OSError if it cannot be read.

    If torch and transformers are installed, a child process may build the model that config.json
    names, without weights. This takes seconds.
    """
    report = audit_report(path)
    return report.survey, report.findings


def audit_report(path: str) -> Report:
    """Like audit. The report also says what determined the layers."""
    faults: list[FormatError] = []
    checked_by = ""
    try:
        with Checkpoint(path, faults) as checkpoint:
            found = survey(checkpoint)
            findings = [_fault(error) for error in _errors(checkpoint, found, faults)]
            if not findings:
                config = config_path(checkpoint)
                with _faults_in(findings):
                    for severity, problem in _config_problems(checkpoint, found):
                        findings.append(Finding(severity, config, None, problem))
                model_findings, checked_by = _model_findings(checkpoint, found)
                findings += model_findings
            for name, weight in found.weights.items():
                path = checkpoint.owner[weight.packed.name].path
                for severity, problem in _value_problems(weight, checkpoint):
                    findings.append(Finding(severity, path, name, problem))
            findings += _fp8_findings(checkpoint, found)
            findings += _dense_findings(checkpoint, found)
            with _faults_in(findings):
                checkpoint.check_unchanged()
    except FormatError as error:
        return Report(Survey(), [_fault(fault) for fault in [*faults, error]])
    return Report(found, findings, checked_by)


def _errors(checkpoint: Checkpoint, found: Survey, faults: list[FormatError]) -> list[FormatError]:
    """Lists the errors of a checkpoint that was opened with `faults`."""
    problem = method_problem(checkpoint)
    if problem is not None:
        return [*faults, problem]
    unread = [each for each in found.unread if each not in found.faults]
    errors = [*faults, *found.faults, *unread]
    return errors or strangers(checkpoint, found)


def _fp8_findings(checkpoint: Checkpoint, found: Survey) -> Iterator[Finding]:
    """Faults in the scales of weights in FP8, and NaN among their codes."""
    for name, weight in found.fp8.items():
        part = weight.scales.name.rpartition(".")[2]
        scales = weight.read_scales(checkpoint).reshape(-1)
        is_nan = (weight.read_codes(checkpoint).reshape(-1) & 0x7F) == 0x7F
        for severity, problem in (
            *scale_problems(scales, part, negative="warning"),
            *count_problem("warning", is_nan, "are NaN", "weight"),
        ):
            yield Finding(severity, weight.path, name, problem)


def _dense_findings(checkpoint: Checkpoint, found: Survey) -> Iterator[Finding]:
    """NaN and Inf in dense tensors: warnings, because masks may contain them."""
    for name, info in found.dense.items():
        file = checkpoint.owner[name]
        for offset, piece in file.pieces(info) if info.dtype in FILE_TO_NF4 else ():
            values = np.frombuffer(piece, NUMPY[info.dtype])
            problem = nonfinite(values, info.dtype, offset // values.itemsize)
            if problem:
                yield Finding("warning", file.path, name, problem)
                break


def _model_findings(checkpoint: Checkpoint, found: Survey) -> tuple[list[Finding], str]:
    """Finds 4-bit weights that transformers does not load, and dense weights where it expects 4-bit
    ones. Also returns Report.checked_by. Findings are faults if they follow from the model's
    modules, and warnings if only from names."""
    said = quantization(checkpoint)
    if not found.weights or said is None or settings_of(checkpoint):
        # Other libraries than transformers load these weights too. None is asked.
        return [], ""
    rules, checked_by = choose_rules(checkpoint.config, found)
    severity = "warning" if rules.model is None else "fault"
    findings: list[Finding] = []
    for name, weight in found.weights.items():
        by = "transformers"
        if is_stack(weight):
            by = "nf4.torch.load"
            reason = None if rules.model is None else rules.model.stack_reason(name, weight.shape)
        else:
            reason = rules.not_loadable(name, weight.shape)
        if reason is not None:
            problem = f"{by} does not load it: {reason}"
            findings.append(Finding(severity, checkpoint.owner[name].path, name, problem))
    if rules.model is not None:
        findings += map(_fault, without_place(checkpoint, found, rules.model))
        config = config_path(checkpoint)
        for problem in rules.model.absent_experts():
            findings.append(Finding("fault", checkpoint.path, None, problem))
        for module in replaced_dense(rules.model, found, said.config.get("llm_int8_skip_modules")):
            problem = f"llm_int8_skip_modules lacks {module}, whose weight is dense"
            findings.append(Finding("fault", config, None, problem))
    return findings, checked_by
