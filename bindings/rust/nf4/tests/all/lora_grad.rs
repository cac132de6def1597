//! The gradients of an adapter's matrices: numbers against binary64, and what is refused.

use half::{bf16, f16};
use nf4::{lora_grad, lora_grad_into, Error, LoraGrad, Matrix, MatrixMut, Result};

use super::common::{same, Number};
use super::matmul::numbers;

pub const M: usize = 37;
pub const ROWS: usize = 20;
pub const COLS: usize = 97;
pub const RANK: usize = 5;
pub const SCALE: f32 = 0.75;

/// Operands of rows that are `gap` elements apart.
pub struct Operands<T> {
    gap: usize,
    pub x: Vec<T>,
    pub grad_y: Vec<T>,
    pub p: Vec<T>,
    pub q: Vec<T>,
}

impl<T: Number> Operands<T> {
    pub fn new(gap: usize) -> Self {
        Operands {
            gap,
            x: numbers(M * (COLS + gap), 0.37),
            grad_y: numbers(M * (ROWS + gap), 0.53),
            p: numbers(M * RANK, 0.71),
            q: numbers(M * RANK, 0.91),
        }
    }

    fn view(&self) -> Result<LoraGrad<'_, T>> {
        Ok(LoraGrad {
            rank: RANK,
            scale: SCALE,
            x: Matrix::with_stride(&self.x, M, COLS, COLS + self.gap)?,
            grad_y: Matrix::with_stride(&self.grad_y, M, ROWS, ROWS + self.gap)?,
            p: &self.p,
            q: &self.q,
        })
    }

    /// Element (i, j) of the gradient of A, and the sum of its terms' magnitudes.
    pub fn of_a(&self, i: usize, j: usize) -> (f64, f64) {
        scaled_sum(&self.q, RANK, i, &self.x, COLS + self.gap, j)
    }

    /// The same of B.
    pub fn of_b(&self, i: usize, j: usize) -> (f64, f64) {
        scaled_sum(&self.grad_y, ROWS + self.gap, i, &self.p, RANK, j)
    }
}

/// `SCALE` times column i of one matrix times column j of another, which have `M` rows.
fn scaled_sum<T: Number>(
    left: &[T],
    left_stride: usize,
    i: usize,
    right: &[T],
    right_stride: usize,
    j: usize,
) -> (f64, f64) {
    let at = |values: &[T], index: usize| f64::from(values[index].get());
    let term = |m| at(left, m * left_stride + i) * at(right, m * right_stride + j);
    let scaled = |sum: f64| f64::from(SCALE) * sum;
    let magnitude = (0..M).map(|m| term(m).abs()).sum();
    (scaled((0..M).map(term).sum()), scaled(magnitude))
}

/// `found` has `cols` columns. A sum in binary32, the scale, and one rounding to `G`.
pub fn check_close<G: Number>(
    found: &[G],
    cols: usize,
    epsilon: f64,
    expected: impl Fn(usize, usize) -> (f64, f64),
) {
    for (index, found) in found.iter().enumerate() {
        let (value, magnitude) = expected(index / cols, index % cols);
        let allowed = magnitude * (M + 1) as f64 * f64::powi(2.0, -24) + value.abs() * epsilon;
        let error = (f64::from(found.get()) - value).abs();
        assert!(
            error <= allowed,
            "element {index} is {found:?}, not {value}"
        );
    }
}

fn is_close<T: Number, G: Number>(gap: usize, epsilon: f64) -> Result<()> {
    let operands = Operands::<T>::new(gap);
    let (grad_a, grad_b) = lora_grad::<T, G>(&operands.view()?, 0)?;
    assert_eq!((grad_a.len(), grad_b.len()), (RANK * COLS, ROWS * RANK));
    check_close(&grad_a, COLS, epsilon, |i, j| operands.of_a(i, j));
    check_close(&grad_b, RANK, epsilon, |i, j| operands.of_b(i, j));
    Ok(())
}

#[test]
fn gradients_are_those_of_binary64() -> Result<()> {
    for gap in [0, 3] {
        is_close::<f32, f32>(gap, f64::powi(2.0, -24))?;
        is_close::<f16, f32>(gap, f64::powi(2.0, -24))?;
        is_close::<bf16, f32>(gap, f64::powi(2.0, -24))?;
        is_close::<f16, f16>(gap, f64::powi(2.0, -11))?;
        is_close::<bf16, bf16>(gap, f64::powi(2.0, -8))?;
    }
    Ok(())
}

fn same_bits<T: Number>(ours: &[T], wanted: &[T]) {
    assert_eq!(ours.len(), wanted.len());
    assert!(ours.iter().zip(wanted).all(|(a, b)| same(*a, *b)));
}

#[test]
fn the_number_of_threads_changes_no_bit() -> Result<()> {
    // Enough products for several threads.
    let (m, columns, rank) = (64, 2048, 32);
    let wide: Vec<bf16> = numbers(m * columns, 0.37);
    let narrow: Vec<bf16> = numbers(m * rank, 0.71);
    let operands = LoraGrad {
        rank,
        scale: SCALE,
        x: Matrix::new(&wide, m, columns)?,
        grad_y: Matrix::new(&wide, m, columns)?,
        p: &narrow,
        q: &narrow,
    };
    let (grad_a, grad_b) = lora_grad::<_, f32>(&operands, 1)?;
    for threads in [2, 7] {
        let (other_a, other_b) = lora_grad::<_, f32>(&operands, threads)?;
        same_bits(&grad_a, &other_a);
        same_bits(&grad_b, &other_b);
    }
    Ok(())
}

/// Each gradient alone, into rows with gaps, which stay; what it is not made of is not there.
#[test]
fn one_gradient_needs_its_own_operands_alone() -> Result<()> {
    let operands = Operands::<f16>::new(0);
    let all = operands.view()?;
    let (grad_a, grad_b) = lora_grad::<_, f32>(&all, 0)?;
    let none = Matrix::new(&[], 0, 0)?;
    let of_a = LoraGrad {
        grad_y: none,
        p: &[],
        ..all
    };
    let of_b = LoraGrad {
        x: none,
        q: &[],
        ..all
    };

    let (mut to_a, mut to_b) = ([7.0; RANK * (COLS + 2)], [7.0; ROWS * (RANK + 2)]);
    let mut rows_of_a = MatrixMut::with_stride(&mut to_a, RANK, COLS, COLS + 2)?;
    lora_grad_into(&of_a, Some(&mut rows_of_a), None, 0)?;
    let mut rows_of_b = MatrixMut::with_stride(&mut to_b, ROWS, RANK, RANK + 2)?;
    lora_grad_into(&of_b, None, Some(&mut rows_of_b), 0)?;
    for (written, expected, cols) in [(&to_a[..], grad_a, COLS), (&to_b[..], grad_b, RANK)] {
        for (row, expected) in written.chunks(cols + 2).zip(expected.chunks(cols)) {
            same_bits(&row[..cols], expected);
            assert_eq!(row[cols..], [7.0, 7.0]);
        }
    }
    lora_grad_into::<_, f32>(&all, None, None, 0)
}

#[test]
fn without_rows_of_x_the_gradients_are_zero() -> Result<()> {
    let operands = LoraGrad::<bf16> {
        rank: 2,
        scale: 1.0,
        x: Matrix::new(&[], 0, 3)?,
        grad_y: Matrix::new(&[], 0, 4)?,
        p: &[],
        q: &[],
    };
    assert_eq!(lora_grad(&operands, 0)?, (vec![0.0f32; 6], vec![0.0; 8]));
    let no_columns = LoraGrad {
        x: Matrix::new(&[], 0, 0)?,
        ..operands
    };
    assert_eq!(lora_grad(&no_columns, 0)?, (vec![], vec![0.0f32; 8]));
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
    let operands = Operands::<f32>::new(0);
    let good = operands.view()?;
    let refused = |operands: LoraGrad<'_, f32>| detail(lora_grad::<_, f32>(&operands, 0));
    let rows = Matrix::new(&operands.grad_y[ROWS..], M - 1, ROWS)?;
    assert_eq!(
        refused(LoraGrad {
            grad_y: rows,
            ..good
        }),
        "grad_y is of 36 x 20 elements; expected 37 x 20"
    );
    assert_eq!(
        refused(LoraGrad {
            p: &operands.p[1..],
            ..good
        }),
        "p has 184 elements; expected 185"
    );
    assert_eq!(
        refused(LoraGrad {
            q: &operands.q[1..],
            ..good
        }),
        "q has 184 elements; expected 185"
    );
    assert_eq!(
        refused(LoraGrad {
            rank: RANK + 1,
            ..good
        }),
        "q has 185 elements; expected 222"
    );
    assert_eq!(
        refused(LoraGrad {
            scale: f32::INFINITY,
            ..good
        }),
        "scale is inf; expected a finite number"
    );
    assert_eq!(
        refused(LoraGrad {
            rank: 0,
            p: &[],
            q: &[],
            ..good
        }),
        "rank is 0; expected 1 to 128"
    );
    Ok(())
}

#[test]
fn gradients_that_do_not_fit_are_named() -> Result<()> {
    let operands = Operands::<f32>::new(0);
    let good = operands.view()?;
    let mut values = [0.0f32; RANK * COLS];
    let mut turned = MatrixMut::new(&mut values, COLS, RANK)?;
    assert_eq!(
        detail(lora_grad_into(&good, Some(&mut turned), None, 0)),
        "grad_a is of 97 x 5 elements; expected 5 x 97"
    );
    let mut turned = MatrixMut::new(&mut values[..ROWS * RANK], RANK, ROWS)?;
    assert_eq!(
        detail(lora_grad_into(&good, None, Some(&mut turned), 0)),
        "grad_b is of 5 x 20 elements; expected 20 x 5"
    );
    let other = detail(lora_grad::<_, f16>(&good, 0));
    assert!(other.starts_with("grad_dtype is"), "{other}");
    Ok(())
}
