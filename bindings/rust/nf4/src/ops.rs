//! Quantize and dequantize on host memory.

use nf4_sys as sys;

use crate::error::{check, check_length};
use crate::kind::{Described, Descriptor, HostView};
use crate::{Element, QuantizedMut, QuantizedTensor, Result, Spec, Weight};

/// Workspace of quantize, reusable. Flat weights need none.
#[derive(Default)]
pub struct Workspace {
    chunks: Vec<Chunk>,
}

/// libnf4 requires a workspace aligned to 16 bytes.
#[derive(Clone, Copy)]
#[repr(C, align(16))]
struct Chunk([u8; 16]);

impl Workspace {
    /// No memory yet; it grows to what is needed.
    pub fn new() -> Self {
        Self::default()
    }

    fn grow(&mut self, bytes: usize) {
        let chunks = bytes.div_ceil(size_of::<Chunk>());
        if self.chunks.len() < chunks {
            self.chunks.resize(chunks, Chunk([0; 16]));
        }
    }
}

/// `threads` of the C interface: "at most", so a huge number is as good as the largest.
pub(crate) fn thread_count(threads: u32) -> i32 {
    i32::try_from(threads).unwrap_or(i32::MAX)
}

/// Quantizes `values`, the `rows * cols` elements of a weight in row-major order.
///
/// `threads`: how many to use at most; 0 means one for each processor. The bytes do not
/// depend on it.
///
/// # Errors
/// [`Error::InvalidArgument`](crate::Error::InvalidArgument) if `spec` is wrong or `values`
/// has another length.
///
/// ```
/// use nf4::{dequantize, quantize, Spec};
/// let values: Vec<f32> = (0..640).map(|i| (i as f32).sin()).collect();
/// let weight = quantize(&values, Spec::new(10, 64), 0)?;
/// let back: Vec<half::bf16> = dequantize(&weight, 0)?;
/// assert!(values.iter().zip(&back).all(|(x, y)| (x - y.to_f32()).abs() < 0.16));
/// # Ok::<(), nf4::Error>(())
/// ```
pub fn quantize<T: Element>(values: &[T], spec: Spec, threads: u32) -> Result<QuantizedTensor> {
    // Before memory is taken: a wrong spec may ask for any amount of it.
    check_length("values", values.len(), spec.sizes()?.elements)?;
    let mut weight = QuantizedTensor::zeros(spec)?;
    quantize_into(
        values,
        &mut weight.view_mut(),
        &mut Workspace::new(),
        threads,
    )?;
    Ok(weight)
}

/// Quantizes `values` into the buffers of `weight`, with its codebook and its code for
/// nested scales. `threads` as in [`quantize`].
///
/// # Errors
/// [`Error::InvalidArgument`](crate::Error::InvalidArgument) if `values` has another length
/// than the weight.
///
/// ```
/// use nf4::{quantize_into, QuantizedTensor, Spec, Workspace};
/// let even: [f32; 16] = std::array::from_fn(|i| i as f32 / 7.5 - 1.0);
/// let mut weight = QuantizedTensor::zeros(Spec::new(2, 64))?.with_codebook(even);
/// let mut workspace = Workspace::new();
/// quantize_into(&[1.0f32; 128], &mut weight.view_mut(), &mut workspace, 0)?;
/// assert_eq!(weight.packed(), [0xFF; 64]);
/// # Ok::<(), nf4::Error>(())
/// ```
pub fn quantize_into<T: Element>(
    values: &[T],
    weight: &mut QuantizedMut<'_>,
    workspace: &mut Workspace,
    threads: u32,
) -> Result<()> {
    check_length("values", values.len(), weight.elements())?;
    workspace.grow(weight.spec().workspace_bytes()?);
    // SAFETY: `values` has as many elements as the weight and the parts of the weight were
    // checked when it was made; the workspace is large enough and aligned. All of them are
    // borrowed through the call, the written ones mutably, so none overlap.
    check(unsafe {
        sys::nf4_quantize_cpu(
            values.as_ptr().cast(),
            T::DTYPE.as_raw(),
            &weight.raw()?,
            workspace.chunks.as_mut_ptr().cast(),
            size_of_val(&workspace.chunks[..]),
            thread_count(threads),
        )
    })
}

/// The `rows * cols` values of a weight, in row-major order. `threads` as in [`quantize`].
///
/// # Errors
/// Those that libnf4 reports; arguments of these types are always valid.
pub fn dequantize<'a, T: Element>(weight: impl Weight<'a>, threads: u32) -> Result<Vec<T>> {
    let weight = weight.into_view();
    let elements = elements(&weight);
    let mut out = Vec::with_capacity(elements);
    // SAFETY: the vector has room for that many elements.
    unsafe { dequantize_raw(&weight, out.as_mut_ptr(), threads) }?;
    // SAFETY: libnf4 has written every element.
    unsafe { out.set_len(elements) };
    Ok(out)
}

/// Writes the `rows * cols` values of a weight to `out`. `threads` as in [`quantize`].
///
/// # Errors
/// [`Error::InvalidArgument`](crate::Error::InvalidArgument) if `out` has another length
/// than the weight.
///
/// ```
/// use nf4::{dequantize_into, quantize, Spec};
/// let weight = quantize(&[0.5f32; 100], Spec::new(1, 100).flat(), 0)?;
/// let mut out = [half::f16::ZERO; 100];
/// dequantize_into(&weight, &mut out, 0)?;
/// assert_eq!(out[99].to_f32(), 0.5);
/// assert!(dequantize_into(&weight, &mut out[..99], 0).is_err());
/// # Ok::<(), nf4::Error>(())
/// ```
pub fn dequantize_into<'a, T: Element>(
    weight: impl Weight<'a>,
    out: &mut [T],
    threads: u32,
) -> Result<()> {
    let weight = weight.into_view();
    check_length("out", out.len(), elements(&weight))?;
    // SAFETY: the slice has that many elements.
    unsafe { dequantize_raw(&weight, out.as_mut_ptr(), threads) }
}

fn elements(weight: &impl Described) -> usize {
    let (rows, cols) = weight.shape();
    rows * cols
}

/// # Safety
/// `out` can be written for as many elements as the weight has. It need not be initialised;
/// on success it is.
unsafe fn dequantize_raw<T: Element>(
    weight: &impl HostView,
    out: *mut T,
    threads: u32,
) -> Result<()> {
    let weight = weight.raw()?;
    // SAFETY: the parts of the weight were checked when it was made and are only read;
    // `out` is as the caller promises, so it is none of them.
    check(unsafe {
        (weight.functions().dequant_cpu)(
            &weight,
            out.cast(),
            T::DTYPE.as_raw(),
            thread_count(threads),
        )
    })
}
