//! Programs that quiesce an application: each is started once and afterwards only controlled
//! through its stdin.
//!
//! A session runs in a process group of its own and inherits no descriptor of the driver, and no
//! other process holds the write end of its stdin. So it reads end of file when the driver closes
//! its end, and also when the driver exits for any reason. Its output is then discarded; it is not
//! killed by that before it has released its application, because SIGPIPE is ignored in it.

use std::fmt;
use std::path::{Path, PathBuf};

/// The configuration of a session.
#[derive(Clone, Copy, Debug)]
pub struct SessionSpec<'a> {
    /// Name of its hook, which the program gets as `SLACKWATER_HOOK` in its environment.
    pub name: &'a str,
    /// The absolute path of the program.
    pub program: &'a Path,
    /// Its arguments, without the program's name.
    pub arguments: &'a [String],
    /// The user that runs it, with all groups of that user; by default the user of this process.
    pub account: Option<&'a Account>,
    /// Its own time limit in seconds, which the program gets as `SLACKWATER_SECONDS` in its
    /// environment.
    pub seconds: u64,
}

/// A user of this machine. Its lookup can take as long as a directory service needs, so it is done
/// before any application is quiesced.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Account {
    /// The user's name.
    pub name: String,
    /// The home directory.
    pub home: PathBuf,
    /// The user ID.
    pub uid: u32,
    /// The primary group ID.
    pub gid: u32,
    /// The IDs of all groups.
    pub groups: Vec<u32>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SessionState {
    /// It runs and has not written READY.
    Starting,
    /// It runs and has written READY.
    Ready,
    /// It has exited.
    Ended {
        /// It had written READY.
        was_ready: bool,
        /// It exited with status 0.
        success: bool,
        /// Its exit status or signal, as text.
        status: String,
    },
}

/// How many bytes of a session's stderr are kept.
const MAX_STDERR_BYTES: usize = 4096;
/// The longest line that may still be READY, blanks included; longer ones are skipped.
const MAX_LINE_BYTES: usize = 256;
/// Maximum length of a program's output in an error message.
const MAX_EXCERPT_CHARS: usize = 400;

/// The output of a session so far, whatever host runs it.
#[derive(Debug, Default)]
pub struct SessionOutput {
    /// The line that is not complete yet.
    line: Vec<u8>,
    is_ready: bool,
    stderr: Vec<u8>,
}

impl SessionOutput {
    /// Processes bytes from its stdout.
    pub fn stdout(&mut self, bytes: &[u8]) {
        for byte in bytes {
            if *byte == b'\n' {
                self.is_ready |= self.line.trim_ascii() == b"READY";
                self.line.clear();
            } else if self.line.len() < MAX_LINE_BYTES {
                self.line.push(*byte);
            }
        }
    }

    /// Processes bytes from its stderr.
    pub fn stderr(&mut self, bytes: &[u8]) {
        let room = MAX_STDERR_BYTES.saturating_sub(self.stderr.len());
        self.stderr
            .extend_from_slice(&bytes[..bytes.len().min(room)]);
    }

    /// Whether it has written READY.
    pub fn is_ready(&self) -> bool {
        self.is_ready
    }

    /// The beginning of its stderr, in one line.
    pub fn stderr_excerpt(&self) -> String {
        one_line_excerpt(&String::from_utf8_lossy(&self.stderr))
    }
}

/// The beginning of a program's output in one line, without control characters and repeated blanks.
pub fn one_line_excerpt(text: &str) -> String {
    let plain: String = text
        .chars()
        .map(|c| if c.is_control() { ' ' } else { c })
        .collect();
    let line = plain.split_whitespace().collect::<Vec<_>>().join(" ");
    match line.char_indices().nth(MAX_EXCERPT_CHARS) {
        Some((end, _)) => format!("{}...", &line[..end]),
        None => line,
    }
}

/// A session. Dropping it closes its stdin and does not wait for it.
pub trait Session: Send + fmt::Debug {
    /// Its present state; never blocks. This also reads what it has written, so that it is not
    /// blocked by a full pipe.
    fn poll(&mut self) -> SessionState;

    /// The beginning of its stderr, in one line.
    fn stderr_excerpt(&self) -> String;

    /// Closes its stdin, which asks it to release its application and exit.
    fn close_stdin(&mut self);

    /// Sends SIGTERM, or SIGKILL if `by_force`, to it and to all processes that it has started;
    /// does nothing if it has exited.
    fn kill(&mut self, by_force: bool);
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn fuzz_the_output_of_sessions() {
        let seeds = ["checkpoint\nREAD\n", "READY now\n\n\n"];
        crate::fuzz::fuzz_text("output of sessions", &seeds, |text| {
            let mut output = SessionOutput::default();
            output.stdout(text.as_bytes());
            output.stderr(text.as_bytes());
            assert!(output.stderr_excerpt().chars().count() <= MAX_EXCERPT_CHARS + 3);
            output.is_ready().then_some(())
        });
    }

    proptest! {
        #[test]
        fn the_output_of_a_program_becomes_one_short_line(text in any::<String>()) {
            let excerpt = one_line_excerpt(&text);
            prop_assert!(excerpt.chars().count() <= MAX_EXCERPT_CHARS + 3);
            prop_assert!(!excerpt.chars().any(char::is_control));
        }

        #[test]
        fn ready_is_recognized_however_the_output_is_split(cuts in prop::collection::vec(1usize..5, 0..20)) {
            let text = b"hello\nnot READY\n READY \r\nmore";
            let mut output = SessionOutput::default();
            let mut at = 0;
            for cut in cuts {
                let end = (at + cut).min(text.len());
                output.stdout(&text[at..end]);
                at = end;
                prop_assert_eq!(output.is_ready(), at >= 25, "{}", at);
            }
        }
    }
}
