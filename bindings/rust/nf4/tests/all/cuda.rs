//! The GPU through cudarc, against the CPU. Skips, and says why, where there is no GPU.

use std::io::Write;
use std::sync::Arc;

use super::common::{any_values, any_weight, even_codebook, same, Number};
use half::{bf16, f16};
use nf4::cuda::{self, CudaRef, CudaScalesRef, CudaTensor};
use nf4::cudarc::driver::sys::CUresult;
use nf4::cudarc::driver::{CudaContext, CudaStream, DeviceRepr, DriverError, ValidAsZeroBits};
use nf4::{dequantize, Error, Matrix, QuantizedTensor, Result, Spec, Workspace};
use proptest::prelude::*;

/// A stream of its own on the first GPU, or None.
pub fn stream() -> Option<Arc<CudaStream>> {
    if let Err(reason) = nf4::device_info(0).status {
        // The test harness hides what the print macros write in a test that passes.
        let line = format!("skipped: {reason}\n");
        std::io::stderr()
            .write_all(line.as_bytes())
            .expect("stderr takes a line");
        return None;
    }
    let context = CudaContext::new(0).expect("a context on the GPU that libnf4 can use");
    Some(context.new_stream().expect("a stream"))
}

fn gpu_dequantize<T>(stream: &Arc<CudaStream>, weight: &QuantizedTensor) -> Result<Vec<T>>
where
    T: Number + DeviceRepr + ValidAsZeroBits,
{
    let on_gpu = CudaTensor::upload(stream, weight)?;
    let elements = weight.elements();
    let mut out = stream.alloc_zeros::<T>(elements.max(1))?;
    cuda::dequantize_into(&on_gpu.view(), &mut out.slice_mut(..elements), stream)?;
    let mut values = stream.clone_dtoh(&out)?;
    stream.synchronize()?;
    values.truncate(elements);
    Ok(values)
}

fn agrees<T>(stream: &Arc<CudaStream>, weight: &QuantizedTensor) -> Result<()>
where
    T: Number + DeviceRepr + ValidAsZeroBits,
{
    let (ours, wanted) = (
        gpu_dequantize::<T>(stream, weight)?,
        dequantize::<T>(weight, 0)?,
    );
    assert_eq!(ours.len(), wanted.len());
    for (i, (a, b)) in ours.into_iter().zip(wanted).enumerate() {
        assert!(
            same(a, b),
            "element {i} is {a:?} on the GPU, {b:?} on the CPU"
        );
    }
    Ok(())
}

fn gpu_quantize<T>(
    stream: &Arc<CudaStream>,
    values: &[T],
    zeros: &QuantizedTensor,
) -> Result<QuantizedTensor>
where
    T: Number + DeviceRepr + ValidAsZeroBits,
{
    let mut on_gpu = CudaTensor::upload(stream, zeros)?;
    let mut dense = stream.alloc_zeros::<T>(values.len().max(1))?;
    if !values.is_empty() {
        stream.memcpy_htod(values, &mut dense)?;
    }
    let bytes = zeros.spec().workspace_bytes()?;
    let mut workspace = stream.alloc_zeros::<u8>(bytes.max(1))?;
    cuda::quantize_into(
        &dense.slice(..values.len()),
        &mut on_gpu.view_mut(),
        &mut workspace.as_view_mut(),
        stream,
    )?;
    on_gpu.download(stream)
}

#[test]
fn dequantize_gives_the_bits_of_the_cpu() {
    let Some(stream) = stream() else { return };
    proptest!(|(weight in any_weight())| {
        agrees::<f32>(&stream, &weight)?;
        agrees::<f16>(&stream, &weight)?;
        agrees::<bf16>(&stream, &weight)?;
    });
}

#[test]
fn quantize_gives_the_bytes_of_the_cpu() {
    let Some(stream) = stream() else { return };
    proptest!(|((spec, values) in any_values(), own in any::<bool>())| {
        let mut weight = QuantizedTensor::zeros(spec)?;
        if own {
            weight = weight.with_codebook(even_codebook());
        }
        let narrow: Vec<bf16> = values.iter().map(|x| bf16::from_f32(*x)).collect();
        let on_gpu = gpu_quantize(&stream, &narrow, &weight)?;
        nf4::quantize_into(&narrow, &mut weight.view_mut(), &mut Workspace::new(), 0)?;
        prop_assert_eq!(on_gpu, weight);
    });
}

fn gpu_matmul<T>(
    stream: &Arc<CudaStream>,
    weight: &QuantizedTensor,
    x: &[T],
    m: usize,
    bias: &[T],
) -> Result<Vec<T>>
where
    T: Number + DeviceRepr + ValidAsZeroBits,
{
    let on_gpu = CudaTensor::upload(stream, weight)?;
    let (x, bias) = (stream.clone_htod(x)?, stream.clone_htod(bias)?);
    let mut y = stream.alloc_zeros::<T>(m * weight.spec().rows)?;
    let bytes = weight.spec().matmul_workspace_bytes::<T>(m)?;
    let mut workspace = stream.alloc_zeros::<u8>(bytes.max(16))?;
    cuda::matmul_into(
        &x.as_view(),
        m,
        &on_gpu.view(),
        Some(&bias.as_view()),
        &mut y.as_view_mut(),
        Some(&mut workspace.as_view_mut()),
        stream,
    )?;
    let y = stream.clone_dtoh(&y)?;
    stream.synchronize()?;
    Ok(y)
}

fn products_agree<T>(stream: &Arc<CudaStream>, epsilon: f32) -> Result<()>
where
    T: Number + DeviceRepr + ValidAsZeroBits,
{
    let numbers = |count: usize| -> Vec<T> {
        let value = |i| T::of((i as f32 * 0.7).sin());
        (0..count).map(value).collect()
    };
    let (rows, cols) = (130, 320);
    let weight = nf4::quantize(&numbers(rows * cols), Spec::new(rows, cols), 0)?;
    for m in [1, 5, 64, 100] {
        let (x, bias) = (numbers(m * cols), numbers(rows));
        let ours = gpu_matmul(stream, &weight, &x, m, &bias)?;
        let wanted = nf4::matmul(Matrix::new(&x, m, cols)?, &weight, Some(&bias), 0)?;
        let pairs = || ours.iter().zip(&wanted).map(|(a, b)| (a.get(), b.get()));
        let moved: f32 = pairs().map(|(a, b)| (a - b) * (a - b)).sum();
        let size: f32 = pairs().map(|(_, b)| b * b).sum();
        assert!(
            moved.sqrt() <= 3.0 * epsilon * size.sqrt(),
            "{m} rows: {moved} of {size}"
        );
    }
    Ok(())
}

#[test]
fn products_are_those_of_the_cpu() -> Result<()> {
    let Some(stream) = stream() else {
        return Ok(());
    };
    products_agree::<f16>(&stream, f16::EPSILON.to_f32())?;
    products_agree::<bf16>(&stream, bf16::EPSILON.to_f32())
}

#[test]
fn wrong_lengths_are_named() -> Result<()> {
    let Some(stream) = stream() else {
        return Ok(());
    };
    let spec = Spec::new(2, 64).flat();
    let packed = stream.alloc_zeros::<u8>(64)?;
    let absmax = stream.alloc_zeros::<f32>(2)?;
    let detail = |result: Result<()>| match result {
        Err(Error::InvalidArgument(detail)) => detail,
        other => panic!("expected InvalidArgument, not {other:?}"),
    };
    let make = |packed, absmax| CudaRef::new(spec, packed, CudaScalesRef::Flat(absmax), None);
    let short = make(packed.slice(1..), absmax.as_view()).map(|_| ());
    assert_eq!(detail(short), "packed has 63 elements; expected 64");
    let short = make(packed.as_view(), absmax.slice(1..)).map(|_| ());
    assert_eq!(detail(short), "absmax has 1 elements; expected 2");

    let weight = make(packed.as_view(), absmax.as_view())?;
    let mut out = stream.alloc_zeros::<f32>(127)?;
    let short = cuda::dequantize_into(&weight, &mut out.as_view_mut(), &stream);
    assert_eq!(detail(short), "out has 127 elements; expected 128");

    let numbers = stream.alloc_zeros::<f16>(192)?;
    let mut y = stream.alloc_zeros::<f16>(6)?;
    for (x, bias, length, wanted) in [
        (191, 2, 6, "x has 191 elements; expected 192"),
        (192, 1, 6, "bias has 1 elements; expected 2"),
        (192, 2, 5, "y has 5 elements; expected 6"),
    ] {
        let (x, bias) = (numbers.slice(..x), numbers.slice(..bias));
        let mut y = y.slice_mut(..length);
        let result = cuda::matmul_into(&x, 3, &weight, Some(&bias), &mut y, None, &stream);
        assert_eq!(detail(result), wanted);
    }
    Ok(())
}

#[test]
fn an_error_of_the_driver_has_its_own_text() {
    let Some(_) = stream() else { return };
    let error = Error::from(DriverError(CUresult::CUDA_ERROR_OUT_OF_MEMORY));
    assert_eq!(error.detail(), "out of memory");
}

/// A weight written on one stream and read on another, with no synchronisation between.
#[test]
fn streams_wait_for_each_other() -> Result<()> {
    let Some(first) = stream() else { return Ok(()) };
    let second = first.context().new_stream()?;
    let values: Vec<f32> = (0..1 << 20).map(|i| (i as f32 * 0.1).sin()).collect();
    let spec = Spec::new(1024, 1024);
    let wanted = nf4::quantize(&values, spec, 0)?;
    let expected: Vec<f32> = dequantize(&wanted, 0)?;

    let dense = first.clone_htod(&values)?;
    let mut weight = CudaTensor::upload(&first, &QuantizedTensor::zeros(spec)?)?;
    let mut workspace = first.alloc_zeros::<u8>(spec.workspace_bytes()?)?;
    let mut out = second.alloc_zeros::<f32>(values.len())?;
    for _ in 0..20 {
        let workspace = &mut workspace.as_view_mut();
        cuda::quantize_into(&dense.as_view(), &mut weight.view_mut(), workspace, &first)?;
        cuda::dequantize_into(&weight.view(), &mut out.as_view_mut(), &second)?;
        let back = second.clone_dtoh(&out)?;
        second.synchronize()?;
        assert!(back == expected, "the streams did not wait for each other");
        second.memset_zeros(&mut out)?;
    }
    Ok(())
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
        let on_device = cuda::CudaGrouped {
            x: x.as_view(),
            ends: ends.as_view(),
            x_index: Some(rows.as_view()),
            bias: None,
            row_scale: Some(scales.as_view()),
        };
        let mut workspace = stream.alloc_zeros::<u8>(bytes.max(1))?;
        let mut y = stream.alloc_zeros::<bf16>(index.len() * y_columns)?;
        let (view, workspace) = (on_gpu.view(), Some(&mut workspace.as_view_mut()));
        let expected = if gradient {
            cuda::matmul_grouped_grad_into(
                &on_device,
                &view,
                &mut y.as_view_mut(),
                workspace,
                &stream,
            )?;
            nf4::matmul_grouped_grad(&operands, &weight, 0)?
        } else {
            cuda::matmul_grouped_into(&on_device, &view, &mut y.as_view_mut(), workspace, &stream)?;
            nf4::matmul_grouped(&operands, &weight, 0)?
        };
        let found = stream.clone_dtoh(&y)?;
        stream.synchronize()?;
        let largest = expected
            .iter()
            .fold(0.0, |most: f32, y| most.max(y.to_f32().abs()));
        for (i, (a, b)) in found.iter().zip(&expected).enumerate() {
            let error = (a.to_f32() - b.to_f32()).abs();
            assert!(
                error <= 0.02 * largest,
                "y[{i}] is {a} on the GPU, {b} on the CPU"
            );
        }
        let short = nf4::cuda::matmul_grouped_into(
            &on_device,
            &on_gpu.view(),
            &mut y.slice_mut(..y_columns),
            None,
            &stream,
        );
        assert!(matches!(short, Err(Error::InvalidArgument(_))));
    }
    Ok(())
}
