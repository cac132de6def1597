//! Several products in one call, on host memory.

use std::ptr;

use nf4_sys as sys;

use crate::error::{check, of_product};
use crate::info::check_version;
use crate::kind::{Descriptor, Functions, HostView};
use crate::matmul::{check_operands, reserve_y, Operands};
use crate::ops::thread_count;
use crate::{Element, Error, Matrix, MatrixMut, QuantizedRef, Result, Weight};

/// `x` times the transpose of `weight`, plus a bias: one of the products of [`matmul_batch`]. `W`
/// is [`QuantizedRef`] or [`Int4Ref`](crate::Int4Ref).
#[derive(Debug, Clone, Copy)]
pub struct Product<'a, T, W = QuantizedRef<'a>> {
    /// `[m, cols]`; `cols` is that of the weight.
    pub x: Matrix<'a, T>,
    /// The weight.
    pub weight: W,
    /// `[rows]` of the weight.
    pub bias: Option<&'a [T]>,
}

impl<'a, T: Element, W: HostView> Product<'a, T, W> {
    /// Without a bias.
    pub fn new(x: Matrix<'a, T>, weight: impl Weight<'a, View = W>) -> Self {
        Product {
            x,
            weight: weight.into_view(),
            bias: None,
        }
    }

    fn check(&self) -> Result<()> {
        check_operands(&self.weight, &self.x, self.bias)
    }

    fn operands(&self, y: *mut T, y_stride: usize) -> Operands<T> {
        Operands {
            m: self.x.shape.rows,
            x: self.x.values.as_ptr(),
            x_stride: self.x.shape.stride,
            bias: self.bias.map_or(ptr::null(), <[T]>::as_ptr),
            y,
            y_stride,
        }
    }
}

/// Several products in one call, such as q, k and v, or gate and up; at most 64, all with weights
/// of one kind. Bit-equal to
/// [`matmul`](crate::matmul) for each. The threads share the rows of all weights.
///
/// # Errors
/// [`Error::InvalidArgument`] if there are too many, or an operand of one does not fit its weight.
///
/// ```
/// use nf4::{matmul_batch, quantize, Matrix, Product, Spec};
/// let gate = quantize(&[0.5f32; 3 * 64], Spec::new(3, 64).flat(), 0)?;
/// let up = quantize(&[-1.0f32; 2 * 64], Spec::new(2, 64).flat(), 0)?;
/// let x = [1.0f32; 64];
/// let x = Matrix::new(&x, 1, 64)?;
/// let y = matmul_batch(&[Product::new(x, &gate), Product::new(x, &up)], 0)?;
/// assert_eq!(y, [vec![32.0; 3], vec![-64.0; 2]]);
/// # Ok::<(), nf4::Error>(())
/// ```
pub fn matmul_batch<T: Element>(
    products: &[Product<'_, T, impl HostView>],
    threads: u32,
) -> Result<Vec<Vec<T>>> {
    let mut all = Vec::with_capacity(products.len());
    for (i, product) in products.iter().enumerate() {
        let y = product
            .check()
            .and_then(|()| reserve_y(product.x.shape.rows, product.weight.shape().0));
        all.push(y.map_err(|error| of_product(i, error))?);
    }
    let places = products.iter().zip(&mut all).map(|(product, y)| {
        let (stride, _) = product.weight.shape();
        product.operands(y.as_mut_ptr(), stride)
    });
    // SAFETY: the operands were checked, and each vector has room for its product and is nobody
    // else's.
    unsafe { matmul_batch_raw(products, places, threads) }?;
    for (product, y) in products.iter().zip(&mut all) {
        // SAFETY: libnf4 has written every element.
        unsafe { y.set_len(product.x.shape.rows * product.weight.shape().0) };
    }
    Ok(all)
}

/// Writes the products that [`matmul_batch`] gives to `y`, one for each, each of as many rows as
/// its `x` and as many columns as its weight has rows.
///
/// # Errors
/// As [`matmul_batch`], and if there are not as many `y` or one does not fit.
///
/// ```
/// use nf4::{matmul_batch_into, quantize, Matrix, MatrixMut, Product, Spec};
/// let weight = quantize(&[0.5f32; 2 * 64], Spec::new(2, 64).flat(), 0)?;
/// let (x, mut first, mut second) = ([1.0f32; 64], [0.0; 2], [0.0; 2]);
/// let product = Product::new(Matrix::new(&x, 1, 64)?, &weight);
/// let biased = Product { bias: Some(&[1.0, 2.0]), ..product };
/// let mut y = [MatrixMut::new(&mut first, 1, 2)?, MatrixMut::new(&mut second, 1, 2)?];
/// matmul_batch_into(&[product, biased], &mut y, 0)?;
/// assert_eq!((first, second), ([32.0, 32.0], [33.0, 34.0]));
/// # Ok::<(), nf4::Error>(())
/// ```
pub fn matmul_batch_into<T: Element>(
    products: &[Product<'_, T, impl HostView>],
    y: &mut [MatrixMut<'_, T>],
    threads: u32,
) -> Result<()> {
    if y.len() != products.len() {
        let (ours, theirs) = (y.len(), products.len());
        return Err(Error::InvalidArgument(format!(
            "y has {ours} elements; expected {theirs}, as products"
        )));
    }
    for (i, (product, y)) in products.iter().zip(&*y).enumerate() {
        let (m, rows) = (product.x.shape.rows, product.weight.shape().0);
        let fits = product.check().and_then(|()| y.shape.check("y", m, rows));
        fits.map_err(|error| of_product(i, error))?;
    }
    let places = products
        .iter()
        .zip(y)
        .map(|(product, y)| product.operands(y.values.as_mut_ptr(), y.shape.stride));
    // SAFETY: the operands were checked; each slice reaches to the end of its last row, as was
    // checked when the matrix was made, and is borrowed mutably.
    unsafe { matmul_batch_raw(products, places, threads) }
}

/// # Safety
/// `Product::check` has passed for each of `products`, `operands` are theirs, and each `y` can be
/// written for the rows of its product, and is nobody else's. It need not be initialised; on
/// success these elements are.
unsafe fn matmul_batch_raw<T: Element>(
    products: &[Product<'_, T, impl HostView>],
    operands: impl Iterator<Item = Operands<T>>,
    threads: u32,
) -> Result<()> {
    let batch = RawBatch::new(products.iter().map(|each| each.weight.raw()), operands)?;
    let weights = batch.weights();
    // SAFETY: the parts of the weights, and each x against its slice, were checked when they were
    // made, the rest by `check`; all of those are only read, and each y is as the caller promises.
    check(unsafe {
        let (weights, args) = (weights.as_ptr(), batch.args.as_ptr());
        (batch.functions().batch_cpu)(weights, args, batch.args.len(), thread_count(threads))
    })
}

/// The structs of a batch, host or device memory alike.
pub(crate) struct RawBatch<W> {
    tensors: Vec<W>,
    pub args: Vec<sys::nf4_matmul_args>,
}

impl<W: Descriptor> RawBatch<W> {
    pub(crate) fn new<T: Element>(
        tensors: impl Iterator<Item = Result<W>>,
        operands: impl Iterator<Item = Operands<T>>,
    ) -> Result<Self> {
        check_version()?; // of no products there would be none who asks
        let named = |(i, result): (usize, Result<_>)| result.map_err(|error| of_product(i, error));
        let tensors: Result<_> = tensors.enumerate().map(named).collect();
        let args: Result<_> = operands
            .enumerate()
            .map(|(i, each)| each.raw().map_err(|error| of_product(i, error)))
            .collect();
        Ok(RawBatch {
            tensors: tensors?,
            args: args?,
        })
    }

    /// The C functions of its weights.
    pub(crate) fn functions(&self) -> Functions<W> {
        W::FUNCTIONS
    }

    /// Valid as long as the batch is borrowed.
    pub(crate) fn weights(&self) -> Vec<*const W> {
        self.tensors.iter().map(ptr::from_ref).collect()
    }
}
