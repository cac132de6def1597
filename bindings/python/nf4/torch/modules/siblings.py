"""Siblings: layers that get the same x, such as q, k and v of an attention, multiplied together.

    eager     the first layer that is called with an x computes the products of all, and the others
              find theirs, each under its own autograd node: gradients are those of single layers
    compiled  one operator with an output for each; its backward adds the gradients of x

Nothing is computed ahead before a call of each layer was seen with one x, the same tensor at the
same version, nor after a product that nobody asked for, until that was seen again. The results of
a batch have the bits of single products.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from nf4.torch import _fast, _operators, _private
from nf4.torch._schemas import Parts

if TYPE_CHECKING:
    from nf4.torch.modules.base import QuantizedLinear


class _Input:
    """An x as it was, and what else a product depends on: the stream, the mode and, by
    `is_of_dtype`, the dtype."""

    __slots__ = ("_inference", "_stream", "_version", "dtype", "x")

    def __init__(
        self,
        given: Tensor,
        dtype: torch.dtype,
        gone: Callable[[weakref.ref[Tensor]], None] | None = None,
    ) -> None:
        """gone: called when there is no x any more."""
        self.x, self.dtype = weakref.ref(given, gone), dtype
        # A tensor of inference mode has no version.
        self._version = None if given.is_inference() else given._version
        self._stream = _private.raw_stream(given.device.index) if given.is_cuda else None
        self._inference = torch.is_inference_mode_enabled()

    def is_of(self, given: Tensor) -> bool:
        return (
            self.x() is given
            and (self._version is None or self._version == given._version)
            and self._inference == torch.is_inference_mode_enabled()
            and (self._stream is None or self._stream == _private.raw_stream(given.device.index))
        )


class Siblings:
    """Two or three layers. They are held weakly, and by their places in the group, which they keep
    when a model is copied or pickled: a layer alone has no siblings then."""

    def __init__(self, count: int, certain: bool) -> None:
        """certain: they get the same x by construction, which a compiler can rely on."""
        self.count, self.certain = count, certain
        self._layers: list[weakref.ref[QuantizedLinear] | None] = [None] * count
        self._seen: tuple[_Input, set[int]] | None = None
        self._together = False
        self._ahead: tuple[_Input, dict[int, Tensor]] | None = None
        self._traced: tuple[Tensor, dict[int, Tensor]] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {"count": self.count, "certain": self.certain}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)

    def join(self, place: int, layer: QuantizedLinear) -> None:
        """Nothing happens where the place is taken, as a shallow copy finds it."""
        held = self._layers[place]
        if held is None or held() is None:
            self._layers[place] = weakref.ref(layer)

    def _has(self, place: int, layer: QuantizedLinear) -> bool:
        """A replica or a copy is not of the group."""
        held = self._layers[place]
        return held is not None and held() is layer

    def _members(self) -> list[QuantizedLinear] | None:
        """None where one is not there."""
        found = [None if held is None else held() for held in self._layers]
        return None if None in found else found

    # ---- Eager -----------------------------------------------------------------------

    def take(self, place: int, layer: QuantizedLinear, given: Tensor) -> Tensor | None:
        """What was computed ahead for a layer, where there is nothing to cast or to record."""
        ahead = self._ahead
        if ahead is None or torch.is_grad_enabled() or _private.any_autocast():
            return None
        x, ys = ahead
        if not x.is_of(given) or x.dtype != given.dtype or not self._has(place, layer):
            return None
        return ys.pop(place, None)

    def multiply(
        self, place: int, layer: QuantizedLinear, given: Tensor, x: Tensor, bias: Tensor | None
    ) -> Tensor:
        """The product of one layer. given: its argument; x: that in the layer's dtype."""
        if not self._has(place, layer):
            return layer.multiply(x, bias)
        below = functools.partial(self._product, place, given, x.dtype)
        return _operators.linear(x, bias, layer.parts(), below)

    def _product(
        self,
        place: int,
        given: Tensor,
        before: torch.dtype,
        x: Tensor,
        bias: Tensor | None,
        weight: Parts,
    ) -> Tensor:
        """before: the dtype of x and bias before autocast."""
        ahead = self._ahead
        if ahead is not None and ahead[0].dtype == x.dtype and ahead[0].is_of(given):
            y = ahead[1].pop(place, None)
            if y is not None:
                return y
        if self._together:
            left_over = ahead is not None and bool(ahead[1])
            ys = None if left_over else self._batch(place, before, x, bias, weight)
            self._ahead, self._together = None, ys is not None
            if ys is not None:
                others = {i: y for i, y in enumerate(ys) if i != place}
                self._ahead = (_Input(given, x.dtype, self._forget), others)
                return ys[place]
        self._observe(place, given, x.dtype)
        return _operators.linear_idle(x, bias, weight)

    def _observe(self, place: int, given: Tensor, dtype: torch.dtype) -> None:
        """Sees whether all are called with one x."""
        if self._seen is None or not self._seen[0].is_of(given):
            self._seen = (_Input(given, dtype), set())
        self._seen[1].add(place)
        if len(self._seen[1]) == self.count:
            self._seen, self._together = None, True

    def _batch(
        self, place: int, before: torch.dtype, x: Tensor, bias: Tensor | None, weight: Parts
    ) -> tuple[Tensor, ...] | None:
        """The products of all; None if nothing was done."""
        layers = self._members()
        if layers is None or len({layer.compute_dtype for layer in layers}) > 1:
            return None
        biases, weights = [bias] * len(layers), [weight] * len(layers)
        for i, layer in enumerate(layers):
            if i != place:
                other = layer.bias_in(before)
                biases[i] = None if other is None else other.to(x.dtype)
                weights[i] = layer.parts()
        return _fast.linear_batch(x, tuple(biases), tuple(weights))

    def _forget(self, x: weakref.ref[Tensor]) -> None:
        """Lets go of what was computed ahead for an x that is gone."""
        ahead = self._ahead
        if ahead is not None and ahead[0].x is x:
            self._together = self._together and not ahead[1]
            self._ahead = None

    # ---- Compiled ----------------------------------------------------------------------

    def traced(
        self, place: int, layer: QuantizedLinear, given: Tensor, x: Tensor, bias: Tensor | None
    ) -> Tensor:
        """multiply, as a compiler traces it."""
        layers = self._members() if self.certain else None
        if layers is None or layers[place] is not layer:
            return layer.multiply(x, bias)
        traced = self._traced
        if traced is not None and (traced[0] is not given or place not in traced[1]):
            # Products were left over, perhaps as one layer is compiled alone.
            self.certain, self._traced = False, None
            return layer.multiply(x, bias)
        if traced is None:
            biases = [each.bias_in(x.dtype) for each in layers]
            ys = _operators.linear_batch(x, biases, [each.parts() for each in layers])
            traced = (given, dict(enumerate(ys)))
        y = traced[1].pop(place)
        self._traced = traced if traced[1] else None
        return y
