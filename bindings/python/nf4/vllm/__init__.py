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
VERSIONS = ("0.32",)  # that were tested


def version_problem(version: str) -> str | None:
    """Says why libnf4 does not serve this version of vLLM; None if it does."""
    if ".".join(version.split("+")[0].split(".")[:2]) in VERSIONS:
        return None
    return f"it was tested with vLLM {', '.join(VERSIONS)}, not {version}"


def register() -> None:
    """Registers the quantization method "nf4" with vLLM. Where libnf4 cannot serve this vLLM, a
    warning says why, and vLLM runs as without it. May be called again."""
    if os.environ.get(SWITCH, "").strip().lower() in ("0", "false", "off", "no"):
        return
    import vllm
    from vllm.logger import init_logger

    logger = init_logger("vllm.nf4")
    problem = version_problem(vllm.__version__)
    if problem is None:
        try:
            import nf4.vllm.config
            import nf4.vllm.integers  # noqa: F401  # they register themselves

            return
        except Exception as error:  # such as libnf4.so that is missing, or a part of vLLM
            problem = f"{type(error).__name__}: {error}"
    logger.warning("libnf4 does not serve vLLM: %s; %s=0 turns this off", problem, SWITCH)
