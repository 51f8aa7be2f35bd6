//! `slackwater certificates`: creates certificates for clusters that have no other issuer.

use std::fs::{DirBuilder, OpenOptions};
use std::io::Write;
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use clap::Args;

use super::{Failure, print};
use crate::config::{BadConfig, NodeName};
use crate::tls::Name;
use crate::tls::authority::{Authority, Validity};

const DAY: Duration = Duration::from_secs(24 * 3600);
/// Validity of a CA certificate, which can only be changed together with all certificates.
const AUTHORITY_VALIDITY: Duration = DAY.saturating_mul(3650);
/// Base names of the files of the CA, and of the router.
const CA: &str = "ca";
const CONTROLLER: &str = "controller";

/// The arguments of the command.
#[derive(Debug, Args)]
pub(super) struct Arguments {
    /// Directory for the files; an existing authority (ca.crt, ca.key) is reused
    #[arg(long, value_name = "DIR")]
    out: PathBuf,
    /// Name of a node (may be repeated)
    #[arg(long, value_name = "NODE")]
    node: Vec<NodeName>,
    /// Validity of the certificates, in days
    #[arg(long, value_name = "N", default_value_t = 365, value_parser = clap::value_parser!(u32).range(1..=3650))]
    days: u32,
}

/// A file to be written.
struct File {
    path: PathBuf,
    text: Vec<u8>,
}

/// Creates all files, or none. Existing files are never overwritten; files that a crash has left
/// incomplete are reported, and must be removed by the user.
pub(super) fn run(arguments: &Arguments) -> Result<ExitCode, Failure> {
    let mut names = Vec::new();
    for NodeName(node) in &arguments.node {
        let name = Name::node(node);
        let name = name.map_err(|error| BadConfig(format!("--node: {error}")))?;
        names.push((format!("node-{node}"), name));
    }
    let mut dir = DirBuilder::new();
    let created = dir.recursive(true).mode(0o700).create(&arguments.out);
    created.map_err(|error| failed("create the directory", &arguments.out, error))?;
    let mut files = Vec::new();
    let authority = match known(&arguments.out)? {
        Some(authority) => authority,
        None => {
            let authority =
                Authority::new(Validity::from_now(AUTHORITY_VALIDITY)).map_err(Failure::run)?;
            add(
                &mut files,
                &arguments.out,
                CA,
                authority.certificate(),
                &authority.key(),
            );
            authority
        }
    };
    // When certificates for new nodes are created, the router's own usually exists.
    if names.is_empty() || !arguments.out.join(format!("{CONTROLLER}.crt")).exists() {
        names.push((CONTROLLER.into(), Name::controller().map_err(Failure::run)?));
    }
    for (stem, name) in &names {
        let bundle = authority.issue(name, Validity::from_now(DAY * arguments.days));
        let bundle = bundle.map_err(Failure::run)?;
        let parts = [("crt", bundle.certificate), ("key", bundle.key)];
        files.extend(parts.map(|(end, text)| File {
            path: arguments.out.join(format!("{stem}.{end}")),
            text,
        }));
    }
    if let Some(file) = files.iter().find(|file| file.path.exists()) {
        let path = file.path.display();
        let problem = format!("{path} exists and is not overwritten; remove it first");
        return Err(Failure::run(std::io::Error::other(problem)));
    }
    for file in &files {
        write(file).map_err(|error| failed("write", &file.path, error))?;
        print::line(file.path.display());
    }
    Ok(ExitCode::SUCCESS)
}

fn known(folder: &Path) -> Result<Option<Authority>, Failure> {
    let read = |end: &str| {
        let path = folder.join(format!("{CA}.{end}"));
        match std::fs::read_to_string(&path) {
            Ok(text) => Ok(Some(text)),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(failed("read", &path, error)),
        }
    };
    match (read("crt")?, read("key")?) {
        (Some(certificate), Some(key)) => Authority::from_pem(&certificate, &key)
            .map(Some)
            .map_err(Failure::run),
        (None, None) => Ok(None),
        (Some(_), None) | (None, Some(_)) => {
            let folder = folder.display();
            let problem =
                format!("{folder} has only one of ca.crt and ca.key; provide both or neither");
            Err(Failure::run(std::io::Error::other(problem)))
        }
    }
}

fn add(files: &mut Vec<File>, folder: &Path, stem: &str, certificate: &str, key: &str) {
    for (end, text) in [("crt", certificate), ("key", key)] {
        files.push(File {
            path: folder.join(format!("{stem}.{end}")),
            text: text.as_bytes().to_vec(),
        });
    }
}

fn write(file: &File) -> std::io::Result<()> {
    let mut new = OpenOptions::new();
    let mut open = new
        .write(true)
        .create_new(true)
        .mode(0o600)
        .open(&file.path)?;
    open.write_all(&file.text)?;
    open.sync_all()
}

fn failed(doing: &str, path: &Path, error: std::io::Error) -> Failure {
    let text = format!("{doing} {}: {error}", path.display());
    Failure::run(std::io::Error::new(error.kind(), text))
}
