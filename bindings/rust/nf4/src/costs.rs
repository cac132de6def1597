//! Costs that the user measured with `nf4 tune`: files that the library is given.

use std::fs::{self, File};
use std::io::Read;
use std::path::{Path, PathBuf};
use std::ptr::null;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::SystemTime;

use nf4_sys as sys;

use crate::error::check;
use crate::info::check_version;
use crate::{Error, Result};

const VARIABLE: &str = "NF4_COSTS";
const MOST_BYTES: u64 = 64 << 10;
const END: &str = "end\n";

/// Sets how long kernels take on this machine's GPUs, by a text that `nf4_set_costs` of nf4.h describes
/// and `nf4 tune` of the Python package writes. `None` removes all costs. Answers such as
/// [`Spec::matmul_path`](crate::Spec::matmul_path) and the choice of kernels follow these costs, so
/// call it before the first product.
///
/// ```
/// nf4::set_costs(Some(&format!("nf4-costs 1 {}\nend\n", nf4::version_string())))?;
/// nf4::set_costs(None)?;
/// # Ok::<(), nf4::Error>(())
/// ```
///
/// # Errors
/// [`Error::InvalidArgument`](crate::Error::InvalidArgument) for any other text, such as costs of
/// another version of libnf4. The costs that were set before remain.
pub fn set_costs(text: Option<&str>) -> Result<()> {
    let mut chosen = chosen();
    give(text)?;
    *chosen = true;
    Ok(())
}

/// Says whether the costs are chosen. The lock is held while they change, because loading several files
/// sets the costs of each in turn.
fn chosen() -> MutexGuard<'static, bool> {
    static CHOSEN: Mutex<bool> = Mutex::new(false);
    CHOSEN.lock().unwrap_or_else(PoisonError::into_inner)
}

fn give(text: Option<&str>) -> Result<()> {
    check_version()?;
    let (address, bytes) = text.map_or((null(), 0), |text| (text.as_ptr().cast(), text.len()));
    // SAFETY: the library reads so many bytes during the call alone.
    check(unsafe { sys::nf4_set_costs(address, bytes) })
}

/// Sets the costs in a file that `nf4 tune` wrote.
///
/// # Errors
/// [`Error::InvalidArgument`](crate::Error::InvalidArgument), with the path, if the file cannot be read
/// or the library refuses its text. The costs that were set before remain.
pub fn set_costs_of(path: impl AsRef<Path>) -> Result<()> {
    let path = path.as_ref();
    set_costs(Some(&read(path)?)).map_err(|error| at(path, error.detail()))
}

/// A file of costs, and whether they are used.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CostsFile {
    /// Where it is.
    pub path: PathBuf,
    /// An error if its costs are not used, which says why.
    pub status: Result<()>,
}

/// Sets the costs that the user measured with `nf4 tune`, on any of the machine's GPUs, and
/// returns all files that there are, the newest first. Call it before the first product.
///
/// The files are `costs-*.txt` in the folder that the environment variable `NF4_COSTS` names, else in
/// `libnf4` in `$XDG_CACHE_HOME` or `~/.cache`. If `NF4_COSTS` is 0, there are none. Used files replace
/// the costs that were set before. If no file is used, those remain.
///
/// ```
/// for file in nf4::load_costs() {
///     if let Err(reason) = file.status {
///         eprintln!("{}: {reason}", file.path.display());
///     }
/// }
/// ```
pub fn load_costs() -> Vec<CostsFile> {
    load_users(&mut chosen())
}

/// Does what [`load_costs`] does, but leaves costs that the program chose: it returns `None` if
/// [`set_costs`] or [`set_costs_of`] has succeeded before, or if the files have been loaded. It is for
/// crates that compute products for a program; nf4-candle calls it when it makes its first layer on a
/// GPU. It does not know of a direct call of `nf4_sys::nf4_set_costs`.
pub fn load_costs_unless_set() -> Option<Vec<CostsFile>> {
    let mut chosen = chosen();
    (!*chosen).then(|| load_users(&mut chosen))
}

fn load_users(chosen: &mut bool) -> Vec<CostsFile> {
    *chosen = true;
    let variable = |name: &str| std::env::var_os(name).map(PathBuf::from);
    folder(variable).map_or_else(Vec::new, |folder| load_costs_in(&folder))
}

/// Returns the folder of the user's files, by a function that tells the environment.
fn folder(variable: impl Fn(&str) -> Option<PathBuf>) -> Option<PathBuf> {
    let given = |name| variable(name).filter(|value| !value.as_os_str().is_empty());
    if let Some(chosen) = given(VARIABLE) {
        return (chosen.as_os_str() != "0").then_some(chosen);
    }
    let cache = given("XDG_CACHE_HOME").filter(|cache| cache.is_absolute());
    Some(
        cache
            .or_else(|| Some(given("HOME")?.join(".cache")))?
            .join("libnf4"),
    )
}

fn load_costs_in(folder: &Path) -> Vec<CostsFile> {
    let mut used = Vec::new();
    let mut files = Vec::new();
    for path in paths(folder) {
        let status = read(&path).and_then(|text| {
            accept(&used, &text).map_err(|error| at(&path, error.detail()))?;
            used.push(text);
            Ok(())
        });
        files.push(CostsFile { path, status });
    }
    if !used.is_empty() {
        let all = give(Some(&joined(&used)));
        debug_assert!(all.is_ok(), "{all:?}"); // it was when the last file was added
    }
    files
}

/// Is the text a file of costs by itself, and beside those of newer files?
fn accept(used: &[String], text: &str) -> Result<()> {
    give(Some(text))?;
    let gpu = |text: &str| text.lines().nth(1).map(str::to_owned);
    if used.iter().any(|newer| gpu(newer) == gpu(text)) {
        let reason = "a newer file has costs of the same GPU";
        return Err(Error::InvalidArgument(reason.to_owned()));
    }
    let mut beside = used.to_vec();
    beside.push(text.to_owned());
    give(Some(&joined(&beside)))
}

/// Returns one text with the costs of several, each of which the library accepts.
fn joined(texts: &[String]) -> String {
    let first = texts.first().and_then(|text| text.split_once('\n'));
    let mut all = first.map_or_else(String::new, |(version, _)| format!("{version}\n"));
    for text in texts {
        let rows = text.split_once('\n').map_or("", |(_, rows)| rows);
        all.push_str(rows.strip_suffix(END).unwrap_or(rows));
    }
    all + END
}

/// Returns the files that there are, the newest first.
fn paths(folder: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    let names = entries.map(|entry| entry.path()).filter(|path| {
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        name.starts_with("costs-") && name.ends_with(".txt")
    });
    let mut found: Vec<_> = names.map(|path| (modified(&path), path)).collect();
    found.sort_by(|a, b| b.0.cmp(&a.0).then_with(|| a.1.cmp(&b.1)));
    found.into_iter().map(|(_, path)| path).collect()
}

fn modified(path: &Path) -> Option<SystemTime> {
    fs::metadata(path).and_then(|about| about.modified()).ok()
}

fn at(path: &Path, reason: &str) -> Error {
    Error::InvalidArgument(format!("{}: {reason}", path.display()))
}

fn read(path: &Path) -> Result<String> {
    let failed = |error: std::io::Error| at(path, &error.to_string());
    if !fs::metadata(path).map_err(failed)?.is_file() {
        return Err(at(path, "it is no regular file")); // opening a pipe would wait
    }
    let mut text = String::new();
    let file = File::open(path).map_err(failed)?;
    file.take(MOST_BYTES + 1)
        .read_to_string(&mut text)
        .map_err(failed)?;
    if text.len() as u64 > MOST_BYTES {
        return Err(at(path, &format!("it has more than {MOST_BYTES} bytes")));
    }
    Ok(text)
}

#[cfg(test)]
mod tests {
    use std::sync::{Mutex, MutexGuard};
    use std::time::Duration;

    use super::*;

    // The library has one set of costs.
    static ALONE: Mutex<()> = Mutex::new(());

    /// A folder of a test, which is removed afterwards.
    struct Folder(PathBuf, #[allow(dead_code)] MutexGuard<'static, ()>);

    impl Folder {
        fn new(name: &str) -> Self {
            let alone = ALONE
                .lock()
                .unwrap_or_else(|poisoned| poisoned.into_inner());
            let path = std::env::temp_dir().join(format!("nf4-{name}-{}", std::process::id()));
            fs::create_dir_all(&path).expect("a temporary folder");
            Folder(path, alone)
        }

        /// Writes a file that is older than others by so many seconds.
        fn write(&self, name: &str, age: u64, text: &str) -> PathBuf {
            let path = self.0.join(name);
            fs::write(&path, text).expect("a file");
            let file = File::options()
                .append(true)
                .open(&path)
                .expect("it is there");
            let when = SystemTime::UNIX_EPOCH + Duration::from_secs(1_000_000_000 - age);
            file.set_modified(when).expect("its time");
            path
        }

        fn reasons(&self) -> Vec<(PathBuf, String)> {
            let said = |status: Result<()>| status.err().map_or(String::new(), |e| e.to_string());
            let files = load_costs_in(&self.0).into_iter();
            files.map(|each| (each.path, said(each.status))).collect()
        }
    }

    impl Drop for Folder {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.0);
            set_costs(None).expect("none are always accepted");
        }
    }

    fn text(gpu: &str) -> String {
        let (version, row) = (
            crate::version_string(),
            "codebook fp16 skinny 8 1.5 0.25 0 0",
        );
        format!("nf4-costs 1 {version}\ngpu 80 sm80 108 166912 13000 {gpu}\n{row}\nend\n")
    }

    #[test]
    fn the_files_of_all_gpus_are_used_together() {
        let folder = Folder::new("together");
        let new = folder.write("costs-1.txt", 0, &text("a"));
        let old = folder.write("costs-0.txt", 9, &text("b"));
        folder.write("other.txt", 0, "");
        assert_eq!(
            folder.reasons(),
            [(new, String::new()), (old, String::new())]
        );
        let both = joined(&[text("a"), text("b")]);
        assert_eq!(both.matches("gpu 80").count(), 2);
        assert_eq!(
            (both.matches("nf4-costs").count(), both.matches(END).count()),
            (1, 1)
        );
        assert_eq!(set_costs(Some(&both)), Ok(()));
    }

    #[test]
    fn a_file_that_is_not_used_says_why() {
        let folder = Folder::new("not-used");
        folder.write("costs-0.txt", 0, "");
        folder.write("costs-1.txt", 1, &text("a"));
        folder.write("costs-2.txt", 2, &text("a").replace("1.5", "2.5"));
        folder.write("costs-3.txt", 3, &text("b")[..40]);
        folder.write("costs-4.txt", 4, &"9".repeat(70_000));
        fs::create_dir(folder.0.join("costs-5.txt")).expect("a folder");
        let mut reasons: Vec<_> = folder.reasons();
        reasons.sort();
        let expected = [
            "a whole line",
            "",
            "a newer file has costs of the same GPU",
            "a whole line",
            "it has more than 65536 bytes",
            "it is no regular file",
        ];
        for ((path, reason), expected) in reasons.iter().zip(expected) {
            assert_eq!(reason.is_empty(), expected.is_empty(), "{reason}");
            assert!(reason.contains(expected), "{reason}");
            let named = reason.contains(&path.display().to_string());
            assert_eq!(named, !expected.is_empty(), "{reason}");
        }
        assert_eq!(reasons.len(), expected.len());
    }

    #[test]
    fn there_are_up_to_eight_gpus() {
        let folder = Folder::new("eight");
        for i in 0..9 {
            folder.write(&format!("costs-{i}.txt"), i, &text(&i.to_string()));
        }
        let reasons = folder.reasons();
        assert!(reasons[..8].iter().all(|(_, reason)| reason.is_empty()));
        assert!(
            reasons[8].1.contains("expected a GPU, a row of costs"),
            "{}",
            reasons[8].1
        );
    }

    #[test]
    fn costs_of_another_version_are_refused() {
        let _folder = Folder::new("version");
        let refused = set_costs(Some("nf4-costs 1 0.0.0\nend\n"));
        assert!(
            matches!(refused, Err(Error::InvalidArgument(_))),
            "{refused:?}"
        );
    }

    #[test]
    fn costs_that_the_program_chose_are_not_replaced() {
        let _folder = Folder::new("chosen");
        *chosen() = false;
        set_costs(Some("")).expect_err("it is no text of costs");
        assert!(load_costs_unless_set().is_some());
        assert!(load_costs_unless_set().is_none());
        for text in [Some(&*text("a")), None] {
            *chosen() = false;
            assert_eq!(set_costs(text), Ok(()));
            assert!(load_costs_unless_set().is_none());
        }
    }

    #[test]
    fn one_file_is_set_or_named() {
        let folder = Folder::new("one");
        assert_eq!(
            set_costs_of(folder.write("costs-0.txt", 0, &text("a"))),
            Ok(())
        );
        let missing = folder.0.join("none");
        let refused = set_costs_of(&missing).expect_err("it is not there");
        assert!(
            refused.detail().starts_with(&missing.display().to_string()),
            "{refused}"
        );
        assert!(load_costs_in(&missing).is_empty());
    }

    #[test]
    fn the_folder_is_where_python_has_it() {
        let of = |set: &[(&str, &str)]| {
            folder(|name| {
                let found = set.iter().find(|(key, _)| *key == name);
                found.map(|(_, value)| PathBuf::from(value))
            })
        };
        let home = ("HOME", "/home/a");
        assert_eq!(of(&[home]), Some(PathBuf::from("/home/a/.cache/libnf4")));
        assert_eq!(
            of(&[home, ("XDG_CACHE_HOME", "/x")]),
            Some(PathBuf::from("/x/libnf4"))
        );
        // XDG says to ignore a relative one.
        let relative = of(&[home, ("XDG_CACHE_HOME", "x")]);
        assert_eq!(relative, Some(PathBuf::from("/home/a/.cache/libnf4")));
        assert_eq!(
            of(&[home, ("NF4_COSTS", "costs")]),
            Some(PathBuf::from("costs"))
        );
        assert_eq!(of(&[home, ("NF4_COSTS", "0")]), None);
        assert_eq!(of(&[("NF4_COSTS", "")]), None);
    }
}
