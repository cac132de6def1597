//! The example's model on tests/golden/llama, beside what transformers computed.

#[path = "../examples/llama/config.rs"]
mod config;
#[cfg(feature = "cuda")]
#[path = "../examples/llama/graph.rs"]
mod graph;
#[path = "../examples/llama/model.rs"]
mod model;
#[path = "../examples/llama/session.rs"]
mod session;
#[path = "../examples/llama/weights.rs"]
mod weights;

use std::path::PathBuf;

use candle_core::{safetensors, DType, Device, Tensor};
use config::Config;
use model::Llama;
use nf4::checkpoint::Checkpoint;
use serde_json::{json, Value};
use session::Session;
use weights::Loader;

/// Above the working directory, so that the program can be carried to a machine with a GPU.
fn folder() -> PathBuf {
    let here = std::env::current_dir().expect("it is there");
    let mut folders = here.ancestors().map(|up| up.join("tests/golden/llama"));
    folders.find(|path| path.exists()).expect("a checkout")
}

fn checkpoint(path: PathBuf) -> Checkpoint {
    // SAFETY: nothing writes to the file.
    unsafe { Checkpoint::open(path) }.expect("it is read")
}

fn load_from(checkpoint: &Checkpoint, device: &Device, dtype: DType) -> candle_core::Result<Llama> {
    let config = Config::read(&folder().join("config.json"))?;
    let loader = Loader {
        checkpoint,
        device,
        dtype,
    };
    Llama::load(config, &loader)
}

fn load(dtype: DType) -> candle_core::Result<Llama> {
    load_from(&checkpoint(folder()), &Device::Cpu, dtype)
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

/// The differences of the prompt's logits from those of transformers in fp32.
fn errors(model: Llama) -> candle_core::Result<Vec<f64>> {
    let prompt = tokens("prompt");
    let logits = Session::new(&model, prompt.len())?.prefill(&prompt)?;
    let logits: Vec<f32> = logits.to_vec1()?;
    let wanted = expected("logits");
    assert_eq!(logits.len(), wanted.len());
    let pairs = logits.iter().zip(wanted);
    Ok(pairs
        .map(|(ours, theirs)| f64::from(*ours) - theirs)
        .collect())
}

fn rms(errors: Vec<f64>) -> f64 {
    let squares: f64 = errors.iter().map(|error| error * error).sum();
    (squares / errors.len() as f64).sqrt()
}

fn largest(errors: Vec<f64>) -> f64 {
    errors.into_iter().fold(0.0, |a, b| a.max(b.abs()))
}

#[test]
fn logits_are_those_of_transformers() -> candle_core::Result<()> {
    let largest = largest(errors(load(DType::F32)?)?);
    assert!(largest < 1e-4, "{largest}");
    Ok(())
}

/// Checkpoints as `nf4 quantize --skip layers.0`, or `--skip q_proj`, writes them.
#[test]
fn layers_may_be_dense() -> candle_core::Result<()> {
    let of_a_layer = |name: &str| name.starts_with("model.layers.0.");
    dense_where(of_a_layer, 7)?;
    dense_where(|name| name.contains("q_proj"), 2)
}

fn dense_where(skip: impl Fn(&str) -> bool, expected: usize) -> candle_core::Result<()> {
    let stored = checkpoint(folder());
    let mut tensors = safetensors::load(folder().join("model.safetensors"), &Device::Cpu)?;
    let layer = stored
        .names()
        .filter(|name| skip(name) && stored.is_quantized(name));
    let mut count = 0;
    for name in layer {
        let weight = stored.weight(name).expect("it is read");
        let values: Vec<f32> =
            nf4::dequantize(weight.view().expect("it fits"), 1).expect("it runs");
        tensors.retain(|key, _| !key.starts_with(name));
        let dense = Tensor::from_vec(values, weight.shape(), &Device::Cpu)?;
        tensors.insert(name.to_string(), dense);
        count += 1;
    }
    assert_eq!(count, expected);
    let path = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("dense_layer.safetensors");
    safetensors::save(&tensors, &path)?;
    let largest = largest(errors(load_from(
        &checkpoint(path),
        &Device::Cpu,
        DType::F32,
    )?)?);
    assert!(largest < 1e-4, "{largest}");
    Ok(())
}

#[test]
fn configs_of_what_is_not_computed_are_refused() {
    let text = std::fs::read(folder().join("config.json")).expect("it is read");
    let published: Value = serde_json::from_slice(&text).expect("it is JSON");
    let path = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("config.json");
    for (key, value) in [
        ("rope_parameters", json!({"rope_type": "llama3"})),
        (
            "rope_scaling",
            json!({"rope_type": "llama3", "factor": 8.0}),
        ),
        ("rope_scaling", json!({"type": "linear", "factor": 2.0})),
        ("attention_bias", json!(true)),
        ("mlp_bias", json!(true)),
        ("hidden_act", json!("gelu")),
        ("num_key_value_heads", json!("two")),
        ("num_key_value_heads", json!(3)),
        ("num_attention_heads", json!(0)),
        ("rms_norm_eps", json!("small")),
    ] {
        let mut config = published.clone();
        config[key] = value;
        std::fs::write(&path, config.to_string()).expect("it is written");
        let refused = Config::read(&path)
            .err()
            .expect("it is refused")
            .to_string();
        let key = key.replace("_parameters", "_type");
        assert!(refused.contains(&key), "{refused}");
    }
}

/// transformers' own logits in bf16 have an error of that size, too; candle rounds a little more often.
#[test]
fn logits_in_bf16_are_within_its_rounding() -> candle_core::Result<()> {
    let (ours, theirs) = (
        rms(errors(load(DType::BF16)?)?),
        expected("bf16_rms_error")[0],
    );
    assert!(ours < 2.0 * theirs, "{ours}; transformers' is {theirs}");
    Ok(())
}

/// In fp32 and bf16, and the tokens by a CUDA graph.
#[cfg(feature = "cuda")]
#[test]
fn a_gpu_does_the_same() -> candle_core::Result<()> {
    let Ok(device) = graph::device() else {
        eprintln!("skipped: no GPU");
        return Ok(());
    };
    let stored = checkpoint(folder());
    let load = |dtype| load_from(&stored, &device, dtype);
    let largest = largest(errors(load(DType::F32)?)?);
    assert!(largest < 1e-4, "{largest}");
    let (ours, theirs) = (
        rms(errors(load(DType::BF16)?)?),
        expected("bf16_rms_error")[0],
    );
    assert!(ours < 2.0 * theirs, "{ours}; transformers' is {theirs}");
    let (model, prompt, wanted) = (load(DType::F32)?, tokens("prompt"), tokens("tokens"));
    let mut session = Session::new(&model, prompt.len() + wanted.len())?;
    assert_eq!(session.generate(&prompt, wanted.len())?, wanted);
    Ok(())
}

#[test]
fn tokens_are_those_of_transformers() -> candle_core::Result<()> {
    let wanted = tokens("tokens");
    let (model, prompt) = (load(DType::F32)?, tokens("prompt"));
    let mut session = Session::new(&model, prompt.len() + wanted.len())?;
    assert_eq!(session.generate(&prompt, wanted.len())?, wanted);
    let refused = session.steps(2).unwrap_err().to_string();
    assert!(refused.contains("has room for"), "{refused}");
    let refused = session.prefill(&prompt).unwrap_err().to_string();
    assert!(refused.contains("already"), "{refused}");
    let refused = Session::new(&model, 2)?.prefill(&[1, 128]).unwrap_err();
    assert!(refused.to_string().contains("token 128 is outside"));
    let refused = Session::new(&model, 65).err().expect("it is refused");
    assert!(refused.to_string().contains("max_position_embeddings, 64"));
    Ok(())
}
