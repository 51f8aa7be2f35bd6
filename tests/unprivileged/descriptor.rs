//! Our copy of the CSI interface equals the official one, field by field, in both directions.
//!
//! The comparison is `csi-sanity/descriptor`, a Go program, because the official interface is
//! published as a Go module. Therefore these tests need Go, and download the module the first time.

#![expect(
    clippy::disallowed_methods,
    reason = "a test writes its files and starts programs"
)]

use std::fs;
use std::path::Path;
use std::process::{Command, Output};

use slackwater::csi::FILE_DESCRIPTOR_SET;

fn compare_with_official(descriptor_set: &[u8]) -> Output {
    let directory = tempfile::TempDir::with_prefix("slackwater-").expect("a directory");
    let file = directory.path().join("csi.bin");
    fs::write(&file, descriptor_set).expect("a file in it");
    Command::new("go")
        .args(["run", "."])
        .arg(&file)
        .current_dir(Path::new(env!("CARGO_MANIFEST_DIR")).join("csi-sanity/descriptor"))
        .output()
        .expect("go is missing: this test compares with the official Go module of CSI")
}

/// Our descriptor with one byte changed: the last one of the only or first `found`.
///
/// Bytes, since prost's types support no extensions: they would drop the options of CSI.
fn changed(found: &[u8], last: u8) -> Vec<u8> {
    let mut bytes = FILE_DESCRIPTOR_SET.to_vec();
    let start = bytes
        .windows(found.len())
        .position(|w| w == found)
        .expect("the bytes are in the descriptor");
    bytes[start + found.len() - 1] = last;
    bytes
}

#[track_caller]
fn assert_only_difference(descriptor_set: &[u8], difference: &str) {
    let output = compare_with_official(descriptor_set);
    assert!(!output.status.success());
    assert_eq!(
        String::from_utf8_lossy(&output.stdout),
        format!("{difference}\n")
    );
}

#[test]
fn our_interface_equals_the_official_one() {
    let output = compare_with_official(FILE_DESCRIPTOR_SET);
    assert!(
        output.status.success(),
        "{}{}",
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    );
}

#[test]
fn a_changed_number_is_a_difference() {
    // 0x18 is the tag of the field's number.
    assert_only_difference(
        &changed(b"limit_bytes\x18\x02", 9),
        "differs csi/message_type[CapacityRange]/field[limit_bytes]/number: ours 9, official 2",
    );
}

#[test]
fn a_lost_option_is_a_difference() {
    // The option 1059 with the value true.
    assert_only_difference(
        &changed(b"\x98\x42\x01", 0),
        "differs csi/message_type[CreateVolumeRequest]/field[secrets]/options/(csi.v1.csi_secret): \
         ours false, official true",
    );
}
