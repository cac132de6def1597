# As much of torch as nf4's annotations name, so that types are checked without torch.

class device:
    type: str
    index: int | None

class dtype:
    is_floating_point: bool
    is_complex: bool

float16: dtype

class Tensor:
    @property
    def device(self) -> device: ...
    @property
    def dtype(self) -> dtype: ...
    @property
    def is_cuda(self) -> bool: ...
    def __dlpack__(
        self,
        *,
        stream: int | None = ...,
        max_version: tuple[int, int] | None = ...,
    ) -> object: ...
    def __dlpack_device__(self) -> tuple[int, int]: ...
