//! The door: arguments -> configuration -> run.

use std::process::ExitCode;

fn main() -> ExitCode {
    slackwater::cli::main(std::env::args_os())
}
