//! Dequantize, bit for bit, against the arithmetic of nf4.h written out in Rust.

use super::common::{any_weight, same, Number};
use half::{bf16, f16};
use nf4::{codebook, dequantize, dequantize_into, QuantizedRef, QuantizedTensor, Scales};
use proptest::prelude::*;

fn scale(weight: &QuantizedTensor, block: usize) -> f32 {
    match weight.scales() {
        Scales::Flat(absmax) => absmax[block],
        Scales::Nested {
            codes,
            absmax,
            code,
            offset,
        } => {
            let nested_block = block / weight.spec().nested_blocksize as usize;
            code[usize::from(codes[block])] * absmax[nested_block] + offset
        }
        other => panic!("the scales are {other:?}; expected those of NF4 or FP4"),
    }
}

fn expected<T: Number>(weight: &QuantizedTensor) -> Vec<T> {
    let spec = weight.spec();
    let entries = weight.codebook().unwrap_or(codebook(spec.format));
    let value = |i: usize| {
        let pair = weight.packed()[i / 2];
        let code = if i.is_multiple_of(2) {
            pair >> 4
        } else {
            pair & 15
        };
        T::of(entries[usize::from(code)] * scale(weight, i / spec.blocksize as usize))
    };
    (0..weight.elements()).map(value).collect()
}

fn agrees<T: Number>(weight: &QuantizedTensor, threads: u32) {
    let expected = expected::<T>(weight);
    let out: Vec<T> = dequantize(weight, threads).expect("a weight that fits");
    let mut borrowed = vec![T::of(7.0); weight.elements()];
    dequantize_into(weight, &mut borrowed, threads).expect("a weight that fits");
    assert_eq!(out.len(), expected.len());
    for (i, want) in expected.into_iter().enumerate() {
        assert!(
            same(out[i], want),
            "element {i} is {:?}; expected {want:?}",
            out[i]
        );
        assert!(
            same(borrowed[i], want),
            "element {i} is {:?}; expected {want:?}",
            borrowed[i]
        );
    }
}

proptest! {
    #[test]
    fn fp32_is_exact(weight in any_weight(), threads in 0u32..4) {
        agrees::<f32>(&weight, threads);
    }

    #[test]
    fn fp16_is_exact(weight in any_weight(), threads in 0u32..4) {
        agrees::<f16>(&weight, threads);
    }

    #[test]
    fn bf16_is_exact(weight in any_weight(), threads in 0u32..4) {
        agrees::<bf16>(&weight, threads);
    }
}

/// A caller's own type and generic code.
#[test]
fn whatever_converts_is_a_weight() {
    struct Layer(QuantizedTensor);
    impl<'a> From<&'a Layer> for QuantizedRef<'a> {
        fn from(layer: &'a Layer) -> Self {
            layer.0.view()
        }
    }
    fn first<'a>(weight: impl Into<QuantizedRef<'a>>) -> f32 {
        let weight: QuantizedRef<'a> = weight.into();
        dequantize::<f32>(weight, 0).expect("a weight that fits")[0]
    }
    let weight = nf4::quantize(&[0.25f32; 150], nf4::Spec::new(3, 50).flat(), 0);
    let layer = Layer(weight.expect("a spec in range"));
    assert_eq!((first(&layer), first(&layer.0)), (0.25, 0.25));
    let view = QuantizedRef::from(&layer);
    assert_eq!(dequantize::<f16>(view, 0).map(|out| out.len()), Ok(150));
}

#[test]
fn parts_survive_a_round_trip() {
    let spec = nf4::Spec::new(3, 50).blocksize(32);
    let weight = nf4::quantize(&[0.25f32; 150], spec, 0).expect("a spec in range");
    let (spec, packed, scales, codebook) = weight.clone().into_parts();
    let again = QuantizedTensor::new(spec, packed, scales, codebook);
    assert_eq!(again, Ok(weight));
}
