//! Measures how long a token takes with random weights of LLaMA-7B's shape, in 4 bits and in bf16.

use std::time::Instant;

use candle_core::{DType, Device, Error, Result, Tensor};
use nf4::{QuantizedTensor, Spec};

use super::config::Config;
use super::model::Llama;
use super::session::Session;
use super::weights::Source;

/// Random weights: in 4 bits except the embedding and the head, or all in bf16.
struct Random<'a> {
    device: &'a Device,
    in_4_bits: bool,
}

const VOCABULARY: usize = 32000;

impl Source for Random<'_> {
    fn place(&self) -> (&Device, DType) {
        (self.device, DType::BF16)
    }

    fn dense(&self, _: &str, shape: &[Option<usize>]) -> Result<Tensor> {
        let shape: Vec<usize> = shape.iter().map(|n| n.unwrap_or(VOCABULARY)).collect();
        match shape[..] {
            [_] => Tensor::ones(shape, DType::BF16, self.device),
            _ => Tensor::randn(0f32, 0.02, shape, self.device)?.to_dtype(DType::BF16),
        }
    }

    fn quantized(&self, name: &str, rows: usize, cols: usize) -> Result<Option<QuantizedTensor>> {
        if !self.in_4_bits || name == "lm_head.weight" {
            return Ok(None);
        }
        // Every byte is a pair of valid codes.
        let page: Vec<u8> = (0..4096u32)
            .map(|i| (i.wrapping_mul(0x9E37_79B9) >> 19) as u8)
            .collect();
        let codes = page.repeat(rows * cols / 2 / page.len());
        let spec = Spec::new(rows, cols).flat();
        let scales = nf4::Scales::Flat(vec![0.05; rows * cols / 64]);
        let weight = QuantizedTensor::new(spec, codes, scales, None);
        weight.map(Some).map_err(Error::wrap)
    }
}

/// Decodes one sequence. The time of a step is the difference between the times of 78 and of 14 steps,
/// divided by 64, so that the capture of a graph does not count.
pub fn measure(layers: usize, device: &Device) -> Result<()> {
    let mut times = [0.0; 2];
    for (in_4_bits, time) in [false, true].into_iter().zip(&mut times) {
        let config = Config {
            layers,
            hidden: 4096,
            intermediate: 11008,
            heads: 32,
            kv_heads: 32,
            head_dim: 128,
            eps: 1e-6,
            theta: 10000.0,
            positions: 2048,
            tied: false,
        };
        let model = Llama::load(config, &Random { device, in_4_bits })?;
        let mut session = Session::new(&model, 128)?;
        session.prefill(&(0..16).collect::<Vec<_>>())?;
        session.steps(4)?;
        let mut timed = |steps| -> Result<f64> {
            device.synchronize()?;
            let began = Instant::now();
            session.steps(steps)?;
            device.synchronize()?;
            Ok(began.elapsed().as_secs_f64())
        };
        let few = timed(14)?;
        *time = (timed(78)? - few) / 64.0;
    }
    let [dense, quantized] = times.map(|seconds| seconds * 1e6);
    println!(
        "a token: bf16 {dense:.0} us, NF4 {quantized:.0} us: {:.2} times as fast",
        dense / quantized
    );
    Ok(())
}
