//! The gradient of a matmul, and low-rank adapters and their gradients.

use std::ffi::c_void;
use std::ptr;

use nf4_sys as sys;

use super::{DeviceMatmul, DevicePtr, DeviceTensor, Stream};
use crate::error::check;
use crate::gradient::RawLora;
use crate::kind::Described;
use crate::lora_grad::RawLoraGrad;
use crate::{Element, Result};

/// A low-rank adapter in device memory: W + `scale` B A. Buffer sizes are not checked.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct DeviceLora<T, A> {
    /// 1 to 128.
    pub rank: usize,
    /// A finite number.
    pub scale: f32,
    /// A: `[rank, cols]` of `T`, or of `f32`, which may be rounded to that.
    pub a: DevicePtr<A>,
    /// At least the columns of the weight.
    pub a_stride: usize,
    /// B: `[rows, rank]`.
    pub b: DevicePtr<A>,
    /// At least the rank.
    pub b_stride: usize,
    /// `[m, rank]`, contiguous: x A^T, or grad_y B, is written there.
    pub product: Option<DevicePtr<T>>,
}

impl<T, A: Element> DeviceLora<T, A> {
    fn raw(&self) -> Result<sys::nf4_lora> {
        RawLora {
            dtype: A::DTYPE.as_raw(),
            rank: self.rank,
            scale: self.scale,
            a: self.a.as_raw().cast_const().cast(),
            a_stride: self.a_stride,
            b: self.b.as_raw().cast_const().cast(),
            b_stride: self.b_stride,
            product: self
                .product
                .map_or(ptr::null_mut(), |product| product.as_raw().cast()),
        }
        .raw()
    }
}

/// [`matmul_launch`](super::matmul_launch) with an adapter.
/// [`Spec::matmul_lora_workspace_bytes`](crate::Spec::matmul_lora_workspace_bytes) says how much
/// workspace is needed.
///
/// # Errors
/// As [`dequant_launch`](super::dequant_launch).
///
/// # Safety
/// As for [`matmul_launch`](super::matmul_launch), with A and B among what is read and the product
/// among what is written.
pub unsafe fn matmul_lora_launch<T: Element, A: Element>(
    weight: &DeviceTensor,
    operands: &DeviceMatmul<T>,
    lora: &DeviceLora<T, A>,
    workspace: DevicePtr<u8>,
    workspace_bytes: usize,
    stream: Stream,
) -> Result<()> {
    let (weight, lora) = (weight.raw()?, lora.raw()?);
    // SAFETY: the structs live through the call; the rest is as the caller promises.
    check(unsafe {
        let args = operands.raw().raw_with(&lora)?;
        let workspace = workspace.as_raw().cast();
        sys::nf4_matmul_launch(&weight, &args, workspace, workspace_bytes, stream.0)
    })
}

/// Enqueues on `stream`: `y = x weight`, as [`matmul_grad`](crate::matmul_grad). `x` is grad_y, of
/// as many columns as the weight has rows, `y` is the gradient, of as many as it has columns, and
/// there is no bias.
/// [`Spec::matmul_grad_workspace_bytes`](crate::Spec::matmul_grad_workspace_bytes) says how much
/// workspace is needed.
///
/// # Errors
/// As [`dequant_launch`](super::dequant_launch).
///
/// # Safety
/// As for [`matmul_launch`](super::matmul_launch).
pub unsafe fn matmul_grad_launch<T: Element>(
    weight: &DeviceTensor,
    operands: &DeviceMatmul<T>,
    workspace: DevicePtr<u8>,
    workspace_bytes: usize,
    stream: Stream,
) -> Result<()> {
    let weight = weight.raw()?;
    // SAFETY: the structs live through the call; the rest is as the caller promises.
    check(unsafe {
        let args = operands.raw().raw()?;
        let workspace = workspace.as_raw().cast();
        sys::nf4_matmul_grad_launch(&weight, &args, workspace, workspace_bytes, stream.0)
    })
}

/// [`matmul_grad_launch`] with an adapter.
///
/// # Errors
/// As [`dequant_launch`](super::dequant_launch).
///
/// # Safety
/// As for [`matmul_lora_launch`].
pub unsafe fn matmul_grad_lora_launch<T: Element, A: Element>(
    weight: &DeviceTensor,
    operands: &DeviceMatmul<T>,
    lora: &DeviceLora<T, A>,
    workspace: DevicePtr<u8>,
    workspace_bytes: usize,
    stream: Stream,
) -> Result<()> {
    let (weight, lora) = (weight.raw()?, lora.raw()?);
    // SAFETY: the structs live through the call; the rest is as the caller promises.
    check(unsafe {
        let args = operands.raw().raw_with(&lora)?;
        let workspace = workspace.as_raw().cast();
        sys::nf4_matmul_grad_launch(&weight, &args, workspace, workspace_bytes, stream.0)
    })
}

/// What the gradients of an adapter's matrices are made of, as [`LoraGrad`](crate::LoraGrad), and
/// where they go, in device memory; buffer sizes are not checked. Of a gradient that is not wanted
/// the strides are not looked at, and addresses may be [`DevicePtr::NULL`].
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct DeviceLoraGrad<T, G> {
    /// 1 to 128.
    pub rank: usize,
    /// A finite number.
    pub scale: f32,
    /// Rows of `x`, `grad_y`, `p` and `q`.
    pub m: usize,
    /// Columns of `grad_y`.
    pub rows: usize,
    /// Columns of `x`.
    pub cols: usize,
    /// `[m, cols]`, for A.
    pub x: DevicePtr<T>,
    /// At least `cols`.
    pub x_stride: usize,
    /// `[m, rows]`, for B.
    pub grad_y: DevicePtr<T>,
    /// At least `rows`.
    pub grad_y_stride: usize,
    /// x A^T, `[m, rank]`, contiguous, for B.
    pub p: DevicePtr<T>,
    /// grad_y B, `[m, rank]`, contiguous, for A.
    pub q: DevicePtr<T>,
    /// The gradient of A, `[rank, cols]`; `None`: not wanted.
    pub grad_a: Option<DevicePtr<G>>,
    /// At least `cols`.
    pub grad_a_stride: usize,
    /// The gradient of B, `[rows, rank]`; `None`: not wanted.
    pub grad_b: Option<DevicePtr<G>>,
    /// At least the rank.
    pub grad_b_stride: usize,
}

impl<T: Element, G: Element> DeviceLoraGrad<T, G> {
    fn raw(&self) -> Result<sys::nf4_lora_grad_args> {
        let read = |from: DevicePtr<T>| -> *const c_void { from.as_raw().cast() };
        let written = |to: Option<DevicePtr<G>>| -> *mut c_void {
            to.map_or(ptr::null_mut(), |to| to.as_raw().cast())
        };
        RawLoraGrad {
            dtype: T::DTYPE.as_raw(),
            grad_dtype: G::DTYPE.as_raw(),
            rank: self.rank,
            scale: self.scale,
            m: self.m,
            rows: self.rows,
            cols: self.cols,
            x: read(self.x),
            x_stride: self.x_stride,
            grad_y: read(self.grad_y),
            grad_y_stride: self.grad_y_stride,
            p: read(self.p),
            q: read(self.q),
            grad_a: written(self.grad_a),
            grad_a_stride: self.grad_a_stride,
            grad_b: written(self.grad_b),
            grad_b_stride: self.grad_b_stride,
        }
        .raw()
    }
}

/// Enqueues on `stream`: the gradients of an adapter's matrices, as
/// [`lora_grad`](crate::lora_grad). `G` is `T` or `f32`.
///
/// # Errors
/// As [`dequant_launch`](super::dequant_launch).
///
/// # Safety
/// Until the work on the stream has finished:
/// - the rows of `x`, `grad_y`, `p` and `q` that a wanted gradient is made of are memory that the
///   GPU of `stream` can reach, alive, and written by nothing;
/// - the rows of the gradients are such memory, used by nothing else but what is enqueued on
///   `stream` before or after this; from first to last element they overlap neither each other nor
///   what is read;
/// - `stream` is a live stream, or [`Stream::LEGACY_DEFAULT`].
pub unsafe fn lora_grad_launch<T: Element, G: Element>(
    operands: &DeviceLoraGrad<T, G>,
    stream: Stream,
) -> Result<()> {
    let args = operands.raw()?;
    // SAFETY: the struct lives through the call; the rest is as the caller promises.
    check(unsafe { sys::nf4_lora_grad_launch(&args, stream.0) })
}
