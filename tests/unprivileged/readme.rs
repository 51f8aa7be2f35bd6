//! The commands of the README's section "Run it without Kubernetes" run as they are printed, to the
//! last line, on ext4, the root file system of Debian and Ubuntu.

#![expect(
    clippy::unwrap_used,
    clippy::disallowed_methods,
    reason = "helpers of tests, and the program from outside"
)]

use std::fs;
use std::path::Path;
use std::process::{Command, Output, Stdio};

use nix::unistd::geteuid;
use slackwater_testkit::{Disk, Scratch, binary, left_out, without_configuration};

const HEADING: &str = "\n## Run it without Kubernetes\n";
const GIB: u64 = 1 << 30;

/// The code blocks of the section: lines that are indented by four spaces, without that indent.
/// Blocks are separated by prose; a blank line does not end a block.
fn blocks(page: &str) -> Vec<String> {
    let (_, section) = page.split_once(HEADING).expect("the section");
    let (section, _) = section.split_once("\n## ").expect("the next section");
    let mut blocks: Vec<String> = Vec::new();
    let mut is_code = false;
    for line in section.lines() {
        match line.strip_prefix("    ") {
            Some(code) => {
                if !is_code {
                    blocks.push(String::new());
                }
                let block = blocks.last_mut().expect("one was begun");
                block.push_str(code);
                block.push('\n');
                is_code = true;
            }
            None => is_code &= line.is_empty(),
        }
    }
    blocks
}

fn page() -> String {
    fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("README.md")).unwrap()
}

fn text(output: &Output) -> String {
    let [out, err] = [&output.stdout, &output.stderr].map(|text| String::from_utf8_lossy(text));
    format!("--- stdout ---\n{out}\n--- stderr ---\n{err}")
}

/// Installs the client into a directory with the README's own command.
fn install_client(build: &str, bin: &Path) -> bool {
    let line = build.lines().find(|line| line.starts_with("go install "));
    let (install, _) = line.expect("the command").split_once(" && ").unwrap();
    let words: Vec<_> = install.split(' ').skip(1).collect();
    Command::new("go")
        .args(words)
        .env("GOBIN", bin)
        .stdin(Stdio::null())
        .output()
        .is_ok_and(|output| output.status.success())
}

#[test]
fn the_section_has_a_block_that_builds_and_one_that_runs() {
    let blocks = blocks(&page());
    let [build, command] = blocks.as_slice() else {
        panic!("{blocks:#?}");
    };
    assert!(build.starts_with("cargo build --release "), "{build}");
    assert!(command.starts_with("dir=$(mktemp "), "{command}");
    assert!(command.lines().count() > 30, "{command}");
}

#[test]
fn root_the_readmes_commands_run_to_the_last_line_on_ext4() {
    if !geteuid().is_root() {
        return left_out("the README's commands: they need root");
    }
    let scratch = Scratch::new();
    let bin = scratch.dir("bin");
    let blocks = blocks(&page());
    if !install_client(&blocks[0], &bin) {
        left_out(
            "the README's commands: Go cannot build grpcurl on this machine (it needs network access once)",
        );
        return;
    }
    std::os::unix::fs::symlink(binary(), bin.join("slackwater")).unwrap();
    let disk = Disk::new(&scratch, "root", "ext4", 8 * GIB);
    let script = scratch.join("walk");
    // A command that fails ends the script, and with it the driver that the script has started.
    let start = "set -euxo pipefail\ntrap 'kill $(jobs -p) && wait || true' EXIT\n";
    let end = "trap - EXIT\n";
    fs::write(&script, [start, &blocks[1], end].concat()).unwrap();
    let path = std::env::var("PATH").unwrap_or_default();
    let mut command = Command::new("timeout");
    command
        .args(["--kill-after=30", "300", "bash"])
        .arg(&script)
        .current_dir(env!("CARGO_MANIFEST_DIR"))
        .env("PATH", format!("{}:{path}", bin.display()))
        .env("TMPDIR", &disk.mount_point)
        .stdin(Stdio::null());
    let output = without_configuration(command).output().unwrap();
    let all = text(&output);
    assert!(output.status.success(), "{}\n{all}", output.status);
    let out = String::from_utf8_lossy(&output.stdout);
    assert!(out.contains("written before the snapshot"), "{all}");
    let left: Vec<_> = fs::read_dir(&disk.mount_point)
        .unwrap()
        .map(|entry| entry.unwrap().file_name())
        .filter(|name| name != "lost+found")
        .collect();
    assert!(left.is_empty(), "the script leaves {left:?}\n{all}");
}
