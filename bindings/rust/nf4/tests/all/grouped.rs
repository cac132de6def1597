//! Products of experts: numbers, and what is refused.

use nf4::{
    dequantize, matmul_grouped, matmul_grouped_grad, matmul_grouped_grad_into, quantize,
    quantize_int4, ColumnsOf, Error, Grouped, Int4Layout, Int4PartsRef, Int4Scheme, Int4Spec,
    Int4Stack, Matrix, MatrixMut, QuantizedTensor, Result, Spec,
};

const EXPERTS: usize = 3;
const ROWS: usize = 10;
const COLS: usize = 64;
const TOKENS: usize = 4;

fn numbers(count: usize, seed: f32) -> Vec<f32> {
    (0..count).map(|i| (i as f32 * 0.37 + seed).sin()).collect()
}

fn weight() -> Result<QuantizedTensor> {
    let values = numbers(EXPERTS * ROWS * COLS, 1.0);
    quantize(&values, Spec::new(EXPERTS * ROWS, COLS), 0)
}

fn detail<T: std::fmt::Debug>(result: Result<T>) -> String {
    match result.unwrap_err() {
        Error::InvalidArgument(detail) => detail,
        other => panic!("{other}"),
    }
}

#[test]
fn the_rows_of_each_expert_are_multiplied_with_it() -> Result<()> {
    let (weight, x) = (weight()?, numbers(TOKENS * COLS, 2.0));
    let dense: Vec<f32> = dequantize(&weight, 0)?;
    let (bias, scales) = (numbers(EXPERTS * ROWS, 3.0), numbers(6, 4.0));
    let experts = [0, 0, 2, 2, 2];
    let index = [1, 3, 0, -1, 1, 2];
    let operands = Grouped {
        x_index: Some(&index),
        bias: Some(&bias),
        row_scale: Some(&scales),
        ..Grouped::new(Matrix::new(&x, TOKENS, COLS)?, &[2, 1, 5])
    };
    let y = matmul_grouped(&operands, &weight, 0)?;
    for (i, row) in y.chunks(ROWS).enumerate() {
        for (n, found) in row.iter().enumerate() {
            let Some(expert) = experts.get(i) else {
                assert_eq!(*found, 0.0);
                continue;
            };
            let at = expert * ROWS + n;
            let token = usize::try_from(index[i]).ok();
            let sum: f32 = token.map_or(0.0, |token| {
                (0..COLS)
                    .map(|k| x[token * COLS + k] * dense[at * COLS + k])
                    .sum()
            });
            let expected = scales[i] * (sum + bias[at]);
            assert!((found - expected).abs() < 1e-4, "{found} is not {expected}");
        }
    }
    assert_eq!(matmul_grouped(&operands, &weight, 2)?, y);
    Ok(())
}

#[test]
fn the_gradient_of_each_row_is_of_its_expert() -> Result<()> {
    let (weight, grad_y) = (weight()?, numbers(TOKENS * ROWS, 5.0));
    let dense: Vec<f32> = dequantize(&weight, 0)?;
    let (index, scales, experts) = ([3, 0, -1, 1], [0.5, 2.0, 1.0, -1.0], [0, 2, 2]);
    let operands = Grouped {
        x_index: Some(&index),
        row_scale: Some(&scales),
        ..Grouped::new(Matrix::new(&grad_y, TOKENS, ROWS)?, &[1, 1, 3])
    };
    let grad_x = matmul_grouped_grad(&operands, &weight, 0)?;
    for (i, row) in grad_x.chunks(COLS).enumerate() {
        for (k, found) in row.iter().enumerate() {
            let given = usize::try_from(index[i]).ok().zip(experts.get(i));
            let sum: f32 = given.map_or(0.0, |(token, expert)| {
                (0..ROWS)
                    .map(|n| grad_y[token * ROWS + n] * dense[(expert * ROWS + n) * COLS + k])
                    .sum()
            });
            assert!((found - scales[i] * sum).abs() < 1e-4, "{found}, {i}, {k}");
        }
    }
    let bias = Some(&[0.0f32; EXPERTS * ROWS][..]);
    assert_eq!(
        detail(matmul_grouped_grad(
            &Grouped { bias, ..operands },
            &weight,
            0
        )),
        "bias is not NULL; expected NULL in the gradient"
    );
    Ok(())
}

#[test]
fn experts_of_integers_are_multiplied() -> Result<()> {
    const OF_EXPERT: usize = 16;
    let x = numbers(TOKENS * COLS, 2.0);
    for layout in [
        Int4Layout::Gptq,
        Int4Layout::Awq,
        Int4Layout::CompressedTensors,
    ] {
        let spec = Int4Spec::new(layout, OF_EXPERT, COLS).group_size(Some(32));
        let (mut packed, mut scales, mut zeros, mut expected) = (vec![], vec![], vec![], vec![]);
        for expert in 0..EXPERTS {
            let values = numbers(OF_EXPERT * COLS, expert as f32);
            let one = quantize_int4(&values, spec, Int4Scheme::Asymmetric, 0)?;
            let row = &x[expert * COLS..][..COLS];
            expected.extend(nf4::matmul(Matrix::new(row, 1, COLS)?, &one, None, 0)?);
            let parts = one.into_parts().1;
            packed.extend(parts.packed);
            scales.extend(parts.scales);
            zeros.extend(parts.zeros.unwrap());
        }
        let parts = Int4PartsRef {
            packed: &packed,
            scales: &scales,
            zeros: Some(&zeros),
            columns: ColumnsOf::InOrder,
        };
        let stack = Int4Stack::new(spec, EXPERTS, parts)?;
        let operands = Grouped::new(Matrix::new(&x, TOKENS, COLS)?, &[1, 2, 3]);
        let y = matmul_grouped(&operands, stack, 0)?;
        for (found, wanted) in y.iter().zip(&expected) {
            assert!((found - wanted).abs() < 1e-4, "{found} is not {wanted}");
        }
        assert!(y[EXPERTS * OF_EXPERT..].iter().all(|y| *y == 0.0));
        let too_few = Grouped {
            ends: &[4],
            ..operands
        };
        assert_eq!(
            detail(matmul_grouped(&too_few, stack, 0)),
            "ends has 1 elements; expected 3"
        );
        let cut = Int4PartsRef {
            scales: &scales[1..],
            ..parts
        };
        assert_eq!(
            detail(Int4Stack::new(spec, EXPERTS, cut)),
            "scales has 95 elements; expected 96"
        );
        // A permutation of each expert's columns.
        let columns = [vec![0; COLS], (0..COLS as i32).collect()].concat();
        let twice = Int4PartsRef {
            columns: ColumnsOf::Permuted(&columns[..]),
            ..parts
        };
        assert_eq!(
            detail(Int4Stack::new(
                spec,
                2,
                Int4PartsRef {
                    packed: &packed[..packed.len() / 3 * 2],
                    scales: &scales[..64],
                    zeros: None,
                    ..twice
                }
            )),
            "permutation has 0 twice"
        );
    }
    Ok(())
}

#[test]
fn what_does_not_fit_is_named() -> Result<()> {
    let (weight, x) = (weight()?, numbers(TOKENS * COLS, 2.0));
    let right = Grouped::new(Matrix::new(&x, TOKENS, COLS)?, &[1, 2, 4]);
    let with = |operands: Grouped<'_, f32>| detail(matmul_grouped(&operands, &weight, 0));
    let narrow = Matrix::new(&x, TOKENS * 2, COLS / 2)?;
    assert_eq!(
        with(Grouped { x: narrow, ..right }),
        "x is of 8 x 32 elements; expected 8 x 64"
    );
    let ends = &[1, 2, 3, 4];
    assert_eq!(
        with(Grouped { ends, ..right }),
        "experts is 4; expected a divisor of the weight's 30 rows"
    );
    let bias = Some(&[0.0f32; 3][..]);
    assert_eq!(
        with(Grouped { bias, ..right }),
        "bias has 3 elements; expected 30"
    );
    let row_scale = Some(&[0.0f32; 3][..]);
    assert_eq!(
        with(Grouped { row_scale, ..right }),
        "row_scale has 3 elements; expected 4"
    );
    assert_eq!(
        detail(matmul_grouped_grad(&right, &weight, 0)),
        "grad_y is of 4 x 64 elements; expected 4 x 10"
    );
    let grad_y = Grouped::new(Matrix::new(&x[..TOKENS * ROWS], TOKENS, ROWS)?, right.ends);
    let mut grad_x = vec![0.0; COLS];
    let grad_x = &mut MatrixMut::new(&mut grad_x[..], 1, COLS)?;
    assert_eq!(
        detail(matmul_grouped_grad_into(&grad_y, &weight, grad_x, 0)),
        "grad_x is of 1 x 64 elements; expected 4 x 64"
    );
    let ends = &[];
    assert_eq!(
        with(Grouped { ends, ..right }),
        "experts is 0, but the weight has 30 rows; expected none"
    );
    Ok(())
}
