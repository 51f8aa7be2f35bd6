//! Features of file systems that a new mkfs enables by default and an old kernel cannot mount. They
//! are disabled where the running kernel is older than the feature.

use std::path::Path;

use nix::sys::utsname::uname;

use super::program::Program;
use crate::model::FsType;

/// Major and minor version.
type Version = (u32, u32);

/// A feature that is disabled below a kernel version.
struct Feature {
    fs: FsType,
    /// The mkfs option that contains it.
    flag: &'static str,
    /// The value of that option that disables it; the feature's name is everything before a `=`.
    off: &'static str,
    /// The first kernel that can mount it.
    kernel: Version,
    /// The first mkfs release that accepts the value.
    program: Version,
}

const fn feature(
    fs: FsType,
    flag: &'static str,
    off: &'static str,
    kernel: Version,
    program: Version,
) -> Feature {
    Feature {
        fs,
        flag,
        off,
        kernel,
        program,
    }
}

/// Older features (bigtime, inobtcount, metadata_csum_seed, free-space-tree, no-holes) can be
/// mounted by every kernel that this driver supports.
const FEATURES: [Feature; 6] = [
    feature(FsType::Xfs, "-i", "nrext64=0", (5, 19), (5, 19)),
    feature(FsType::Xfs, "-i", "exchange=0", (6, 10), (6, 10)),
    feature(FsType::Xfs, "-n", "parent=0", (6, 10), (6, 10)),
    feature(FsType::Xfs, "-m", "metadir=0", (6, 13), (6, 13)),
    feature(FsType::Ext4, "-O", "^orphan_file", (5, 15), (1, 47)),
    feature(FsType::Btrfs, "-O", "^block-group-tree", (6, 1), (6, 12)),
];

/// Adds to the arguments of mkfs those that the running kernel requires.
pub(super) fn mountable(fs: FsType, program: Program, words: Vec<String>) -> Vec<String> {
    let release = uname()
        .ok()
        .and_then(|name| version(name.release().to_str()?));
    // If the kernel's version cannot be read, a new kernel is assumed.
    let Some(kernel) = release else { return words };
    let known = || {
        let ended = program.run(Path::new("/"), &["-V"]).ok()?;
        version(&format!("{} {}", ended.stdout, ended.stderr))
    };
    for_kernel(fs, kernel, known, words)
}

fn for_kernel(
    fs: FsType,
    kernel: Version,
    program: impl FnOnce() -> Option<Version>,
    mut words: Vec<String>,
) -> Vec<String> {
    let missing = |feature: &&Feature| feature.fs == fs && kernel < feature.kernel;
    let missing: Vec<&Feature> = FEATURES.iter().filter(missing).collect();
    if missing.is_empty() {
        return words;
    }
    let Some(program) = program() else {
        return words;
    };
    for feature in missing
        .into_iter()
        .filter(|feature| program >= feature.program)
    {
        let name = feature.off.split('=').next().unwrap_or(feature.off);
        let name = name.trim_start_matches('^');
        // An administrator who names a feature decides about it.
        if words.iter().any(|word| word.contains(name)) {
            continue;
        }
        match words
            .iter()
            .rposition(|word| word.starts_with(feature.flag))
        {
            // mke2fs uses only its last -O.
            Some(at) if fs == FsType::Ext4 => {
                let glued = words[at].len() > feature.flag.len();
                let value = if glued { Some(at) } else { Some(at + 1) };
                if let Some(value) = value.and_then(|at| words.get_mut(at)) {
                    value.push(',');
                    value.push_str(feature.off);
                }
            }
            Some(_) | None => words.extend([feature.flag.to_string(), feature.off.to_string()]),
        }
    }
    words
}

/// The first "N.M" in a text: the release of a kernel, or what a program reports as its version.
pub fn version(text: &str) -> Option<Version> {
    text.split(|c: char| c.is_whitespace() || c == '-')
        .find_map(|word| {
            let mut numbers = word.trim_start_matches('v').split('.');
            let major = numbers.next()?.parse().ok()?;
            let minor = numbers.next()?;
            let digits = minor
                .find(|c: char| !c.is_ascii_digit())
                .unwrap_or(minor.len());
            Some((major, minor[..digits].parse().ok()?))
        })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fuzz::fuzz_text;
    use crate::host::linux::program::{MKFS_BTRFS, MKFS_EXT4, MKFS_XFS};

    fn words(fs: FsType, kernel: Version, program: Version, given: &str) -> String {
        let given = given.split_whitespace().map(str::to_string).collect();
        for_kernel(fs, kernel, || Some(program), given).join(" ")
    }

    #[test]
    fn fuzz_versions() {
        let seeds = [
            "6.12.1+deb13-cloud-amd64\n",
            "mke2fs 1.47.2 (1-Jan-2025)\n\tUsing EXT2FS Library version 1.47.2\n",
            "mkfs.xfs version 6.13.0\n",
            "mkfs.btrfs, part of btrfs-progs v6.14\n",
        ];
        fuzz_text("versions", &seeds, version);
    }

    #[test]
    fn an_old_kernel_gets_a_file_system_that_it_can_mount() {
        let cases = [
            (
                FsType::Xfs,
                (5, 12),
                (6, 13),
                "-f",
                "-f -i nrext64=0 -i exchange=0 -n parent=0 -m metadir=0",
            ),
            (FsType::Xfs, (5, 15), (6, 1), "-f", "-f -i nrext64=0"),
            (
                FsType::Xfs,
                (6, 1),
                (6, 13),
                "-f",
                "-f -i exchange=0 -n parent=0 -m metadir=0",
            ),
            (FsType::Xfs, (6, 13), (6, 13), "-f", "-f"),
            // An older program neither accepts the values nor enables the features.
            (FsType::Xfs, (5, 12), (5, 10), "-f", "-f"),
            (
                FsType::Xfs,
                (5, 15),
                (6, 5),
                "-i nrext64=1,size=1024",
                "-i nrext64=1,size=1024",
            ),
            (
                FsType::Xfs,
                (5, 15),
                (6, 5),
                "-i size=1024",
                "-i size=1024 -i nrext64=0",
            ),
            (FsType::Ext4, (5, 12), (1, 47), "-F", "-F -O ^orphan_file"),
            (FsType::Ext4, (5, 12), (1, 46), "-F", "-F"),
            (FsType::Ext4, (5, 15), (1, 47), "-F", "-F"),
            (
                FsType::Ext4,
                (5, 12),
                (1, 47),
                "-O a -O 64bit -j",
                "-O a -O 64bit,^orphan_file -j",
            ),
            (
                FsType::Ext4,
                (5, 12),
                (1, 47),
                "-O64bit",
                "-O64bit,^orphan_file",
            ),
            (
                FsType::Btrfs,
                (5, 15),
                (6, 19),
                "-f",
                "-f -O ^block-group-tree",
            ),
            (FsType::Btrfs, (6, 1), (6, 19), "-f", "-f"),
        ];
        for (fs, kernel, program, given, wanted) in cases {
            assert_eq!(
                words(fs, kernel, program, given),
                wanted,
                "{fs} {kernel:?} {program:?}"
            );
        }
    }

    #[test]
    fn releases_are_parsed_as_programs_print_them() {
        for (text, wanted) in [
            ("5.15.0-91-generic", Some((5, 15))),
            ("6.18.44-fc", Some((6, 18))),
            ("6.12+deb13-amd64", Some((6, 12))),
            ("mkfs.xfs version 6.1.0", Some((6, 1))),
            ("mke2fs 1.47.0 (5-Feb-2023)", Some((1, 47))),
            ("mkfs.btrfs, part of btrfs-progs v6.2", Some((6, 2))),
            ("next", None),
        ] {
            assert_eq!(version(text), wanted, "{text}");
        }
    }

    /// Otherwise no volume could be created on an old kernel.
    #[test]
    fn the_installed_programs_print_their_release_and_know_the_options() {
        let folder = tempfile::TempDir::with_prefix("slackwater-").unwrap();
        for (fs, program) in [
            (FsType::Ext4, MKFS_EXT4),
            (FsType::Xfs, MKFS_XFS),
            (FsType::Btrfs, MKFS_BTRFS),
        ] {
            let ended = program.run(Path::new("/"), &["-V"]).unwrap();
            let known = version(&format!("{} {}", ended.stdout, ended.stderr));
            assert!(known.is_some(), "{fs}");
            let image = folder.path().join(fs.name());
            let file = std::fs::File::create(&image).unwrap();
            file.set_len(320 << 20).unwrap();
            let force = if fs == FsType::Ext4 { "-F" } else { "-f" };
            let mut words = for_kernel(fs, (5, 12), || known, vec![force.into()]);
            let knows = |feature: &Feature| feature.fs == fs && known >= Some(feature.program);
            assert_eq!(
                words.len() > 1,
                FEATURES.iter().any(knows),
                "{fs}: {words:?}"
            );
            words.push(image.to_string_lossy().into_owned());
            let ended = program.run(&image, &words).unwrap();
            assert!(ended.status.success(), "{fs}: {}", ended.stderr);
        }
    }
}
