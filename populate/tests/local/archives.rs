//! Archives into a folder, made by the program tar.

use std::fs;
use std::os::unix::fs::{MetadataExt, symlink};

use serde_json::json;
use slackwater_populate::failure::Next;

use crate::server::{Server, broken, reply, serves};
use crate::support::{Volume, fill, noise, tar};

/// A folder with everything that an archive may have.
fn sample() -> tempfile::TempDir {
    let folder = tempfile::TempDir::with_prefix("slackwater-").expect("a folder");
    let path = |name: &str| folder.path().join(name);
    let long = format!("{}/{}", "n".repeat(120), "m".repeat(200));
    fs::create_dir_all(path(&long)).expect("folders");
    fs::write(path(&format!("{long}/f")), noise(100_000)).expect("a file");
    fs::write(path("plain"), "plain").expect("a file");
    fs::write(path("empty"), "").expect("a file");
    fs::hard_link(path("plain"), path("hard")).expect("a link");
    symlink("plain", path("soft")).expect("a link");
    symlink("/etc/passwd", path("away")).expect("a link");
    folder
}

#[test]
fn archives_of_each_format_are_extracted() {
    let sample = sample();
    for flags in [
        &["--format=gnu"][..],
        &["--format=pax"],
        &["--format=gnu", "--gzip"],
        &["--format=pax", "--xz"],
        &["--format=gnu", "--zstd"],
    ] {
        let volume = Volume::new();
        let server = serves(tar(sample.path(), flags));
        let outcome = fill(&volume.config(&server.url("/x"), json!({})));
        outcome.good();
        let compared = std::process::Command::new("diff")
            .args(["--recursive", "--no-dereference"])
            .arg(sample.path())
            .arg(volume.root())
            .output()
            .expect("diff starts");
        assert!(compared.status.success(), "{flags:?} {compared:?}");
        let inode = |name: &str| {
            fs::metadata(volume.root().join(name))
                .expect("metadata")
                .ino()
        };
        assert_eq!(inode("plain"), inode("hard"));
        assert!(
            outcome.last["entries"]
                .as_u64()
                .is_some_and(|entries| entries >= 8)
        );
    }
}

/// Sparse entries name the places of their content in a header of their own, in four forms.
#[test]
fn sparse_files_of_each_form_are_refused_by_name() {
    let folder = tempfile::TempDir::with_prefix("slackwater-").expect("a folder");
    let file = fs::File::create(folder.path().join("sparse")).expect("a file");
    file.set_len(8 << 20).expect("a length");
    std::os::unix::fs::FileExt::write_at(&file, b"data", 5 << 20).expect("it is written");
    for flags in [
        &["--format=gnu", "--sparse"][..],
        &["--format=pax", "--sparse", "--sparse-version=0.0"],
        &["--format=pax", "--sparse", "--sparse-version=0.1"],
        &["--format=pax", "--sparse", "--sparse-version=1.0"],
    ] {
        let bytes = tar(folder.path(), flags);
        assert!(bytes.len() < 1 << 20, "{flags:?} is sparse");
        let volume = Volume::new();
        let outcome = fill(&volume.config(&serves(bytes).url("/x"), json!({})));
        let failure = outcome.failure("ArchiveRefused");
        assert_eq!(failure.next, Next::Nothing);
        let text = failure.to_string();
        assert!(text.contains("create it without --sparse"), "{text}");
        assert!(!volume.root().join("sparse").exists(), "{flags:?}");
    }
    // Without the flag, zeros are stored, and the file is as before.
    let volume = Volume::new();
    let server = serves(tar(folder.path(), &["--gzip"]));
    fill(&volume.config(&server.url("/x"), json!({}))).good();
    let same = fs::read(folder.path().join("sparse")).expect("it is read");
    assert!(volume.read("sparse") == same);
}

#[test]
fn a_part_of_an_archive_asks_for_a_new_volume() {
    let sample = sample();
    let bytes = tar(sample.path(), &[]);
    let half = bytes.len() / 2;
    let server = Server::new(move |_| broken(reply("200 OK", &[], &bytes), half));
    let volume = Volume::new();
    let outcome = fill(&volume.config(&server.url("/x"), json!({})));
    assert_eq!(outcome.failure("TransferFailed").next, Next::NewVolume);
    let again = fill(&volume.config(&serves(tar(sample.path(), &[])).url("/x"), json!({})));
    assert_eq!(again.failure("TargetNotEmpty").next, Next::NewVolume);
}

#[test]
fn data_of_a_user_is_never_touched() {
    let volume = Volume::new();
    fs::write(volume.root().join("precious"), "data").expect("a file");
    for bytes in [noise(10), tar(sample().path(), &[])] {
        let outcome = fill(&volume.config(&serves(bytes).url("/x"), json!({})));
        assert_eq!(outcome.failure("TargetNotEmpty").next, Next::NewVolume);
    }
    assert_eq!(volume.names(), ["precious"]);
}

#[test]
fn a_declared_format_must_be_that_of_the_content() {
    let volume = Volume::new();
    let server = serves(noise(2000));
    let outcome = fill(&volume.config(&server.url("/x"), json!({"format": "tar"})));
    assert_eq!(outcome.failure("ArchiveRefused").next, Next::Nothing);
    let bytes = tar(sample().path(), &[]);
    let server = serves(bytes.clone());
    let volume = Volume::new();
    fill(&volume.config(&server.url("/x"), json!({"format": "raw"}))).good();
    assert!(volume.read("disk.img") == bytes, "as it is");
}

#[test]
fn the_checksum_is_also_of_what_follows_the_end_of_an_archive() {
    let bytes = [tar(sample().path(), &[]), noise(100_000)].concat();
    let sum = crate::support::digest(&bytes);
    let server = serves(bytes);
    let source = json!({"source": {"http": {"unverified": false, "sha256": sum}}});
    fill(&Volume::new().config(&server.url("/x"), source)).good();
}
