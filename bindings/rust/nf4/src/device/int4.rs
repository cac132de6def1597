//! Launches for weights of integers.

use nf4_sys as sys;

use super::{DevicePtr, DeviceWeight, Stream};
use crate::error::check;
use crate::int4::reordered;
use crate::kind::{self, Described};
use crate::{ColumnsOf, Element, Int4PartsOf, Int4Scheme, Int4Spec, Result};

/// The parts of a weight of integers in device memory.
pub type DeviceInt4Parts = Int4PartsOf<DevicePtr<u32>, DevicePtr<u16>, DevicePtr<i32>>;
/// The order of its columns.
pub type DeviceColumns = ColumnsOf<DevicePtr<i32>>;

/// A weight of integers in device memory. The sizes of its buffers, and the values of an index,
/// are not checked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DeviceInt4Tensor {
    /// Layout and shape; [`Int4Spec::sizes`] gives the elements of the parts.
    pub spec: Int4Spec,
    /// The parts.
    pub parts: DeviceInt4Parts,
}

impl DeviceInt4Tensor {
    /// Workspace of a [`matmul_launch`](super::matmul_launch) of `m` contiguous rows, in bytes;
    /// never more for fewer rows. It depends on the order of the columns, not on addresses.
    ///
    /// # Errors
    /// As [`Int4Spec::sizes`], and [`Error::InvalidArgument`](crate::Error::InvalidArgument) if `m`
    /// rows are too many.
    pub fn matmul_workspace_bytes<T: Element>(&self, m: usize) -> Result<usize> {
        kind::matmul_workspace_bytes::<T>(self, m)
    }
}

impl DeviceWeight for DeviceInt4Tensor {}

impl Described for DeviceInt4Tensor {
    type Raw = sys::nf4_int4_tensor;

    fn raw(&self) -> Result<Self::Raw> {
        let pointers = self
            .parts
            .map(DevicePtr::as_raw, DevicePtr::as_raw, |index| {
                index.as_raw().cast_const()
            });
        pointers.descriptor(&self.spec)
    }

    fn shape(&self) -> (usize, usize) {
        (self.spec.rows, self.spec.cols)
    }
}

/// Enqueues on `stream`: quantize the `rows * cols` elements of `values` into the parts of
/// `weight`, whose columns are in order. The bytes equal those of
/// [`quantize_int4`](crate::quantize_int4).
///
/// # Errors
/// As [`dequant_launch`](super::dequant_launch).
///
/// # Safety
/// Until the work on the stream has finished:
/// - `values` are memory that the GPU of `stream` can reach, at least as large as needed, alive, and
///   written by nothing;
/// - the parts of `weight` are such memory, used by nothing else; no two of all these overlap;
/// - `stream` is a live stream, or [`Stream::LEGACY_DEFAULT`].
pub unsafe fn quantize_int4_launch<T: Element>(
    values: DevicePtr<T>,
    weight: &DeviceInt4Tensor,
    scheme: Int4Scheme,
    stream: Stream,
) -> Result<()> {
    let weight = weight.raw()?;
    // SAFETY: the descriptor lives through the call; the rest is as the caller promises.
    check(unsafe {
        sys::nf4_int4_quantize_launch(
            values.as_raw().cast(),
            T::DTYPE.as_raw(),
            &weight,
            scheme.as_raw(),
            stream.0,
        )
    })
}

/// Enqueues on `stream`: sort the columns of a weight with `g_idx` by group into `packed` and
/// `permutation`, as [`reorder_int4_into`](crate::reorder_int4_into). They make another weight if by
/// `g_idx` groups are not of `group_size` columns each.
///
/// # Errors
/// As [`dequant_launch`](super::dequant_launch).
///
/// # Safety
/// Until the work on the stream has finished:
/// - the parts of `weight` are as [`dequant_launch`](super::dequant_launch) requires;
/// - `packed`, as large as that of `weight`, and `permutation`, of `cols` elements, are such memory,
///   used by nothing else, and overlap nothing of all this;
/// - `stream` is a live stream, or [`Stream::LEGACY_DEFAULT`].
pub unsafe fn reorder_int4_launch(
    weight: &DeviceInt4Tensor,
    packed: DevicePtr<u32>,
    permutation: DevicePtr<i32>,
    stream: Stream,
) -> Result<()> {
    let from = weight.raw()?;
    let to = reordered(&from, packed.as_raw(), permutation.as_raw());
    // SAFETY: the descriptors live through the call; the rest is as the caller promises.
    check(unsafe { sys::nf4_int4_reorder_launch(&from, &to, stream.0) })
}
