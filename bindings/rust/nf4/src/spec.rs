//! The shape and format of a quantized weight.

use std::ptr;

use nf4_sys as sys;

use crate::error::{check, check_length, convert};
use crate::format::ScaleKind;
use crate::info::check_version;
use crate::scales::ScaleLengths;
use crate::{Format, Result};

/// The shape and format of a quantized weight.
///
/// ```
/// use nf4::{Format, Spec};
/// let spec = Spec::new(14336, 4096); // NF4, blocksize 64, scales nested by 256
/// assert_eq!(spec.sizes()?.packed_bytes, 14336 * 4096 / 2);
/// let flat = Spec::new(10, 33).format(Format::Fp4).blocksize(128).flat();
/// assert_eq!(flat.sizes()?.blocks, 3);
/// # Ok::<(), nf4::Error>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Spec {
    /// Rows of the weight.
    pub rows: usize,
    /// Columns of the weight; `rows * cols` is at most 2^60.
    pub cols: usize,
    /// The format. It selects the codebook, unless the weight has one of its own.
    pub format: Format,
    /// Elements that share a scale: a power of two from 32 to 4096. MXFP4: 32; NVFP4: 16 or 32.
    pub blocksize: u32,
    /// Scales that share a scale of their own (double quantization): a power of two up to 2^30; 0
    /// means flat, with float scales. MXFP4: 0. NVFP4: the rows that share a global scale; 0 means
    /// all.
    pub nested_blocksize: u32,
}

/// Sizes of the parts of a weight.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Sizes {
    /// `rows * cols`.
    pub elements: usize,
    /// Blocks, which is also the number of scales.
    pub blocks: usize,
    /// Blocks of scales; 0 if flat.
    pub nested_blocks: usize,
    /// Bytes of the packed codes.
    pub packed_bytes: usize,
    /// Bytes of the scales: one each if nested, else four.
    pub absmax_bytes: usize,
}

impl Spec {
    /// NF4 in blocks of 64, nested by 256, as bitsandbytes does by default.
    pub const fn new(rows: usize, cols: usize) -> Self {
        Spec {
            rows,
            cols,
            format: Format::Nf4,
            blocksize: 64,
            nested_blocksize: 256,
        }
    }

    /// The same in another format.
    pub const fn format(self, format: Format) -> Self {
        Spec { format, ..self }
    }

    /// The same with another blocksize.
    pub const fn blocksize(self, blocksize: u32) -> Self {
        Spec { blocksize, ..self }
    }

    /// The same with nested scales (double quantization).
    pub const fn nested(self, nested_blocksize: u32) -> Self {
        Spec {
            nested_blocksize,
            ..self
        }
    }

    /// The same with flat scales: a float for each block.
    pub const fn flat(self) -> Self {
        self.nested(0)
    }

    /// Returns whether the scales are nested. Those of MXFP4 and NVFP4 are not.
    pub const fn is_nested(&self) -> bool {
        self.nested_blocksize != 0 && matches!(self.format.scales(), ScaleKind::Floats)
    }

    /// Returns the sizes of the parts.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`](crate::Error::InvalidArgument) if a blocksize is not one of
    /// those that the fields allow, or the weight is too large.
    pub fn sizes(&self) -> Result<Sizes> {
        let mut sizes = sys::nf4_sizes {
            struct_size: size_of::<sys::nf4_sizes>(),
            elements: 0,
            blocks: 0,
            nested_blocks: 0,
            packed_bytes: 0,
            absmax_bytes: 0,
        };
        // SAFETY: both live through the call, and their struct_size is set.
        check(unsafe { sys::nf4_tensor_sizes(&self.descriptor()?, &mut sizes) })?;
        Ok(Sizes {
            elements: convert("elements", sizes.elements)?,
            blocks: convert("blocks", sizes.blocks)?,
            nested_blocks: convert("nested_blocks", sizes.nested_blocks)?,
            packed_bytes: convert("packed_bytes", sizes.packed_bytes)?,
            absmax_bytes: convert("absmax_bytes", sizes.absmax_bytes)?,
        })
    }

    /// Returns the bytes of workspace that [`quantize_into`](crate::quantize_into) needs; 0 if flat.
    ///
    /// # Errors
    /// It fails as [`Spec::sizes`] does.
    pub fn workspace_bytes(&self) -> Result<usize> {
        let mut bytes = 0;
        // SAFETY: both live through the call, and the struct_size is set.
        check(unsafe { sys::nf4_quantize_workspace_size(&self.descriptor()?, &mut bytes) })?;
        Ok(bytes)
    }

    /// The C descriptor, with no pointers yet. Every call on a weight passes through here.
    pub(crate) fn descriptor(&self) -> Result<sys::nf4_tensor> {
        check_version()?;
        Ok(sys::nf4_tensor {
            struct_size: size_of::<sys::nf4_tensor>(),
            format: self.format.as_raw(),
            blocksize: convert("blocksize", self.blocksize)?,
            nested_blocksize: convert("nested_blocksize", self.nested_blocksize)?,
            scale_rule: self.format.scale_rule(),
            rows: convert("rows", self.rows)?,
            cols: convert("cols", self.cols)?,
            packed: ptr::null_mut(),
            absmax: ptr::null_mut(),
            nested_absmax: ptr::null_mut(),
            nested_code: ptr::null(),
            nested_offset: ptr::null_mut(),
            codebook: ptr::null(),
        })
    }

    /// Checks that buffers of these lengths make a weight. This keeps the C functions inside
    /// the slices that they are given.
    pub(crate) fn check_parts(&self, packed: usize, scales: ScaleLengths) -> Result<Sizes> {
        let sizes = self.sizes()?;
        check_length("packed", packed, sizes.packed_bytes)?;
        self.check_scales(&scales)?;
        let expected = ScaleLengths::of(self, &sizes).named();
        for ((name, length), (_, expected)) in scales.named().into_iter().zip(expected) {
            check_length(name, length, expected)?;
        }
        Ok(sizes)
    }

    /// Checks that a weight has scales of this kind.
    fn check_scales(&self, scales: &ScaleLengths) -> Result<()> {
        let (kind, name) = scales.kind();
        let nested = matches!(scales, ScaleLengths::Nested { .. });
        if kind != self.format.scales() {
            return Err(crate::Error::InvalidArgument(format!(
                "the scales are {name}, but format is {:?}",
                self.format
            )));
        }
        if nested != self.is_nested() {
            let name = if nested { "nested" } else { "flat" };
            return Err(crate::Error::InvalidArgument(format!(
                "the scales are {name}, but nested_blocksize is {}",
                self.nested_blocksize
            )));
        }
        Ok(())
    }
}
