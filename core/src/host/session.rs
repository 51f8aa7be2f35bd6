//! Programs that hold an application still: started once, then talked to over their stdin alone.
//!
//! A session lives in a process group of its own, holds none of our descriptors, and nobody else
//! holds the writing end of its stdin: so it sees the end of it when we let go, and also when
//! this process ends, however it ends. Its words go nowhere then, which doesn't end it before it
//! has released: SIGPIPE is ignored in it.

use std::fmt;
use std::path::{Path, PathBuf};

/// How to start a session.
#[derive(Clone, Copy, Debug)]
pub struct SessionSpec<'a> {
    /// Name of its hook; in the program's environment `SLACKWATER_HOOK`.
    pub name: &'a str,
    /// An absolute path.
    pub program: &'a Path,
    /// Its arguments, not counting its name.
    pub arguments: &'a [String],
    /// Who runs it, with all groups of that user; the user of this process, if there is none.
    pub account: Option<&'a Account>,
    /// Its own deadline in seconds; in its environment `SLACKWATER_SECONDS`.
    pub seconds: u64,
}

/// A user of this machine. Looking one up may take as long as a directory service does, so it's
/// done before any application is held.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Account {
    /// The user's name.
    pub name: String,
    /// The home folder.
    pub home: PathBuf,
    /// Number of the user.
    pub uid: u32,
    /// Number of the first group.
    pub gid: u32,
    /// Numbers of all groups.
    pub groups: Vec<u32>,
}

/// Where a session is in its life.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SessionState {
    /// It runs, and hasn't said READY.
    Starting,
    /// It has said READY, and runs.
    Ready,
    /// It's over.
    Ended {
        /// It had said READY.
        was_ready: bool,
        /// It ended with status 0.
        success: bool,
        /// Its exit status or signal, for people.
        status: String,
    },
}

/// So much of a session's stderr is kept.
const SAID_BYTES: usize = 4096;
/// The longest line that may turn out to be READY, blanks included; longer ones are skipped.
const LINE_BYTES: usize = 256;
/// More of a program's words doesn't fit into an error that people read.
const SAID_CHARS: usize = 400;

/// What a session has said so far, wherever it runs.
#[derive(Debug, Default)]
pub struct Heard {
    /// The line that it's in the middle of.
    line: Vec<u8>,
    is_ready: bool,
    said: Vec<u8>,
}

impl Heard {
    /// Takes what came from its stdout.
    pub fn stdout(&mut self, bytes: &[u8]) {
        for byte in bytes {
            if *byte == b'\n' {
                self.is_ready |= self.line.trim_ascii() == b"READY";
                self.line.clear();
            } else if self.line.len() < LINE_BYTES {
                self.line.push(*byte);
            }
        }
    }

    /// Takes what came from its stderr.
    pub fn stderr(&mut self, bytes: &[u8]) {
        let room = SAID_BYTES.saturating_sub(self.said.len());
        self.said.extend_from_slice(&bytes[..bytes.len().min(room)]);
    }

    /// Whether it has said READY.
    pub fn is_ready(&self) -> bool {
        self.is_ready
    }

    /// The first words of its stderr, in one line.
    pub fn said(&self) -> String {
        speakable(&String::from_utf8_lossy(&self.said))
    }
}

/// The first words of a program in one line: no control characters, no runs of blanks.
pub fn speakable(text: &str) -> String {
    let plain: String = text
        .chars()
        .map(|c| if c.is_control() { ' ' } else { c })
        .collect();
    let line = plain.split_whitespace().collect::<Vec<_>>().join(" ");
    match line.char_indices().nth(SAID_CHARS) {
        Some((end, _)) => format!("{}...", &line[..end]),
        None => line,
    }
}

/// A session. Dropping it ends its stdin and leaves it to itself.
pub trait Session: Send + fmt::Debug {
    /// Where it is now; never waits. What it has written is read meanwhile, so that it isn't held
    /// up by a full pipe.
    fn poll(&mut self) -> SessionState;

    /// The first words of its stderr, in one line.
    fn said(&self) -> String;

    /// Ends its stdin: it's to release its application and end.
    fn let_go(&mut self);

    /// SIGTERM, or by force SIGKILL, to it and to all that it has started; nothing if it's over.
    fn kill(&mut self, by_force: bool);
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn the_output_of_a_program_becomes_one_short_line(text in any::<String>()) {
            let said = speakable(&text);
            prop_assert!(said.chars().count() <= SAID_CHARS + 3);
            prop_assert!(!said.chars().any(char::is_control));
        }

        #[test]
        fn ready_is_recognized_however_the_output_is_split(cuts in prop::collection::vec(1usize..5, 0..20)) {
            let text = b"hello\nnot READY\n READY \r\nmore";
            let mut heard = Heard::default();
            let mut at = 0;
            for cut in cuts {
                let end = (at + cut).min(text.len());
                heard.stdout(&text[at..end]);
                at = end;
                prop_assert_eq!(heard.is_ready(), at >= 25, "{}", at);
            }
        }
    }
}
