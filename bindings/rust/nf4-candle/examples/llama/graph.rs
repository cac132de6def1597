//! Steps whose operands stay where they are, as one CUDA graph.

use candle_core::cuda_backend::cudarc::driver::sys;
use candle_core::cuda_backend::{CudaDevice, WrapErr};
use candle_core::{bail, Device, Result};

/// A GPU whose stream can be captured.
pub fn device() -> Result<Device> {
    let device = Device::new_cuda_with_stream(0)?;
    // SAFETY: there is this stream alone, so no tensor needs an event to wait for, which a capture
    // could not wait for.
    unsafe { device.as_cuda_device()?.disable_event_tracking() };
    Ok(device)
}

/// Does so many steps.
pub fn repeat(device: &CudaDevice, count: usize, step: impl Fn() -> Result<()>) -> Result<()> {
    if count == 0 {
        return Ok(());
    }
    // What candle uploads for its kernels, it keeps from the first step on.
    let _kept = device.enable_cuda_graph_htod_cache();
    step()?;
    let stream = device.cuda_stream();
    let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
    stream.begin_capture(mode).w()?;
    let captured = step();
    let flag = sys::CUgraphInstantiate_flags::CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH;
    let graph = stream.end_capture(flag).w()?;
    captured?;
    let Some(graph) = graph else {
        bail!("CUDA captured no graph");
    };
    (1..count).try_for_each(|_| graph.launch().w())?;
    // The graph is no longer in use when it is dropped.
    stream.synchronize().w()
}
