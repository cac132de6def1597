//! Quantized weights on the host: one that owns its buffers, two that borrow them.
//!
//! The lengths are checked when a weight is made, so one that exists can be given to
//! libnf4: every pointer reaches as many bytes as libnf4 will read or write.

use std::ptr;

use nf4_sys as sys;

use crate::format::CODEBOOK_SIZE;
use crate::kind::{Described, HostView};
use crate::{info, Result, Scales, ScalesMut, ScalesRef, Spec};

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
#[derive(Debug, Clone, Copy)]
pub struct QuantizedRef<'a> {
    spec: Spec,
    elements: usize,
    packed: &'a [u8],
    scales: ScalesRef<'a>,
    codebook: Option<&'a [f32; CODEBOOK_SIZE]>,
}

impl<'a> QuantizedRef<'a> {
    /// A weight of these parts. `codebook` replaces that of the format.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`](crate::Error::InvalidArgument) if `spec` is wrong, or a
    /// buffer does not have the length that it asks for.
    pub fn new(
        spec: Spec,
        packed: &'a [u8],
        scales: ScalesRef<'a>,
        codebook: Option<&'a [f32; CODEBOOK_SIZE]>,
    ) -> Result<Self> {
        let elements = spec.check_parts(packed.len(), scales.lengths())?.elements;
        Ok(QuantizedRef {
            spec,
            elements,
            packed,
            scales,
            codebook,
        })
    }

    /// Shape and format.
    pub fn spec(&self) -> Spec {
        self.spec
    }

    /// `rows * cols`.
    pub fn elements(&self) -> usize {
        self.elements
    }

    /// The codes, two in a byte, the first in the high half.
    pub fn packed(&self) -> &'a [u8] {
        self.packed
    }

    /// The scales.
    pub fn scales(&self) -> ScalesRef<'a> {
        self.scales
    }

    /// The codebook that replaces that of the format.
    pub fn codebook(&self) -> Option<&'a [f32; CODEBOOK_SIZE]> {
        self.codebook
    }
}

impl Described for QuantizedRef<'_> {
    type Raw = sys::nf4_tensor;

    fn raw(&self) -> Result<Self::Raw> {
        let mut raw = self.spec.descriptor()?;
        raw.packed = self.packed.as_ptr().cast_mut().cast();
        raw.codebook = codebook_pointer(self.codebook);
        self.scales
            .map(
                |absmax| absmax.as_ptr().cast_mut(),
                |codes| codes.as_ptr().cast_mut(),
                |code| code.as_ptr(),
                |offset| ptr::from_ref(offset).cast_mut(),
            )
            .set_in(&mut raw);
        Ok(raw)
    }

    fn shape(&self) -> (usize, usize) {
        (self.spec.rows, self.spec.cols)
    }
}

impl HostView for QuantizedRef<'_> {}

/// A quantized weight that borrows its buffers, to be written by
/// [`quantize_into`](crate::quantize_into).
#[derive(Debug)]
pub struct QuantizedMut<'a> {
    spec: Spec,
    elements: usize,
    packed: &'a mut [u8],
    scales: ScalesMut<'a>,
    codebook: Option<&'a [f32; CODEBOOK_SIZE]>,
}

impl<'a> QuantizedMut<'a> {
    /// A weight of these parts. `codebook` replaces that of the format.
    ///
    /// # Errors
    /// As [`QuantizedRef::new`].
    pub fn new(
        spec: Spec,
        packed: &'a mut [u8],
        scales: ScalesMut<'a>,
        codebook: Option<&'a [f32; CODEBOOK_SIZE]>,
    ) -> Result<Self> {
        let lengths = scales
            .as_ref()
            .map(|f| f.len(), |b| b.len(), |c| c.len(), |_| 1);
        let elements = spec.check_parts(packed.len(), lengths)?.elements;
        Ok(QuantizedMut {
            spec,
            elements,
            packed,
            scales,
            codebook,
        })
    }

    /// Shape and format.
    pub fn spec(&self) -> Spec {
        self.spec
    }

    /// `rows * cols`.
    pub fn elements(&self) -> usize {
        self.elements
    }

    pub(crate) fn raw(&mut self) -> Result<sys::nf4_tensor> {
        let mut raw = self.spec.descriptor()?;
        raw.packed = self.packed.as_mut_ptr().cast();
        raw.codebook = codebook_pointer(self.codebook);
        self.scales
            .as_mut()
            .map(
                |absmax| absmax.as_mut_ptr(),
                |codes| codes.as_mut_ptr(),
                |code| code.as_ptr(),
                |offset| ptr::from_mut(*offset),
            )
            .set_in(&mut raw);
        Ok(raw)
    }
}

fn codebook_pointer(codebook: Option<&[f32; CODEBOOK_SIZE]>) -> *const f32 {
    codebook.map_or(ptr::null(), |entries| entries.as_ptr())
}

/// A quantized weight that owns its buffers.
#[derive(Debug, Clone, PartialEq)]
pub struct QuantizedTensor {
    spec: Spec,
    packed: Vec<u8>,
    scales: Scales,
    codebook: Option<[f32; CODEBOOK_SIZE]>,
}

impl QuantizedTensor {
    /// A weight of these parts, such as those of a file. `codebook` replaces that of the
    /// format.
    ///
    /// # Errors
    /// As [`QuantizedRef::new`].
    pub fn from_parts(
        spec: Spec,
        packed: Vec<u8>,
        scales: Scales,
        codebook: Option<[f32; CODEBOOK_SIZE]>,
    ) -> Result<Self> {
        QuantizedRef::new(spec, &packed, scales.view(), codebook.as_ref())?;
        Ok(QuantizedTensor {
            spec,
            packed,
            scales,
            codebook,
        })
    }

    /// Buffers of zeros, to be filled by [`quantize_into`](crate::quantize_into). Nested
    /// scales get the code of bitsandbytes, [`scale_code`](crate::scale_code).
    ///
    /// # Errors
    /// As [`Spec::sizes`].
    pub fn zeros(spec: Spec) -> Result<Self> {
        let sizes = spec.sizes()?;
        let scales = if spec.is_nested() {
            Scales::Nested {
                codes: vec![0; sizes.blocks],
                absmax: vec![0.0; sizes.nested_blocks],
                code: Box::new(*info::scale_code()),
                offset: 0.0,
            }
        } else {
            Scales::Flat(vec![0.0; sizes.blocks])
        };
        Ok(QuantizedTensor {
            spec,
            packed: vec![0; sizes.packed_bytes],
            scales,
            codebook: None,
        })
    }

    /// The same bytes with another codebook.
    pub fn with_codebook(self, codebook: [f32; CODEBOOK_SIZE]) -> Self {
        QuantizedTensor {
            codebook: Some(codebook),
            ..self
        }
    }

    /// The parts: spec, packed, scales, codebook.
    pub fn into_parts(self) -> (Spec, Vec<u8>, Scales, Option<[f32; CODEBOOK_SIZE]>) {
        (self.spec, self.packed, self.scales, self.codebook)
    }

    /// Borrows it to be read.
    pub fn view(&self) -> QuantizedRef<'_> {
        QuantizedRef {
            spec: self.spec,
            elements: self.elements(),
            packed: &self.packed,
            scales: self.scales.view(),
            codebook: self.codebook.as_ref(),
        }
    }

    /// Borrows it to be written.
    pub fn view_mut(&mut self) -> QuantizedMut<'_> {
        QuantizedMut {
            spec: self.spec,
            elements: self.elements(),
            packed: &mut self.packed,
            scales: self.scales.view_mut(),
            codebook: self.codebook.as_ref(),
        }
    }

    /// Shape and format.
    pub fn spec(&self) -> Spec {
        self.spec
    }

    /// `rows * cols`.
    pub fn elements(&self) -> usize {
        self.spec.rows * self.spec.cols
    }

    /// The codes, two in a byte, the first in the high half.
    pub fn packed(&self) -> &[u8] {
        &self.packed
    }

    /// The scales.
    pub fn scales(&self) -> &Scales {
        &self.scales
    }

    /// The codebook that replaces that of the format.
    pub fn codebook(&self) -> Option<&[f32; CODEBOOK_SIZE]> {
        self.codebook.as_ref()
    }

    /// Bytes of codes and scales; tables are not counted.
    pub fn bytes(&self) -> usize {
        let scales = match &self.scales {
            Scales::Flat(absmax) => size_of_val(&absmax[..]),
            Scales::Nested {
                codes,
                absmax,
                offset,
                ..
            } => codes.len() + size_of_val(&absmax[..]) + size_of_val(offset),
        };
        self.packed.len() + scales
    }

    /// Bits of codes and scales per element; NaN for a weight of no elements.
    pub fn bits_per_weight(&self) -> f64 {
        if self.elements() == 0 {
            return f64::NAN;
        }
        self.bytes() as f64 * 8.0 / self.elements() as f64
    }
}

impl<'a> From<&'a QuantizedTensor> for QuantizedRef<'a> {
    fn from(tensor: &'a QuantizedTensor) -> Self {
        tensor.view()
    }
}
