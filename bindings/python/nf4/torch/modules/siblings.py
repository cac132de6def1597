"""Siblings: layers that get the same x, such as q, k and v of an attention, multiplied together:
where torch.compile traces a model, and while a CUDA graph is captured. In eager calls each layer
is by itself, as one call for all is no faster then: it is the host that takes the time.

The first layer computes the products of all, by an operator with an output for each, and the
others take theirs if they are called with the same x, in the same modes of torch and in the same
trace or capture. They have the bits of single products then, unless x, a bias or a weight is
written to between the calls: a trace shows no such write.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from nf4._torch import device_of
from nf4.torch import _capture, _operators_batch

if TYPE_CHECKING:
    from nf4.torch.modules.base import QuantizedLinear


def _modes_of(x: Tensor) -> tuple[Any, ...]:
    """Of torch, in which a product is computed. Dynamo has no answer where it is asked for
    inference mode, but that turns gradients off."""
    device = x.device.type
    autocast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
    return torch.is_grad_enabled(), autocast


def _state_of(x: Tensor, capture: int) -> tuple[Any, ...]:
    """What captured products depend on besides. A tensor of inference mode has no version."""
    version = None if x.is_inference() else x._version
    stream = device_of(x).current_stream() if x.is_cuda else None
    return capture, stream, version, torch.is_inference_mode_enabled()


def _adds_in_dtype(x: Tensor, dtype: torch.dtype) -> bool:
    """Whether gradients of x are added in its own dtype by layers that are called one by one: then
    no layer casts it."""
    if not (torch.is_grad_enabled() and x.requires_grad):
        return True
    if torch.is_autocast_enabled(x.device.type):
        dtype = torch.get_autocast_dtype(x.device.type)
    return dtype == x.dtype


class Siblings:
    """Two or three layers. They are held weakly, and by their places in the group, which they keep
    when a model is copied or pickled: a layer alone has no siblings then."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._layers: list[weakref.ref[QuantizedLinear] | None] = [None] * count
        # Not any more, once products were left over.
        self._together = True
        # x, its modes and state, and the products that are not taken yet, by place.
        self._ahead: tuple[Tensor, tuple[Any, ...], dict[int, Tensor]] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {"count": self.count}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)

    def join(self, place: int, layer: QuantizedLinear) -> None:
        """Nothing happens where the place is taken, as a shallow copy finds it."""
        held = self._layers[place]
        if held is None or held() is None:
            self._layers[place] = weakref.ref(layer)

    def product(
        self, place: int, layer: QuantizedLinear, x: Tensor, dtype: torch.dtype
    ) -> Tensor | None:
        """The product of one layer in a dtype; None if it is left to the layer."""
        ahead = self._ahead
        if not self._together or (ahead is None and place != 0):
            return None
        tracing = torch.compiler.is_dynamo_compiling()
        capture = None if tracing else _capture.id_of(x)
        if not tracing and capture is None:
            if ahead is not None:
                self._separate()
            return None
        # A replica or a shallow copy is not of the group.
        layers = [None if held is None else held() for held in self._layers]
        if layers[place] is not layer:
            return None
        state = _modes_of(x) if capture is None else (*_modes_of(x), *_state_of(x, capture))
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
        """Where products are left over: x is of one alone, perhaps, or only one layer is
        compiled. They are dropped."""
        self._together, self._ahead = False, None

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
