//! Weights of integers on the GPU through cudarc, against the CPU. Skips where there is no GPU.

use std::sync::Arc;

use super::arguments::detail;
use super::common::{same, Number};
use super::cuda::stream;
use super::int4_common::{any_int4_spec, any_int4_weight};
use half::{bf16, f16};
use nf4::cuda::{self, CudaInt4Ref, CudaInt4Tensor};
use nf4::cudarc::driver::{CudaStream, DeviceRepr, ValidAsZeroBits};
use nf4::{
    dequantize, quantize_int4, ColumnsOf, Int4Layout, Int4Scheme, Int4Spec, Int4Tensor, Matrix,
    Result,
};
use proptest::prelude::*;

fn agrees<T>(stream: &Arc<CudaStream>, weight: &Int4Tensor) -> Result<()>
where
    T: Number + DeviceRepr + ValidAsZeroBits,
{
    let on_gpu = CudaInt4Tensor::upload(stream, weight)?;
    let elements = weight.elements();
    let mut out = stream.alloc_zeros::<T>(elements.max(1))?;
    cuda::dequantize_into(&on_gpu.view(), &mut out.slice_mut(..elements), stream)?;
    let ours = stream.clone_dtoh(&out)?;
    stream.synchronize()?;
    for (i, (a, b)) in ours
        .into_iter()
        .zip(dequantize::<T>(weight, 0)?)
        .enumerate()
    {
        assert!(
            same(a, b),
            "element {i} is {a:?} on the GPU, {b:?} on the CPU"
        );
    }
    Ok(())
}

#[test]
fn dequantize_gives_the_bits_of_the_cpu() {
    let Some(stream) = stream() else { return };
    proptest!(|(weight in any_int4_weight(true))| {
        agrees::<f32>(&stream, &weight)?;
        agrees::<f16>(&stream, &weight)?;
        agrees::<bf16>(&stream, &weight)?;
    });
}

#[test]
fn quantize_gives_the_bytes_of_the_cpu() {
    let Some(stream) = stream() else { return };
    proptest!(|(spec in any_int4_spec(), symmetric in any::<bool>())| {
        let scheme = if symmetric { Int4Scheme::Symmetric } else { Int4Scheme::Asymmetric };
        let values: Vec<bf16> =
            (0..spec.rows * spec.cols).map(|i| bf16::of((i as f32 * 0.7).sin())).collect();
        let wanted = quantize_int4(&values, spec, scheme, 0)?;
        let with_zero_points = wanted.parts().zeros.is_some();
        let zeros = Int4Tensor::zeros(spec, with_zero_points)?;
        let mut on_gpu = CudaInt4Tensor::upload(&stream, &zeros)?;
        let mut dense = stream.alloc_zeros::<bf16>(values.len().max(1))?;
        if !values.is_empty() {
            stream.memcpy_htod(&values, &mut dense).expect("a copy");
        }
        let dense = dense.slice(..values.len());
        cuda::quantize_int4_into(&dense, &mut on_gpu.view_mut(), scheme, &stream)?;
        prop_assert_eq!(on_gpu.download(&stream)?, wanted);
    });
}

#[test]
fn reorder_gives_the_bytes_of_the_cpu() {
    let Some(stream) = stream() else { return };
    proptest!(|(weight in any_int4_weight(true))| {
        let ColumnsOf::GroupIndex(_) = weight.parts().columns else {
            return Ok(());
        };
        let on_gpu = CudaInt4Tensor::upload(&stream, &weight)?.reordered(&stream)?;
        prop_assert_eq!(on_gpu.download(&stream)?, weight.reordered(0)?);
    });
}

fn products_agree<T>(stream: &Arc<CudaStream>, weight: &Int4Tensor, epsilon: f32) -> Result<()>
where
    T: Number + DeviceRepr + ValidAsZeroBits,
{
    let (rows, cols) = (weight.spec().rows, weight.spec().cols);
    let on_gpu = CudaInt4Tensor::upload(stream, weight)?;
    for m in [1, 5, 64, 100] {
        let x: Vec<T> = (0..m * cols)
            .map(|i| T::of((i as f32 * 0.7).sin()))
            .collect();
        let wanted = nf4::matmul(Matrix::new(&x, m, cols)?, weight, None, 0)?;
        let x = stream.clone_htod(&x)?;
        let mut y = stream.alloc_zeros::<T>(m * rows)?;
        let bytes = on_gpu.view().matmul_workspace_bytes::<T>(m)?;
        let mut workspace = stream.alloc_zeros::<u8>(bytes.max(16))?;
        cuda::matmul_into(
            &x.as_view(),
            m,
            &on_gpu.view(),
            None,
            &mut y.as_view_mut(),
            Some(&mut workspace.as_view_mut()),
            stream,
        )?;
        let ours = stream.clone_dtoh(&y)?;
        stream.synchronize()?;
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
    let values: Vec<f32> = (0..136 * 384).map(|i| (i as f32 * 0.3).sin()).collect();
    for layout in [
        Int4Layout::Gptq,
        Int4Layout::GptqV2,
        Int4Layout::Awq,
        Int4Layout::CompressedTensors,
    ] {
        let spec = Int4Spec::new(layout, 136, 384);
        let weight = quantize_int4(&values, spec, Int4Scheme::Asymmetric, 0)?;
        products_agree::<f16>(&stream, &weight, f16::EPSILON.to_f32())?;
        products_agree::<bf16>(&stream, &weight, bf16::EPSILON.to_f32())?;
        let (spec, mut parts) = weight.into_parts();
        parts.columns = ColumnsOf::GroupIndex((0..384).map(|k| k % 3).collect());
        let indexed = Int4Tensor::from_parts(spec, parts)?;
        products_agree::<f16>(&stream, &indexed, f16::EPSILON.to_f32())?;
        products_agree::<f16>(&stream, &indexed.reordered(0)?, f16::EPSILON.to_f32())?;
    }
    Ok(())
}

#[test]
fn wrong_lengths_are_named() -> Result<()> {
    let Some(stream) = stream() else {
        return Ok(());
    };
    let spec = Int4Spec::new(Int4Layout::CompressedTensors, 2, 128);
    let words = stream.alloc_zeros::<u32>(32)?;
    let scales = stream.alloc_zeros::<u16>(2)?;
    let index = stream.alloc_zeros::<i32>(127)?;
    let make = |packed, scales| CudaInt4Ref::new(spec, packed, scales, None);
    let short = make(words.slice(1..), scales.as_view());
    assert_eq!(detail(short), "packed has 31 elements; expected 32");
    let short = make(words.as_view(), scales.slice(1..));
    assert_eq!(detail(short), "scales has 1 elements; expected 2");
    let weight = make(words.as_view(), scales.as_view())?;
    let mut out = stream.alloc_zeros::<f32>(255)?;
    let short = cuda::dequantize_into(&weight, &mut out.as_view_mut(), &stream);
    assert_eq!(detail(short), "out has 255 elements; expected 256");
    // SAFETY: it is refused.
    let short = unsafe { weight.with_columns(ColumnsOf::GroupIndex(index.as_view())) };
    assert_eq!(detail(short), "g_idx has 127 elements; expected 128");
    Ok(())
}
