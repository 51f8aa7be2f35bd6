//! Ranges of images that are sent to another host, and received from one. The content of a simulated
//! image is symbolic: each range with blocks of the content carries all of it, and the image is
//! complete once all of its ranges are received.

use std::ops::Range;
use std::path::Path;

use nix::errno::Errno;
use serde::{Deserialize, Serialize};

use super::clones::UNFINISHED;
use super::content::Content;
use super::disk::{Ino, Receiving};
use super::machine::{Machine, Process};
use super::perform::Acted;
use crate::error::HostCause;
use crate::host::Piece;

const MIXED: &str = "it has parts of two snapshots";

/// What a range carries.
#[derive(Serialize, Deserialize)]
struct Sent {
    content: Content,
    size: u64,
}

impl Machine {
    /// Records the violation of copying from an image that must not be used.
    pub(super) fn check_source(&mut self, from: Ino, source: &Path) -> Result<(), Errno> {
        if let Some(flaw) = self.disk.file(from)?.live.flaw {
            self.violation(format!("{} is copied from: {flaw}", source.display()));
        }
        Ok(())
    }

    /// Records the violation of filling an image that is in use.
    pub(super) fn check_target(&mut self, to: Ino, target: &Path) {
        if self.loops_on(to).iter().any(|number| self.is_used(*number)) {
            let target = target.display();
            self.violation(format!("{target} is overwritten while it's attached"));
        }
    }

    pub(super) fn read_range(
        &mut self,
        process: Process,
        path: &Path,
        offset: u64,
        length: u64,
    ) -> Result<Vec<Piece>, Errno> {
        let ino = self.must_find(process, path)?;
        self.check_source(ino, path)?;
        let data = &self.disk.file(ino)?.live;
        if length == 0 || (offset > 0 && offset >= data.content.used()) {
            return Ok(Vec::new());
        }
        // A copy that is longer than its source has the same data.
        let received = data.receiving.as_ref().map(|receiving| receiving.size);
        let sent = Sent {
            content: data.content.clone(),
            size: received.unwrap_or(data.size),
        };
        let bytes = serde_json::to_vec(&sent).map_err(|_| Errno::EIO)?;
        Ok(vec![Piece { offset, bytes }])
    }

    pub(super) fn write_range(
        &mut self,
        process: Process,
        target: &Path,
        (offset, length): (u64, u64),
        (pieces, zeros): (&[Piece], &[Range<u64>]),
    ) -> Result<Acted, HostCause> {
        let range = offset..offset.saturating_add(length);
        let to = self.must_find(process, target)?;
        self.check_target(to, target);
        let inside = |part: &Range<u64>| range.start <= part.start && part.end <= range.end;
        if !zeros.iter().all(inside) {
            return Err(Errno::EINVAL.into());
        }
        let sent = pieces
            .first()
            .map(|piece| serde_json::from_slice(&piece.bytes));
        let sent: Option<Sent> = sent.transpose().map_err(|_| Errno::EINVAL)?;
        self.within_room(to, |machine, before| {
            if range.is_empty() || range.end > before.size {
                return Err(Errno::EINVAL);
            }
            let is_partial = |had: &Receiving| had.received < had.size;
            let continued = before.receiving.clone().filter(is_partial);
            let mut receiving = match (sent, continued) {
                (None, Some(continued)) => continued,
                (Some(sent), Some(continued)) if sent.content == continued.content => continued,
                (Some(Sent { content, size }), continued) => {
                    if continued.is_some() {
                        machine.violation(format!("{}: {MIXED}", target.display()));
                    }
                    // What is before this range is the same in the content that it had.
                    Receiving {
                        content,
                        size,
                        received: range.start,
                    }
                }
                // Nothing is different up to here.
                (None, None) => before.receiving.clone().ok_or(Errno::EINVAL)?,
            };
            if range.start <= receiving.received {
                receiving.received = receiving.received.max(range.end);
            }
            let complete = receiving.received >= receiving.size;
            let data = machine.data_mut(to)?;
            data.flaw = (!complete).then_some(UNFINISHED);
            if complete {
                data.content = receiving.content.clone();
                data.map.clear();
            }
            data.receiving = Some(receiving);
            machine.disk.changed(to, 0)
        })?;
        Ok(Acted::Plain)
    }
}
