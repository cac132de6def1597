"""The bench: libnf4 beside its peers and beside the bandwidth roofline, in one run.

options    what the command line may ask for; modes runs it
cases      which weights are measured, and beside whom; matmul_cases, models_cases
device     the GPU: graphs, events, synchronizing
weights    rotating sets of random weights; product: one of matmul's
library    the C library of rooflines and launch configurations, through ctypes; rooflines
peers      bitsandbytes, Unsloth's sequence, plain torch, Triton; matmul_peers, matmul_format
check      bits compared before anything is timed; errors: what ends the bench
measure    candidates timed in turns
rows       dequantize and quantize; matmul, models (models_llama, _forms, _steps), cpu
experts    stacks of experts: experts_cases, _weights, _decode, _pages; cpu_experts
training   a step of QLoRA: training_cases, _model, _products, _pages; training_experts
families   the kernels of other GPUs, a process a build: families_cases, _products, _pages
host       what a call costs the host; challenge, sweep
compare    two builds beside each other; compare_worker is the process of one
table      a table as data; tables, plots, pages: what the repository shows
"""

import os

# A libnf4 that pip installed would serve bitsandbytes, and be measured beside itself.
os.environ["NF4_BITSANDBYTES"] = "0"
