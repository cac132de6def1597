//! Quantize and dequantize.

use nf4_sys as sys;

use crate::error::check_length;
use crate::kind::{Descriptor, Weight};
use crate::matrix::Fresh;
use crate::memory::{Call, Host, Memory, Read, Write};
use crate::scales::WriteScales;
use crate::{global_scale, Element, QuantizedOf, QuantizedTensor, Result, Scales, Spec};

/// Quantizes `values`, the `rows * cols` elements of a weight in row-major order.
///
/// `threads` is the most threads to use; 0 means one for each processor. The bytes do not
/// depend on it.
///
/// A global scale of NVFP4 is the largest finite magnitude of its rows over 2688 or, where it divides,
/// 2688 over that magnitude, as ModelOpt and compressed-tensors choose it; it is 1 for zeros.
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
    if let Scales::Global { scales, .. } = &mut weight.scales {
        global_scale::choose(values, &spec, scales);
    }
    quantize_into(values, &mut weight, threads)?;
    Ok(weight)
}

/// Quantizes `values`, the `rows * cols` elements of a weight in row-major order, into the buffers of
/// `weight`, with its codebook, its code for nested scales, and its global scales of NVFP4, which
/// [`quantize`] chooses and this function only reads. The GPU and the CPU write the same bytes.
///
/// `on` says how the call runs ([`Memory::Call`](crate::Memory::Call)): a number of threads on the
/// host, a stream or a `Launch` on a GPU. A launch on a GPU needs a workspace of
/// [`Spec::workspace_bytes`]. The call on the host allocates one, unless
/// [`Threads::workspace`](crate::Threads::workspace) gives one.
///
/// # Errors
/// [`Error::InvalidArgument`](crate::Error::InvalidArgument) if `values` has another length
/// than the weight; for a launch also those of [`dequantize_into`].
///
/// ```
/// use nf4::{quantize_into, QuantizedTensor, Spec, Threads, Workspace};
/// let even: [f32; 16] = std::array::from_fn(|i| i as f32 / 7.5 - 1.0);
/// let mut weight = QuantizedTensor::zeros(Spec::new(2, 64))?.with_codebook(even);
/// let mut workspace = Workspace::new();
/// let on = Threads::new(0).workspace(&mut workspace);
/// quantize_into(&[1.0f32; 128], &mut weight, on)?;
/// assert_eq!(weight.packed()[..], [0xFF; 64]);
/// # Ok::<(), nf4::Error>(())
/// ```
pub fn quantize_into<'c, V, B, S, K>(
    values: V,
    weight: &mut QuantizedOf<B, S, K>,
    on: impl Into<Call<'c, V::Memory>>,
) -> Result<()>
where
    V: Read<Element: Element>,
    B: Write<Element = u8, Memory = V::Memory>,
    S: WriteScales<Memory = V::Memory>,
    K: Read<Element = f32, Memory = V::Memory>,
{
    check_length("values", values.length(), weight.elements())?;
    let access = V::Memory::access(on.into(), weight.spec().workspace_bytes()?);
    let weight = weight.raw_mut(&access)?;
    let values = values.address("values", &access)?.cast();
    let dtype = V::Element::DTYPE.as_raw();
    // SAFETY: `values` has as many elements as the weight, whose parts were checked when it was made.
    // All of them are borrowed through the call, the written ones mutably, so none overlap. libnf4
    // checks the workspace.
    V::Memory::run(
        access,
        |scratch, threads| unsafe {
            sys::nf4_quantize_cpu(
                values,
                dtype,
                &weight,
                scratch.first,
                scratch.bytes,
                threads,
            )
        },
        |scratch, stream| unsafe {
            sys::nf4_quantize_launch(values, dtype, &weight, scratch.first, scratch.bytes, stream)
        },
    )
}

/// Returns the `rows * cols` values of a weight, in row-major order. `threads` is as in
/// [`quantize`].
///
/// # Errors
/// [`Error::InvalidArgument`](crate::Error::InvalidArgument) if there is no memory for the values;
/// arguments of these types are valid otherwise.
pub fn dequantize<T: Element>(weight: impl Weight<Memory = Host>, threads: u32) -> Result<Vec<T>> {
    let mut out = Fresh::new("out", elements(&weight))?;
    dequantize_into(weight, &mut out, threads)?;
    // SAFETY: libnf4 has written every element.
    Ok(unsafe { out.assume_written() })
}

/// Writes the `rows * cols` values of a weight, in row-major order, to `out`. `on` as in
/// [`quantize_into`]; a launch needs no workspace.
///
/// # Errors
/// [`Error::InvalidArgument`](crate::Error::InvalidArgument) if `out` has another length
/// than the weight. A launch also fails if a buffer belongs to another CUDA context than the stream,
/// and if libnf4 or the CUDA driver reports an error.
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
pub fn dequantize_into<'c, W: Weight>(
    weight: W,
    mut out: impl Write<Element: Element, Memory = W::Memory>,
    on: impl Into<Call<'c, W::Memory>>,
) -> Result<()> {
    fn dtype<B: Read<Element: Element>>(_: &B) -> sys::nf4_dtype {
        B::Element::DTYPE.as_raw()
    }
    check_length("out", out.length(), elements(&weight))?;
    let (dtype, functions) = (dtype(&out), W::Raw::DEQUANT);
    let access = W::Memory::access(on.into(), 0);
    let weight = weight.raw(&access)?;
    let out = out.address_mut("out", &access)?.cast();
    // SAFETY: the parts of the weight were checked when it was made and are only read; `out` has as
    // many elements as the weight, and is borrowed mutably, so it is none of the parts.
    W::Memory::run(
        access,
        |_, threads| unsafe { (functions.cpu)(&weight, out, dtype, threads) },
        |_, stream| unsafe { (functions.launch)(&weight, out, dtype, stream) },
    )
}

fn elements(weight: &impl Weight) -> usize {
    let (rows, cols) = weight.shape();
    rows * cols
}
