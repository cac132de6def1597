"""Siblings: layers that get the same x, such as q, k and v of an attention, multiplied together.

    eager     where no gradient is recorded, the first layer that is called with an x computes the
              products of all, and the others find theirs
    compiled  one operator with an output for each; its backward adds the gradients of x

Nothing is computed ahead before a call of each layer was seen with one x, the same tensor at the
same version, nor after a product that nobody asked for, until that was seen again. The results of
a batch have the bits of single products.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from nf4._torch import device_of
from nf4.torch import _fast, _operators, _private

if TYPE_CHECKING:
    from nf4.torch.modules.base import QuantizedLinear


class _Ahead(NamedTuple):
    """What was computed of an x ahead. It is for the same x, at the same version, in the same mode
    and on the same stream. ys: by place, those that were not taken."""

    x: weakref.ref[Tensor]
    version: int | None
    inference: bool
    stream: int | None
    dtype: torch.dtype
    ys: dict[int, Tensor]

    @classmethod
    def of(
        cls,
        given: Tensor,
        dtype: torch.dtype,
        ys: dict[int, Tensor],
        gone: Callable[[weakref.ref[Tensor]], None] | None = None,
    ) -> _Ahead:
        """dtype: of the products. gone: called when there is no x any more."""
        # A tensor of inference mode has no version.
        version = None if given.is_inference() else given._version
        stream = device_of(given).current_stream() if given.is_cuda else None
        held = weakref.ref(given, gone)
        return cls(held, version, torch.is_inference_mode_enabled(), stream, dtype, ys)

    def is_of(self, given: Tensor) -> bool:
        return (
            self.x() is given
            and (self.version is None or self.version == given._version)
            and self.inference == torch.is_inference_mode_enabled()
            and (self.stream is None or self.stream == device_of(given).current_stream())
        )


class Siblings:
    """Two or three layers. They are held weakly, and by their places in the group, which they keep
    when a model is copied or pickled: a layer alone has no siblings then."""

    def __init__(self, count: int, certain: bool) -> None:
        """certain: they get the same x by construction, which a compiler can rely on."""
        self.count, self.certain = count, certain
        self._layers: list[weakref.ref[QuantizedLinear] | None] = [None] * count
        self._seen: tuple[_Ahead, set[int]] | None = None
        self._together = False
        self._ahead: _Ahead | None = None
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

    # ---- Eager -----------------------------------------------------------------------

    def at_once(
        self, place: int, layer: QuantizedLinear, given: Tensor, dtype: torch.dtype
    ) -> Tensor | None:
        """The product of one layer in a dtype; None if it is left to the layer."""
        recording = torch.is_grad_enabled()
        if recording and given.requires_grad:
            return None
        if _private.any_autocast() or type(given) is not Tensor or not self._has(place, layer):
            return None
        ahead = self._ahead
        if ahead is not None and ahead.dtype == dtype and ahead.is_of(given):
            y = ahead.ys.pop(place, None)
            if y is not None:
                return y
        if not _private.is_idle():
            return None
        if not self._together:
            self._observe(place, given, dtype)
            return None
        ys = None if ahead is not None and ahead.ys else self._batch(given, dtype, recording)
        if ys is None:
            self._ahead, self._together = None, False
            return None
        ahead = _Ahead.of(given, dtype, dict(enumerate(ys)), self._forget)
        y = ahead.ys.pop(place)
        self._ahead = ahead  # from here on other threads may take from it
        return y

    def _batch(
        self, given: Tensor, dtype: torch.dtype, recording: bool
    ) -> tuple[Tensor, ...] | None:
        """The products of all; None if nothing was done."""
        biases, weights, wanted = [], [], set()
        for held in self._layers:
            layer = None if held is None else held()
            if layer is None:
                return None
            biases.append(layer.bias_in(dtype))
            weights.append(layer.parts())
            wanted.add(layer.compute_dtype)
        if len(wanted) > 1 or (recording and _private.any_requires_grad(*biases)):
            return None
        x = given if given.dtype == dtype else given.to(dtype)
        return _fast.linear_batch(x, tuple(biases), tuple(weights))

    def _observe(self, place: int, given: Tensor, dtype: torch.dtype) -> None:
        """Sees whether all are called with one x."""
        if self._seen is None or not self._seen[0].is_of(given):
            self._seen = (_Ahead.of(given, dtype, {}), set())
        self._seen[1].add(place)
        if len(self._seen[1]) == self.count:
            self._seen, self._together = None, True

    def _forget(self, x: weakref.ref[Tensor]) -> None:
        """Lets go of what was computed ahead for an x that is gone."""
        ahead = self._ahead
        if ahead is not None and ahead.x is x:
            self._together = self._together and not ahead.ys
            self._ahead = None

    # ---- Compiled ----------------------------------------------------------------------

    def traced(
        self, place: int, layer: QuantizedLinear, given: Tensor, dtype: torch.dtype
    ) -> Tensor | None:
        """at_once, as a compiler traces it, gradients included."""
        layers = [None if held is None else held() for held in self._layers]
        if not self.certain or None in layers or layers[place] is not layer:
            return None
        traced = self._traced
        if traced is not None and (traced[0] is not given or place not in traced[1]):
            # Products were left over, perhaps as one layer is compiled alone.
            self.certain, self._traced = False, None
            return None
        if traced is None:
            biases = [each.bias_in(dtype) for each in layers]
            weights = [each.parts() for each in layers]
            ys = _operators.linear_batch(given.to(dtype), biases, weights)
            traced = (given, dict(enumerate(ys)))
        y = traced[1].pop(place)
        self._traced = traced if traced[1] else None
        return y
