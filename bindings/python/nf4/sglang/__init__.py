"""A plugin for SGLang, which loads it by the entry point sglang.srt.plugins: linear layers in NF4
and FP4 run on libnf4 where a user asks for that.

    python -m sglang.launch_server --model-path model-nf4/ --quantization nf4

Nothing else imports this package. docs/vllm.md says what it serves.
"""

from __future__ import annotations

VERSIONS = ("0.5.23",)  # that were tested


def register() -> None:
    """Registers the quantization method "nf4" with SGLang. Where libnf4 cannot serve this SGLang,
    a warning says why, and SGLang runs as without it. May be called again."""
    import logging

    import sglang

    problem = f"it was tested with SGLang {', '.join(VERSIONS)}, not {sglang.__version__}"
    if sglang.__version__ in VERSIONS:
        try:
            import nf4.sglang.config  # noqa: F401  # registers itself

            return
        except Exception as error:  # such as libnf4.so that is missing, or a part of SGLang
            problem = f"{type(error).__name__}: {error}"
    logging.getLogger("sglang.nf4").warning("libnf4 does not serve SGLang: %s", problem)
