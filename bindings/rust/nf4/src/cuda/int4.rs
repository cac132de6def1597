//! Weights of integers in buffers of cudarc.

use std::sync::Arc;

use cudarc::driver::{CudaStream, CudaView, CudaViewMut};

use super::buffer::CudaBuffer;
use crate::int4::identity;
use crate::{
    reorder_int4_into, ColumnsOf, Int4Of, Int4PartsOf, Int4Ref, Int4StackOf, Int4Tensor, Result,
};

/// Parts of a weight of integers in buffers on the GPU.
pub type CudaInt4PartsRef<'a> =
    Int4PartsOf<CudaView<'a, u32>, CudaView<'a, u16>, CudaView<'a, i32>>;
/// Parts of a weight of integers in buffers on the GPU, to be written. The index is read.
pub type CudaInt4PartsMut<'a> =
    Int4PartsOf<CudaViewMut<'a, u32>, CudaViewMut<'a, u16>, CudaView<'a, i32>>;
/// Parts of a weight of integers that own their buffers on the GPU.
pub type CudaInt4Parts = Int4PartsOf<CudaBuffer<u32>, CudaBuffer<u16>, CudaBuffer<i32>>;
/// A weight of integers that borrows buffers on the GPU, to be read.
pub type CudaInt4Ref<'a> = Int4Of<CudaInt4PartsRef<'a>>;
/// A weight of integers that borrows buffers on the GPU, to be written by
/// [`quantize_int4_into`](crate::quantize_int4_into).
pub type CudaInt4Mut<'a> = Int4Of<CudaInt4PartsMut<'a>>;
/// A weight of integers that owns its buffers on the GPU.
pub type CudaInt4Tensor = Int4Of<CudaInt4Parts>;
/// A stack of experts of integers that borrows buffers on the GPU.
pub type CudaInt4Stack<'a> = Int4StackOf<CudaInt4PartsRef<'a>>;

impl CudaInt4Tensor {
    /// Copies a weight to the GPU.
    ///
    /// # Errors
    /// [`Error::Driver`](crate::Error::Driver).
    pub fn upload<'a>(stream: &Arc<CudaStream>, weight: impl Into<Int4Ref<'a>>) -> Result<Self> {
        let (spec, parts) = weight.into().into_parts();
        let parts = parts.try_map(
            |_, words| CudaBuffer::upload(stream, words),
            |_, scales| CudaBuffer::upload(stream, scales),
            |_, index| CudaBuffer::upload(stream, index),
        )?;
        // Its values were checked on the host.
        Ok(CudaInt4Tensor { spec, parts })
    }

    /// Copies the weight to the host, and waits for the copy.
    ///
    /// # Errors
    /// [`Error::Driver`](crate::Error::Driver).
    pub fn download(&self, stream: &Arc<CudaStream>) -> Result<Int4Tensor> {
        let parts = self.parts().as_ref().try_map(
            |_, words| words.download(stream),
            |_, scales| scales.download(stream),
            |_, index| index.download(stream),
        )?;
        Int4Tensor::new(self.spec(), parts)
    }

    /// Borrows it to be read.
    pub fn view(&self) -> CudaInt4Ref<'_> {
        CudaInt4Ref {
            spec: self.spec,
            parts: self.parts.as_ref().map(
                CudaBuffer::as_view,
                CudaBuffer::as_view,
                CudaBuffer::as_view,
            ),
        }
    }

    /// Borrows it to be written.
    pub fn view_mut(&mut self) -> CudaInt4Mut<'_> {
        CudaInt4Mut {
            spec: self.spec,
            parts: self.parts.as_mut().map(
                CudaBuffer::as_view_mut,
                CudaBuffer::as_view_mut,
                CudaBuffer::as_view,
            ),
        }
    }

    /// Sorts the columns by group, as [`Int4Tensor::reordered`] does; the work is enqueued on `stream`.
    ///
    /// # Errors
    /// It fails as [`reorder_int4_into`] does.
    pub fn reordered(mut self, stream: &Arc<CudaStream>) -> Result<Self> {
        let words = crate::memory::Read::length(&self.parts.packed);
        let mut packed = CudaBuffer::zeros(stream, words)?;
        let mut permutation = CudaBuffer::upload(stream, &identity(self.spec.cols))?;
        reorder_int4_into(&self, &mut packed, &mut permutation, stream)?;
        self.parts.packed = packed;
        self.parts.columns = ColumnsOf::Permuted(permutation);
        Ok(self)
    }
}
