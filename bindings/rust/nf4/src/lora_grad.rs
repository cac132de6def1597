//! The gradients of an adapter's matrices, on host memory.

use std::ffi::c_void;
use std::ptr;

use nf4_sys as sys;

use crate::error::{check, check_length, convert};
use crate::info::check_version;
use crate::matmul::{product, reserve_y};
use crate::ops::thread_count;
use crate::{Element, Matrix, MatrixMut, Result};

/// What the gradients of an adapter's matrices are made of, for y = x (W + `scale` B A)^T.
#[derive(Debug, Clone, Copy)]
pub struct LoraGrad<'a, T> {
    /// That of the adapter, 1 to 128.
    pub rank: usize,
    /// That of the adapter, a finite number.
    pub scale: f32,
    /// `[m, cols]`.
    pub x: Matrix<'a, T>,
    /// `[m, rows]`: the gradient of y.
    pub grad_y: Matrix<'a, T>,
    /// x A^T, `[m, rank]`, as [`matmul_lora`](crate::matmul_lora) gives it.
    pub p: &'a [T],
    /// grad_y B, `[m, rank]`, as [`matmul_grad_lora`](crate::matmul_grad_lora) gives it.
    pub q: &'a [T],
}

impl<T: Element> LoraGrad<'_, T> {
    /// Rows of what is read: of x and q for A, of grad_y and p for B.
    fn checked_m(&self, of_a: bool, of_b: bool) -> Result<usize> {
        let (x, grad_y) = (&self.x.shape, &self.grad_y.shape);
        let m = if of_a { x.rows } else { grad_y.rows };
        let length = product("m * rank", m, self.rank)?;
        if of_a {
            check_length("q", self.q.len(), length)?;
        }
        if of_b {
            grad_y.check("grad_y", m, grad_y.cols)?;
            check_length("p", self.p.len(), length)?;
        }
        Ok(m)
    }
}

/// Addresses and sizes, in host or device memory alike.
pub(crate) struct RawLoraGrad {
    pub dtype: sys::nf4_dtype,
    pub grad_dtype: sys::nf4_dtype,
    pub rank: usize,
    pub scale: f32,
    pub m: usize,
    pub rows: usize,
    pub cols: usize,
    pub x: *const c_void,
    pub x_stride: usize,
    pub grad_y: *const c_void,
    pub grad_y_stride: usize,
    pub p: *const c_void,
    pub q: *const c_void,
    pub grad_a: *mut c_void,
    pub grad_a_stride: usize,
    pub grad_b: *mut c_void,
    pub grad_b_stride: usize,
}

impl RawLoraGrad {
    pub(crate) fn raw(&self) -> Result<sys::nf4_lora_grad_args> {
        check_version()?; // there is no weight that asks
        Ok(sys::nf4_lora_grad_args {
            struct_size: size_of::<sys::nf4_lora_grad_args>(),
            dtype: self.dtype,
            grad_dtype: self.grad_dtype,
            rank: convert("rank", self.rank)?,
            scale: self.scale,
            m: convert("m", self.m)?,
            rows: convert("rows", self.rows)?,
            cols: convert("cols", self.cols)?,
            x: self.x,
            x_stride: convert("x_stride", self.x_stride)?,
            dy: self.grad_y,
            dy_stride: convert("the stride of grad_y", self.grad_y_stride)?,
            p: self.p,
            q: self.q,
            da: self.grad_a,
            da_stride: convert("the stride of grad_a", self.grad_a_stride)?,
            db: self.grad_b,
            db_stride: convert("the stride of grad_b", self.grad_b_stride)?,
        })
    }
}

/// The gradients of A, `scale` q^T x, `[rank, cols]`, and of B, `scale` grad_y^T p,
/// `[rows, rank]`, in row-major order. `G` is the type of x or `f32`: each element is summed and
/// scaled in binary32, then rounded to it. `threads` as in [`matmul`](crate::matmul).
///
/// # Errors
/// [`Error::InvalidArgument`](crate::Error::InvalidArgument) if operands do not fit each other, the
/// rank or the scale is out of range, or `G` is another type.
///
/// ```
/// use nf4::{lora_grad, matmul_grad_lora, matmul_lora, quantize, Lora, LoraGrad, Matrix, Spec};
/// let weight = quantize(&[0.5f32; 2 * 64], Spec::new(2, 64).flat(), 0)?;
/// let (a, b) = ([1.0f32; 64], [2.0f32, 3.0]);
/// let lora = Lora { a: Matrix::new(&a, 1, 64)?, b: Matrix::new(&b, 2, 1)?, scale: 0.5 };
/// let (x, grad_y) = ([1.0f32; 64], [1.0f32, -1.0]);
/// let (x, grad_y) = (Matrix::new(&x, 1, 64)?, Matrix::new(&grad_y, 1, 2)?);
/// let (_y, p) = matmul_lora(x, &weight, None, &lora, 0)?;
/// let (_grad_x, q) = matmul_grad_lora(grad_y, &weight, &lora, 0)?;
///
/// let operands = LoraGrad { rank: 1, scale: lora.scale, x, grad_y, p: &p, q: &q };
/// let (grad_a, grad_b) = lora_grad::<_, f32>(&operands, 0)?;
/// assert_eq!((grad_a, grad_b), (vec![-0.5; 64], vec![32.0, -32.0]));
/// # Ok::<(), nf4::Error>(())
/// ```
pub fn lora_grad<T: Element, G: Element>(
    operands: &LoraGrad<'_, T>,
    threads: u32,
) -> Result<(Vec<G>, Vec<G>)> {
    let (rows, cols) = (operands.grad_y.shape.cols, operands.x.shape.cols);
    let rank = operands.rank;
    let (mut grad_a, mut grad_b) = (reserve_y(rank, cols)?, reserve_y(rows, rank)?);
    let to_a = Target::<G>(grad_a.as_mut_ptr(), cols);
    let to_b = Target::<G>(grad_b.as_mut_ptr(), rank);
    // SAFETY: the vectors have room for that many elements, and nobody else has them.
    unsafe { lora_grad_raw(operands, Some(to_a), Some(to_b), threads) }?;
    // SAFETY: libnf4 has written every element.
    unsafe {
        grad_a.set_len(rank * cols);
        grad_b.set_len(rows * rank);
    }
    Ok((grad_a, grad_b))
}

/// Writes what [`lora_grad`] gives to `grad_a` and `grad_b`. Of one that is not wanted, `None`, the
/// operands are not looked at: x and q for A, grad_y and p for B.
///
/// # Errors
/// As [`lora_grad`], and if `grad_a` or `grad_b` does not fit the operands.
///
/// ```
/// use nf4::{lora_grad_into, LoraGrad, Matrix, MatrixMut};
/// // B alone is trained, and x need not be kept.
/// let (grad_y, mut grad_b) = ([1.0f32, 2.0], [0.0f32; 2]);
/// let operands = LoraGrad {
///     rank: 1,
///     scale: 0.5,
///     x: Matrix::new(&[], 0, 0)?,
///     grad_y: Matrix::new(&grad_y, 1, 2)?,
///     p: &[4.0],
///     q: &[],
/// };
/// lora_grad_into(&operands, None, Some(&mut MatrixMut::new(&mut grad_b, 2, 1)?), 0)?;
/// assert_eq!(grad_b, [2.0, 4.0]);
/// # Ok::<(), nf4::Error>(())
/// ```
pub fn lora_grad_into<T: Element, G: Element>(
    operands: &LoraGrad<'_, T>,
    grad_a: Option<&mut MatrixMut<'_, G>>,
    grad_b: Option<&mut MatrixMut<'_, G>>,
    threads: u32,
) -> Result<()> {
    let (rows, cols) = (operands.grad_y.shape.cols, operands.x.shape.cols);
    let to_a = target("grad_a", grad_a, operands.rank, cols)?;
    let to_b = target("grad_b", grad_b, rows, operands.rank)?;
    // SAFETY: each slice reaches to the end of its last row, as was checked when the matrix was
    // made; it is borrowed mutably.
    unsafe { lora_grad_raw(operands, to_a, to_b, threads) }
}

/// The first element of a gradient, and its stride.
struct Target<G>(*mut G, usize);

impl<G> Target<G> {
    /// Of one that is not wanted there is no address.
    fn raw(target: Option<Self>) -> (*mut c_void, usize) {
        target.map_or((ptr::null_mut(), 0), |Target(first, stride)| {
            (first.cast(), stride)
        })
    }
}

fn target<G: Element>(
    name: &str,
    gradient: Option<&mut MatrixMut<'_, G>>,
    rows: usize,
    cols: usize,
) -> Result<Option<Target<G>>> {
    let Some(gradient) = gradient else {
        return Ok(None);
    };
    gradient.shape.check(name, rows, cols)?;
    let first = gradient.values.as_mut_ptr();
    Ok(Some(Target(first, gradient.shape.stride)))
}

/// # Safety
/// `grad_a` can be written for `rank` rows of as many elements as x has columns, `grad_b` for as
/// many rows as grad_y has columns, of `rank` elements. They need not be initialised; on success
/// these elements are.
unsafe fn lora_grad_raw<T: Element, G: Element>(
    operands: &LoraGrad<'_, T>,
    grad_a: Option<Target<G>>,
    grad_b: Option<Target<G>>,
    threads: u32,
) -> Result<()> {
    let m = operands.checked_m(grad_a.is_some(), grad_b.is_some())?;
    let (x, grad_y) = (&operands.x, &operands.grad_y);
    let (grad_a, grad_a_stride) = Target::raw(grad_a);
    let (grad_b, grad_b_stride) = Target::raw(grad_b);
    let args = RawLoraGrad {
        dtype: T::DTYPE.as_raw(),
        grad_dtype: G::DTYPE.as_raw(),
        rank: operands.rank,
        scale: operands.scale,
        m,
        rows: grad_y.shape.cols,
        cols: x.shape.cols,
        x: x.values.as_ptr().cast(),
        x_stride: x.shape.stride,
        grad_y: grad_y.values.as_ptr().cast(),
        grad_y_stride: grad_y.shape.stride,
        p: operands.p.as_ptr().cast(),
        q: operands.q.as_ptr().cast(),
        grad_a,
        grad_a_stride,
        grad_b,
        grad_b_stride,
    };
    // SAFETY: x and grad_y against their slices were checked when they were made, p and q by
    // checked_m, and libnf4 reads none of an unwanted gradient; all of those are only read, and the
    // gradients are as the caller promises, so they are none of them.
    check(unsafe { sys::nf4_lora_grad_cpu(&args.raw()?, thread_count(threads)) })
}
