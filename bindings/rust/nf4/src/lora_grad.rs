//! The gradients of an adapter's matrices.

use std::ptr;

use nf4_sys as sys;

use crate::error::{check_length, convert, product};
use crate::info::check_version;
use crate::matrix::{Fresh, MatrixOf};
use crate::memory::{Call, Memory, Read, Write};
use crate::{Element, Result};

/// The operands of [`lora_grad`]: what the gradients of an adapter's matrices are computed from, for
/// y = x (W + `scale` B A)^T. `X` is the buffer of each operand; on the host the name is
/// [`LoraGrad`].
#[derive(Debug, Clone, Copy)]
pub struct LoraGradOf<X> {
    /// The rank of the adapter, 1 to 128.
    pub rank: usize,
    /// The scale of the adapter, a finite number.
    pub scale: f32,
    /// The activations, `[m, cols]`.
    pub x: MatrixOf<X>,
    /// The gradient of y, `[m, rows]`.
    pub grad_y: MatrixOf<X>,
    /// x A^T, `[m, rank]`, as [`matmul_lora`](crate::matmul_lora) gives it.
    pub p: X,
    /// grad_y B, `[m, rank]`, as [`matmul_grad_lora`](crate::matmul_grad_lora) gives it.
    pub q: X,
}

/// The operands of [`lora_grad`] on the host.
pub type LoraGrad<'a, T> = LoraGradOf<&'a [T]>;

impl<X: Read> LoraGradOf<X> {
    /// Rows of what is read: of x and q for A, of grad_y and p for B.
    fn checked_m(&self, of_a: bool, of_b: bool) -> Result<usize> {
        let (x, grad_y) = (&self.x.shape, &self.grad_y.shape);
        let m = if of_a { x.rows } else { grad_y.rows };
        let length = product("m * rank", m, self.rank)?;
        if of_a {
            check_length("q", self.q.length(), length)?;
        }
        if of_b {
            grad_y.check("grad_y", m, grad_y.cols)?;
            check_length("p", self.p.length(), length)?;
        }
        Ok(m)
    }
}

/// Sizes, with no gradient wanted yet and no addresses.
pub(crate) fn nowhere<T: Element, G: Element>(
    (rank, scale): (usize, f32),
    m: usize,
    (rows, cols): (usize, usize),
) -> Result<sys::nf4_lora_grad_args> {
    check_version()?; // there is no weight that asks
    let (rank, rows, cols) = (
        convert("rank", rank)?,
        convert("rows", rows)?,
        convert("cols", cols)?,
    );
    Ok(sys::nf4_lora_grad_args {
        struct_size: size_of::<sys::nf4_lora_grad_args>(),
        dtype: T::DTYPE.as_raw(),
        grad_dtype: G::DTYPE.as_raw(),
        rank,
        scale,
        m: convert("m", m)?,
        rows,
        cols,
        x: ptr::null(),
        x_stride: cols,
        dy: ptr::null(),
        dy_stride: rows,
        p: ptr::null(),
        q: ptr::null(),
        da: ptr::null_mut(),
        da_stride: cols,
        db: ptr::null_mut(),
        db_stride: rank.into(),
    })
}

/// Returns the gradient of A, `scale` q^T x, `[rank, cols]`, and the gradient of B, `scale` grad_y^T
/// p, `[rows, rank]`, in row-major order. `G` is the type of x or `f32`: each element is summed and
/// scaled in binary32, then rounded to `G`. `threads` is as in [`matmul`](crate::matmul).
///
/// # Errors
/// [`Error::InvalidArgument`](crate::Error::InvalidArgument) if operands do not fit each other, the
/// rank or the scale is out of range, or `G` is neither the type of x nor `f32`.
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
    let mut grad_a = Fresh::matrix(operands.rank, cols)?;
    let mut grad_b = Fresh::matrix(rows, operands.rank)?;
    lora_grad_into(operands, Some(&mut grad_a), Some(&mut grad_b), threads)?;
    // SAFETY: libnf4 has written every element.
    Ok(unsafe { (grad_a.assume_written(), grad_b.assume_written()) })
}

/// Writes what [`lora_grad`] returns to `grad_a` and `grad_b`. A gradient that is not wanted is
/// `None`. Its operands are then not used: x and q if `grad_a` is `None`, grad_y and p if `grad_b` is.
///
/// `on` says how the call runs ([`Memory::Call`](crate::Memory::Call)): a number of threads on the
/// host, a stream on a GPU. A launch needs no workspace.
///
/// # Errors
/// It fails as [`lora_grad`] does, and if `grad_a` or `grad_b` does not fit the operands. A launch also
/// fails as [`dequantize_into`](crate::dequantize_into) does.
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
pub fn lora_grad_into<'c, X, G>(
    operands: &LoraGradOf<X>,
    grad_a: Option<&mut MatrixOf<G>>,
    grad_b: Option<&mut MatrixOf<G>>,
    on: impl Into<Call<'c, X::Memory>>,
) -> Result<()>
where
    X: Read<Element: Element>,
    G: Write<Element: Element, Memory = X::Memory>,
{
    let LoraGradOf {
        rank,
        scale,
        x,
        grad_y,
        p,
        q,
    } = operands;
    let (rows, cols) = (grad_y.shape.cols, x.shape.cols);
    if let Some(grad_a) = &grad_a {
        grad_a.shape.check("grad_a", *rank, cols)?;
    }
    if let Some(grad_b) = &grad_b {
        grad_b.shape.check("grad_b", rows, *rank)?;
    }
    let m = operands.checked_m(grad_a.is_some(), grad_b.is_some())?;
    let mut args = nowhere::<X::Element, G::Element>((*rank, *scale), m, (rows, cols))?;
    let access = X::Memory::access(on.into(), 0);
    if let Some(grad_a) = grad_a {
        args.x = x.address("x", &access)?.cast();
        args.x_stride = convert("x_stride", x.shape.stride)?;
        args.q = q.address("q", &access)?.cast();
        args.da_stride = convert("the stride of grad_a", grad_a.shape.stride)?;
        args.da = grad_a.address_mut("grad_a", &access)?.cast();
    }
    if let Some(grad_b) = grad_b {
        args.dy = grad_y.address("grad_y", &access)?.cast();
        args.dy_stride = convert("the stride of grad_y", grad_y.shape.stride)?;
        args.p = p.address("p", &access)?.cast();
        args.db_stride = convert("the stride of grad_b", grad_b.shape.stride)?;
        args.db = grad_b.address_mut("grad_b", &access)?.cast();
    }
    X::Memory::run(
        access,
        // SAFETY: each matrix against its buffer was checked when it was made, p and q by checked_m, the
        // gradients above, and libnf4 reads none of an unwanted gradient. The gradients are borrowed
        // mutably, so they are no operands.
        |_, threads| unsafe { sys::nf4_lora_grad_cpu(&args, threads) },
        // SAFETY: as above.
        |_, stream| unsafe { sys::nf4_lora_grad_launch(&args, stream) },
    )
}
