//! Several products in one call, and experts of integers, on the GPU through cudarc. Skips where there
//! is no GPU.

use std::sync::Arc;

use super::arguments::detail;
use super::cuda::stream;
use half::bf16;
use nf4::cuda::{self, CudaGrouped, CudaInt4Stack, CudaInt4Tensor, CudaProduct, CudaTensor};
use nf4::cudarc::driver::CudaStream;
use nf4::{ColumnsOf, Grouped, Int4Layout, Int4PartsRef, Int4Scheme, Int4Spec, Int4Stack};
use nf4::{Matrix, Result, Spec};

const ROWS: [usize; 3] = [136, 8, 264];
const COLS: usize = 384;

fn numbers(count: usize) -> Vec<bf16> {
    let value = |i| bf16::from_f32((i as f32 * 0.7).sin());
    (0..count).map(value).collect()
}

/// Products of one x with weights of these rows: one by one, as a batch and joined.
fn batches_agree<W: cuda::CudaWeight>(
    stream: &Arc<CudaStream>,
    weights: &[W],
    workspace_bytes: impl Fn(&W, usize) -> Result<usize>,
) -> Result<()> {
    let all: usize = ROWS.iter().sum();
    for m in [1, 7, 64] {
        let bytes = weights.iter().map(|weight| workspace_bytes(weight, m));
        let bytes = bytes.collect::<Result<Vec<_>>>()?.into_iter().max();
        let mut workspace = stream.alloc_zeros::<u8>(bytes.unwrap_or(0).max(16))?;
        let mut workspace = workspace.as_view_mut();
        let (x, bias) = (numbers(m * COLS), numbers(ROWS[2]));
        let (x, bias) = (stream.clone_htod(&x)?, stream.clone_htod(&bias)?);
        // The last alone has a bias, and only in the batch.
        let biases = [None, None, Some(bias.as_view())];
        let (mut wanted, mut plain) = (Vec::new(), Vec::new());
        for ((weight, rows), bias) in weights.iter().zip(ROWS).zip(&biases) {
            for (bias, to) in [(bias.as_ref(), &mut wanted), (None, &mut plain)] {
                let mut y = stream.alloc_zeros::<bf16>(m * rows)?;
                let (x, y_view) = (&x.as_view(), &mut y.as_view_mut());
                cuda::matmul_into(x, m, weight, bias, y_view, Some(&mut workspace), stream)?;
                to.push(stream.clone_dtoh(&y)?);
            }
        }
        let products: Vec<_> = weights
            .iter()
            .zip(biases)
            .map(|(weight, bias)| CudaProduct {
                x: x.as_view(),
                m,
                weight,
                bias,
            })
            .collect();
        let mut y = ROWS.map(|rows| stream.alloc_zeros::<bf16>(m * rows).expect("memory"));
        let mut views: Vec<_> = y.iter_mut().map(|y| y.as_view_mut()).collect();
        let short = cuda::matmul_batch_into(&products, &mut views[1..], None, stream);
        assert_eq!(detail(short), "y has 2 elements; expected 3");
        views.swap(0, 1);
        let short = cuda::matmul_batch_into(&products, &mut views, None, stream);
        let (has, expected) = (8 * m, 136 * m);
        assert_eq!(
            detail(short),
            format!("product 0: y has {has} elements; expected {expected}")
        );
        views.swap(0, 1);
        cuda::matmul_batch_into(&products, &mut views, Some(&mut workspace), stream)?;
        for (y, wanted) in y.iter().zip(&wanted) {
            assert!(stream.clone_dtoh(y)? == *wanted, "{m} rows");
        }

        let mut joined = stream.alloc_zeros::<bf16>(m * all)?;
        let (x, to) = (&x.as_view(), &mut joined.as_view_mut());
        cuda::matmul_joined_into(x, m, weights, to, Some(&mut workspace), stream)?;
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
    let floats: Vec<_> = floats.iter().map(CudaTensor::view).collect();
    let specs = ROWS.map(|rows| Spec::new(rows, COLS));
    batches_agree(&stream, &floats, |_, m| {
        let bytes = specs.map(|spec| spec.matmul_workspace_bytes::<bf16>(m));
        Ok(bytes
            .into_iter()
            .collect::<Result<Vec<_>>>()?
            .into_iter()
            .max()
            .unwrap_or(0))
    })?;
    let integers: Vec<_> = integers.iter().map(CudaInt4Tensor::view).collect();
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
        let expected = nf4::matmul_grouped_int4(&operands, stack, 0)?;

        let (packed, scales) = (stream.clone_htod(&packed)?, stream.clone_htod(&scales)?);
        let (zeros, x) = (stream.clone_htod(&zeros)?, stream.clone_htod(&x)?);
        let (ends, index) = (stream.clone_htod(&ends)?, stream.clone_htod(&index)?);
        let stack = |packed, experts| {
            CudaInt4Stack::new(
                spec,
                experts,
                packed,
                scales.as_view(),
                Some(zeros.as_view()),
            )
        };
        let operands = CudaGrouped {
            x: x.as_view(),
            ends: ends.as_view(),
            x_index: Some(index.as_view()),
            bias: None,
            row_scale: None,
        };
        let bytes = spec.matmul_grouped_workspace_bytes::<bf16>(EXPERTS, index.len())?;
        let mut workspace = stream.alloc_zeros::<u8>(bytes.max(1))?;
        let mut y = stream.alloc_zeros::<bf16>(index.len() * n)?;
        let weight = stack(packed.as_view(), EXPERTS)?;
        let (to, workspace) = (&mut y.as_view_mut(), Some(&mut workspace.as_view_mut()));
        cuda::matmul_grouped_int4_into(&operands, &weight, to, workspace, &stream)?;
        let found = stream.clone_dtoh(&y)?;
        stream.synchronize()?;
        let sizes = expected.iter().map(|y| y.to_f32().abs());
        let largest = sizes.fold(0.0, f32::max);
        for (i, (a, b)) in found.iter().zip(&expected).enumerate() {
            let error = (a.to_f32() - b.to_f32()).abs();
            assert!(
                error <= 0.02 * largest,
                "y[{i}] is {a} on the GPU, {b} on the CPU"
            );
        }
        let short = stack(packed.slice(1..), EXPERTS);
        let (has, expected) = (packed.len() - 1, packed.len());
        assert_eq!(
            detail(short),
            format!("packed has {has} elements; expected {expected}")
        );
    }
    Ok(())
}
