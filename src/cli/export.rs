//! `slackwater export` and `slackwater import`: snapshots as archives on stdout and stdin.

use std::io::{ErrorKind, IsTerminal, Read};
use std::path::PathBuf;
use std::process::ExitCode;

use serde_json::{Value, json};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;

use super::{Failure, block_on, print};
use crate::agent::import_request::Options;
use crate::agent::{ExportRequest, ImportRequest};
use crate::config::{BadConfig, Endpoint, Given};
use crate::model::size::{HumanBytes, parse_size};
use crate::server::admin;

/// Bytes of stdin in one message.
pub(super) const MESSAGE_BYTES: usize = 1 << 20;

/// The arguments of the export.
#[derive(Debug, clap::Args)]
pub(super) struct ExportArguments {
    /// ID of the snapshot; several only if all are members of one group
    #[arg(value_name = "SNAPSHOT", required = true)]
    snapshots: Vec<String>,
    /// ID of an earlier snapshot of the same volume: export only the differences to it (may be repeated, for the members of a group)
    #[arg(long, value_name = "SNAPSHOT")]
    base: Vec<String>,
    /// The CSI socket of the node's driver [env: CSI_ENDPOINT]
    #[arg(long, value_name = "ENDPOINT")]
    endpoint: Option<Endpoint>,
}

/// The arguments of the import.
#[derive(Debug, clap::Args)]
pub(super) struct ImportArguments {
    /// Name of the volume [default: that of the exported volume]
    #[arg(long, value_name = "NAME")]
    name: Option<String>,
    /// Text before the names of the exported volumes
    #[arg(long, value_name = "TEXT", conflicts_with = "name")]
    prefix: Option<String>,
    /// Pool in which the volumes are created [default: the name of their pool in the archive]
    #[arg(long, value_name = "POOL")]
    to_pool: Option<String>,
    /// Size of each volume, at least that of the exported one, such as 10Gi
    #[arg(long, value_name = "SIZE", value_parser = size)]
    size: Option<u64>,
    /// An archive of differences follows: the volumes stay incomplete, for an hour
    #[arg(long)]
    more: bool,
    /// The CSI socket of the node's driver [env: CSI_ENDPOINT]
    #[arg(long, value_name = "ENDPOINT")]
    endpoint: Option<Endpoint>,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

pub(super) fn size(text: &str) -> Result<u64, String> {
    let parsed = parse_size(text).map_err(|error| error.to_string())?;
    match parsed {
        0 => Err("give a size above 0".into()),
        bytes => Ok(bytes),
    }
}

pub(super) fn socket(endpoint: Option<Endpoint>) -> Result<PathBuf, Failure> {
    let given = Given {
        endpoint,
        ..Given::default()
    };
    let given = given.with_env(std::env::var("CSI_ENDPOINT").ok())?;
    let Some(Endpoint(socket)) = given.endpoint else {
        let missing = "--endpoint (or CSI_ENDPOINT) is missing; give the CSI socket of the node's driver, such as unix:///csi/csi.sock";
        return Err(BadConfig(missing.into()).into());
    };
    Ok(socket)
}

/// Writes the archive to stdout.
pub(super) fn export(arguments: ExportArguments) -> Result<ExitCode, Failure> {
    let socket = socket(arguments.endpoint)?;
    let mut stdout = std::io::stdout().lock();
    if stdout.is_terminal() {
        let right = "an archive is not written to a terminal; redirect stdout";
        return Err(BadConfig(right.into()).into());
    }
    let request = ExportRequest {
        snapshot_ids: arguments.snapshots,
        base_snapshot_ids: arguments.base,
    };
    block_on(admin::export(&socket, request, &mut stdout))?;
    Ok(ExitCode::SUCCESS)
}

/// Reads the archive from stdin, and prints the volumes.
pub(super) fn import(arguments: ImportArguments) -> Result<ExitCode, Failure> {
    let socket = socket(arguments.endpoint)?;
    let options = Options {
        name: arguments.name.unwrap_or_default(),
        prefix: arguments.prefix.unwrap_or_default(),
        pool: arguments.to_pool.unwrap_or_default(),
        size_bytes: arguments.size.unwrap_or_default(),
        more: arguments.more,
    };
    let (to, messages) = mpsc::channel(4);
    // Its end is that of the process: a read of stdin cannot be interrupted.
    std::thread::spawn(move || send_stdin(options, &to));
    let messages = ReceiverStream::new(messages);
    let made = block_on(admin::import(&socket, messages))?;
    let word = |is_complete| if is_complete { "ready" } else { "incomplete" };
    if arguments.json {
        let volumes = made.volumes.iter().map(|one| {
            json!({ "id": one.volume_id, "size_bytes": one.size_bytes, "state": word(one.is_complete) })
        });
        print::json(&json!({ "volumes": volumes.collect::<Vec<Value>>() }));
    } else {
        let rows = made.volumes.iter().map(|one| {
            let size = HumanBytes(one.size_bytes).to_string();
            [one.volume_id.clone(), size, word(one.is_complete).into()]
        });
        print::table(["ID", "SIZE", "STATE"], &rows.collect::<Vec<_>>());
    }
    Ok(ExitCode::SUCCESS)
}

fn send_stdin(options: Options, to: &mpsc::Sender<ImportRequest>) {
    let mut stdin = std::io::stdin().lock();
    let mut options = Some(options);
    loop {
        let mut data = vec![0; MESSAGE_BYTES];
        let read = match options {
            // The first message does not wait for stdin.
            Some(_) => Ok(0),
            None => stdin.read(&mut data),
        };
        let length = match read {
            Ok(0) if options.is_none() => return,
            Ok(length) => length,
            Err(error) if error.kind() == ErrorKind::Interrupted => continue,
            Err(error) => {
                // The driver finds the archive truncated.
                eprintln!("slackwater: failed to read stdin: {error}");
                return;
            }
        };
        data.truncate(length);
        let message = ImportRequest {
            options: options.take(),
            data,
        };
        if to.blocking_send(message).is_err() {
            return;
        }
    }
}
