"""torch.distributed serves quantized layers as it is: as soon as its FSDP2 is loaded, before or
after nf4.torch, three functions of it are wrapped. Nothing is imported before.

    _get_managed_states      our layers are prepared first (distributed/_prepare.py)
    _get_param_module_infos  finds their scales, which are buffers
    FSDPParamGroup.__init__  ranks whose layers are not alike are named (distributed/_agreement.py)

They are private to torch. Where they have other arguments, fully_shard is not served.
"""

from __future__ import annotations

import functools
import inspect
import sys
import warnings
from collections.abc import Callable
from typing import Any

from nf4.torch._import_watch import ImportWatch
from nf4.torch._replacing import Replaced, found

_FSDP2 = "torch.distributed.fsdp._fully_shard"
_STATES, _GROUP = f"{_FSDP2}._fsdp_init", f"{_FSDP2}._fsdp_param_group"
_replaced: list[Replaced] = []


def _begins_with(function: Any, *names: str) -> bool:
    if not inspect.isfunction(function):
        return False
    return tuple(inspect.signature(function).parameters)[: len(names)] == names


def _preparing(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def managed_states(modules: Any, ignored_params: Any = None) -> Any:
        from nf4.torch.distributed import _prepare

        _prepare.prepare_layers(modules, ignored_params or ())
        with _prepare.buffers_as_parameters(modules):
            return original(modules, ignored_params)

    return managed_states


def _listing(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def module_infos(params: Any, modules: Any) -> Any:
        from nf4.torch.distributed import _prepare

        with _prepare.buffers_as_parameters(each for top in modules for each in top.modules()):
            return original(params, modules)

    return module_infos


def _agreeing(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def init(self: Any, params: Any, modules: Any, mesh_info: Any, *others: Any) -> None:
        from nf4.torch.distributed._agreement import require_agreement, specs_of

        require_agreement(specs_of(modules, params), mesh_info.mesh)
        original(self, params, modules, mesh_info, *others)

    return init


def _wrap_states() -> None:
    original = found(sys.modules[_STATES], "_get_managed_states")
    if not _begins_with(original, "modules", "ignored_params"):
        raise NotImplementedError("it collects parameters in another way")
    ours = _preparing(original)
    for name, module in list(sys.modules.items()):
        if name.startswith(_FSDP2) and vars(module).get("_get_managed_states") is original:
            _replaced.append(Replaced.by(f"{name}._get_managed_states", module, ours))


def _wrap_group() -> None:
    module = sys.modules[_GROUP]
    infos, init = found(module, "_get_param_module_infos"), found(module, "FSDPParamGroup.__init__")
    if not (
        _begins_with(infos, "params", "modules")
        and _begins_with(init, "self", "params", "modules", "mesh_info")
    ):
        raise NotImplementedError("it makes groups of parameters in another way")
    name = f"{_GROUP}._get_param_module_infos"
    _replaced.append(Replaced.by(name, module, _listing(infos)))
    name = f"{_GROUP}.FSDPParamGroup.__init__"
    _replaced.append(Replaced.by(name, module.FSDPParamGroup, _agreeing(init)))


def _loaded(name: str) -> None:
    """Never raises: whoever imports FSDP2 would get it."""
    try:
        _wrap_states() if name == _STATES else _wrap_group()
    except Exception as error:
        warnings.warn(f"libnf4 does not serve fully_shard: {error!r}", stacklevel=2)


_watch = ImportWatch((_STATES, _GROUP), _loaded)


def register() -> None:
    """A second call changes nothing."""
    _watch.start()


def unregister() -> None:
    """Gives torch its functions back. Patches made since stay."""
    _watch.stop()
    for each in reversed(_replaced):
        each.give_back()
    _replaced.clear()
