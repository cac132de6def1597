//! The tensors of a checkpoint's files.

use std::collections::{HashMap, HashSet};
use std::path::Path;

use memmap2::Mmap;
use safetensors::tensor::{Metadata, TensorView};
use safetensors::SafeTensors;

use super::error::{Error, Result};
use super::files::{self, Files};
use super::json;
use super::state::{self, STATE_MARK};

/// The other readers of libnf4 have the same limit.
const MAX_RANK: usize = 32;

struct Part<B> {
    bytes: B,
    data: usize,
    metadata: Metadata,
}

/// The tensors of one or several safetensors files. `B` holds the bytes of a file: a mapping, or any
/// other bytes.
pub struct Checkpoint<B = Mmap> {
    parts: Vec<Part<B>>,
    /// The part that has a tensor.
    pub(super) index: HashMap<String, usize>,
}

impl Checkpoint<Mmap> {
    /// Maps a safetensors file, the files of an index, or those of a directory. In a directory it takes
    /// the first of these that exists: `model.safetensors`, `model.safetensors.index.json` (the order of
    /// transformers), the only `*.safetensors.index.json`, the only `*.safetensors`.
    ///
    /// # Safety
    /// The files do not change while they are mapped.
    ///
    /// # Errors
    /// [`Error::Io`] if a file cannot be read. [`Error::File`] if a file is not a regular file, not a
    /// safetensors file or not an index, if two files have a tensor of the same name, or if a tensor is
    /// not in the file that the index names.
    pub unsafe fn open(path: impl AsRef<Path>) -> Result<Self> {
        let found = Files::of(path.as_ref())?;
        let files = found.paths.iter().map(|path| {
            let file = files::open(path)?;
            // SAFETY: as the caller promises.
            let bytes = unsafe { Mmap::map(&file) }.map_err(|error| files::failed(path, error))?;
            Ok((path.display().to_string(), bytes))
        });
        let checkpoint = Self::new(files.collect::<Result<Vec<_>>>()?)?;
        if let Some(index) = found.index {
            for (tensor, file) in &index.map {
                let part = checkpoint.index.get(tensor).map(|part| &found.paths[*part]);
                if part != Some(&index.path.with_file_name(file)) {
                    let detail = format!("{tensor} is not in {file}");
                    return Err(files::wrong(&index.path, &detail));
                }
            }
        }
        Ok(checkpoint)
    }
}

impl<B: AsRef<[u8]>> Checkpoint<B> {
    /// Makes a checkpoint of the bytes of safetensors files, each with a name for messages.
    ///
    /// # Errors
    /// [`Error::File`] if the bytes are not a safetensors file, or if two files have a tensor of the same
    /// name.
    pub fn new(files: impl IntoIterator<Item = (String, B)>) -> Result<Self> {
        let (mut parts, mut index) = (Vec::new(), HashMap::new());
        for (file, bytes) in files {
            let (header, metadata) =
                SafeTensors::read_metadata(bytes.as_ref()).map_err(|error| Error::File {
                    file: file.clone(),
                    detail: error.to_string(),
                })?;
            check_header(&bytes.as_ref()[size_of::<u64>()..][..header], &metadata).map_err(
                |detail| Error::File {
                    file: file.clone(),
                    detail,
                },
            )?;
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

    /// Returns the names of all dense tensors and 4-bit weights, without the parts of the weights.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        let weights: HashSet<&str> = self
            .index
            .keys()
            .filter_map(|key| state::weight_of(key))
            .collect();
        // A name that begins with another and a dot follows it.
        let mut sorted: Vec<&str> = self.index.keys().map(String::as_str).collect();
        sorted.sort_unstable_by(|a, b| dots_first(a).cmp(dots_first(b)));
        let mut weight: Option<&str> = None;
        sorted.retain(|name| {
            let rest = weight.and_then(|weight| name.strip_prefix(weight));
            if rest.is_some_and(|rest| rest.starts_with('.')) {
                return false;
            }
            weight = weights.contains(name).then_some(*name);
            true
        });
        sorted.into_iter()
    }

    /// Returns whether this is the name of a 4-bit weight.
    pub fn is_quantized(&self, name: &str) -> bool {
        state::FORMATS.iter().any(|(suffix, _)| {
            self.index
                .contains_key(&format!("{name}{STATE_MARK}{suffix}"))
        })
    }

    /// Returns a tensor as it is stored.
    ///
    /// # Errors
    /// [`Error::Missing`] if there is no such tensor.
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
}

/// The bytes of a name as they compare where a dot is before any other byte.
fn dots_first(name: &str) -> impl Iterator<Item = u16> + '_ {
    name.bytes()
        .map(|byte| if byte == b'.' { 0 } else { u16::from(byte) + 1 })
}

/// Refuses what the crate safetensors takes, and a header may not have.
fn check_header(text: &[u8], metadata: &Metadata) -> std::result::Result<(), String> {
    if !text.starts_with(b"{") {
        return Err("its header does not start with '{'".into());
    }
    json::parse(text).map_err(|error| format!("its header: {error}"))?;
    let tensors = metadata.tensors();
    let found = tensors.iter().find(|(_, info)| info.shape.len() > MAX_RANK);
    found.map_or(Ok(()), |(name, info)| {
        let rank = info.shape.len();
        Err(format!("{name} has {rank} dimensions; {MAX_RANK} are read"))
    })
}
