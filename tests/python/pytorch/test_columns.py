"""The operators that write the outputs of several weights side by side."""

import pytest

torch = pytest.importorskip("torch")
nf4_torch = pytest.importorskip("nf4.torch")

pytestmark = pytest.mark.interop


def made(rows: tuple[int, ...], nested: bool, dtype, has_bias: bool, cols: int = 128):
    """Arguments of an operator, and the outputs of single weights."""
    generator = torch.Generator().manual_seed(sum(rows))
    x = torch.randn(2, 3, cols, generator=generator).to(dtype)
    weights, biases = [], []
    for each in rows:
        dense = torch.randn(each, cols, generator=generator)
        weights.append(nf4_torch.quantize(dense, nested_blocksize=256 if nested else 0))
        bias = torch.randn(each, generator=generator).to(dtype) if has_bias else None
        biases.append(bias)
    alone = [nf4_torch.linear(x, *each) for each in zip(weights, biases, strict=True)]
    numbers = [n for each in weights for n in nf4_torch.functional.WeightParts.of(each).numbers()]
    return (x, *biases, *numbers), torch.cat(alone, dim=-1)


def operator(count: int):
    return getattr(torch.ops.nf4, f"_linear_columns{count}")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("rows", [(96, 32), (64, 32, 16), (5, 64, 1)])
def test_columns_are_the_outputs_of_single_weights(rows, nested, has_bias, dtype):
    arguments, expected = made(rows, nested, dtype, has_bias)
    assert torch.equal(operator(len(rows))(*arguments), expected)


def test_a_compiler_sees_the_shape():
    arguments, expected = made((64, 32, 16), True, torch.float32, True)
    compiled = torch.compile(lambda *a: operator(3)(*a) * 2, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(*arguments), expected * 2)


def test_the_kernel_without_the_extension_module():
    from nf4.torch._operators_batch import _linear_columns

    arguments, expected = made((64, 32), True, torch.float32, True)
    assert torch.equal(_linear_columns(2, *arguments), expected)


def test_a_bias_of_another_size_is_refused():
    arguments, _ = made((64, 32), True, torch.float32, True)
    x, first, second, *numbers = arguments
    with pytest.raises(ValueError, match="bias"):
        operator(2)(x, second, first, *numbers)
