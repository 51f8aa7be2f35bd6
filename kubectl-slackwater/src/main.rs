//! The entry point: runs the command line.

use std::process::ExitCode;

fn main() -> ExitCode {
    kubectl_slackwater::main(std::env::args_os())
}
