"""The oldest versions that libnf4 works with. Nothing is imported here, so anyone may ask."""

OLDEST_BITSANDBYTES = "0.50"  # has the operators that nf4.torch.bitsandbytes serves
OLDEST_TRANSFORMERS = 5  # has core_model_loading, which meta_model.py uses
