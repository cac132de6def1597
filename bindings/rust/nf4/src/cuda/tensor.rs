//! Quantized weights in buffers of cudarc.

use std::sync::Arc;

use cudarc::driver::{CudaStream, CudaView, CudaViewMut};

use super::buffer::CudaBuffer;
use crate::error::check_length;
use crate::format::{CODEBOOK_SIZE, SCALE_CODE_SIZE};
use crate::{QuantizedOf, QuantizedRef, QuantizedTensor, Result, ScalesOf};

/// Scales in buffers on the GPU; `code` is 256 floats and `offset` one.
pub type CudaScalesRef<'a> =
    ScalesOf<CudaView<'a, f32>, CudaView<'a, u8>, CudaView<'a, f32>, CudaView<'a, f32>>;
/// Scales in buffers on the GPU, to be written. `code` is read.
pub type CudaScalesMut<'a> =
    ScalesOf<CudaViewMut<'a, f32>, CudaViewMut<'a, u8>, CudaView<'a, f32>, CudaViewMut<'a, f32>>;
/// A quantized weight that borrows buffers on the GPU, to be read.
pub type CudaRef<'a> = QuantizedOf<CudaView<'a, u8>, CudaScalesRef<'a>, CudaView<'a, f32>>;
/// A quantized weight that borrows buffers on the GPU, to be written by
/// [`quantize_into`](crate::quantize_into).
pub type CudaMut<'a> = QuantizedOf<CudaViewMut<'a, u8>, CudaScalesMut<'a>, CudaView<'a, f32>>;
/// Scales that own their buffers on the GPU.
pub type CudaScales = ScalesOf<CudaBuffer<f32>, CudaBuffer<u8>, CudaBuffer<f32>, CudaBuffer<f32>>;
/// A quantized weight that owns its buffers on the GPU.
pub type CudaTensor = QuantizedOf<CudaBuffer<u8>, CudaScales, CudaBuffer<f32>>;

impl CudaTensor {
    /// Copies a weight to the GPU.
    ///
    /// # Errors
    /// [`Error::Driver`](crate::Error::Driver).
    pub fn upload<'a>(
        stream: &Arc<CudaStream>,
        weight: impl Into<QuantizedRef<'a>>,
    ) -> Result<Self> {
        let (spec, packed, scales, codebook) = weight.into().into_parts();
        let scales = scales.try_map(
            |_, absmax| CudaBuffer::upload(stream, absmax),
            |_, codes| CudaBuffer::upload(stream, codes),
            |_, code| CudaBuffer::upload(stream, code),
            |_, offset| CudaBuffer::upload(stream, &[*offset]),
        )?;
        let codebook = codebook.map(|entries| CudaBuffer::upload(stream, entries));
        let packed = CudaBuffer::upload(stream, packed)?;
        CudaTensor::new(spec, packed, scales, codebook.transpose()?)
    }

    /// Copies the weight to the host, and waits for the copy.
    ///
    /// # Errors
    /// [`Error::Driver`](crate::Error::Driver).
    pub fn download(&self, stream: &Arc<CudaStream>) -> Result<QuantizedTensor> {
        let scales = self.scales().as_ref().try_map(
            |_, absmax| absmax.download(stream),
            |_, codes| codes.download(stream),
            |_, code| Ok(Box::new(array::<SCALE_CODE_SIZE>(&code.download(stream)?)?)),
            |_, offset| Ok(array::<1>(&offset.download(stream)?)?[0]),
        )?;
        let codebook = self.codebook().map(|entries| {
            let entries = entries.download(stream)?;
            array::<CODEBOOK_SIZE>(&entries)
        });
        let packed = self.packed().download(stream)?;
        QuantizedTensor::new(self.spec(), packed, scales, codebook.transpose()?)
    }

    /// Borrows it to be read.
    pub fn view(&self) -> CudaRef<'_> {
        CudaRef {
            spec: self.spec,
            packed: self.packed.as_view(),
            scales: self.scales.as_ref().map(
                CudaBuffer::as_view,
                CudaBuffer::as_view,
                CudaBuffer::as_view,
                CudaBuffer::as_view,
            ),
            codebook: self.codebook.as_ref().map(CudaBuffer::as_view),
        }
    }

    /// Borrows it to be written.
    pub fn view_mut(&mut self) -> CudaMut<'_> {
        CudaMut {
            spec: self.spec,
            packed: self.packed.as_view_mut(),
            scales: self.scales.as_mut().map(
                CudaBuffer::as_view_mut,
                CudaBuffer::as_view_mut,
                |code| code.as_view(),
                CudaBuffer::as_view_mut,
            ),
            codebook: self.codebook.as_ref().map(CudaBuffer::as_view),
        }
    }
}

fn array<const N: usize>(values: &[f32]) -> Result<[f32; N]> {
    check_length("the table", values.len(), N)?;
    Ok(std::array::from_fn(|i| values[i]))
}
