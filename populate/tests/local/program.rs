//! The program itself: its arguments, its exit codes, and its last line.

use std::fs;
use std::process::{Command, Output};

use serde_json::{Value, json};

use crate::server::serves;
use crate::support::Volume;

fn program() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_slackwater-populate"));
    command.env_clear();
    command
}

fn last_line(output: &Output) -> Value {
    let text = String::from_utf8(output.stdout.clone()).expect("text");
    serde_json::from_str(text.lines().last().expect("a line")).expect("JSON")
}

#[test]
fn a_refusal_has_its_exit_code_and_its_last_line_is_progress() {
    let server = serves(b"x".to_vec());
    let volume = Volume::new();
    let config = volume.config(&server.url("/x"), json!({})).to_string();
    let output = program()
        .env("SLACKWATER_POPULATE", config)
        .output()
        .expect("it starts");
    assert_eq!(output.status.code(), Some(10), "{output:?}");
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(
        stderr.starts_with("AddressRefused: 127.0.0.1 is not dialled: "),
        "{stderr}"
    );
    assert_eq!(last_line(&output)["received"], 0);
    assert!(server.requests().is_empty());
}

#[test]
fn the_configuration_is_in_a_file_or_in_the_environment() {
    let folder = tempfile::TempDir::with_prefix("slackwater-").expect("a folder");
    let file = folder.path().join("config.json");
    fs::write(&file, "{}").expect("a file");
    let missing = folder.path().join("missing");
    for mut command in [
        program(),
        {
            let mut both = program();
            both.arg(&file).env("SLACKWATER_POPULATE", "{}");
            both
        },
        {
            let mut empty = program();
            empty.arg(&file);
            empty
        },
        {
            let mut none = program();
            none.arg(&missing);
            none
        },
        {
            let mut two = program();
            two.args([&file, &file]);
            two
        },
    ] {
        let output = command.output().expect("it starts");
        assert_eq!(output.status.code(), Some(10), "{output:?}");
        assert!(
            output.stderr.starts_with(b"ConfigurationInvalid: "),
            "{output:?}"
        );
    }
}

#[test]
fn the_api_server_of_the_environment_is_refused() {
    let volume = Volume::new();
    let config = volume.config("http://10.96.0.1/x", json!({}));
    let output = program()
        .env("SLACKWATER_POPULATE", config.to_string())
        .env("KUBERNETES_SERVICE_HOST", "10.96.0.1")
        .output()
        .expect("it starts");
    assert_eq!(output.status.code(), Some(10), "{output:?}");
    assert!(output.stderr.starts_with(b"AddressRefused: "), "{output:?}");
}
