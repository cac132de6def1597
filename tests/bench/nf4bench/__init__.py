"""The bench: libnf4 beside its peers and beside the limit of memory, in one run.

options    what the command line may ask for
cases      which weights are measured, and beside whom
device     the GPU: graphs, events, synchronising
weights    rotating sets of random weights
library    the C library of limits and launch configurations, through ctypes
peers      bitsandbytes, Unsloth's sequence, plain torch, Triton
check      bits compared before anything is timed
measure    candidates timed in turns
suite      the rows; sweep, challenge and call are the other programs
tables     text and markdown; drawing and plots the figures; pages what the repository shows

Matmul has modules of its own, by the same names: matmul_cases, matmul_product (one of them, and how
wrong it is), matmul_peers, matmul_rows, matmul_error, matmul_call and matmul, which runs these;
matmul_sweep; matmul_tables, matmul_plots and matmul_pages.

So have whole models: models_cases, models_llama (the model), models_forms (its linear layers),
models_steps (what is timed), models_rows, models_call and models, which runs these; models_tables
and models_pages.
"""

import os

# A libnf4 that pip installed would serve bitsandbytes, and be measured beside itself.
os.environ["NF4_BITSANDBYTES"] = "0"
