//! The gradients of an adapter's matrices on the GPU, against binary64.

use std::sync::Arc;

use half::{bf16, f16};
use nf4::cuda::CudaLoraGrad;
use nf4::cudarc::driver::{CudaSlice, CudaStream, DeviceRepr, ValidAsZeroBits};
use nf4::{lora_grad_into, LoraGradOf, MatrixOf, Result};

use super::common::Number;
use super::cuda::stream;
use super::lora_grad::{check_close, Operands, COLS, M, RANK, ROWS, SCALE};

/// Operands without gaps, in buffers on the GPU.
struct OnGpu<T> {
    x: CudaSlice<T>,
    grad_y: CudaSlice<T>,
    p: CudaSlice<T>,
    q: CudaSlice<T>,
}

impl<T: Number + DeviceRepr> OnGpu<T> {
    fn upload(stream: &Arc<CudaStream>, operands: &Operands<T>) -> Result<Self> {
        Ok(OnGpu {
            x: stream.clone_htod(&operands.x)?,
            grad_y: stream.clone_htod(&operands.grad_y)?,
            p: stream.clone_htod(&operands.p)?,
            q: stream.clone_htod(&operands.q)?,
        })
    }

    fn view(&self) -> LoraGradOf<&CudaSlice<T>> {
        LoraGradOf {
            rank: RANK,
            scale: SCALE,
            x: MatrixOf::new(&self.x, M, COLS).expect("it fits"),
            grad_y: MatrixOf::new(&self.grad_y, M, ROWS).expect("it fits"),
            p: &self.p,
            q: &self.q,
        }
    }
}

fn is_close<T, G>(stream: &Arc<CudaStream>, epsilon: f64) -> Result<()>
where
    T: Number + DeviceRepr,
    G: Number + DeviceRepr + ValidAsZeroBits,
{
    let operands = Operands::<T>::new(0);
    let on_gpu = OnGpu::upload(stream, &operands)?;
    let mut grad_a = stream.alloc_zeros::<G>(RANK * COLS)?;
    let mut grad_b = stream.alloc_zeros::<G>(ROWS * RANK)?;
    let to_a = &mut MatrixOf::new(&mut grad_a, RANK, COLS)?;
    let to_b = &mut MatrixOf::new(&mut grad_b, ROWS, RANK)?;
    lora_grad_into(&on_gpu.view(), Some(to_a), Some(to_b), stream)?;
    let (grad_a, grad_b) = (stream.clone_dtoh(&grad_a)?, stream.clone_dtoh(&grad_b)?);
    stream.synchronize()?;
    check_close(&grad_a, COLS, epsilon, |i, j| operands.of_a(i, j));
    check_close(&grad_b, RANK, epsilon, |i, j| operands.of_b(i, j));
    Ok(())
}

#[test]
fn gradients_are_those_of_binary64() -> Result<()> {
    let Some(stream) = stream() else {
        return Ok(());
    };
    is_close::<f32, f32>(&stream, f64::powi(2.0, -24))?;
    is_close::<f16, f32>(&stream, f64::powi(2.0, -24))?;
    is_close::<bf16, f32>(&stream, f64::powi(2.0, -24))?;
    is_close::<f16, f16>(&stream, f64::powi(2.0, -11))?;
    is_close::<bf16, bf16>(&stream, f64::powi(2.0, -8))
}

#[test]
fn one_gradient_needs_its_own_operands_alone() -> Result<()> {
    let Some(stream) = stream() else {
        return Ok(());
    };
    let operands = Operands::<bf16>::new(0);
    let on_gpu = OnGpu::upload(&stream, &operands)?;
    let none = || on_gpu.p.slice(..0);
    let of_b = CudaLoraGrad {
        rank: RANK,
        scale: SCALE,
        x: MatrixOf::new(none(), 0, 0)?,
        grad_y: MatrixOf::new(on_gpu.grad_y.as_view(), M, ROWS)?,
        p: on_gpu.p.as_view(),
        q: none(),
    };
    let mut grad_b = stream.alloc_zeros::<f32>(ROWS * RANK)?;
    let to_b = &mut MatrixOf::new(&mut grad_b, ROWS, RANK)?;
    lora_grad_into(&of_b, None, Some(to_b), &stream)?;
    let grad_b = stream.clone_dtoh(&grad_b)?;
    stream.synchronize()?;
    let epsilon = f64::powi(2.0, -24);
    check_close(&grad_b, RANK, epsilon, |i, j| operands.of_b(i, j));
    Ok(())
}
