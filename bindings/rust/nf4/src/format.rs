//! The 4-bit formats and the element types of dense data.

use half::{bf16, f16};
use nf4_sys as sys;

/// Entries of a codebook.
pub const CODEBOOK_SIZE: usize = 16;
/// Entries of the scale code, the table that nested scales index.
pub const SCALE_CODE_SIZE: usize = 256;

/// A 4-bit format, which determines the codebook.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum Format {
    /// Quantiles of the normal distribution (QLoRA).
    #[default]
    Nf4,
    /// A sign bit and eight magnitudes.
    Fp4,
    /// E2M1 with an E8M0 scale for each 32 elements of a row.
    Mxfp4(E8m0Rule),
    /// E2M1 with an E4M3 scale for each 16 or 32 elements of a row, and a global scale for
    /// `nested_blocksize` rows, or for all if that is 0.
    Nvfp4(GlobalScale),
}

/// How quantize chooses the E8M0 scale of a block; m is floor(log2(a)) for its largest magnitude a.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum E8m0Rule {
    /// 2^(m - 2).
    #[default]
    Floor,
    /// 2^(m - 2), or 2^(m - 1) from 1.75 * 2^m on.
    Even,
    /// The least power of two that is not below a / 6.
    Ceil,
}

/// How a global scale acts on the scale of a block.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum GlobalScale {
    /// It multiplies it, as in ModelOpt.
    #[default]
    Factor,
    /// It divides it, as in compressed-tensors.
    Divisor,
}

/// Says what the scales of blocks are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ScaleKind {
    /// Floats, which may be nested.
    Floats,
    /// Bytes.
    Bytes,
    /// Bytes, and a global scale for some or all rows.
    Global,
}

impl Format {
    /// The `nf4_format` of the C interface.
    pub const fn as_raw(self) -> sys::nf4_format {
        match self {
            Format::Nf4 => sys::NF4_FORMAT_NF4,
            Format::Fp4 => sys::NF4_FORMAT_FP4,
            Format::Mxfp4(_) => sys::NF4_FORMAT_MXFP4,
            Format::Nvfp4(_) => sys::NF4_FORMAT_NVFP4,
        }
    }

    /// Returns what the scales of its blocks are.
    pub(crate) const fn scales(self) -> ScaleKind {
        match self {
            Format::Nf4 | Format::Fp4 => ScaleKind::Floats,
            Format::Mxfp4(_) => ScaleKind::Bytes,
            Format::Nvfp4(_) => ScaleKind::Global,
        }
    }

    /// The `scale_rule` of an `nf4_tensor`.
    pub(crate) const fn scale_rule(self) -> i32 {
        match self {
            Format::Nf4 | Format::Fp4 => 0,
            Format::Mxfp4(E8m0Rule::Floor) => sys::NF4_SCALE_FLOOR,
            Format::Mxfp4(E8m0Rule::Even) => sys::NF4_SCALE_EVEN,
            Format::Mxfp4(E8m0Rule::Ceil) => sys::NF4_SCALE_CEIL,
            Format::Nvfp4(GlobalScale::Factor) => sys::NF4_GLOBAL_FACTOR,
            Format::Nvfp4(GlobalScale::Divisor) => sys::NF4_GLOBAL_DIVISOR,
        }
    }
}

/// An element type of dense data.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum DType {
    /// IEEE binary32.
    F32,
    /// IEEE binary16.
    F16,
    /// bfloat16.
    Bf16,
}

impl DType {
    /// The `nf4_dtype` of the C interface.
    pub const fn as_raw(self) -> sys::nf4_dtype {
        match self {
            DType::F32 => sys::NF4_DTYPE_FP32,
            DType::F16 => sys::NF4_DTYPE_FP16,
            DType::Bf16 => sys::NF4_DTYPE_BF16,
        }
    }

    /// Bytes of one element.
    pub const fn bytes(self) -> usize {
        match self {
            DType::F32 => 4,
            DType::F16 | DType::Bf16 => 2,
        }
    }
}

mod sealed {
    pub trait Sealed {}
    impl Sealed for f32 {}
    impl Sealed for half::f16 {}
    impl Sealed for half::bf16 {}
}

/// A Rust type of dense elements: `f32`, [`half::f16`] or [`half::bf16`]. Every bit pattern is a
/// value of these types.
pub trait Element: sealed::Sealed + Copy + Send + Sync + 'static {
    /// The type as libnf4 knows it.
    const DTYPE: DType;
    /// 0, of which all bits are 0.
    const ZERO: Self;
    /// Returns the largest finite magnitude; 0 if there is none.
    #[doc(hidden)]
    fn largest(values: &[Self]) -> f32;
}

/// Returns the largest of these bits of magnitudes that is below those of infinity, or 0. Bits of
/// magnitudes have the order of their numbers, and the loop over integers has no branches.
fn largest<B: Copy + Ord + Default>(magnitudes: impl Iterator<Item = B>, infinity: B) -> B {
    magnitudes.fold(B::default(), |most, bits| {
        most.max(if bits < infinity { bits } else { B::default() })
    })
}

impl Element for f32 {
    const DTYPE: DType = DType::F32;
    const ZERO: Self = 0.0;

    fn largest(values: &[Self]) -> f32 {
        let bits = values.iter().map(|x| x.to_bits() & 0x7fff_ffff);
        f32::from_bits(largest(bits, f32::INFINITY.to_bits()))
    }
}

impl Element for f16 {
    const DTYPE: DType = DType::F16;
    const ZERO: Self = f16::ZERO;

    fn largest(values: &[Self]) -> f32 {
        let bits = values.iter().map(|x| x.to_bits() & 0x7fff);
        f16::from_bits(largest(bits, f16::INFINITY.to_bits())).to_f32()
    }
}

impl Element for bf16 {
    const DTYPE: DType = DType::Bf16;
    const ZERO: Self = bf16::ZERO;

    fn largest(values: &[Self]) -> f32 {
        let bits = values.iter().map(|x| x.to_bits() & 0x7fff);
        bf16::from_bits(largest(bits, bf16::INFINITY.to_bits())).to_f32()
    }
}
