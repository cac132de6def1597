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
}

impl Format {
    /// The `nf4_format` of the C interface.
    pub const fn as_raw(self) -> sys::nf4_format {
        match self {
            Format::Nf4 => sys::NF4_FORMAT_NF4,
            Format::Fp4 => sys::NF4_FORMAT_FP4,
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
}

impl Element for f32 {
    const DTYPE: DType = DType::F32;
    const ZERO: Self = 0.0;
}

impl Element for f16 {
    const DTYPE: DType = DType::F16;
    const ZERO: Self = f16::ZERO;
}

impl Element for bf16 {
    const DTYPE: DType = DType::Bf16;
    const ZERO: Self = bf16::ZERO;
}
