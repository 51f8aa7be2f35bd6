//! The entry point: runs the command line.

use std::process::ExitCode;

fn main() -> ExitCode {
    slackwater::cli::main(std::env::args_os())
}
