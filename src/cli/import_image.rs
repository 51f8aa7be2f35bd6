//! `slackwater volumes import`: the content of a file, a block device or stdin as a new volume.
//!
//! This process reads the content and sends it as an archive, so that the driver handles it as it
//! handles an exported snapshot: checksums, progress that survives a crash, nothing half imported.

use std::fmt;
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use ring::digest;
use serde_json::json;
use tokio::sync::mpsc::{self, Sender};
use tokio_stream::wrappers::ReceiverStream;
use uuid::Uuid;

use super::export::{MESSAGE_BYTES, size, socket};
use super::{Failure, block_on, print};
use crate::agent::ImportRequest;
use crate::agent::import_request::Options;
use crate::agent::import_response::Volume;
use crate::config::{BadConfig, Endpoint};
use crate::error::{self, Error, ErrorContext};
use crate::host::linux::ImportSource;
use crate::host::piece::{ZERO_BLOCK, add};
use crate::host::{Piece, Signature};
use crate::model::FsType;
use crate::model::size::Human;
use crate::operation::{Content, ContentFacts, archive_content};
use crate::server::admin;

mod objects;

type Result<T, E = error::Error> = std::result::Result<T, E>;

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
const PROGRESS_INTERVAL: Duration = Duration::from_secs(10);

/// The arguments of the command.
#[derive(Debug, clap::Args)]
pub(super) struct Arguments {
    /// An image file or a block device that is not in use; - reads stdin
    #[arg(long, value_name = "PATH")]
    from: PathBuf,
    /// Name of the volume
    #[arg(long, value_name = "NAME")]
    name: String,
    /// Pool in which the volume is created
    #[arg(long, value_name = "POOL")]
    to_pool: String,
    /// Size of the volume, such as 10Gi [default: that of the content; needed for stdin]
    #[arg(long, value_name = "SIZE", value_parser = size)]
    size: Option<u64>,
    /// File system of stdin, which cannot be examined before it is read
    #[arg(long, value_name = "FS", value_parser = fs_type)]
    fs_type: Option<FsType>,
    /// Import the content as a raw device, whatever it is
    #[arg(long, conflicts_with = "fs_type")]
    raw: bool,
    /// Import it; without --yes, only show what would be imported
    #[arg(long)]
    yes: bool,
    /// Also print a PersistentVolume and this claim as JSON, for `kubectl apply -f -`
    #[arg(long, value_name = "NAMESPACE/NAME", requires = "persistent_volume")]
    claim: Option<objects::Claim>,
    /// Name of the PersistentVolume
    #[arg(long, value_name = "NAME", requires = "claim")]
    persistent_volume: Option<String>,
    /// StorageClass of both
    #[arg(
        long,
        value_name = "NAME",
        requires = "claim",
        default_value = "slackwater"
    )]
    storage_class: String,
    /// The CSI socket of the node's driver [env: CSI_ENDPOINT]
    #[arg(long, value_name = "ENDPOINT")]
    endpoint: Option<Endpoint>,
    /// Print JSON
    #[arg(long, conflicts_with = "claim")]
    json: bool,
}

fn fs_type(text: &str) -> Result<FsType, String> {
    let names = FsType::ALL.map(FsType::name).join(", ");
    text.parse().map_err(|()| format!("give one of {names}"))
}

/// What is on the source, as far as the driver can use it.
#[derive(Clone, Debug, PartialEq)]
enum Found {
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

/// Imports the content, or shows what would be imported.
pub(super) fn run(arguments: Arguments) -> Result<ExitCode, Failure> {
    let socket = socket(arguments.endpoint.clone())?;
    let source = Source::open(&arguments)?;
    let found = source.examine(&arguments)?;
    let bytes = source.bytes();
    let size = arguments.size.unwrap_or(bytes);
    if size < bytes {
        let problem = format!("--size {size}: the content has {bytes} bytes; give at least that");
        return Err(BadConfig(problem).into());
    }
    // Volumes have whole blocks.
    let size = size.next_multiple_of(ZERO_BLOCK);
    let about = format!("{}: {}, {found}", arguments.from.display(), Human(bytes));
    if !arguments.yes {
        let (name, pool) = (&arguments.name, &arguments.to_pool);
        eprintln!("{about}");
        eprintln!(
            "would become volume {name} of {} in pool {pool}; add --yes to import it",
            Human(size)
        );
        return Ok(ExitCode::SUCCESS);
    }
    eprintln!("{about}");
    let facts = source.facts(&arguments)?;
    let options = Options {
        name: arguments.name.clone(),
        pool: arguments.to_pool.clone(),
        size_bytes: size,
        ..Options::default()
    };
    let made = import(&socket, source, facts, options)?;
    let id = made.volume_id;
    match (&arguments.claim, &arguments.persistent_volume) {
        (Some(claim), Some(name)) => {
            let node = block_on(objects::Node::of(&socket))?;
            let fs = match found {
                Found::Fs(fs) => Some(fs),
                Found::Raw(_) => None,
            };
            let class = &arguments.storage_class;
            print::json(&node.objects(claim, (name, class), (&id, made.size_bytes, fs)));
            eprintln!("imported as volume {id}");
        }
        _ if arguments.json => print::json(&json!({ "id": id, "content": found.to_string() })),
        _ => print::line(id),
    }
    Ok(ExitCode::SUCCESS)
}

/// Sends the content. Returns the volume.
fn import(
    socket: &Path,
    mut source: Source,
    facts: ContentFacts,
    options: Options,
) -> Result<Volume, Failure> {
    let (to, messages) = mpsc::channel(4);
    let (report, reported) = std::sync::mpsc::channel();
    // Its end is that of the process: a read of stdin cannot be interrupted.
    std::thread::spawn(move || {
        let mut output = Messages::new(to, options);
        let sent = archive_content(&mut source, facts, &mut output);
        // Reported before the end of the messages, which the driver takes for a truncated archive. If the
        // driver has ended them, its error is the cause.
        if let Err(error) = sent
            && !output.to.is_closed()
        {
            drop(report.send(error));
        }
    });
    let made = block_on(admin::import(socket, ReceiverStream::new(messages)));
    let made = made.map_err(|refused| reported.try_recv().map_or(refused, Failure::from))?;
    let first = made.volumes.into_iter().next();
    Ok(first.ok_or_else(|| Error::bug("an import has created no volume"))?)
}

/// What is imported.
enum Source {
    Opened(ImportSource),
    Stdin { at: u64, ended: bool, bytes: u64 },
}

impl Source {
    fn open(arguments: &Arguments) -> Result<Source, Failure> {
        if arguments.from != Path::new("-") {
            let opened = ImportSource::open(&arguments.from);
            let opened = opened.context(|| "import".into())?;
            if let Some(fs) = arguments.fs_type {
                let problem = format!("--fs-type {fs} is for stdin; a path is examined");
                return Err(BadConfig(problem).into());
            }
            return Ok(Source::Opened(opened));
        }
        let Some(bytes) = arguments.size else {
            let missing = "--size is missing; give the length of what stdin has";
            return Err(BadConfig(missing.into()).into());
        };
        Ok(Source::Stdin {
            at: 0,
            ended: false,
            bytes,
        })
    }

    fn bytes(&self) -> u64 {
        match self {
            Source::Opened(source) => source.bytes(),
            Source::Stdin { bytes, .. } => *bytes,
        }
    }

    /// What the content is. An error if it is certainly not what a user wants to have on a device.
    fn examine(&self, arguments: &Arguments) -> Result<Found> {
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

    fn facts(&self, arguments: &Arguments) -> Result<ContentFacts> {
        let (state, block_size) = match self {
            Source::Opened(source) => {
                let block_size = source.block_size().context(|| "examine".into())?;
                (source.state(), block_size)
            }
            Source::Stdin { .. } => (None, STDIN_BLOCK),
        };
        let unknown = || Uuid::new_v4().as_u64_pair().0;
        let identity = state.map_or_else(unknown, |state| {
            let mut first = [0; 8];
            let whole = digest::digest(&digest::SHA256, state.as_bytes());
            first.copy_from_slice(&whole.as_ref()[..8]);
            u64::from_le_bytes(first)
        });
        let now = SystemTime::now().duration_since(UNIX_EPOCH);
        Ok(ContentFacts {
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
            Source::Opened(source) => !source.sees_changes(),
            Source::Stdin { .. } => false,
        }
    }
}

/// Sends what is written to it, at once: the driver may refuse what it has, and stdin may be slow.
struct Messages {
    to: Sender<ImportRequest>,
    sent: u64,
    shown: Instant,
}

impl Messages {
    fn new(to: Sender<ImportRequest>, options: Options) -> Messages {
        // An error of this one is that of the next.
        drop(to.blocking_send(ImportRequest {
            options: Some(options),
            data: Vec::new(),
        }));
        Messages {
            to,
            sent: 0,
            shown: Instant::now(),
        }
    }
}

impl Write for Messages {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let length = bytes.len().min(MESSAGE_BYTES);
        let message = ImportRequest {
            options: None,
            data: bytes[..length].to_vec(),
        };
        let sent = self.to.blocking_send(message);
        sent.map_err(|_| io::Error::from(io::ErrorKind::BrokenPipe))?;
        self.sent += length as u64;
        if self.shown.elapsed() >= PROGRESS_INTERVAL {
            self.shown = Instant::now();
            eprintln!("{} sent", Human(self.sent));
        }
        Ok(length)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
