//! A model of LLaMA's shape on candle, with grouped-query attention. A linear layer is in 4 bits if it
//! is so in the checkpoint. q, k and v are one product, and so are gate and up.

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

    /// Returns the logits [1, vocabulary] of the last of these tokens, in fp32. The values of the
    /// operands are used on the device only, so that the step can be captured.
    pub fn forward(&self, tokens: &Tensor, step: &Step, cache: &[Tensor]) -> Result<Tensor> {
        let mut x = self.embedding.index_select(tokens, 0)?;
        for (layer, cache) in self.layers.iter().zip(cache) {
            x = layer.attention(&x, &self.config, step, cache)?;
            x = layer.mlp(&x)?;
        }
        let last = self.norm.forward(&x.i(x.dim(0)? - 1..)?)?;
        self.head.forward(&last)?.to_dtype(DType::F32)
    }
}

/// Tensors of the positions of some tokens, which all layers share. They have the shapes that the
/// layers need, since in decode each launch of a layer takes time, even if it computes little.
pub struct Step {
    /// The rotary position embedding of all heads, [heads of q, k and v, tokens, head_dim / 2], so that
    /// one launch applies it: that of q includes the scale of attention, and that of v changes nothing.
    pub cos: Tensor,
    pub sin: Tensor,
    /// The rows of the cache to which keys and values go, [2 * kv_heads, tokens, head_dim].
    pub rows: Tensor,
    /// The attention mask, [heads, or 1 for all, tokens, capacity]: 0, or a large negative number for a
    /// later token.
    pub mask: Tensor,
}

impl Layer {
    /// Returns x plus attention. The cache has the keys, then the values, [2 * kv_heads, capacity,
    /// head_dim]; those of x are written to it.
    fn attention(
        &self,
        x: &Tensor,
        config: &Config,
        step: &Step,
        cache: &Tensor,
    ) -> Result<Tensor> {
        let (count, dim) = (x.dim(0)?, config.head_dim);
        let (heads, kv_heads) = (config.heads, config.kv_heads);
        let qkv = self.linear[0].forward(&self.norms[0].forward(x)?)?;
        let qkv = qkv.reshape((count, heads + 2 * kv_heads, dim))?;
        let qkv = qkv.transpose(0, 1)?.contiguous()?.unsqueeze(2)?;
        let qkv = rope_thd(&qkv, &step.cos, &step.sin)?.squeeze(2)?;
        // On the CPU candle rounds its own sums to bf16. There the cache, and all that follows, is in
        // fp32, as in fused attention.
        let qkv = qkv.to_dtype(cache.dtype())?;
        cache.scatter_set(&step.rows, &qkv.narrow(0, heads, 2 * kv_heads)?, 1)?;
        let keys = cache.narrow(0, 0, kv_heads)?;
        let values = cache.narrow(0, kv_heads, kv_heads)?;

        // The heads that share keys and values are rows of one product.
        let rows = heads / kv_heads * count;
        let q = qkv.narrow(0, 0, heads)?.reshape((kv_heads, rows, dim))?;
        let scores = q.matmul(&keys.t()?)?.reshape((heads, count, ()))?;
        let weights = softmax_last_dim(&scores.broadcast_add(&step.mask)?)?;
        let y = weights.reshape((kv_heads, rows, ()))?.matmul(&values)?;
        let y = y.reshape((heads, count, dim))?.transpose(0, 1)?;
        let y = y.to_dtype(x.dtype())?.reshape((count, heads * dim))?;
        self.linear[1].forward_add(&y, x)
    }

    fn mlp(&self, x: &Tensor) -> Result<Tensor> {
        let [.., both, down] = &self.linear;
        let both = both.forward(&self.norms[1].forward(x)?)?;
        let wide = both.dim(D::Minus1)? / 2;
        let (gate, up) = (both.narrow(1, 0, wide)?, both.narrow(1, wide, wide)?);
        down.forward_add(&(gate.silu()? * up)?, x)
    }
}
