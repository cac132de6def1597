//! The gradient of a matmul, and low-rank adapters.

use nf4_sys as sys;

use super::{DeviceMatmul, DevicePtr, DeviceTensor, Stream};
use crate::error::check;
use crate::gradient::RawLora;
use crate::kind::Described;
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
                .map_or(std::ptr::null_mut(), |product| product.as_raw().cast()),
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
