//! The GPU through cudarc, against the CPU. Skips, and says why, where there is no GPU.

use std::io::Write;
use std::sync::Arc;

use super::arguments::detail;
use super::common::{any_values, any_weight, even_codebook, same, Number};
use super::int4_common::{any_int4_spec, any_int4_weight};
use super::matmul::numbers;
use half::{bf16, f16};
use nf4::cuda::{
    Cuda, CudaInt4PartsRef, CudaInt4Ref, CudaInt4Tensor, CudaLora, CudaMatrix, CudaMatrixMut,
    CudaRef, CudaScalesRef, CudaTensor, Launch,
};
use nf4::cudarc::driver::sys::CUresult;
use nf4::cudarc::driver::{
    CudaContext, CudaSlice, CudaStream, DeviceRepr, DriverError, ValidAsZeroBits,
};
use nf4::{
    dequantize, quantize_int4, ColumnsOf, Error, Host, Int4Layout, Int4Scheme, Int4Spec,
    Int4Tensor, Lora, Matrix, MatrixOf, QuantizedTensor, Result, Spec, Weight,
};
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

/// Copies `values`, of which CUDA has none of 0 bytes, to the GPU.
fn upload<T: DeviceRepr + ValidAsZeroBits>(
    stream: &Arc<CudaStream>,
    values: &[T],
) -> Result<CudaSlice<T>> {
    let mut buffer = stream.alloc_zeros::<T>(values.len().max(1))?;
    if !values.is_empty() {
        stream.memcpy_htod(values, &mut buffer)?;
    }
    Ok(buffer)
}

/// A weight on the GPU dequantizes to the bits of `weight` on the host.
fn agrees<T: Number + DeviceRepr + ValidAsZeroBits>(
    stream: &Arc<CudaStream>,
    on_gpu: impl Weight<Memory = Cuda>,
    weight: impl Weight<Memory = Host>,
) -> Result<()> {
    let wanted = dequantize::<T>(weight, 0)?;
    let mut out = stream.alloc_zeros::<T>(wanted.len().max(1))?;
    nf4::dequantize_into(on_gpu, out.slice_mut(..wanted.len()), stream)?;
    let ours = stream.clone_dtoh(&out)?;
    stream.synchronize()?;
    for (i, (a, b)) in ours.into_iter().zip(wanted).enumerate() {
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
    proptest!(|(weight in any_weight(), int4 in any_int4_weight(true))| {
        let on_gpu = CudaTensor::upload(&stream, &weight)?;
        agrees::<f32>(&stream, &on_gpu, &weight)?;
        agrees::<f16>(&stream, &on_gpu, &weight)?;
        agrees::<bf16>(&stream, on_gpu.view(), &weight)?;
        let on_gpu = CudaInt4Tensor::upload(&stream, &int4)?;
        agrees::<f32>(&stream, &on_gpu, &int4)?;
        agrees::<f16>(&stream, &on_gpu, &int4)?;
        agrees::<bf16>(&stream, on_gpu.view(), &int4)?;
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
        let mut on_gpu = CudaTensor::upload(&stream, &weight)?;
        let dense = upload(&stream, &narrow)?;
        let mut workspace = stream.alloc_zeros::<u8>(spec.workspace_bytes()?.max(1))?;
        let on = Launch::new(&stream).workspace(workspace.as_view_mut());
        nf4::quantize_into(dense.slice(..narrow.len()), &mut on_gpu.view_mut(), on)?;
        nf4::quantize_into(&narrow, &mut weight, 0)?;
        prop_assert_eq!(on_gpu.download(&stream)?, weight);
    });
}

#[test]
fn int4_quantize_gives_the_bytes_of_the_cpu() {
    let Some(stream) = stream() else { return };
    proptest!(|(spec in any_int4_spec(), symmetric in any::<bool>())| {
        let scheme = if symmetric { Int4Scheme::Symmetric } else { Int4Scheme::Asymmetric };
        let values = numbers::<bf16>(spec.rows * spec.cols, 0.7);
        let wanted = quantize_int4(&values, spec, scheme, 0)?;
        let zeros = Int4Tensor::zeros(spec, wanted.parts().zeros.is_some())?;
        let mut on_gpu = CudaInt4Tensor::upload(&stream, &zeros)?;
        let dense = upload(&stream, &values)?;
        let to = &mut on_gpu.view_mut();
        nf4::quantize_int4_into(dense.slice(..values.len()), to, scheme, &stream)?;
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

/// Is `ours` within 3 `epsilon` of `wanted`, as vectors?
fn close<T: Number>(ours: &[T], wanted: &[T], epsilon: f32) {
    assert_eq!(ours.len(), wanted.len());
    let pairs = || ours.iter().zip(wanted).map(|(a, b)| (a.get(), b.get()));
    let moved: f32 = pairs().map(|(a, b)| (a - b) * (a - b)).sum();
    let size: f32 = pairs().map(|(_, b)| b * b).sum();
    assert!(
        moved.sqrt() <= 3.0 * epsilon * size.sqrt(),
        "{moved} of {size}"
    );
}

/// Products of a weight on the GPU are those of `weight` on the host.
fn products_agree<T: Number + DeviceRepr + ValidAsZeroBits>(
    stream: &Arc<CudaStream>,
    on_gpu: impl Weight<Memory = Cuda>,
    weight: impl Weight<Memory = Host>,
    (rows, cols): (usize, usize),
    workspace_bytes: impl Fn(usize) -> Result<usize>,
    epsilon: f32,
) -> Result<()> {
    for m in [1, 5, 64, 100] {
        let (x, bias) = (numbers::<T>(m * cols, 0.7), numbers::<T>(rows, 0.3));
        let wanted = nf4::matmul(Matrix::new(&x, m, cols)?, &weight, Some(&bias), 0)?;
        let (x, bias) = (stream.clone_htod(&x)?, stream.clone_htod(&bias)?);
        let mut y = stream.alloc_zeros::<T>(m * rows)?;
        let mut workspace = stream.alloc_zeros::<u8>(workspace_bytes(m)?.max(16))?;
        let on = Launch::new(stream).workspace(workspace.as_view_mut());
        let to = &mut MatrixOf::new(&mut y, m, rows)?;
        nf4::matmul_into(MatrixOf::new(&x, m, cols)?, &on_gpu, Some(&bias), to, on)?;
        let ours = stream.clone_dtoh(&y)?;
        stream.synchronize()?;
        close(&ours, &wanted, epsilon);
    }
    Ok(())
}

#[test]
fn products_are_those_of_the_cpu() -> Result<()> {
    fn agree<T: Number + DeviceRepr + ValidAsZeroBits>(
        stream: &Arc<CudaStream>,
        epsilon: f32,
    ) -> Result<()> {
        let spec = Spec::new(130, 320);
        let weight = nf4::quantize(&numbers::<T>(130 * 320, 0.7), spec, 0)?;
        let on_gpu = CudaTensor::upload(stream, &weight)?;
        let bytes = |m| spec.matmul_workspace_bytes::<T>(m);
        products_agree::<T>(stream, &on_gpu, &weight, (130, 320), bytes, epsilon)
    }
    let Some(stream) = stream() else {
        return Ok(());
    };
    agree::<f16>(&stream, f16::EPSILON.to_f32())?;
    agree::<bf16>(&stream, bf16::EPSILON.to_f32())
}

#[test]
fn int4_products_are_those_of_the_cpu() -> Result<()> {
    fn agree<T: Number + DeviceRepr + ValidAsZeroBits>(
        stream: &Arc<CudaStream>,
        weight: &Int4Tensor,
        epsilon: f32,
    ) -> Result<()> {
        let on_gpu = CudaInt4Tensor::upload(stream, weight)?;
        let bytes = |m| on_gpu.matmul_workspace_bytes::<T>(m);
        products_agree::<T>(stream, &on_gpu, weight, (136, 384), bytes, epsilon)
    }
    let Some(stream) = stream() else {
        return Ok(());
    };
    for layout in [
        Int4Layout::Gptq,
        Int4Layout::GptqV2,
        Int4Layout::Awq,
        Int4Layout::CompressedTensors,
    ] {
        let spec = Int4Spec::new(layout, 136, 384);
        let values = numbers::<f32>(136 * 384, 0.3);
        let weight = quantize_int4(&values, spec, Int4Scheme::Asymmetric, 0)?;
        agree::<f16>(&stream, &weight, f16::EPSILON.to_f32())?;
        agree::<bf16>(&stream, &weight, bf16::EPSILON.to_f32())?;
        let (spec, mut parts) = weight.into_parts();
        parts.columns = ColumnsOf::GroupIndex((0..384).map(|k| k % 3).collect());
        let indexed = Int4Tensor::new(spec, parts)?;
        agree::<f16>(&stream, &indexed, f16::EPSILON.to_f32())?;
        agree::<f16>(&stream, &indexed.reordered(0)?, f16::EPSILON.to_f32())?;
    }
    Ok(())
}

/// With rows that have gaps.
#[test]
fn products_with_an_adapter_are_those_of_the_cpu() -> Result<()> {
    let Some(stream) = stream() else {
        return Ok(());
    };
    let ((rows, cols), (m, rank, gap)) = ((136, 384), (9, 16, 8));
    let spec = Spec::new(rows, cols);
    let weight = nf4::quantize(&numbers::<f32>(rows * cols, 0.7), spec, 0)?;
    let on_gpu = CudaTensor::upload(&stream, &weight)?;
    let (a, b) = (
        numbers::<bf16>(rank * cols, 0.3),
        numbers::<bf16>(rows * rank, 0.9),
    );
    let lora = Lora {
        a: Matrix::new(&a, rank, cols)?,
        b: Matrix::new(&b, rows, rank)?,
        scale: 0.25,
    };
    let (a, b) = (stream.clone_htod(&a)?, stream.clone_htod(&b)?);
    let on_device = CudaLora {
        a: CudaMatrix::new(a.as_view(), rank, cols)?,
        b: CudaMatrix::new(b.as_view(), rows, rank)?,
        scale: 0.25,
    };
    for gradient in [false, true] {
        let (inputs, outputs) = if gradient { (rows, cols) } else { (cols, rows) };
        let x = numbers::<bf16>(m * (inputs + gap), 0.5);
        let host = Matrix::with_stride(&x, m, inputs, inputs + gap)?;
        let x = stream.clone_htod(&x)?;
        let x = CudaMatrix::with_stride(x.as_view(), m, inputs, inputs + gap)?;
        let mut y = stream.alloc_zeros::<bf16>(m * outputs)?;
        let mut product = stream.alloc_zeros::<bf16>(m * rank)?;
        let bytes = if gradient {
            spec.matmul_grad_workspace_bytes::<bf16>(m, rank)?
        } else {
            spec.matmul_lora_workspace_bytes::<bf16>(m, rank)?
        };
        let mut workspace = stream.alloc_zeros::<u8>(bytes.max(16))?;
        let on = Launch::new(&stream).workspace(workspace.as_view_mut());
        let (to, p) = (
            &mut MatrixOf::new(&mut y, m, outputs)?,
            Some(&mut &mut product),
        );
        let (wanted_y, wanted_p) = if gradient {
            nf4::matmul_grad_lora_into(x, &on_gpu, &on_device, to, p, on)?;
            nf4::matmul_grad_lora(host, &weight, &lora, 0)?
        } else {
            nf4::matmul_lora_into(x, &on_gpu, None, &on_device, to, p, on)?;
            nf4::matmul_lora(host, &weight, None, &lora, 0)?
        };
        let (y, p) = (stream.clone_dtoh(&y)?, stream.clone_dtoh(&product)?);
        stream.synchronize()?;
        close(&y, &wanted_y, bf16::EPSILON.to_f32());
        close(&p, &wanted_p, bf16::EPSILON.to_f32());
    }
    Ok(())
}

#[test]
fn wrong_lengths_are_named() -> Result<()> {
    let Some(stream) = stream() else {
        return Ok(());
    };
    let spec = Spec::new(2, 64).flat();
    let packed = stream.alloc_zeros::<u8>(64)?;
    let absmax = stream.alloc_zeros::<f32>(2)?;
    let make = |packed, absmax| CudaRef::new(spec, packed, CudaScalesRef::Flat(absmax), None);
    let short = make(packed.slice(1..), absmax.as_view()).map(|_| ());
    assert_eq!(detail(short), "packed has 63 elements; expected 64");
    let short = make(packed.as_view(), absmax.slice(1..)).map(|_| ());
    assert_eq!(detail(short), "absmax has 1 elements; expected 2");

    let weight = make(packed.as_view(), absmax.as_view())?;
    let mut out = stream.alloc_zeros::<f32>(127)?;
    let short = nf4::dequantize_into(&weight, &mut out, &stream);
    assert_eq!(detail(short), "out has 127 elements; expected 128");

    let numbers = stream.alloc_zeros::<f16>(192)?;
    let mut y = stream.alloc_zeros::<f16>(6)?;
    let short = CudaMatrix::new(numbers.slice(1..), 3, 64).map(|_| ());
    assert_eq!(detail(short), "values has 191 elements; expected 192");
    for (cols, bias, y_cols, wanted) in [
        (48, 2, 2, "x is of 3 x 48 elements; expected 3 x 64"),
        (64, 1, 2, "bias has 1 elements; expected 2"),
        (64, 2, 1, "y is of 3 x 1 elements; expected 3 x 2"),
    ] {
        let x = CudaMatrix::new(numbers.slice(..3 * cols), 3, cols)?;
        let y = &mut CudaMatrixMut::new(y.slice_mut(..3 * y_cols), 3, y_cols)?;
        let bias = Some(numbers.slice(..bias));
        let result = nf4::matmul_into(x, &weight, bias, y, &stream);
        assert_eq!(detail(result), wanted);
    }
    Ok(())
}

#[test]
fn wrong_lengths_of_integers_are_named() -> Result<()> {
    let Some(stream) = stream() else {
        return Ok(());
    };
    let spec = Int4Spec::new(Int4Layout::CompressedTensors, 2, 128);
    let words = stream.alloc_zeros::<u32>(32)?;
    let scales = stream.alloc_zeros::<u16>(2)?;
    let index = stream.alloc_zeros::<i32>(127)?;
    let make = |packed, scales, columns| {
        let parts = CudaInt4PartsRef {
            packed,
            scales,
            zeros: None,
            columns,
        };
        CudaInt4Ref::new(spec, parts)
    };
    let short = make(words.slice(1..), scales.as_view(), ColumnsOf::InOrder);
    assert_eq!(detail(short), "packed has 31 elements; expected 32");
    let short = make(words.as_view(), scales.slice(1..), ColumnsOf::InOrder);
    assert_eq!(detail(short), "scales has 1 elements; expected 2");
    let weight = make(words.as_view(), scales.as_view(), ColumnsOf::InOrder)?;
    let mut out = stream.alloc_zeros::<f32>(255)?;
    let short = nf4::dequantize_into(&weight, &mut out, &stream);
    assert_eq!(detail(short), "out has 255 elements; expected 256");
    // SAFETY: it is refused.
    let short = unsafe { weight.with_columns(ColumnsOf::GroupIndex(index.as_view())) };
    assert_eq!(detail(short), "g_idx has 127 elements; expected 128");
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
        let on = Launch::new(&first).workspace(workspace.as_view_mut());
        nf4::quantize_into(&dense, &mut weight, on)?;
        nf4::dequantize_into(&weight, &mut out, &second)?;
        let back = second.clone_dtoh(&out)?;
        second.synchronize()?;
        assert!(back == expected, "the streams did not wait for each other");
        second.memset_zeros(&mut out)?;
    }
    Ok(())
}
