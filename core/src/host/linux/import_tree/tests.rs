//! Random trees, hostile trees, and trees that change while they are copied.

#![allow(clippy::disallowed_methods, reason = "a test changes its own files")]

use std::collections::BTreeMap;
use std::ffi::{CString, OsString};
use std::fs::{self, Permissions};
use std::os::unix::ffi::OsStringExt;
use std::os::unix::fs::{FileExt, PermissionsExt, symlink};
use std::os::unix::net::UnixListener;

use nix::sys::stat::Mode;
use nix::unistd::mkfifo;
use proptest::prelude::*;
use tempfile::TempDir;

use super::super::sys::attributes;
use super::*;
use crate::error::chain;

/// A directory that is imported, and an empty one.
struct Place {
    scratch: TempDir,
}

impl Place {
    fn new() -> Place {
        let scratch = TempDir::with_prefix("slackwater-").unwrap();
        for name in ["from", "to", "outside"] {
            fs::create_dir(scratch.path().join(name)).unwrap();
        }
        Place { scratch }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.scratch.path().join(name)
    }

    fn write(&self, name: &str, bytes: &[u8]) {
        fs::write(self.path("from").join(name), bytes).unwrap();
    }

    fn open(&self) -> Result<ImportTree> {
        ImportTree::open(&self.path("from"))
    }

    fn copy(&self, tree: &ImportTree, mut each: impl FnMut(u64)) -> Result<()> {
        let to = File::open(self.path("to")).unwrap();
        tree.copy_to(&to, &mut |progress| each(progress.entries))
    }

    fn check_same(&self) {
        assert_eq!(describe(&self.path("to")), describe(&self.path("from")));
    }
}

type Described = BTreeMap<PathBuf, (String, Vec<u8>, BTreeMap<CString, Vec<u8>>)>;

/// What a user of a tree can see of it, except for what is never copied.
fn describe(top: &Path) -> Described {
    let mut first = BTreeMap::new();
    let mut found = BTreeMap::new();
    let mut paths = vec![top.to_path_buf()];
    while let Some(path) = paths.pop() {
        let below = path.strip_prefix(top).unwrap().to_path_buf();
        let seen = fs::symlink_metadata(&path).unwrap();
        let kind = seen.file_type();
        let mut content = Vec::new();
        let mut names = BTreeMap::new();
        if kind.is_dir() {
            let entries = fs::read_dir(&path).unwrap();
            paths.extend(entries.map(|entry| entry.unwrap().path()));
        } else if kind.is_symlink() {
            content = fs::read_link(&path).unwrap().into_os_string().into_vec();
        } else if kind.is_file() {
            let mut hasher = DefaultHasher::new();
            let bytes = fs::read(&path).unwrap();
            bytes.hash(&mut hasher);
            content = format!("{} bytes, {:x}", bytes.len(), hasher.finish()).into_bytes();
            let file = File::open(&path).unwrap();
            for name in attributes::names(&file).unwrap() {
                let value = attributes::value(&file, &name).unwrap();
                names.insert(name, value);
            }
        } else {
            continue;
        }
        let id = (seen.dev(), seen.ino());
        let first = first.entry(id).or_insert_with(|| below.clone()).clone();
        let facts = format!(
            "{:o} {} {} {} {}.{} {first:?}",
            seen.mode(),
            seen.uid(),
            seen.gid(),
            seen.nlink(),
            seen.mtime(),
            seen.mtime_nsec(),
        );
        found.insert(below, (facts, content, names));
    }
    found
}

/// One entry of a random tree: the number of its directory, and what it is.
fn entry() -> impl Strategy<Value = (usize, u8, OsString, u64, u32)> {
    let name = prop::collection::vec((1_u8..=255).prop_filter("/", |byte| *byte != b'/'), 1..12);
    let name = name.prop_map(OsString::from_vec);
    (0_usize..8, 0_u8..6, name, 0_u64..200_000, 0_u32..0o1000)
}

fn build(top: &Path, entries: &[(usize, u8, OsString, u64, u32)]) {
    let mut folders = vec![top.to_path_buf()];
    let mut files = Vec::new();
    let mut modes = Vec::new();
    for (folder, kind, name, length, mode) in entries {
        let path = folders[folder % folders.len()].join(name);
        if matches!(name.as_encoded_bytes(), b"." | b"..") || path.symlink_metadata().is_ok() {
            continue;
        }
        match kind {
            0 => {
                fs::create_dir(&path).unwrap();
                folders.push(path.clone());
                modes.push((path, mode | 0o700));
            }
            1 => symlink("../outside/secret", &path).unwrap(),
            2 if !files.is_empty() => {
                let first: &PathBuf = &files[*length as usize % files.len()];
                fs::hard_link(first, &path).unwrap();
            }
            _ => {
                let file = File::create(&path).unwrap();
                file.set_len(*length).unwrap();
                file.write_all_at(name.as_encoded_bytes(), length / 2)
                    .unwrap();
                attributes::set(&file, c"user.slackwater", name.as_encoded_bytes()).unwrap();
                files.push(path.clone());
                modes.push((path, mode | 0o400));
            }
        }
    }
    for (path, mode) in modes.into_iter().rev() {
        fs::set_permissions(path, Permissions::from_mode(mode)).unwrap();
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(40))]

    #[test]
    fn the_copy_of_a_random_tree_is_the_same(entries in prop::collection::vec(entry(), 0..30)) {
        let place = Place::new();
        build(&place.path("from"), &entries);
        let before = describe(&place.path("from"));
        let tree = place.open().unwrap();
        place.copy(&tree, |_| {}).unwrap();
        place.check_same();
        prop_assert_eq!(&describe(&place.path("from")), &before);
        let content = tree.content();
        prop_assert_eq!(content.folders + content.files + content.symlinks, before.len() as u64);
    }
}

#[test]
fn holes_stay_holes_and_what_has_no_content_is_skipped_by_name() {
    let place = Place::new();
    let sparse = File::create(place.path("from").join("sparse")).unwrap();
    sparse.set_len(1 << 40).unwrap();
    sparse.write_all_at(&[7; 100], 1 << 39).unwrap();
    drop(sparse);
    let _listener = UnixListener::bind(place.path("from").join("socket")).unwrap();
    mkfifo(&place.path("from").join("fifo"), Mode::S_IRWXU).unwrap();
    let tree = place.open().unwrap();
    let expected = [("fifo", "a FIFO"), ("socket", "a socket")];
    let skipped = expected.map(|(name, what)| (PathBuf::from(name), what));
    assert_eq!(tree.content().skipped, skipped);
    assert!(tree.content().bytes < 1 << 20);
    place.copy(&tree, |_| {}).unwrap();
    let copy = File::open(place.path("to").join("sparse")).unwrap();
    let found = copy.metadata().unwrap();
    assert_eq!(found.len(), 1 << 40);
    assert!(found.blocks() * 512 < 1 << 20);
    let mut read = [0; 100];
    copy.read_exact_at(&mut read, 1 << 39).unwrap();
    assert_eq!(read, [7; 100]);
    assert_eq!(fs::read_dir(place.path("to")).unwrap().count(), 1);
}

#[test]
fn progress_counts_every_entry_and_every_byte_of_data_once() {
    let place = Place::new();
    fs::create_dir(place.path("from").join("d")).unwrap();
    place.write("d/large", &vec![7; 3 << 20]);
    place.write("empty", b"");
    symlink("d", place.path("from").join("s")).unwrap();
    fs::hard_link(
        place.path("from").join("d/large"),
        place.path("from").join("hard"),
    )
    .unwrap();
    mkfifo(&place.path("from").join("fifo"), Mode::S_IRWXU).unwrap();
    let tree = place.open().unwrap();
    let mut all = vec![TreeProgress::default()];
    let to = File::open(place.path("to")).unwrap();
    tree.copy_to(&to, &mut |progress| all.push(progress))
        .unwrap();
    let grows =
        |two: &[TreeProgress]| two[0].entries <= two[1].entries && two[0].bytes <= two[1].bytes;
    assert!(all.windows(2).all(grows), "{all:?}");
    let content = tree.content();
    let last = all.last().unwrap();
    let entries = content.files + content.folders + content.symlinks;
    assert_eq!((last.entries, last.bytes), (entries, content.bytes));
    assert_eq!((entries, content.bytes), (6, 3 << 20));
    assert!(all.len() > entries as usize + 1, "also within a large file");
}

#[test]
fn a_path_is_as_long_as_the_kernel_accepts_and_a_longer_one_is_named() {
    for (levels, name) in [(500, "d".to_string()), (15, "n".repeat(250))] {
        let place = Place::new();
        make_deep(&place.path("from"), levels, &name);
        let tree = place.open().unwrap();
        assert_eq!(tree.content().folders, levels as u64 + 1);
        place.copy(&tree, |_| {}).unwrap();
    }
    let place = Place::new();
    make_deep(&place.path("from"), 18, &"n".repeat(250));
    let error = chain(&place.open().err().unwrap());
    assert!(error.contains("4095 bytes"), "{error}");
}

fn make_deep(top: &Path, levels: usize, name: &str) {
    let mut folder = OwnedFd::from(File::open(top).unwrap());
    for _ in 0..levels {
        nix::sys::stat::mkdirat(&folder, name, Mode::S_IRWXU).unwrap();
        folder = walk::open_below(&folder, Path::new(name)).unwrap();
    }
}

#[test]
fn no_symbolic_link_leads_to_a_directory() {
    let place = Place::new();
    let link = place.path("link");
    symlink(place.path("from"), &link).unwrap();
    for path in [
        link.clone(),
        link.join("."),
        Path::new("/proc/self/root").to_path_buf(),
    ] {
        let error = chain(&ImportTree::open(&path).err().unwrap());
        assert!(error.contains("symbolic link"), "{error}");
    }
}

#[test]
fn a_file_that_is_open_for_writing_is_refused_by_name() {
    let place = Place::new();
    place.write("quiet", b"1");
    place.write("busy", b"1");
    let busy = fs::OpenOptions::new()
        .write(true)
        .open(place.path("from").join("busy"))
        .unwrap();
    let tree = place.open().unwrap();
    let error = chain(&place.copy(&tree, |_| {}).unwrap_err());
    assert!(
        error.contains("from/busy") && error.contains("open for writing"),
        "{error}"
    );
    drop(busy);
}

/// A change of the directory `from` after this number of entries, and what the error names.
type Change = (&'static str, fn(&Path), &'static [&'static str]);

const CHANGES: [Change; 10] = [
    ("a copied file", |at| append(&at.join("a")), &["from/a"]),
    (
        "a file that is not copied yet",
        |at| append(&at.join("z")),
        &["from/z"],
    ),
    ("a mode", |at| set_mode(&at.join("a"), 0o640), &["from/a"]),
    (
        "the mode of a directory",
        |at| set_mode(&at.join("d"), 0o750),
        &["from/d"],
    ),
    (
        "a new file",
        |at| fs::write(at.join("new"), "x").unwrap(),
        &["from", "from/new"],
    ),
    (
        "a file that is gone",
        |at| fs::remove_file(at.join("z")).unwrap(),
        &["from", "from/z"],
    ),
    (
        "a new file below",
        |at| fs::write(at.join("d/new"), "x").unwrap(),
        &["from/d"],
    ),
    (
        "an attribute",
        |at| attributes::set(File::open(at.join("a")).unwrap(), c"user.x", b"2").unwrap(),
        &["from/a"],
    ),
    (
        "a directory that becomes a link",
        |at| {
            fs::rename(at.join("d"), at.join("../moved")).unwrap();
            symlink("../outside", at.join("d")).unwrap();
        },
        &["from", "from/d"],
    ),
    (
        "another file with the same content",
        |at| {
            fs::copy(at.join("a"), at.join("../a")).unwrap();
            fs::rename(at.join("../a"), at.join("a")).unwrap();
        },
        &["from", "from/a"],
    ),
];

fn append(path: &Path) {
    let mut bytes = fs::read(path).unwrap();
    bytes.push(b'x');
    fs::write(path, bytes).unwrap();
}

fn set_mode(path: &Path, mode: u32) {
    fs::set_permissions(path, Permissions::from_mode(mode)).unwrap();
}

#[test]
fn what_changes_before_or_after_its_copy_ends_the_import_with_its_name() {
    for (what, change, names) in CHANGES {
        for after in [1, 3] {
            let place = Place::new();
            place.write("a", b"1");
            place.write("z", b"1");
            fs::create_dir(place.path("from").join("d")).unwrap();
            place.write("d/f", b"1");
            fs::write(place.path("outside").join("secret"), "secret").unwrap();
            let tree = place.open().unwrap();
            let mut is_done = false;
            let copied = place.copy(&tree, |entries| {
                if entries == after && !std::mem::replace(&mut is_done, true) {
                    change(&place.path("from"));
                }
            });
            assert!(is_done, "{what}");
            let error = copied.err().map(|error| chain(&error)).unwrap_or_default();
            let is_named = names.iter().any(|name| {
                let whole = place.scratch.path().join(name);
                error.contains(&format!("import {}: it ", whole.display()))
            });
            assert!(is_named, "{what}, after {after}: {error:?}");
            assert!(!place.path("to").join("d/secret").exists(), "{what}");
        }
    }
}

#[test]
fn a_file_that_was_changed_after_the_import_began_is_refused() {
    let place = Place::new();
    place.write("a", b"1");
    // The clock was set back, or the file was written while the survey began.
    let mut tree = place.open().unwrap();
    tree.began = (0, 0);
    let error = chain(&tree.survey().unwrap_err());
    assert!(error.contains("changed while"), "{error}");
}

#[test]
fn a_time_of_change_in_the_future_is_not_called_a_change() {
    let place = Place::new();
    let tree = place.open().unwrap();
    let refused = |changed: (i64, i64)| {
        let refused = tree.check_age(Path::new("a"), changed);
        refused.err().map(|error| chain(&error)).unwrap_or_default()
    };
    let (seconds, nanoseconds) = tree.began;
    assert_eq!(refused((seconds - 1, nanoseconds)), "");
    assert_eq!(refused((seconds - 1, 0)), "");
    for recent in [
        (seconds, nanoseconds),
        (seconds, nanoseconds.max(1) + 1),
        (seconds, 0),
    ] {
        assert!(refused(recent).contains("changed while"), "{recent:?}");
    }
    for future in [(seconds + 600, 1), (seconds + 600, 0)] {
        assert!(refused(future).contains("in the future"), "{future:?}");
    }
}

/// What a name does to a terminal is not done when an error names it.
#[test]
fn a_name_with_control_characters_is_shown_without_them() {
    let place = Place::new();
    let name = OsString::from_vec(b"it's \x1b]0;title\x07\xff\xe2\x80\xae.txt".to_vec());
    let path = place.path("from").join(&name);
    fs::write(&path, "1").unwrap();
    let tree = place.open().unwrap();
    let writer = fs::OpenOptions::new().append(true).open(&path).unwrap();
    let error = chain(&place.copy(&tree, |_| {}).unwrap_err());
    drop(writer);
    let shown = "/it's \\u{1b}]0;title\\u{7}\u{fffd}\\u{202e}.txt: ";
    assert!(error.contains(shown), "{error:?}");
}

/// A tenant replaces a directory by a link to another one, and back, as fast as it can.
#[test]
fn a_link_that_replaces_a_directory_is_never_followed() {
    let place = Place::new();
    let from = place.path("from");
    fs::create_dir(from.join("d")).unwrap();
    place.write("d/own", b"1");
    symlink(place.path("outside"), from.join("link")).unwrap();
    let secret = place.path("outside").join("secret");
    fs::write(&secret, "secret").unwrap();
    let secret = fs::metadata(&secret).unwrap().ino();
    let is_done = std::sync::atomic::AtomicBool::new(false);
    let order = std::sync::atomic::Ordering::Relaxed;
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let exchange = nix::fcntl::RenameFlags::RENAME_EXCHANGE;
            let at = nix::fcntl::AT_FDCWD;
            while !is_done.load(order) {
                let names = (&from.join("d"), &from.join("link"));
                nix::fcntl::renameat2(at, names.0, at, names.1, exchange).unwrap();
            }
        });
        let root = OwnedFd::from(File::open(&from).unwrap());
        let (mut ended, mut is_reached) = (0, false);
        let begun = std::time::Instant::now();
        while ended < 20 && begun.elapsed().as_secs() < 60 {
            let walked = walk(&root, &from, Limits::DEFAULT, |entry| {
                is_reached |= entry.metadata.is_some_and(|found| found.ino() == secret);
                Ok(())
            });
            ended += u32::from(walked.is_err());
        }
        // An assertion before this would wait for the other thread.
        is_done.store(true, order);
        assert!(!is_reached, "a link was followed");
        assert!(ended > 0, "the race did not happen");
    });
}

/// The users of a directory decide how many entries it has, and how long their names are.
#[test]
fn a_directory_that_needs_too_much_memory_is_refused() {
    let place = Place::new();
    let open = |entries, bytes| {
        let limits = Limits { entries, bytes };
        ImportTree::open_within(&place.path("from"), limits)
    };
    let why = |entries, bytes| chain(&open(entries, bytes).err().unwrap());
    // With the directory itself, 9 entries.
    for n in 0..4 {
        fs::create_dir(place.path("from").join(format!("{n}-{}", "d".repeat(98)))).unwrap();
        place.write(&format!("{n}"), b"x");
    }
    let most = 4 * (40 + 100) + 4 * (40 + 1);
    open(9, most).unwrap();
    let many = why(8, most);
    assert!(many.contains("has more than 8 entries"), "{many}");
    let long = why(9, most - 1);
    assert!(long.contains("need more than 723 bytes"), "{long}");
    assert!(
        long.contains(place.path("from").to_str().unwrap()),
        "{long}"
    );
    // What a directory had is not kept after it.
    for n in 0..4 {
        let folder = place.path("from").join(format!("{n}-{}", "d".repeat(98)));
        fs::write(folder.join("file"), b"x").unwrap();
    }
    open(13, most).unwrap();
    // The copy keeps the paths of all directories.
    let tree = open(13, most).unwrap();
    place.copy(&tree, drop).unwrap();
    let tree = ImportTree {
        limits: Limits {
            entries: 13,
            bytes: 4 * 140,
        },
        ..tree
    };
    fs::remove_dir_all(place.path("to")).unwrap();
    fs::create_dir(place.path("to")).unwrap();
    let copy = place.copy(&tree, drop).unwrap_err();
    assert!(chain(&copy).contains("need more than 560 bytes"), "{copy}");
}

#[test]
fn the_list_of_what_is_not_copied_has_an_end() {
    let place = Place::new();
    for n in 0..LISTED + 5 {
        let path = place.path("from").join(n.to_string());
        mkfifo(&path, Mode::S_IRWXU).unwrap();
    }
    let tree = place.open().unwrap();
    let content = tree.content();
    assert_eq!(content.skipped.len(), LISTED);
    assert_eq!(content.not_copied, LISTED as u64 + 5);
}
