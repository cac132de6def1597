"""FrozenPart: a part of a quantized weight, in a form that FSDP2 can shard.

FSDP2 makes a Parameter of each rank's shard before it says that it requires no gradient, and torch
refuses to make such a Parameter of integers. Therefore a part looks like a float tensor of its own
element size; the part itself is what is stored, moved and all-gathered. No cast changes it.

A part is cut along its first dimension like torch.chunk, at any element, because it is whole again
after the all-gather. The all-gather's own output is the unsharded part; nothing is copied.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from nf4.errors import InvalidArgument
from nf4.torch import _private
from nf4.torch._replacing import found

_aten = torch.ops.aten
# Integers look like floats of their size, because torch computes a parameter's bytes from its
# dtype.
_LOOKS = {torch.uint8: torch.float8_e4m3fn, torch.int32: torch.float32}
# Functions that do not depend on values run on the stored part. A torch may lack some.
_STRUCTURE = {
    found(_aten, name)
    for name in (
        "_pin_memory.default", "_to_copy.default", "alias.default", "as_strided.default",
        "clone.default", "copy_.default", "detach.default", "empty_like.default",
        "is_pinned.default", "narrow.default", "new_empty.default", "new_zeros.default",
        "slice.Tensor", "split.Tensor", "t.default", "view.default",
    )
}  # fmt: skip


class _PreAllGather(NamedTuple):
    """Returns what a rank sends: its rows, padded to the same number on each rank, as integers,
    because copying floats would change the bits of NaNs. FSDP2 asks for the signature in each
    all-gather, which takes Python 20 us for a method."""

    stored: Tensor

    def __call__(
        self, mesh: Any, outer_size: torch.Size, outer_stride: Any, module: Any, mp_policy: Any
    ) -> tuple[tuple[Tensor, ...], None]:
        return (_padded(self.stored, -(-outer_size[0] // mesh.size())),), None


_PreAllGather.__signature__ = inspect.signature(_PreAllGather(torch.empty(0)))


class FrozenPart(Tensor):
    """Looks like a float tensor of the shape of `stored`, the tensor that it holds."""

    stored: Tensor

    @staticmethod
    def __new__(cls, stored: Tensor) -> FrozenPart:
        made = Tensor._make_wrapper_subclass(
            cls,
            stored.size(),
            strides=stored.stride(),
            storage_offset=stored.storage_offset(),
            dtype=_LOOKS.get(stored.dtype, stored.dtype),
            device=stored.device,
        )
        made.stored = stored
        return made

    def requires_grad_(self, requires_grad: bool = True) -> FrozenPart:
        """Does nothing, because a part has no gradient."""
        return self

    def __repr__(self, **_: Any) -> str:
        return f"{type(self).__name__}({self.stored!r})"

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["stored"], None

    @classmethod
    def __tensor_unflatten__(
        cls, inner: dict[str, Tensor], context: None, size: Any, stride: Any
    ) -> FrozenPart:
        return cls(inner["stored"])

    @classmethod
    def __torch_dispatch__(
        cls,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func not in _STRUCTURE:
            raise NotImplementedError(
                f"{func} is called on a part of a quantized weight, which is not dense"
            )
        kwargs = {name: value for name, value in (kwargs or {}).items() if name != "dtype"}
        mapped = _private.tree_map
        made = func(*mapped(_stored, args), **mapped(_stored, kwargs))
        return args[0] if func is _aten.copy_.default else mapped(_part, made)

    # ---- FSDP2's extension of the all-gather ----------------------------------------

    @property
    def fsdp_pre_all_gather(self) -> _PreAllGather:
        return _PreAllGather(self.stored)

    def fsdp_post_all_gather(
        self,
        gathered: tuple[Tensor, ...],
        metadata: None,
        param_dtype: torch.dtype,
        *,
        out: Tensor | None = None,
    ) -> tuple[FrozenPart, tuple[Tensor, ...]] | None:
        """Returns the whole part. `out` is on the same memory, which FSDP2 frees and fills
        again."""
        return None if out is not None else (FrozenPart(gathered[0]), ())


def _stored(value: Any) -> Any:
    return value.stored if isinstance(value, FrozenPart) else value


def _part(value: Any) -> Any:
    return FrozenPart(value) if isinstance(value, Tensor) else value


def _padded(stored: Tensor, rows: int) -> Tensor:
    if stored.shape[0] >= rows:
        return stored
    shape = (rows, *stored.shape[1:])
    room = stored.untyped_storage().nbytes() // stored.itemsize - stored.storage_offset()
    if room >= math.prod(shape):  # FSDP2 allocates as many rows for every rank
        return stored.as_strided(shape, stored.stride())
    made = stored.new_empty(shape)
    made[: stored.shape[0]].copy_(stored)
    return made


def is_part(tensor: Any) -> bool:
    """Tells if a tensor is a FrozenPart or a DTensor of one."""
    return isinstance(_local(tensor), FrozenPart)


def _local(tensor: Any) -> Any:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


# ---- What a layer and its state_dict show of a part -------------------------------------


def shown(part: Tensor) -> Tensor:
    """Returns the stored part, or a DTensor of it with the same placements if it is sharded. Memory
    is shared."""
    if isinstance(part, FrozenPart):
        return part.stored.detach()
    return _of_local(part, part.to_local().stored.detach())


def _of_local(like: Any, local: Tensor) -> Any:
    from torch.distributed.tensor import DTensor  # whoever made `like` has imported it

    return DTensor.from_local(
        local,
        like.device_mesh,
        like.placements,
        run_check=False,
        shape=like.shape,
        stride=like.stride(),
    )


def _cut(like: Any, given: Tensor) -> Tensor:
    """Returns this rank's rows of a tensor that every rank has whole or that is sharded."""
    if type(given) is type(like):
        return given.redistribute(like.device_mesh, like.placements).to_local()
    for dim, placement in enumerate(like.placements):
        if placement.is_shard():
            rows = -(-given.shape[0] // like.device_mesh.size(dim))
            given = given[rows * like.device_mesh.get_local_rank(dim) :][:rows]
    return given


def require_like(name: str, own: Tensor | None, given: Tensor | None) -> None:
    """Requires the tensor that replaces `own` to be there, with its shape and, for a FrozenPart,
    its dtype, because no copy may cast it."""
    if own is None or given is None:
        what, expected = ("missing", "one") if given is None else ("given", "none")
        raise InvalidArgument(
            f"{name} is {what}; expected {expected}, as in the layer that is prepared for "
            f"fully_shard"
        )
    if own.shape != given.shape:
        raise InvalidArgument(
            f"{name} is of shape {tuple(given.shape)}; expected {tuple(own.shape)}"
        )
    dtype = _local(own).stored.dtype if is_part(own) else given.dtype
    if given.dtype != dtype:
        raise InvalidArgument(
            f"{name} is of {given.dtype}; expected {dtype}, as the layer that is prepared for "
            f"fully_shard"
        )


def load(part: Tensor, given: Tensor, assign: bool | None) -> nn.Parameter:
    """Returns the parameter with the content of `given`, which is whole or sharded. It is in the
    parameter's own memory, or with `assign` on the memory of `given`, unless a rank would then keep
    all of a whole tensor."""
    sharded = not isinstance(part, FrozenPart)
    is_view = sharded and type(given) is not type(part)
    given = _cut(part, given) if sharded else whole(given)
    own = _local(part)
    if not assign:
        own.stored.copy_(given.view(own.shape))
        return part
    made = FrozenPart(given.clone() if is_view else given.contiguous())
    return nn.Parameter(_of_local(part, made) if sharded else made, requires_grad=False)


def whole(given: Tensor) -> Tensor:
    """Returns the tensor, gathered if it is sharded."""
    return given.full_tensor() if hasattr(given, "full_tensor") else given
