//! Weights of integers in buffers of cudarc.

use std::ptr::NonNull;
use std::sync::Arc;

use cudarc::driver::{CudaStream, CudaView, CudaViewMut, DeviceSlice};

use super::access::{Access, Readable};
use super::buffer::Buffer;
use super::CudaWeight;
use crate::device::{self, DeviceInt4Tensor, DevicePtr};
use crate::error::check_length;
use crate::int4::identity;
use crate::{ColumnsOf, Element, Int4PartsOf, Int4Ref, Int4Scheme, Int4Spec, Int4Tensor, Result};

pub(super) type PartsRef<'a> = Int4PartsOf<CudaView<'a, u32>, CudaView<'a, u16>, CudaView<'a, i32>>;
type PartsMut<'a> = Int4PartsOf<CudaViewMut<'a, u32>, CudaViewMut<'a, u16>, CudaView<'a, i32>>;

impl PartsRef<'_> {
    pub(super) fn read<'a>(
        &'a self,
        spec: Int4Spec,
        access: &Access<'a>,
    ) -> Result<DeviceInt4Tensor> {
        let parts = self.as_ref().try_map(
            |name, words| access.read(name, words),
            |name, scales| access.read(name, scales),
            |name, index| access.read(name, index),
        )?;
        Ok(DeviceInt4Tensor { spec, parts })
    }
}

/// Checks the lengths of parts in any kind of buffer.
fn check_parts<W, S, I>(spec: Int4Spec, parts: &Int4PartsOf<W, S, I>) -> Result<()>
where
    W: DeviceSlice<u32>,
    S: DeviceSlice<u16>,
    I: DeviceSlice<i32>,
{
    let lengths = parts.as_ref().map(|w| w.len(), |s| s.len(), |i| i.len());
    spec.check_lengths(lengths).map(|_| ())
}

/// A weight of integers that borrows buffers on the GPU, to be read.
#[derive(Debug)]
pub struct CudaInt4Ref<'a> {
    spec: Int4Spec,
    parts: PartsRef<'a>,
}

impl<'a> CudaInt4Ref<'a> {
    /// A weight of these parts, as in [`Int4PartsOf`], with its columns in order.
    ///
    /// # Errors
    /// As [`Int4Ref::new`].
    pub fn new(
        spec: Int4Spec,
        packed: CudaView<'a, u32>,
        scales: CudaView<'a, u16>,
        zeros: Option<CudaView<'a, u32>>,
    ) -> Result<Self> {
        let parts = PartsRef {
            packed,
            scales,
            zeros,
            columns: ColumnsOf::InOrder,
        };
        check_parts(spec, &parts)?;
        Ok(CudaInt4Ref { spec, parts })
    }

    /// The same with another order of columns.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`](crate::Error::InvalidArgument) if the index has another length
    /// than a row of the weight.
    ///
    /// # Safety
    /// When a launch reads them, the values are what [`ColumnsOf`] says: groups of the weight, or
    /// a permutation of its columns. Kernels follow them unchecked.
    pub unsafe fn with_columns(mut self, columns: ColumnsOf<CudaView<'a, i32>>) -> Result<Self> {
        self.parts.columns = columns;
        check_parts(self.spec, &self.parts)?;
        Ok(self)
    }

    /// Workspace of a [`matmul_into`](super::matmul_into) of `m` rows, in bytes; never more for
    /// fewer rows.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`](crate::Error::InvalidArgument) if `m` rows are too many.
    pub fn matmul_workspace_bytes<T: Element>(&self, m: usize) -> Result<usize> {
        fn somewhere<T>() -> DevicePtr<T> {
            DevicePtr::from_raw(NonNull::dangling().as_ptr())
        }
        let parts = self.parts.as_ref();
        let parts = parts.map(|_| somewhere(), |_| somewhere(), |_| somewhere());
        let spec = self.spec;
        DeviceInt4Tensor { spec, parts }.matmul_workspace_bytes::<T>(m)
    }
}

impl CudaWeight for CudaInt4Ref<'_> {}

impl Readable for CudaInt4Ref<'_> {
    type Device = DeviceInt4Tensor;

    fn read<'a>(&'a self, access: &Access<'a>) -> Result<DeviceInt4Tensor> {
        self.parts.read(self.spec, access)
    }

    fn shape(&self) -> (usize, usize) {
        (self.spec.rows, self.spec.cols)
    }
}

/// A weight of integers that borrows buffers on the GPU, to be written by [`quantize_int4_into`].
#[derive(Debug)]
pub struct CudaInt4Mut<'a> {
    spec: Int4Spec,
    parts: PartsMut<'a>,
}

impl<'a> CudaInt4Mut<'a> {
    /// A weight of these parts, as in [`Int4PartsOf`], with its columns in order.
    ///
    /// # Errors
    /// As [`Int4Ref::new`].
    pub fn new(
        spec: Int4Spec,
        packed: CudaViewMut<'a, u32>,
        scales: CudaViewMut<'a, u16>,
        zeros: Option<CudaViewMut<'a, u32>>,
    ) -> Result<Self> {
        let parts = PartsMut {
            packed,
            scales,
            zeros,
            columns: ColumnsOf::InOrder,
        };
        check_parts(spec, &parts)?;
        Ok(CudaInt4Mut { spec, parts })
    }
}

/// A weight of integers that owns its buffers on the GPU.
#[derive(Debug)]
pub struct CudaInt4Tensor {
    spec: Int4Spec,
    parts: Int4PartsOf<Buffer<u32>, Buffer<u16>, Buffer<i32>>,
}

impl CudaInt4Tensor {
    /// Copies a weight to the GPU.
    ///
    /// # Errors
    /// [`Error::Driver`](crate::Error::Driver).
    pub fn upload<'a>(stream: &Arc<CudaStream>, weight: impl Into<Int4Ref<'a>>) -> Result<Self> {
        let weight = weight.into();
        let parts = weight.parts().try_map(
            |_, words| Buffer::upload(stream, words),
            |_, scales| Buffer::upload(stream, scales),
            |_, index| Buffer::upload(stream, index),
        )?;
        let spec = weight.spec();
        Ok(CudaInt4Tensor { spec, parts })
    }

    /// Copies a weight from the GPU, and waits for it.
    ///
    /// # Errors
    /// [`Error::Driver`](crate::Error::Driver).
    pub fn download(&self, stream: &Arc<CudaStream>) -> Result<Int4Tensor> {
        let parts = self.parts.as_ref().try_map(
            |_, words| words.download(stream),
            |_, scales| scales.download(stream),
            |_, index| index.download(stream),
        )?;
        Int4Tensor::from_parts(self.spec, parts)
    }

    /// Enqueues on `stream`: sort the columns by group, as [`Int4Tensor::reordered`].
    ///
    /// # Errors
    /// As [`reorder_int4_into`].
    pub fn reordered(mut self, stream: &Arc<CudaStream>) -> Result<Self> {
        let mut packed = Buffer::zeros(stream, self.parts.packed.length)?;
        let mut permutation = Buffer::upload(stream, &identity(self.spec.cols))?;
        reorder_int4_into(
            &self.view(),
            &mut packed.view_mut(),
            &mut permutation.view_mut(),
            stream,
        )?;
        self.parts.packed = packed;
        self.parts.columns = ColumnsOf::Permuted(permutation);
        Ok(self)
    }

    /// Borrows it to be read.
    pub fn view(&self) -> CudaInt4Ref<'_> {
        CudaInt4Ref {
            spec: self.spec,
            parts: self
                .parts
                .as_ref()
                .map(Buffer::view, Buffer::view, Buffer::view),
        }
    }

    /// Borrows it to be written.
    pub fn view_mut(&mut self) -> CudaInt4Mut<'_> {
        let parts = self.parts.as_mut();
        CudaInt4Mut {
            spec: self.spec,
            parts: parts.map(Buffer::view_mut, Buffer::view_mut, Buffer::view),
        }
    }

    /// Layout and shape.
    pub fn spec(&self) -> Int4Spec {
        self.spec
    }
}

/// Enqueues on `stream`: quantize the `rows * cols` elements of `values` into the parts of
/// `weight`, whose columns are in order.
///
/// # Errors
/// [`Error::InvalidArgument`](crate::Error::InvalidArgument) as for
/// [`quantize_int4_into`](crate::quantize_int4_into), or if a buffer is of another context than the
/// stream; what the launch or the driver reports.
pub fn quantize_int4_into<T: Element>(
    values: &CudaView<'_, T>,
    weight: &mut CudaInt4Mut<'_>,
    scheme: Int4Scheme,
    stream: &CudaStream,
) -> Result<()> {
    let elements = weight.spec.rows * weight.spec.cols;
    check_length("values", DeviceSlice::len(values), elements)?;
    let access = Access::new(stream);
    let raw = DeviceInt4Tensor {
        spec: weight.spec,
        parts: weight.parts.as_mut().try_map(
            |name, words| access.write(name, words),
            |name, scales| access.write(name, scales),
            |name, index| access.read(name, index),
        )?,
    };
    let values = access.read("values", values)?;
    let stream = access.bound_stream()?;
    // SAFETY: as in dequantize_into.
    unsafe { device::quantize_int4_launch(values, &raw, scheme, stream) }
}

/// Enqueues on `stream`: sort the columns of a weight with `g_idx` by group into `packed` and
/// `permutation`, as [`reorder_int4_into`](crate::reorder_int4_into). They make another weight if by
/// `g_idx`, which the host does not see, groups are not of `group_size` columns each.
///
/// # Errors
/// As there, or if a buffer is of another context than the stream; what the launch or the driver
/// reports.
pub fn reorder_int4_into(
    weight: &CudaInt4Ref<'_>,
    packed: &mut CudaViewMut<'_, u32>,
    permutation: &mut CudaViewMut<'_, i32>,
    stream: &CudaStream,
) -> Result<()> {
    let words = DeviceSlice::len(&weight.parts.packed);
    check_length("packed", DeviceSlice::len(packed), words)?;
    let columns = DeviceSlice::len(permutation);
    check_length("permutation", columns, weight.spec.cols)?;
    let access = Access::new(stream);
    let raw = weight.read(&access)?;
    let packed = access.write("packed", packed)?;
    let permutation = access.write("permutation", permutation)?;
    let stream = access.bound_stream()?;
    // SAFETY: as in dequantize_into.
    unsafe { device::reorder_int4_launch(&raw, packed, permutation, stream) }
}
