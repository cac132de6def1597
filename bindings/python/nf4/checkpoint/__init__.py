"""Reads, checks and writes checkpoints: safetensors files with 4-bit weights of bitsandbytes, GPTQ,
AWQ or compressed-tensors.

    from nf4.checkpoint import Checkpoint, survey
    with Checkpoint("model/") as checkpoint:
        for name, weight in survey(checkpoint).weights.items():
            array = nf4.dequantize(weight.load(checkpoint))

quantize_checkpoint, dequantize_checkpoint and convert_checkpoint (between the layouts of integer
weights) convert files or directories. audit finds faults. Anything that breaks a format raises a
FormatError that names the file, the tensor and the reason. numpy and safetensors suffice. If torch
and transformers are installed, they decide which layers become 4-bit.
"""

from nf4.checkpoint.audit import Finding, audit
from nf4.checkpoint.bnb import State
from nf4.checkpoint.convert import dequantize_checkpoint, quantize_checkpoint
from nf4.checkpoint.difference import ErrorStatistics, error_statistics
from nf4.checkpoint.errors import FormatError, OptionError, OutputRefused
from nf4.checkpoint.kinds import survey
from nf4.checkpoint.quantize_plan import QuantizeOptions
from nf4.checkpoint.repack import convert_checkpoint
from nf4.checkpoint.source import Checkpoint
from nf4.checkpoint.steps import Result
from nf4.checkpoint.weights import Survey, Weight

__all__ = [
    "Checkpoint",
    "ErrorStatistics",
    "Finding",
    "FormatError",
    "OptionError",
    "OutputRefused",
    "QuantizeOptions",
    "Result",
    "State",
    "Survey",
    "Weight",
    "audit",
    "convert_checkpoint",
    "dequantize_checkpoint",
    "error_statistics",
    "quantize_checkpoint",
    "survey",
]
