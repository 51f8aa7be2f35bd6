//! Copies that give way to the thick volumes they are made from.
//!
//! From the first clone until it has blocks of its own again, a thick volume shares blocks with
//! its copy, and a write to one of them takes another from what the pool has free. There was room
//! for all of them when the copy was admitted; but anybody may fill the pool meanwhile. So the room
//! is watched, and when it gets low the copy is emptied: then every block is the volume's own, and
//! no write to it needs another one.

use std::sync::Arc;
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::thread::{Builder, JoinHandle};
use std::time::Duration;

use super::Pool;
use super::capacity::headroom;
use crate::backend::Image;
use crate::error::{Error, HostError, Result};

/// How often it's looked: the looks of an hour's un-sharing cost seconds, and who fills a pool by
/// writing has no time for much in between: half the head-room is 1/128 of the pool.
const LOOK: Duration = Duration::from_millis(5);

/// A copy that shares blocks with the thick volume that it is made from.
pub(super) struct ThickCopy {
    pub(super) pool: Arc<Pool>,
    pub(super) image: Image,
    /// Bytes of its volume's image.
    pub(super) bytes: u64,
}

/// Watches the room of copies until it's dropped or [`GiveWay::end`]; of none, if that's empty. A
/// crash ends it, and copies with it at the next start: until then a pool that is filled to the
/// last block fails writes.
#[derive(Default)]
pub(super) struct GiveWay(Option<Watch>);

struct Watch {
    /// Dropped when the thread is to end.
    go_on: Sender<()>,
    /// Why a copy was emptied, if one was.
    thread: JoinHandle<Option<Error>>,
}

impl GiveWay {
    /// Begins to watch; no thread where there are no copies.
    pub(super) fn watch(copies: Vec<ThickCopy>) -> Result<GiveWay> {
        if copies.is_empty() {
            return Ok(GiveWay::default());
        }
        let (go_on, end) = channel();
        let watch = move || {
            let mut why = None;
            while end.recv_timeout(LOOK) == Err(RecvTimeoutError::Timeout) {
                // Again each time: a clone that ran has given it blocks since.
                why = look(&copies).or(why);
            }
            why
        };
        let thread = Builder::new().name("give-way".into()).spawn(watch);
        let thread = thread.map_err(|error| Error::Host {
            doing: "watch the room of a thick volume".into(),
            source: HostError::io("start", "a thread", &error),
        })?;
        Ok(GiveWay(Some(Watch { go_on, thread })))
    }

    /// Ends it; no copy is emptied afterwards. An error if one was: it's worthless, whatever else
    /// became of it. Told once.
    pub(super) fn end(&mut self) -> Result<()> {
        let Some(Watch { go_on, thread }) = self.0.take() else {
            return Ok(());
        };
        drop(go_on);
        let why = thread.join().map_err(|_| Error::Bug {
            invariant: "a watch of room ends without a panic".into(),
        })?;
        why.map_or(Ok(()), Err)
    }
}

impl Drop for GiveWay {
    fn drop(&mut self) {
        let _ = self.end();
    }
}

/// Empties the copies of pools whose room is low. Not a word here: the log may lie on a file
/// system that is frozen just now.
fn look(copies: &[ThickCopy]) -> Option<Error> {
    let mut why = None;
    for copy in copies {
        let backend = &copy.pool.backend;
        // A pool that doesn't answer isn't full.
        let Ok(space) = backend.disk() else {
            continue;
        };
        if space.available >= headroom(space.total) / 2 {
            continue;
        }
        // One that failed is tried again, at the next look.
        let _ = backend.empty(copy.image);
        why.get_or_insert(Error::OutOfSpace {
            pool: copy.pool.definition.name.clone(),
            required: copy.bytes,
            available: space.available,
        });
    }
    why
}
