//! Quantizes and dequantizes raw buffers on the GPU, in the order of a stream, and compares
//! with the CPU bit for bit. Exits with 77 where there is no GPU that libnf4 can use.
//!
//!     cargo run --bin device_buffers

use std::error::Error;
use std::process::ExitCode;
use std::sync::Arc;

use cudarc::driver::{CudaContext, CudaStream, DevicePtr as _, DevicePtrMut as _};
use half::bf16;
use nf4::device::{dequant_launch, quantize_launch, DevicePtr, DeviceScales, DeviceTensor, Stream};
use nf4::{QuantizedTensor, Scales, Spec};
use nf4_examples::example_weight;

/// What test runners read as "skipped".
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

    // From here on there are only addresses: they could come from cudaMalloc, from a
    // framework, or from anywhere else.
    {
        let raw_stream = Stream::from_raw(stream.cu_stream().cast());
        let weight = DeviceTensor {
            spec,
            packed: DevicePtr::from_address(packed.device_ptr_mut(stream).0),
            scales: DeviceScales::Nested {
                codes: DevicePtr::from_address(codes.device_ptr_mut(stream).0),
                absmax: DevicePtr::from_address(absmax.device_ptr_mut(stream).0),
                code: DevicePtr::from_address(code.device_ptr(stream).0),
                offset: DevicePtr::from_address(offset.device_ptr_mut(stream).0),
            },
            codebook: None,
        };
        let dense = DevicePtr::<bf16>::from_address(dense.device_ptr(stream).0);
        let workspace = DevicePtr::from_address(workspace.device_ptr_mut(stream).0);
        let out = DevicePtr::<bf16>::from_address(out.device_ptr_mut(stream).0);
        // SAFETY: the buffers have the sizes that the spec asks for, none overlap, all are of
        // this stream and live until it is synchronised below.
        unsafe {
            quantize_launch(dense, &weight, workspace, workspace_bytes, raw_stream)?;
            dequant_launch(&weight, out, raw_stream)?;
        }
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
    Ok((
        QuantizedTensor::from_parts(spec, packed, scales, None)?,
        back,
    ))
}
