"""A plugin for vLLM, which loads it by the entry point vllm.general_plugins: checkpoints in 4 bits
of bitsandbytes, and dense ones that are quantized while they load, run on libnf4.

    vllm serve model-nf4/                    # quantized by bitsandbytes or `nf4 quantize`
    vllm serve model/ --quantization nf4     # dense
    NF4_VLLM=0 vllm serve model-nf4/         # without libnf4

Nothing else imports this package. docs/vllm.md says what it serves.
"""

from __future__ import annotations

import os

SWITCH = "NF4_VLLM"
# The versions that were tested: the first, and the first that is too new.
VERSIONS = ((0, 32), (0, 33))


def switched_off() -> bool:
    """Whether the environment asks vLLM to do without libnf4."""
    return os.environ.get(SWITCH, "").strip().lower() in ("0", "false", "off", "no")


def version_problem(version: str) -> str | None:
    """Says why libnf4 does not serve this version of vLLM; None if it does."""
    numbers = tuple(int(part) for part in version.split("+")[0].split(".")[:2] if part.isdecimal())
    first, end = VERSIONS
    if first <= numbers < end:
        return None
    tested, beyond = (".".join(map(str, each)) for each in VERSIONS)
    return f"it was tested with vLLM {tested} up to but not including {beyond}, not {version}"


def register() -> None:
    """Registers the quantization method "nf4" with vLLM. Where libnf4 cannot serve this vLLM, a
    warning says why, and vLLM runs as without it. May be called again."""
    if switched_off():
        return
    import vllm
    from vllm.logger import init_logger

    logger = init_logger("vllm.nf4")
    problem = version_problem(vllm.__version__)
    if problem is None:
        try:
            from nf4.vllm.config import register_config

            register_config()
            return
        except Exception as error:  # such as libnf4.so that is missing, or a part of vLLM
            problem = f"{type(error).__name__}: {error}"
    logger.warning("libnf4 does not serve vLLM: %s; %s=0 turns this off", problem, SWITCH)
