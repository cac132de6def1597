//! Quantize to integers and sort columns, on host memory.

use nf4_sys as sys;

use super::parts::{check_whole_groups, ColumnsOf};
use super::{Int4Layout, Int4Mut, Int4Ref, Int4Scheme, Int4Spec, Int4Tensor};
use crate::error::{check, check_length};
use crate::kind::Described;
use crate::ops::thread_count;
use crate::{Element, Result};

impl Int4Scheme {
    pub(crate) const fn as_raw(self) -> i32 {
        matches!(self, Int4Scheme::Symmetric) as i32
    }
}

/// Quantizes `values`, the `rows * cols` elements of a weight in row-major order, by rounding to
/// nearest. Zero points are stored as checkpoints have them: always, but for
/// [`Int4Scheme::Symmetric`] in [`Int4Layout::CompressedTensors`].
///
/// `threads`: how many to use at most; 0 means one for each processor. The bytes do not
/// depend on it.
///
/// # Errors
/// [`Error::InvalidArgument`](crate::Error::InvalidArgument) if `spec` is wrong or `values`
/// has another length.
///
/// ```
/// use nf4::{dequantize, quantize_int4, Int4Layout, Int4Scheme, Int4Spec};
/// let values: Vec<f32> = (0..16 * 128).map(|i| (i as f32).sin()).collect();
/// let spec = Int4Spec::new(Int4Layout::Awq, 16, 128).group_size(Some(32));
/// let weight = quantize_int4(&values, spec, Int4Scheme::Asymmetric, 0)?;
/// let back: Vec<half::f16> = dequantize(&weight, 0)?;
/// assert!(values.iter().zip(&back).all(|(x, y)| (x - y.to_f32()).abs() < 0.14));
/// # Ok::<(), nf4::Error>(())
/// ```
pub fn quantize_int4<T: Element>(
    values: &[T],
    spec: Int4Spec,
    scheme: Int4Scheme,
    threads: u32,
) -> Result<Int4Tensor> {
    // Before memory is taken: a wrong spec may ask for any amount of it.
    check_length("values", values.len(), spec.sizes()?.elements)?;
    let with_zero_points =
        scheme == Int4Scheme::Asymmetric || spec.layout != Int4Layout::CompressedTensors;
    let mut weight = Int4Tensor::zeros(spec, with_zero_points)?;
    quantize_int4_into(values, &mut weight.view_mut(), scheme, threads)?;
    Ok(weight)
}

/// Quantizes `values` into the parts of `weight`, whose columns are in order. `threads` as in
/// [`quantize_int4`].
///
/// # Errors
/// [`Error::InvalidArgument`](crate::Error::InvalidArgument) if `values` has another length
/// than the weight, the weight has an index, or [`Int4Scheme::Asymmetric`] no zero points to
/// write.
pub fn quantize_int4_into<T: Element>(
    values: &[T],
    weight: &mut Int4Mut<'_>,
    scheme: Int4Scheme,
    threads: u32,
) -> Result<()> {
    check_length("values", values.len(), weight.elements())?;
    // SAFETY: `values` has as many elements as the weight and the parts of the weight were
    // checked when it was made. All of them are borrowed through the call, the written ones
    // mutably, so none overlap.
    check(unsafe {
        sys::nf4_int4_quantize_cpu(
            values.as_ptr().cast(),
            T::DTYPE.as_raw(),
            &weight.raw()?,
            scheme.as_raw(),
            thread_count(threads),
        )
    })
}

/// Sorts the columns of a weight with `g_idx` by group, which matmul reads faster: writes
/// `packed`, as long as that of the weight, and `permutation`, of its columns. With the scales and
/// zero points of `weight` they make an equal weight, of
/// [`Permuted`](crate::ColumnsOf::Permuted) columns. Columns of one group keep their order.
///
/// # Errors
/// [`Error::InvalidArgument`](crate::Error::InvalidArgument) if `weight` has no `g_idx`, or one by
/// which groups are not of `group_size` columns each, or `packed` or `permutation` has another
/// length.
pub fn reorder_int4_into<'a>(
    weight: impl Into<Int4Ref<'a>>,
    packed: &mut [u32],
    permutation: &mut [i32],
    threads: u32,
) -> Result<()> {
    let weight = weight.into();
    check_length("packed", packed.len(), weight.parts().packed.len())?;
    check_length("permutation", permutation.len(), weight.spec().cols)?;
    if let ColumnsOf::GroupIndex(index) = weight.parts().columns {
        check_whole_groups(index, weight.spec().sizes()?.groups)?;
    }
    let from = weight.raw()?;
    let to = reordered(&from, packed.as_mut_ptr(), permutation.as_mut_ptr());
    // SAFETY: the parts of `weight` were checked when it was made and are only read; what is
    // written has the lengths checked above and is borrowed mutably.
    check(unsafe { sys::nf4_int4_reorder_cpu(&from, &to, thread_count(threads)) })
}

/// The permutation that moves no column, which a reorder of a weight without elements leaves.
pub(crate) fn identity(cols: usize) -> Vec<i32> {
    (0..).take(cols).collect()
}

/// The descriptor of what a reorder of `from` writes.
pub(crate) fn reordered(
    from: &sys::nf4_int4_tensor,
    packed: *mut u32,
    permutation: *mut i32,
) -> sys::nf4_int4_tensor {
    sys::nf4_int4_tensor {
        packed: packed.cast(),
        g_idx: std::ptr::null(),
        permutation: permutation.cast_const(),
        ..*from
    }
}
