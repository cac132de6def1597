//! Products of experts: numbers, and what is refused.

use half::bf16;
use nf4::device::{
    matmul_grouped_launch, DeviceGrouped, DevicePtr, DeviceScales, DeviceTensor, Stream,
};
use nf4::{
    dequantize, matmul_grouped, quantize, Error, Grouped, Matrix, QuantizedTensor, Result, Spec,
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
    let ends = &[];
    assert_eq!(
        with(Grouped { ends, ..right }),
        "experts is 0, but the weight has 30 rows; expected none"
    );
    Ok(())
}

#[test]
fn a_launch_is_checked_as_far_as_a_host_can() -> Result<()> {
    /// Never followed: either a check fails, or there is no GPU.
    fn address<T>(n: u64) -> DevicePtr<T> {
        DevicePtr::from_address(n << 20)
    }
    let weight = DeviceTensor {
        spec: Spec::new(EXPERTS * ROWS, COLS).flat(),
        packed: address(1),
        scales: DeviceScales::Flat(address(2)),
        codebook: None,
    };
    let right = DeviceGrouped::<bf16> {
        experts: EXPERTS,
        m: 6,
        x: address(3),
        x_stride: COLS,
        x_rows: TOKENS,
        y: address(4),
        y_stride: ROWS,
        ends: address(5),
        x_index: Some(address(6)),
        bias: Some(address(7)),
        bias_stride: ROWS,
        row_scale: Some(address(8)),
    };
    let launch = |operands: DeviceGrouped<bf16>| {
        let bytes = weight
            .spec
            .matmul_grouped_workspace_bytes::<bf16>(EXPERTS, operands.m)?;
        // SAFETY: as address() says.
        unsafe {
            matmul_grouped_launch(
                &weight,
                &operands,
                address(9),
                bytes,
                Stream::LEGACY_DEFAULT,
            )
        }
    };
    let without = DeviceGrouped {
        x_index: None,
        ..right
    };
    assert_eq!(
        detail(launch(without)),
        "x_rows is 4; expected at least m, 6, without x_index"
    );
    let overlapping = DeviceGrouped {
        ends: address(4),
        ..right
    };
    assert_eq!(detail(launch(overlapping)), "ends overlaps y");
    assert!(launch(DeviceGrouped { m: 0, ..right }).is_ok());
    Ok(())
}
