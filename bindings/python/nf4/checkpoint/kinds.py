"""Which kind of 4-bit weights a checkpoint has, by its config.json and the names of its tensors."""

from __future__ import annotations

import os

from nf4.checkpoint import bnb
from nf4.checkpoint.errors import FormatError
from nf4.checkpoint.int4 import add_integers
from nf4.checkpoint.int4_config import METHODS, Settings
from nf4.checkpoint.source import CONFIG_NAME, Checkpoint
from nf4.checkpoint.weights import Survey


def config_path(checkpoint: Checkpoint) -> str:
    """Of a single file, which has none, the file's."""
    directory = checkpoint.directory
    return checkpoint.path if directory is None else os.path.join(directory, CONFIG_NAME)


def integer_settings(checkpoint: Checkpoint) -> Settings | None:
    """What config.json says of integer weights; None if it does not say that there are any.
    FormatError for weights that are not read, such as those of 8 bits."""
    config = checkpoint.config.get("quantization_config")
    name = config.get("quant_method") if isinstance(config, dict) else None
    method = METHODS.get(str(name))
    if config is None or method is None:
        return None
    try:
        return method.parse(config)
    except ValueError as error:
        reason = f"the model is quantized by {name!r}: {error}"
        raise FormatError(config_path(checkpoint), reason) from None


def survey(checkpoint: Checkpoint) -> Survey:
    """Find the 4-bit weights of a checkpoint. Reads only what tells their shapes. FormatError if
    its quantization_config is of integers that are not read."""
    settings = integer_settings(checkpoint)
    found = bnb.survey(checkpoint)
    if settings is not None or checkpoint.config.get("quantization_config") is None:
        add_integers(found, checkpoint, settings)
    return found
