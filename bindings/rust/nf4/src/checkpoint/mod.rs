//! Checkpoints of safetensors files in which bitsandbytes, transformers or `nf4 quantize` stored
//! NF4 and FP4 weights.
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

mod state;
mod weight;

use std::collections::HashMap;
use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};

use memmap2::Mmap;
use safetensors::tensor::{Metadata, TensorView};
use safetensors::SafeTensors;

pub use safetensors;
pub use weight::StoredWeight;

use state::STATE_MARK;

const INDEX: &str = "model.safetensors.index.json";
const SINGLE: &str = "model.safetensors";

/// What is wrong with a checkpoint. The text names the file or the tensor.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A file cannot be read.
    #[error("{}: {error}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// Why.
        #[source]
        error: io::Error,
    },
    /// A file is no safetensors file, or no index of such files.
    #[error("{file}: {detail}")]
    File {
        /// The file.
        file: String,
        /// What is wrong.
        detail: String,
    },
    /// There is no tensor of this name.
    #[error("the checkpoint has no tensor {0}")]
    Missing(String),
    /// The tensors of a weight in 4 bits contradict one another.
    #[error("{name}: {detail}")]
    Weight {
        /// The weight.
        name: String,
        /// What is wrong.
        detail: String,
    },
    /// libnf4 refuses the weight.
    #[error(transparent)]
    Nf4(#[from] crate::Error),
}

/// A result with [`enum@Error`].
pub type Result<T> = std::result::Result<T, Error>;

struct Part<B> {
    bytes: B,
    data: usize,
    metadata: Metadata,
}

/// The tensors of one or several safetensors files, whose bytes are mapped files or any others.
pub struct Checkpoint<B = Mmap> {
    parts: Vec<Part<B>>,
    /// Which part has a tensor.
    index: HashMap<String, usize>,
}

impl Checkpoint<Mmap> {
    /// Maps a safetensors file, or those of a directory: `model.safetensors`, else those that
    /// `model.safetensors.index.json` names, as transformers does, else the only `*.safetensors`.
    ///
    /// # Safety
    /// The files do not change while they are mapped.
    pub unsafe fn open(path: impl AsRef<Path>) -> Result<Self> {
        let files = files_of(path.as_ref())?.into_iter().map(|path| {
            let failed = |error| Error::Io {
                path: path.clone(),
                error,
            };
            let file = File::open(&path).map_err(failed)?;
            // SAFETY: as the caller promises.
            let bytes = unsafe { Mmap::map(&file) }.map_err(failed)?;
            Ok((path.display().to_string(), bytes))
        });
        Self::new(files.collect::<Result<Vec<_>>>()?)
    }
}

fn files_of(path: &Path) -> Result<Vec<PathBuf>> {
    if !path.is_dir() {
        return Ok(vec![path.to_owned()]);
    }
    let (single, index) = (path.join(SINGLE), path.join(INDEX));
    if single.exists() {
        return Ok(vec![single]);
    }
    if !index.exists() {
        return only_file_of(path);
    }
    let text = fs::read(&index).map_err(|error| Error::Io {
        path: index.clone(),
        error,
    })?;
    let bad = |detail: String| Error::File {
        file: index.display().to_string(),
        detail,
    };
    let json: serde_json::Value =
        serde_json::from_slice(&text).map_err(|error| bad(error.to_string()))?;
    let map = json["weight_map"].as_object();
    let mut names = Vec::new();
    for file in map
        .ok_or_else(|| bad("it has no weight_map".into()))?
        .values()
    {
        // A file beside the index, and nowhere else.
        match file.as_str().filter(|name| !name.contains(['/', '\\'])) {
            Some(name) => names.push(name),
            None => return Err(bad(format!("{file} in weight_map is no name of a file"))),
        }
    }
    names.sort_unstable();
    names.dedup();
    Ok(names.into_iter().map(|name| path.join(name)).collect())
}

fn only_file_of(folder: &Path) -> Result<Vec<PathBuf>> {
    let failed = |error| Error::Io {
        path: folder.to_owned(),
        error,
    };
    let mut found = Vec::new();
    for entry in fs::read_dir(folder).map_err(failed)? {
        let path = entry.map_err(failed)?.path();
        if path.extension().is_some_and(|end| end == "safetensors") {
            found.push(path);
        }
    }
    if found.len() == 1 {
        return Ok(found);
    }
    Err(Error::File {
        file: folder.display().to_string(),
        detail: format!(
            "no {SINGLE} or {INDEX}, and {} other safetensors files",
            found.len()
        ),
    })
}

impl<B: AsRef<[u8]>> Checkpoint<B> {
    /// Of the bytes of safetensors files, each with a name for messages.
    ///
    /// # Errors
    /// [`Error::File`] where the bytes are no such file, or two have a tensor of the same name.
    pub fn new(files: impl IntoIterator<Item = (String, B)>) -> Result<Self> {
        let (mut parts, mut index) = (Vec::new(), HashMap::new());
        for (file, bytes) in files {
            let (header, metadata) =
                SafeTensors::read_metadata(bytes.as_ref()).map_err(|error| Error::File {
                    file: file.clone(),
                    detail: error.to_string(),
                })?;
            for name in metadata.offset_keys() {
                if index.contains_key(&name) {
                    let detail = format!("another file has a tensor {name} as well");
                    return Err(Error::File { file, detail });
                }
                index.insert(name, parts.len());
            }
            parts.push(Part {
                bytes,
                data: header + size_of::<u64>(),
                metadata,
            });
        }
        Ok(Checkpoint { parts, index })
    }

    /// The names of all dense tensors and weights in 4 bits, without the parts of the latter. In no
    /// order.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        let is_part = |name: &str| {
            name.match_indices('.').any(|(dot, _)| {
                self.index.contains_key(&name[..dot]) && self.is_quantized(&name[..dot])
            })
        };
        self.index
            .keys()
            .map(String::as_str)
            .filter(move |name| !is_part(name))
    }

    /// Is the tensor of this name a weight in 4 bits?
    pub fn is_quantized(&self, name: &str) -> bool {
        state::FORMATS.iter().any(|(suffix, _)| {
            self.index
                .contains_key(&format!("{name}{STATE_MARK}{suffix}"))
        })
    }

    /// A tensor as it is stored.
    ///
    /// # Errors
    /// [`Error::Missing`].
    pub fn tensor(&self, name: &str) -> Result<TensorView<'_>> {
        let missing = || Error::Missing(name.to_owned());
        let part = &self.parts[*self.index.get(name).ok_or_else(missing)?];
        let info = part.metadata.info(name).ok_or_else(missing)?;
        let (from, to) = info.data_offsets;
        let wrong = |detail: String| Error::Weight {
            name: name.to_owned(),
            detail,
        };
        let data = part.bytes.as_ref().get(part.data + from..part.data + to);
        let data = data.ok_or_else(|| wrong("the file ends before its data".into()))?;
        TensorView::new(info.dtype, info.shape.clone(), data)
            .map_err(|error| wrong(error.to_string()))
    }

    /// A weight in 4 bits, borrowed from the file.
    ///
    /// # Errors
    /// [`Error::Missing`] without such a weight, [`Error::Weight`] where its tensors contradict its
    /// quant_state.
    pub fn weight(&self, name: &str) -> Result<StoredWeight<'_>> {
        weight::read(self, name)
    }
}
