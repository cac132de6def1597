//! The product on a GPU: libnf4 reads and writes candle's buffers, on candle's stream.

use std::ops::Range;

use candle_core::backend::BackendStorage;
use candle_core::cuda_backend::cudarc::driver::DeviceRepr;
use candle_core::cuda_backend::{CudaDType, CudaDevice, CudaStorage};
use candle_core::{bail, CustomOp1, DType, Layout, Result, Shape};
use nf4::cuda::{matmul_grad_into, matmul_into, matmul_joined_into, CudaTensor};
use nf4::{Element, QuantizedTensor};

use crate::product::{Extent, Product, Weight};
use crate::wrap;

/// The most rows of x in fp32 that a launch takes; more go in pieces. The gradient takes any number.
const FP32_ROWS: usize = 16;

pub(crate) fn upload(weight: &QuantizedTensor, device: &CudaDevice) -> Result<Weight> {
    let weight = CudaTensor::upload(&device.cuda_stream(), weight).map_err(wrap)?;
    Ok(Weight::Cuda(Box::new(weight)))
}

/// Where it lies in its storage; of a product with one weight.
type Bias<'a> = Option<(&'a CudaStorage, Range<usize>)>;

pub(crate) fn forward(
    product: &Product,
    storage: &CudaStorage,
    layout: &Layout,
    bias: Bias,
) -> Result<(CudaStorage, Shape)> {
    let extent = product.extent(layout)?;
    let y = match storage.dtype() {
        DType::F32 => on_device::<f32>(product, storage, &extent, bias),
        DType::F16 => on_device::<half::f16>(product, storage, &extent, bias),
        DType::BF16 => on_device::<half::bf16>(product, storage, &extent, bias),
        _ => bail!("{}: the input is neither F32, F16 nor BF16", product.name()),
    }?;
    Ok((y, extent.shape))
}

fn on_device<T: Element + CudaDType + DeviceRepr>(
    product: &Product,
    storage: &CudaStorage,
    extent: &Extent,
    bias: Bias,
) -> Result<CudaStorage> {
    let Extent { from, to, m, .. } = *extent;
    let ((inputs, outputs), device) = (product.sizes(), storage.device());
    let stream = device.cuda_stream();
    let x = storage.as_cuda_slice::<T>()?.slice(from..to);
    let bias = match bias {
        Some((bias, all)) => Some(bias.as_cuda_slice::<T>()?.slice(all)),
        None => None,
    };
    let most = if T::DTYPE == nf4::DType::F32 && !product.is_gradient() {
        m.min(FP32_ROWS)
    } else {
        m
    };
    let (mut views, mut bytes) = (Vec::with_capacity(product.weights().len()), 0);
    for weight in product.weights() {
        let Weight::Cuda(weight) = weight else {
            bail!(
                "{}: the input is on a GPU, the weight is not",
                product.name()
            );
        };
        let of_one = if product.is_gradient() {
            weight.spec().matmul_grad_workspace_bytes::<T>(most, 0)
        } else {
            weight.spec().matmul_workspace_bytes::<T>(most)
        };
        bytes = bytes.max(of_one.map_err(wrap)?);
        views.push(weight.view());
    }
    // SAFETY: the launches below write every element of y before anything reads one; what they read of
    // their workspace they have written. CUDA has no allocation of 0 bytes.
    let (mut y, mut workspace) = unsafe {
        let y = device.alloc::<T>((m * outputs).max(1))?;
        (
            y,
            (bytes > 0).then(|| device.alloc::<u8>(bytes)).transpose()?,
        )
    };
    let mut workspace = workspace.as_mut().map(|bytes| bytes.as_view_mut());
    for row in (0..m).step_by(most.max(1)) {
        let rows = most.min(m - row);
        let x = x.slice(row * inputs..(row + rows) * inputs);
        let (to, workspace) = (
            &mut y.slice_mut(row * outputs..(row + rows) * outputs),
            workspace.as_mut(),
        );
        if product.is_gradient() {
            matmul_grad_into(&x, rows, &views[0], to, workspace, &stream)
        } else if bias.is_some() {
            matmul_into(&x, rows, &views[0], bias.as_ref(), to, workspace, &stream)
        } else {
            matmul_joined_into(&x, rows, &views, to, workspace, &stream)
        }
        .map_err(wrap)?;
    }
    Ok(CudaStorage::wrap_cuda_slice(y, device.clone()))
}
