//! Programs that hold an application still: started once, then talked to over their stdin alone.
//!
//! A session lives in a process group of its own, holds none of our descriptors, and nobody else
//! holds the writing end of its stdin: so it sees the end of it when we let go, and also when
//! this process ends, however it ends. Its words go nowhere then, which doesn't end it before it
//! has released: SIGPIPE is ignored in it.

use std::fmt;
use std::path::Path;

/// How to start a session.
#[derive(Clone, Copy, Debug)]
pub struct SessionSpec<'a> {
    /// Name of its hook; in the program's environment `SLACKWATER_HOOK`.
    pub name: &'a str,
    /// An absolute path.
    pub program: &'a Path,
    /// Its arguments, not counting its name.
    pub arguments: &'a [String],
    /// Who runs it, with all groups of that user; whoever runs us, if nobody is named.
    pub user: Option<&'a str>,
    /// Its own deadline in seconds; in its environment `SLACKWATER_SECONDS`.
    pub seconds: u64,
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

/// A session. Dropping it ends its stdin and leaves it to itself.
pub trait Session: Send + fmt::Debug {
    /// Where it is now; never waits. What it has written is read meanwhile, so that it isn't held
    /// up by a full pipe.
    fn look(&mut self) -> SessionState;

    /// The first words of its stderr, in one line.
    fn said(&self) -> String;

    /// Ends its stdin: it's to release its application and end.
    fn let_go(&mut self);

    /// SIGTERM, or by force SIGKILL, to it and to all that it has started; nothing if it's over.
    fn end(&mut self, by_force: bool);
}
