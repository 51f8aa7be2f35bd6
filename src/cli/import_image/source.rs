//! What is imported, and what is on it.

use std::fmt;
use std::io::{self, Read};
use std::path::Path;
use std::time::{SystemTime, UNIX_EPOCH};

use uuid::Uuid;

use super::{Arguments, Failure, Result};
use crate::config::BadConfig;
use crate::error::{Error, ErrorContext};
use crate::host::linux::ImportSource;
use crate::host::piece::add;
use crate::host::{Piece, Signature};
use crate::model::FsType;
use crate::operation::{Content, ContentInfo, content_identity};

/// The block size for content of stdin.
const STDIN_BLOCK: u32 = 512;
/// What files of other formats than raw begin with, and what makes them raw.
const PACKED: [(&[u8], &str); 7] = [
    (
        b"QFI\xfb",
        "a qcow2 image; convert it with `qemu-img convert -O raw`",
    ),
    (
        b"KDMV",
        "a VMDK image; convert it with `qemu-img convert -O raw`",
    ),
    (
        b"vhdxfile",
        "a VHDX image; convert it with `qemu-img convert -O raw`",
    ),
    (
        b"\x1f\x8b",
        "compressed with gzip; pipe it through `gzip -dc` and give `--from -`",
    ),
    (
        b"\xfd7zXZ\0",
        "compressed with xz; pipe it through `xz -dc` and give `--from -`",
    ),
    (
        b"\x28\xb5\x2f\xfd",
        "compressed with zstd; pipe it through `zstd -dc` and give `--from -`",
    ),
    (
        b"SLACKWATER\r\n",
        "an archive; import it with `slackwater import`",
    ),
];

/// What is on the source, as far as the driver can use it.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Found {
    Fs(FsType),
    /// A raw device, and what blkid calls its content.
    Raw(String),
}

impl fmt::Display for Found {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Found::Fs(fs) => write!(f, "{fs}"),
            Found::Raw(what) => write!(f, "a raw device ({what})"),
        }
    }
}

/// What is imported.
pub(super) enum Source {
    Opened(ImportSource),
    Stdin { at: u64, ended: bool, bytes: u64 },
}

impl Source {
    pub(super) fn open(arguments: &Arguments) -> Result<Source, Failure> {
        if arguments.from != Path::new("-") {
            let opened = ImportSource::open(&arguments.from);
            let opened = opened.context(|| "import".into())?;
            if let Some(fs) = arguments.fs_type {
                let problem = format!(
                    "--fs-type {fs} is for directories and stdin; files and devices are examined"
                );
                return Err(BadConfig(problem).into());
            }
            return Ok(Source::Opened(opened));
        }
        let Some(bytes) = arguments.size else {
            let missing = "--size is missing; give the number of bytes on stdin";
            return Err(BadConfig(missing.into()).into());
        };
        Ok(Source::Stdin {
            at: 0,
            ended: false,
            bytes,
        })
    }

    pub(super) fn bytes(&self) -> u64 {
        match self {
            Source::Opened(source) => source.bytes(),
            Source::Stdin { bytes, .. } => *bytes,
        }
    }

    /// What the content is. An error if it is certainly not what a user wants to have on a device.
    pub(super) fn examine(&self, arguments: &Arguments) -> Result<Found> {
        let Source::Opened(source) = self else {
            let fs = arguments.fs_type;
            return Ok(fs.map_or_else(|| Found::Raw("not examined".into()), Found::Fs));
        };
        if arguments.raw {
            return Ok(Found::Raw("not examined".into()));
        }
        let head = source.head(16).context(|| "examine".into())?;
        let packed = PACKED.iter().find(|(magic, _)| head.starts_with(magic));
        let refused = |why: String| Err(Error::refused(arguments.from.display(), why));
        if let Some((_, what)) = packed {
            return refused(format!("it is {what}, or add --raw"));
        }
        let (name, fs_bytes, beside) = match source.signature().context(|| "examine".into())? {
            Signature::None => return Ok(Found::Raw("without a known signature".into())),
            Signature::Other(what) => return Ok(Found::Raw(what)),
            Signature::Fs {
                name, size, beside, ..
            } => (name, size, beside),
        };
        match (name.parse::<FsType>(), fs_bytes) {
            (Ok(fs), Some(needed)) if needed > source.bytes() => refused(format!(
                "its {fs} has {needed} bytes, but only {} are there: it is truncated",
                source.bytes()
            )),
            (Ok(fs), _) if beside.is_none() => Ok(Found::Fs(fs)),
            (Ok(_), _) => Ok(Found::Raw(format!("{name} beside another signature"))),
            (Err(_), _) => Ok(Found::Raw(name)),
        }
    }

    pub(super) fn facts(&self, arguments: &Arguments) -> Result<ContentInfo> {
        let (state, block_size) = match self {
            Source::Opened(source) => {
                let block_size = source.block_size().context(|| "examine".into())?;
                (source.state(), block_size)
            }
            Source::Stdin { .. } => (None, STDIN_BLOCK),
        };
        let unknown = || Uuid::new_v4().as_u64_pair().0;
        let identity = state.map_or_else(unknown, |state| content_identity(&state));
        let now = SystemTime::now().duration_since(UNIX_EPOCH);
        Ok(ContentInfo {
            source: arguments.from.display().to_string(),
            bytes: self.bytes(),
            block_size,
            identity,
            read_at: now.unwrap_or_default().as_nanos() as u64,
        })
    }
}

impl Content for Source {
    fn read(&mut self, offset: u64, length: u64) -> Result<Vec<Piece>> {
        match self {
            Source::Opened(source) => {
                // Who wants to write to a file waits for the end of this process.
                source.check_unchanged().context(|| "import".into())?;
                let pieces = source.read(offset, length);
                pieces.context(|| "read the content".into())
            }
            Source::Stdin { at, ended, .. } => {
                let mut pieces = Vec::new();
                if !*ended {
                    let mut bytes = Vec::new();
                    let read = io::stdin().lock().take(length).read_to_end(&mut bytes);
                    read.map_err(|error| Error::unreachable("stdin", error.to_string()))?;
                    *ended = (bytes.len() as u64) < length;
                    *at += bytes.len() as u64;
                    add(&mut pieces, offset, &bytes);
                }
                Ok(pieces)
            }
        }
    }

    fn check(&mut self) -> Result<()> {
        match self {
            Source::Opened(source) => source.check_unchanged().context(|| "import".into()),
            Source::Stdin { at, bytes, .. } => {
                let more = io::stdin().lock().take(1).read_to_end(&mut Vec::new());
                let more = more.map_err(|error| Error::unreachable("stdin", error.to_string()))?;
                if *at + more as u64 > *bytes {
                    let why = format!("it has more than the {bytes} bytes of --size");
                    return Err(Error::refused("stdin", why));
                }
                Ok(())
            }
        }
    }

    fn is_read_twice(&self) -> bool {
        match self {
            Source::Opened(source) => !source.can_detect_changes(),
            Source::Stdin { .. } => false,
        }
    }
}
