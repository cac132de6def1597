//! The example's model on tests/golden/llama, beside what transformers computed.

#[path = "../examples/llama/model.rs"]
mod model;

use std::path::PathBuf;

use candle_core::{DType, Device};
use model::{Config, Llama};
use nf4::checkpoint::Checkpoint;
use serde_json::Value;

fn folder() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../../tests/golden/llama")
}

fn load(dtype: DType) -> candle_core::Result<Llama> {
    // SAFETY: nothing writes to the file.
    let checkpoint = unsafe { Checkpoint::open(folder()) }.expect("it is read");
    let config = Config::read(&folder().join("config.json"))?;
    Llama::load(config, &checkpoint, &Device::Cpu, dtype)
}

fn expected(key: &str) -> Vec<f64> {
    let text = std::fs::read(folder().join("expected.json")).expect("it is read");
    let json: Value = serde_json::from_slice(&text).expect("it is JSON");
    let values = json[key].as_array().expect("a list").iter();
    values
        .map(|value| value.as_f64().expect("a number"))
        .collect()
}

fn tokens(key: &str) -> Vec<u32> {
    expected(key)
        .into_iter()
        .map(|token| token as u32)
        .collect()
}

/// What the prompt's logits differ by from those of transformers in fp32.
fn errors(dtype: DType) -> candle_core::Result<Vec<f64>> {
    let logits: Vec<f32> = load(dtype)?.forward(&tokens("prompt"))?.to_vec1()?;
    let wanted = expected("logits");
    assert_eq!(logits.len(), wanted.len());
    let pairs = logits.iter().zip(wanted);
    Ok(pairs
        .map(|(ours, theirs)| f64::from(*ours) - theirs)
        .collect())
}

#[test]
fn logits_are_those_of_transformers() -> candle_core::Result<()> {
    let largest = errors(DType::F32)?
        .into_iter()
        .fold(0.0, |a: f64, b| a.max(b.abs()));
    assert!(largest < 1e-4, "{largest}");
    Ok(())
}

/// transformers' own logits in bf16 have an error of that size, too; candle rounds a little more often.
#[test]
fn logits_in_bf16_are_within_its_rounding() -> candle_core::Result<()> {
    let errors = errors(DType::BF16)?;
    let squares: f64 = errors.iter().map(|error| error * error).sum();
    let (ours, theirs) = (
        (squares / errors.len() as f64).sqrt(),
        expected("bf16_rms_error")[0],
    );
    assert!(ours < 2.0 * theirs, "{ours}; transformers' is {theirs}");
    Ok(())
}

#[test]
fn tokens_are_those_of_transformers() -> candle_core::Result<()> {
    let wanted = tokens("tokens");
    assert_eq!(
        load(DType::F32)?.generate(&tokens("prompt"), wanted.len())?,
        wanted
    );
    Ok(())
}
