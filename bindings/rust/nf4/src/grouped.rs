//! Products of a stack of experts (mixture of experts).

use std::ptr;

use nf4_sys as sys;

use crate::error::{check_length, convert, product};
use crate::kind::{Descriptor, Experts, Functions, GROUPED_GRAD};
use crate::matrix::{Fresh, MatrixOf};
use crate::memory::{optional, Call, Host, Memory, Read, Write};
use crate::{Element, Result};

/// The operands of [`matmul_grouped`]: what the experts of a weight are multiplied with. The number of
/// experts is the length of `ends`, and each expert has an equal share of the weight's rows. In
/// [`matmul_grouped_grad`] `x` is the gradient of y, and `x_index` holds its rows. `X`, `Index` and
/// `Floats` are the buffers of the operands; on the host the name is [`Grouped`].
///
/// A launch on a GPU reads `ends`, `x_index` and `row_scale` on the GPU only, and any values are
/// allowed, so a CUDA graph may be replayed with other values.
#[derive(Debug, Clone, Copy)]
pub struct GroupedOf<X, Index, Floats> {
    /// The activations, with the weight's `cols` columns; in the gradient grad_y, with as many columns
    /// as an expert has rows.
    pub x: MatrixOf<X>,
    /// For each expert, the row of y before which its rows end. They begin where the rows of the
    /// expert before it end.
    pub ends: Index,
    /// For each row of y, the row of `x`. An index out of range stands for a row of zeros. `None`: row
    /// i of y uses row i of `x`.
    pub x_index: Option<Index>,
    /// `[experts, rows of an expert]`, contiguous; `None` in the gradient.
    pub bias: Option<X>,
    /// A factor for each row of y, such as the router's weight; `None`: 1.
    pub row_scale: Option<Floats>,
}

/// The operands of [`matmul_grouped`] on the host.
pub type Grouped<'a, T> = GroupedOf<&'a [T], &'a [i32], &'a [f32]>;

impl<X, I, F> GroupedOf<X, I, F> {
    /// Makes operands whose rows of x are sorted by expert, without bias and row scales.
    pub fn new(x: MatrixOf<X>, ends: I) -> Self {
        GroupedOf {
            x,
            ends,
            x_index: None,
            bias: None,
            row_scale: None,
        }
    }
}

impl<X, I: Read, F> GroupedOf<X, I, F> {
    /// Rows of y.
    fn m(&self) -> usize {
        let index = self.x_index.as_ref();
        index.map_or(self.x.shape.rows, I::length)
    }
}

/// Operands without addresses, for a query of a launch with x_index.
pub(crate) fn nowhere<T: Element>(
    experts: usize,
    m: usize,
    x_stride: usize,
    y_stride: usize,
) -> Result<sys::nf4_grouped_args> {
    Ok(sys::nf4_grouped_args {
        struct_size: size_of::<sys::nf4_grouped_args>(),
        dtype: T::DTYPE.as_raw(),
        experts: convert("experts", experts)?,
        m: convert("m", m)?,
        x: ptr::null(),
        x_stride: convert("x_stride", x_stride)?,
        x_rows: convert("x_rows", m)?,
        y: ptr::null_mut(),
        y_stride: convert("y_stride", y_stride)?,
        ends: ptr::null(),
        x_index: ptr::NonNull::<i32>::dangling().as_ptr(),
        bias: ptr::null(),
        bias_stride: 0,
        row_scale: ptr::null(),
    })
}

/// Returns y, `[m, rows of an expert]` in row-major order: row i is
/// `row_scale[i] * (x[x_index[i]] W[e]^T + bias[e])` for the expert `e` of the row, or zeros if `ends`
/// assigns the row to no expert. An expert whose end is less than that of one before it has no rows.
///
/// `threads` is as in [`matmul`](crate::matmul).
///
/// # Errors
/// [`Error::InvalidArgument`](crate::Error::InvalidArgument) if an operand does not fit the weight,
/// the number of experts does not divide the rows of the weight, or there are several experts and the
/// elements of one are not a multiple of the blocksize.
///
/// ```
/// use nf4::{matmul_grouped, quantize, Grouped, Matrix, Spec};
/// // Two experts of two rows each; the first has one row of y, the second two.
/// let values: Vec<f32> = (0..4 * 64).map(|i| if i < 128 { 0.5 } else { 2.0 }).collect();
/// let weight = quantize(&values, Spec::new(4, 64).flat(), 0)?;
/// let x = [1.0f32; 64];
/// let operands = Grouped {
///     x_index: Some(&[0, 0, 7]),
///     row_scale: Some(&[1.0, 0.5, 1.0]),
///     ..Grouped::new(Matrix::new(&x, 1, 64)?, &[1, 3])
/// };
/// assert_eq!(matmul_grouped(&operands, &weight, 0)?, [32.0, 32.0, 64.0, 64.0, 0.0, 0.0]);
/// # Ok::<(), nf4::Error>(())
/// ```
///
/// The same with experts of integers:
///
/// ```
/// use half::f16;
/// use nf4::{matmul_grouped, ColumnsOf, Grouped, Int4Layout, Int4PartsRef, Int4Spec};
/// use nf4::{Int4Stack, Matrix};
/// // Two experts of one row of eight codes; all zero points are 8.
/// let spec = Int4Spec::new(Int4Layout::CompressedTensors, 1, 8).group_size(Some(8));
/// let parts = Int4PartsRef {
///     packed: &[0x9999_9999, 0xAAAA_AAAA],
///     scales: &[f16::ONE.to_bits(), f16::ONE.to_bits()],
///     zeros: None,
///     columns: ColumnsOf::InOrder,
/// };
/// let x = [1.0f32; 16];
/// let operands = Grouped::new(Matrix::new(&x, 2, 8)?, &[1, 2]);
/// let y = matmul_grouped(&operands, Int4Stack::new(spec, 2, parts)?, 0)?;
/// assert_eq!(y, [8.0, 16.0]);
/// # Ok::<(), nf4::Error>(())
/// ```
pub fn matmul_grouped<T: Element>(
    operands: &Grouped<'_, T>,
    weight: impl Experts<Memory = Host>,
    threads: u32,
) -> Result<Vec<T>> {
    let (rows, _) = weight.expert_shape(operands.ends.len())?;
    let y = zeros(operands.m(), rows)?;
    with_y(y, |y| matmul_grouped_into(operands, weight, y, threads))
}

/// Writes the product that [`matmul_grouped`] returns to `y`. Rows of y that belong to no expert are
/// unspecified afterwards.
///
/// `on` is as in [`matmul_into`](crate::matmul_into). A launch on a GPU takes [`half::f16`] and
/// [`half::bf16`], and needs a workspace of
/// [`Spec::matmul_grouped_workspace_bytes`](crate::Spec::matmul_grouped_workspace_bytes) or
/// [`Int4Spec::matmul_grouped_workspace_bytes`](crate::Int4Spec::matmul_grouped_workspace_bytes).
///
/// # Errors
/// It fails as [`matmul_grouped`] does, and if `y` does not fit. A launch also fails as
/// [`dequantize_into`](crate::dequantize_into) does.
pub fn matmul_grouped_into<'c, X, I, F, Y, W>(
    operands: &GroupedOf<X, I, F>,
    weight: W,
    y: &mut MatrixOf<Y>,
    on: impl Into<Call<'c, X::Memory>>,
) -> Result<()>
where
    X: Read<Element: Element>,
    I: Read<Element = i32, Memory = X::Memory>,
    F: Read<Element = f32, Memory = X::Memory>,
    Y: Write<Element = X::Element, Memory = X::Memory>,
    W: Experts<Memory = X::Memory>,
{
    let (rows, cols) = weight.expert_shape(operands.ends.length())?;
    let names = [("x", cols), ("y", rows)];
    run(&W::Raw::GROUPED, operands, names, &weight, y, on.into())
}

/// Returns the gradient of [`matmul_grouped`] with respect to the rows of x, one for each row of y:
/// `[m, cols]` in row-major order. Row i is `row_scale[i] * grad_y[x_index[i]] W[e]` for the expert `e`
/// of the row, or zeros if `ends` assigns the row to no expert. If several rows of y used one row of x,
/// its gradient is the sum of their rows, which the caller forms.
///
/// # Errors
/// It fails as [`matmul_grouped`] does, and with
/// [`Error::InvalidArgument`](crate::Error::InvalidArgument) if there is a bias.
///
/// ```
/// use nf4::{matmul_grouped_grad, quantize, Grouped, Matrix, Spec};
/// let values: Vec<f32> = (0..4 * 64).map(|i| if i < 128 { 0.5 } else { 2.0 }).collect();
/// let weight = quantize(&values, Spec::new(4, 64).flat(), 0)?;
/// let grad_y = [1.0f32, 2.0, 3.0, 4.0];
/// let operands = Grouped::new(Matrix::new(&grad_y, 2, 2)?, &[1, 2]);
/// let grad_x = matmul_grouped_grad(&operands, &weight, 0)?;
/// assert_eq!((grad_x[0], grad_x[64]), (1.5, 14.0));
/// # Ok::<(), nf4::Error>(())
/// ```
pub fn matmul_grouped_grad<T: Element>(
    operands: &Grouped<'_, T>,
    weight: impl Experts<Memory = Host, Raw = sys::nf4_tensor>,
    threads: u32,
) -> Result<Vec<T>> {
    let (_, cols) = weight.expert_shape(operands.ends.len())?;
    let grad_x = zeros(operands.m(), cols)?;
    with_y(grad_x, |grad_x| {
        matmul_grouped_grad_into(operands, weight, grad_x, threads)
    })
}

/// Writes what [`matmul_grouped_grad`] returns to `grad_x`. Rows that belong to no expert are
/// unspecified afterwards. Everything else is as in [`matmul_grouped_into`], with a workspace of
/// [`Spec::matmul_grouped_grad_workspace_bytes`](crate::Spec::matmul_grouped_grad_workspace_bytes).
///
/// # Errors
/// It fails as [`matmul_grouped_into`] and [`matmul_grouped_grad`] do.
pub fn matmul_grouped_grad_into<'c, X, I, F, Y>(
    operands: &GroupedOf<X, I, F>,
    weight: impl Experts<Memory = X::Memory, Raw = sys::nf4_tensor>,
    grad_x: &mut MatrixOf<Y>,
    on: impl Into<Call<'c, X::Memory>>,
) -> Result<()>
where
    X: Read<Element: Element>,
    I: Read<Element = i32, Memory = X::Memory>,
    F: Read<Element = f32, Memory = X::Memory>,
    Y: Write<Element = X::Element, Memory = X::Memory>,
{
    let (rows, cols) = weight.expert_shape(operands.ends.length())?;
    let names = [("grad_y", rows), ("grad_x", cols)];
    run(&GROUPED_GRAD, operands, names, &weight, grad_x, on.into())
}

fn zeros<T: Element>(m: usize, columns: usize) -> Result<MatrixOf<Fresh<T>>> {
    MatrixOf::new(Fresh::matrix(m, columns)?.values.zeroed(), m, columns)
}

fn with_y<T: Element>(
    mut y: MatrixOf<Fresh<T>>,
    call: impl FnOnce(&mut MatrixOf<Fresh<T>>) -> Result<()>,
) -> Result<Vec<T>> {
    call(&mut y)?;
    // SAFETY: it was filled with zeros, and libnf4 has written the rows of the experts.
    Ok(unsafe { y.assume_written() })
}

/// Checks the operands against the weight and calls libnf4. `x_columns` and `y_columns` follow the
/// names of x and y.
fn run<X, I, F, Y, W>(
    functions: &Functions<W::Raw, sys::nf4_grouped_args>,
    operands: &GroupedOf<X, I, F>,
    [(x_name, x_columns), (y_name, y_columns)]: [(&str, usize); 2],
    weight: &W,
    y: &mut MatrixOf<Y>,
    call: Call<'_, X::Memory>,
) -> Result<()>
where
    X: Read<Element: Element>,
    I: Read<Element = i32, Memory = X::Memory>,
    F: Read<Element = f32, Memory = X::Memory>,
    Y: Write<Element = X::Element, Memory = X::Memory>,
    W: Experts<Memory = X::Memory>,
{
    let GroupedOf {
        x,
        ends,
        x_index,
        bias,
        row_scale,
    } = operands;
    let (experts, m) = (ends.length(), operands.m());
    let (of_expert, _) = weight.expert_shape(experts)?;
    x.shape.check(x_name, x.shape.rows, x_columns)?;
    y.shape.check(y_name, m, y_columns)?;
    if let Some(bias) = bias {
        let length = product("experts * rows", experts, of_expert)?;
        check_length("bias", bias.length(), length)?;
    }
    if let Some(row_scale) = row_scale {
        check_length("row_scale", row_scale.length(), m)?;
    }
    let access = X::Memory::access(call, 0);
    let raw = weight.raw(&access)?;
    let args = sys::nf4_grouped_args {
        x: x.address(x_name, &access)?.cast(),
        x_rows: convert("x_rows", x.shape.rows)?,
        ends: ends.address("ends", &access)?,
        x_index: optional("x_index", x_index.as_ref(), &access)?,
        bias: optional("bias", bias.as_ref(), &access)?.cast(),
        bias_stride: convert("bias_stride", of_expert)?,
        row_scale: optional("row_scale", row_scale.as_ref(), &access)?,
        ..nowhere::<X::Element>(experts, m, x.shape.stride, y.shape.stride)?
    };
    let args = sys::nf4_grouped_args {
        y: y.address_mut(y_name, &access)?.cast(),
        ..args
    };
    // SAFETY: the parts of the weight, and x and y against their buffers, were checked when they were
    // made, the other lengths above; libnf4 reads no row of x that is out of range, and refuses
    // experts that do not divide the rows. y is borrowed mutably, so it is none of what is read.
    unsafe { functions.run::<X::Memory>(access, &raw, &args) }
}
