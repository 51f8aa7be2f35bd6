//! mkfs, and detection of what is on a device.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::time::Duration;

use uuid::Uuid;

use super::files::failed;
use super::program::{BLKID, Ended, MKFS_BTRFS, MKFS_EXT4, MKFS_XFS};
use super::{features, loop_device, mounts, superblock, sys};
use crate::error::HostError;
use crate::host::{Device, Result, Signature};
use crate::model::FsType;

/// blkid finds most signatures in the first MiB and some (RAID, ZFS, the backup GPT) at the end.
const HEAD_BYTES: u64 = 1 << 20;
const TAIL: u64 = 64 << 10;

/// blkid's exit status when it finds nothing, and when it finds several conflicting signatures.
const NOTHING_FOUND: i32 = 2;
const AMBIVALENT: i32 = 8;

/// Creates a file system durably, because the record that marks the volume complete is written
/// afterwards.
pub(super) fn format(
    device: &Device,
    fs: FsType,
    uuid: Uuid,
    options: &[String],
    keep_blocks: bool,
) -> Result<()> {
    let path = &device.path;
    let open = loop_device::open_verified(device)?;
    let program = match fs {
        FsType::Ext4 => MKFS_EXT4,
        FsType::Xfs => MKFS_XFS,
        FsType::Btrfs => MKFS_BTRFS,
    };
    let words = words(fs, uuid, options, keep_blocks);
    let mut words = features::mountable(fs, program, words);
    words.push(path.to_string_lossy().into_owned());
    let bytes = sys::block_bytes(&open)
        .map_err(|errno| HostError::errno("read the size of", path, errno))?;
    let run = || program.run_within(limit(bytes), path, &words);
    // mkfs.btrfs looks up the image of every mounted loop device, and fails at the first that it
    // cannot look up: because its disk is dead, or because it was detached after mkfs.btrfs had read
    // the table of mounts.
    let ended = match fs {
        FsType::Btrfs if mounts::has_dead_loop_mount()? => mounts::without_loops(run)?,
        FsType::Btrfs => match run()? {
            ended if ended.status.success() => ended,
            _ => mounts::without_loops(run)?,
        },
        FsType::Ext4 | FsType::Xfs => run()?,
    };
    if !ended.status.success() {
        return Err(ended.error("format", path));
    }
    open.sync_all().map_err(failed("fsync", path))?;
    sys::block_flush(&open).map_err(|errno| HostError::errno("flush", path, errno))
}

/// Time limit of mkfs by the size of its device: ten minutes, plus the time that a slow disk (20
/// MiB/s) needs if all of it is written. Only a disk that hangs takes longer.
fn limit(bytes: u64) -> Duration {
    Duration::from_secs(600 + bytes / (20 << 20))
}

/// All arguments except the device.
fn words(fs: FsType, uuid: Uuid, options: &[String], keep_blocks: bool) -> Vec<String> {
    let mut words: Vec<String> = match fs {
        FsType::Ext4 => vec!["-F".into(), "-q".into(), "-U".into(), uuid.to_string()],
        FsType::Xfs => vec![
            "-f".into(),
            "-q".into(),
            "-m".into(),
            format!("uuid={uuid}"),
        ],
        FsType::Btrfs => vec!["-f".into(), "-q".into(), "-U".into(), uuid.to_string()],
    };
    match fs {
        FsType::Ext4 => words.extend(ext4_words(options, keep_blocks)),
        FsType::Xfs | FsType::Btrfs => {
            words.extend(options.iter().cloned());
            words.extend(keep_blocks.then(|| "-K".to_string()));
        }
    }
    words
}

/// mke2fs uses only its last `-E`, so all of them are merged into one.
fn ext4_words(options: &[String], keep_blocks: bool) -> Vec<String> {
    let mut plain = Vec::new();
    let mut extended: Vec<String> = Vec::new();
    let mut rest = options.iter();
    while let Some(word) = rest.next() {
        match word.strip_prefix("-E") {
            Some("") => extended.extend(rest.next().cloned()),
            Some(glued) => extended.push(glued.to_string()),
            None => plain.push(word.clone()),
        }
    }
    // Users of a volume are not root, and must get all of the requested size.
    if !plain.iter().any(|word| word.starts_with("-m")) {
        plain.extend(["-m".to_string(), "0".to_string()]);
    }
    extended.extend(keep_blocks.then(|| "nodiscard".to_string()));
    if !extended.is_empty() {
        plain.extend(["-E".to_string(), extended.join(",")]);
    }
    plain
}

/// Detects what is on a device. blkid also reports "nothing" if it could not read, so the device is
/// read here first, and a failure of that is an error.
pub(super) fn signature(device: &Device) -> Result<Signature> {
    let path = &device.path;
    let head = read_ends(device)?;
    let arguments = ["-p", "-o", "export", &path.to_string_lossy()];
    found(&BLKID.run(path, &arguments)?, path, &head)
}

/// Detects what is in a file, as if it were a device. The path is only for errors.
pub(super) fn signature_of_file(file: &File, path: &Path) -> Result<Signature> {
    let size = file.metadata().map_err(failed("stat", path))?.len();
    let head = read_ends_of(file, size, path)?;
    // The file that is open, whatever has the path by now.
    let arguments = ["-p", "-o", "export", "/proc/self/fd/0"];
    let file = file.try_clone().map_err(failed("open", path))?;
    found(&BLKID.run_on(file, path, &arguments)?, path, &head)
}

fn found(ended: &Ended, path: &Path, head: &[u8]) -> Result<Signature> {
    match ended.status.code() {
        Some(0) => Ok(parse(&ended.stdout, head)),
        Some(NOTHING_FOUND) => Ok(Signature::None),
        Some(AMBIVALENT) => Ok(Signature::Other(
            "several contradictory signatures (blkid: ambivalent)".into(),
        )),
        _ => Err(ended.error("probe", path)),
    }
}

fn read_ends(device: &Device) -> Result<Vec<u8>> {
    let path: &Path = &device.path;
    let open = loop_device::open_verified(device)?;
    let size = sys::block_bytes(&open)
        .map_err(|errno| HostError::errno("read the size of", path, errno))?;
    read_ends_of(&open, size, path)
}

fn read_ends_of(open: &File, size: u64, path: &Path) -> Result<Vec<u8>> {
    let read = |from: u64, length: u64| {
        let mut bytes = vec![0; length as usize];
        open.read_exact_at(&mut bytes, from)
            .map(|()| bytes)
            .map_err(failed("read", path))
    };
    read(size - size.min(TAIL), size.min(TAIL))?;
    read(0, size.min(HEAD_BYTES))
}

/// Parses the `KEY=value` lines of `blkid -o export`.
fn parse(text: &str, head: &[u8]) -> Signature {
    let value = |key: &str| {
        text.lines()
            .find_map(|line| line.strip_prefix(key)?.strip_prefix('='))
            .map(str::to_string)
    };
    match (value("TYPE"), value("USAGE").as_deref()) {
        (Some(name), Some("filesystem")) => Signature::Fs {
            size: superblock::bytes(&name, head),
            uuid: value("UUID").unwrap_or_default(),
            name,
            beside: value("PTTYPE").map(|table| format!("partition table {table}")),
        },
        (Some(name), _) => Signature::Other(name),
        (None, _) => match value("PTTYPE") {
            Some(table) => Signature::Other(format!("partition table {table}")),
            None => Signature::Other("a signature that blkid cannot name".into()),
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn strings(words: &[&str]) -> Vec<String> {
        words.iter().map(|word| word.to_string()).collect()
    }

    #[test]
    fn extended_options_of_ext4_become_one() {
        let given = strings(&["-E", "lazy_itable_init=0", "-m", "0", "-Estride=4"]);
        assert_eq!(
            ext4_words(&given, true),
            strings(&["-m", "0", "-E", "lazy_itable_init=0,stride=4,nodiscard"])
        );
        for (given, wanted) in [
            (vec!["-m", "1"], vec!["-m", "1"]),
            (vec!["-m5"], vec!["-m5"]),
            (vec!["-j"], vec!["-j", "-m", "0"]),
        ] {
            assert_eq!(ext4_words(&strings(&given), false), strings(&wanted));
        }
    }

    #[test]
    fn fuzz_the_output_of_blkid() {
        let seeds = [
            "DEVNAME=/dev/x\nUUID=abc\nTYPE=xfs\nUSAGE=filesystem\n",
            "UUID=abc\nTYPE=LVM2_member\nUSAGE=raid\n",
            "PTUUID=1\nPTTYPE=gpt\n",
        ];
        let is_beside =
            |found: &Signature| matches!(found, Signature::Fs { beside, .. } if beside.is_some());
        crate::fuzz::fuzz_text("blkid", &seeds, |text| {
            Some(parse(text, &[])).filter(is_beside)
        });
    }

    #[test]
    fn a_file_system_is_distinguished_from_a_member_of_a_larger_unit() {
        let fs = parse(
            "DEVNAME=/dev/x\nUUID=abc\nTYPE=xfs\nUSAGE=filesystem\n",
            &[],
        );
        assert!(
            matches!(fs, Signature::Fs { name, uuid, size: None, beside: None } if name == "xfs" && uuid == "abc")
        );
        let lvm = parse("UUID=abc\nTYPE=LVM2_member\nUSAGE=raid\n", &[]);
        assert_eq!(lvm, Signature::Other("LVM2_member".into()));
        let table = parse("PTUUID=1\nPTTYPE=gpt\n", &[]);
        assert_eq!(table, Signature::Other("partition table gpt".into()));
    }
}
