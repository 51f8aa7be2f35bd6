//! Parses /proc/self/mountinfo (proc(5)), in which spaces, tabs, newlines and backslashes are octal
//! escapes.

use std::ffi::OsString;
use std::os::unix::ffi::OsStringExt;
use std::path::{Path, PathBuf};

/// The inode of the root of each btrfs subvolume (BTRFS_FIRST_FREE_OBJECTID).
const SUBVOLUME_ROOT: u64 = 256;

/// One line of the mount table.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mount {
    /// ID of the mount.
    pub id: u32,
    /// ID of the parent mount.
    pub parent: u32,
    /// st_dev of its files (an anonymous number on btrfs).
    pub device: u64,
    /// The number (st_rdev) of the device that is the source of a btrfs. The table does not contain it:
    /// the host reads it from the node. A scan by another program can change the path in `source`.
    pub disk: Option<u64>,
    /// The part of the file system that is mounted: "/" for all of it; the name of a device node if
    /// one is bind-mounted.
    pub root: PathBuf,
    pub mount_point: PathBuf,
    /// Options of this mount only, such as ro and nosuid.
    pub options: Vec<String>,
    /// Type of the file system.
    pub fs_name: String,
    /// The source that was passed to mount(2), such as a device.
    pub source: PathBuf,
    /// Options of the file system.
    pub super_options: String,
    /// The number (st_rdev) of the device node that is bind-mounted here, if it is a node of the
    /// file system at /dev. The table does not contain it: the host reads it from the node.
    pub node: Option<u64>,
}

/// The mount through which a directory is reached.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FolderMount {
    pub mount: Mount,
    /// The directory is the mount point, and the mount shows the root of its file system or of a
    /// btrfs subvolume, so it is not just a directory on a disk with other data.
    pub shows_root: bool,
}

impl FolderMount {
    /// Creates it from a mount, whether the directory is its mount point, and the directory's
    /// inode.
    pub fn new(mount: Mount, is_mount_point: bool, inode: u64) -> FolderMount {
        let is_root = mount.root == Path::new("/");
        let is_subvolume = mount.fs_name == "btrfs" && inode == SUBVOLUME_ROOT;
        FolderMount {
            shows_root: is_mount_point && (is_root || is_subvolume),
            mount,
        }
    }
}

impl Mount {
    /// The number of the loop device that is the mount's source, by its name: the table does not
    /// contain the device number of a btrfs.
    pub fn source_loop(&self) -> Option<u32> {
        let number = self.source.to_str()?.strip_prefix("/dev/loop")?;
        number.parse().ok()
    }

    /// What it shows, in the format of findmnt: `/dev/sdb1`, or `/dev/sda2[/srv/pool]` if that is
    /// not the whole file system.
    pub fn shown(&self) -> String {
        let source = self.source.display();
        match self.root == Path::new("/") {
            true => source.to_string(),
            false => format!("{source}[{}]", self.root.display()),
        }
    }

    /// The number of the device whose file system or node it shows.
    pub fn shown_device(&self) -> u64 {
        self.node.or(self.disk).unwrap_or(self.device)
    }

    /// Whether this mount is read-only.
    pub fn is_read_only(&self) -> bool {
        self.options.iter().any(|option| option == "ro")
    }
}

/// Why a line cannot be parsed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("cannot parse line {0:?} of the mount table")]
pub struct NotAMount(pub String);

/// Parses the whole table.
pub fn parse(text: &[u8]) -> Result<Vec<Mount>, NotAMount> {
    text.split(|c| *c == b'\n')
        .filter(|line| !line.is_empty())
        .map(parse_line)
        .collect()
}

fn parse_line(line: &[u8]) -> Result<Mount, NotAMount> {
    fields(line).ok_or_else(|| NotAMount(String::from_utf8_lossy(line).into_owned()))
}

/// `36 35 98:0 /mnt1 /mnt2 rw,noatime master:1 - ext3 /dev/root rw,errors=continue`
fn fields(line: &[u8]) -> Option<Mount> {
    let mut words = line.split(|c| *c == b' ');
    let mut text = || {
        words
            .next()
            .map(|word| String::from_utf8_lossy(word).into_owned())
    };
    let id = text()?.parse().ok()?;
    let parent = text()?.parse().ok()?;
    let numbers = text()?;
    let (major, minor) = numbers.split_once(':')?;
    let device = nix::sys::stat::makedev(major.parse().ok()?, minor.parse().ok()?);
    let root = path(words.next()?);
    let mount_point = path(words.next()?);
    let options = String::from_utf8_lossy(words.next()?)
        .split(',')
        .map(str::to_string)
        .collect();
    words.by_ref().find(|word| *word == b"-")?;
    let fs_name = String::from_utf8_lossy(words.next()?).into_owned();
    let source = path(words.next()?);
    let super_options = String::from_utf8_lossy(words.next().unwrap_or_default()).into_owned();
    Some(Mount {
        id,
        parent,
        device,
        disk: None,
        root,
        mount_point,
        options,
        fs_name,
        source,
        super_options,
        node: None,
    })
}

fn path(word: &[u8]) -> PathBuf {
    PathBuf::from(OsString::from_vec(unescape(word)))
}

/// `\040` is a space; a backslash that is not followed by three octal digits stands for itself.
fn unescape(word: &[u8]) -> Vec<u8> {
    let mut plain = Vec::with_capacity(word.len());
    let mut rest = word;
    while let Some((&first, tail)) = rest.split_first() {
        let octal = tail
            .get(..3)
            .filter(|digits| first == b'\\' && digits.iter().all(|d| (b'0'..=b'7').contains(d)));
        match octal.map(|d| {
            u32::from(d[0] - b'0') * 64 + u32::from(d[1] - b'0') * 8 + u32::from(d[2] - b'0')
        }) {
            Some(code @ 0..=255) => {
                plain.push(code as u8);
                rest = &tail[3..];
            }
            Some(_) | None => {
                plain.push(first);
                rest = tail;
            }
        }
    }
    plain
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::os::unix::ffi::OsStrExt;

    #[test]
    fn a_line_of_the_manual_is_read() {
        let line = b"36 35 98:0 /mnt1 /mnt2 rw,noatime master:1 shared:3 - ext3 /dev/root rw,errors=continue\n";
        let mounts = parse(line).unwrap();
        assert_eq!(mounts[0].mount_point, PathBuf::from("/mnt2"));
        assert_eq!(
            (mounts[0].fs_name.as_str(), mounts[0].is_read_only()),
            ("ext3", false)
        );
    }

    #[test]
    fn fuzz_the_mount_table() {
        let seeds = [
            b"36 35 98:0 /mnt1 /mnt2 rw,noatime master:1 shared:3 - ext3 /dev/root rw,errors=continue\n"
                .to_vec(),
            b"36 35 7:3 / /var/lib/kubelet/a\\040b rw - xfs /dev/loop3 rw\n25 1 0:5 /loop7 /srv/dev rw - devtmpfs udev rw\n"
                .to_vec(),
            b"36 35 0:40 /@pool /srv/pool\\134 rw - btrfs /dev/loop12 rw,subvol=/@pool\n".to_vec(),
        ];
        let target = |bytes: &[u8]| {
            for mount in parse(bytes).into_iter().flatten() {
                let _ = (mount.shown(), mount.source_loop(), mount.is_read_only());
            }
        };
        crate::fuzz::fuzz("mountinfo", &seeds, target, |bytes| {
            let mounts = parse(bytes).unwrap_or_default();
            let unescaped = |mount: &Mount| {
                let path = mount.mount_point.as_os_str().as_bytes();
                path.iter()
                    .any(|byte| *byte == b'`' || (1..8).contains(byte))
            };
            assert!(!mounts.iter().any(unescaped));
        });
    }

    #[test]
    fn this_machines_own_table_is_read() {
        let text = std::fs::read("/proc/self/mountinfo").unwrap();
        assert!(
            parse(&text)
                .unwrap()
                .iter()
                .any(|mount| mount.mount_point == Path::new("/"))
        );
    }

    #[test]
    fn a_folder_is_a_file_system_of_its_own_only_where_the_root_of_one_is_mounted() {
        let shows_root = |line: &str, is_mount_point: bool, inode: u64| {
            let mount = parse(line.as_bytes()).unwrap().remove(0);
            FolderMount::new(mount, is_mount_point, inode).shows_root
        };
        let disk = "36 35 8:17 / /srv/pool rw - xfs /dev/sdb1 rw";
        assert!(shows_root(disk, true, 128));
        assert!(!shows_root(disk, false, 131), "a folder on a disk");
        // A directory of the node's disk that is bind-mounted into a container.
        let bind = "36 35 8:2 /srv/pool /srv/pool rw - ext4 /dev/sda2 rw";
        assert!(!shows_root(bind, true, 256));
        let subvolume = "36 35 0:40 /@pool /srv/pool rw - btrfs /dev/sdb1 rw,subvol=/@pool";
        assert!(shows_root(subvolume, true, 256));
        assert!(
            !shows_root(subvolume, true, 257),
            "a folder of btrfs, bound"
        );
    }

    #[test]
    fn the_source_of_a_mount_is_formatted_like_findmnt() {
        let shown = |line: &str| parse(line.as_bytes()).unwrap()[0].shown();
        assert_eq!(
            shown("36 35 8:17 / /srv/pool rw - xfs /dev/sdb1 rw"),
            "/dev/sdb1"
        );
        let bind = "36 35 8:2 /srv/pool /srv/pool rw - ext4 /dev/sda2 rw";
        assert_eq!(shown(bind), "/dev/sda2[/srv/pool]");
    }

    #[test]
    fn a_truncated_line_is_an_error_and_not_an_empty_table() {
        assert!(parse(b"36 35 98:0 /mnt1").is_err());
    }

    proptest! {
        #[test]
        fn any_mount_point_survives_the_kernels_escape(name in prop::collection::vec(1u8..=255, 1..40)) {
            let escaped: Vec<u8> = name.iter().flat_map(|c| match c {
                b' ' | b'\t' | b'\n' | b'\\' | b'#' => format!("\\{c:03o}").into_bytes(),
                c => vec![*c],
            }).collect();
            let mut line = b"1 2 7:3 / /".to_vec();
            line.extend(escaped);
            line.extend(b" ro - xfs /dev/loop3 rw");
            let mounts = parse(&line).unwrap();
            let mut expected = b"/".to_vec();
            expected.extend(&name);
            prop_assert_eq!(mounts[0].mount_point.as_os_str().as_bytes(), &expected[..]);
            prop_assert!(mounts[0].is_read_only());
        }

        #[test]
        fn any_bytes_are_parsed_without_a_panic(text in prop::collection::vec(any::<u8>(), 0..200)) {
            let _ = parse(&text);
        }
    }
}
