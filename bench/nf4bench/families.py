"""Times the kernels of an A100, of RTX cards and of a T4 on this GPU, beside bitsandbytes and a
dense product. Each build of ./dev gpu with one family of kernels alone has a process of its own.
This file starts them, and is what they run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from nf4bench import families_cases as cases
from nf4bench import families_pages as tables
from nf4bench.errors import LaunchFailed, LibraryMissing
from nf4bench.families_cases import Family

SECONDS = 300
PARTS = ("products", "steps", "experts")


def _figures_of(number: int, library: Path) -> dict[str, Any]:
    """Measures FAMILIES[number] in a process of its own. Raises LaunchFailed."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "figures.json")
        command = [sys.executable, __file__, str(file), str(number)]
        environment = os.environ | {"NF4_LIBRARY": str(library), "NF4_BITSANDBYTES": "0"}
        try:
            subprocess.run(command, timeout=SECONDS, env=environment, check=True)
        except subprocess.SubprocessError as error:
            raise LaunchFailed(f"the bench of {cases.FAMILIES[number]}: {error}") from None
        return json.loads(file.read_text())


def run(root: Path) -> dict[str, Any]:
    """Returns all figures, as figures.json holds them. `root` is the folder of the builds. Raises
    LibraryMissing, and LaunchFailed where a process ended with an error, such as a wrong result."""
    for family in cases.FAMILIES:
        if not family.library(root).exists():
            raise LibraryMissing(f"no {family.library(root)}; ./dev gpu --build makes it")
    found = [_figures_of(i, each.library(root)) for i, each in enumerate(cases.FAMILIES)]
    return {
        **found[0]["about"],
        "seconds": {str(f): each["seconds"] for f, each in zip(cases.FAMILIES, found, strict=True)},
        **{part: [row for each in found for row in each[part]] for part in PARTS},
    }


# ---- The process of a build ---------------------------------------------------------------


class _Bench(NamedTuple):
    """Has what a QLoRA step needs of rows.Bench."""

    gpu: Any
    replays: int | None = None


def require_build(family: Family) -> None:
    """Raises LibraryMissing where the library that is loaded is another build's."""
    import nf4

    info = nf4.build_info()
    if not family.info.items() <= info.items():
        raise LibraryMissing(f"{nf4.library_path()} is not the build of {family}, but of {info}")


def step(gpu: Any, family: Family, bitsandbytes: Any) -> dict[str, Any]:
    """Times a QLoRA step with bitsandbytes, the drop-in and NF4Linear."""
    import torch

    from nf4bench import models_steps, training, training_model

    size = cases.STEP.size
    layers = models_steps.weights(
        size, tuple(size.linears()), {"bitsandbytes": bitsandbytes}, gpu.place
    )
    models = training_model.models(size, layers, training_model.ends(size, gpu.place))
    tokens = torch.randint(size.vocabulary, cases.STEP.tokens, device=gpu.place)
    made = training.row(_Bench(gpu), cases.STEP, models, tokens, profiled=False)
    return {"family": str(family), **made}


def measured(gpu: Any, family: Family) -> dict[str, list[dict[str, Any]]]:
    """Returns the rows of each of PARTS. Raises WrongResult before what is wrong is timed."""
    import torch

    from nf4bench import families_products, models_forms

    torch.manual_seed(0)
    bitsandbytes, made = models_forms.Bitsandbytes(gpu.place), {"products": []}
    for shape in cases.SHAPES:
        found = families_products.products(gpu, family, bitsandbytes, shape, cases.MS)
        made["products"] += tables.PRODUCTS.told(found, print)
        gpu.release()
    made["steps"] = tables.STEPS.told([step(gpu, family, bitsandbytes)], print)
    gpu.release()
    made["experts"] = tables.EXPERTS.told(families_products.experts(gpu, family), print)
    return made


def _about() -> dict[str, Any]:
    import bitsandbytes
    import torch

    from nf4bench import training_model

    versions = training_model.versions() | {"bitsandbytes": bitsandbytes.__version__}
    name = torch.cuda.get_device_name()
    return {"device": name, "torch": torch.__version__, "versions": versions}


def _worker(file: Path, family: Family) -> None:
    import time

    from nf4bench.device import Gpu

    began = time.monotonic()
    require_build(family)
    made = measured(Gpu(), family)
    seconds = round(time.monotonic() - began, 1)
    file.write_text(json.dumps({"about": _about(), "seconds": seconds, **made}))


if __name__ == "__main__":
    _worker(Path(sys.argv[1]), cases.FAMILIES[int(sys.argv[2])])
