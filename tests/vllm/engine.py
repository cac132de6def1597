"""Runs vLLM engines on PROMPTS, one after another, and prints what each said as a line of JSON.

Each line of the standard input has LLM's arguments of an engine as JSON. "lora": the folder of an
adapter. "reload": the folder of other weights, which replace the first ones. "flat": scales become
fp32, as on CPUs; otherwise they stay nested, as on GPUs. For an engine that cannot start, the line
is {"error": ...}.
"""

from __future__ import annotations

import gc
import json
import sys
import traceback
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
    lora: str | None = None, reload: str | None = None, flat: bool = False, **arguments: Any
) -> dict[str, Any]:
    loading.FLAT_ON = ("cpu",) if flat else ()
    llm = LLM(**{**DEFAULTS, **arguments})
    if reload:
        llm.collective_rpc("reload_weights", kwargs={"weights_path": reload})
    sampling = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, logprobs=0, detokenize=False)
    request = LoRARequest("adapter", 1, lora) if lora else None
    prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    outputs = [each.outputs[0] for each in llm.generate(prompts, sampling, lora_request=request)]
    logprobs = [
        [found[token].logprob for token, found in zip(each.token_ids, each.logprobs, strict=True)]
        for each in outputs
    ]
    config = llm.llm_engine.vllm_config
    said = {
        "tokens": [list(each.token_ids) for each in outputs],
        "logprobs": logprobs,
        "method": config.model_config.quantization,
    }
    if config.speculative_config:
        said["draft"] = config.speculative_config.draft_model_config.quantization
    return said


def main() -> None:
    for line in sys.stdin:
        try:
            said = run(**json.loads(line))
        except Exception as error:
            traceback.print_exc()
            said = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(said), flush=True)
        gc.collect()
        cleanup_dist_env_and_memory()


if __name__ == "__main__":  # ranks are processes, which import this file
    main()
