//! Generates greedily from a 4-bit checkpoint of LLaMA's shape that transformers or `nf4 quantize`
//! wrote. It continues the prompt, given as token ids, by COUNT tokens, and prints their ids: there is
//! no tokenizer here. With `--speed` it measures how long a token takes with random weights of
//! LLaMA-7B's shape, in 4 bits and in bf16. To compare with candle-transformers' own model, run
//! `cargo run --release -p nf4-candle-bench --features cuda`.
//!
//!     cargo run --release -p nf4-candle --example llama -- FOLDER COUNT TOKEN...

mod config;
#[cfg(feature = "cuda")]
mod graph;
mod model;
mod session;
mod speed;
mod weights;

use std::path::Path;
use std::time::Instant;

use candle_core::{DType, Device};
use nf4::checkpoint::Checkpoint;

use config::Config;
use model::Llama;
use session::Session;
use weights::Loader;

const USAGE: &str = "llama FOLDER COUNT TOKEN... | llama --speed [LAYERS]";

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    #[cfg(feature = "cuda")]
    let device = graph::device()?;
    #[cfg(not(feature = "cuda"))]
    let device = Device::Cpu;
    match &arguments[..] {
        [speed, layers @ ..] if speed == "--speed" => {
            let layers = layers.first().map_or(Ok(32), |layers| layers.parse());
            Ok(speed::measure(layers?, &device)?)
        }
        [folder, count, prompt @ ..] if !prompt.is_empty() => {
            let prompt = prompt.iter().map(|token| token.parse());
            let prompt = prompt.collect::<Result<Vec<u32>, _>>()?;
            generate(Path::new(folder), count.parse()?, &prompt, &device)
        }
        _ => Err(USAGE.into()),
    }
}

fn generate(
    folder: &Path,
    count: usize,
    prompt: &[u32],
    device: &Device,
) -> Result<(), Box<dyn std::error::Error>> {
    // SAFETY: nothing writes to the files while they are mapped.
    let checkpoint = unsafe { Checkpoint::open(folder) }?;
    let loader = Loader {
        checkpoint: &checkpoint,
        device,
        dtype: if device.is_cuda() {
            DType::BF16
        } else {
            DType::F32
        },
    };
    let model = Llama::load(Config::read(&folder.join("config.json"))?, &loader)?;
    let mut session = Session::new(&model, prompt.len() + count)?;
    let began = Instant::now();
    let tokens = session.generate(prompt, count)?;
    let speed = tokens.len() as f64 / began.elapsed().as_secs_f64();
    println!("{tokens:?}\n{speed:.1} tokens/s");
    Ok(())
}
