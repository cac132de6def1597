//! Quantized weights in buffers of cudarc.

use std::sync::Arc;

use cudarc::driver::{CudaStream, CudaView, CudaViewMut, DeviceSlice};

use super::access::{Access, Readable};
use super::buffer::Buffer;
use super::CudaWeight;
use crate::device::DeviceTensor;
use crate::error::check_length;
use crate::format::{CODEBOOK_SIZE, SCALE_CODE_SIZE};
use crate::scales::ScaleLengths;
use crate::{QuantizedRef, QuantizedTensor, Result, ScalesOf, Sizes, Spec};

/// Scales in buffers on the GPU; `code` is 256 floats and `offset` one.
pub type CudaScalesRef<'a> =
    ScalesOf<CudaView<'a, f32>, CudaView<'a, u8>, CudaView<'a, f32>, CudaView<'a, f32>>;

/// Scales in buffers on the GPU, to be written. `code` is read.
pub type CudaScalesMut<'a> =
    ScalesOf<CudaViewMut<'a, f32>, CudaViewMut<'a, u8>, CudaView<'a, f32>, CudaViewMut<'a, f32>>;

fn length<T>(part: &impl DeviceSlice<T>) -> usize {
    part.len()
}

/// A quantized weight that borrows buffers on the GPU, to be read.
#[derive(Debug)]
pub struct CudaRef<'a> {
    spec: Spec,
    packed: CudaView<'a, u8>,
    scales: CudaScalesRef<'a>,
    codebook: Option<CudaView<'a, f32>>,
}

impl<'a> CudaRef<'a> {
    /// A weight of these parts. `codebook`, 16 floats, replaces that of the format.
    ///
    /// # Errors
    /// As [`QuantizedRef::new`].
    pub fn new(
        spec: Spec,
        packed: CudaView<'a, u8>,
        scales: CudaScalesRef<'a>,
        codebook: Option<CudaView<'a, f32>>,
    ) -> Result<Self> {
        let lengths = scales.as_ref().map(length, length, length, length);
        check_parts(spec, &packed, lengths, &codebook)?;
        Ok(CudaRef {
            spec,
            packed,
            scales,
            codebook,
        })
    }
}

impl CudaWeight for CudaRef<'_> {}

impl Readable for CudaRef<'_> {
    type Device = DeviceTensor;

    fn read<'a>(&'a self, access: &Access<'a>) -> Result<DeviceTensor> {
        Ok(DeviceTensor {
            spec: self.spec,
            packed: access.read("packed", &self.packed)?,
            scales: self.scales.as_ref().try_map(
                |name, absmax| access.read(name, absmax),
                |name, codes| access.read(name, codes),
                |name, code| access.read(name, code),
                |name, offset| access.read(name, offset),
            )?,
            codebook: access.read_optional("codebook", &self.codebook)?,
        })
    }

    fn shape(&self) -> (usize, usize) {
        (self.spec.rows, self.spec.cols)
    }
}

/// A quantized weight that borrows buffers on the GPU, to be written by
/// [`quantize_into`](super::quantize_into).
#[derive(Debug)]
pub struct CudaMut<'a> {
    pub(super) spec: Spec,
    pub(super) elements: usize,
    pub(super) packed: CudaViewMut<'a, u8>,
    pub(super) scales: CudaScalesMut<'a>,
    pub(super) codebook: Option<CudaView<'a, f32>>,
}

impl<'a> CudaMut<'a> {
    /// A weight of these parts. `codebook`, 16 floats, replaces that of the format.
    ///
    /// # Errors
    /// As [`QuantizedRef::new`].
    pub fn new(
        spec: Spec,
        packed: CudaViewMut<'a, u8>,
        scales: CudaScalesMut<'a>,
        codebook: Option<CudaView<'a, f32>>,
    ) -> Result<Self> {
        let lengths = scales.as_ref().map(length, length, length, length);
        let elements = check_parts(spec, &packed, lengths, &codebook)?.elements;
        Ok(CudaMut {
            spec,
            elements,
            packed,
            scales,
            codebook,
        })
    }
}

fn check_parts(
    spec: Spec,
    packed: &impl DeviceSlice<u8>,
    scales: ScaleLengths,
    codebook: &Option<CudaView<'_, f32>>,
) -> Result<Sizes> {
    if let Some(entries) = codebook {
        check_length("codebook", entries.len(), CODEBOOK_SIZE)?;
    }
    spec.check_parts(packed.len(), scales)
}

type BufferScales = ScalesOf<Buffer<f32>, Buffer<u8>, Buffer<f32>, Buffer<f32>>;

/// A quantized weight that owns its buffers on the GPU.
#[derive(Debug)]
pub struct CudaTensor {
    spec: Spec,
    elements: usize,
    packed: Buffer<u8>,
    scales: BufferScales,
    codebook: Option<Buffer<f32>>,
}

impl CudaTensor {
    /// Copies a weight to the GPU.
    ///
    /// # Errors
    /// [`Error::Driver`](crate::Error::Driver).
    pub fn upload<'a>(
        stream: &Arc<CudaStream>,
        weight: impl Into<QuantizedRef<'a>>,
    ) -> Result<Self> {
        let weight = weight.into();
        let scales = weight.scales().try_map(
            |_, absmax| Buffer::upload(stream, absmax),
            |_, codes| Buffer::upload(stream, codes),
            |_, code| Buffer::upload(stream, code),
            |_, offset| Buffer::upload(stream, &[*offset]),
        )?;
        let codebook = weight
            .codebook()
            .map(|entries| Buffer::upload(stream, entries));
        Ok(CudaTensor {
            spec: weight.spec(),
            elements: weight.elements(),
            packed: Buffer::upload(stream, weight.packed())?,
            scales,
            codebook: codebook.transpose()?,
        })
    }

    /// Copies a weight from the GPU, and waits for it.
    ///
    /// # Errors
    /// [`Error::Driver`](crate::Error::Driver).
    pub fn download(&self, stream: &Arc<CudaStream>) -> Result<QuantizedTensor> {
        let scales = self.scales.as_ref().try_map(
            |_, absmax| absmax.download(stream),
            |_, codes| codes.download(stream),
            |_, code| Ok(Box::new(array::<SCALE_CODE_SIZE>(&code.download(stream)?)?)),
            |_, offset| Ok(array::<1>(&offset.download(stream)?)?[0]),
        )?;
        let codebook = self.codebook.as_ref().map(|entries| {
            let entries = entries.download(stream)?;
            array::<CODEBOOK_SIZE>(&entries)
        });
        let packed = self.packed.download(stream)?;
        QuantizedTensor::from_parts(self.spec, packed, scales, codebook.transpose()?)
    }

    /// Borrows it to be read.
    pub fn view(&self) -> CudaRef<'_> {
        CudaRef {
            spec: self.spec,
            packed: self.packed.view(),
            scales: (self.scales.as_ref()).map(
                Buffer::view,
                Buffer::view,
                Buffer::view,
                Buffer::view,
            ),
            codebook: self.codebook.as_ref().map(Buffer::view),
        }
    }

    /// Borrows it to be written.
    pub fn view_mut(&mut self) -> CudaMut<'_> {
        CudaMut {
            spec: self.spec,
            elements: self.elements,
            packed: self.packed.view_mut(),
            scales: (self.scales.as_mut()).map(
                Buffer::view_mut,
                Buffer::view_mut,
                |code| code.view(),
                Buffer::view_mut,
            ),
            codebook: self.codebook.as_ref().map(Buffer::view),
        }
    }

    /// Shape and format.
    pub fn spec(&self) -> Spec {
        self.spec
    }
}

fn array<const N: usize>(values: &[f32]) -> Result<[f32; N]> {
    check_length("the table", values.len(), N)?;
    Ok(std::array::from_fn(|i| values[i]))
}
