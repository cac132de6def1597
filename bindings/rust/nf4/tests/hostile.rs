//! The folders of tests/support/hostile_folders.py, which the readers in C++ and Python see, too.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use nf4::checkpoint::{Checkpoint, Error};

/// A reader that waits, or reads a device, never ends.
const LIMIT: Duration = Duration::from_secs(20);

fn folders() -> PathBuf {
    let made = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("hostile");
    let _ = std::fs::remove_dir_all(&made); // of an earlier run
    let program =
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../../../tests/support/hostile_folders.py");
    let status = Command::new("python3").arg(program).arg(&made).status();
    assert!(status.expect("python3 runs").success());
    made
}

fn read(folder: &Path) -> Result<(), Error> {
    let began = Instant::now();
    // SAFETY: nothing writes to the files.
    let checkpoint = unsafe { Checkpoint::open(folder) };
    let result = checkpoint.and_then(|checkpoint| {
        checkpoint
            .names()
            .filter(|name| checkpoint.is_quantized(name))
            .try_for_each(|name| checkpoint.weight(name).map(drop))
    });
    assert!(began.elapsed() < LIMIT, "{}", folder.display());
    result
}

fn cases(of: &Path) -> Vec<PathBuf> {
    let found = std::fs::read_dir(of).expect("it was made");
    found
        .map(|entry| entry.expect("it is listed").path())
        .collect()
}

/// The verdicts that are not as they should be, each with its folder.
fn wrong(of: &Path, is_refused: bool) -> Vec<String> {
    let found = cases(of).into_iter().filter_map(|folder| {
        let said = match read(&folder) {
            Ok(()) if is_refused => "it is read".to_owned(),
            Err(error) if !is_refused => error.to_string(),
            Err(error) if error.to_string().contains(is_control) => format!("{error:?}"),
            _ => return None,
        };
        Some(format!("{}: {said}", folder.display()))
    });
    found.collect()
}

fn is_control(c: char) -> bool {
    c.is_control() || c == '\u{202e}'
}

#[test]
fn hostile_folders_are_refused_and_others_read() {
    let made = folders();
    assert!(cases(&made.join("refused")).len() > 100);
    // No config.json is looked at.
    for (folder, is_refused) in [
        ("read", false),
        ("refused", true),
        ("refused_config", false),
    ] {
        assert_eq!(wrong(&made.join(folder), is_refused), [""; 0], "{folder}");
    }
}
