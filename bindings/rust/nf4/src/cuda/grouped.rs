//! Products of a stack of experts on the GPU, in the order of a stream.

use cudarc::driver::{CudaStream, CudaView, CudaViewMut, DeviceSlice};

use super::access::{Access, Readable};
use super::tensor::CudaRef;
use super::CudaInt4Stack;
use crate::device::{self, DeviceGrouped, DevicePtr, Stream};
use crate::error::check_length;
use crate::matmul::product;
use crate::{Element, Result};

/// What the experts of a weight are multiplied with, as [`Grouped`](crate::Grouped), in buffers on
/// the GPU. There are as many experts as `ends`, and each has as many of the weight's rows. No value
/// of `ends`, `x_index` and `row_scale` is read on the host, and any are allowed.
#[derive(Debug)]
pub struct CudaGrouped<'a, T> {
    /// Contiguous rows of `cols` elements; in the gradient of as many as an expert has rows.
    pub x: CudaView<'a, T>,
    /// Where the rows of y of each expert end.
    pub ends: CudaView<'a, i32>,
    /// The row of `x` for each row of y; `None`: row i for row i.
    pub x_index: Option<CudaView<'a, i32>>,
    /// `[experts, rows of an expert]`; `None` in the gradient.
    pub bias: Option<CudaView<'a, T>>,
    /// What each row of y is multiplied with.
    pub row_scale: Option<CudaView<'a, f32>>,
}

/// Enqueues on `stream`: the products of the experts, as [`matmul_grouped`](crate::matmul_grouped),
/// into contiguous rows of `y`, of as many elements as an expert has rows; those behind the last end
/// are unspecified. `T` is [`half::f16`] or [`half::bf16`]. `workspace` has at least
/// [`Spec::matmul_grouped_workspace_bytes`](crate::Spec::matmul_grouped_workspace_bytes) bytes,
/// aligned to 16; `None` will do where that is 0.
///
/// # Errors
/// As [`dequantize_into`](super::dequantize_into), for any of the buffers.
pub fn matmul_grouped_into<T: Element>(
    operands: &CudaGrouped<'_, T>,
    weight: &CudaRef<'_>,
    y: &mut CudaViewMut<'_, T>,
    workspace: Option<&mut CudaViewMut<'_, u8>>,
    stream: &CudaStream,
) -> Result<()> {
    let (rows, cols) = weight.shape();
    let of_expert = rows / operands.ends.len().max(1);
    enqueue(operands, weight, [cols, of_expert], y, workspace, stream, {
        // SAFETY: enqueue checks the buffers.
        |weight, operands, workspace, bytes, stream| unsafe {
            device::matmul_grouped_launch(weight, operands, workspace, bytes, stream)
        }
    })
}

/// Enqueues on `stream`: the gradient of x, as [`matmul_grouped_grad`](crate::matmul_grouped_grad),
/// into contiguous rows of `grad_x`, of `cols` elements. Of `operands` x is the gradient of y.
/// `workspace` has at least
/// [`Spec::matmul_grouped_grad_workspace_bytes`](crate::Spec::matmul_grouped_grad_workspace_bytes)
/// bytes, aligned to 16; `None` will do where that is 0.
///
/// # Errors
/// As [`dequantize_into`](super::dequantize_into), for any of the buffers.
pub fn matmul_grouped_grad_into<T: Element>(
    operands: &CudaGrouped<'_, T>,
    weight: &CudaRef<'_>,
    grad_x: &mut CudaViewMut<'_, T>,
    workspace: Option<&mut CudaViewMut<'_, u8>>,
    stream: &CudaStream,
) -> Result<()> {
    let (rows, cols) = weight.shape();
    let of_expert = rows / operands.ends.len().max(1);
    enqueue(
        operands,
        weight,
        [of_expert, cols],
        grad_x,
        workspace,
        stream,
        {
            // SAFETY: enqueue checks the buffers.
            |weight, operands, workspace, bytes, stream| unsafe {
                device::matmul_grouped_grad_launch(weight, operands, workspace, bytes, stream)
            }
        },
    )
}

/// Enqueues on `stream`: the products of experts of integers, as [`matmul_grouped_into`]. There are
/// as many `ends` as the stack has experts. `workspace` has at least
/// [`Int4Spec::matmul_grouped_workspace_bytes`](crate::Int4Spec::matmul_grouped_workspace_bytes)
/// bytes.
///
/// # Errors
/// As [`dequantize_into`](super::dequantize_into), for any of the buffers.
///
/// ```
/// use half::bf16;
/// use nf4::cuda::{matmul_grouped_int4_into, CudaGrouped, CudaInt4Stack};
/// use nf4::cudarc::driver::{CudaSlice, CudaStream};
/// use std::sync::Arc;
///
/// /// Row i of y is that of the row token_of_row[i] of x, by the expert whose rows end behind i.
/// fn experts(
///     x: &CudaSlice<bf16>,
///     weight: &CudaInt4Stack<'_>,
///     ends: &CudaSlice<i32>,
///     token_of_row: &CudaSlice<i32>,
///     stream: &Arc<CudaStream>,
/// ) -> nf4::Result<CudaSlice<bf16>> {
///     let (spec, m) = (weight.spec(), token_of_row.len());
///     let bytes = spec.matmul_grouped_workspace_bytes::<bf16>(weight.experts(), m)?;
///     let mut workspace = stream.alloc_zeros::<u8>(bytes.max(1))?;
///     let mut y = stream.alloc_zeros::<bf16>(m * spec.rows)?;
///     let operands = CudaGrouped {
///         x: x.as_view(),
///         ends: ends.as_view(),
///         x_index: Some(token_of_row.as_view()),
///         bias: None,
///         row_scale: None,
///     };
///     let (to, workspace) = (&mut y.as_view_mut(), &mut workspace.as_view_mut());
///     matmul_grouped_int4_into(&operands, weight, to, Some(workspace), stream)?;
///     Ok(y)
/// }
/// ```
pub fn matmul_grouped_int4_into<T: Element>(
    operands: &CudaGrouped<'_, T>,
    weight: &CudaInt4Stack<'_>,
    y: &mut CudaViewMut<'_, T>,
    workspace: Option<&mut CudaViewMut<'_, u8>>,
    stream: &CudaStream,
) -> Result<()> {
    check_length("ends", operands.ends.len(), weight.experts())?;
    let (rows, cols) = weight.shape();
    let of_expert = rows / operands.ends.len().max(1);
    enqueue(operands, weight, [cols, of_expert], y, workspace, stream, {
        // SAFETY: enqueue checks the buffers.
        |weight, operands, workspace, bytes, stream| unsafe {
            device::matmul_grouped_int4_launch(weight, operands, workspace, bytes, stream)
        }
    })
}

/// Checks the buffers, and launches. The columns are those of x and of y.
fn enqueue<T: Element, W: Readable>(
    operands: &CudaGrouped<'_, T>,
    weight: &W,
    [x_columns, y_columns]: [usize; 2],
    y: &mut CudaViewMut<'_, T>,
    workspace: Option<&mut CudaViewMut<'_, u8>>,
    stream: &CudaStream,
    launch: impl FnOnce(&W::Device, &DeviceGrouped<T>, DevicePtr<u8>, usize, Stream) -> Result<()>,
) -> Result<()> {
    let (x, experts) = (&operands.x, operands.ends.len());
    // Of rows without elements any number could be meant: those that y has.
    let rows_of_x = x.len().checked_div(x_columns);
    let given_m = operands.x_index.as_ref().map(DeviceSlice::len);
    let m = match (given_m, rows_of_x) {
        (Some(m), _) | (None, Some(m)) => m,
        (None, None) => DeviceSlice::len(y).checked_div(y_columns).unwrap_or(0),
    };
    let x_rows = rows_of_x.unwrap_or(m);
    check_length(
        "x",
        x.len(),
        product("rows * columns of x", x_rows, x_columns)?,
    )?;
    check_length(
        "y",
        DeviceSlice::len(y),
        product("rows * columns of y", m, y_columns)?,
    )?;
    if let Some(bias) = &operands.bias {
        check_length("bias", bias.len(), weight.shape().0)?;
    }
    if let Some(row_scale) = &operands.row_scale {
        check_length("row_scale", row_scale.len(), m)?;
    }
    let access = Access::new(stream);
    let raw = weight.read(&access)?;
    let operands = DeviceGrouped {
        experts,
        m,
        x: access.read("x", x)?,
        x_stride: x_columns,
        x_rows,
        y: access.write("y", y)?,
        y_stride: y_columns,
        ends: access.read("ends", &operands.ends)?,
        x_index: access.read_optional("x_index", &operands.x_index)?,
        bias: access.read_optional("bias", &operands.bias)?,
        bias_stride: weight.shape().0 / experts.max(1),
        row_scale: access.read_optional("row_scale", &operands.row_scale)?,
    };
    let (workspace, workspace_bytes) = access.workspace(workspace)?;
    let stream = access.bound_stream()?;
    // The lengths were checked when the weight was made and above; cudarc frees or reuses the buffers
    // only after what `access` records; libnf4 checks the size of the workspace.
    launch(&raw, &operands, workspace, workspace_bytes, stream)
}
