//! Weights of integers on the host: one that owns its buffers, two that borrow them.
//!
//! Lengths, and the values of g_idx and of a permutation, are checked when a weight is made, so
//! one that exists can be given to libnf4.

use nf4_sys as sys;

use super::parts::ColumnsOf;
use super::{Columns, Int4Parts, Int4PartsMut, Int4PartsRef, Int4Spec};
use crate::kind::{Described, HostView};
use crate::Result;

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
#[derive(Debug, Clone, Copy)]
pub struct Int4Ref<'a> {
    spec: Int4Spec,
    parts: Int4PartsRef<'a>,
}

impl<'a> Int4Ref<'a> {
    /// A weight of these parts.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`](crate::Error::InvalidArgument) if `spec` is wrong, a buffer does
    /// not have the length that it asks for, or an index is out of range or no permutation.
    pub fn new(spec: Int4Spec, parts: Int4PartsRef<'a>) -> Result<Self> {
        let sizes = spec.check_lengths(parts.lengths())?;
        parts.columns.check(sizes.groups)?;
        Ok(Int4Ref { spec, parts })
    }

    /// Layout and shape.
    pub fn spec(&self) -> Int4Spec {
        self.spec
    }

    /// `rows * cols`.
    pub fn elements(&self) -> usize {
        self.spec.rows * self.spec.cols
    }

    /// The parts.
    pub fn parts(&self) -> Int4PartsRef<'a> {
        self.parts
    }
}

impl Described for Int4Ref<'_> {
    type Raw = sys::nf4_int4_tensor;

    fn raw(&self) -> Result<Self::Raw> {
        self.parts.pointers().descriptor(&self.spec)
    }

    fn shape(&self) -> (usize, usize) {
        (self.spec.rows, self.spec.cols)
    }
}

impl HostView for Int4Ref<'_> {}

impl<'a> From<&'a Int4Tensor> for Int4Ref<'a> {
    fn from(tensor: &'a Int4Tensor) -> Self {
        tensor.view()
    }
}

/// A weight of integers that borrows its parts, to be written by
/// [`quantize_int4_into`](crate::quantize_int4_into).
#[derive(Debug)]
pub struct Int4Mut<'a> {
    spec: Int4Spec,
    parts: Int4PartsMut<'a>,
}

impl<'a> Int4Mut<'a> {
    /// A weight of these parts.
    ///
    /// # Errors
    /// As [`Int4Ref::new`].
    pub fn new(spec: Int4Spec, parts: Int4PartsMut<'a>) -> Result<Self> {
        let lengths = parts.as_ref().map(|w| w.len(), |s| s.len(), |i| i.len());
        let sizes = spec.check_lengths(lengths)?;
        parts.columns.check(sizes.groups)?;
        Ok(Int4Mut { spec, parts })
    }

    /// Layout and shape.
    pub fn spec(&self) -> Int4Spec {
        self.spec
    }

    /// `rows * cols`.
    pub fn elements(&self) -> usize {
        self.spec.rows * self.spec.cols
    }

    pub(crate) fn raw(&mut self) -> Result<sys::nf4_int4_tensor> {
        let pointers = self.parts.as_mut().map(
            |words| words.as_mut_ptr(),
            |scales| scales.as_mut_ptr(),
            |index| index.as_ptr(),
        );
        pointers.descriptor(&self.spec)
    }
}

/// A weight of integers that owns its parts.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Int4Tensor {
    spec: Int4Spec,
    parts: Int4Parts,
}

impl Int4Tensor {
    /// A weight of these parts, such as those of a file.
    ///
    /// # Errors
    /// As [`Int4Ref::new`].
    pub fn from_parts(spec: Int4Spec, parts: Int4Parts) -> Result<Self> {
        Int4Ref::new(spec, parts.view())?;
        Ok(Int4Tensor { spec, parts })
    }

    /// Zeroed parts, with or without zero points, to be filled by
    /// [`quantize_int4_into`](crate::quantize_int4_into).
    ///
    /// # Errors
    /// As [`Int4Spec::sizes`].
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

    /// A weight with `g_idx`, with its columns sorted by group: matmul reads it faster. It keeps
    /// scales and zero points and has a permutation for its `g_idx`. `threads` as in
    /// [`quantize`](crate::quantize).
    ///
    /// # Errors
    /// As [`reorder_int4_into`](crate::reorder_int4_into).
    pub fn reordered(mut self, threads: u32) -> Result<Self> {
        let mut packed = vec![0; self.parts.packed.len()];
        let mut permutation = super::identity(self.spec.cols);
        super::reorder_int4_into(self.view(), &mut packed, &mut permutation, threads)?;
        self.parts.packed = packed;
        self.parts.columns = ColumnsOf::Permuted(permutation);
        Ok(self)
    }

    /// Spec and parts.
    pub fn into_parts(self) -> (Int4Spec, Int4Parts) {
        (self.spec, self.parts)
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
        Int4Mut {
            spec: self.spec,
            parts: self.parts.view_mut(),
        }
    }

    /// Layout and shape.
    pub fn spec(&self) -> Int4Spec {
        self.spec
    }

    /// `rows * cols`.
    pub fn elements(&self) -> usize {
        self.spec.rows * self.spec.cols
    }

    /// The parts.
    pub fn parts(&self) -> &Int4Parts {
        &self.parts
    }

    /// Bytes of codes, scales, zero points and an index.
    pub fn bytes(&self) -> usize {
        let parts = self.parts.view();
        let index = match parts.columns {
            ColumnsOf::InOrder => &[],
            ColumnsOf::GroupIndex(index) | ColumnsOf::Permuted(index) => index,
        };
        size_of_val(parts.packed)
            + size_of_val(parts.scales)
            + parts.zeros.map_or(0, size_of_val)
            + size_of_val(index)
    }

    /// Bits per element; NaN for a weight of no elements.
    pub fn bits_per_weight(&self) -> f64 {
        self.bytes() as f64 * 8.0 / self.elements() as f64
    }
}
