//! Reads the config.json of a model of LLaMA's shape.

use std::path::Path;

use candle_core::{bail, Error, Result};
use serde_json::Value;

pub struct Config {
    pub hidden: usize,
    pub intermediate: usize,
    pub layers: usize,
    pub heads: usize,
    pub kv_heads: usize,
    pub head_dim: usize,
    pub eps: f64,
    pub theta: f64,
    pub positions: usize,
    pub tied: bool,
}

impl Config {
    pub fn read(path: &Path) -> Result<Self> {
        let text = std::fs::read(path).map_err(|error| Error::wrap(error).with_path(path))?;
        let json: Value = serde_json::from_slice(&text).map_err(Error::wrap)?;
        let size = |key: &str| match json[key].as_u64() {
            Some(size) if size > 0 => Ok(size as usize),
            _ => bail!("config.json: {key} is {}", json[key]),
        };
        let size_or = |key: &str, otherwise| match json[key].is_null() {
            true => Ok(otherwise),
            false => size(key),
        };
        if json["model_type"] != "llama" {
            bail!(
                "config.json: model_type is {}; expected \"llama\"",
                json["model_type"]
            );
        }
        let (hidden, heads) = (size("hidden_size")?, size("num_attention_heads")?);
        // Before transformers 5 its parts stood beside the others, and in rope_scaling.
        let rope = &json["rope_parameters"];
        let theta = match &rope["rope_theta"] {
            Value::Null => &json["rope_theta"],
            theta => theta,
        };
        let scaling = &json["rope_scaling"];
        only("rope_type", &rope["rope_type"], "default".into())?;
        only("rope_scaling", &scaling["type"], "default".into())?;
        only("rope_scaling", &scaling["rope_type"], "default".into())?;
        only("hidden_act", &json["hidden_act"], "silu".into())?;
        only("attention_bias", &json["attention_bias"], false.into())?;
        only("mlp_bias", &json["mlp_bias"], false.into())?;
        let kv_heads = size_or("num_key_value_heads", heads)?;
        if heads % kv_heads != 0 {
            bail!("config.json: num_attention_heads is {heads}, num_key_value_heads {kv_heads}");
        }
        Ok(Config {
            hidden,
            intermediate: size("intermediate_size")?,
            layers: size("num_hidden_layers")?,
            heads,
            kv_heads,
            head_dim: size_or("head_dim", hidden / heads)?,
            eps: number_or("rms_norm_eps", &json["rms_norm_eps"], 1e-6)?,
            theta: number_or("rope_theta", theta, 10000.0)?,
            positions: size_or("max_position_embeddings", 2048)?,
            tied: json["tie_word_embeddings"] == true,
        })
    }
}

fn number_or(key: &str, value: &Value, otherwise: f64) -> Result<f64> {
    match value.as_f64() {
        Some(number) => Ok(number),
        None if value.is_null() => Ok(otherwise),
        None => bail!("config.json: {key} is {value}"),
    }
}

/// Checks that a value is the one that this model computes. An absent key and null mean that value.
fn only(key: &str, value: &Value, computed: Value) -> Result<()> {
    if value.is_null() || *value == computed {
        return Ok(());
    }
    bail!("config.json: {key} is {value}; only {computed} is supported")
}
