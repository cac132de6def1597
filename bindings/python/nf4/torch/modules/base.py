"""QuantizedModule and QuantizedLinear: the base classes of modules and linear layers, for weights
of any kind."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from nf4.errors import InvalidArgument, kind_of, shown
from nf4.torch import _operators
from nf4.torch._checks import require_dense, require_finite, require_tensor, torch_dtype
from nf4.torch._schemas import Parts
from nf4.torch._weight import outside_inference
from nf4.torch.modules import frozen_part
from nf4.torch.modules.frozen_part import FrozenPart
from nf4.torch.modules.siblings import Member, Siblings, traced_product
from nf4.typing import DTypeLike

_Self = TypeVar("_Self", bound="QuantizedModule")

_OF_A_GROUP = ("_place", "_group", "_member")


def torch_device(device: torch.device | str | int | None) -> torch.device | None:
    """Returns the device; None is where torch makes tensors by default."""
    if device is None:
        return None
    try:
        return torch.device(device)
    except (RuntimeError, TypeError, ValueError) as error:
        why = str(error).splitlines()[0]
        raise InvalidArgument(
            f"device is {shown(device)}; expected a torch device: {why}"
        ) from None


def new_bias(
    wanted: bool, features: int, dtype: torch.dtype, device: torch.device | None
) -> nn.Parameter | None:
    """Makes a bias of zeros; None if none is wanted."""
    if not isinstance(wanted, (bool, int, type(None))):
        raise InvalidArgument(f"bias is {kind_of(wanted)}; expected True or False")
    return nn.Parameter(torch.zeros(features, dtype=dtype, device=device)) if wanted else None


def dense_weight(linear: nn.Linear, allow_nonfinite: bool, instead: str = "") -> Tensor:
    """Returns a dense layer's weight, to be quantized. `instead` says what other layers are for."""
    if type(linear) is not nn.Linear:
        raise InvalidArgument(
            f"linear is {kind_of(linear)}; expected a torch.nn.Linear, whose weight is dense"
            f"{instead}"
        )
    require_dense("linear.weight", linear.weight)
    if not allow_nonfinite:
        require_finite("linear.weight", linear.weight)
    return linear.weight.detach()


def require_memory(own: Tensor, given: Tensor) -> None:
    """Requires the tensor that load_state_dict copies `given` to to have memory."""
    if own.is_meta and not given.is_meta:
        raise InvalidArgument(
            "the layer is on meta, where nothing can be copied to; expected "
            "load_state_dict(..., assign=True), or a layer that to_empty() gave memory"
        )


class CutOf(NamedTuple):
    """The part of a weight of this shape that a layer has: ranges of rows (dim 0) or columns (dim
    1)."""

    shape: tuple[int, int]
    dim: int
    ranges: Sequence[tuple[int, int]]


class QuantizedModule(nn.Module):
    """A module with a frozen, quantized weight. No cast changes its buffers, which are scales:
    .half() changes only other floats. FSDP2 shards the attributes that sharded_parts names."""

    # The part of its weight that a layer has which tensor parallelism has cut, for checkpoints.
    cut_of: CutOf | None = None

    def took_weight(self) -> None:
        """Called when the module has a new weight, which may have another spec."""

    def forget(self) -> None:
        """Drops whatever else refers to the memory of the parts, before the module gives them
        up."""

    def _apply(self: _Self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> _Self:
        self.forget()
        scales = {id(scale) for scale in self._buffers.values() if scale is not None}

        def moved(tensor: Tensor) -> Tensor:
            if id(tensor) not in scales or frozen_part.is_part(tensor):
                return fn(tensor)
            # Buffers pass as bytes, which are moved like floats but never cast.
            result = fn(tensor.reshape(-1).view(torch.uint8))
            return result.view(tensor.dtype).view(tensor.shape)

        super()._apply(moved, recurse)
        self.settle()
        return self

    def settle(self) -> None:
        """Called when torch has set the module's tensors. Tensors that torch.inference_mode made
        are replaced by others on the same memory, which can be trained later."""
        for own in (self._parameters, self._buffers):
            for name, tensor in own.items():
                if tensor is not None and not frozen_part.is_part(tensor) and tensor.is_inference():
                    made = outside_inference(tensor.detach())
                    if isinstance(tensor, nn.Parameter):
                        made = type(tensor)(made, tensor.requires_grad)
                    own[name] = made

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.settle()
        self.took_weight()

    def parts(self) -> Parts:
        """Returns the current weight."""
        raise NotImplementedError

    def sharded_parts(self) -> dict[str, str]:
        """Returns the attributes that FSDP2 shards, by the parts' names. Each rank keeps the other
        parts whole, which are small."""
        raise NotImplementedError

    def is_prepared(self) -> bool:
        """Tells if distributed.prepare has prepared the sharded parts."""
        *_, name = self.sharded_parts().values()
        return frozen_part.is_part(getattr(self, name))

    def require_unprepared(self) -> None:
        """Raises InvalidArgument if the module is prepared. New codes would be lost with FSDP2's
        next reshard."""
        if self.is_prepared():
            raise InvalidArgument(
                "the layer is prepared for fully_shard, whose next all-gather brings the old codes "
                "back; expected a weight that is merged, quantized again or reordered before "
                "fully_shard or prepare"
            )

    def stored(self, name: str) -> Tensor | None:
        """Returns an attribute, or the stored tensor if distributed.prepare has made it a
        FrozenPart. Raises InvalidArgument while it is sharded."""
        part = getattr(self, name)
        if isinstance(part, FrozenPart):
            return part.stored
        if frozen_part.is_part(part):
            raise InvalidArgument(
                "the weight is sharded; expected a call within the forward of the module that "
                "fully_shard was given, or after its unshard()"
            )
        return part

    def _shown(self) -> dict[str, Tensor]:
        """Returns the sharded parts by name, as a state_dict has them: DTensors if sharded."""
        names = self.sharded_parts().items()
        return {part: frozen_part.shown(getattr(self, name)) for part, name in names}

    def _load_parts(self, given: dict[str, Tensor | None], assign: bool | None) -> None:
        """Loads parts of a weight, by the names of attributes, into a prepared layer."""
        for name, tensor in given.items():
            own = getattr(self, name)
            frozen_part.require_like(name, own, tensor)
            if own is not None and not assign:
                require_memory(own, tensor)
        for name, tensor in given.items():
            own = getattr(self, name)
            if frozen_part.is_part(own):
                setattr(self, name, frozen_part.load(own, tensor, assign))
            elif assign:
                setattr(self, name, frozen_part.whole(tensor))
            else:
                own.copy_(frozen_part.whole(tensor))

    def __setattr__(self, name: str, value: Any) -> None:
        # FSDP2 sets the parts that it shards or gathers as parameters, in these places.
        if type(value) is not nn.Parameter and isinstance(value, nn.Parameter):
            own = self._buffers if name in self._buffers else self._parameters
            own[name] = value
        else:
            super().__setattr__(name, value)
        if name in ("_parameters", "_buffers"):
            self.took_weight()


class QuantizedLinear(QuantizedModule, nn.Linear):
    """y = x W^T + bias, with a frozen, quantized W.

    A derived class holds the codes in the parameter `weight` or in a buffer, and the scales in
    buffers, which no cast changes. It defines parts, plain_parts, dequantize, the keys of its
    state_dict, and constructors that call _take_bias.
    """

    # The dense weight's dtype, by libnf4's name; None: the scales' dtype.
    dtype_before: str | None = None
    # This is a name because a dtype in a module makes torch check its guards one by one
    # (siblings.py).
    _compute_dtype: str | None
    # The layer's group, and its place in the group.
    _siblings: tuple[Siblings, int] | None = None
    # A trace reads these: the layer's place, and what the group's first layer knows of all. They
    # are not in the layer's state, because a copy joins a group of its own.
    _place: int | None = None
    _group: dict[Any, Any] | None = None
    _member: Member | None = None
    # The dimension that a style of nf4.torch.distributed has cut. 0: rows. 1: columns; products are
    # summed over the ranks before the bias is added.
    tensor_parallel: int | None = None

    @property
    def _distribute_module_applied(self) -> bool:
        """torch's tensor parallel styles look for this attribute to see if a layer is cut already.
        Without it they would cut the weight's bytes as if they were rows. Other code does not find
        it."""
        here = inspect.currentframe()
        caller = here.f_back if here is not None else None
        module = "" if caller is None else caller.f_globals.get("__name__", "")
        if not module.startswith("torch.distributed."):
            raise AttributeError("_distribute_module_applied")
        raise InvalidArgument(
            f"a style of torch.distributed.tensor.parallel is given for {type(self).__name__}; "
            f"expected nf4.torch.distributed.ColwiseParallel or RowwiseParallel, with the same "
            f"arguments"
        )

    @property
    def compute_dtype(self) -> torch.dtype | None:
        """The dtype to which x and bias are cast; None: the dtype of x. It can be set."""
        return None if self._compute_dtype is None else getattr(torch, self._compute_dtype)

    @compute_dtype.setter
    def compute_dtype(self, dtype: torch.dtype | None) -> None:
        self._compute_dtype = None if dtype is None else str(dtype).removeprefix("torch.")

    def multiply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """Returns x W^T + bias in the dtype of x, or autocast's. x and bias have one dtype."""
        return _operators.linear(x, bias, self.parts())

    def bias_in(self, dtype: torch.dtype) -> Tensor | None:
        """Returns the bias in a dtype, or None if the product is not to include it."""
        # torch.nn.Module looks for an attribute in three places before this one. DataParallel and
        # parametrizations put a parameter elsewhere.
        parameters = self._parameters
        bias = parameters["bias"] if "bias" in parameters else self.bias
        if bias is None or self.tensor_parallel == 1:
            return None
        return bias if bias.dtype == dtype else bias.to(dtype)

    @staticmethod
    def plain_parts(parameters: dict[str, Any], buffers: dict[str, Any], spec: Any) -> Parts | None:
        """Returns the weight of a layer with these parameters and buffers; None if it is elsewhere,
        or sharded."""
        raise NotImplementedError

    def dequantize(self, dtype: DTypeLike | None = None) -> Tensor:
        """Returns the dense W, [out_features, in_features]."""
        raise NotImplementedError

    def _take_bias(
        self, bias: nn.Parameter | None, features: int, compute_dtype: DTypeLike | None
    ) -> None:
        wanted = None if compute_dtype is None else torch_dtype(compute_dtype, "compute_dtype")
        if bias is not None and not isinstance(bias, nn.Parameter):
            raise InvalidArgument(f"bias is {kind_of(bias)}; expected a torch.nn.Parameter")
        if bias is not None and bias.shape != (features,):
            raise InvalidArgument(f"bias is of shape {tuple(bias.shape)}; expected ({features},)")
        self.compute_dtype = wanted
        self.register_parameter("bias", bias)
        self.settle()

    def forward(self, x: Tensor) -> Tensor:
        """x is [..., in_features]. y is [..., out_features] in the dtype of x, or autocast's."""
        require_tensor("x", x)
        dtype, name = x.dtype, self._compute_dtype
        wanted = None if name is None else getattr(torch, name)
        casts = (
            wanted is not None and wanted != dtype and not torch.is_autocast_enabled(x.device.type)
        )
        y = None
        if self._place is not None:
            if torch.compiler.is_dynamo_compiling():
                y = traced_product(self, x, wanted if casts else dtype)
            else:
                group, place = self._siblings
                y = group.product(place, self, x, wanted if casts else dtype)
        if y is None:
            x = x.to(wanted) if casts else x
            y = self.multiply(x, self.bias_in(x.dtype))
        return y.to(dtype) if casts else y

    def __getstate__(self) -> dict[str, Any]:
        return {name: own for name, own in self.__dict__.items() if name not in _OF_A_GROUP}

    def _replicate_for_data_parallel(self: _Self) -> _Self:
        replica = super()._replicate_for_data_parallel()
        replica._siblings = replica._place = replica._group = replica._member = None
        return replica

    def took_weight(self) -> None:
        if self._siblings is not None:
            group, place = self._siblings
            group.join(place, self)

    def to_linear(self, dtype: DTypeLike | None = None) -> nn.Linear:
        """Returns a dense layer with W in this dtype; by default that of the weight before it was
        quantized, or of the scales of a checkpoint's integers. It shares the bias if that has this
        dtype, else it has a cast copy."""
        if self.tensor_parallel is not None:
            raise InvalidArgument("layer is cut for tensor parallelism; expected a whole one")
        dtype = self.dtype_before if dtype is None else dtype
        with torch.inference_mode(False):  # it can be trained later
            weight = nn.Parameter(self.dequantize(dtype), requires_grad=False)
        made = nn.Linear(self.in_features, self.out_features, bias=False, device="meta")
        made.weight = weight
        if self.bias is not None and self.bias.dtype != weight.dtype:
            made.bias = nn.Parameter(self.bias.detach().to(weight.dtype), self.bias.requires_grad)
        else:
            made.bias = self.bias
        return made.train(self.training)

    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, "
            f"bias={self.bias is not None}"
        )
