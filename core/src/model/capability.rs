//! Volume capabilities: access type, file system, mount flags, access mode.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use super::mount_option;
use super::size::{KIB, MIB};

/// A file system that the driver can create.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum FsType {
    /// The default.
    Ext4,
    Xfs,
    Btrfs,
}

impl FsType {
    /// All file systems.
    pub const ALL: [FsType; 3] = [FsType::Ext4, FsType::Xfs, FsType::Btrfs];

    /// The kernel's name of the file system.
    pub fn name(self) -> &'static str {
        match self {
            FsType::Ext4 => "ext4",
            FsType::Xfs => "xfs",
            FsType::Btrfs => "btrfs",
        }
    }

    /// The smallest device that mkfs accepts with its defaults (e2fsprogs 1.47, xfsprogs 6.1,
    /// btrfs-progs 6.2; mkfs.xfs refuses below 300 MiB, mkfs.btrfs below about 109 MiB).
    pub fn minimum_bytes(self) -> u64 {
        match self {
            FsType::Ext4 => 256 * KIB,
            FsType::Xfs => 300 * MIB,
            FsType::Btrfs => 112 * MIB,
        }
    }
}

impl fmt::Display for FsType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for FsType {
    type Err = ();
    fn from_str(text: &str) -> Result<FsType, ()> {
        FsType::ALL
            .into_iter()
            .find(|fs| fs.name() == text)
            .ok_or(())
    }
}

/// Block or mount.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase", tag = "type")]
pub enum AccessType {
    /// A raw block device.
    Block,
    /// A mounted file system.
    Mount {
        /// The type; `None` if the request does not set it.
        #[serde(default)]
        fs_type: Option<FsType>,
        /// Mount options, in the given order. They may contain SELinux labels, never secrets.
        #[serde(default)]
        mount_flags: Vec<String>,
    },
}

impl AccessType {
    /// The file system to create or mount: ext4 by default.
    pub fn fs(&self) -> Option<FsType> {
        match self {
            AccessType::Block => None,
            AccessType::Mount { fs_type, .. } => Some(fs_type.unwrap_or(FsType::Ext4)),
        }
    }

    /// The name in CSI.
    pub fn as_str(&self) -> &'static str {
        match self {
            AccessType::Block => "block",
            AccessType::Mount { .. } => "mount",
        }
    }
}

/// Which pods of a node may write. Modes with several nodes are refused when a request is parsed,
/// except for readers of a copy: all of them are on its one node.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "SCREAMING_SNAKE_CASE")]
pub enum AccessMode {
    /// RWO of callers that do not know the next two modes: many pods on one node.
    SingleNodeWriter,
    /// Read-only on one node.
    SingleNodeReaderOnly,
    /// RWOP: one target path.
    SingleNodeSingleWriter,
    /// RWO: many target paths on one node.
    SingleNodeMultiWriter,
    /// ROX: for volumes that were created from a source and are never written.
    MultiNodeReaderOnly,
}

impl AccessMode {
    /// CSI's name of the mode.
    pub fn name(self) -> &'static str {
        match self {
            AccessMode::SingleNodeWriter => "SINGLE_NODE_WRITER",
            AccessMode::SingleNodeReaderOnly => "SINGLE_NODE_READER_ONLY",
            AccessMode::SingleNodeSingleWriter => "SINGLE_NODE_SINGLE_WRITER",
            AccessMode::SingleNodeMultiWriter => "SINGLE_NODE_MULTI_WRITER",
            AccessMode::MultiNodeReaderOnly => "MULTI_NODE_READER_ONLY",
        }
    }

    /// Whether a publish in this mode is read-only.
    pub fn is_read_only(self) -> bool {
        matches!(
            self,
            AccessMode::SingleNodeReaderOnly | AccessMode::MultiNodeReaderOnly
        )
    }
}

/// One capability of a request.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Capability {
    /// Block or mount.
    pub access_type: AccessType,
    /// Which pods may write.
    pub access_mode: AccessMode,
}

impl Capability {
    /// Texts of two different sets of capabilities, for a message: the texts differ even if only
    /// the mount flags do.
    pub fn describe_difference(found: &[Capability], wanted: &[Capability]) -> (String, String) {
        let say = |all: &[Capability]| {
            all.iter()
                .map(Capability::to_string)
                .collect::<Vec<_>>()
                .join(", ")
        };
        let (found_text, mut wanted_text) = (say(found), say(wanted));
        if found != wanted && found_text == wanted_text {
            wanted_text.push_str(" that differ");
        }
        (found_text, wanted_text)
    }

    /// Whether a volume that is published with it is read-only.
    pub fn is_read_only(&self) -> bool {
        let by_flag = match &self.access_type {
            AccessType::Block => false,
            AccessType::Mount { mount_flags, .. } => mount_option::is_read_only(mount_flags),
        };
        by_flag || self.access_mode.is_read_only()
    }
}

impl fmt::Display for Capability {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.access_type {
            AccessType::Block => f.write_str("block")?,
            AccessType::Mount {
                fs_type,
                mount_flags,
            } => {
                f.write_str(fs_type.map_or("any file system", FsType::name))?;
                // The flags themselves are not printed: according to CSI they may be sensitive.
                if !mount_flags.is_empty() {
                    write!(f, " with {} mount flags", mount_flags.len())?;
                }
            }
        }
        write!(f, " {}", self.access_mode.name())
    }
}
