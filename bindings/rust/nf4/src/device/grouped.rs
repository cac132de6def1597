//! Products of a stack of experts.

use std::ptr;

use nf4_sys as sys;

use super::{DeviceInt4Tensor, DevicePtr, DeviceTensor, Stream};
use crate::error::check;
use crate::grouped::RawGrouped;
use crate::kind::Described;
use crate::{Element, Result};

/// What the experts of a weight are multiplied with, as [`Grouped`](crate::Grouped), in device
/// memory; buffer sizes are not checked. N is the rows of an expert. In the gradient x is
/// `[x_rows, N]` and y `[m, cols]`, with strides to match.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct DeviceGrouped<T> {
    /// A divisor of the rows of a [`DeviceTensor`].
    pub experts: usize,
    /// Rows of `y`.
    pub m: usize,
    /// `[x_rows, cols]`.
    pub x: DevicePtr<T>,
    /// At least the columns of the weight.
    pub x_stride: usize,
    /// At least `m` without `x_index`.
    pub x_rows: usize,
    /// `[m, N]`. Rows behind the last end are unspecified.
    pub y: DevicePtr<T>,
    /// At least N.
    pub y_stride: usize,
    /// `[experts]`.
    pub ends: DevicePtr<i32>,
    /// `[m]`.
    pub x_index: Option<DevicePtr<i32>>,
    /// `[experts, N]`.
    pub bias: Option<DevicePtr<T>>,
    /// At least N.
    pub bias_stride: usize,
    /// `[m]`.
    pub row_scale: Option<DevicePtr<f32>>,
}

impl<T: Element> DeviceGrouped<T> {
    fn raw(&self) -> Result<sys::nf4_grouped_args> {
        RawGrouped {
            dtype: T::DTYPE.as_raw(),
            experts: self.experts,
            m: self.m,
            x: self.x.as_raw().cast_const().cast(),
            x_stride: self.x_stride,
            x_rows: self.x_rows,
            y: self.y.as_raw().cast(),
            y_stride: self.y_stride,
            ends: self.ends.as_raw(),
            x_index: self.x_index.map_or(ptr::null(), |index| index.as_raw()),
            bias: self
                .bias
                .map_or(ptr::null(), |bias| bias.as_raw().cast_const().cast()),
            bias_stride: self.bias_stride,
            row_scale: self.row_scale.map_or(ptr::null(), |scale| scale.as_raw()),
        }
        .raw()
    }
}

/// Enqueues on `stream`: the products of the experts, as [`matmul_grouped`](crate::matmul_grouped).
/// `T` is [`half::f16`] or [`half::bf16`]. `ends`, `x_index` and `row_scale` are read on the GPU
/// alone, where any values are allowed: a CUDA graph may be replayed with others.
/// [`Spec::matmul_grouped_workspace_bytes`](crate::Spec::matmul_grouped_workspace_bytes) says how
/// much workspace is needed.
///
/// # Errors
/// As [`dequant_launch`](super::dequant_launch).
///
/// # Safety
/// As for [`matmul_launch`](super::matmul_launch), with `ends`, `x_index` and `row_scale` among what
/// is read.
pub unsafe fn matmul_grouped_launch<T: Element>(
    weight: &DeviceTensor,
    operands: &DeviceGrouped<T>,
    workspace: DevicePtr<u8>,
    workspace_bytes: usize,
    stream: Stream,
) -> Result<()> {
    let (weight, args) = (weight.raw()?, operands.raw()?);
    // SAFETY: the structs live through the call; the rest is as the caller promises.
    check(unsafe {
        let workspace = workspace.as_raw().cast();
        sys::nf4_matmul_grouped_launch(&weight, &args, workspace, workspace_bytes, stream.0)
    })
}

/// Enqueues on `stream`: the gradient of x, as [`matmul_grouped_grad`](crate::matmul_grouped_grad):
/// of `operands` x is the gradient of y, and y is written.
/// [`Spec::matmul_grouped_grad_workspace_bytes`](crate::Spec::matmul_grouped_grad_workspace_bytes)
/// says how much workspace is needed. All else is as in [`matmul_grouped_launch`].
///
/// # Errors
/// As [`dequant_launch`](super::dequant_launch).
///
/// # Safety
/// As for [`matmul_grouped_launch`].
pub unsafe fn matmul_grouped_grad_launch<T: Element>(
    weight: &DeviceTensor,
    operands: &DeviceGrouped<T>,
    workspace: DevicePtr<u8>,
    workspace_bytes: usize,
    stream: Stream,
) -> Result<()> {
    let (weight, args) = (weight.raw()?, operands.raw()?);
    // SAFETY: the structs live through the call; the rest is as the caller promises.
    check(unsafe {
        let workspace = workspace.as_raw().cast();
        sys::nf4_matmul_grouped_grad_launch(&weight, &args, workspace, workspace_bytes, stream.0)
    })
}

/// Enqueues on `stream`: the products of experts of integers. `weight` is the first expert, with its
/// columns in order; each of its parts is followed by those of the others.
/// [`Int4Spec::matmul_grouped_workspace_bytes`](crate::Int4Spec::matmul_grouped_workspace_bytes) says
/// how much workspace is needed. All else is as in [`matmul_grouped_launch`].
///
/// # Errors
/// As [`dequant_launch`](super::dequant_launch).
///
/// # Safety
/// As for [`matmul_grouped_launch`], with the parts of all experts.
pub unsafe fn matmul_grouped_int4_launch<T: Element>(
    weight: &DeviceInt4Tensor,
    operands: &DeviceGrouped<T>,
    workspace: DevicePtr<u8>,
    workspace_bytes: usize,
    stream: Stream,
) -> Result<()> {
    let (weight, args) = (weight.raw()?, operands.raw()?);
    // SAFETY: the structs live through the call; the rest is as the caller promises.
    check(unsafe {
        let workspace = workspace.as_raw().cast();
        sys::nf4_int4_matmul_grouped_launch(&weight, &args, workspace, workspace_bytes, stream.0)
    })
}
