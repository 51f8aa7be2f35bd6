//! Additional arguments of mkfs: split into words, and accepted from a list of safe options.
//!
//! mkfs runs as root, and some of its options read or write other files and devices (an external
//! journal, a prototype file, a directory to copy). So options are allowed by name, and values by
//! character set; options that the driver sets itself (UUID, discard, force) are refused.

use super::capability::FsType;
use crate::error::Error;

/// Splits at white space. There is no quoting, because no safe option needs it.
pub fn split(text: &str) -> Vec<String> {
    text.split_whitespace().map(str::to_string).collect()
}

/// An option that takes a value in the next word (or, for a short option, attached to it).
struct Known {
    flag: &'static str,
    takes_value: bool,
    /// Sub-options (`key=value,...`) that are refused.
    denied: &'static [&'static str],
}

const fn value(flag: &'static str) -> Known {
    Known {
        flag,
        takes_value: true,
        denied: &[],
    }
}

const fn without(flag: &'static str, denied: &'static [&'static str]) -> Known {
    Known {
        flag,
        takes_value: true,
        denied,
    }
}

const fn switch(flag: &'static str) -> Known {
    Known {
        flag,
        takes_value: false,
        denied: &[],
    }
}

const EXT4: &[Known] = &[
    value("-b"),
    value("-C"),
    value("-g"),
    value("-G"),
    value("-i"),
    value("-I"),
    value("-m"),
    value("-N"),
    value("-O"),
    value("-e"),
    value("-L"),
    value("-T"),
    switch("-j"),
    without("-J", &["device"]),
    without(
        "-E",
        &["discard", "nodiscard", "offset", "test_fs", "root_selinux"],
    ),
];

const XFS: &[Known] = &[
    value("-b"),
    value("-i"),
    value("-n"),
    value("-s"),
    value("-L"),
    without("-m", &["uuid"]),
    without("-d", &["name", "file", "size"]),
    without("-l", &["logdev", "name", "file"]),
];

const BTRFS: &[Known] = &[
    value("-n"),
    value("--nodesize"),
    value("-s"),
    value("--sectorsize"),
    value("-L"),
    value("--label"),
    value("-O"),
    value("--features"),
    value("-R"),
    value("--runtime-features"),
    value("-d"),
    value("--data"),
    value("-m"),
    value("--metadata"),
    value("--csum"),
    value("--checksum"),
    switch("-M"),
    switch("--mixed"),
];

fn known(fs: FsType) -> &'static [Known] {
    match fs {
        FsType::Ext4 => EXT4,
        FsType::Xfs => XFS,
        FsType::Btrfs => BTRFS,
    }
}

/// Refuses every word that is not known to be safe for this file system.
pub fn check(field: &str, fs: FsType, words: &[String]) -> Result<(), Error> {
    let refuse = |word: &str, why: &str| {
        Err(Error::invalid(
            format!("{field}.mkfsOptions"),
            format!("{word:?} {why}; allowed for {fs} are {}", flags(fs)),
        ))
    };
    let mut words = words.iter();
    while let Some(word) = words.next() {
        let Some((option, glued)) = find(fs, word) else {
            return refuse(word, "is not an allowed option");
        };
        if !option.takes_value {
            continue;
        }
        let given = match glued {
            Some(text) => text,
            None => match words.next() {
                Some(next) => next.as_str(),
                None => return refuse(word, "has no value"),
            },
        };
        if !given
            .bytes()
            .all(|c| c.is_ascii_alphanumeric() || b"_.,=:^+-".contains(&c))
            || given.starts_with('-')
        {
            return refuse(
                given,
                "is not a valid value: letters, digits and _.,=:^+- are possible",
            );
        }
        let names = given
            .split(',')
            .map(|pair| pair.split('=').next().unwrap_or(pair));
        if let Some(name) = names.into_iter().find(|name| option.denied.contains(name)) {
            return refuse(
                name,
                "names another device or file, or is set by the driver",
            );
        }
    }
    Ok(())
}

/// Refuses options that an earlier release accepted and that a new volume must not have: ext4
/// without a journal, which a power loss corrupts, and ext4 with its own error policy, which
/// decides what an error does to the whole machine. The words must have passed [`check`].
pub fn check_new(field: &str, fs: FsType, words: &[String]) -> Result<(), Error> {
    let refuse = |option: &str, why: &str| {
        Err(Error::invalid(
            format!("{field}.mkfsOptions"),
            format!("{option} {why}; leave it out"),
        ))
    };
    for (flag, value) in pairs(fs, words) {
        match (fs, flag) {
            (FsType::Ext4, "-e") => {
                return refuse(
                    flag,
                    "changes how the machine reacts to errors of the file system",
                );
            }
            (FsType::Ext4, "-O") if value.split(',').any(is_without_journal) => {
                return refuse(flag, "removes the journal");
            }
            _ => {}
        }
    }
    Ok(())
}

/// Whether a feature of ext4, as `-O` takes it in each of its spellings, removes the journal; a
/// feature named by its bit counts as the journal.
fn is_without_journal(feature: &str) -> bool {
    let name = feature
        .trim_start_matches(['^', '-', '+'])
        .to_ascii_lowercase();
    let off = feature.starts_with(['^', '-']);
    name == "none"
        || name == "journal_dev"
        || name.starts_with("feature_")
        || (off && name == "has_journal")
}

/// Returns the words without the error policy of ext4, which volumes of an earlier release may
/// have, and whether there was one.
pub fn without_error_policy(fs: FsType, words: &[String]) -> (Vec<String>, bool) {
    let mut kept = Vec::new();
    let mut found = false;
    for (flag, value) in pairs(fs, words) {
        if (fs, flag) == (FsType::Ext4, "-e") {
            found = true;
            continue;
        }
        kept.push(flag.to_string());
        if find(fs, flag).is_some_and(|(option, _)| option.takes_value) {
            kept.push(value.to_string());
        }
    }
    match found {
        true => (kept, true),
        false => (words.to_vec(), false),
    }
}

/// The options with their values, from words that have passed [`check`].
fn pairs<'a>(
    fs: FsType,
    words: &'a [String],
) -> impl Iterator<Item = (&'static str, &'a str)> + 'a {
    let mut words = words.iter();
    std::iter::from_fn(move || {
        let (option, glued) = find(fs, words.next()?)?;
        let value = match glued {
            Some(value) => value,
            None if option.takes_value => words.next()?.as_str(),
            None => "",
        };
        Some((option.flag, value))
    })
}

/// The option that a word begins, and a value attached to it (`-m1`, `--label=x`).
fn find(fs: FsType, word: &str) -> Option<(&'static Known, Option<&str>)> {
    known(fs).iter().find_map(|option| {
        let rest = word.strip_prefix(option.flag)?;
        match (rest, option.takes_value, option.flag.starts_with("--")) {
            ("", _, _) => Some((option, None)),
            (rest, true, true) => rest.strip_prefix('=').map(|value| (option, Some(value))),
            (rest, true, false) => Some((option, Some(rest))),
            (_, false, _) => None,
        }
    })
}

fn flags(fs: FsType) -> String {
    known(fs)
        .iter()
        .map(|option| option.flag)
        .collect::<Vec<_>>()
        .join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn allowed(fs: FsType, text: &str) -> bool {
        check("parameters", fs, &split(text)).is_ok()
    }

    #[test]
    fn common_options_are_allowed() {
        assert!(allowed(
            FsType::Ext4,
            "-m 0 -O ^has_journal,64bit -E lazy_itable_init=0 -i 16384 -m1"
        ));
        assert!(allowed(
            FsType::Xfs,
            "-i size=1024 -m reflink=1,bigtime=1 -d agcount=4 -l size=64m"
        ));
        assert!(allowed(
            FsType::Btrfs,
            "--csum xxhash -n 16k -M --label=data"
        ));
    }

    #[test]
    fn another_device_or_file_is_refused() {
        for (fs, text) in [
            (FsType::Ext4, "-J device=/dev/sdb1"),
            (FsType::Ext4, "/dev/sdb"),
            (FsType::Ext4, "-d etc"),
            (FsType::Ext4, "-l badblocks"),
            (FsType::Ext4, "-U random"),
            (FsType::Ext4, "-E nodiscard"),
            (FsType::Ext4, "-O"),
            (FsType::Ext4, "-L ../../etc/passwd"),
            (FsType::Xfs, "-l logdev=sdb"),
            (FsType::Xfs, "-d agcount=4,name=sdb"),
            (FsType::Xfs, "-r rtdev=sdb"),
            (FsType::Xfs, "-p proto"),
            (FsType::Xfs, "-c options=x"),
            (FsType::Btrfs, "--rootdir=etc"),
            (FsType::Btrfs, "sdb"),
            (FsType::Btrfs, "-n 16k;reboot"),
        ] {
            assert!(!allowed(fs, text), "{fs}: {text}");
        }
    }

    #[test]
    fn a_new_ext4_has_a_journal_and_leaves_errors_to_its_mount() {
        let refused = |text: &str| {
            assert!(allowed(FsType::Ext4, text), "of an earlier release: {text}");
            check_new("parameters", FsType::Ext4, &split(text)).is_err()
        };
        for text in [
            "-e panic",
            "-m 0 -e remount-ro",
            "-epanic",
            "-O ^has_journal",
            "-O 64bit,^has_journal",
            "-O64bit,-HAS_JOURNAL",
            "-O none",
            "-O ^FEATURE_C2",
        ] {
            assert!(refused(text), "{text}");
        }
        for text in [
            "-O ^64bit,has_journal",
            "-L e",
            "-m 0 -E lazy_itable_init=0",
        ] {
            assert!(!refused(text), "{text}");
        }
        check_new("parameters", FsType::Xfs, &split("-m reflink=1")).unwrap();
    }

    #[test]
    fn the_error_policy_of_a_volume_of_an_earlier_release_is_removed() {
        let taken = |text: &str| {
            let (words, found) = without_error_policy(FsType::Ext4, &split(text));
            (words.join(" "), found)
        };
        assert_eq!(taken("-j -e panic -m1"), ("-j -m 1".into(), true));
        assert_eq!(taken("-epanic"), (String::new(), true));
        assert_eq!(taken("-j -m1"), ("-j -m1".into(), false));
    }

    proptest! {
        #[test]
        fn no_slash_ever_reaches_mkfs(words in prop::collection::vec("[-a-zA-Z/=,]{0,12}", 0..5)) {
            for fs in FsType::ALL {
                if check("parameters", fs, &words).is_ok() {
                    prop_assert!(words.iter().all(|word| !word.contains('/')));
                }
            }
        }
    }
}
