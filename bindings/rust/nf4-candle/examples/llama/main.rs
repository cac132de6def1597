//! Generates greedily from a checkpoint of LLaMA's shape in 4 bits, as transformers or
//! `nf4 quantize` writes it. Tokens go in and out as numbers, since there is no tokenizer here.
//!
//!     cargo run --release -p nf4-candle --example llama -- FOLDER COUNT TOKEN...

mod model;

use std::path::Path;
use std::time::Instant;

use candle_core::{DType, Device};
use nf4::checkpoint::Checkpoint;

use model::{Config, Llama};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [folder, count, prompt @ ..] = &arguments[..] else {
        return Err("llama FOLDER COUNT TOKEN...".into());
    };
    let (folder, count) = (Path::new(folder), count.parse::<usize>()?);
    let prompt = prompt
        .iter()
        .map(|token| token.parse())
        .collect::<Result<Vec<u32>, _>>()?;
    if prompt.is_empty() {
        return Err("the prompt has no token".into());
    }
    let device = Device::cuda_if_available(0)?;
    let dtype = if device.is_cuda() {
        DType::BF16
    } else {
        DType::F32
    };
    // SAFETY: nothing writes to the files while they are mapped.
    let checkpoint = unsafe { Checkpoint::open(folder) }?;
    let mut model = Llama::load(
        Config::read(&folder.join("config.json"))?,
        &checkpoint,
        &device,
        dtype,
    )?;
    let began = Instant::now();
    let tokens = model.generate(&prompt, count)?;
    let speed = tokens.len() as f64 / began.elapsed().as_secs_f64();
    println!("{tokens:?}\n{speed:.1} tokens/s");
    Ok(())
}
