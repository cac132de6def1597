//! A model of LLaMA's shape on candle: grouped-query attention, a KV cache, and linear layers that are
//! in 4 bits where the checkpoint has them so.

use std::path::Path;

use candle_core::safetensors::Load;
use candle_core::{bail, DType, Device, Error, IndexOp, Module, Result, Tensor, D};
use nf4::checkpoint::Checkpoint;
use nf4_candle::QuantizedLinear;
use serde_json::Value;

pub struct Config {
    hidden: usize,
    intermediate: usize,
    layers: usize,
    heads: usize,
    kv_heads: usize,
    head_dim: usize,
    eps: f64,
    theta: f64,
    tied: bool,
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

/// Reads tensors of a checkpoint onto a device.
struct Loader<'a> {
    checkpoint: &'a Checkpoint,
    device: &'a Device,
    dtype: DType,
}

impl Loader<'_> {
    fn dense(&self, name: &str, shape: &[usize]) -> Result<Tensor> {
        let view = self.checkpoint.tensor(name).map_err(Error::wrap)?;
        if view.shape() != shape {
            bail!(
                "{name} has the shape {:?}; expected {shape:?}",
                view.shape()
            );
        }
        view.load(self.device)?.to_dtype(self.dtype)
    }

    fn linear(&self, name: &str, rows: usize, cols: usize) -> Result<Linear> {
        let name = format!("{name}.weight");
        if !self.checkpoint.is_quantized(&name) {
            return Ok(Linear::Dense(self.dense(&name, &[rows, cols])?.t()?));
        }
        let stored = self.checkpoint.weight(&name).map_err(Error::wrap)?;
        if stored.shape() != [rows, cols] {
            bail!(
                "{name} has the shape {:?}; expected {:?}",
                stored.shape(),
                [rows, cols]
            );
        }
        let weight = stored.to_tensor().map_err(Error::wrap)?;
        Ok(Linear::Quantized(QuantizedLinear::new(
            weight,
            None,
            self.device,
        )?))
    }
}

enum Linear {
    Quantized(QuantizedLinear),
    Dense(Tensor),
}

impl Module for Linear {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        match self {
            Linear::Quantized(linear) => linear.forward(x),
            Linear::Dense(weight) => x.broadcast_matmul(weight),
        }
    }
}

struct Norm {
    weight: Tensor,
    eps: f64,
}

impl Module for Norm {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let dtype = x.dtype();
        let x = x.to_dtype(DType::F32)?;
        let mean = x.sqr()?.mean_keepdim(D::Minus1)?;
        let x = x.broadcast_div(&(mean + self.eps)?.sqrt()?)?;
        x.to_dtype(dtype)?.broadcast_mul(&self.weight)
    }
}

struct Layer {
    norms: [Norm; 2],
    /// q, k, v, o, gate, up, down.
    linear: [Linear; 7],
    cache: Option<(Tensor, Tensor)>,
}

pub struct Llama {
    config: Config,
    embedding: Tensor,
    layers: Vec<Layer>,
    norm: Norm,
    head: Linear,
    device: Device,
    /// Tokens in the KV cache.
    past: usize,
}

impl Llama {
    pub fn load(
        config: Config,
        checkpoint: &Checkpoint,
        device: &Device,
        dtype: DType,
    ) -> Result<Self> {
        let loader = Loader {
            checkpoint,
            device,
            dtype,
        };
        let (hidden, wide) = (config.hidden, config.intermediate);
        let norm = |name: &str| -> Result<Norm> {
            let weight = loader.dense(&format!("{name}.weight"), &[hidden])?;
            Ok(Norm {
                weight,
                eps: config.eps,
            })
        };
        let embedding = checkpoint
            .tensor("model.embed_tokens.weight")
            .map_err(Error::wrap)?;
        let vocabulary = embedding.shape().first().copied().unwrap_or(0);
        let embedding = loader.dense("model.embed_tokens.weight", &[vocabulary, hidden])?;
        let (q, kv) = (
            config.heads * config.head_dim,
            config.kv_heads * config.head_dim,
        );
        let layers = (0..config.layers).map(|i| {
            let of = |name: &str| format!("model.layers.{i}.{name}");
            Ok(Layer {
                norms: [
                    norm(&of("input_layernorm"))?,
                    norm(&of("post_attention_layernorm"))?,
                ],
                linear: [
                    loader.linear(&of("self_attn.q_proj"), q, hidden)?,
                    loader.linear(&of("self_attn.k_proj"), kv, hidden)?,
                    loader.linear(&of("self_attn.v_proj"), kv, hidden)?,
                    loader.linear(&of("self_attn.o_proj"), hidden, q)?,
                    loader.linear(&of("mlp.gate_proj"), wide, hidden)?,
                    loader.linear(&of("mlp.up_proj"), wide, hidden)?,
                    loader.linear(&of("mlp.down_proj"), hidden, wide)?,
                ],
                cache: None,
            })
        });
        let layers = layers.collect::<Result<_>>()?;
        let head = if config.tied {
            Linear::Dense(embedding.t()?)
        } else {
            loader.linear("lm_head", vocabulary, hidden)?
        };
        Ok(Llama {
            embedding,
            layers,
            norm: norm("model.norm")?,
            head,
            device: device.clone(),
            past: 0,
            config,
        })
    }

    /// The logits of the last of these tokens, which follow those of earlier calls.
    pub fn forward(&mut self, tokens: &[u32]) -> Result<Tensor> {
        let tokens = Tensor::new(tokens, &self.device)?;
        let mut x = self.embedding.index_select(&tokens, 0)?;
        let count = x.dim(0)?;
        let angles = self.angles(count)?;
        for layer in &mut self.layers {
            x = (&x + layer.attention(&layer.norms[0].forward(&x)?, &self.config, &angles)?)?;
            x = (&x + layer.mlp(&layer.norms[1].forward(&x)?)?)?;
        }
        self.past += count;
        let last = self.norm.forward(&x.i(count - 1..)?)?;
        self.head.forward(&last)?.squeeze(0)?.to_dtype(DType::F32)
    }

    /// The most likely tokens after a prompt.
    pub fn generate(&mut self, prompt: &[u32], count: usize) -> Result<Vec<u32>> {
        let mut tokens = Vec::with_capacity(count);
        let mut logits = self.forward(prompt)?;
        while tokens.len() < count {
            tokens.push(logits.argmax(0)?.to_scalar::<u32>()?);
            if tokens.len() < count {
                logits = self.forward(&tokens[tokens.len() - 1..])?;
            }
        }
        Ok(tokens)
    }

    /// cos and sin [count, head_dim / 2] of the rotary position embedding.
    fn angles(&self, count: usize) -> Result<(Tensor, Tensor)> {
        let Config {
            head_dim, theta, ..
        } = self.config;
        let angles: Vec<f32> = (self.past..self.past + count)
            .flat_map(|position| {
                let frequency =
                    move |i: usize| theta.powf(-2.0 * i as f64 / head_dim as f64) as f32;
                (0..head_dim / 2).map(move |i| position as f32 * frequency(i))
            })
            .collect();
        let angles = Tensor::from_vec(angles, (count, head_dim / 2), &self.device)?;
        let dtype = self.embedding.dtype();
        Ok((
            angles.cos()?.to_dtype(dtype)?,
            angles.sin()?.to_dtype(dtype)?,
        ))
    }
}

impl Layer {
    fn attention(
        &mut self,
        x: &Tensor,
        config: &Config,
        angles: &(Tensor, Tensor),
    ) -> Result<Tensor> {
        let (count, dim, groups) = (x.dim(0)?, config.head_dim, config.heads / config.kv_heads);
        // [heads, tokens, head_dim]
        let heads = |y: Tensor, heads: usize| y.reshape((count, heads, dim))?.transpose(0, 1);
        let [q, k, v, o, ..] = &self.linear;
        let q = rotate(&heads(q.forward(x)?, config.heads)?, angles)?;
        let k = rotate(&heads(k.forward(x)?, config.kv_heads)?, angles)?;
        let v = heads(v.forward(x)?, config.kv_heads)?;
        let (k, v) = match self.cache.take() {
            Some((past_k, past_v)) => (
                Tensor::cat(&[&past_k, &k], 1)?,
                Tensor::cat(&[&past_v, &v], 1)?,
            ),
            None => (k.contiguous()?, v.contiguous()?),
        };
        self.cache = Some((k.clone(), v.clone()));

        // The heads that share keys and values are rows of one product.
        let total = k.dim(1)?;
        let q = q
            .contiguous()?
            .reshape((config.kv_heads, groups * count, dim))?;
        // candle's own sums on the CPU are rounded to bf16: in fp32, as fused attention has them.
        let (q, v) = (q.to_dtype(DType::F32)?, v.to_dtype(DType::F32)?);
        let k = k.to_dtype(DType::F32)?.t()?.contiguous()?;
        let scores = (q.matmul(&k)? / (dim as f64).sqrt())?;
        let scores = scores.reshape((config.kv_heads, groups, count, total))?;
        let scores = scores.broadcast_add(&causal(count, total, x.device())?)?;
        let scores = scores
            .broadcast_sub(&scores.max_keepdim(D::Minus1)?)?
            .exp()?;
        let weights = scores.broadcast_div(&scores.sum_keepdim(D::Minus1)?)?;
        let y = weights
            .reshape((config.kv_heads, groups * count, total))?
            .matmul(&v.contiguous()?)?;
        let y = y.reshape((config.heads, count, dim))?.transpose(0, 1)?;
        let y = y.to_dtype(x.dtype())?;
        o.forward(&y.contiguous()?.reshape((count, config.heads * dim))?)
    }

    fn mlp(&self, x: &Tensor) -> Result<Tensor> {
        let [.., gate, up, down] = &self.linear;
        down.forward(&(gate.forward(x)?.silu()? * up.forward(x)?)?)
    }
}

fn rotate(x: &Tensor, (cos, sin): &(Tensor, Tensor)) -> Result<Tensor> {
    let half = x.dim(D::Minus1)? / 2;
    let (a, b) = (
        x.narrow(D::Minus1, 0, half)?,
        x.narrow(D::Minus1, half, half)?,
    );
    let first = (a.broadcast_mul(cos)? - b.broadcast_mul(sin)?)?;
    let second = (b.broadcast_mul(cos)? + a.broadcast_mul(sin)?)?;
    Tensor::cat(&[first, second], D::Minus1)
}

/// Minus infinity where the last `count` of `total` tokens would see a later one.
fn causal(count: usize, total: usize, device: &Device) -> Result<Tensor> {
    let past = total - count;
    let mask: Vec<f32> = (0..count)
        .flat_map(|i| (0..total).map(move |j| if j > past + i { f32::NEG_INFINITY } else { 0.0 }))
        .collect();
    Tensor::from_vec(mask, (count, total), device)
}
