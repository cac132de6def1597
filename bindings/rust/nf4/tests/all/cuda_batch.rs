//! Several products in one call, and experts of integers, on the GPU through cudarc. Skips where there
//! is no GPU.

use std::sync::Arc;

use super::arguments::detail;
use super::cuda::stream;
use half::bf16;
use nf4::cuda::{
    Cuda, CudaGrouped, CudaInt4PartsRef, CudaInt4Stack, CudaInt4Tensor, CudaTensor, Launch,
};
use nf4::cudarc::driver::CudaStream;
use nf4::{
    matmul_batch_into, matmul_batch_workspace_bytes, matmul_grouped_grad_into, matmul_grouped_into,
    matmul_into, matmul_joined_into, ColumnsOf, Grouped, Int4Layout, Int4PartsRef, Int4Scheme,
    Int4Spec, Int4Stack, Matrix, MatrixOf, ProductOf, Result, Spec, Weight,
};

const ROWS: [usize; 3] = [136, 8, 264];
const COLS: usize = 384;

fn numbers(count: usize) -> Vec<bf16> {
    let value = |i| bf16::from_f32((i as f32 * 0.7).sin());
    (0..count).map(value).collect()
}

/// Products of one x with weights of these rows: one by one, as a batch and joined.
fn batches_agree<W: Weight<Memory = Cuda>>(
    stream: &Arc<CudaStream>,
    weights: &[W],
    workspace_bytes: impl Fn(&W, usize) -> Result<usize>,
) -> Result<()> {
    let all: usize = ROWS.iter().sum();
    for m in [1, 7, 64] {
        let bytes = weights.iter().map(|weight| workspace_bytes(weight, m));
        let bytes = bytes.collect::<Result<Vec<_>>>()?.into_iter().max();
        let mut workspace = stream.alloc_zeros::<u8>(bytes.unwrap_or(0).max(16))?;
        let (x, bias) = (numbers(m * COLS), numbers(ROWS[2]));
        let (x, bias) = (stream.clone_htod(&x)?, stream.clone_htod(&bias)?);
        let x = MatrixOf::new(&x, m, COLS)?;
        // The last alone has a bias, and only in the batch.
        let biases = [None, None, Some(&bias)];
        let (mut wanted, mut plain) = (Vec::new(), Vec::new());
        for ((weight, rows), bias) in weights.iter().zip(ROWS).zip(biases) {
            for (bias, to) in [(bias, &mut wanted), (None, &mut plain)] {
                let mut y = stream.alloc_zeros::<bf16>(m * rows)?;
                let on = Launch::new(stream).workspace(workspace.as_view_mut());
                matmul_into(x, weight, bias, &mut MatrixOf::new(&mut y, m, rows)?, on)?;
                to.push(stream.clone_dtoh(&y)?);
            }
        }
        let pairs = weights.iter().zip(biases);
        let products = pairs.map(|(weight, bias)| ProductOf { x, weight, bias });
        let products: Vec<_> = products.collect();
        let most = matmul_batch_workspace_bytes(&products)?;
        assert_eq!(Some(most), bytes);
        let mut y = ROWS.map(|rows| stream.alloc_zeros::<bf16>(m * rows).expect("memory"));
        let mut to = Vec::new();
        for (y, rows) in y.iter_mut().zip(ROWS) {
            to.push(MatrixOf::new(y, m, rows)?);
        }
        let short = matmul_batch_into(&products, &mut to[1..], stream);
        assert_eq!(detail(short), "y has 2 elements; expected 3");
        to.swap(0, 1);
        let wrong = matmul_batch_into(&products, &mut to, stream);
        assert_eq!(
            detail(wrong),
            format!("product 0: y is of {m} x 8 elements; expected {m} x 136")
        );
        to.swap(0, 1);
        let on = Launch::new(stream).workspace(workspace.as_view_mut());
        matmul_batch_into(&products, &mut to, on)?;
        for (y, wanted) in y.iter().zip(&wanted) {
            assert!(stream.clone_dtoh(y)? == *wanted, "{m} rows");
        }

        let mut joined = stream.alloc_zeros::<bf16>(m * all)?;
        let on = Launch::new(stream).workspace(workspace.as_view_mut());
        matmul_joined_into(x, weights, &mut MatrixOf::new(&mut joined, m, all)?, on)?;
        let joined = stream.clone_dtoh(&joined)?;
        for (row, values) in joined.chunks(all).enumerate() {
            let parts = plain.iter().zip(ROWS);
            let row = parts.flat_map(|(y, rows)| &y[row * rows..(row + 1) * rows]);
            assert!(row.eq(values), "{m} rows, joined");
        }
    }
    Ok(())
}

#[test]
fn products_in_a_batch_have_the_bits_of_single_ones() -> Result<()> {
    let Some(stream) = stream() else {
        return Ok(());
    };
    let (mut floats, mut integers) = (Vec::new(), Vec::new());
    for rows in ROWS {
        let values = numbers(rows * COLS);
        let weight = nf4::quantize(&values, Spec::new(rows, COLS), 0)?;
        floats.push(CudaTensor::upload(&stream, &weight)?);
        let spec = Int4Spec::new(Int4Layout::Gptq, rows, COLS);
        let weight = nf4::quantize_int4(&values, spec, Int4Scheme::Asymmetric, 0)?;
        integers.push(CudaInt4Tensor::upload(&stream, &weight)?);
    }
    batches_agree(&stream, &floats, |weight, m| {
        weight.spec().matmul_workspace_bytes::<bf16>(m)
    })?;
    batches_agree(&stream, &integers, |weight, m| {
        weight.matmul_workspace_bytes::<bf16>(m)
    })
}

#[test]
fn experts_of_integers_are_multiplied_as_on_the_cpu() -> Result<()> {
    let Some(stream) = stream() else {
        return Ok(());
    };
    const EXPERTS: usize = 3;
    let (n, k, tokens) = (72, 128, 5);
    let (ends, index) = ([2, 2, 7], [0, 4, 1, 1, -1, 2, 3]);
    for layout in [
        Int4Layout::GptqV2,
        Int4Layout::Awq,
        Int4Layout::CompressedTensors,
    ] {
        let spec = Int4Spec::new(layout, n, k).group_size(Some(32));
        let (mut packed, mut scales, mut zeros) = (Vec::new(), Vec::new(), Vec::new());
        for expert in 0..EXPERTS {
            let values: Vec<f32> = (0..n * k)
                .map(|i| ((i + 99 * expert) as f32 * 0.37).sin())
                .collect();
            let weight = nf4::quantize_int4(&values, spec, Int4Scheme::Asymmetric, 0)?;
            let (_, parts) = weight.into_parts();
            packed.extend(parts.packed);
            scales.extend(parts.scales);
            zeros.extend(parts.zeros.expect("it is asymmetric"));
        }
        let parts = Int4PartsRef {
            packed: &packed,
            scales: &scales,
            zeros: Some(&zeros),
            columns: ColumnsOf::InOrder,
        };
        let x = numbers(tokens * k);
        let operands = Grouped {
            x_index: Some(&index),
            ..Grouped::new(Matrix::new(&x, tokens, k)?, &ends)
        };
        let stack = Int4Stack::new(spec, EXPERTS, parts)?;
        let expected = nf4::matmul_grouped(&operands, stack, 0)?;

        let (packed, scales) = (stream.clone_htod(&packed)?, stream.clone_htod(&scales)?);
        let (zeros, x) = (stream.clone_htod(&zeros)?, stream.clone_htod(&x)?);
        let (ends, index) = (stream.clone_htod(&ends)?, stream.clone_htod(&index)?);
        let stack = |packed| {
            let parts = CudaInt4PartsRef {
                packed,
                scales: scales.as_view(),
                zeros: Some(zeros.as_view()),
                columns: ColumnsOf::InOrder,
            };
            CudaInt4Stack::new(spec, EXPERTS, parts)
        };
        let operands = CudaGrouped {
            x_index: Some(index.as_view()),
            ..CudaGrouped::new(MatrixOf::new(x.as_view(), tokens, k)?, ends.as_view())
        };
        let bytes = spec.matmul_grouped_workspace_bytes::<bf16>(EXPERTS, index.len())?;
        let mut workspace = stream.alloc_zeros::<u8>(bytes.max(1))?;
        let mut y = stream.alloc_zeros::<bf16>(index.len() * n)?;
        let on = Launch::new(&stream).workspace(workspace.as_view_mut());
        let to = &mut MatrixOf::new(&mut y, index.len(), n)?;
        matmul_grouped_into(&operands, stack(packed.as_view())?, to, on)?;
        let found = stream.clone_dtoh(&y)?;
        stream.synchronize()?;
        close(&found, &expected);
        let short = stack(packed.slice(1..));
        let (has, expected) = (packed.len() - 1, packed.len());
        assert_eq!(
            detail(short),
            format!("packed has {has} elements; expected {expected}")
        );
    }
    Ok(())
}

/// Is each element within a fiftieth of the largest of `wanted`?
fn close(found: &[bf16], wanted: &[bf16]) {
    assert_eq!(found.len(), wanted.len());
    let largest = wanted.iter().map(|y| y.to_f32().abs()).fold(0.0, f32::max);
    for (i, (a, b)) in found.iter().zip(wanted).enumerate() {
        let error = (a.to_f32() - b.to_f32()).abs();
        assert!(
            error <= 0.02 * largest,
            "y[{i}] is {a} on the GPU, {b} on the CPU"
        );
    }
}

#[test]
fn experts_are_multiplied_as_on_the_cpu() -> Result<()> {
    let Some(stream) = stream() else {
        return Ok(());
    };
    const EXPERTS: usize = 3;
    let (n, k, tokens) = (72, 128, 5);
    let values: Vec<f32> = (0..EXPERTS * n * k)
        .map(|i| (i as f32 * 0.37).sin())
        .collect();
    let weight = nf4::quantize(&values, Spec::new(EXPERTS * n, k), 0)?;
    let on_gpu = CudaTensor::upload(&stream, &weight)?;
    let (ends, index, scale) = ([2, 2, 7], [0, 4, 1, 1, -1, 2, 3], [0.5f32; 7]);
    for gradient in [false, true] {
        let (x_columns, y_columns) = if gradient { (n, k) } else { (k, n) };
        let x: Vec<bf16> = (0..tokens * x_columns)
            .map(|i| bf16::from_f32((i as f32 * 0.11).cos()))
            .collect();
        let operands = nf4::Grouped {
            x_index: Some(&index),
            row_scale: Some(&scale),
            ..nf4::Grouped::new(Matrix::new(&x, tokens, x_columns)?, &ends)
        };
        let bytes = if gradient {
            weight
                .spec()
                .matmul_grouped_grad_workspace_bytes::<bf16>(EXPERTS, index.len())?
        } else {
            weight
                .spec()
                .matmul_grouped_workspace_bytes::<bf16>(EXPERTS, index.len())?
        };
        let (x, ends) = (stream.clone_htod(&x)?, stream.clone_htod(&ends)?);
        let (rows, scales) = (stream.clone_htod(&index)?, stream.clone_htod(&scale)?);
        let on_device = CudaGrouped {
            x_index: Some(rows.as_view()),
            row_scale: Some(scales.as_view()),
            ..CudaGrouped::new(
                MatrixOf::new(x.as_view(), tokens, x_columns)?,
                ends.as_view(),
            )
        };
        let mut workspace = stream.alloc_zeros::<u8>(bytes.max(1))?;
        let mut y = stream.alloc_zeros::<bf16>(index.len() * y_columns)?;
        let on = Launch::new(&stream).workspace(workspace.as_view_mut());
        let to = &mut MatrixOf::new(&mut y, index.len(), y_columns)?;
        let expected = if gradient {
            matmul_grouped_grad_into(&on_device, &on_gpu, to, on)?;
            nf4::matmul_grouped_grad(&operands, &weight, 0)?
        } else {
            matmul_grouped_into(&on_device, &on_gpu, to, on)?;
            nf4::matmul_grouped(&operands, &weight, 0)?
        };
        let found = stream.clone_dtoh(&y)?;
        stream.synchronize()?;
        close(&found, &expected);
        let one_row = &mut MatrixOf::new(y.slice_mut(..y_columns), 1, y_columns)?;
        let short = if gradient {
            matmul_grouped_grad_into(&on_device, &on_gpu, one_row, &stream)
        } else {
            matmul_grouped_into(&on_device, &on_gpu, one_row, &stream)
        };
        let name = if gradient { "grad_x" } else { "y" };
        let wanted = format!("{name} is of 1 x {y_columns} elements; expected 7 x {y_columns}");
        assert_eq!(detail(short), wanted);
    }
    Ok(())
}
