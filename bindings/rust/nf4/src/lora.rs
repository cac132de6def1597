//! Low-rank adapters (LoRA).

use std::ffi::c_void;

use nf4_sys as sys;

use crate::error::{check_length, convert, product};
use crate::matrix::MatrixOf;
use crate::memory::{Access, Read, Write};
use crate::{Element, Result};

/// A low-rank adapter of a weight W `[rows, cols]`: products use W + `scale` B A. Its rank is 1 to
/// 128. `M` is the buffer of each matrix; on the host the name is [`Lora`].
#[derive(Debug, Clone, Copy)]
pub struct LoraOf<M> {
    /// A: `[rank, cols]` in the type of x, or in `f32`, which may be rounded to the type of x.
    pub a: MatrixOf<M>,
    /// B: `[rows, rank]` in the type of A.
    pub b: MatrixOf<M>,
    /// A finite number.
    pub scale: f32,
}

/// An adapter on the host.
pub type Lora<'a, A> = LoraOf<&'a [A]>;

/// An adapter and where x A^T, or grad_y B, goes, `[m, rank]`.
pub(crate) struct Adapter<'o, M, P> {
    pub lora: &'o LoraOf<M>,
    pub product: Option<&'o mut P>,
}

impl<M: Read<Element: Element>, P: Write<Memory = M::Memory>> Adapter<'_, M, P> {
    /// Does it fit a weight of this shape and `m` rows?
    pub(crate) fn check(&self, (rows, cols): (usize, usize), m: usize) -> Result<()> {
        let LoraOf { a, b, .. } = self.lora;
        let rank = a.shape.rows;
        a.shape.check("a", rank, cols)?;
        b.shape.check("b", rows, rank)?;
        let length = product("m * rank", m, rank)?;
        let given = self.product.as_ref().map_or(length, |given| given.length());
        check_length("product", given, length)
    }

    /// The struct of the C interface for one call.
    pub(crate) fn raw<'a>(&'a mut self, access: &Access<'a, M::Memory>) -> Result<sys::nf4_lora> {
        let LoraOf { a, b, scale } = self.lora;
        let product = match &mut self.product {
            Some(product) => product.address_mut("product", access)?.cast(),
            None => std::ptr::null_mut(),
        };
        RawLora {
            dtype: M::Element::DTYPE.as_raw(),
            rank: a.shape.rows,
            scale: *scale,
            a: a.address("a", access)?.cast(),
            a_stride: a.shape.stride,
            b: b.address("b", access)?.cast(),
            b_stride: b.shape.stride,
            product,
        }
        .raw()
    }
}

/// An adapter's addresses and sizes.
pub(crate) struct RawLora {
    pub dtype: sys::nf4_dtype,
    pub rank: usize,
    pub scale: f32,
    pub a: *const c_void,
    pub a_stride: usize,
    pub b: *const c_void,
    pub b_stride: usize,
    pub product: *mut c_void,
}

impl RawLora {
    pub(crate) fn raw(&self) -> Result<sys::nf4_lora> {
        Ok(sys::nf4_lora {
            struct_size: size_of::<sys::nf4_lora>(),
            dtype: self.dtype,
            rank: convert("rank", self.rank)?,
            scale: self.scale,
            reserved: 0,
            a: self.a,
            a_stride: convert("a_stride", self.a_stride)?,
            b: self.b,
            b_stride: convert("b_stride", self.b_stride)?,
            product: self.product,
        })
    }
}
