//! Weights of integers: one type over what holds their parts, and the names of those on the host.
//!
//! Lengths, and the values of g_idx and of a permutation, are checked when a weight is made, so
//! one that exists can be given to libnf4.

use nf4_sys as sys;

use super::parts::{
    Columns, ColumnsOf, Int4Parts, Int4PartsMut, Int4PartsOf, Int4PartsRef, ReadInt4Parts,
    WriteInt4Parts,
};
use super::spec::Int4Spec;
use crate::kind::{Described, Descriptor, Weight};
use crate::matmul::Operands;
use crate::memory::sealed::Sealed;
use crate::memory::Access;
use crate::{Element, Result};

/// A weight of integers. `Parts` are [`Int4PartsOf`] any buffers: [`Int4Tensor`] owns them on the
/// host, [`Int4Ref`] and [`Int4Mut`] borrow them, and others are on a GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Int4Of<Parts> {
    pub(crate) spec: Int4Spec,
    pub(crate) parts: Parts,
}

/// A weight of integers that owns its parts.
pub type Int4Tensor = Int4Of<Int4Parts>;
/// A weight of integers that borrows its parts, to be read.
///
/// ```
/// use half::f16;
/// use nf4::{dequantize, ColumnsOf, Int4Layout, Int4PartsRef, Int4Ref, Int4Spec};
/// // One row of eight codes, 15 to 8; the zero point is 8 and the scale 0.5.
/// let parts = Int4PartsRef {
///     packed: &[0x89AB_CDEF],
///     scales: &[f16::from_f32(0.5).to_bits()],
///     zeros: None,
///     columns: ColumnsOf::InOrder,
/// };
/// let spec = Int4Spec::new(Int4Layout::CompressedTensors, 1, 8).group_size(Some(8));
/// let values: Vec<f32> = dequantize(Int4Ref::new(spec, parts)?, 0)?;
/// assert_eq!(values, [3.5, 3.0, 2.5, 2.0, 1.5, 1.0, 0.5, 0.0]);
/// # Ok::<(), nf4::Error>(())
/// ```
pub type Int4Ref<'a> = Int4Of<Int4PartsRef<'a>>;
/// A weight of integers that borrows its parts, to be written by
/// [`quantize_int4_into`](crate::quantize_int4_into).
pub type Int4Mut<'a> = Int4Of<Int4PartsMut<'a>>;

impl<P: ReadInt4Parts> Int4Of<P> {
    /// Makes a weight of these parts, such as those of a file. On a GPU the columns have to be in order;
    /// [`Int4Of::with_columns`] then gives them another order.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`](crate::Error::InvalidArgument) if `spec` is wrong, if a buffer does
    /// not have the length that [`Int4Spec::sizes`] gives, if a `g_idx` has a group that does not exist,
    /// if a permutation does not have each column once, or if either is on a GPU, where it cannot be
    /// checked.
    pub fn new(spec: Int4Spec, parts: P) -> Result<Self> {
        let sizes = spec.check_lengths_of(1, parts.lengths())?;
        parts.check_columns(1, sizes.groups)?;
        Ok(Int4Of { spec, parts })
    }

    /// Returns the bytes of workspace that [`matmul_into`](crate::matmul_into) needs on a GPU for `m`
    /// contiguous rows; fewer rows never need more. They depend on which parts the weight has, not on
    /// addresses.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`](crate::Error::InvalidArgument) if `m` rows are too many.
    pub fn matmul_workspace_bytes<T: Element>(&self, m: usize) -> Result<usize> {
        let args = Operands::<T>::contiguous(m, self.spec.cols, self.spec.rows).raw()?;
        sys::nf4_int4_tensor::MATMUL.workspace_bytes(&self.nowhere()?, &args)
    }

    /// Returns the bytes of the codes, scales, zero points and `columns`.
    pub fn bytes(&self) -> usize {
        let lengths = self.parts.lengths();
        let index = match lengths.columns {
            ColumnsOf::InOrder => 0,
            ColumnsOf::GroupIndex(length) | ColumnsOf::Permuted(length) => length,
        };
        let words = lengths.packed + lengths.zeros.unwrap_or(0);
        words * size_of::<u32>() + lengths.scales * size_of::<u16>() + index * size_of::<i32>()
    }

    /// Returns the bits per element; NaN for a weight without elements.
    pub fn bits_per_weight(&self) -> f64 {
        self.bytes() as f64 * 8.0 / self.elements() as f64
    }
}

impl<P> Int4Of<P> {
    /// Returns the layout and shape.
    pub fn spec(&self) -> Int4Spec {
        self.spec
    }

    /// Returns `rows * cols`.
    pub fn elements(&self) -> usize {
        self.spec.rows * self.spec.cols
    }

    /// Returns the parts.
    pub fn parts(&self) -> &P {
        &self.parts
    }

    /// Takes the weight apart: spec and parts.
    pub fn into_parts(self) -> (Int4Spec, P) {
        (self.spec, self.parts)
    }
}

impl<W, S, I> Int4Of<Int4PartsOf<W, S, I>>
where
    Int4PartsOf<W, S, I>: ReadInt4Parts,
{
    /// Returns the same weight with another order of columns.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`](crate::Error::InvalidArgument) if the index does not have one element
    /// for each column.
    ///
    /// # Safety
    /// When a call reads the values, they are what [`ColumnsOf`] says: groups of the weight, or
    /// a permutation of its columns. Kernels do not check them.
    pub unsafe fn with_columns(mut self, columns: ColumnsOf<I>) -> Result<Self> {
        self.parts.columns = columns;
        self.spec.check_lengths_of(1, self.parts.lengths())?;
        Ok(self)
    }
}

impl<P: WriteInt4Parts> Int4Of<P> {
    /// The descriptor for one call, which writes all parts but an index.
    pub(super) fn raw_mut<'a>(
        &'a mut self,
        access: &Access<'a, P::Memory>,
    ) -> Result<sys::nf4_int4_tensor> {
        self.spec.with_parts(self.parts.raw_mut(access)?)
    }
}

impl<P> Sealed for Int4Of<P> {}

impl<P: ReadInt4Parts> Described for Int4Of<P> {
    type Memory = P::Memory;
    type Raw = sys::nf4_int4_tensor;

    fn raw<'a>(&'a self, access: &Access<'a, P::Memory>) -> Result<Self::Raw> {
        self.spec.with_parts(self.parts.raw(access)?)
    }

    fn nowhere(&self) -> Result<Self::Raw> {
        let lengths = self.parts.lengths();
        let columns = lengths.columns.map(|_| ());
        self.spec.nowhere(columns, lengths.zeros.is_some())
    }
}

impl<P: ReadInt4Parts> Weight for Int4Of<P> {
    fn shape(&self) -> (usize, usize) {
        (self.spec.rows, self.spec.cols)
    }
}

impl Int4Tensor {
    /// Makes a weight of zeroed parts, with or without zero points, for
    /// [`quantize_int4_into`](crate::quantize_int4_into) to fill.
    ///
    /// # Errors
    /// It fails as [`Int4Spec::sizes`] does.
    pub fn zeros(spec: Int4Spec, with_zero_points: bool) -> Result<Self> {
        let sizes = spec.sizes()?;
        let parts = Int4Parts {
            packed: vec![0; sizes.packed],
            scales: vec![0; sizes.scales],
            zeros: with_zero_points.then(|| vec![0; sizes.zeros]),
            columns: Columns::InOrder,
        };
        Ok(Int4Tensor { spec, parts })
    }

    /// Borrows it to be read.
    pub fn view(&self) -> Int4Ref<'_> {
        Int4Ref {
            spec: self.spec,
            parts: self.parts.view(),
        }
    }

    /// Borrows it to be written.
    pub fn view_mut(&mut self) -> Int4Mut<'_> {
        let parts = self.parts.as_mut();
        Int4Mut {
            spec: self.spec,
            parts: parts.map(|w| &mut w[..], |s| &mut s[..], |i| &i[..]),
        }
    }
}

impl<'a> From<&'a Int4Tensor> for Int4Ref<'a> {
    fn from(tensor: &'a Int4Tensor) -> Self {
        tensor.view()
    }
}
