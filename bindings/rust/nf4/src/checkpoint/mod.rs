//! Reads checkpoints of safetensors files in which bitsandbytes, transformers or `nf4 quantize` stored
//! NF4 and FP4 weights. Integer weights (GPTQ, AWQ, compressed-tensors) are not described:
//! [`Checkpoint::tensor`] gives their parts as they are stored.
//!
//! ```no_run
//! use nf4::checkpoint::Checkpoint;
//!
//! // SAFETY: nothing writes to the files while they are mapped.
//! let checkpoint = unsafe { Checkpoint::open("model/") }?;
//! let stored = checkpoint.weight("model.layers.0.mlp.up_proj.weight")?;
//! let values: Vec<half::bf16> = nf4::dequantize(stored.view()?, 0)?;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod error;
mod files;
mod json;
mod printable;
mod state;
mod tensors;
mod weight;

pub use error::{Error, Result};
pub use safetensors;
pub use tensors::Checkpoint;
pub use weight::StoredWeight;
