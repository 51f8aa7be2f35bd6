//! `slackwater volumes import`: the content of a file, a block device, a directory or stdin as a new
//! volume.
//!
//! The driver clones a file whose blocks the volume can share. Otherwise this process reads the content
//! and sends it as an archive, so that the driver handles it as it handles an exported snapshot:
//! checksums, progress that survives a crash, nothing half imported.

use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use serde_json::json;
use tokio::sync::mpsc::{self, Sender};
use tokio_stream::wrappers::ReceiverStream;

use super::export::{MESSAGE_BYTES, size, socket};
use super::{Failure, block_on, print};
use crate::agent::ImportRequest;
use crate::agent::import_request::Options;
use crate::agent::import_response::Volume;
use crate::config::{BadConfig, Endpoint};
use crate::error::{self, Error};
use crate::host::piece::ZERO_BLOCK;
use crate::model::FsType;
use crate::model::size::HumanBytes;
use crate::operation::{ContentInfo, archive_content};
use crate::server::admin;
use folder::Folder;
use sharing::Sharing;
use source::{Found, Source};

mod folder;
mod objects;
mod sharing;
mod source;

type Result<T, E = error::Error> = std::result::Result<T, E>;

const PROGRESS_INTERVAL: Duration = Duration::from_secs(10);

/// The arguments of the command.
#[derive(Debug, clap::Args)]
pub(super) struct Arguments {
    /// An image file, a block device or a directory that is not in use; - reads stdin
    #[arg(long, value_name = "PATH")]
    from: PathBuf,
    /// Name of the volume
    #[arg(long, value_name = "NAME")]
    name: String,
    /// Pool in which the volume is created
    #[arg(long, value_name = "POOL")]
    to_pool: String,
    /// Size of the volume, such as 10Gi [default: that of the content; needed for a directory and stdin]
    #[arg(long, value_name = "SIZE", value_parser = size)]
    size: Option<u64>,
    /// File system for the files of a directory, or of stdin, which cannot be examined before it is read
    #[arg(long, value_name = "FS", value_parser = fs_type)]
    fs_type: Option<FsType>,
    /// Directory with space for a copy of the files of a directory, which has no name there and ends
    /// with the command
    #[arg(long, value_name = "DIR")]
    scratch: Option<PathBuf>,
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

/// Imports the content, or shows what would be imported.
pub(super) fn run(arguments: Arguments) -> Result<ExitCode, Failure> {
    let socket = socket(arguments.endpoint.clone())?;
    let input = Input::open(&arguments)?;
    let found = input.examine(&arguments)?;
    let bytes = input.bytes();
    let size = arguments.size.unwrap_or(bytes);
    if size < bytes {
        let problem = format!("--size {size}: the content has {bytes} bytes; give at least that");
        return Err(BadConfig(problem).into());
    }
    // Volumes have whole blocks.
    let size = size.next_multiple_of(ZERO_BLOCK);
    eprintln!(
        "{}: {}, {found}",
        arguments.from.display(),
        HumanBytes(bytes)
    );
    let options = Options {
        name: arguments.name.clone(),
        pool: arguments.to_pool.clone(),
        size_bytes: size,
        ..Options::default()
    };
    let sharing = Sharing::ask(&socket, &input, &arguments, &options)?;
    if !arguments.yes {
        let (name, pool) = (&arguments.name, &arguments.to_pool);
        eprintln!(
            "would become volume {name} of {} in pool {pool}, {sharing}; add --yes to import it",
            HumanBytes(size)
        );
        return Ok(ExitCode::SUCCESS);
    }
    eprintln!("{sharing}");
    let word = sharing.as_str();
    let made = match sharing {
        Sharing::Cloned(made) => made,
        Sharing::Possible | Sharing::Copied(_) => {
            let source = input.into_source()?;
            let facts = source.facts(&arguments)?;
            import(&socket, source, facts, options)?
        }
    };
    show(&socket, &arguments, (&found, word), &made)?;
    Ok(ExitCode::SUCCESS)
}

/// Prints the volume, or the objects for it.
fn show(
    socket: &Path,
    arguments: &Arguments,
    (found, word): (&Found, &str),
    made: &Volume,
) -> Result<(), Failure> {
    let id = &made.volume_id;
    match (&arguments.claim, &arguments.persistent_volume) {
        (Some(claim), Some(name)) => {
            let node = block_on(objects::Node::of(socket))?;
            let fs = match found {
                Found::Fs(fs) => Some(*fs),
                Found::Raw(_) => None,
            };
            let class = &arguments.storage_class;
            print::json(&node.objects(claim, (name, class), (id, made.size_bytes, fs)));
            eprintln!("imported as volume {id}");
        }
        _ if arguments.json => {
            let content = found.to_string();
            print::json(&json!({ "id": id, "content": content, "method": word }));
        }
        _ => print::line(id),
    }
    Ok(())
}

/// What is imported.
enum Input {
    Content(Source),
    Folder(Folder),
}

impl Input {
    fn open(arguments: &Arguments) -> Result<Input, Failure> {
        if arguments.from.is_dir() {
            Folder::open(arguments).map(Input::Folder)
        } else {
            Source::open(arguments).map(Input::Content)
        }
    }

    fn bytes(&self) -> u64 {
        match self {
            Input::Content(source) => source.bytes(),
            Input::Folder(folder) => folder.bytes(),
        }
    }

    fn examine(&self, arguments: &Arguments) -> Result<Found> {
        match self {
            Input::Content(source) => source.examine(arguments),
            Input::Folder(folder) => Ok(folder.examine()),
        }
    }

    fn into_source(self) -> Result<Source, Failure> {
        match self {
            Input::Content(source) => Ok(source),
            Input::Folder(folder) => folder.into_source(),
        }
    }
}

/// Sends the content. Returns the volume.
fn import(
    socket: &Path,
    mut source: Source,
    facts: ContentInfo,
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
            eprintln!("{} sent", HumanBytes(self.sent));
        }
        Ok(length)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
