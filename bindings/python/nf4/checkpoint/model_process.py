"""The program of the process that architecture.py builds a model in.

    python -I model_process.py MEMORY CPU_SECONDS FILE_BYTES PATH...

It sets limits, sets sys.path to PATH..., and runs meta_model.py.
"""

import gc
import resource
import sys

# Packages that transformers imports if they are installed, and that then load files or code by a
# name in config.json. Models that need them cannot be built.
_REFUSED = ("timm", "detectron2", "kernels")


def _limit(kind: int, wanted: int) -> None:
    hard = resource.getrlimit(kind)[1]
    limit = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    resource.setrlimit(kind, (limit, limit))


if __name__ == "__main__":
    for kind, wanted in zip(
        (resource.RLIMIT_DATA, resource.RLIMIT_CPU, resource.RLIMIT_FSIZE),
        map(int, sys.argv[1:4]),
        strict=True,
    ):
        _limit(kind, wanted)
    sys.path[:] = sys.argv[4:]
    for name in _REFUSED:
        sys.modules[name] = None
    # The imported modules stay; searching them for garbage takes a quarter of the time.
    gc.disable()
    from nf4.checkpoint.meta_model import main

    gc.freeze()
    gc.enable()
    main()
