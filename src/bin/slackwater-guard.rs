//! The freeze guard. Its code is in `guard/`; this package only provides its program, so that both
//! programs are always built together.

use std::process::ExitCode;

fn main() -> ExitCode {
    slackwater_guard::command::main(std::env::args_os())
}
