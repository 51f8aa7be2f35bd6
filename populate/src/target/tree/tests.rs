//! Archives that try to leave their folder, and layers of images.

mod random;

use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::path::PathBuf;

use super::*;
use crate::format::archive::tests::{end, entry};
use crate::target::disk::open_folder;

/// A root with a folder beside it, which no archive may reach.
struct Place {
    folder: tempfile::TempDir,
}

impl Place {
    fn new() -> Place {
        let folder = tempfile::TempDir::with_prefix("slackwater-").expect("a folder");
        for name in ["root", "outside"] {
            fs::create_dir(folder.path().join(name)).expect("a folder");
        }
        Place { folder }
    }

    fn root(&self) -> PathBuf {
        self.folder.path().join("root")
    }

    fn fill_with(&self, rules: Rules, layers: &[Vec<Vec<u8>>]) -> Result<u64> {
        let (root, _) = open_folder(&self.root()).expect("it opens");
        let report = Report::new(std::io::sink());
        let mut tree = Tree::new(root, rules, &report);
        for layer in layers {
            let bytes = layer.concat();
            tree.add_all(&bytes[..])?;
        }
        tree.finish()?;
        let outside = fs::read_dir(self.folder.path().join("outside")).expect("a folder");
        assert_eq!(outside.count(), 0, "nothing is outside");
        Ok(report.numbers().skipped)
    }

    fn fill(&self, style: Style, layers: &[Vec<Vec<u8>>]) -> Result<u64> {
        self.fill_with(rules(style), layers)
    }

    fn read(&self, name: &str) -> String {
        fs::read_to_string(self.root().join(name)).unwrap_or_else(|error| error.to_string())
    }

    fn exists(&self, name: &str) -> bool {
        self.root().join(name).symlink_metadata().is_ok()
    }
}

fn rules(style: Style) -> Rules {
    Rules {
        style,
        preserve_owners: false,
        entries: 100,
        bytes: 1 << 20,
    }
}

type Attack = Box<dyn Fn(&Place) -> Vec<Vec<u8>>>;

fn file(name: &str, content: &str) -> Vec<u8> {
    entry(name.as_bytes(), b'0', b"", content.as_bytes())
}

fn link(name: &str, to: &str) -> Vec<u8> {
    entry(name.as_bytes(), b'2', to.as_bytes(), b"")
}

fn folder(name: &str) -> Vec<u8> {
    entry(name.as_bytes(), b'5', b"", b"")
}

fn hard(name: &str, to: &str) -> Vec<u8> {
    entry(name.as_bytes(), b'1', to.as_bytes(), b"")
}

#[test]
fn an_archive_becomes_files_folders_and_links() {
    let place = Place::new();
    let parts = vec![
        file("deep/er/f", "content"),
        folder("d"),
        file("d/g", "g"),
        hard("d/h", "deep/er/f"),
        link("s", "../outside"),
        link("t", "d"),
        file("t/through", "within"),
        file("d/g", "replaced"),
        end(),
    ];
    place.fill(Style::Archive, &[parts]).expect("it is filled");
    assert_eq!(place.read("deep/er/f"), "content");
    assert_eq!(place.read("d/h"), "content");
    assert_eq!(place.read("d/g"), "replaced");
    assert_eq!(place.read("d/through"), "within");
    let target = fs::read_link(place.root().join("s")).expect("a link");
    assert_eq!(target, PathBuf::from("../outside"));
    let metadata = |name: &str| fs::metadata(place.root().join(name)).expect("metadata");
    assert_eq!(metadata("deep/er/f").mtime(), 7);
    assert_eq!(
        metadata("d").mtime(),
        7,
        "the time of a folder, after its files"
    );
    assert_eq!(metadata("d").permissions().mode() & 0o7777, 0o644);
}

#[test]
fn no_link_leads_out_of_the_root() {
    let outside = |place: &Place| place.folder.path().join("outside").display().to_string();
    let attacks: Vec<(&str, Attack)> = vec![
        (
            "above",
            Box::new(|_| vec![link("s", "../outside"), file("s/f", "x"), end()]),
        ),
        (
            "absolute",
            Box::new(move |place| vec![link("s", &outside(place)), file("s/f", "x"), end()]),
        ),
        (
            "twice",
            Box::new(|_| {
                vec![
                    link("a", "."),
                    link("b", "a/.."),
                    file("b/outside/f", "x"),
                    end(),
                ]
            }),
        ),
        (
            "hard link through a link",
            Box::new(|_| vec![link("s", "../outside"), hard("h", "s/f"), end()]),
        ),
        (
            "folder through a link",
            Box::new(|_| vec![link("s", "../outside"), folder("s/d"), end()]),
        ),
        (
            "proc",
            Box::new(|_| vec![link("s", "/proc/self/cwd"), file("s/f", "x"), end()]),
        ),
        (
            "loop",
            Box::new(|_| vec![link("s", "s"), file("s/f", "x"), end()]),
        ),
    ];
    for (what, attack) in attacks {
        let place = Place::new();
        let failure = place
            .fill(Style::Archive, &[attack(&place)])
            .expect_err(what);
        assert_eq!(failure.reason, "ArchiveRefused", "{what}: {failure}");
        assert_eq!(failure.exit_code(), 10, "{what}");
        let count = fs::read_dir(place.folder.path().join("outside"))
            .expect("a folder")
            .count();
        assert_eq!(count, 0, "{what}");
    }
}

#[test]
fn a_file_never_goes_through_a_link_of_its_own_name() {
    let place = Place::new();
    let parts = vec![link("s", "../outside/f"), file("s", "x"), end()];
    place
        .fill(Style::Archive, &[parts])
        .expect("it replaces the link");
    assert_eq!(place.read("s"), "x");
    assert!(!place.folder.path().join("outside/f").exists());
}

#[test]
fn in_an_image_links_end_at_the_root() {
    let place = Place::new();
    let layer = vec![
        link("var", "/../../data"),
        folder("data"),
        file("var/f", "x"),
        end(),
    ];
    place.fill(Style::Image, &[layer]).expect("it is filled");
    assert_eq!(place.read("data/f"), "x");
}

#[test]
fn whiteouts_hide_what_lower_layers_have() {
    let place = Place::new();
    let lower = vec![
        file("a", "1"),
        file("d/x", "1"),
        file("d/y", "1"),
        file("o/deep/old", "1"),
        file("o/old", "1"),
        file("gone/f", "1"),
        file("kept", "1"),
        end(),
    ];
    let upper = vec![
        file(".wh.a", ""),
        file("d/.wh.x", ""),
        file("o/deep/new", "2"),
        file("o/new", "2"),
        file("o/.wh..wh..opq", ""),
        file(".wh.gone", ""),
        file(".wh.never-was", ""),
        end(),
    ];
    place
        .fill(Style::Image, &[lower, upper])
        .expect("it is filled");
    for name in ["d/y", "o/deep/new", "o/new", "kept"] {
        assert!(place.exists(name), "{name}");
    }
    for name in [
        "a",
        "d/x",
        "o/old",
        "o/deep/old",
        "gone",
        ".wh.a",
        "o/.wh..wh..opq",
    ] {
        assert!(!place.exists(name), "{name}");
    }
}

#[test]
fn a_whiteout_hides_nothing_outside() {
    for name in [".wh...", ".wh..", ".wh.", "d/.wh..wh.x"] {
        let place = Place::new();
        let failure = place
            .fill(Style::Image, &[vec![file(name, ""), end()]])
            .expect_err(name);
        assert_eq!(failure.reason, "ArchiveRefused");
    }
    let place = Place::new();
    let precious = place.folder.path().join("precious");
    fs::create_dir(&precious).expect("a folder");
    symlink("x", precious.join("f")).expect("a link");
    let lower = vec![link("s", "../precious"), end()];
    let upper = vec![file(".wh.s", ""), end()];
    place
        .fill(Style::Image, &[lower, upper])
        .expect("the link is removed");
    assert!(precious.join("f").symlink_metadata().is_ok());
    let archive = vec![file("a", "1"), file(".wh.a", ""), end()];
    place
        .fill(Style::Archive, &[archive])
        .expect("it is a name like others");
    assert!(place.exists("a") && place.exists(".wh.a"));
}

#[test]
fn devices_are_refused_in_archives_and_counted_in_images() {
    for kind in [b'3', b'4', b'6'] {
        let place = Place::new();
        let parts = || vec![entry(b"dev", kind, b"", b""), end()];
        let failure = place
            .fill(Style::Archive, &[parts()])
            .expect_err("a device");
        assert_eq!(failure.reason, "ArchiveRefused");
        assert_eq!(
            place.fill(Style::Image, &[parts()]).expect("it is skipped"),
            1
        );
        assert!(!place.exists("dev"));
    }
}

/// An entry whose mode has setuid, setgid and the sticky bit.
fn setuid(name: &str) -> Vec<u8> {
    let mut bytes = entry(name.as_bytes(), b'0', b"", b"");
    let mut header = tar::Header::new_old();
    header.as_mut_bytes().copy_from_slice(&bytes[..512]);
    header.set_mode(0o7755);
    header.set_cksum();
    bytes[..512].copy_from_slice(header.as_bytes());
    bytes
}

#[test]
fn setuid_and_setgid_are_dropped_without_owners() {
    let place = Place::new();
    place
        .fill(Style::Archive, &[vec![setuid("f"), end()]])
        .expect("it is filled");
    let mode = fs::metadata(place.root().join("f"))
        .expect("metadata")
        .mode();
    assert_eq!(mode & 0o7777, 0o755);
    if nix::unistd::geteuid().is_root() {
        let place = Place::new();
        let rules = Rules {
            preserve_owners: true,
            ..rules(Style::Archive)
        };
        place
            .fill_with(rules, &[vec![setuid("f"), end()]])
            .expect("it is filled");
        let metadata = fs::metadata(place.root().join("f")).expect("metadata");
        let found = (metadata.mode() & 0o7777, metadata.uid(), metadata.gid());
        assert_eq!(found, (0o7755, 1, 2));
    }
}

#[test]
fn entries_and_bytes_are_limited() {
    let place = Place::new();
    let many: Vec<_> = (0..101)
        .map(|n| file(&format!("f{n}"), ""))
        .chain([end()])
        .collect();
    let failure = place.fill(Style::Archive, &[many]).expect_err("too many");
    assert_eq!(failure.reason, "TooLarge");
    let place = Place::new();
    let half = "x".repeat(1 << 19);
    let parts = vec![file("a", &half), file("b", &half), file("c", "x"), end()];
    let failure = place.fill(Style::Archive, &[parts]).expect_err("too large");
    assert_eq!(failure.reason, "TooLarge");
}

#[test]
fn only_an_empty_folder_is_filled() {
    let place = Place::new();
    let (root, _) = open_folder(&place.root()).expect("it opens");
    fs::create_dir(place.root().join("lost+found")).expect("a folder");
    check_empty(&root, None).expect("mkfs creates this");
    symlink("x", place.root().join("disk.img")).expect("a link");
    check_empty(&root, Some("disk.img")).expect("it is of an earlier attempt");
    assert_eq!(
        check_empty(&root, None)
            .expect_err("it is not empty")
            .exit_code(),
        12
    );
}
