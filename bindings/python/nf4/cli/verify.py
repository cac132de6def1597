"""nf4 verify: finds the faults of a 4-bit checkpoint."""

from __future__ import annotations

import argparse
import dataclasses
from typing import Any

from nf4.checkpoint.audit import Finding, audit_report
from nf4.checkpoint.errors import printable
from nf4.cli.console import add_command, print_json, show
from nf4.cli.exits import Exit

_DESCRIPTION = """\
Check a checkpoint and list every fault: in the structure of its files, in the sizes of each
4-bit weight's parts, in quant_state, in codebooks and scales (NaN, infinite, negative), in
the zero points and g_idx of integers, in a config.json with which transformers would not
load the weights, in two places that disagree on how the checkpoint is quantized, and in
tensors beside 4-bit weights that nothing reads. The exit code is 1 if there is a fault.
Warnings, such as subnormal scales or NaN in dense tensors, do not change it.

For nf4 and fp4, and for tensors with unknown names, a child process builds the model without
its weights if torch and transformers 5.0 or later are installed. This takes seconds. The
model's modules then decide which weights transformers loads. Otherwise the names of the
tensors decide, and their findings are only warnings. The report says which.
"""


def add_parser(commands: Any) -> None:
    parser = add_command(commands, "verify", run, "check a 4-bit checkpoint", _DESCRIPTION)
    parser.add_argument("path", metavar="PATH", help="a .safetensors file or a model directory")


def _line(finding: Finding) -> str:
    where = f"{finding.path}: {finding.tensor}" if finding.tensor is not None else finding.path
    return printable(f"{finding.severity}: {where}: {finding.reason}")


def verify_checkpoint(path: str) -> dict[str, Any]:
    """Returns what `nf4 verify --json` prints: {"path", "ok", "weights", "dense_tensors",
    "fp8_weights", "checked_by", "findings"}. Raises OSError if the checkpoint cannot be read."""
    report = audit_report(path)
    return {
        "path": path,
        "ok": not any(finding.severity == "fault" for finding in report.findings),
        "weights": len(report.survey.weights),
        "dense_tensors": len(report.survey.dense),
        "fp8_weights": len(report.survey.fp8),
        "checked_by": report.checked_by,
        "findings": [dataclasses.asdict(finding) for finding in report.findings],
    }


def report_lines(document: dict[str, Any]) -> list[str]:
    """Returns the report that `nf4 verify` prints."""
    findings = [Finding(**finding) for finding in document["findings"]]
    faults = sum(finding.severity == "fault" for finding in findings)
    warnings = len(findings) - faults
    verdict = "ok" if document["ok"] else f"{faults} fault{'s' if faults > 1 else ''}"
    if warnings:
        verdict += f", {warnings} warning{'s' if warnings > 1 else ''}"
    counts = f"{document['weights']} 4-bit weights, {document['dense_tensors']} dense tensors"
    if document["fp8_weights"]:
        counts += f", {document['fp8_weights']} weights in FP8"
    lines = [*map(_line, findings)]
    if document["checked_by"]:
        lines.append(printable(f"layers checked by {document['checked_by']}"))
    return [*lines, printable(f"{document['path']}: {verdict} ({counts})")]


def run(args: argparse.Namespace) -> int:
    document = verify_checkpoint(args.path)
    if args.json:
        print_json(document)
    else:
        show("\n".join(report_lines(document)))
    return Exit.OK if document["ok"] else Exit.FAULT
