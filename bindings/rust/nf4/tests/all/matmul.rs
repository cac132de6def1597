//! Matmul against binary64, and what must not change its bits.

use super::common::{any_values, same, Number};
use half::{bf16, f16};
use nf4::{
    dequantize, matmul, matmul_into, quantize, Error, Host, Matrix, MatrixMut, Result, Spec, Weight,
};
use proptest::prelude::*;

/// Numbers between -1 and 1, from a formula.
pub fn numbers<T: Number>(count: usize, step: f32) -> Vec<T> {
    (0..count).map(|i| T::of((i as f32 * step).sin())).collect()
}

/// y = x W^T + bias in binary64, and how far a y may be from it: a weight rounded to the type of
/// y, a sum in binary32, one rounding to that type, and for 16 bits three factors rounded to 11.
fn expected(x: &[f64], weight: &[f32], bias: f64, epsilon: f64) -> (f64, f64) {
    let products = x.iter().zip(weight).map(|(x, w)| x * f64::from(*w));
    let y = products.clone().sum::<f64>() + bias;
    let magnitude = products.map(f64::abs).sum::<f64>() + bias.abs();
    let sum = (x.len() + 3) as f64 * f64::powi(2.0, -24);
    let in_16_bits = epsilon > f64::from(f32::EPSILON);
    let factors = if in_16_bits {
        3.0 * f64::powi(2.0, -11)
    } else {
        0.0
    };
    let relative = factors + epsilon / 2.0 + sum;
    (y, magnitude * relative + y.abs() * epsilon + 1e-7)
}

fn is_close<T: Number>(spec: Spec, values: &[f32], m: usize, gap: usize, epsilon: f64) {
    let weight = quantize(values, spec, 0).expect("a spec in range");
    let dense: Vec<f32> = dequantize(&weight, 0).expect("a weight that fits");
    product_is_close::<T>(&weight, &dense, (spec.rows, spec.cols), (m, gap), epsilon);
}

/// The product of a weight, which is `dense` exactly, with m rows of x that have gaps.
pub fn product_is_close<T: Number>(
    weight: impl Weight<Memory = Host>,
    dense: &[f32],
    (rows, cols): (usize, usize),
    (m, gap): (usize, usize),
    epsilon: f64,
) {
    let stride = cols + gap;
    let x = numbers::<T>(m * stride, 0.7);
    let bias = numbers::<T>(rows, 0.3);
    let view = Matrix::with_stride(&x, m, cols, stride).expect("values that fit");
    let y = matmul(view, weight, Some(&bias), 0).expect("operands that fit");
    assert_eq!(y.len(), m * rows);
    for (i, got) in y.iter().enumerate() {
        let (row, column) = (i / rows, i % rows);
        let x: Vec<f64> = x[row * stride..][..cols]
            .iter()
            .map(|each| f64::from(each.get()))
            .collect();
        let w = &dense[column * cols..][..cols];
        let (wanted, allowed) = expected(&x, w, f64::from(bias[column].get()), epsilon);
        let error = (f64::from(got.get()) - wanted).abs();
        assert!(
            error <= allowed,
            "y[{row}, {column}] is off by {error} > {allowed}"
        );
    }
}

proptest! {
    #[test]
    fn fp32_is_close((spec, values) in any_values(), m in 0usize..6, gap in 0usize..20) {
        is_close::<f32>(spec, &values, m, gap, f64::from(f32::EPSILON));
    }

    #[test]
    fn fp16_is_close((spec, values) in any_values(), m in 0usize..6, gap in 0usize..20) {
        let small: Vec<f32> = values.iter().map(|x| x * 1e-2).collect();
        is_close::<f16>(spec, &small, m, gap, f64::from(f16::EPSILON));
    }

    #[test]
    fn bf16_is_close((spec, values) in any_values(), m in 0usize..6, gap in 0usize..20) {
        is_close::<bf16>(spec, &values, m, gap, f64::from(bf16::EPSILON));
    }
}

#[test]
fn gaps_are_neither_read_nor_written() -> Result<()> {
    let spec = Spec::new(5, 96);
    let weight = quantize(&numbers::<f32>(480, 0.1), spec, 0)?;
    let plain = numbers::<bf16>(3 * 96, 0.7);
    let wanted = matmul(Matrix::new(&plain, 3, 96)?, &weight, None, 0)?;
    for gap in [0, 1, 7] {
        let mut x = vec![bf16::NAN; 3 * (96 + gap)];
        for (wide, row) in x.chunks_mut(96 + gap).zip(plain.chunks(96)) {
            wide[..96].copy_from_slice(row);
        }
        // The gap after the last row may be there or not.
        for length in [3 * (5 + gap), 3 * (5 + gap) - gap] {
            let mut y = vec![bf16::of(7.0); length];
            let x = Matrix::with_stride(&x, 3, 96, 96 + gap)?;
            let mut out = MatrixMut::with_stride(&mut y, 3, 5, 5 + gap)?;
            matmul_into(x, &weight, None, &mut out, 0)?;
            for (wide, row) in y.chunks(5 + gap).zip(wanted.chunks(5)) {
                assert!(row.iter().zip(wide).all(|(a, b)| same(*a, *b)));
                assert!(wide[5..].iter().all(|each| each.get() == 7.0));
            }
        }
    }
    Ok(())
}

#[test]
fn the_number_of_threads_changes_nothing() -> Result<()> {
    let weight = quantize(&numbers::<f32>(700 * 129, 0.37), Spec::new(700, 129), 0)?;
    let x = numbers::<f32>(7 * 129, 0.7);
    let x = Matrix::new(&x, 7, 129)?;
    let one = matmul(x, &weight, None, 1)?;
    for threads in [0, 2, 5, u32::MAX] {
        assert!(
            one == matmul(x, &weight, None, threads)?,
            "{threads} threads multiply otherwise"
        );
    }
    Ok(())
}

#[test]
fn nothing_to_multiply() -> Result<()> {
    let bias = [1.0f32, 2.0, 3.0];
    let no_cols = quantize::<f32>(&[], Spec::new(3, 0), 0)?;
    let x = Matrix::<f32>::new(&[], 2, 0)?;
    assert_eq!(matmul(x, &no_cols, None, 0)?, [0.0; 6]);
    assert_eq!(
        matmul(x, &no_cols, Some(&bias), 0)?,
        [bias, bias].as_flattened()
    );
    let no_rows = quantize::<f32>(&[], Spec::new(0, 64), 0)?;
    assert!(matmul(Matrix::new(&[0.0f32; 64], 1, 64)?, &no_rows, None, 0)?.is_empty());
    let weight = quantize(&[1.0f32; 3 * 64], Spec::new(3, 64), 0)?;
    assert!(matmul(Matrix::<f32>::new(&[], 0, 64)?, &weight, Some(&bias), 0)?.is_empty());
    Ok(())
}

fn detail<T: std::fmt::Debug>(result: Result<T>) -> String {
    match result {
        Err(Error::InvalidArgument(detail)) => detail,
        other => panic!("expected InvalidArgument, not {other:?}"),
    }
}

#[test]
fn wrong_matrices() {
    let huge = 1usize << 40;
    let cases = [
        ((5, 2, 2, 2), "values has 5 elements; expected 4"),
        ((3, 2, 2, 2), "values has 3 elements; expected 4"),
        ((4, 2, 2, 3), "values has 4 elements; expected 5 to 6"),
        ((7, 2, 2, 3), "values has 7 elements; expected 5 to 6"),
        ((1, 0, 2, 3), "values has 1 elements; expected 0"),
        ((4, 2, 2, 1), "stride is 1; expected at least 2"),
        (
            (4, huge, huge, huge),
            "rows * stride is 1099511627776 * 1099511627776; expected what fits usize",
        ),
    ];
    for ((length, rows, cols, stride), wanted) in cases {
        let mut values = vec![0.0f32; length];
        let read = Matrix::with_stride(&values, rows, cols, stride).map(|_| ());
        let written = MatrixMut::with_stride(&mut values, rows, cols, stride).map(|_| ());
        assert_eq!(read, written);
        assert_eq!(detail(read), wanted);
    }
}

#[test]
fn operands_that_do_not_fit() -> Result<()> {
    let weight = quantize(&[1.0f32; 3 * 64], Spec::new(3, 64), 0)?;
    let (x, mut y) = ([1.0f32; 128], [5.0f32; 6]);
    let fits = Matrix::new(&x, 2, 64)?;
    let mut out = MatrixMut::new(&mut y, 2, 3)?;
    let narrow = Matrix::new(&x[..126], 2, 63)?;
    let wanted = "x is of 2 x 63 elements; expected 2 x 64";
    assert_eq!(detail(matmul(narrow, &weight, None, 0)), wanted);
    assert_eq!(
        detail(matmul_into(narrow, &weight, None, &mut out, 0)),
        wanted
    );
    let wanted = "bias has 2 elements; expected 3";
    let bias = Some(&[1.0f32; 2][..]);
    assert_eq!(detail(matmul(fits, &weight, bias, 0)), wanted);
    assert_eq!(
        detail(matmul_into(fits, &weight, bias, &mut out, 0)),
        wanted
    );
    let one_row = Matrix::new(&x[..64], 1, 64)?;
    assert_eq!(
        detail(matmul_into(one_row, &weight, None, &mut out, 0)),
        "y is of 2 x 3 elements; expected 1 x 3"
    );
    let mut turned = MatrixMut::new(&mut y, 3, 2)?;
    assert_eq!(
        detail(matmul_into(fits, &weight, None, &mut turned, 0)),
        "y is of 3 x 2 elements; expected 2 x 3"
    );
    assert_eq!(y, [5.0; 6]);
    Ok(())
}

/// No memory has what this asks for.
#[test]
fn a_product_that_is_too_large() -> Result<()> {
    let weight = quantize::<f32>(&[], Spec::new(1 << 59, 0), 0)?;
    let rows = |m| Matrix::<f32>::new(&[], m, 0).and_then(|x| matmul(x, &weight, None, 0));
    assert!(detail(rows(1)).starts_with("y has 576460752303423488 elements: "));
    assert_eq!(
        detail(rows(64)),
        "m * rows is 64 * 576460752303423488; expected what fits usize"
    );
    Ok(())
}

#[test]
fn workspaces_are_asked_for_in_the_same_words() -> Result<()> {
    let spec = Spec::new(8, 64);
    assert_eq!(spec.matmul_workspace_bytes::<bf16>(0)?, 0);
    assert!(detail(spec.blocksize(33).matmul_workspace_bytes::<f16>(1)).starts_with("blocksize"));
    assert!(detail(spec.matmul_workspace_bytes::<f16>(usize::MAX)).starts_with("m is 184467440737"));
    assert!(detail(spec.matmul_workspace_bytes::<f16>(1 << 60)).starts_with("m * x_stride is "));
    Ok(())
}
