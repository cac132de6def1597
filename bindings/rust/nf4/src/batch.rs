//! Several products in one call.

use std::ptr;

use nf4_sys as sys;

use crate::error::{check, check_length, of_product};
use crate::info::check_version;
use crate::kind::{Descriptor, Weight};
use crate::matmul::{check_bias, Operands};
use crate::matrix::{Fresh, MatrixOf};
use crate::memory::{optional, Call, Host, Memory, Read, Write};
use crate::{Element, QuantizedTensor, Result};

/// One of the products of [`matmul_batch`]: x W^T + bias. The buffer `X` holds x; `W` is a [`Weight`]
/// or a reference to one.
#[derive(Debug, Clone, Copy)]
pub struct ProductOf<X, W> {
    /// The activations, `[m, cols]` for a weight of `cols` columns.
    pub x: MatrixOf<X>,
    /// The weight.
    pub weight: W,
    /// One element for each row of the weight.
    pub bias: Option<X>,
}

/// A product on the host.
pub type Product<'a, T, W = &'a QuantizedTensor> = ProductOf<&'a [T], W>;

impl<X: Read, W: Weight<Memory = X::Memory>> ProductOf<X, W> {
    /// Makes a product without a bias.
    pub fn new(x: MatrixOf<X>, weight: W) -> Self {
        ProductOf {
            x,
            weight,
            bias: None,
        }
    }

    fn check(&self) -> Result<()> {
        let (rows, cols) = self.weight.shape();
        self.x.shape.check("x", self.x.shape.rows, cols)?;
        check_bias(self.bias.as_ref(), rows)
    }
}

/// Computes several products in one call, such as q, k and v, or gate and up: at most 64, all with
/// weights of one kind. The results are bit-equal to those of [`matmul`](crate::matmul) for each. The
/// threads share the rows of all weights.
///
/// # Errors
/// [`Error::InvalidArgument`](crate::Error::InvalidArgument) if there are more than 64 products, or an
/// operand does not fit its weight; the text counts products from 0.
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
pub fn matmul_batch<T: Element, W: Weight<Memory = Host>>(
    products: &[Product<'_, T, W>],
    threads: u32,
) -> Result<Vec<Vec<T>>> {
    let y = products.iter().enumerate().map(|(i, product)| {
        let fits = product.check();
        fits.and_then(|()| Fresh::matrix(product.x.shape.rows, product.weight.shape().0))
            .map_err(|error| of_product(i, error))
    });
    let mut y: Vec<_> = y.collect::<Result<_>>()?;
    matmul_batch_into(products, &mut y, threads)?;
    // SAFETY: libnf4 has written every element.
    let written = y.into_iter().map(|y| unsafe { y.assume_written() });
    Ok(written.collect())
}

/// Writes the products that [`matmul_batch`] returns to `y`. It has one matrix for each product, with
/// as many rows as the product's `x` and as many columns as its weight has rows. On a GPU, products
/// with few rows of x share launches. `on` is as in [`matmul_into`](crate::matmul_into); the workspace
/// has [`matmul_batch_workspace_bytes`].
///
/// # Errors
/// It fails as [`matmul_batch`] does, and if `y` has another number of matrices or one does not fit. A
/// launch also fails as [`dequantize_into`](crate::dequantize_into) does; after an error of CUDA the
/// outputs are unspecified.
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
pub fn matmul_batch_into<'c, X, Y, W>(
    products: &[ProductOf<X, W>],
    y: &mut [MatrixOf<Y>],
    on: impl Into<Call<'c, X::Memory>>,
) -> Result<()>
where
    X: Read<Element: Element>,
    Y: Write<Element = X::Element, Memory = X::Memory>,
    W: Weight<Memory = X::Memory>,
{
    check_length("y", y.len(), products.len())?;
    for (i, (product, y)) in products.iter().zip(&*y).enumerate() {
        let (m, rows) = (product.x.shape.rows, product.weight.shape().0);
        let fits = product.check().and_then(|()| y.shape.check("y", m, rows));
        fits.map_err(|error| of_product(i, error))?;
    }
    let access = X::Memory::access(on.into(), 0);
    let mut batch = RawBatch::new()?;
    for (product, y) in products.iter().zip(y) {
        let operands = Operands {
            m: product.x.shape.rows,
            x: product.x.address("x", &access)?,
            x_stride: product.x.shape.stride,
            bias: optional("bias", product.bias.as_ref(), &access)?,
            y_stride: y.shape.stride,
            y: y.address_mut("y", &access)?,
        };
        batch.push(product.weight.raw(&access), &operands)?;
    }
    // SAFETY: the parts of the weights, and each matrix against its buffer, were checked when they were
    // made, the rest above; each y is borrowed mutably.
    unsafe { batch.run::<X::Memory>(access) }
}

/// Writes the products of one `x` with weights of the same columns, such as q, k and v, side by side:
/// `y` has as many columns as all weights together have rows. Everything else is as in
/// [`matmul_batch_into`].
///
/// # Errors
/// It fails as [`matmul_batch_into`] does.
///
/// ```
/// use nf4::{matmul_joined_into, quantize, Matrix, MatrixMut, Spec};
/// let gate = quantize(&[0.5f32; 64], Spec::new(1, 64).flat(), 0)?;
/// let up = quantize(&[-1.0f32; 2 * 64], Spec::new(2, 64).flat(), 0)?;
/// let (x, mut y) = ([1.0f32; 64], [0.0; 3]);
/// let mut joined = MatrixMut::new(&mut y, 1, 3)?;
/// matmul_joined_into(Matrix::new(&x, 1, 64)?, &[&gate, &up], &mut joined, 0)?;
/// assert_eq!(y, [32.0, -64.0, -64.0]);
/// # Ok::<(), nf4::Error>(())
/// ```
pub fn matmul_joined_into<'c, X, Y, W>(
    x: MatrixOf<X>,
    weights: &[W],
    y: &mut MatrixOf<Y>,
    on: impl Into<Call<'c, X::Memory>>,
) -> Result<()>
where
    X: Read<Element: Element>,
    Y: Write<Element = X::Element, Memory = X::Memory>,
    W: Weight<Memory = X::Memory>,
{
    let m = x.shape.rows;
    for (i, weight) in weights.iter().enumerate() {
        let fits = x.shape.check("x", m, weight.shape().1);
        fits.map_err(|error| of_product(i, error))?;
    }
    let mut rows = weights.iter().map(|weight| weight.shape().0);
    let columns = rows.try_fold(0usize, |sum, rows| sum.checked_add(rows));
    y.shape.check("y", m, columns.unwrap_or(usize::MAX))?;
    let y_stride = y.shape.stride;
    let access = X::Memory::access(on.into(), 0);
    let mut batch = RawBatch::new()?;
    let from = x.address("x", &access)?;
    let mut next = y.address_mut("y", &access)?;
    for weight in weights {
        let operands = Operands {
            m,
            x: from,
            x_stride: x.shape.stride,
            bias: ptr::null(),
            y: next,
            y_stride,
        };
        next = next.wrapping_add(weight.shape().0);
        batch.push(weight.raw(&access), &operands)?;
    }
    // SAFETY: as in matmul_batch_into; the products write columns of their own.
    unsafe { batch.run::<X::Memory>(access) }
}

/// Returns the bytes of workspace that [`matmul_batch_into`] needs for these products on a GPU, which
/// is what the product that needs most needs.
///
/// # Errors
/// [`Error::InvalidArgument`](crate::Error::InvalidArgument) if there are more than 64 products, or a
/// number of one is out of range.
pub fn matmul_batch_workspace_bytes<X, W>(products: &[ProductOf<X, W>]) -> Result<usize>
where
    X: Read<Element: Element>,
    W: Weight<Memory = X::Memory>,
{
    let mut batch = RawBatch::new()?;
    for ProductOf { x, weight, .. } in products {
        let (rows, cols) = weight.shape();
        let operands = Operands::<X::Element>::contiguous(x.shape.rows, cols, rows);
        batch.push(weight.nowhere(), &operands)?;
    }
    let (weights, mut bytes) = (batch.weights(), 0);
    let query = W::Raw::BATCH.workspace_size;
    // SAFETY: the arrays and what they point at live through the call.
    check(unsafe {
        query(
            weights.as_ptr(),
            batch.args.as_ptr(),
            weights.len(),
            &mut bytes,
        )
    })?;
    Ok(bytes)
}

/// The structs of a batch.
struct RawBatch<Raw> {
    tensors: Vec<Raw>,
    args: Vec<sys::nf4_matmul_args>,
}

impl<Raw: Descriptor> RawBatch<Raw> {
    fn new() -> Result<Self> {
        check_version()?; // without products no descriptor would check it
        Ok(RawBatch {
            tensors: Vec::new(),
            args: Vec::new(),
        })
    }

    fn push<T: Element>(&mut self, tensor: Result<Raw>, operands: &Operands<T>) -> Result<()> {
        let named = |error| of_product(self.args.len(), error);
        let (tensor, args) = (tensor.map_err(named)?, operands.raw().map_err(named)?);
        self.tensors.push(tensor);
        self.args.push(args);
        Ok(())
    }

    /// Valid as long as the batch is borrowed.
    fn weights(&self) -> Vec<*const Raw> {
        self.tensors.iter().map(ptr::from_ref).collect()
    }

    /// # Safety
    /// The caller promises for all products what [`Functions::run`](crate::kind::Functions::run) asks.
    unsafe fn run<M: Memory>(&self, access: M::Access<'_>) -> Result<()> {
        let (weights, functions) = (self.weights(), Raw::BATCH);
        let (first, args, count) = (weights.as_ptr(), self.args.as_ptr(), weights.len());
        M::run(
            access,
            // SAFETY: the arrays and what they point at live through the call; the rest is as the
            // caller promises.
            |_, threads| unsafe { (functions.cpu)(first, args, count, threads) },
            // SAFETY: as above; libnf4 checks the size of the workspace.
            |scratch, stream| unsafe {
                (functions.launch)(first, args, count, scratch.first, scratch.bytes, stream)
            },
        )
    }
}
