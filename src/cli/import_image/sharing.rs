//! Whether the volume can share the blocks of the source, which the driver finds out.

use std::fmt;
use std::path::Path;

use super::source::Source;
use super::{Arguments, Failure, Input};
use crate::agent::ImportFileRequest;
use crate::agent::import_request::Options;
use crate::agent::import_response::Volume;
use crate::cli::block_on;
use crate::operation::content_identity;
use crate::server::admin;

/// How the volume gets its content.
pub(super) enum Sharing {
    /// It has it: the driver has cloned the file.
    Cloned(Volume),
    /// The driver can clone the file.
    Possible,
    /// The content is copied, for this reason.
    Copied(String),
}

impl Sharing {
    /// Asks the driver to clone a file, or whether it can.
    pub(super) fn ask(
        socket: &Path,
        input: &Input,
        arguments: &Arguments,
        options: &Options,
    ) -> Result<Sharing, Failure> {
        let copied = |why: &str| Ok(Sharing::Copied(why.into()));
        let source = match input {
            Input::Content(Source::Opened(source)) => source,
            Input::Content(Source::Stdin { .. }) => return copied("stdin is not a file"),
            Input::Folder(_) => return copied("it is a directory"),
        };
        let Some(state) = source.state() else {
            return copied("it is a device");
        };
        let path = std::path::absolute(&arguments.from).ok();
        let Some(path) = path.and_then(|path| path.into_os_string().into_string().ok()) else {
            return copied("its path is not UTF-8");
        };
        let request = ImportFileRequest {
            options: Some(options.clone()),
            path,
            identity: content_identity(&state),
            dry_run: !arguments.yes,
        };
        let answer = block_on(admin::import_file(socket, request))?;
        Ok(match answer {
            None => Sharing::Copied("no driver that can clone it listens at the socket".into()),
            Some(answer) if !answer.obstacle.is_empty() => Sharing::Copied(answer.obstacle),
            Some(answer) => answer.volume.map_or(Sharing::Possible, Sharing::Cloned),
        })
    }

    /// One word, for programs.
    pub(super) fn as_str(&self) -> &'static str {
        match self {
            Sharing::Cloned(_) | Sharing::Possible => "cloned",
            Sharing::Copied(_) => "copied",
        }
    }
}

impl fmt::Display for Sharing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Sharing::Cloned(_) | Sharing::Possible => {
                write!(f, "cloned, it shares the blocks of the file")
            }
            Sharing::Copied(why) => write!(f, "copied: {why}"),
        }
    }
}
