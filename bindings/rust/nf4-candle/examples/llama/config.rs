//! What config.json says of a model of LLaMA's shape.

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
    pub tied: bool,
}

impl Config {
    pub fn read(path: &Path) -> Result<Self> {
        let text = std::fs::read(path).map_err(|error| Error::wrap(error).with_path(path))?;
        let json: Value = serde_json::from_slice(&text).map_err(Error::wrap)?;
        let size = |key: &str| match json[key].as_u64() {
            Some(size) => Ok(size as usize),
            None => bail!("config.json: {key} is {}", json[key]),
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
        let theta = rope["rope_theta"].as_f64().or(json["rope_theta"].as_f64());
        let scaling = &json["rope_scaling"];
        only("rope_type", &rope["rope_type"], "default".into())?;
        only("rope_scaling", &scaling["type"], "default".into())?;
        only("rope_scaling", &scaling["rope_type"], "default".into())?;
        only("hidden_act", &json["hidden_act"], "silu".into())?;
        only("attention_bias", &json["attention_bias"], false.into())?;
        only("mlp_bias", &json["mlp_bias"], false.into())?;
        Ok(Config {
            hidden,
            intermediate: size("intermediate_size")?,
            layers: size("num_hidden_layers")?,
            heads,
            kv_heads: size("num_key_value_heads").unwrap_or(heads),
            head_dim: size("head_dim").unwrap_or(hidden / heads),
            eps: json["rms_norm_eps"].as_f64().unwrap_or(1e-6),
            theta: theta.unwrap_or(10000.0),
            tied: json["tie_word_embeddings"] == true,
        })
    }
}

/// What the code below computes, which is also what the absent key or null means.
fn only(key: &str, value: &Value, computed: Value) -> Result<()> {
    if value.is_null() || *value == computed {
        return Ok(());
    }
    bail!("config.json: {key} is {value}; only {computed} is here")
}
