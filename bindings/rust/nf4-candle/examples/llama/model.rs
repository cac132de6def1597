//! A model of LLaMA's shape on candle: grouped-query attention, and linear layers that are in 4 bits
//! where the checkpoint has them so; q, k and v, and gate and up, are one product each.

use candle_core::{DType, IndexOp, Module, Result, Tensor, D};
use candle_nn::ops::{rms_norm, softmax_last_dim};
use candle_nn::rotary_emb::rope_thd;

use super::config::Config;
use super::weights::{Linear, Source};

struct Norm {
    weight: Tensor,
    eps: f32,
}

impl Module for Norm {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        rms_norm(x, &self.weight, self.eps)
    }
}

struct Layer {
    norms: [Norm; 2],
    /// q, k and v; o; gate and up; down.
    linear: [Linear; 4],
}

pub struct Llama {
    pub config: Config,
    pub embedding: Tensor,
    layers: Vec<Layer>,
    norm: Norm,
    head: Linear,
}

impl Llama {
    pub fn load(config: Config, source: &impl Source) -> Result<Self> {
        let (hidden, wide) = (config.hidden, config.intermediate);
        let norm = |name: &str| -> Result<Norm> {
            let weight = source.dense(&format!("{name}.weight"), &[Some(hidden)])?;
            let eps = config.eps as f32;
            Ok(Norm { weight, eps })
        };
        let embedding = source.dense("model.embed_tokens.weight", &[None, Some(hidden)])?;
        let q = config.heads * config.head_dim;
        let kv = config.kv_heads * config.head_dim;
        let layers = (0..config.layers).map(|i| {
            let of = |name: &str| format!("model.layers.{i}.{name}");
            let linear = |names: &[(&str, usize)], cols| {
                let names: Vec<_> = names.iter().map(|(name, n)| (of(name), *n)).collect();
                let names: Vec<_> = names.iter().map(|(name, n)| (&name[..], *n)).collect();
                source.linear(&names, cols)
            };
            let qkv = [("q", q), ("k", kv), ("v", kv)];
            let qkv = qkv.map(|(name, rows)| (format!("self_attn.{name}_proj"), rows));
            let qkv = qkv.each_ref().map(|(name, rows)| (&name[..], *rows));
            Ok(Layer {
                norms: [
                    norm(&of("input_layernorm"))?,
                    norm(&of("post_attention_layernorm"))?,
                ],
                linear: [
                    linear(&qkv, hidden)?,
                    linear(&[("self_attn.o_proj", hidden)], q)?,
                    linear(&[("mlp.gate_proj", wide), ("mlp.up_proj", wide)], hidden)?,
                    linear(&[("mlp.down_proj", hidden)], wide)?,
                ],
            })
        });
        let layers = layers.collect::<Result<_>>()?;
        let head = if config.tied {
            Linear::Dense(embedding.t()?)
        } else {
            source.linear(&[("lm_head", embedding.dim(0)?)], hidden)?
        };
        Ok(Llama {
            embedding,
            layers,
            norm: norm("model.norm")?,
            head,
            config,
        })
    }

    /// The logits [1, vocabulary] of the last of these tokens, in fp32. Nothing here depends on the
    /// values of its operands but on the device.
    pub fn forward(&self, tokens: &Tensor, step: &Step, cache: &[[Tensor; 2]]) -> Result<Tensor> {
        let mut x = self.embedding.index_select(tokens, 0)?;
        for (layer, cache) in self.layers.iter().zip(cache) {
            x = (&x + layer.attention(&layer.norms[0].forward(&x)?, &self.config, step, cache)?)?;
            x = (&x + layer.mlp(&layer.norms[1].forward(&x)?)?)?;
        }
        let last = self.norm.forward(&x.i(x.dim(0)? - 1..)?)?;
        self.head.forward(&last)?.to_dtype(DType::F32)
    }
}

/// What the layers share of the positions of some tokens.
pub struct Step {
    /// Of the rotary position embedding [tokens, head_dim / 2].
    pub cos: Tensor,
    pub sin: Tensor,
    /// Where keys and values go in the cache [kv_heads, tokens, head_dim].
    pub rows: Tensor,
    /// 0, or what hides a later token [tokens, capacity].
    pub mask: Tensor,
}

impl Layer {
    /// The cache has the keys and the values [kv_heads, capacity, head_dim], and gets those of x.
    fn attention(
        &self,
        x: &Tensor,
        config: &Config,
        step: &Step,
        [keys, values]: &[Tensor; 2],
    ) -> Result<Tensor> {
        let (count, dim) = (x.dim(0)?, config.head_dim);
        let (heads, kv_heads) = (config.heads, config.kv_heads);
        let qkv = self.linear[0].forward(x)?;
        let qkv = qkv.reshape((1, count, heads + 2 * kv_heads, dim))?;
        let qk = qkv.narrow(2, 0, heads + kv_heads)?.contiguous()?;
        // candle's own sums on the CPU are rounded to bf16: the cache there, and so all that follows,
        // is in fp32, as fused attention has it.
        let wide = keys.dtype();
        let turned = |y: Tensor| y.squeeze(0)?.transpose(0, 1)?.to_dtype(wide)?.contiguous();
        let qk = turned(rope_thd(&qk, &step.cos, &step.sin)?)?;
        let v = turned(qkv.narrow(2, heads + kv_heads, kv_heads)?)?;
        keys.scatter_set(&step.rows, &qk.narrow(0, heads, kv_heads)?.contiguous()?, 1)?;
        values.scatter_set(&step.rows, &v, 1)?;

        // The heads that share keys and values are rows of one product.
        let q = qk.narrow(0, 0, heads)?;
        let rows = heads / kv_heads * count;
        let q = (q.reshape((kv_heads, rows, dim))? / (dim as f64).sqrt())?;
        let scores = q.matmul(&keys.t()?)?;
        let scores = scores.reshape((heads, count, keys.dim(1)?))?;
        let weights = softmax_last_dim(&scores.broadcast_add(&step.mask)?)?;
        let y = weights.reshape((kv_heads, rows, ()))?.matmul(values)?;
        let y = y.reshape((heads, count, dim))?.transpose(0, 1)?;
        let y = y.to_dtype(x.dtype())?.reshape((count, heads * dim))?;
        self.linear[1].forward(&y)
    }

    fn mlp(&self, x: &Tensor) -> Result<Tensor> {
        let [.., both, down] = &self.linear;
        let both = both.forward(x)?;
        let wide = both.dim(D::Minus1)? / 2;
        let (gate, up) = (both.narrow(1, 0, wide)?, both.narrow(1, wide, wide)?);
        down.forward(&(gate.silu()? * up)?)
    }
}
