//! The scales of a weight, of any kind, in any storage.

use std::cell::RefCell;

use nf4_sys as sys;

use crate::format::{ScaleKind, SCALE_CODE_SIZE};
use crate::memory::sealed::Sealed;
use crate::memory::{Access, Memory, Read, Write};
use crate::{Result, Sizes, Spec};

/// The scales of a weight. The parameters are the storage of its parts: [`Scales`] owns them on the
/// host, [`ScalesRef`] and [`ScalesMut`] borrow them, and others are in device memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ScalesOf<Floats, Bytes, Code, Offset> {
    /// One float for each block.
    Flat(Floats),
    /// One E8M0 number for each block (MXFP4).
    Bytes(Bytes),
    /// One E4M3 number for each block, and the global scales (NVFP4).
    Global {
        /// The E4M3 numbers.
        bytes: Bytes,
        /// One float for each part of the rows. `quantize` chooses them, `quantize_into` reads them.
        scales: Floats,
    },
    /// One scale code for each block (double quantization).
    Nested {
        /// Indices into `code`, one for each block.
        codes: Bytes,
        /// One float for each block of scale codes.
        absmax: Floats,
        /// The 256 values of the scale codes, ascending.
        code: Code,
        /// One float, added to every scale.
        offset: Offset,
    },
}

/// Scales that own their memory on the host.
pub type Scales = ScalesOf<Vec<f32>, Vec<u8>, Box<[f32; SCALE_CODE_SIZE]>, f32>;
/// Scales borrowed from the host.
pub type ScalesRef<'a> = ScalesOf<&'a [f32], &'a [u8], &'a [f32; SCALE_CODE_SIZE], &'a f32>;
/// Scales borrowed from the host to be written. `code` is read.
pub type ScalesMut<'a> =
    ScalesOf<&'a mut [f32], &'a mut [u8], &'a [f32; SCALE_CODE_SIZE], &'a mut f32>;

/// Number of elements of each part.
pub type ScaleLengths = ScalesOf<usize, usize, usize, usize>;
/// Addresses for the C interface, which writes through some of them in quantize alone.
pub type RawScales = ScalesOf<*mut f32, *mut u8, *const f32, *mut f32>;

/// Borrows each part as `$scales` is borrowed.
macro_rules! parts {
    ($scales:expr) => {
        match $scales {
            ScalesOf::Flat(absmax) => ScalesOf::Flat(absmax),
            ScalesOf::Bytes(absmax) => ScalesOf::Bytes(absmax),
            ScalesOf::Global { bytes, scales } => ScalesOf::Global { bytes, scales },
            ScalesOf::Nested {
                codes,
                absmax,
                code,
                offset,
            } => ScalesOf::Nested {
                codes,
                absmax,
                code,
                offset,
            },
        }
    };
}

impl<F, B, C, O> ScalesOf<F, B, C, O> {
    /// Converts each part; the functions also get the name that the C interface has for it.
    pub(crate) fn try_map<F2, B2, C2, O2>(
        self,
        floats: impl FnOnce(&'static str, F) -> Result<F2>,
        bytes: impl FnOnce(&'static str, B) -> Result<B2>,
        table: impl FnOnce(&'static str, C) -> Result<C2>,
        number: impl FnOnce(&'static str, O) -> Result<O2>,
    ) -> Result<ScalesOf<F2, B2, C2, O2>> {
        Ok(match self {
            ScalesOf::Flat(absmax) => ScalesOf::Flat(floats("absmax", absmax)?),
            ScalesOf::Bytes(absmax) => ScalesOf::Bytes(bytes("absmax", absmax)?),
            ScalesOf::Global {
                bytes: absmax,
                scales,
            } => ScalesOf::Global {
                bytes: bytes("absmax", absmax)?,
                scales: floats("nested_absmax", scales)?,
            },
            ScalesOf::Nested {
                codes,
                absmax,
                code,
                offset,
            } => ScalesOf::Nested {
                codes: bytes("absmax", codes)?,
                absmax: floats("nested_absmax", absmax)?,
                code: table("nested_code", code)?,
                offset: number("nested_offset", offset)?,
            },
        })
    }

    pub(crate) fn map<F2, B2, C2, O2>(
        self,
        floats: impl FnOnce(F) -> F2,
        bytes: impl FnOnce(B) -> B2,
        table: impl FnOnce(C) -> C2,
        number: impl FnOnce(O) -> O2,
    ) -> ScalesOf<F2, B2, C2, O2> {
        let made = self.try_map(
            |_, part| Ok(floats(part)),
            |_, part| Ok(bytes(part)),
            |_, part| Ok(table(part)),
            |_, part| Ok(number(part)),
        );
        made.expect("no part fails")
    }

    pub(crate) fn as_ref(&self) -> ScalesOf<&F, &B, &C, &O> {
        parts!(self)
    }

    pub(crate) fn as_mut(&mut self) -> ScalesOf<&mut F, &mut B, &mut C, &mut O> {
        parts!(self)
    }
}

impl ScaleLengths {
    /// The lengths that a weight has.
    pub(crate) fn of(spec: &Spec, sizes: &Sizes) -> Self {
        let (blocks, nested_blocks) = (sizes.blocks, sizes.nested_blocks);
        match spec.format.scales() {
            ScaleKind::Bytes => ScalesOf::Bytes(blocks),
            ScaleKind::Global => ScalesOf::Global {
                bytes: blocks,
                scales: nested_blocks,
            },
            ScaleKind::Floats if spec.is_nested() => ScalesOf::Nested {
                codes: blocks,
                absmax: nested_blocks,
                code: SCALE_CODE_SIZE,
                offset: 1,
            },
            ScaleKind::Floats => ScalesOf::Flat(blocks),
        }
    }

    /// The kind of scales, and its name for messages.
    pub(crate) fn kind(&self) -> (ScaleKind, &'static str) {
        match self {
            ScalesOf::Flat(_) => (ScaleKind::Floats, "floats"),
            ScalesOf::Nested { .. } => (ScaleKind::Floats, "nested"),
            ScalesOf::Bytes(_) => (ScaleKind::Bytes, "bytes"),
            ScalesOf::Global { .. } => (ScaleKind::Global, "bytes and global"),
        }
    }

    /// The lengths by the names of the C interface.
    pub(crate) fn named(self) -> Vec<(&'static str, usize)> {
        let found = RefCell::new(Vec::new());
        let add = |name, length| {
            found.borrow_mut().push((name, length));
            Ok(())
        };
        self.try_map(add, add, add, add).expect("no part fails");
        found.into_inner()
    }
}

impl Scales {
    /// `code`, which nothing writes, is borrowed to be read.
    pub(crate) fn view_mut(&mut self) -> ScalesMut<'_> {
        self.as_mut()
            .map(|f| &mut f[..], |b| &mut b[..], |c| &**c, |o| o)
    }

    pub(crate) fn view(&self) -> ScalesRef<'_> {
        self.as_ref().map(|f| &f[..], |b| &b[..], |c| &**c, |o| o)
    }
}

/// Scales of a weight to be read, with parts in any buffers of one memory.
pub trait ReadScales: Sealed {
    /// The memory that the parts are in.
    type Memory: Memory;

    #[doc(hidden)]
    fn lengths(&self) -> ScaleLengths;

    /// The addresses for one call.
    #[doc(hidden)]
    fn raw<'a>(&'a self, access: &Access<'a, Self::Memory>) -> Result<RawScales>;
}

/// Scales of a weight to be written. `code` is read.
pub trait WriteScales: ReadScales {
    /// The addresses for one call.
    #[doc(hidden)]
    fn raw_mut<'a>(&'a mut self, access: &Access<'a, Self::Memory>) -> Result<RawScales>;
}

impl<F, B, C, O> Sealed for ScalesOf<F, B, C, O> {}

impl<F, B, C, O> ReadScales for ScalesOf<F, B, C, O>
where
    F: Read<Element = f32>,
    B: Read<Element = u8, Memory = F::Memory>,
    C: Read<Element = f32, Memory = F::Memory>,
    O: Read<Element = f32, Memory = F::Memory>,
{
    type Memory = F::Memory;

    fn lengths(&self) -> ScaleLengths {
        let parts = self.as_ref();
        parts.map(F::length, B::length, C::length, O::length)
    }

    fn raw<'a>(&'a self, access: &Access<'a, F::Memory>) -> Result<RawScales> {
        self.as_ref().try_map(
            |name, absmax| Ok(absmax.address(name, access)?.cast_mut()),
            |name, codes| Ok(codes.address(name, access)?.cast_mut()),
            |name, code| code.address(name, access),
            |name, offset| Ok(offset.address(name, access)?.cast_mut()),
        )
    }
}

impl<F, B, C, O> WriteScales for ScalesOf<F, B, C, O>
where
    F: Write<Element = f32>,
    B: Write<Element = u8, Memory = F::Memory>,
    C: Read<Element = f32, Memory = F::Memory>,
    O: Write<Element = f32, Memory = F::Memory>,
{
    fn raw_mut<'a>(&'a mut self, access: &Access<'a, F::Memory>) -> Result<RawScales> {
        self.as_mut().try_map(
            |name, absmax| absmax.address_mut(name, access),
            |name, codes| codes.address_mut(name, access),
            |name, code| C::address(code, name, access),
            |name, offset| offset.address_mut(name, access),
        )
    }
}

impl RawScales {
    pub(crate) fn set_in(self, raw: &mut sys::nf4_tensor) {
        match self {
            RawScales::Flat(absmax) => raw.absmax = absmax.cast(),
            RawScales::Bytes(absmax) => raw.absmax = absmax.cast(),
            RawScales::Global { bytes, scales } => {
                raw.absmax = bytes.cast();
                raw.nested_absmax = scales;
            }
            RawScales::Nested {
                codes,
                absmax,
                code,
                offset,
            } => {
                raw.absmax = codes.cast();
                raw.nested_absmax = absmax;
                raw.nested_code = code;
                raw.nested_offset = offset;
            }
        }
    }
}
