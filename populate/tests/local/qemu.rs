//! Images of qcow2 that QEMU has created, and their content as QEMU reads it. The script `qcow2/create` has created
//! them with QEMU 7.2; they are compressed, which the program unpacks itself.

use std::fs;
use std::path::Path;

use serde_json::json;
use slackwater_populate::failure::Next;

use crate::server::serves;
use crate::support::{Outcome, Volume, digest, fill, noise};

fn file(name: &str) -> Vec<u8> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/local/qcow2");
    fs::read(folder.join(name)).expect("it is read")
}

fn fill_from(volume: &Volume, name: &str) -> Outcome {
    let server = serves(file(&format!("{name}.xz")));
    fill(&volume.config(&server.url("/x"), json!({})))
}

#[test]
fn images_that_qemu_has_created_become_their_disks() {
    let mut content = noise(3000);
    content.resize(40_000, 0);
    content.extend_from_slice(&b"hello, hello\n".repeat(2000));
    content.resize(98_304, 0);
    for name in ["version-2", "version-3", "large-clusters", "zlib", "zstd"] {
        let volume = Volume::new();
        fill_from(&volume, name).good();
        assert!(volume.read("disk.img") == content, "{name}");
    }
    // With zeros that are written and discarded. What it was in an earlier snapshot is ignored.
    let volume = Volume::new();
    fill_from(&volume, "snapshot").good();
    let disk = volume.read("disk.img");
    assert!(disk.len() == content.len() && disk[..4096] == [9; 4096]);
    let expected = String::from_utf8(file("snapshot.sha256")).expect("text");
    assert_eq!(digest(&disk), expected.trim());
}

#[test]
fn images_of_qemu_that_need_more_than_their_file_are_refused() {
    for (name, why) in [
        ("backing", "has a backing file"),
        ("external", "external data file"),
        ("encrypted", "is encrypted"),
        ("subclusters", "extended entries"),
    ] {
        let volume = Volume::new();
        let outcome = fill_from(&volume, name);
        let failure = outcome.failure("FormatRefused");
        assert_eq!(failure.next, Next::Nothing, "{name}");
        assert!(failure.to_string().contains(why), "{name}: {failure}");
        assert!(volume.names().is_empty(), "{name}");
    }
}
