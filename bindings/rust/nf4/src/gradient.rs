//! The gradient of a matmul, and low-rank adapters (LoRA), on host memory.

use std::ffi::c_void;
use std::ptr;

use nf4_sys as sys;

use crate::error::{check, convert};
use crate::kind::Described;
use crate::matmul::{check_operands, product, reserve_y, Operands};
use crate::ops::thread_count;
use crate::{Element, Matrix, MatrixMut, QuantizedRef, Result};

/// A low-rank adapter of a weight: W + `scale` B A. Its rank is 1 to 128.
#[derive(Debug, Clone, Copy)]
pub struct Lora<'a, A> {
    /// A: `[rank, cols]` of the type of x, or of `f32`, which may be rounded to that.
    pub a: Matrix<'a, A>,
    /// B: `[rows, rank]`.
    pub b: Matrix<'a, A>,
    /// A finite number.
    pub scale: f32,
}

impl<A: Element> Lora<'_, A> {
    fn check(&self, weight: &QuantizedRef<'_>) -> Result<()> {
        let (rows, cols) = weight.shape();
        let rank = self.a.shape.rows;
        self.a.shape.check("a", rank, cols)?;
        self.b.shape.check("b", rows, rank)
    }
}

/// An adapter's addresses and sizes, in host or device memory alike.
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

/// [`matmul`](crate::matmul) with an adapter: x (W + scale B A)^T + bias, and x A^T, `[m, rank]`,
/// which the gradient of B needs.
///
/// # Errors
/// [`Error::InvalidArgument`](crate::Error::InvalidArgument) if an operand does not fit the weight.
///
/// ```
/// use nf4::{matmul_lora, quantize, Lora, Matrix, Spec};
/// let weight = quantize(&[0.5f32; 2 * 64], Spec::new(2, 64).flat(), 0)?;
/// let (x, a, b) = ([1.0f32; 64], [1.0f32; 64], [2.0f32, 3.0]);
/// let lora = Lora { a: Matrix::new(&a, 1, 64)?, b: Matrix::new(&b, 2, 1)?, scale: 0.5 };
/// let (y, product) = matmul_lora(Matrix::new(&x, 1, 64)?, &weight, None, &lora, 0)?;
/// assert_eq!((y, product), (vec![96.0, 128.0], vec![64.0]));
/// # Ok::<(), nf4::Error>(())
/// ```
pub fn matmul_lora<'a, T: Element, A: Element>(
    x: Matrix<'_, T>,
    weight: impl Into<QuantizedRef<'a>>,
    bias: Option<&[T]>,
    lora: &Lora<'_, A>,
    threads: u32,
) -> Result<(Vec<T>, Vec<T>)> {
    let weight = weight.into();
    check_operands(&weight, &x, bias)?;
    let (rows, _) = weight.shape();
    with_product(&weight, &x, rows, lora, |y, adapter| {
        let args = operands(&x, bias, y, rows);
        // SAFETY: the parts of the weight, x and the adapter's matrices against their slices were
        // checked when they were made, the shapes here; `y` and the product are new and fit.
        check(unsafe {
            let args = args.raw_with(adapter)?;
            sys::nf4_matmul_cpu(&weight.raw()?, &args, thread_count(threads))
        })
    })
}

/// The gradient of a matmul with respect to x: `grad_y` times the weight, in row-major order.
/// `grad_y` has the weight's `rows` columns and the result its `cols`. `threads` as in
/// [`matmul`](crate::matmul).
///
/// # Errors
/// [`Error::InvalidArgument`](crate::Error::InvalidArgument) if `grad_y` does not fit the weight.
///
/// ```
/// use nf4::{matmul_grad, quantize, Matrix, Spec};
/// let weight = quantize(&[0.5f32; 3 * 64], Spec::new(3, 64).flat(), 0)?;
/// let grad_y = [1.0f32, 2.0, 3.0];
/// assert_eq!(matmul_grad(Matrix::new(&grad_y, 1, 3)?, &weight, 0)?, [3.0; 64]);
/// # Ok::<(), nf4::Error>(())
/// ```
pub fn matmul_grad<'a, T: Element>(
    grad_y: Matrix<'_, T>,
    weight: impl Into<QuantizedRef<'a>>,
    threads: u32,
) -> Result<Vec<T>> {
    let weight = weight.into();
    let (_, cols) = weight.shape();
    let mut grad_x = reserve_y(grad_y.shape.rows, cols)?;
    // SAFETY: the vector has room for that many elements, and nobody else has it.
    unsafe { grad_raw(&grad_y, &weight, grad_x.as_mut_ptr(), cols, threads) }?;
    // SAFETY: libnf4 has written every element.
    unsafe { grad_x.set_len(grad_y.shape.rows * cols) };
    Ok(grad_x)
}

/// Writes what [`matmul_grad`] gives to `grad_x`.
///
/// # Errors
/// [`Error::InvalidArgument`](crate::Error::InvalidArgument) if `grad_y` or `grad_x` does not fit
/// the weight or each other.
pub fn matmul_grad_into<'a, T: Element>(
    grad_y: Matrix<'_, T>,
    weight: impl Into<QuantizedRef<'a>>,
    grad_x: &mut MatrixMut<'_, T>,
    threads: u32,
) -> Result<()> {
    let weight = weight.into();
    let (_, cols) = weight.shape();
    grad_x.shape.check("grad_x", grad_y.shape.rows, cols)?;
    let (to, stride) = (grad_x.values.as_mut_ptr(), grad_x.shape.stride);
    // SAFETY: the slice reaches to the end of the last row, as was checked when the matrix was
    // made; it is borrowed mutably.
    unsafe { grad_raw(&grad_y, &weight, to, stride, threads) }
}

/// [`matmul_grad`] with an adapter: grad_y (W + scale B A), and grad_y B, `[m, rank]`, which the
/// gradient of A needs.
///
/// # Errors
/// As [`matmul_lora`].
pub fn matmul_grad_lora<'a, T: Element, A: Element>(
    grad_y: Matrix<'_, T>,
    weight: impl Into<QuantizedRef<'a>>,
    lora: &Lora<'_, A>,
    threads: u32,
) -> Result<(Vec<T>, Vec<T>)> {
    let weight = weight.into();
    check_grad(&grad_y, &weight)?;
    let (_, cols) = weight.shape();
    with_product(&weight, &grad_y, cols, lora, |grad_x, adapter| {
        let args = operands(&grad_y, None, grad_x, cols);
        // SAFETY: as in matmul_lora.
        check(unsafe {
            let args = args.raw_with(adapter)?;
            sys::nf4_matmul_grad_cpu(&weight.raw()?, &args, thread_count(threads))
        })
    })
}

fn check_grad<T: Element>(grad_y: &Matrix<'_, T>, weight: &QuantizedRef<'_>) -> Result<()> {
    grad_y
        .shape
        .check("grad_y", grad_y.shape.rows, weight.shape().0)
}

fn operands<T: Element>(
    x: &Matrix<'_, T>,
    bias: Option<&[T]>,
    y: *mut T,
    y_stride: usize,
) -> Operands<T> {
    Operands {
        m: x.shape.rows,
        x: x.values.as_ptr(),
        x_stride: x.shape.stride,
        bias: bias.map_or(ptr::null(), <[T]>::as_ptr),
        y,
        y_stride,
    }
}

/// # Safety
/// `grad_x` can be written for as many rows as `grad_y` has, of as many elements as the weight has
/// columns, `stride` apart. It need not be initialised; on success these elements are.
unsafe fn grad_raw<T: Element>(
    grad_y: &Matrix<'_, T>,
    weight: &QuantizedRef<'_>,
    grad_x: *mut T,
    stride: usize,
    threads: u32,
) -> Result<()> {
    check_grad(grad_y, weight)?;
    let args = operands(grad_y, None, grad_x, stride);
    // SAFETY: the parts of the weight, and grad_y against its slice, were checked when they were
    // made; both are only read, and `grad_x` is as the caller promises, so it is neither.
    check(unsafe { sys::nf4_matmul_grad_cpu(&weight.raw()?, &args.raw()?, thread_count(threads)) })
}

/// Calls `run` with room for an output of `columns` columns and with the adapter. Gives the output
/// and the adapter's product.
fn with_product<T: Element, A: Element>(
    weight: &QuantizedRef<'_>,
    x: &Matrix<'_, T>,
    columns: usize,
    lora: &Lora<'_, A>,
    run: impl FnOnce(*mut T, &sys::nf4_lora) -> Result<()>,
) -> Result<(Vec<T>, Vec<T>)> {
    lora.check(weight)?;
    let (m, rank) = (x.shape.rows, lora.a.shape.rows);
    let (mut y, mut p) = (reserve_y::<T>(m, columns)?, reserve_y::<T>(m, rank)?);
    let length = product("m * rank", m, rank)?;
    // SAFETY: there is room for so many elements, of types whose zero is all bits 0. Beside a
    // weight without elements libnf4 does not write them.
    unsafe {
        p.as_mut_ptr().write_bytes(0, length);
        p.set_len(length);
    }
    let adapter = RawLora {
        dtype: A::DTYPE.as_raw(),
        rank,
        scale: lora.scale,
        a: lora.a.values.as_ptr().cast(),
        a_stride: lora.a.shape.stride,
        b: lora.b.values.as_ptr().cast(),
        b_stride: lora.b.shape.stride,
        product: p.as_mut_ptr().cast(),
    };
    run(y.as_mut_ptr(), &adapter.raw()?)?;
    // SAFETY: libnf4 has written every element.
    unsafe { y.set_len(m * columns) };
    Ok((y, p))
}
