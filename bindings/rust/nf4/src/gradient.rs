//! The gradient of a matmul, and both with an adapter.

use nf4_sys as sys;

use crate::kind::{Descriptor, Weight, GRAD};
use crate::lora::{Adapter, LoraOf};
use crate::matmul::Multiplied;
use crate::matrix::{Fresh, Matrix, MatrixOf};
use crate::memory::{Call, Host, Read, Write};
use crate::{Element, Lora, Result};

/// Computes [`matmul`](crate::matmul) with an adapter. It returns y = x (W + scale B A)^T + bias,
/// `[m, rows]`, and the product x A^T, `[m, rank]`, which the gradient of B needs.
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
pub fn matmul_lora<T: Element, A: Element>(
    x: Matrix<'_, T>,
    weight: impl Weight<Memory = Host, Raw = sys::nf4_tensor>,
    bias: Option<&[T]>,
    lora: &Lora<'_, A>,
    threads: u32,
) -> Result<(Vec<T>, Vec<T>)> {
    let m = x.shape.rows;
    let (mut y, mut product) = outputs(m, weight.shape().0, lora)?;
    matmul_lora_into(x, weight, bias, lora, &mut y, Some(&mut product), threads)?;
    // SAFETY: libnf4 has written every element of y, and of a product that was not zero before.
    Ok(unsafe { (y.assume_written(), product.assume_written()) })
}

/// Writes what [`matmul_lora`] returns to `y` and `product`, which has `m * rank` elements. On a GPU
/// `product` may be `None`, if it is not wanted. `on` is as in [`matmul_into`](crate::matmul_into); a
/// launch on a GPU needs a workspace of
/// [`Spec::matmul_lora_workspace_bytes`](crate::Spec::matmul_lora_workspace_bytes).
///
/// # Errors
/// It fails as [`matmul_into`](crate::matmul_into) does, and if the adapter or `product` does not fit.
pub fn matmul_lora_into<'c, X, A, Y>(
    x: MatrixOf<X>,
    weight: impl Weight<Memory = X::Memory, Raw = sys::nf4_tensor>,
    bias: Option<X>,
    lora: &LoraOf<A>,
    y: &mut MatrixOf<Y>,
    product: Option<&mut Y>,
    on: impl Into<Call<'c, X::Memory>>,
) -> Result<()>
where
    X: Read<Element: Element>,
    A: Read<Element: Element, Memory = X::Memory>,
    Y: Write<Element = X::Element, Memory = X::Memory>,
{
    let multiplied = Multiplied {
        functions: &sys::nf4_tensor::MATMUL,
        gradient: false,
        x: &x,
        bias: bias.as_ref(),
        adapter: Some(Adapter { lora, product }),
    };
    multiplied.with(&weight, y, on.into())
}

/// Returns the gradient of a matmul with respect to x: `grad_y` `[m, rows]` times the weight, `[m,
/// cols]` in row-major order. `threads` is as in [`matmul`](crate::matmul).
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
pub fn matmul_grad<T: Element>(
    grad_y: Matrix<'_, T>,
    weight: impl Weight<Memory = Host, Raw = sys::nf4_tensor>,
    threads: u32,
) -> Result<Vec<T>> {
    let mut grad_x = Fresh::matrix(grad_y.shape.rows, weight.shape().1)?;
    matmul_grad_into(grad_y, weight, &mut grad_x, threads)?;
    // SAFETY: libnf4 has written every element.
    Ok(unsafe { grad_x.assume_written() })
}

/// Writes what [`matmul_grad`] returns to `grad_x`. `on` is as in
/// [`matmul_into`](crate::matmul_into); a launch on a GPU needs a workspace of
/// [`Spec::matmul_grad_workspace_bytes`](crate::Spec::matmul_grad_workspace_bytes), and takes `f32`
/// with any number of rows.
///
/// # Errors
/// It fails as [`matmul_into`](crate::matmul_into) does.
pub fn matmul_grad_into<'c, X, Y>(
    grad_y: MatrixOf<X>,
    weight: impl Weight<Memory = X::Memory, Raw = sys::nf4_tensor>,
    grad_x: &mut MatrixOf<Y>,
    on: impl Into<Call<'c, X::Memory>>,
) -> Result<()>
where
    X: Read<Element: Element>,
    Y: Write<Element = X::Element, Memory = X::Memory>,
{
    let multiplied = Multiplied {
        functions: &GRAD,
        gradient: true,
        x: &grad_y,
        bias: None,
        adapter: None::<Adapter<X, Y>>,
    };
    multiplied.with(&weight, grad_x, on.into())
}

/// Computes [`matmul_grad`] with an adapter. It returns grad_x = grad_y (W + scale B A), `[m, cols]`,
/// and the product grad_y B, `[m, rank]`, which the gradient of A needs.
///
/// # Errors
/// It fails as [`matmul_lora`] does.
pub fn matmul_grad_lora<T: Element, A: Element>(
    grad_y: Matrix<'_, T>,
    weight: impl Weight<Memory = Host, Raw = sys::nf4_tensor>,
    lora: &Lora<'_, A>,
    threads: u32,
) -> Result<(Vec<T>, Vec<T>)> {
    let m = grad_y.shape.rows;
    let (mut grad_x, mut product) = outputs(m, weight.shape().1, lora)?;
    let to = Some(&mut product);
    matmul_grad_lora_into(grad_y, weight, lora, &mut grad_x, to, threads)?;
    // SAFETY: as in matmul_lora.
    Ok(unsafe { (grad_x.assume_written(), product.assume_written()) })
}

/// Writes what [`matmul_grad_lora`] returns to `grad_x` and `product`, which has `m * rank` elements.
/// On a GPU `product` may be `None`, if it is not wanted. `on` and the workspace are as in
/// [`matmul_grad_into`], with the rank of the adapter.
///
/// # Errors
/// It fails as [`matmul_lora_into`] does.
pub fn matmul_grad_lora_into<'c, X, A, Y>(
    grad_y: MatrixOf<X>,
    weight: impl Weight<Memory = X::Memory, Raw = sys::nf4_tensor>,
    lora: &LoraOf<A>,
    grad_x: &mut MatrixOf<Y>,
    product: Option<&mut Y>,
    on: impl Into<Call<'c, X::Memory>>,
) -> Result<()>
where
    X: Read<Element: Element>,
    A: Read<Element: Element, Memory = X::Memory>,
    Y: Write<Element = X::Element, Memory = X::Memory>,
{
    let multiplied = Multiplied {
        functions: &GRAD,
        gradient: true,
        x: &grad_y,
        bias: None,
        adapter: Some(Adapter { lora, product }),
    };
    multiplied.with(&weight, grad_x, on.into())
}

/// Memory for an output of `m` rows and for the product of an adapter. libnf4 does not write the
/// latter beside a weight without elements.
fn outputs<T: Element, A: Element>(
    m: usize,
    columns: usize,
    lora: &Lora<'_, A>,
) -> Result<(MatrixOf<Fresh<T>>, Fresh<T>)> {
    let product = Fresh::matrix(m, lora.a.shape.rows)?.values.zeroed();
    Ok((Fresh::matrix(m, columns)?, product))
}
