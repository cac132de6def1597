//! How long a token takes with random weights of LLaMA-7B's shape, batch 1, in three forms: the example
//! `llama` of nf4-candle in bf16 and in NF4, and candle-transformers' own model in bf16. On a GPU the
//! example's steps are a CUDA graph; candle-transformers' cannot be, as its cache grows by copies.
//!
//!     cargo run --release -p nf4-candle-bench --features cuda -- [LAYERS]

// The part of the example that reads checkpoints is not used here.
#[allow(dead_code)]
#[path = "../../../bindings/rust/nf4-candle/examples/llama/config.rs"]
mod config;
#[cfg(feature = "cuda")]
#[path = "../../../bindings/rust/nf4-candle/examples/llama/graph.rs"]
mod graph;
#[path = "../../../bindings/rust/nf4-candle/examples/llama/model.rs"]
mod model;
#[allow(dead_code)]
#[path = "../../../bindings/rust/nf4-candle/examples/llama/session.rs"]
mod session;
#[path = "../../../bindings/rust/nf4-candle/examples/llama/speed.rs"]
mod speed;
#[allow(dead_code)]
#[path = "../../../bindings/rust/nf4-candle/examples/llama/weights.rs"]
mod weights;

use std::collections::HashMap;
use std::time::Instant;

use candle_core::{DType, Device, Result, Tensor, D};
use candle_nn::VarBuilder;
use candle_transformers::models::llama::{Cache, Config, Llama};

fn main() -> std::result::Result<(), Box<dyn std::error::Error>> {
    let layers = std::env::args()
        .nth(1)
        .map_or(Ok(32), |count| count.parse())?;
    #[cfg(feature = "cuda")]
    let device = graph::device()?;
    #[cfg(not(feature = "cuda"))]
    let device = Device::Cpu;
    speed::measure(layers, &device)?;
    let seconds = of_candle(layers, &device)?;
    println!("candle-transformers' LLaMA, bf16: {:.0} us", seconds * 1e6);
    Ok(())
}

/// Seconds a token of candle-transformers' model, at the lengths that `speed` measures.
fn of_candle(layers: usize, device: &Device) -> Result<f64> {
    let config = Config {
        num_hidden_layers: layers,
        ..Config::config_7b_v1(false)
    };
    let weights = VarBuilder::from_tensors(random(&config, device)?, DType::BF16, device);
    let model = Llama::load(weights, &config)?;
    let mut cache = Cache::new(true, DType::BF16, &config, device)?;
    let mut step = |tokens: &[u32], position| -> Result<u32> {
        let tokens = Tensor::new(tokens, device)?.unsqueeze(0)?;
        let logits = model.forward(&tokens, position, &mut cache)?;
        logits.squeeze(0)?.argmax(D::Minus1)?.to_scalar()
    };
    let prompt: Vec<u32> = (0..16).collect();
    let mut token = step(&prompt, 0)?;
    let mut steps = |positions: std::ops::Range<usize>| -> Result<()> {
        for position in positions {
            token = step(&[token], position)?;
        }
        Ok(())
    };
    steps(16..48)?;
    let began = Instant::now();
    steps(48..112)?;
    Ok(began.elapsed().as_secs_f64() / 64.0)
}

fn random(config: &Config, device: &Device) -> Result<HashMap<String, Tensor>> {
    let (hidden, wide) = (config.hidden_size, config.intermediate_size);
    let ones = Tensor::ones(hidden, DType::BF16, device)?;
    let dense = |rows, cols| Tensor::randn(0f32, 0.02, (rows, cols), device)?.to_dtype(DType::BF16);
    let mut tensors = HashMap::from([
        ("model.norm.weight".to_string(), ones.clone()),
        (
            "model.embed_tokens.weight".into(),
            dense(config.vocab_size, hidden)?,
        ),
        ("lm_head.weight".into(), dense(config.vocab_size, hidden)?),
    ]);
    let attention =
        ["q", "k", "v", "o"].map(|name| (format!("self_attn.{name}_proj"), hidden, hidden));
    let mlp = [
        ("gate", wide, hidden),
        ("up", wide, hidden),
        ("down", hidden, wide),
    ];
    let mlp = mlp.map(|(name, rows, cols)| (format!("mlp.{name}_proj"), rows, cols));
    for layer in 0..config.num_hidden_layers {
        for norm in ["input_layernorm", "post_attention_layernorm"] {
            tensors.insert(format!("model.layers.{layer}.{norm}.weight"), ones.clone());
        }
        for (name, rows, cols) in attention.iter().chain(&mlp) {
            let name = format!("model.layers.{layer}.{name}.weight");
            tensors.insert(name, dense(*rows, *cols)?);
        }
    }
    Ok(tensors)
}
