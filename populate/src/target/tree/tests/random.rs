//! Random archives and layers of hostile entries. Whatever they do, nothing outside of the folder changes, and
//! they end with a tree within the limits or with a refusal.

#![allow(clippy::disallowed_methods, reason = "a test writes its files")]

use std::collections::BTreeSet;
use std::path::Path;

use proptest::prelude::*;

use super::*;

/// What is replaced by the path of the folder beside the root.
const OUTSIDE: &str = "@";
const ENTRIES: u64 = 16;
const BYTES: u64 = 2000;

#[derive(Clone, Debug)]
struct Random {
    kind: u8,
    name: String,
    link: String,
    size: usize,
}

fn name() -> impl Strategy<Value = String> {
    let parts = [
        "a",
        "b",
        "s",
        "s",
        "..",
        ".",
        "",
        "kept",
        "outside",
        "lost+found",
        ".wh.a",
        ".wh.s",
        ".wh...",
        ".wh..wh..opq",
    ];
    let part = prop::sample::select(parts.to_vec());
    prop::collection::vec(part, 1..4).prop_map(|parts| parts.join("/"))
}

fn random() -> impl Strategy<Value = Random> {
    let links = [
        "..",
        "../outside",
        "../outside/kept",
        "../../outside",
        "/",
        ".",
        "a",
        "s",
        "b/s",
        OUTSIDE,
        "@/kept",
        "/proc/self/cwd",
    ];
    let kind = prop::sample::select(b"0001225556".to_vec());
    // Names without `..` are more frequent than others, so that more than one entry is added.
    let plain = prop::sample::select(vec!["a", "b", "s", "s/kept", "s/new", "a/s", "b/a/s"]);
    let name = prop_oneof![3 => plain.prop_map(str::to_string), 1 => name()];
    let link = prop::sample::select(links.to_vec());
    (kind, name, link, 0_usize..400).prop_map(|(kind, name, link, size)| Random {
        kind,
        name,
        link: link.into(),
        size,
    })
}

impl Random {
    fn bytes(&self, outside: &Path) -> Vec<u8> {
        let outside = outside.to_str().expect("text");
        let link = match self.kind {
            b'1' | b'2' => self.link.replace(OUTSIDE, outside),
            _ => String::new(),
        };
        let content = match self.kind {
            b'0' => vec![7; self.size],
            _ => Vec::new(),
        };
        entry(self.name.as_bytes(), self.kind, link.as_bytes(), &content)
    }
}

/// All that an archive could change of a folder.
fn describe(folder: &Path) -> BTreeSet<String> {
    let one = |path: PathBuf| {
        let found = path.symlink_metadata().expect("metadata");
        let content = fs::read(&path).unwrap_or_default();
        format!(
            "{path:?} {:o} {} {} {}.{} {content:?}",
            found.mode(),
            found.ino(),
            found.nlink(),
            found.mtime(),
            found.mtime_nsec()
        )
    };
    let entries = fs::read_dir(folder).expect("a folder");
    let entries = entries.map(|entry| entry.expect("an entry").path());
    entries.chain([folder.to_path_buf()]).map(one).collect()
}

/// Bytes of all files below a folder, each once for each name.
fn size(folder: &Path) -> u64 {
    let entries = fs::read_dir(folder).expect("a folder");
    let each = entries.map(|entry| {
        let path = entry.expect("an entry").path();
        let found = path.symlink_metadata().expect("metadata");
        match (found.is_dir(), found.is_file() && found.nlink() == 1) {
            (true, _) => size(&path),
            (false, true) => found.len(),
            (false, false) => 0,
        }
    });
    each.sum()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    #[test]
    fn no_archive_and_no_layer_reaches_out_of_the_folder(
        layers in prop::collection::vec(prop::collection::vec(random(), 0..12), 1..3),
        is_image: bool,
    ) {
        let place = Place::new();
        let outside = place.folder.path().join("outside");
        fs::write(outside.join("kept"), "kept").expect("a file");
        let before = describe(&outside);
        let (root, _) = open_folder(&place.root()).expect("it opens");
        let report = Report::new(std::io::sink());
        let rules = Rules {
            style: if is_image { Style::Image } else { Style::Archive },
            preserve_owners: false,
            entries: ENTRIES,
            bytes: BYTES,
        };
        let mut tree = Tree::new(root, rules, &report);
        let filled = layers.iter().try_for_each(|layer| {
            let parts = layer.iter().map(|one| one.bytes(&outside));
            let bytes: Vec<u8> = parts.chain([end()]).flatten().collect();
            tree.add_all(&bytes[..])
        });
        let filled = filled.and_then(|()| tree.finish());
        prop_assert_eq!(describe(&outside), before);
        let beside = fs::read_dir(place.folder.path()).expect("a folder").count();
        prop_assert_eq!(beside, 2);
        let numbers = report.numbers();
        prop_assert!(numbers.entries <= ENTRIES + 1);
        prop_assert!(size(&place.root()) <= BYTES);
        if let Err(failure) = filled {
            // Another attempt with the same archive would fail again.
            prop_assert_eq!(failure.exit_code(), 10, "{}: {}", failure.reason, failure);
        }
    }
}
