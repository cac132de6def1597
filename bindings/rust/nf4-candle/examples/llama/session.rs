//! Generates tokens one after another, with their keys and values in a cache. Everything that a step
//! reads and writes stays on the device, so that on a GPU the steps are one CUDA graph.

use candle_core::{bail, DType, Device, Result, Tensor, D};

use super::config::Config;
use super::model::{Llama, Step};

pub struct Session<'a> {
    model: &'a Llama,
    device: Device,
    capacity: usize,
    /// The cosines and sines of the rotary position embedding of q, k and v, [3 * capacity,
    /// head_dim / 2].
    cos: Tensor,
    sin: Tensor,
    /// The row of `cos` and `sin` at which those of each head begin, [heads of q, k and v, 1].
    kinds: Tensor,
    /// 0, 1, 2, ... capacity.
    numbers: Tensor,
    cache: Vec<Tensor>,
    /// Room for the prompt, then the generated tokens, [capacity + 1].
    tokens: Tensor,
    /// The next token and its position, [1] each.
    next: Tensor,
    position: Tensor,
    /// The position on the host.
    used: usize,
}

impl<'a> Session<'a> {
    /// Makes a session for up to `capacity` tokens, with those of the prompt.
    pub fn new(model: &'a Llama, capacity: usize) -> Result<Self> {
        let (config, embedding) = (&model.config, &model.embedding);
        if capacity > config.positions {
            let most = config.positions;
            bail!("{capacity} tokens are more than max_position_embeddings, {most}");
        }
        let (device, dtype) = (embedding.device(), embedding.dtype());
        let wide = if device.is_cpu() { DType::F32 } else { dtype };
        let (cos, sin) = rotations(config, capacity, device)?;
        let (kv, rows) = (config.kv_heads, capacity as u32);
        let kinds = [vec![0; config.heads], vec![rows; kv], vec![2 * rows; kv]].concat();
        let numbers = Tensor::arange(0, rows + 1, device)?;
        let empty = || Tensor::zeros((2 * kv, capacity, config.head_dim), wide, device);
        let zeros = |count: usize| Tensor::zeros(count, DType::U32, device);
        Ok(Session {
            model,
            device: device.clone(),
            capacity,
            cos: cos.to_dtype(dtype)?,
            sin: sin.to_dtype(dtype)?,
            kinds: Tensor::new(kinds, device)?.unsqueeze(1)?,
            numbers,
            cache: (0..config.layers).map(|_| empty()).collect::<Result<_>>()?,
            tokens: zeros(capacity + 1)?,
            next: zeros(1)?,
            position: zeros(1)?,
            used: 0,
        })
    }

    /// Reads the prompt, once in a session. Returns the logits [vocabulary] of its last token.
    pub fn prefill(&mut self, prompt: &[u32]) -> Result<Tensor> {
        let vocabulary = self.model.embedding.dim(0)?;
        if let Some(token) = prompt.iter().find(|token| **token as usize >= vocabulary) {
            bail!("token {token} is outside the vocabulary of {vocabulary}");
        }
        if self.used > 0 {
            bail!("this session has read a prompt already");
        }
        self.take(prompt.len())?;
        let tokens = Tensor::new(prompt, &self.device)?;
        let logits = self.logits(&tokens, &self.numbers.narrow(0, 0, prompt.len())?)?;
        self.append(&logits, &self.numbers.narrow(0, prompt.len(), 1)?)?;
        logits.squeeze(0)
    }

    /// Returns the most likely `count` tokens after a prompt.
    pub fn generate(&mut self, prompt: &[u32], count: usize) -> Result<Vec<u32>> {
        self.prefill(prompt)?;
        self.steps(count.saturating_sub(1))?;
        self.tokens.narrow(0, prompt.len(), count)?.to_vec1()
    }

    /// Generates `count` tokens more; on a GPU each step is a launch of one CUDA graph.
    pub fn steps(&mut self, count: usize) -> Result<()> {
        self.take(count)?;
        #[cfg(feature = "cuda")]
        if let Device::Cuda(device) = &self.device {
            return super::graph::repeat(device, count, || self.step());
        }
        (0..count).try_for_each(|_| self.step())
    }

    fn take(&mut self, count: usize) -> Result<()> {
        let (used, capacity) = (self.used + count, self.capacity);
        if used > capacity {
            bail!("{used} tokens are more than the {capacity} that this session has room for");
        }
        self.used = used;
        Ok(())
    }

    fn step(&self) -> Result<()> {
        let logits = self.logits(&self.next, &self.position)?;
        self.append(&logits, &(&self.position + 1.0)?)
    }

    /// Returns the logits [1, vocabulary] of the last of some tokens at these positions.
    fn logits(&self, tokens: &Tensor, positions: &Tensor) -> Result<Tensor> {
        let (count, config) = (positions.dim(0)?, &self.model.config);
        let (all, half) = (self.kinds.dim(0)?, config.head_dim / 2);
        let ids = self.kinds.broadcast_add(&positions.unsqueeze(0)?)?;
        let ids = ids.flatten_all()?;
        let rotation = |of: &Tensor| of.index_select(&ids, 0)?.reshape((all, count, half));
        let columns = self.numbers.narrow(0, 0, self.capacity)?.unsqueeze(0)?;
        let later = columns.broadcast_gt(&positions.unsqueeze(1)?)?;
        let mask = (later.to_dtype(self.cache[0].dtype())? * -1e30)?.unsqueeze(0)?;
        // The mask of a prompt is large, and the heads share it. The mask of a token is small: a copy for
        // each head saves a broadcast in each layer.
        let heads = if count == 1 { config.heads } else { 1 };
        let mask = mask.broadcast_as((heads, count, self.capacity))?;
        let rows = (2 * config.kv_heads, count, config.head_dim);
        let rows = positions.reshape((1, count, 1))?.broadcast_as(rows)?;
        let step = Step {
            cos: rotation(&self.cos)?,
            sin: rotation(&self.sin)?,
            rows: rows.contiguous()?,
            mask: mask.contiguous()?,
        };
        self.model.forward(tokens, &step, &self.cache)
    }

    /// Appends the most likely token at this position.
    fn append(&self, logits: &Tensor, position: &Tensor) -> Result<()> {
        let token = logits.argmax(D::Minus1)?;
        self.tokens.scatter_set(position, &token, 0)?;
        self.next.slice_set(&token, 0, 0)?;
        self.position.slice_set(&position.copy()?, 0, 0)
    }
}

/// Returns the cos and sin of each position, [3 * capacity, head_dim / 2]: those of q, times the scale
/// of attention, those of k, and 1 and 0 for v.
fn rotations(config: &Config, capacity: usize, device: &Device) -> Result<(Tensor, Tensor)> {
    let half = config.head_dim / 2;
    let frequency = |i| config.theta.powf(-2.0 * i as f64 / config.head_dim as f64) as f32;
    let angles = (0..capacity).flat_map(|at| (0..half).map(move |i| at as f32 * frequency(i)));
    let angles = Tensor::from_vec(angles.collect::<Vec<_>>(), (capacity, half), device)?;
    let (cos, sin) = (&angles.cos()?, &angles.sin()?);
    let scale = (config.head_dim as f64).powf(-0.5);
    let cos = Tensor::cat(&[&(cos * scale)?, cos, &cos.ones_like()?], 0)?;
    let sin = Tensor::cat(&[&(sin * scale)?, sin, &sin.zeros_like()?], 0)?;
    Ok((cos, sin))
}
