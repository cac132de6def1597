//! Runs the examples. One that exits with 77 is skipped.

use std::io::Write;
use std::process::{Command, Output};

const SKIPPED: i32 = 77;

fn run(program: &str) -> Output {
    let output = Command::new(program).output().expect("the example starts");
    let code = output.status.code();
    let (out, err) = (
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr),
    );
    assert!(
        code == Some(0) || code == Some(SKIPPED),
        "{}:\n{out}{err}",
        output.status
    );
    output
}

#[test]
fn host() {
    let output = run(env!("CARGO_BIN_EXE_host"));
    assert_eq!(output.status.code(), Some(0));
    let text = String::from_utf8(output.stdout).expect("UTF-8");
    for line in [
        "NF4, nested: 540",
        "NF4, flat: 589824 bytes, 4.500 bits",
        "FP4: ",
        "GPTQ, groups of 128: 544768 bytes, 4.156 bits",
        "compressed-tensors, groups of 128: 544768 bytes",
    ] {
        assert!(text.contains(line), "no {line:?} in:\n{text}");
    }
}

#[test]
fn device_buffers() {
    let output = run(env!("CARGO_BIN_EXE_device_buffers"));
    let text = String::from_utf8(output.stdout).expect("UTF-8");
    if output.status.code() == Some(SKIPPED) {
        assert!(text.starts_with("skipped: "), "no reason in:\n{text}");
        // The test harness hides what the print macros write in a test that passes.
        std::io::stderr()
            .write_all(text.as_bytes())
            .expect("stderr takes a line");
    } else {
        assert!(
            text.contains("1024000 values, 0 differ from the CPU's"),
            "{text}"
        );
    }
}
