//! `export` and `import`: archives of snapshots, from and to the driver on a node.
//!
//! An archive is complete only if the driver has reported its end. A file gets its name then, so that
//! what a broken connection has left is never taken for an archive.

use std::ffi::OsString;
use std::fs::{File, OpenOptions};
use std::io::{self, IsTerminal, Read};
use std::path::{Path, PathBuf};

use futures_util::future::{Either, select};
use tokio::sync::mpsc;

use crate::cli::driver::{ExportArguments, ImportArguments};
use crate::cluster::Cluster;
use crate::cluster::object::{self, Fields, pool_of};
use crate::driver_pod::command::{check_exit_code, command_line, confirm, node_of};
use crate::driver_pod::exec::{self, Input};
use crate::failure::{Failure, Result};

/// Bytes of one message, as kubectl has it.
const MESSAGE_BYTES: usize = 32 << 10;
/// Messages that are read ahead.
const MAX_QUEUED_PIECES: usize = 4;
/// The exit code of a program that Ctrl-C has ended, in shells.
const INTERRUPTED: u8 = 130;

/// Writes an archive to a file or to stdout.
pub async fn export(cluster: &Cluster, arguments: &ExportArguments) -> Result<()> {
    if arguments.file.is_none() && io::stdout().is_terminal() {
        return Err(Failure::usage(
            "an archive is not written to a terminal; redirect stdout, or give --output FILE"
                .into(),
        ));
    }
    let snapshots = snapshots_of(cluster, &arguments.snapshot).await?;
    let bases = snapshots_of(cluster, &arguments.base).await?;
    let mut node = String::new();
    for id in &snapshots {
        let next = node_of(cluster, id).await?;
        if !node.is_empty() && next != node {
            return Err(Failure::failed(format!(
                "the snapshots are on the nodes {node} and {next}: export those of each node into an archive of its own"
            )));
        }
        node = next;
    }
    let pod = arguments.pods.on_node(cluster, &node).await?;
    let mut words = command_line(&pod, &["export"], &["endpoint"]);
    words.extend(bases.into_iter().map(|base| format!("--base={base}")));
    words.extend(snapshots);
    let Some(path) = &arguments.file else {
        let code = exec::run(cluster, &pod, &words, &mut io::stdout(), None).await?;
        return check_exit_code(&pod, &words, code);
    };
    let mut part = Part::create(path)?;
    // Otherwise Ctrl-C would leave the part.
    let interrupted = Box::pin(tokio::signal::ctrl_c());
    let run = Box::pin(exec::run(cluster, &pod, &words, &mut part.file, None));
    let code = match select(run, interrupted).await {
        Either::Left((code, _)) => code,
        Either::Right(_) => Err(Failure {
            code: INTERRUPTED,
            ..Failure::failed("interrupted".into())
        }),
    };
    let done = code.and_then(|code| check_exit_code(&pod, &words, code));
    done.map_err(|failure| Failure {
        message: format!("{}; {} was not written", failure.message, path.display()),
        ..failure
    })?;
    part.keep()
}

/// The IDs of snapshots that are given as VolumeSnapshots or IDs.
async fn snapshots_of(cluster: &Cluster, names: &[String]) -> Result<Vec<String>> {
    let mut ids = Vec::new();
    for name in names {
        ids.push(match pool_of(name) {
            Some(_) => name.clone(),
            None => snapshot_of(cluster, name).await?,
        });
    }
    Ok(ids)
}

async fn snapshot_of(cluster: &Cluster, name: &str) -> Result<String> {
    let namespace = &cluster.namespace;
    let failed = |why: &str| Failure::failed(format!("VolumeSnapshot {namespace}/{name} {why}"));
    let object = cluster.get(&object::SNAPSHOT, namespace, name).await?;
    let content = match object.text("/status/boundVolumeSnapshotContentName") {
        "" => return Err(failed("has no VolumeSnapshotContent yet")),
        content => content,
    };
    let content = cluster.get(&object::SNAPSHOT_CONTENT, "", content).await?;
    if content.text("/spec/driver") != cluster.driver {
        return Err(failed(&format!("is not of the driver {}", cluster.driver)));
    }
    match content.text("/status/snapshotHandle") {
        "" => Err(failed("was not taken yet")),
        id => Ok(id.to_string()),
    }
}

/// A file that gets its name when it is complete. It is deleted otherwise.
struct Part {
    file: File,
    path: PathBuf,
    target: PathBuf,
    is_kept: bool,
}

impl Part {
    fn create(target: &Path) -> Result<Part> {
        let failed = |why: String| Failure::failed(format!("writing {}: {why}", target.display()));
        // A device or a pipe would be replaced by a file.
        if target.metadata().is_ok_and(|found| !found.is_file()) {
            return Err(failed("it exists, and is no file".into()));
        }
        let Some(name) = target.file_name() else {
            return Err(failed("it has no file name".into()));
        };
        let mut name = OsString::from(name);
        name.push(format!(".{}.part", std::process::id()));
        let path = target.with_file_name(name);
        let file = OpenOptions::new().write(true).create_new(true).open(&path);
        Ok(Part {
            file: file.map_err(|error| failed(error.to_string()))?,
            path,
            target: target.to_path_buf(),
            is_kept: false,
        })
    }

    /// Makes the content and then the name durable.
    fn keep(mut self) -> Result<()> {
        let kept = self.file.sync_all().and_then(|()| self.rename());
        self.is_kept = kept.is_ok();
        let target = self.target.display();
        kept.map_err(|error| Failure::failed(format!("writing {target}: {error}")))?;
        // Not each system opens directories.
        #[cfg(unix)]
        {
            let folder = self
                .target
                .parent()
                .filter(|folder| *folder != Path::new(""));
            let folder = File::open(folder.unwrap_or(Path::new("."))).and_then(|it| it.sync_all());
            folder.map_err(|error| Failure::failed(format!("making {target} durable: {error}")))?;
        }
        Ok(())
    }

    #[allow(
        clippy::disallowed_methods,
        reason = "the plugin changes nothing of the driver, and has no effects to count"
    )]
    fn rename(&self) -> io::Result<()> {
        std::fs::rename(&self.path, &self.target)
    }
}

impl Drop for Part {
    fn drop(&mut self) {
        if !self.is_kept {
            // It is of no use, but also does no harm.
            let _ = std::fs::remove_file(&self.path);
        }
    }
}

/// Creates the volumes of an archive on a node.
pub async fn import(cluster: &Cluster, arguments: &ImportArguments) -> Result<()> {
    let source: Box<dyn Read + Send> = match &arguments.file {
        Some(path) => {
            let failed = |why: io::Error| Failure::failed(format!("{}: {why}", path.display()));
            Box::new(File::open(path).map_err(failed)?)
        }
        None if io::stdin().is_terminal() => {
            return Err(Failure::usage(
                "an archive is not read from a terminal; redirect stdin, or give --file FILE"
                    .into(),
            ));
        }
        None => Box::new(io::stdin()),
    };
    let pod = arguments.pods.on_node(cluster, &arguments.node).await?;
    let mut words = command_line(&pod, &["import"], &["endpoint"]);
    let options = [
        ("name", &arguments.name),
        ("prefix", &arguments.prefix),
        ("to-pool", &arguments.to_pool),
        ("size", &arguments.size),
    ];
    for (option, value) in options {
        words.extend(value.iter().map(|value| format!("--{option}={value}")));
    }
    words.extend(arguments.more.then(|| "--more".to_string()));
    if !confirm(&arguments.confirmed, &pod, &words)? {
        return Ok(());
    }
    let input = pieces(source);
    let code = exec::run(cluster, &pod, &words, &mut io::stdout(), Some(input)).await?;
    check_exit_code(&pod, &words, code)
}

/// Reads ahead by a few messages. The thread ends with the process: a read of stdin cannot be
/// interrupted.
fn pieces(mut source: impl Read + Send + 'static) -> Input {
    let (to, input) = mpsc::channel(MAX_QUEUED_PIECES);
    std::thread::spawn(move || {
        loop {
            let mut data = vec![0; MESSAGE_BYTES];
            let piece = match source.read(&mut data) {
                Ok(0) => return,
                Ok(length) => {
                    data.truncate(length);
                    Ok(data)
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(error) => Err(error),
            };
            let is_last = piece.is_err();
            if to.blocking_send(piece).is_err() || is_last {
                return;
            }
        }
    });
    input
}
