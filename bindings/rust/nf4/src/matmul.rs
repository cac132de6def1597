//! y = x W^T + bias with a quantized W.

use std::ptr;

use nf4_sys as sys;

use crate::error::{check_length, convert};
use crate::kind::{Descriptor, Functions, Weight};
use crate::lora::Adapter;
use crate::matrix::{Fresh, Matrix, MatrixOf};
use crate::memory::{optional, Call, Host, Memory, Read, Write};
use crate::{Element, Result};

/// The operands of a matmul.
pub(crate) struct Operands<T> {
    pub m: usize,
    pub x: *const T,
    pub x_stride: usize,
    pub bias: *const T,
    pub y: *mut T,
    pub y_stride: usize,
}

impl<T: Element> Operands<T> {
    /// `m` contiguous rows of x and y, nowhere.
    pub(crate) fn contiguous(m: usize, x_stride: usize, y_stride: usize) -> Self {
        Operands {
            m,
            x: ptr::null(),
            x_stride,
            bias: ptr::null(),
            y: ptr::null_mut(),
            y_stride,
        }
    }

    pub(crate) fn raw(&self) -> Result<sys::nf4_matmul_args> {
        Ok(sys::nf4_matmul_args {
            struct_size: size_of::<sys::nf4_matmul_args>(),
            dtype: T::DTYPE.as_raw(),
            reserved: 0,
            m: convert("m", self.m)?,
            x: self.x.cast(),
            x_stride: convert("x_stride", self.x_stride)?,
            bias: self.bias.cast(),
            y: self.y.cast(),
            y_stride: convert("y_stride", self.y_stride)?,
            lora: ptr::null(),
        })
    }
}

/// Returns x W^T + bias for `x` `[m, cols]` and a weight `[rows, cols]`: the `m * rows` elements of y
/// in row-major order. `bias` has `rows` elements. Each sum is in binary32 and is rounded once.
///
/// `threads` is the most threads to use; 0 means one for each processor. No bit of the result depends
/// on it.
///
/// # Errors
/// [`Error::InvalidArgument`](crate::Error::InvalidArgument) if `x` or `bias` does not fit the weight.
///
/// ```
/// use nf4::{matmul, quantize, Matrix, Spec};
/// let weight = quantize(&[0.5f32; 3 * 64], Spec::new(3, 64).flat(), 0)?;
/// let x = [1.0f32; 2 * 64];
/// let y = matmul(Matrix::new(&x, 2, 64)?, &weight, Some(&[0.0, 1.0, 2.0]), 0)?;
/// assert_eq!(y, [32.0, 33.0, 34.0, 32.0, 33.0, 34.0]);
/// # Ok::<(), nf4::Error>(())
/// ```
pub fn matmul<T: Element>(
    x: Matrix<'_, T>,
    weight: impl Weight<Memory = Host>,
    bias: Option<&[T]>,
    threads: u32,
) -> Result<Vec<T>> {
    let mut y = Fresh::matrix(x.shape.rows, weight.shape().0)?;
    matmul_into(x, weight, bias, &mut y, threads)?;
    // SAFETY: libnf4 has written every element.
    Ok(unsafe { y.assume_written() })
}

/// Writes the product that [`matmul`] returns to `y`, which has as many rows as `x` and as many
/// columns as the weight has rows.
///
/// `on` says how the call runs ([`Memory::Call`](crate::Memory::Call)): a number of threads on the
/// host, a stream or a `Launch` on a GPU. A launch on a GPU needs a workspace of
/// [`Spec::matmul_workspace_bytes`](crate::Spec::matmul_workspace_bytes) or
/// [`Int4Of::matmul_workspace_bytes`](crate::Int4Of::matmul_workspace_bytes). It takes [`half::f16`]
/// and [`half::bf16`]; for NF4 and FP4 weights and up to 16 rows of x it also takes `f32`.
///
/// # Errors
/// [`Error::InvalidArgument`](crate::Error::InvalidArgument) if `x`, `bias` or `y` does not fit the
/// weight or each other; for a launch also those of [`dequantize_into`](crate::dequantize_into).
///
/// ```
/// use nf4::{matmul_into, quantize, Matrix, MatrixMut, Spec};
/// let weight = quantize(&[0.5f32; 2 * 64], Spec::new(2, 64).flat(), 0)?;
/// let (x, mut y) = ([half::f16::ONE; 2 * 64], [half::f16::ZERO; 5]);
/// let mut with_gap = MatrixMut::with_stride(&mut y, 2, 2, 3)?;
/// matmul_into(Matrix::new(&x, 2, 64)?, &weight, None, &mut with_gap, 0)?;
/// assert_eq!(y.map(|each| each.to_f32()), [32.0, 32.0, 0.0, 32.0, 32.0]);
/// # Ok::<(), nf4::Error>(())
/// ```
pub fn matmul_into<'c, X, Y, W>(
    x: MatrixOf<X>,
    weight: W,
    bias: Option<X>,
    y: &mut MatrixOf<Y>,
    on: impl Into<Call<'c, X::Memory>>,
) -> Result<()>
where
    X: Read<Element: Element>,
    Y: Write<Element = X::Element, Memory = X::Memory>,
    W: Weight<Memory = X::Memory>,
{
    let product = Multiplied {
        functions: &W::Raw::MATMUL,
        gradient: false,
        x: &x,
        bias: bias.as_ref(),
        adapter: None::<Adapter<X, Y>>,
    };
    product.with(&weight, y, on.into())
}

/// A product with one weight, or its gradient, for which x and y are those of y and x.
pub(crate) struct Multiplied<'o, X, A, P, Raw> {
    pub functions: &'o Functions<Raw, sys::nf4_matmul_args>,
    pub gradient: bool,
    pub x: &'o MatrixOf<X>,
    pub bias: Option<&'o X>,
    pub adapter: Option<Adapter<'o, A, P>>,
}

impl<X, A, P, Raw> Multiplied<'_, X, A, P, Raw>
where
    X: Read<Element: Element>,
    A: Read<Element: Element, Memory = X::Memory>,
    P: Write<Element = X::Element, Memory = X::Memory>,
{
    /// Checks the operands against the weight and calls libnf4.
    pub(crate) fn with<W, Y>(
        mut self,
        weight: &W,
        y: &mut MatrixOf<Y>,
        call: Call<'_, X::Memory>,
    ) -> Result<()>
    where
        W: Weight<Memory = X::Memory, Raw = Raw>,
        Y: Write<Element = X::Element, Memory = X::Memory>,
    {
        let (rows, cols) = weight.shape();
        let m = self.x.shape.rows;
        let (x_name, x_cols, y_name, y_cols) = if self.gradient {
            ("grad_y", rows, "grad_x", cols)
        } else {
            ("x", cols, "y", rows)
        };
        self.x.shape.check(x_name, m, x_cols)?;
        check_bias(self.bias, rows)?;
        y.shape.check(y_name, m, y_cols)?;
        if let Some(adapter) = &self.adapter {
            adapter.check((rows, cols), m)?;
        }
        let access = X::Memory::access(call, 0);
        let raw = weight.raw(&access)?;
        let mut args = Operands {
            m,
            x: self.x.address(x_name, &access)?,
            x_stride: self.x.shape.stride,
            bias: optional("bias", self.bias, &access)?,
            y_stride: y.shape.stride,
            y: y.address_mut(y_name, &access)?,
        }
        .raw()?;
        let lora = self.adapter.as_mut().map(|adapter| adapter.raw(&access));
        let lora = lora.transpose()?;
        args.lora = lora.as_ref().map_or(ptr::null(), ptr::from_ref);
        // SAFETY: the parts of the weight, and each matrix against its buffer, were checked when they
        // were made, the shapes above. What is written is borrowed mutably, so it is none of what is
        // read. `lora` lives through the call.
        unsafe { self.functions.run::<X::Memory>(access, &raw, &args) }
    }
}

pub(crate) fn check_bias<B: Read>(bias: Option<&B>, rows: usize) -> Result<()> {
    bias.map_or(Ok(()), |bias| check_length("bias", bias.length(), rows))
}
