//! Finds which files a checkpoint has, and opens them: regular ones alone, with bounds.

use std::ffi::OsStr;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use super::error::{Error, Result};
use super::json;

const SUFFIX: &str = ".safetensors.index.json";
const INDEX: &str = "model.safetensors.index.json";
const SINGLE: &str = "model.safetensors";
const MAX_INDEX_BYTES: u64 = 100_000_000;

/// Holds the files of a checkpoint, and which tensors its index says are in which, if it has one.
pub(super) struct Files {
    pub paths: Vec<PathBuf>,
    pub index: Option<Index>,
}

pub(super) struct Index {
    pub path: PathBuf,
    /// Tensors, and the names of their files.
    pub map: Vec<(String, String)>,
}

impl Files {
    /// Finds the files of a safetensors file's path, an index's, or a folder's.
    pub fn of(path: &Path) -> Result<Self> {
        let chosen = if path.is_dir() {
            path.join(choose(path)?)
        } else {
            path.to_owned()
        };
        if !ends_with(chosen.as_os_str(), SUFFIX) {
            let paths = vec![chosen];
            return Ok(Files { paths, index: None });
        }
        let index = read_index(chosen)?;
        let mut names: Vec<&str> = index.map.iter().map(|(_, file)| &file[..]).collect();
        names.sort_unstable();
        names.dedup();
        let paths = names
            .into_iter()
            .map(|name| index.path.with_file_name(name));
        Ok(Files {
            paths: paths.collect(),
            index: Some(index),
        })
    }
}

/// Opens a file to be read, if it is a regular one.
pub(super) fn open(path: &Path) -> Result<File> {
    let mut options = OpenOptions::new();
    options.read(true);
    #[cfg(unix)]
    {
        use std::os::unix::fs::OpenOptionsExt;
        options.custom_flags(libc::O_NONBLOCK); // or FIFOs wait
    }
    let file = options.open(path).map_err(|error| failed(path, error))?;
    let metadata = file.metadata().map_err(|error| failed(path, error))?;
    if metadata.is_file() {
        return Ok(file);
    }
    Err(wrong(path, "it is not a regular file"))
}

/// Returns the name of the file in a folder that leads to its weights. The single one goes before
/// an index, as in transformers.
fn choose(folder: &Path) -> Result<std::ffi::OsString> {
    let mut names = Vec::new();
    for entry in fs::read_dir(folder).map_err(|error| failed(folder, error))? {
        names.push(entry.map_err(|error| failed(folder, error))?.file_name());
    }
    for name in [SINGLE, INDEX] {
        if names.iter().any(|each| each == name) {
            return Ok(name.into());
        }
    }
    let (indices, files): (Vec<_>, Vec<_>) = names
        .into_iter()
        .filter(|name| ends_with(name, SUFFIX) || ends_with(name, ".safetensors"))
        .partition(|name| ends_with(name, SUFFIX));
    let (mut found, what) = if indices.is_empty() {
        (files, "safetensors files")
    } else {
        (indices, "indices")
    };
    match found.len() {
        1 => Ok(found.remove(0)),
        count => {
            let detail = format!("no {SINGLE} or {INDEX}, and {count} other {what}");
            Err(wrong(folder, &detail))
        }
    }
}

fn read_index(path: PathBuf) -> Result<Index> {
    let file = open(&path)?;
    let mut text = Vec::new();
    let read = file.take(MAX_INDEX_BYTES + 1).read_to_end(&mut text);
    read.map_err(|error| failed(&path, error))?;
    if text.len() as u64 > MAX_INDEX_BYTES {
        let detail = format!("it is larger than {MAX_INDEX_BYTES} bytes");
        return Err(wrong(&path, &detail));
    }
    let json = json::parse(&text).map_err(|error| wrong(&path, &error))?;
    let entries = json["weight_map"].as_object();
    let entries = entries.filter(|entries| !entries.is_empty());
    let mut map = Vec::new();
    for (tensor, file) in entries.ok_or_else(|| wrong(&path, "it has no weight_map"))? {
        // A file beside the index, and nowhere else.
        let name = file.as_str().filter(|name| {
            Path::new(name).file_name() == Some(OsStr::new(name)) && !name.contains('\0')
        });
        let Some(name) = name else {
            let detail = format!("{file} in weight_map is no name of a file");
            return Err(wrong(&path, &detail));
        };
        map.push((tensor.clone(), name.to_owned()));
    }
    Ok(Index { path, map })
}

fn ends_with(name: &OsStr, end: &str) -> bool {
    name.as_encoded_bytes().ends_with(end.as_bytes())
}

pub(super) fn failed(path: &Path, error: io::Error) -> Error {
    Error::Io {
        path: path.to_owned(),
        error,
    }
}

pub(super) fn wrong(path: &Path, detail: &str) -> Error {
    Error::File {
        file: path.display().to_string(),
        detail: detail.to_owned(),
    }
}
