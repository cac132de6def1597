"""Siblings are layers that get the same x, such as q, k and v of an attention. They are multiplied
together where torch.compile traces a model and while a CUDA graph is captured. In eager mode each
layer is multiplied by itself, because one call for all is no faster: the host takes the time.

The first layer computes all products with one operator that has an output for each. The others take
their outputs if they are called with the same x, in the same torch modes and the same capture, or
next in compiled code. The results are bit-equal to single products unless something writes to x, a
bias or a weight between the calls; a trace does not show such a write.

A trace reads a group only from dicts of constants. In each call of a compiled model its guards then
compare no more than the versions of these dicts and of the layers' own. If they held an object, a
list or a weak reference, or if the graph wrote to them, torch would check each guard of the model
by itself, which takes several times as long (docs/design/python-overhead.md).
"""

from __future__ import annotations

import functools
import weakref
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from nf4._torch import device_of
from nf4.torch import _capture, _operators_batch

if TYPE_CHECKING:
    from nf4.torch.modules.base import QuantizedLinear


def _modes_of(x: Tensor) -> tuple[Any, ...]:
    """Returns the torch modes in which a product is computed. Dynamo cannot tell if inference mode
    is on, but that turns gradients off."""
    device = x.device.type
    autocast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
    return torch.is_grad_enabled(), autocast


def _state_of(x: Tensor, capture: int) -> tuple[Any, ...]:
    """Returns what else captured products depend on. A tensor of inference mode has no version."""
    version = None if x.is_inference() else x._version
    stream = device_of(x).current_stream() if x.is_cuda else None
    return capture, stream, version, torch.is_inference_mode_enabled()


def _adds_in_dtype(x: Tensor, dtype: torch.dtype) -> bool:
    """Tells if layers that are called one by one would add the gradients of x in its own dtype,
    which is so if no layer casts it."""
    if not (torch.is_grad_enabled() and x.requires_grad):
        return True
    if torch.is_autocast_enabled(x.device.type):
        dtype = torch.get_autocast_dtype(x.device.type)
    return dtype == x.dtype


def _leave(group: dict[Any, Any], place: int, _: Any) -> None:
    """A layer is gone; its tensors must go too."""
    group.pop(place, None)
    left = _trace.ahead
    if left is not None and left.group is group:
        _trace.ahead = None


class Member(nn.Module):
    """The facts that a trace reads of a layer of a group. It is a module because torch.compile
    compares modules by identity, and their contents by the versions of dicts."""

    def __init__(self, layer: QuantizedLinear) -> None:
        super().__init__()
        self.own_parameters, self.own_buffers = layer._parameters, layer._buffers
        self.spec, self.parts = layer.spec, type(layer).plain_parts


class Siblings:
    """Two or three layers. The group holds them weakly, and their tensors until they are gone. It
    knows them by their places, which they keep when a model is copied or pickled; a layer copied
    alone has no siblings."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._layers: list[weakref.ref[QuantizedLinear] | None] = [None] * count
        # A trace reads the members by place. They hold the layers' parameters and buffers, and not
        # the layers. The group separates once products are left over.
        self.group: dict[Any, Any] = {"count": count, "together": True}
        # x, its modes and state, and by place the products that are not taken yet.
        self._ahead: tuple[Tensor, tuple[Any, ...], dict[int, Tensor]] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {"count": self.count}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)

    def join(self, place: int, layer: QuantizedLinear) -> None:
        """Adds a layer, or updates one that has a new weight. Nothing happens if another layer has
        the place, which is so for a shallow copy."""
        held = self._layers[place]
        if held is None or held() is None:
            self._layers[place] = weakref.ref(layer, functools.partial(_leave, self.group, place))
        elif held() is not layer:
            return
        self.group[place] = member = Member(layer)
        layer.__dict__["_member"] = member  # and no child
        layer._place = place
        layer._group = self.group if place == 0 else None

    def product(
        self, place: int, layer: QuantizedLinear, x: Tensor, dtype: torch.dtype
    ) -> Tensor | None:
        """Returns the product of one layer in a dtype while a CUDA graph is captured; None if the
        layer has to compute it."""
        left = _trace.ahead
        if left is not None:
            _trace.separate(left)
        ahead = self._ahead
        if not self.group["together"] or (ahead is None and place != 0):
            return None
        capture = _capture.id_of(x)
        if capture is None:
            if ahead is not None:
                self._separate()
            return None
        # A replica or a shallow copy does not belong to the group.
        layers = [None if held is None else held() for held in self._layers]
        if layers[place] is not layer:
            return None
        state = (*_modes_of(x), *_state_of(x, capture))
        if ahead is None:
            return self._first(layers, x, dtype, state)
        given, before, ys = ahead
        if given is x and before == state and place in ys:
            y = ys.pop(place)
            self._ahead = ahead if ys else None
            return y
        self._separate()
        return None

    def _separate(self) -> None:
        """Drops products that are left over, and separates the group: perhaps only one layer gets
        this x."""
        self.group["together"], self._ahead = False, None

    def _first(
        self,
        layers: list[QuantizedLinear | None],
        x: Tensor,
        dtype: torch.dtype,
        state: tuple[Any, ...],
    ) -> Tensor | None:
        if None in layers or len({layer.compute_dtype for layer in layers}) > 1:
            return None
        if not _adds_in_dtype(x, dtype):
            return None
        biases = [layer.bias_in(dtype) for layer in layers]
        first, *others = _operators_batch.linear_batch(
            x.to(dtype), biases, [layer.parts() for layer in layers]
        )
        self._ahead = (x, state, dict(enumerate(others, 1)))
        return first


# ---- In a trace ------------------------------------------------------------------------


class _Ahead(NamedTuple):
    """Products that are not taken yet, with their inputs. by_place: each with what the group knows
    of its layer."""

    group: dict[Any, Any]
    x: Tensor
    modes: tuple[Any, ...]
    by_place: dict[int, tuple[Tensor, Member]]


class _Trace:
    """ahead: the products of the group whose first layer was called last. They are left over if
    only that layer is compiled, or only it gets this x."""

    ahead: _Ahead | None

    def __init__(self) -> None:
        self.ahead = None  # an instance attribute, because a trace looks for it

    def separate(self, ahead: _Ahead) -> None:
        ahead.group["together"], self.ahead = False, None


_trace = _Trace()


def traced_product(layer: QuantizedLinear, x: Tensor, dtype: torch.dtype) -> Tensor | None:
    """Returns the product of a layer of a group in a dtype where torch.compile traces; None if the
    layer has to compute it."""
    place, ahead = layer._place, _trace.ahead
    if layer.tensor_parallel == 1:  # this one has no bias
        return None
    modes = (*_modes_of(x), dtype)
    if place == 0:
        if ahead is not None:
            _trace.separate(ahead)
        group = layer._group
        return _trace_first(group, x, modes) if group.get(0) is layer._member else None
    if ahead is None:
        return None
    y, member = ahead.by_place.pop(place, (None, None))
    if member is not layer._member or ahead.x is not x or ahead.modes != modes:
        return _trace.separate(ahead)
    if not ahead.by_place:
        _trace.ahead = None
    return y


def _trace_first(group: dict[Any, Any], x: Tensor, modes: tuple[Any, ...]) -> Tensor | None:
    members, dtype = [group.get(place) for place in range(group["count"])], modes[-1]
    if not group["together"] or None in members or not _adds_in_dtype(x, dtype):
        return None
    if not all("bias" in each.own_parameters for each in members):  # unless parametrized
        return None
    weights = [each.parts(each.own_parameters, each.own_buffers, each.spec) for each in members]
    if None in weights:
        return None
    biases = [each.own_parameters["bias"] for each in members]
    biases = [bias if bias is None or bias.dtype == dtype else bias.to(dtype) for bias in biases]
    ys = _operators_batch.linear_batch(x.to(dtype), biases, weights)
    left = {place: (ys[place], members[place]) for place in range(1, group["count"])}
    _trace.ahead = _Ahead(group, x, modes, left)
    return ys[0]
