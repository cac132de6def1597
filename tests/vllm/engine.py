"""Runs vLLM engines on PROMPTS, one after another, and prints what each said as a line of JSON.

python engine.py '{"model": "folder", ...}' ... takes LLM's arguments for each. "lora": the folder
of an adapter. "reload": load the weights a second time before the prompts run. "flat": scales
become fp32, as on CPUs; otherwise they stay nested, as on GPUs. An engine that cannot start is the
line {"error": ...}.
"""

from __future__ import annotations

import gc
import json
import sys
from typing import Any

from models import NEW_TOKENS, PROMPTS
from nf4.vllm import loading
from vllm import LLM, SamplingParams
from vllm.distributed import cleanup_dist_env_and_memory
from vllm.lora.request import LoRARequest

DEFAULTS = {
    "skip_tokenizer_init": True,
    "enforce_eager": True,
    "max_model_len": 128,
    "dtype": "float32",
    "distributed_executor_backend": "uni",
}


def run(
    lora: str | None = None, reload: bool = False, flat: bool = False, **arguments: Any
) -> dict[str, Any]:
    loading.FLAT_ON = ("cpu",) if flat else ()
    llm = LLM(**{**DEFAULTS, **arguments})
    if reload:
        llm.collective_rpc("reload_weights")
    sampling = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, logprobs=0, detokenize=False)
    request = LoRARequest("adapter", 1, lora) if lora else None
    prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    outputs = [each.outputs[0] for each in llm.generate(prompts, sampling, lora_request=request)]
    logprobs = [
        [found[token].logprob for token, found in zip(each.token_ids, each.logprobs, strict=True)]
        for each in outputs
    ]
    method = llm.llm_engine.model_config.quantization
    return {
        "tokens": [list(each.token_ids) for each in outputs],
        "logprobs": logprobs,
        "method": method,
    }


def main() -> None:
    for text in sys.argv[1:]:
        try:
            said = run(**json.loads(text))
        except Exception as error:
            said = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(said), flush=True)
        gc.collect()
        cleanup_dist_env_and_memory()


if __name__ == "__main__":
    main()
