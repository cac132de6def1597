//! Several matmuls in one call: the bits of one call each, and what is refused.

use super::common::{any_weight, same, Number};
use half::bf16;
use nf4::{
    matmul, matmul_batch, matmul_batch_into, quantize, Error, Matrix, MatrixMut, Product,
    QuantizedTensor, Result, Spec,
};
use proptest::prelude::*;

/// Numbers between -1 and 1, from a formula.
fn numbers<T: Number>(count: usize, step: f32) -> Vec<T> {
    (0..count).map(|i| T::of((i as f32 * step).sin())).collect()
}

fn has_the_bits_of_one_call_each<T: Number>(weights: &[QuantizedTensor], m: usize, gap: usize) {
    let stride = |weight: &QuantizedTensor| weight.spec().cols + gap;
    let x: Vec<Vec<T>> = weights
        .iter()
        .map(|weight| numbers(m * stride(weight), 0.7))
        .collect();
    let bias: Vec<Vec<T>> = weights
        .iter()
        .map(|weight| numbers(weight.spec().rows, 0.3))
        .collect();
    let products: Vec<Product<'_, T>> = (0..weights.len())
        .map(|i| {
            let cols = weights[i].spec().cols;
            let x = Matrix::with_stride(&x[i], m, cols, stride(&weights[i]));
            Product {
                bias: (i % 2 == 0).then_some(&bias[i][..]),
                ..Product::new(x.expect("values that fit"), &weights[i])
            }
        })
        .collect();
    for threads in [0, 1, 3] {
        let all = matmul_batch(&products, threads).expect("operands that fit");
        assert_eq!(all.len(), products.len());
        for (y, each) in all.iter().zip(&products) {
            let alone = matmul(each.x, each.weight, each.bias, 1).expect("operands that fit");
            assert_eq!(y.len(), alone.len());
            assert!(y.iter().zip(&alone).all(|(a, b)| same(*a, *b)));
        }
    }
}

proptest! {
    #[test]
    fn batches_have_the_bits_of_one_call_each(
        weights in prop::collection::vec(any_weight(), 0..5), m in 0usize..5, gap in 0usize..9,
    ) {
        has_the_bits_of_one_call_each::<f32>(&weights, m, gap);
        has_the_bits_of_one_call_each::<bf16>(&weights, m, gap);
    }
}

#[test]
fn a_batch_is_written_between_gaps() -> Result<()> {
    let weight = quantize(&numbers::<f32>(5 * 96, 0.1), Spec::new(5, 96), 0)?;
    let (x, mut first, mut second) = (numbers::<f32>(2 * 96, 0.7), [7.0; 15], [7.0; 10]);
    let product = Product::new(Matrix::new(&x, 2, 96)?, &weight);
    let mut y = [
        MatrixMut::with_stride(&mut first, 2, 5, 8)?,
        MatrixMut::new(&mut second, 2, 5)?,
    ];
    matmul_batch_into(&[product, product], &mut y, 0)?;
    let alone = matmul(product.x, product.weight, None, 0)?;
    assert_eq!(second[..], alone);
    assert_eq!((&first[..5], &first[8..13]), (&alone[..5], &alone[5..]));
    assert!(first[5..8].iter().chain(&first[13..]).all(|x| *x == 7.0));
    Ok(())
}

#[test]
fn what_is_refused_of_a_batch() -> Result<()> {
    let weight = quantize(&[1.0f32; 3 * 64], Spec::new(3, 64), 0)?;
    let (x, bias, mut y) = ([1.0f32; 64], [1.0f32; 2], [5.0f32; 6]);
    let good = Product::new(Matrix::new(&x, 1, 64)?, &weight);
    let narrow = Product::new(Matrix::new(&x[..63], 1, 63)?, &weight);
    let biased = Product {
        bias: Some(&bias),
        ..good
    };
    let cases = [
        (
            vec![good, narrow],
            "product 1: x is of 1 x 63 elements; expected 1 x 64",
        ),
        (
            vec![biased, good],
            "product 0: bias has 2 elements; expected 3",
        ),
        (vec![good; 65], "count is 65; expected at most 64"),
    ];
    for (products, wanted) in cases {
        let error = matmul_batch(&products, 0).unwrap_err();
        assert_eq!(error, Error::InvalidArgument(wanted.to_owned()));
    }
    let (first, second) = y.split_at_mut(3);
    let mut outs = [MatrixMut::new(first, 1, 3)?, MatrixMut::new(second, 3, 1)?];
    for (products, wanted) in [
        (
            vec![good, good],
            "product 1: y is of 3 x 1 elements; expected 1 x 3",
        ),
        (vec![good], "y has 2 elements; expected 1"),
    ] {
        let error = matmul_batch_into(&products, &mut outs, 0).unwrap_err();
        assert_eq!(error, Error::InvalidArgument(wanted.to_owned()));
    }
    assert_eq!(y, [5.0; 6]);
    Ok(())
}
