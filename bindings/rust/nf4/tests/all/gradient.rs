//! The gradient of a matmul and adapters: numbers, and what is refused.

use nf4::{
    dequantize, matmul_grad, matmul_grad_into, matmul_grad_lora, matmul_lora, quantize, Error,
    Lora, Matrix, MatrixMut, QuantizedTensor, Result, Spec,
};

const ROWS: usize = 20;
const COLS: usize = 96;
const M: usize = 3;
const RANK: usize = 4;

fn numbers(count: usize, seed: f32) -> Vec<f32> {
    (0..count).map(|i| (i as f32 * 0.37 + seed).sin()).collect()
}

fn weight() -> Result<QuantizedTensor> {
    quantize(&numbers(ROWS * COLS, 1.0), Spec::new(ROWS, COLS), 0)
}

/// `x` times what is at (i, j) of a matrix of `inner` rows and `columns` columns.
fn multiplied(
    x: &[f32],
    inner: usize,
    columns: usize,
    at: impl Fn(usize, usize) -> f32,
) -> Vec<f32> {
    let row = |m: usize, j| (0..inner).map(|i| x[m * inner + i] * at(i, j)).sum();
    (0..x.len() / inner)
        .flat_map(|m| (0..columns).map(move |j| (m, j)))
        .map(|(m, j)| row(m, j))
        .collect()
}

fn check_close(found: &[f32], expected: &[f32]) {
    assert_eq!(found.len(), expected.len());
    for (one, other) in found.iter().zip(expected) {
        assert!((one - other).abs() < 1e-4, "{one} is not {other}");
    }
}

#[test]
fn the_gradient_is_that_of_a_dense_weight() -> Result<()> {
    let (weight, grad_y) = (weight()?, numbers(M * ROWS, 2.0));
    let dense: Vec<f32> = dequantize(&weight, 0)?;
    let found = matmul_grad(Matrix::new(&grad_y, M, ROWS)?, &weight, 0)?;
    check_close(
        &found,
        &multiplied(&grad_y, ROWS, COLS, |i, j| dense[i * COLS + j]),
    );
    let mut with_gaps = vec![7.0f32; M * (COLS + 2)];
    let mut to = MatrixMut::with_stride(&mut with_gaps, M, COLS, COLS + 2)?;
    matmul_grad_into(Matrix::new(&grad_y, M, ROWS)?, &weight, &mut to, 2)?;
    for (row, expected) in with_gaps.chunks(COLS + 2).zip(found.chunks(COLS)) {
        assert_eq!((&row[..COLS], &row[COLS..]), (expected, &[7.0, 7.0][..]));
    }
    Ok(())
}

#[test]
fn adapters_are_added_to_the_weight() -> Result<()> {
    let weight = weight()?;
    let dense: Vec<f32> = dequantize(&weight, 0)?;
    let (a, b) = (numbers(RANK * COLS, 3.0), numbers(ROWS * RANK, 4.0));
    let lora = Lora {
        a: Matrix::new(&a, RANK, COLS)?,
        b: Matrix::new(&b, ROWS, RANK)?,
        scale: 0.5,
    };
    let whole = |n: usize, k: usize| {
        let added: f32 = (0..RANK).map(|r| b[n * RANK + r] * a[r * COLS + k]).sum();
        dense[n * COLS + k] + 0.5 * added
    };
    let (x, grad_y) = (numbers(M * COLS, 5.0), numbers(M * ROWS, 6.0));
    let (y, product) = matmul_lora(Matrix::new(&x, M, COLS)?, &weight, None, &lora, 0)?;
    check_close(&y, &multiplied(&x, COLS, ROWS, |i, j| whole(j, i)));
    check_close(
        &product,
        &multiplied(&x, COLS, RANK, |i, r| a[r * COLS + i]),
    );
    let (grad_x, product) = matmul_grad_lora(Matrix::new(&grad_y, M, ROWS)?, &weight, &lora, 0)?;
    check_close(&grad_x, &multiplied(&grad_y, ROWS, COLS, whole));
    check_close(
        &product,
        &multiplied(&grad_y, ROWS, RANK, |i, r| b[i * RANK + r]),
    );
    Ok(())
}

#[test]
fn a_weight_without_elements_has_gradients_of_zero() -> Result<()> {
    let weight = quantize(&[0.0f32; 0], Spec::new(0, 8), 0)?;
    let a = [1.0f32; 16];
    let lora = Lora {
        a: Matrix::new(&a, 2, 8)?,
        b: Matrix::new(&[], 0, 2)?,
        scale: 1.0,
    };
    let (grad_x, product) = matmul_grad_lora(Matrix::new(&[], 3, 0)?, &weight, &lora, 0)?;
    assert_eq!((grad_x, product), (vec![0.0f32; 24], vec![0.0f32; 6]));
    Ok(())
}

fn detail<T: std::fmt::Debug>(result: Result<T>) -> String {
    match result.unwrap_err() {
        Error::InvalidArgument(detail) => detail,
        other => panic!("{other}"),
    }
}

#[test]
fn what_does_not_fit_is_named() -> Result<()> {
    let weight = weight()?;
    let (a, b) = (numbers(RANK * COLS, 3.0), numbers(ROWS * RANK, 4.0));
    let lora = |rank: usize, rows: usize, scale: f32| -> Result<Lora<'_, f32>> {
        Ok(Lora {
            a: Matrix::new(&a[..rank * COLS], rank, COLS)?,
            b: Matrix::new(&b[..rows * RANK], rows, RANK)?,
            scale,
        })
    };
    let x = numbers(COLS, 1.0);
    let x = Matrix::new(&x, 1, COLS)?;
    let with = |lora: Lora<'_, f32>| detail(matmul_lora(x, &weight, None, &lora, 0));
    assert_eq!(
        detail(matmul_grad(x, &weight, 0)),
        "grad_y is of 1 x 96 elements; expected 1 x 20"
    );
    assert_eq!(
        with(lora(RANK, ROWS - 1, 1.0)?),
        "b is of 19 x 4 elements; expected 20 x 4"
    );
    assert_eq!(
        with(lora(RANK - 1, ROWS, 1.0)?),
        "b is of 20 x 4 elements; expected 20 x 3"
    );
    assert_eq!(
        with(lora(RANK, ROWS, f32::NAN)?),
        "lora.scale is nan; expected a finite number"
    );

    Ok(())
}

#[test]
fn workspace_grows_with_the_rank() -> Result<()> {
    let spec = Spec::new(ROWS, COLS);
    assert_eq!(spec.matmul_grad_workspace_bytes::<f32>(0, 0)?, 0);
    let sizes = [1, 17, 128].map(|rank| spec.matmul_lora_workspace_bytes::<half::bf16>(9, rank));
    let [one, more, most] = sizes.map(|bytes| bytes.expect("a rank that is right"));
    assert!(0 < one && one < more && more < most);
    let gradient = spec.matmul_grad_workspace_bytes::<half::bf16>(9, 128)?;
    assert!(gradient > spec.matmul_grad_workspace_bytes::<half::bf16>(9, 0)?);
    let detail = detail(spec.matmul_lora_workspace_bytes::<f32>(9, 129));
    assert_eq!(detail, "lora.rank is 129; expected 1 to 128");
    Ok(())
}
