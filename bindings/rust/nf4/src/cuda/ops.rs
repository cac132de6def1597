//! Quantize, dequantize and matmul on the GPU, in the order of a stream.

use cudarc::driver::{CudaStream, CudaView, CudaViewMut, DeviceSlice};

use super::access::{Access, Readable};
use super::tensor::{CudaMut, CudaRef};
use super::CudaWeight;
use crate::device::{self, DeviceMatmul, DeviceTensor};
use crate::error::check_length;
use crate::matmul::product;
use crate::{Element, Result};

/// Enqueues on `stream`: dequantize `weight` into the `rows * cols` elements of `out`.
///
/// # Errors
/// [`Error::InvalidArgument`](crate::Error::InvalidArgument) if `out` has another length than the weight, or a buffer is of
/// another context than the stream; what the launch or the driver reports.
pub fn dequantize_into<T: Element>(
    weight: &impl CudaWeight,
    out: &mut CudaViewMut<'_, T>,
    stream: &CudaStream,
) -> Result<()> {
    let (rows, cols) = weight.shape();
    check_length("out", DeviceSlice::len(out), rows * cols)?;
    let access = Access::new(stream);
    let raw = weight.read(&access)?;
    let out = access.write("out", out)?;
    let stream = access.bound_stream()?;
    // SAFETY: the lengths were checked when the weight was made and above; cudarc frees or
    // reuses the buffers only after what `access` records; `out` is borrowed mutably, so it
    // is no part of the weight.
    unsafe { device::dequant_launch(&raw, out, stream) }
}

/// Enqueues on `stream`: quantize the `rows * cols` elements of `values` into the buffers of
/// `weight`. `workspace` has at least
/// [`Spec::workspace_bytes`](crate::Spec::workspace_bytes) bytes, aligned to 16.
///
/// # Errors
/// As [`dequantize_into`], and [`Error::InvalidArgument`](crate::Error::InvalidArgument) if the workspace is too small.
pub fn quantize_into<T: Element>(
    values: &CudaView<'_, T>,
    weight: &mut CudaMut<'_>,
    workspace: &mut CudaViewMut<'_, u8>,
    stream: &CudaStream,
) -> Result<()> {
    check_length("values", DeviceSlice::len(values), weight.elements)?;
    let workspace_bytes = DeviceSlice::len(workspace);
    let access = Access::new(stream);
    let raw = DeviceTensor {
        spec: weight.spec,
        packed: access.write("packed", &mut weight.packed)?,
        scales: weight.scales.as_mut().try_map(
            |name, absmax| access.write(name, absmax),
            |name, codes| access.write(name, codes),
            |name, code| access.read(name, code),
            |name, offset| access.write(name, offset),
        )?,
        codebook: access.read_optional("codebook", &weight.codebook)?,
    };
    let values = access.read("values", values)?;
    let workspace = access.write("workspace", workspace)?;
    let stream = access.bound_stream()?;
    // SAFETY: as in dequantize_into; libnf4 checks the size of the workspace.
    unsafe { device::quantize_launch(values, &raw, workspace, workspace_bytes, stream) }
}

/// Enqueues on `stream`: `y = x weight^T + bias`, as [`matmul`](crate::matmul), with `m` contiguous rows
/// of `x`. `T` is [`half::f16`] or [`half::bf16`]. `workspace` has at least
/// [`Spec::matmul_workspace_bytes`](crate::Spec::matmul_workspace_bytes) or
/// [`CudaInt4Ref::matmul_workspace_bytes`](super::CudaInt4Ref::matmul_workspace_bytes) bytes,
/// aligned to 16; `None` will do where that is 0.
///
/// # Errors
/// As [`dequantize_into`], for any of the buffers.
pub fn matmul_into<T: Element>(
    x: &CudaView<'_, T>,
    m: usize,
    weight: &impl CudaWeight,
    bias: Option<&CudaView<'_, T>>,
    y: &mut CudaViewMut<'_, T>,
    workspace: Option<&mut CudaViewMut<'_, u8>>,
    stream: &CudaStream,
) -> Result<()> {
    let (rows, cols) = weight.shape();
    check_length("x", DeviceSlice::len(x), product("m * cols", m, cols)?)?;
    check_length("y", DeviceSlice::len(y), product("m * rows", m, rows)?)?;
    if let Some(bias) = bias {
        check_length("bias", DeviceSlice::len(bias), rows)?;
    }
    let access = Access::new(stream);
    let raw = weight.read(&access)?;
    let operands = DeviceMatmul {
        m,
        x: access.read("x", x)?,
        x_stride: cols,
        bias: bias.map(|bias| access.read("bias", bias)).transpose()?,
        y: access.write("y", y)?,
        y_stride: rows,
    };
    let (workspace, workspace_bytes) = access.workspace(workspace)?;
    let stream = access.bound_stream()?;
    // SAFETY: as in dequantize_into; libnf4 checks the size of the workspace.
    unsafe { device::matmul_launch(&raw, &operands, workspace, workspace_bytes, stream) }
}

/// Enqueues on `stream`: the gradient of x, as [`matmul_grad`](crate::matmul_grad), with `m`
/// contiguous rows of `grad_y`. `workspace` has at least
/// [`Spec::matmul_grad_workspace_bytes`](crate::Spec::matmul_grad_workspace_bytes) bytes, aligned
/// to 16; `None` will do where that is 0.
///
/// # Errors
/// As [`dequantize_into`], for any of the buffers.
pub fn matmul_grad_into<T: Element>(
    grad_y: &CudaView<'_, T>,
    m: usize,
    weight: &CudaRef<'_>,
    grad_x: &mut CudaViewMut<'_, T>,
    workspace: Option<&mut CudaViewMut<'_, u8>>,
    stream: &CudaStream,
) -> Result<()> {
    let (rows, cols) = weight.shape();
    let length = product("m * rows", m, rows)?;
    check_length("grad_y", DeviceSlice::len(grad_y), length)?;
    let length = product("m * cols", m, cols)?;
    check_length("grad_x", DeviceSlice::len(grad_x), length)?;
    let access = Access::new(stream);
    let raw = weight.read(&access)?;
    let operands = DeviceMatmul {
        m,
        x: access.read("grad_y", grad_y)?,
        x_stride: rows,
        bias: None,
        y: access.write("grad_x", grad_x)?,
        y_stride: cols,
    };
    let (workspace, workspace_bytes) = access.workspace(workspace)?;
    let stream = access.bound_stream()?;
    // SAFETY: as in dequantize_into; libnf4 checks the size of the workspace.
    unsafe { device::matmul_grad_launch(&raw, &operands, workspace, workspace_bytes, stream) }
}
