//! The gradients of an adapter's matrices, in the order of a stream.

use cudarc::driver::{CudaStream, CudaView, CudaViewMut, DeviceSlice};

use super::access::Access;
use crate::device::{self, DeviceLoraGrad, DevicePtr};
use crate::error::check_length;
use crate::matmul::product;
use crate::{Element, Result};

/// What the gradients of an adapter's matrices are made of, as [`LoraGrad`](crate::LoraGrad), in
/// buffers on the GPU. Rows are contiguous.
#[derive(Debug)]
pub struct CudaLoraGrad<'a, T> {
    /// That of the adapter, 1 to 128.
    pub rank: usize,
    /// That of the adapter, a finite number.
    pub scale: f32,
    /// Rows of `x`, `grad_y`, `p` and `q`.
    pub m: usize,
    /// Columns of `grad_y`.
    pub rows: usize,
    /// Columns of `x`.
    pub cols: usize,
    /// `[m, cols]`.
    pub x: CudaView<'a, T>,
    /// `[m, rows]`: the gradient of y.
    pub grad_y: CudaView<'a, T>,
    /// x A^T, `[m, rank]`.
    pub p: CudaView<'a, T>,
    /// grad_y B, `[m, rank]`.
    pub q: CudaView<'a, T>,
}

impl<T: Element> CudaLoraGrad<'_, T> {
    /// The operands of the gradient of A, `length` elements.
    fn check_a(&self, length: usize) -> Result<()> {
        let (m, rank, cols) = (self.m, self.rank, self.cols);
        check_length("x", self.x.len(), product("m * cols", m, cols)?)?;
        check_length("q", self.q.len(), product("m * rank", m, rank)?)?;
        check_length("grad_a", length, product("rank * cols", rank, cols)?)
    }

    /// The same of B.
    fn check_b(&self, length: usize) -> Result<()> {
        let (m, rank, rows) = (self.m, self.rank, self.rows);
        check_length("grad_y", self.grad_y.len(), product("m * rows", m, rows)?)?;
        check_length("p", self.p.len(), product("m * rank", m, rank)?)?;
        check_length("grad_b", length, product("rows * rank", rows, rank)?)
    }
}

/// Enqueues on `stream`: the gradients of A and B, as [`lora_grad_into`](crate::lora_grad_into), with
/// contiguous rows. `G` is `T` or `f32`. Of one that is not wanted, `None`, the operands are not
/// looked at: x and q for A, grad_y and p for B.
///
/// # Errors
/// As [`dequantize_into`](super::dequantize_into), for any of the buffers.
///
/// ```
/// use half::bf16;
/// use nf4::cuda::{lora_grad_into, CudaLoraGrad};
/// use nf4::cudarc::driver::{CudaSlice, CudaStream};
///
/// /// The gradient of B alone: x need not be kept.
/// fn gradient_of_b(
///     grad_y: &CudaSlice<bf16>,
///     p: &CudaSlice<bf16>,
///     (m, rows, rank, scale): (usize, usize, usize, f32),
///     grad_b: &mut CudaSlice<f32>,
///     stream: &CudaStream,
/// ) -> nf4::Result<()> {
///     let (x, q, cols) = (p.slice(..0), p.slice(..0), 0);
///     let (grad_y, p) = (grad_y.as_view(), p.as_view());
///     let operands = CudaLoraGrad { rank, scale, m, rows, cols, x, grad_y, p, q };
///     lora_grad_into(&operands, None, Some(&mut grad_b.as_view_mut()), stream)
/// }
/// ```
pub fn lora_grad_into<T: Element, G: Element>(
    operands: &CudaLoraGrad<'_, T>,
    grad_a: Option<&mut CudaViewMut<'_, G>>,
    grad_b: Option<&mut CudaViewMut<'_, G>>,
    stream: &CudaStream,
) -> Result<()> {
    let access = Access::new(stream);
    let mut raw = nowhere(operands);
    if let Some(grad_a) = grad_a {
        operands.check_a(DeviceSlice::len(grad_a))?;
        raw.x = access.read("x", &operands.x)?;
        raw.q = access.read("q", &operands.q)?;
        raw.grad_a = Some(access.write("grad_a", grad_a)?);
    }
    if let Some(grad_b) = grad_b {
        operands.check_b(DeviceSlice::len(grad_b))?;
        raw.grad_y = access.read("grad_y", &operands.grad_y)?;
        raw.p = access.read("p", &operands.p)?;
        raw.grad_b = Some(access.write("grad_b", grad_b)?);
    }
    let stream = access.bound_stream()?;
    // SAFETY: the lengths were checked above; cudarc frees or reuses the buffers only after what
    // `access` records; the gradients are borrowed mutably, so they are no operands.
    unsafe { device::lora_grad_launch(&raw, stream) }
}

/// The sizes, with no gradient wanted yet.
fn nowhere<T, G>(operands: &CudaLoraGrad<'_, T>) -> DeviceLoraGrad<T, G> {
    DeviceLoraGrad {
        rank: operands.rank,
        scale: operands.scale,
        m: operands.m,
        rows: operands.rows,
        cols: operands.cols,
        x: DevicePtr::NULL,
        x_stride: operands.cols,
        grad_y: DevicePtr::NULL,
        grad_y_stride: operands.rows,
        p: DevicePtr::NULL,
        q: DevicePtr::NULL,
        grad_a: None,
        grad_a_stride: operands.cols,
        grad_b: None,
        grad_b_stride: operands.rank,
    }
}
