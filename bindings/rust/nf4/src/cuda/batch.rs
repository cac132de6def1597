//! Several products in one call, in the order of a stream.

use cudarc::driver::{CudaStream, CudaView, CudaViewMut, DeviceSlice};

use super::access::Access;
use super::CudaWeight;
use crate::device::{self, DeviceMatmul, DevicePtr};
use crate::error::{check_length, of_product};
use crate::matmul::product;
use crate::{Element, Result};

/// `x` times the transpose of `weight`, plus a bias, as [`Product`](crate::Product), in buffers on the
/// GPU: one of the products of [`matmul_batch_into`].
#[derive(Debug)]
pub struct CudaProduct<'a, T, W> {
    /// `m` contiguous rows of as many elements as the weight has columns.
    pub x: CudaView<'a, T>,
    /// Rows of `x` and of its y.
    pub m: usize,
    /// A [`CudaRef`](super::CudaRef) or a [`CudaInt4Ref`](super::CudaInt4Ref).
    pub weight: &'a W,
    /// `[rows]` of the weight.
    pub bias: Option<CudaView<'a, T>>,
}

impl<T: Element, W: CudaWeight> CudaProduct<'_, T, W> {
    fn check(&self, y: usize) -> Result<()> {
        let (rows, cols) = self.weight.shape();
        check_length("x", self.x.len(), product("m * cols", self.m, cols)?)?;
        check_length("y", y, product("m * rows", self.m, rows)?)?;
        let bias = self.bias.as_ref();
        bias.map_or(Ok(()), |bias| check_length("bias", bias.len(), rows))
    }
}

/// Enqueues on `stream`: several products, at most 64, as
/// [`matmul_batch_into`](crate::matmul_batch_into), with contiguous rows in each `y`; bit-equal to
/// [`matmul_into`](super::matmul_into) for each. Those of few rows share launches. `T` is
/// [`half::f16`] or [`half::bf16`], or, with up to 16 rows, `f32`. `workspace` serves the one that
/// needs most, as `matmul_into` says; `None` will do where that is 0.
///
/// # Errors
/// As [`dequantize_into`](super::dequantize_into), for any of the buffers.
///
/// ```
/// use half::bf16;
/// use nf4::cuda::{matmul_batch_into, CudaProduct, CudaTensor};
/// use nf4::cudarc::driver::{CudaSlice, CudaStream};
/// use std::sync::Arc;
///
/// /// q, k and v of m rows of x. The workspace has the most of the weights' `matmul_workspace_bytes`.
/// fn qkv(
///     x: &CudaSlice<bf16>,
///     m: usize,
///     weights: &[CudaTensor; 3],
///     workspace: &mut CudaSlice<u8>,
///     stream: &Arc<CudaStream>,
/// ) -> nf4::Result<Vec<CudaSlice<bf16>>> {
///     let outputs = weights.iter().map(|weight| stream.alloc_zeros(m * weight.spec().rows));
///     let mut y = outputs.collect::<Result<Vec<_>, _>>()?;
///     let mut to: Vec<_> = y.iter_mut().map(|y| y.as_view_mut()).collect();
///     let views = weights.each_ref().map(CudaTensor::view);
///     let x = || x.as_view();
///     let products = views.each_ref().map(|weight| CudaProduct { x: x(), m, weight, bias: None });
///     matmul_batch_into(&products, &mut to, Some(&mut workspace.as_view_mut()), stream)?;
///     Ok(y)
/// }
/// ```
pub fn matmul_batch_into<T: Element, W: CudaWeight>(
    products: &[CudaProduct<'_, T, W>],
    y: &mut [CudaViewMut<'_, T>],
    workspace: Option<&mut CudaViewMut<'_, u8>>,
    stream: &CudaStream,
) -> Result<()> {
    check_length("y", y.len(), products.len())?;
    for (i, (each, y)) in products.iter().zip(&*y).enumerate() {
        let fits = each.check(DeviceSlice::len(y));
        fits.map_err(|error| of_product(i, error))?;
    }
    let access = Access::new(stream);
    let mut raw = Vec::with_capacity(products.len());
    for (each, y) in products.iter().zip(y) {
        let (rows, cols) = each.weight.shape();
        let operands = DeviceMatmul {
            m: each.m,
            x: access.read("x", &each.x)?,
            x_stride: cols,
            bias: access.read_optional("bias", &each.bias)?,
            y: access.write("y", y)?,
            y_stride: rows,
        };
        raw.push((each.weight.read(&access)?, operands));
    }
    let (workspace, workspace_bytes) = access.workspace(workspace)?;
    let stream = access.bound_stream()?;
    // SAFETY: as in dequantize_into; each y is borrowed mutably, and libnf4 checks the size of the
    // workspace.
    unsafe { device::matmul_batch_launch(&raw, workspace, workspace_bytes, stream) }
}

/// Enqueues on `stream`: the products of one `x` with weights of the same columns, such as q, k and v,
/// side by side in `y`: `m` contiguous rows of as many elements as all weights have rows. All else is
/// as in [`matmul_batch_into`].
///
/// # Errors
/// As [`matmul_batch_into`].
pub fn matmul_joined_into<T: Element, W: CudaWeight>(
    x: &CudaView<'_, T>,
    m: usize,
    weights: &[W],
    y: &mut CudaViewMut<'_, T>,
    workspace: Option<&mut CudaViewMut<'_, u8>>,
    stream: &CudaStream,
) -> Result<()> {
    for (i, weight) in weights.iter().enumerate() {
        let length = product("m * cols", m, weight.shape().1)?;
        check_length("x", x.len(), length).map_err(|error| of_product(i, error))?;
    }
    let mut rows = weights.iter().map(|weight| weight.shape().0);
    let columns = rows.try_fold(0usize, |sum, rows| sum.checked_add(rows));
    let columns = columns.unwrap_or(usize::MAX);
    check_length(
        "y",
        DeviceSlice::len(y),
        product("m * rows of all", m, columns)?,
    )?;
    let access = Access::new(stream);
    let x = access.read("x", x)?;
    let mut next = access.write("y", y)?;
    let mut raw = Vec::with_capacity(weights.len());
    for weight in weights {
        let (rows, cols) = weight.shape();
        let operands = DeviceMatmul {
            m,
            x,
            x_stride: cols,
            bias: None,
            y: next,
            y_stride: columns,
        };
        next = DevicePtr::from_raw(next.as_raw().wrapping_add(rows));
        raw.push((weight.read(&access)?, operands));
    }
    let (workspace, workspace_bytes) = access.workspace(workspace)?;
    let stream = access.bound_stream()?;
    // SAFETY: as in matmul_batch_into; the products write columns of their own.
    unsafe { device::matmul_batch_launch(&raw, workspace, workspace_bytes, stream) }
}
