//! Runs steps whose operands stay at the same addresses as one CUDA graph.

use candle_core::cuda_backend::cudarc::driver::sys;
use candle_core::cuda_backend::{CudaDevice, WrapErr};
use candle_core::{bail, Device, Result};

/// Returns a GPU whose stream can be captured.
pub fn device() -> Result<Device> {
    let device = Device::new_cuda_with_stream(0)?;
    // SAFETY: this is the only stream, so no tensor needs an event to wait for. A capture could not
    // wait for one.
    unsafe { device.as_cuda_device()?.disable_event_tracking() };
    Ok(device)
}

/// Runs `count` steps.
pub fn repeat(device: &CudaDevice, count: usize, step: impl Fn() -> Result<()>) -> Result<()> {
    if count == 0 {
        return Ok(());
    }
    // candle keeps what the first step uploads for its kernels, so later steps upload nothing.
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
