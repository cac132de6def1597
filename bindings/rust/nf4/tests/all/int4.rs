//! Weights of integers against what nf4.h says, written out in Rust.

use super::common::{same, Number};
use super::int4_common::{
    any_int4_spec, any_int4_weight, code_place, decoded, scale_place, scale_value, store, v1_ones,
    zero_place,
};
use super::matmul::{numbers, product_is_close};
use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};
use nf4::{
    dequantize, dequantize_into, matmul, matmul_batch, matmul_into, quantize_int4,
    quantize_int4_into, ColumnsOf, DType, Int4Layout, Int4Parts, Int4PartsRef, Int4Ref, Int4Scheme,
    Int4Spec, Int4Tensor, Matrix, MatrixMut, Product, Result,
};
use proptest::prelude::*;

fn dequantizes<T: Number>(weight: &Int4Tensor, threads: u32) {
    let wanted: Vec<T> = decoded(weight).into_iter().map(T::of).collect();
    let out: Vec<T> = dequantize(weight, threads).expect("a weight that fits");
    let mut borrowed = vec![T::of(7.0); weight.elements()];
    dequantize_into(weight.view(), &mut borrowed, threads).expect("a weight that fits");
    assert_eq!(out.len(), wanted.len());
    for (i, want) in wanted.into_iter().enumerate() {
        let (a, b) = (out[i], borrowed[i]);
        assert!(
            same(a, want) && same(b, want),
            "element {i}: {a:?}, {b:?}; expected {want:?}"
        );
    }
}

fn multiplies<T: Number>(weight: &Int4Tensor, m: usize, gap: usize, epsilon: f64) {
    let shape = (weight.spec().rows, weight.spec().cols);
    product_is_close::<T>(weight, &decoded(weight), shape, (m, gap), epsilon);
}

/// The scale, the zero point and the codes of a group.
fn quantized_group(x: &[f32], scheme: Int4Scheme, dtype: DType) -> (u16, u32, Vec<u32>) {
    let finite = || x.iter().copied().filter(|x| x.is_finite());
    let (low, high) = finite().fold((0f32, 0f32), |(low, high), x| (low.min(x), high.max(x)));
    let exact = match scheme {
        Int4Scheme::Symmetric => 2.0 * high.max(-low) / 15.0,
        Int4Scheme::Asymmetric => (high - low) / 15.0,
    };
    let (rounded, largest) = match dtype {
        DType::Bf16 => (bf16::from_f32(exact).to_bits(), bf16::MAX.to_bits()),
        _ => (f16::from_f32(exact).to_bits(), f16::MAX.to_bits()),
    };
    let bits = rounded.clamp(1, largest);
    let scale = scale_value(bits, dtype);
    let nearest = |x: f32| x.round_ties_even().clamp(0.0, 15.0);
    let zero = match scheme {
        Int4Scheme::Symmetric => 8.0,
        Int4Scheme::Asymmetric => nearest(-low / scale),
    };
    let code = |x: &f32| match x.is_nan() {
        true => zero as u32,
        false => nearest((x / scale).round_ties_even() + zero) as u32,
    };
    (bits, zero as u32, x.iter().map(code).collect())
}

fn quantized(values: &[f32], spec: Int4Spec, scheme: Int4Scheme) -> Int4Tensor {
    let sizes = spec.sizes().expect("a spec in range");
    let group_size = spec.group_size.map_or(spec.cols, |size| size as usize);
    let stored = scheme == Int4Scheme::Asymmetric || spec.layout != Int4Layout::CompressedTensors;
    let mut parts = Int4Parts {
        packed: vec![0; sizes.packed],
        scales: vec![0; sizes.scales],
        zeros: stored.then(|| vec![0; sizes.zeros]),
        columns: ColumnsOf::InOrder,
    };
    for (n, g) in (0..spec.rows).flat_map(|n| (0..sizes.groups).map(move |g| (n, g))) {
        let group = &values[n * spec.cols + g * group_size..][..group_size];
        let (scale, zero, codes) = quantized_group(group, scheme, spec.scales_dtype);
        parts.scales[scale_place(&spec, sizes.groups, n, g)] = scale;
        if let Some(zeros) = &mut parts.zeros {
            let place = zero_place(&spec, sizes.groups, n, g);
            store(zeros, place, zero);
        }
        for (i, code) in codes.into_iter().enumerate() {
            store(
                &mut parts.packed,
                code_place(&spec, n, g * group_size + i),
                code,
            );
        }
    }
    for word in parts.zeros.iter_mut().flatten() {
        *word = word.wrapping_sub(v1_ones(&spec));
    }
    Int4Tensor::new(spec, parts).expect("parts that fit")
}

fn any_values() -> impl Strategy<Value = (Int4Spec, Vec<f32>)> {
    let value = prop_oneof![
        9 => -10.0f32..10.0,
        1 => any::<u32>().prop_map(f32::from_bits),
    ];
    any_int4_spec().prop_flat_map(move |spec| {
        let values = prop::collection::vec(value.clone(), spec.rows * spec.cols);
        values.prop_map(move |values| (spec, values))
    })
}

proptest! {
    #[test]
    fn dequantize_is_exact(weight in any_int4_weight(true), threads in 0u32..4) {
        dequantizes::<f32>(&weight, threads);
        dequantizes::<f16>(&weight, threads);
        dequantizes::<bf16>(&weight, threads);
    }

    #[test]
    fn products_are_close(weight in any_int4_weight(false), m in 0usize..5, gap in 0usize..9) {
        multiplies::<f32>(&weight, m, gap, f64::from(f32::EPSILON));
        multiplies::<f16>(&weight, m, gap, f64::from(f16::EPSILON));
        multiplies::<bf16>(&weight, m, gap, f64::from(bf16::EPSILON));
    }

    #[test]
    fn quantize_gives_these_bytes((spec, values) in any_values(), symmetric in any::<bool>()) {
        let scheme = if symmetric { Int4Scheme::Symmetric } else { Int4Scheme::Asymmetric };
        let ours = quantize_int4(&values, spec, scheme, 0).expect("a spec in range");
        prop_assert_eq!(ours, quantized(&values, spec, scheme));
    }

    #[test]
    fn reordered_weights_are_equal(weight in any_int4_weight(true)) {
        let ColumnsOf::GroupIndex(g_idx) = &weight.parts().columns else {
            return Ok(());
        };
        let sorted = weight.clone().reordered(0).expect("whole groups");
        let ColumnsOf::Permuted(columns) = &sorted.parts().columns else {
            panic!("expected a permutation, not {:?}", sorted.parts().columns);
        };
        if weight.elements() != 0 {
            let keys: Vec<_> = columns.iter().map(|k| (g_idx[*k as usize], *k)).collect();
            prop_assert!(keys.is_sorted());
        }
        let (ours, wanted) = (decoded(&sorted), decoded(&weight));
        prop_assert!(ours.into_iter().zip(wanted).all(|(a, b)| same(a, b)));
    }

    #[test]
    fn batches_have_the_bits_of_one_call_each(
        weights in prop::collection::vec(any_int4_weight(false), 0..4), m in 0usize..4,
    ) {
        let x: Vec<_> = weights.iter().map(|each| numbers(m * each.spec().cols, 0.7)).collect();
        let mut products = Vec::new();
        for (x, weight) in x.iter().zip(&weights) {
            let x = Matrix::<bf16>::new(x, m, weight.spec().cols).expect("values that fit");
            products.push(Product::new(x, weight));
        }
        let all = matmul_batch(&products, 0).expect("operands that fit");
        for (y, each) in all.iter().zip(&products) {
            let alone = matmul(each.x, each.weight, each.bias, 1).expect("operands that fit");
            prop_assert!(y.iter().zip(&alone).all(|(a, b)| same(*a, *b)));
        }
    }
}

/// As docs/rust.md does: the scales of a checkpoint are given without a copy.
#[test]
fn scales_are_cast_in_place() -> Result<()> {
    let scales = [f16::of(0.5), f16::of(2.0)];
    let parts = Int4PartsRef {
        packed: &[0x7654_3210; 2],
        scales: scales.reinterpret_cast(),
        zeros: Some(&[0x0000_0006]),
        columns: ColumnsOf::GroupIndex(&[0; 8]),
    };
    let spec = Int4Spec::new(Int4Layout::Gptq, 2, 8).group_size(None);
    let weight = Int4Ref::new(spec, parts)?;
    let y = matmul(Matrix::new(&[f16::ONE; 8], 1, 8)?, weight, None, 0)?;
    // The zero points are 7 and 1: the sums of q - z are -28 and 20.
    assert_eq!(y, [f16::of(-14.0), f16::of(40.0)]);
    Ok(())
}

#[test]
fn gaps_are_not_written() -> Result<()> {
    let spec = Int4Spec::new(Int4Layout::CompressedTensors, 3, 128);
    let weight = quantize_int4(
        &numbers::<f32>(3 * 128, 0.1),
        spec,
        Int4Scheme::Symmetric,
        0,
    )?;
    let (x, mut y) = (numbers::<f16>(2 * 128, 0.7), [f16::of(7.0); 8]);
    let x = Matrix::new(&x, 2, 128)?;
    matmul_into(
        x,
        &weight,
        None,
        &mut MatrixMut::with_stride(&mut y, 2, 3, 5)?,
        0,
    )?;
    let packed = matmul(x, &weight, None, 0)?;
    assert_eq!((&y[..3], &y[5..]), (&packed[..3], &packed[3..]));
    assert_eq!(y[3..5], [f16::of(7.0); 2]);
    Ok(())
}

#[test]
fn parts_survive_a_round_trip() -> Result<()> {
    let spec = Int4Spec::new(Int4Layout::Awq, 16, 128).group_size(Some(64));
    let weight = quantize_int4(&[0.25f32; 2048], spec, Int4Scheme::Asymmetric, 0)?;
    // Of 16 rows: 1024 bytes of codes, 2 scales of 2 bytes and 2 zero points of 4 bits each.
    assert_eq!(weight.bytes(), 1024 + 16 * 2 * 2 + 16 * 2 / 2);
    assert_eq!(weight.bits_per_weight(), 1104.0 * 8.0 / 2048.0);
    let view = Int4Ref::from(&weight);
    assert_eq!((view.spec(), view.elements()), (spec, 2048));
    let (spec, parts) = weight.clone().into_parts();
    assert_eq!(Int4Tensor::new(spec, parts), Ok(weight));
    Ok(())
}

#[test]
fn a_borrowed_weight_is_written() -> Result<()> {
    let spec = Int4Spec::new(Int4Layout::Awq, 16, 128);
    let (values, scheme) = (numbers::<f32>(16 * 128, 0.4), Int4Scheme::Asymmetric);
    let mut weight = Int4Tensor::zeros(spec, true)?;
    quantize_int4_into(&values, &mut weight.view_mut(), scheme, 0)?;
    assert_eq!(weight, quantize_int4(&values, spec, scheme, 0)?);
    Ok(())
}
