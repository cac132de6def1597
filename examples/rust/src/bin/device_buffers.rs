//! Quantizes and dequantizes raw buffers on the GPU, in order on a stream, and compares every bit with
//! the result of the CPU. Exits with 77 if there is no GPU that libnf4 can use.
//!
//!     cargo run -p nf4-examples --bin device_buffers

use std::error::Error;
use std::process::ExitCode;
use std::sync::Arc;

use cudarc::driver::{CudaContext, CudaSlice, CudaStream, DevicePtr as _, DevicePtrMut as _};
use half::bf16;
use nf4::device::{DeviceScalesMut, DeviceSlice, DeviceSliceMut, DeviceTensorMut, Launch, Stream};
use nf4::{dequantize_into, quantize_into, QuantizedTensor, Scales, Spec};
use nf4_examples::example_weight;

/// Test runners read this exit code as "skipped".
const SKIPPED: u8 = 77;

fn main() -> Result<ExitCode, Box<dyn Error>> {
    // First, because cudarc panics where there is no driver.
    let gpu = nf4::device_info(0);
    if let Err(reason) = gpu.status {
        println!("skipped: {reason}");
        return Ok(ExitCode::from(SKIPPED));
    }
    println!("{}: kernels {}", gpu.name, gpu.dequant_variant);
    let spec = Spec::new(1024, 1000);
    let values: Vec<bf16> = example_weight(spec.rows * spec.cols)
        .into_iter()
        .map(bf16::from_f32)
        .collect();

    let stream = CudaContext::new(0)?.new_stream()?;
    let (weight, back) = on_the_gpu(&stream, spec, &values)?;

    let expected = nf4::quantize(&values, spec, 0)?;
    let expected_back: Vec<bf16> = nf4::dequantize(&expected, 0)?;
    let pairs = back.iter().zip(&expected_back);
    let differing = pairs.filter(|(a, b)| a.to_bits() != b.to_bits()).count();
    println!("{} values, {differing} differ from the CPU's", back.len());
    if weight != expected || differing != 0 {
        return Err("the GPU and the CPU disagree".into());
    }
    Ok(ExitCode::SUCCESS)
}

/// Quantizes `values`, and dequantizes the result.
fn on_the_gpu(
    stream: &Arc<CudaStream>,
    spec: Spec,
    values: &[bf16],
) -> Result<(QuantizedTensor, Vec<bf16>), Box<dyn Error>> {
    let sizes = spec.sizes()?;
    let workspace_bytes = spec.workspace_bytes()?;
    let dense = stream.clone_htod(values)?;
    let code = stream.clone_htod(nf4::scale_code())?;
    let mut packed = stream.alloc_zeros::<u8>(sizes.packed_bytes)?;
    let mut codes = stream.alloc_zeros::<u8>(sizes.absmax_bytes)?;
    let mut absmax = stream.alloc_zeros::<f32>(sizes.nested_blocks)?;
    let mut offset = stream.alloc_zeros::<f32>(1)?;
    let mut workspace = stream.alloc_zeros::<u8>(workspace_bytes)?;
    let mut out = stream.alloc_zeros::<bf16>(sizes.elements)?;

    // The code below uses addresses only, which could also come from cudaMalloc or a framework.
    {
        let (packed_bytes, blocks) = (sizes.packed_bytes, sizes.blocks);
        let (elements, nested_blocks) = (sizes.elements, sizes.nested_blocks);
        // SAFETY: the buffers have these lengths, and none overlap. All were allocated on this stream,
        // which is alive, and they live until it is synchronised below.
        let (values, workspace, to, mut weight, raw_stream) = unsafe {
            let raw_stream = Stream::from_raw(stream.cu_stream().cast());
            let scales = DeviceScalesMut::Nested {
                codes: written(&mut codes, blocks, stream),
                absmax: written(&mut absmax, nested_blocks, stream),
                code: read(&code, 256, stream),
                offset: written(&mut offset, 1, stream),
            };
            (
                read(&dense, elements, stream),
                written(&mut workspace, workspace_bytes, stream),
                written(&mut out, elements, stream),
                DeviceTensorMut::new(
                    spec,
                    written(&mut packed, packed_bytes, stream),
                    scales,
                    None,
                )?,
                raw_stream,
            )
        };
        let on = Launch::new(raw_stream).workspace(workspace);
        quantize_into(values, &mut weight, on)?;
        dequantize_into(&weight, to, raw_stream)?;
    }

    let packed = stream.clone_dtoh(&packed)?;
    let codes = stream.clone_dtoh(&codes)?;
    let absmax = stream.clone_dtoh(&absmax)?;
    let offset = stream.clone_dtoh(&offset)?;
    let back = stream.clone_dtoh(&out)?;
    stream.synchronize()?;
    let code = Box::new(*nf4::scale_code());
    let scales = Scales::Nested {
        codes,
        absmax,
        code,
        offset: offset[0],
    };
    Ok((QuantizedTensor::new(spec, packed, scales, None)?, back))
}

/// # Safety
/// The caller guarantees what [`DeviceSlice::from_raw_parts`] asks.
unsafe fn read<T>(
    buffer: &CudaSlice<T>,
    length: usize,
    stream: &Arc<CudaStream>,
) -> DeviceSlice<T> {
    let address = buffer.device_ptr(stream).0 as usize;
    // SAFETY: as the caller promises.
    unsafe { DeviceSlice::from_raw_parts(address as *const T, length) }
}

/// # Safety
/// The caller guarantees what [`DeviceSliceMut::from_raw_parts`] asks.
unsafe fn written<'a, T>(
    buffer: &'a mut CudaSlice<T>,
    length: usize,
    stream: &Arc<CudaStream>,
) -> DeviceSliceMut<'a, T> {
    let address = buffer.device_ptr_mut(stream).0 as usize;
    // SAFETY: as the caller promises.
    unsafe { DeviceSliceMut::from_raw_parts(address as *mut T, length) }
}
