//! Says what is wrong with a checkpoint.

use std::io;
use std::path::PathBuf;

use super::printable::Printable;

/// Says what is wrong with a checkpoint. The text names the file or the tensor, with control
/// characters as escapes.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A file cannot be read.
    #[error("{}: {error}", Printable(path.display()))]
    Io {
        /// The file.
        path: PathBuf,
        /// The system's error.
        #[source]
        error: io::Error,
    },
    /// A file is no safetensors file, or no index of such files.
    #[error("{}: {}", Printable(file), Printable(detail))]
    File {
        /// The file.
        file: String,
        /// Says what is wrong.
        detail: String,
    },
    /// There is no tensor of this name.
    #[error("the checkpoint has no tensor {}", Printable(.0))]
    Missing(String),
    /// The tensors of a weight in 4 bits contradict one another.
    #[error("{}: {}", Printable(name), Printable(detail))]
    Weight {
        /// The weight.
        name: String,
        /// Says what is wrong.
        detail: String,
    },
    /// libnf4 refuses the weight.
    #[error(transparent)]
    Nf4(#[from] crate::Error),
}

/// A result with [`enum@Error`].
pub type Result<T> = std::result::Result<T, Error>;
