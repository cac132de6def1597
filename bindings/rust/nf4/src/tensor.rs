//! Quantized weights: one type over what holds their parts, and the names of those on the host.
//!
//! The lengths are checked when a weight is made, so one that exists can be given to
//! libnf4: every pointer reaches as many bytes as libnf4 will read or write.

use nf4_sys as sys;

use crate::error::check_length;
use crate::format::CODEBOOK_SIZE;
use crate::kind::{Described, Experts, Weight};
use crate::memory::sealed::Sealed;
use crate::memory::{optional, Access, Read, Write};
use crate::scales::{RawScales, ReadScales, ScaleLengths, WriteScales};
use crate::{info, Result, Scales, ScalesMut, ScalesOf, ScalesRef, Spec};

/// A quantized weight. The parameters are the storage of its parts, all in one kind of memory:
/// [`QuantizedTensor`] owns them on the host, [`QuantizedRef`] and [`QuantizedMut`] borrow them, and
/// others are on a GPU.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct QuantizedOf<Bytes, Scales, Codebook> {
    pub(crate) spec: Spec,
    pub(crate) packed: Bytes,
    pub(crate) scales: Scales,
    pub(crate) codebook: Option<Codebook>,
}

/// A quantized weight that owns its buffers.
pub type QuantizedTensor = QuantizedOf<Vec<u8>, Scales, [f32; CODEBOOK_SIZE]>;
/// A quantized weight that borrows its buffers, to be read.
///
/// ```
/// use nf4::{dequantize, QuantizedRef, ScalesRef, Spec};
/// // Two blocks of 32: code 15 stands for 1, code 0 for -1.
/// let packed = [0xF0; 32];
/// let absmax = [2.0, 3.0];
/// let spec = Spec::new(2, 32).blocksize(32).flat();
/// let weight = QuantizedRef::new(spec, &packed, ScalesRef::Flat(&absmax), None)?;
/// let values: Vec<f32> = dequantize(weight, 0)?;
/// assert_eq!((values[0], values[1], values[62], values[63]), (2.0, -2.0, 3.0, -3.0));
/// # Ok::<(), nf4::Error>(())
/// ```
pub type QuantizedRef<'a> = QuantizedOf<&'a [u8], ScalesRef<'a>, &'a [f32; CODEBOOK_SIZE]>;
/// A quantized weight that borrows its buffers, to be written by
/// [`quantize_into`](crate::quantize_into).
pub type QuantizedMut<'a> = QuantizedOf<&'a mut [u8], ScalesMut<'a>, &'a [f32; CODEBOOK_SIZE]>;

impl<B, S, K> QuantizedOf<B, S, K>
where
    B: Read<Element = u8>,
    S: ReadScales<Memory = B::Memory>,
    K: Read<Element = f32, Memory = B::Memory>,
{
    /// Makes a weight of these parts, such as those of a file. `codebook`, 16 floats, replaces the
    /// format's.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`](crate::Error::InvalidArgument) if `spec` is wrong, or a
    /// buffer does not have the length that [`Spec::sizes`] gives.
    pub fn new(spec: Spec, packed: B, scales: S, codebook: Option<K>) -> Result<Self> {
        if let Some(entries) = &codebook {
            check_length("codebook", entries.length(), CODEBOOK_SIZE)?;
        }
        spec.check_parts(packed.length(), scales.lengths())?;
        Ok(QuantizedOf {
            spec,
            packed,
            scales,
            codebook,
        })
    }

    /// Returns the bytes of the codes and scales; the codebook and the scale code are not counted.
    pub fn bytes(&self) -> usize {
        let scales = match self.scales.lengths() {
            ScalesOf::Flat(absmax) => absmax * size_of::<f32>(),
            ScalesOf::Bytes(absmax) => absmax,
            ScalesOf::Global { bytes, scales } => bytes + scales * size_of::<f32>(),
            ScalesOf::Nested {
                codes,
                absmax,
                offset,
                ..
            } => codes + (absmax + offset) * size_of::<f32>(),
        };
        self.packed.length() + scales
    }

    /// Returns the bits of codes and scales per element; NaN for a weight without elements.
    pub fn bits_per_weight(&self) -> f64 {
        if self.elements() == 0 {
            return f64::NAN;
        }
        self.bytes() as f64 * 8.0 / self.elements() as f64
    }
}

impl<B, S, K> QuantizedOf<B, S, K> {
    /// Returns the shape and format.
    pub fn spec(&self) -> Spec {
        self.spec
    }

    /// Returns `rows * cols`.
    pub fn elements(&self) -> usize {
        self.spec.rows * self.spec.cols
    }

    /// Returns the codes, two in a byte, the first in the high half.
    pub fn packed(&self) -> &B {
        &self.packed
    }

    /// Returns the scales.
    pub fn scales(&self) -> &S {
        &self.scales
    }

    /// Returns the codebook that replaces the format's, if there is one.
    pub fn codebook(&self) -> Option<&K> {
        self.codebook.as_ref()
    }

    /// Takes the weight apart: spec, packed, scales, codebook.
    pub fn into_parts(self) -> (Spec, B, S, Option<K>) {
        (self.spec, self.packed, self.scales, self.codebook)
    }

    /// The descriptor of these addresses.
    fn descriptor(
        spec: &Spec,
        packed: *mut u8,
        scales: RawScales,
        codebook: *const f32,
    ) -> Result<sys::nf4_tensor> {
        let mut raw = spec.descriptor()?;
        raw.packed = packed.cast();
        raw.codebook = codebook;
        scales.set_in(&mut raw);
        Ok(raw)
    }
}

impl<B, S, K> QuantizedOf<B, S, K>
where
    B: Write<Element = u8>,
    S: WriteScales<Memory = B::Memory>,
    K: Read<Element = f32, Memory = B::Memory>,
{
    /// The descriptor for one call, which writes codes and scales.
    pub(crate) fn raw_mut<'a>(
        &'a mut self,
        access: &Access<'a, B::Memory>,
    ) -> Result<sys::nf4_tensor> {
        Self::descriptor(
            &self.spec,
            self.packed.address_mut("packed", access)?,
            self.scales.raw_mut(access)?,
            optional("codebook", self.codebook.as_ref(), access)?,
        )
    }
}

impl<B, S, K> Sealed for QuantizedOf<B, S, K> {}

impl<B, S, K> Described for QuantizedOf<B, S, K>
where
    B: Read<Element = u8>,
    S: ReadScales<Memory = B::Memory>,
    K: Read<Element = f32, Memory = B::Memory>,
{
    type Memory = B::Memory;
    type Raw = sys::nf4_tensor;

    fn raw<'a>(&'a self, access: &Access<'a, B::Memory>) -> Result<Self::Raw> {
        Self::descriptor(
            &self.spec,
            self.packed.address("packed", access)?.cast_mut(),
            self.scales.raw(access)?,
            optional("codebook", self.codebook.as_ref(), access)?,
        )
    }

    fn nowhere(&self) -> Result<Self::Raw> {
        self.spec.descriptor()
    }
}

impl<B, S, K> Weight for QuantizedOf<B, S, K>
where
    Self: Described,
{
    fn shape(&self) -> (usize, usize) {
        (self.spec.rows, self.spec.cols)
    }
}

impl<B, S, K> Experts for QuantizedOf<B, S, K>
where
    Self: Described,
{
    /// libnf4 refuses experts that do not divide the rows.
    fn expert_shape(&self, experts: usize) -> Result<(usize, usize)> {
        Ok((self.spec.rows / experts.max(1), self.spec.cols))
    }
}

impl QuantizedTensor {
    /// Makes a weight of zeroed buffers, for [`quantize_into`](crate::quantize_into) to fill. Nested
    /// scales get the code of bitsandbytes, [`scale_code`](crate::scale_code). The global scales of
    /// NVFP4, which `quantize_into` reads, are 1: weights that are much smaller than 1 need smaller
    /// factors, or larger divisors.
    ///
    /// # Errors
    /// It fails as [`Spec::sizes`] does.
    pub fn zeros(spec: Spec) -> Result<Self> {
        let sizes = spec.sizes()?;
        let mut scales: Scales = ScaleLengths::of(&spec, &sizes).map(
            |length| vec![0.0; length],
            |length| vec![0; length],
            |_| Box::new(*info::scale_code()),
            |_| 0.0,
        );
        if let Scales::Global { scales, .. } = &mut scales {
            scales.fill(1.0);
        }
        Ok(QuantizedTensor {
            spec,
            packed: vec![0; sizes.packed_bytes],
            scales,
            codebook: None,
        })
    }

    /// Returns the same bytes with another codebook.
    pub fn with_codebook(self, codebook: [f32; CODEBOOK_SIZE]) -> Self {
        QuantizedTensor {
            codebook: Some(codebook),
            ..self
        }
    }

    /// Borrows it to be read.
    pub fn view(&self) -> QuantizedRef<'_> {
        QuantizedRef {
            spec: self.spec,
            packed: &self.packed,
            scales: self.scales.view(),
            codebook: self.codebook.as_ref(),
        }
    }

    /// Borrows it to be written.
    pub fn view_mut(&mut self) -> QuantizedMut<'_> {
        QuantizedMut {
            spec: self.spec,
            packed: &mut self.packed,
            scales: self.scales.view_mut(),
            codebook: self.codebook.as_ref(),
        }
    }
}

impl<'a> From<&'a QuantizedTensor> for QuantizedRef<'a> {
    fn from(tensor: &'a QuantizedTensor) -> Self {
        tensor.view()
    }
}
