//! Quantize: how far the values may move, and what must not change the bytes.

use super::common::{any_values, even_codebook, Number};
use half::{bf16, f16};
use nf4::{
    codebook, dequantize, quantize, quantize_into, scale_code, QuantizedMut, QuantizedTensor,
    Scales, ScalesMut, Spec, Threads, Workspace, CODEBOOK_SIZE,
};
use proptest::prelude::*;

/// The largest distance from a number in [-1, 1] to the nearest of `entries`.
fn worst_distance(entries: &[f32]) -> f32 {
    let mut sorted = entries.to_vec();
    sorted.sort_by(f32::total_cmp);
    let between = sorted.windows(2).map(|pair| (pair[1] - pair[0]) / 2.0);
    let ends = [sorted[0] + 1.0, 1.0 - sorted[sorted.len() - 1]];
    between.chain(ends).fold(0.0, f32::max)
}

/// How far the scale of a block may be from its absmax.
fn scale_error(weight: &QuantizedTensor, block: usize) -> f32 {
    match weight.scales() {
        Scales::Flat(_) | Scales::Bytes(_) | Scales::Global { .. } => 0.0,
        Scales::Nested { absmax, code, .. } => {
            let nested_block = block / weight.spec().nested_blocksize as usize;
            absmax[nested_block] * worst_distance(&code[..])
        }
    }
}

fn check_errors<T: Number>(weight: &QuantizedTensor, values: &[T]) {
    let entries = weight.codebook().unwrap_or(codebook(weight.spec().format));
    let worst = worst_distance(entries);
    let back: Vec<f32> = dequantize(weight, 0).expect("a weight that fits");
    let blocksize = weight.spec().blocksize as usize;
    let largest = values
        .iter()
        .fold(0.0, |largest: f32, x| largest.max(x.get().abs()));
    for (block, chunk) in values.chunks(blocksize).enumerate() {
        let absmax = chunk
            .iter()
            .fold(0.0, |absmax: f32, x| absmax.max(x.get().abs()));
        // The last term is for the roundings of float arithmetic.
        let bound = absmax * worst + scale_error(weight, block) + largest * 1e-5;
        for (i, x) in chunk.iter().enumerate() {
            let error = (x.get() - back[block * blocksize + i]).abs();
            assert!(
                error <= bound,
                "element {i} of block {block} is off by {error} > {bound}"
            );
        }
    }
}

fn quantize_with(
    values: &[f32],
    spec: Spec,
    codebook: [f32; CODEBOOK_SIZE],
) -> nf4::Result<QuantizedTensor> {
    let mut weight = QuantizedTensor::zeros(spec)?.with_codebook(codebook);
    quantize_into(values, &mut weight.view_mut(), 0)?;
    Ok(weight)
}

/// Values of another type give the bytes of the same values in fp32.
fn same_as_fp32<T: Number>(spec: Spec, values: &[f32]) -> nf4::Result<()> {
    let narrow: Vec<T> = values.iter().map(|x| T::of(*x)).collect();
    let wide: Vec<f32> = narrow.iter().map(|x| x.get()).collect();
    let weight = quantize(&narrow, spec, 0)?;
    assert_eq!(weight, quantize(&wide, spec, 1)?);
    check_errors(&weight, &narrow);
    Ok(())
}

proptest! {
    #[test]
    fn fp32_errors_are_bounded((spec, values) in any_values()) {
        check_errors(&quantize(&values, spec, 0)?, &values);
    }

    #[test]
    fn codebooks_of_ones_own_are_used((spec, values) in any_values()) {
        check_errors(&quantize_with(&values, spec, even_codebook())?, &values);
    }

    #[test]
    fn fp16_gives_the_bytes_of_fp32((spec, values) in any_values()) {
        same_as_fp32::<f16>(spec, &values)?;
    }

    #[test]
    fn bf16_gives_the_bytes_of_fp32((spec, values) in any_values()) {
        same_as_fp32::<bf16>(spec, &values)?;
    }

    #[test]
    fn a_codebook_equal_to_the_formats_changes_nothing((spec, values) in any_values()) {
        let own = quantize_with(&values, spec, *codebook(spec.format))?;
        let (spec, packed, scales, _) = own.into_parts();
        let own = QuantizedTensor::new(spec, packed, scales, None)?;
        prop_assert_eq!(own, quantize(&values, spec, 0)?);
    }
}

#[test]
fn borrowed_buffers_get_the_same_bytes() -> nf4::Result<()> {
    let values: Vec<f32> = (0..1001).map(|i| (i as f32 * 0.7).sin()).collect();
    let spec = Spec::new(7, 143).blocksize(32).nested(4);
    let sizes = spec.sizes()?;
    let mut packed = vec![0xAA; sizes.packed_bytes];
    let mut codes = vec![0xAA; sizes.blocks];
    let mut absmax = vec![f32::NAN; sizes.nested_blocks];
    let mut offset = f32::NAN;
    let code = scale_code();
    let scales = ScalesMut::Nested {
        codes: &mut codes,
        absmax: &mut absmax,
        code,
        offset: &mut offset,
    };
    let mut weight = QuantizedMut::new(spec, &mut packed, scales, None)?;
    let mut workspace = Workspace::new();
    for values in [&vec![0.0; 1001], &values] {
        let on = Threads::new(0).workspace(&mut workspace);
        quantize_into(values, &mut weight, on)?;
    }

    let scales = Scales::Nested {
        codes,
        absmax,
        code: Box::new(*code),
        offset,
    };
    let borrowed = QuantizedTensor::new(spec, packed, scales, None)?;
    assert_eq!(borrowed, quantize(&values, spec, 0)?);
    Ok(())
}

/// Large enough that libnf4 really splits the work.
#[test]
fn the_number_of_threads_changes_nothing() -> nf4::Result<()> {
    let values: Vec<f32> = (0..700_001).map(|i| (i as f32 * 0.37).sin()).collect();
    let spec = Spec::new(1, values.len());
    let one = quantize(&values, spec, 1)?;
    let back: Vec<f32> = dequantize(&one, 1)?;
    for threads in [0, 2, 5, u32::MAX] {
        assert!(
            one == quantize(&values, spec, threads)?,
            "{threads} threads quantize otherwise"
        );
        assert!(
            back == dequantize::<f32>(&one, threads)?,
            "{threads} threads dequantize otherwise"
        );
    }
    Ok(())
}

#[test]
fn sizes_are_those_of_the_formats() -> nf4::Result<()> {
    let flat = quantize(&[1.0f32; 4096], Spec::new(64, 64).flat(), 0)?;
    assert_eq!((flat.bytes(), flat.bits_per_weight()), (2048 + 64 * 4, 4.5));
    let nested = quantize(&[1.0f32; 4096], Spec::new(64, 64), 0)?;
    assert_eq!(nested.bytes(), 2048 + 64 + 4 + 4);
    Ok(())
}
