//! The scales of a weight, flat or nested, in any storage.

use std::convert::Infallible;

use nf4_sys as sys;

use crate::format::SCALE_CODE_SIZE;

/// The scales of a weight. The parameters are the storage of its parts: [`Scales`] owns them on the
/// host, [`ScalesRef`] and [`ScalesMut`] borrow them, others are in device memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ScalesOf<Floats, Bytes, Code, Offset> {
    /// One float for each block.
    Flat(Floats),
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
pub(crate) type ScaleLengths = ScalesOf<usize, usize, usize, usize>;
/// Addresses for the C interface, which writes through some of them in quantize alone.
pub(crate) type RawScales = ScalesOf<*mut f32, *mut u8, *const f32, *mut f32>;

impl<F, B, C, O> ScalesOf<F, B, C, O> {
    /// Converts each part; the functions also get the name that the C interface has for it.
    pub(crate) fn try_map<F2, B2, C2, O2, E>(
        self,
        floats: impl FnOnce(&'static str, F) -> Result<F2, E>,
        bytes: impl FnOnce(&'static str, B) -> Result<B2, E>,
        table: impl FnOnce(&'static str, C) -> Result<C2, E>,
        number: impl FnOnce(&'static str, O) -> Result<O2, E>,
    ) -> Result<ScalesOf<F2, B2, C2, O2>, E> {
        Ok(match self {
            ScalesOf::Flat(absmax) => ScalesOf::Flat(floats("absmax", absmax)?),
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
        let Ok(mapped) = self.try_map::<_, _, _, _, Infallible>(
            |_, part| Ok(floats(part)),
            |_, part| Ok(bytes(part)),
            |_, part| Ok(table(part)),
            |_, part| Ok(number(part)),
        );
        mapped
    }

    pub(crate) fn as_ref(&self) -> ScalesOf<&F, &B, &C, &O> {
        match self {
            ScalesOf::Flat(absmax) => ScalesOf::Flat(absmax),
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
    }

    pub(crate) fn as_mut(&mut self) -> ScalesOf<&mut F, &mut B, &mut C, &mut O> {
        match self {
            ScalesOf::Flat(absmax) => ScalesOf::Flat(absmax),
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
    }
}

impl Scales {
    pub(crate) fn view(&self) -> ScalesRef<'_> {
        self.as_ref().map(|f| &f[..], |b| &b[..], |c| &**c, |o| o)
    }

    pub(crate) fn view_mut(&mut self) -> ScalesMut<'_> {
        let parts = self.as_mut();
        parts.map(|f| &mut f[..], |b| &mut b[..], |c| &**c, |o| o)
    }
}

impl ScalesRef<'_> {
    pub(crate) fn lengths(self) -> ScaleLengths {
        self.map(<[f32]>::len, <[u8]>::len, |c| c.len(), |_| 1)
    }
}

impl RawScales {
    pub(crate) fn set_in(self, raw: &mut sys::nf4_tensor) {
        match self {
            RawScales::Flat(absmax) => raw.absmax = absmax.cast(),
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
