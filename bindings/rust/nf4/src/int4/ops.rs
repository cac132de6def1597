//! Quantize to integers and sort columns.

use nf4_sys as sys;

use super::parts::{check_whole_groups, ColumnsOf, Int4PartsOf, WriteInt4Parts};
use super::spec::{Int4Layout, Int4Scheme, Int4Spec};
use super::tensor::{Int4Of, Int4Tensor};
use crate::error::check_length;
use crate::kind::Described;
use crate::memory::{Call, Memory, Read, Write};
use crate::{Element, Result};

impl Int4Scheme {
    pub(crate) const fn as_raw(self) -> i32 {
        matches!(self, Int4Scheme::Symmetric) as i32
    }
}

/// Quantizes `values`, the `rows * cols` elements of a weight in row-major order, by rounding to
/// nearest. The weight has zero points as checkpoints do: always, except with
/// [`Int4Scheme::Symmetric`] in [`Int4Layout::CompressedTensors`].
///
/// `threads` is the most threads to use; 0 means one for each processor. The bytes do not
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
    quantize_int4_into(values, &mut weight, scheme, threads)?;
    Ok(weight)
}

/// Quantizes `values`, the `rows * cols` elements of a weight in row-major order, into the parts of
/// `weight`, whose columns are in order. The GPU and the CPU write the same bytes.
///
/// `on` says how the call runs ([`Memory::Call`](crate::Memory::Call)): a number of threads on the
/// host, a stream on a GPU. A launch needs no workspace.
///
/// # Errors
/// [`Error::InvalidArgument`](crate::Error::InvalidArgument) if `values` has another length
/// than the weight, if the weight's columns are not in order, or if the scheme is
/// [`Int4Scheme::Asymmetric`] and the weight has no zero points. A launch also fails as
/// [`dequantize_into`](crate::dequantize_into) does.
pub fn quantize_int4_into<'c, V, P>(
    values: V,
    weight: &mut Int4Of<P>,
    scheme: Int4Scheme,
    on: impl Into<Call<'c, V::Memory>>,
) -> Result<()>
where
    V: Read<Element: Element>,
    P: WriteInt4Parts<Memory = V::Memory>,
{
    check_length("values", values.length(), weight.elements())?;
    let access = V::Memory::access(on.into(), 0);
    let weight = weight.raw_mut(&access)?;
    let values = values.address("values", &access)?.cast();
    let (dtype, scheme) = (V::Element::DTYPE.as_raw(), scheme.as_raw());
    V::Memory::run(
        access,
        // SAFETY: `values` has as many elements as the weight, whose parts were checked when it was
        // made. All of them are borrowed through the call, the written ones mutably, so none overlap.
        |_, threads| unsafe { sys::nf4_int4_quantize_cpu(values, dtype, &weight, scheme, threads) },
        // SAFETY: as above.
        |_, stream| unsafe {
            sys::nf4_int4_quantize_launch(values, dtype, &weight, scheme, stream)
        },
    )
}

/// Sorts the columns of a weight with `g_idx` by group; matmul is faster with the result. It writes
/// `packed`, which is as long as that of the weight, and `permutation`, which has an element for each
/// column. With the scales and zero points of `weight` they make an equal weight whose columns are
/// [`Permuted`](crate::ColumnsOf::Permuted). Columns of one group keep their order.
///
/// `on` is as in [`quantize_int4_into`]. On a GPU the values of `g_idx` are not checked: if a group
/// does not have `group_size` columns, the outputs make another weight.
///
/// # Errors
/// [`Error::InvalidArgument`](crate::Error::InvalidArgument) if `weight` has no `g_idx`, if a group of
/// a `g_idx` on the host does not have `group_size` columns, or if `packed` or `permutation` has another
/// length. A launch also fails as [`dequantize_into`](crate::dequantize_into) does.
pub fn reorder_int4_into<'c, W, S, I, P, C>(
    weight: &Int4Of<Int4PartsOf<W, S, I>>,
    mut packed: P,
    mut permutation: C,
    on: impl Into<Call<'c, W::Memory>>,
) -> Result<()>
where
    W: Read<Element = u32>,
    S: Read<Element = u16, Memory = W::Memory>,
    I: Read<Element = i32, Memory = W::Memory>,
    P: Write<Element = u32, Memory = W::Memory>,
    C: Write<Element = i32, Memory = W::Memory>,
{
    let words = weight.parts().packed.length();
    check_length("packed", packed.length(), words)?;
    check_length("permutation", permutation.length(), weight.spec().cols)?;
    if let ColumnsOf::GroupIndex(index) = &weight.parts().columns {
        if let Some(index) = index.on_host() {
            check_whole_groups(index, weight.spec().sizes()?.groups)?;
        }
    }
    let access = W::Memory::access(on.into(), 0);
    let from = weight.raw(&access)?;
    let to = sys::nf4_int4_tensor {
        packed: packed.address_mut("packed", &access)?.cast(),
        g_idx: std::ptr::null(),
        permutation: permutation.address_mut("permutation", &access)?,
        ..from
    };
    W::Memory::run(
        access,
        // SAFETY: the parts of `weight` were checked when it was made and are only read; what is
        // written has the lengths checked above and is borrowed mutably.
        |_, threads| unsafe { sys::nf4_int4_reorder_cpu(&from, &to, threads) },
        // SAFETY: as above.
        |_, stream| unsafe { sys::nf4_int4_reorder_launch(&from, &to, stream) },
    )
}

impl Int4Tensor {
    /// Sorts the columns of a weight with `g_idx` by group; matmul is faster with the result. The weight
    /// keeps its scales and zero points, and gets a permutation in place of `g_idx`. `threads` is as in
    /// [`quantize`](crate::quantize).
    ///
    /// # Errors
    /// It fails as [`reorder_int4_into`] does.
    pub fn reordered(mut self, threads: u32) -> Result<Self> {
        let mut packed = vec![0; self.parts.packed.len()];
        let mut permutation = identity(self.spec.cols);
        reorder_int4_into(&self, &mut packed, &mut permutation, threads)?;
        self.parts.packed = packed;
        self.parts.columns = ColumnsOf::Permuted(permutation);
        Ok(self)
    }
}

/// The permutation that moves no column, which a reorder of a weight without elements leaves.
pub(crate) fn identity(cols: usize) -> Vec<i32> {
    (0..).take(cols).collect()
}
