"""Makes torch.distributed work with quantized layers: as soon as its modules are loaded, before or
after nf4.torch, some of their functions are wrapped (distributed/_wrappers.py says how). Nothing is
imported before that.

These functions are private to torch. If one has other arguments than listed here, none of its group
is wrapped, and a warning names the feature that is not served.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import sys
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

from nf4.torch._import_watch import ImportWatch
from nf4.torch._replacing import Replaced, found


class _Wrapped(NamedTuple):
    module: str
    function: str
    arguments: tuple[str, ...]  # the first ones
    by: str  # in distributed/_wrappers.py


_FSDP1, _FSDP2 = "torch.distributed.fsdp", "torch.distributed.fsdp._fully_shard"
_DDP = "torch.nn.parallel.distributed"
# Grouped by feature. All functions of a group must be known before one of them is wrapped.
_WRAPPED = {
    "fully_shard": (
        _Wrapped(
            f"{_FSDP2}._fsdp_init",
            "_get_managed_states",
            ("modules", "ignored_params"),
            "managed_states",
        ),
        _Wrapped(
            f"{_FSDP2}._fsdp_param_group",
            "_get_param_module_infos",
            ("params", "modules"),
            "param_module_infos",
        ),
        _Wrapped(
            f"{_FSDP2}._fsdp_param_group",
            "FSDPParamGroup.__init__",
            ("self", "params", "modules", "mesh_info"),
            "param_group",
        ),
    ),
    "FullyShardedDataParallel": (
        _Wrapped(
            f"{_FSDP1}._init_utils",
            "_get_ignored_params",
            ("root_module", "ignored_modules"),
            "ignored_params",
        ),
        _Wrapped(
            f"{_FSDP1}._init_utils",
            "_get_ignored_buffer_names",
            ("root_module", "ignored_modules"),
            "ignored_buffer_names",
        ),
    ),
    "DistributedDataParallel": (
        _Wrapped(
            _DDP,
            "DistributedDataParallel._assign_modules_buffers",
            ("self",),
            "assign_modules_buffers",
        ),
    ),
}
_MODULES = dict.fromkeys(each.module for found in _WRAPPED.values() for each in found)
_loaded_modules: set[str] = set()
_replaced: list[Replaced] = []


def _ours(original: Callable[..., Any], by: str) -> Callable[..., Any]:
    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        wrappers = importlib.import_module("nf4.torch.distributed._wrappers")
        return getattr(wrappers, by)(original, *args, **kwargs)

    return wrapper


def _require_known(each: _Wrapped) -> None:
    original = found(sys.modules[each.module], each.function)
    arguments = tuple(inspect.signature(original).parameters)[: len(each.arguments)]
    if arguments != each.arguments:
        raise TypeError(f"{each.function} takes {', '.join(arguments)}")


def _wrap(each: _Wrapped) -> None:
    """Wraps a function, also in other modules of torch.distributed that have imported it by
    name."""
    module = sys.modules[each.module]
    original = found(module, each.function)
    of_class, _, name = each.function.rpartition(".")
    owners = [found(module, of_class)]
    if not of_class:
        modules = [m for n, m in list(sys.modules.items()) if n.startswith("torch.distributed.")]
        owners += [m for m in modules if m is not module and vars(m).get(name) is original]
    ours = _ours(original, each.by)
    for owner in owners:
        _replaced.append(Replaced.by(f"{owner.__name__}.{name}", owner, ours))


def _loaded(name: str) -> None:
    """Never raises, because the error would reach whoever imports torch.distributed."""
    _loaded_modules.add(name)
    for serves, functions in _WRAPPED.items():
        modules = {each.module for each in functions}
        if name not in modules or not modules <= _loaded_modules:
            continue
        try:
            for each in functions:
                _require_known(each)
            for each in functions:
                _wrap(each)
        except Exception as error:
            warnings.warn(f"libnf4 does not serve {serves}: {error!r}", stacklevel=2)


_watch = ImportWatch(_MODULES, _loaded)


def register() -> None:
    """Wraps the functions now or once they are loaded. A second call changes nothing."""
    _watch.start()


def unregister() -> None:
    """Gives torch its functions back. Patches made since stay."""
    _watch.stop()
    for each in reversed(_replaced):
        each.give_back()
    _replaced.clear()
    _loaded_modules.clear()
