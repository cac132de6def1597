"""Runs engines of SGLang on PROMPTS, one after another. Prints what each said as a line of JSON.

Each line of the standard input has Engine's arguments as JSON.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import sglang
from models import NEW_TOKENS, PROMPTS

DEFAULTS = {
    "device": "cpu",
    "dtype": "float32",
    "skip_tokenizer_init": True,
    "disable_cuda_graph": True,
    "disable_overlap_schedule": True,
    "attention_backend": "torch_native",
    "mem_fraction_static": 0.3,
    "max_total_tokens": 1024,
}


def run(**arguments: Any) -> dict[str, Any]:
    engine = sglang.Engine(**{**DEFAULTS, **arguments})
    sampling = {"temperature": 0, "max_new_tokens": NEW_TOKENS, "ignore_eos": True}
    prompts = [list(each) for each in PROMPTS]
    outputs = engine.generate(input_ids=prompts, sampling_params=sampling, return_logprob=True)
    engine.shutdown()
    return {
        "tokens": [each["output_ids"] for each in outputs],
        "logprobs": [
            [logprob for logprob, *_ in each["meta_info"]["output_token_logprobs"]]
            for each in outputs
        ],
        "method": arguments["quantization"],
    }


if __name__ == "__main__":  # SGLang starts processes, which import this file
    for line in sys.stdin:
        print(json.dumps(run(**json.loads(line))), flush=True)
