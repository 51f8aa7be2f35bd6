//! The command line of `slackwater-guard`: it has three options, for which no library is linked.

use std::ffi::OsString;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;

use slackwater_core::error::chain;
use slackwater_core::host::linux::LinuxHost;

use super::program::{self, Options};
use super::{GuardClient, PROGRAM};

/// The command line cannot be parsed: EX_USAGE of sysexits.h, as in `slackwater`.
const USAGE_ERROR: u8 = 64;

const HELP: &str = "\
Freezes file systems on behalf of the Slackwater driver, and always thaws them, even if the driver dies

Usage: slackwater-guard --socket PATH --state-dir DIR

Options:
      --socket PATH     Socket on which the driver reaches this process
      --state-dir DIR   The driver's state directory, in which frozen file systems are recorded
      --with-parent     End when standard input ends, which is a pipe of the driver
  -h, --help            Print help
  -V, --version         Print the version
";

enum Given {
    Serve(Options),
    Print(String),
}

/// Runs the program from its arguments to its exit status.
pub fn main(arguments: impl IntoIterator<Item = OsString>) -> ExitCode {
    let options = match parse(arguments.into_iter().skip(1)) {
        Ok(Given::Serve(options)) => options,
        Ok(Given::Print(text)) => {
            print!("{text}");
            return ExitCode::SUCCESS;
        }
        Err(problem) => {
            eprintln!("{PROGRAM}: {problem}; see {PROGRAM} --help");
            return ExitCode::from(USAGE_ERROR);
        }
    };
    let folder = GuardClient::private_folder(&options.state_dir);
    let host = Arc::new(LinuxHost::new(Vec::new()).with_own_folder(folder));
    match program::run(host, &options) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{PROGRAM}: {}", chain(&error));
            ExitCode::FAILURE
        }
    }
}

fn parse(arguments: impl Iterator<Item = OsString>) -> Result<Given, String> {
    let (mut socket, mut state_dir, mut with_parent) = (None, None, false);
    let mut arguments = arguments.map(|argument| {
        let text = argument.into_string();
        text.map_err(|argument| format!("{} is not UTF-8", argument.display()))
    });
    while let Some(argument) = arguments.next().transpose()? {
        let (name, value) = match argument.split_once('=') {
            Some((name, value)) => (name.to_string(), Some(value.to_string())),
            None => (argument, None),
        };
        let place = match name.as_str() {
            "--with-parent" if value.is_none() => {
                with_parent = true;
                continue;
            }
            "-h" | "--help" => return Ok(Given::Print(HELP.into())),
            "-V" | "--version" => {
                let version = env!("CARGO_PKG_VERSION");
                return Ok(Given::Print(format!("{PROGRAM} {version}\n")));
            }
            "--socket" => &mut socket,
            "--state-dir" => &mut state_dir,
            _ => return Err(format!("{name:?} is not an option")),
        };
        let value = match value {
            Some(value) => Some(value),
            None => arguments.next().transpose()?,
        };
        let path = PathBuf::from(value.ok_or_else(|| format!("{name} needs a path"))?);
        if !path.is_absolute() {
            let path = path.display();
            return Err(format!("{name} {path}: an absolute path is needed"));
        }
        *place = Some(path);
    }
    Ok(Given::Serve(Options {
        socket: socket.ok_or("--socket is missing")?,
        state_dir: state_dir.ok_or("--state-dir is missing")?,
        with_parent,
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn given(text: &str) -> Result<Given, String> {
        parse(text.split_whitespace().map(OsString::from))
    }

    #[test]
    fn both_paths_are_needed_and_absolute() {
        for (text, problem) in [
            ("", "--socket is missing"),
            ("--socket /s", "--state-dir is missing"),
            ("--socket", "--socket needs a path"),
            (
                "--socket s --state-dir /x",
                "--socket s: an absolute path is needed",
            ),
            ("--socket /s --state-dir /x y", "\"y\" is not an option"),
            ("--with-parent=1", "\"--with-parent\" is not an option"),
        ] {
            assert_eq!(given(text).err().as_deref(), Some(problem), "{text}");
        }
        for text in [
            "--socket /s --state-dir /x --with-parent",
            "--with-parent --state-dir=/x --socket=/s",
        ] {
            let Ok(Given::Serve(options)) = given(text) else {
                panic!("{text}");
            };
            assert_eq!(options.socket, PathBuf::from("/s"));
            assert_eq!(options.state_dir, PathBuf::from("/x"));
            assert!(options.with_parent);
        }
    }
}
