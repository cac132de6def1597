//! The scales of weights on the host: flat or nested, owned or borrowed.

use crate::spec::{ScaleLengths, SCALE_CODE_SIZE};

/// The scales of a weight that owns them.
#[derive(Debug, Clone, PartialEq)]
pub enum Scales {
    /// One float for each block.
    Flat(Vec<f32>),
    /// One code for each block (double quantization).
    Nested {
        /// Codes into `code`, one for each block.
        codes: Vec<u8>,
        /// One float for each block of codes.
        absmax: Vec<f32>,
        /// What the codes stand for, ascending.
        code: Box<[f32; SCALE_CODE_SIZE]>,
        /// Added to every scale.
        offset: f32,
    },
}

/// The scales of a weight that is borrowed; the parts are those of [`Scales`].
#[derive(Debug, Clone, Copy)]
#[allow(missing_docs)]
pub enum ScalesRef<'a> {
    Flat(&'a [f32]),
    Nested {
        codes: &'a [u8],
        absmax: &'a [f32],
        code: &'a [f32; SCALE_CODE_SIZE],
        offset: &'a f32,
    },
}

/// The scales of a weight that is borrowed to be written; the parts are those of
/// [`Scales`]. `code` is read.
#[derive(Debug)]
#[allow(missing_docs)]
pub enum ScalesMut<'a> {
    Flat(&'a mut [f32]),
    Nested {
        codes: &'a mut [u8],
        absmax: &'a mut [f32],
        code: &'a [f32; SCALE_CODE_SIZE],
        offset: &'a mut f32,
    },
}

impl Scales {
    pub(crate) fn view(&self) -> ScalesRef<'_> {
        match self {
            Scales::Flat(absmax) => ScalesRef::Flat(absmax),
            Scales::Nested {
                codes,
                absmax,
                code,
                offset,
            } => ScalesRef::Nested {
                codes,
                absmax,
                code,
                offset,
            },
        }
    }

    pub(crate) fn view_mut(&mut self) -> ScalesMut<'_> {
        match self {
            Scales::Flat(absmax) => ScalesMut::Flat(absmax),
            Scales::Nested {
                codes,
                absmax,
                code,
                offset,
            } => ScalesMut::Nested {
                codes,
                absmax,
                code,
                offset,
            },
        }
    }
}

impl ScalesRef<'_> {
    pub(crate) fn lengths(&self) -> ScaleLengths {
        match self {
            ScalesRef::Flat(absmax) => ScaleLengths::Flat(absmax.len()),
            ScalesRef::Nested {
                codes,
                absmax,
                code,
                offset: _,
            } => ScaleLengths::Nested {
                codes: codes.len(),
                absmax: absmax.len(),
                code: code.len(),
                offset: 1,
            },
        }
    }
}

impl ScalesMut<'_> {
    pub(crate) fn lengths(&self) -> ScaleLengths {
        match self {
            ScalesMut::Flat(absmax) => ScaleLengths::Flat(absmax.len()),
            ScalesMut::Nested {
                codes,
                absmax,
                code,
                offset: _,
            } => ScaleLengths::Nested {
                codes: codes.len(),
                absmax: absmax.len(),
                code: code.len(),
                offset: 1,
            },
        }
    }
}
