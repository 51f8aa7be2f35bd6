//! Snapshots that agents of other nodes read.
//!
//! A reader needs a ticket, which the router obtains for one reader, one snapshot and one hour.
//! Tickets are kept in memory, so a restart ends them; the router then obtains others. While a
//! snapshot is read it is not deleted.

use std::collections::{HashMap, HashSet};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use uuid::Uuid;

use super::remote::{Wanted, digest};
use crate::backend::{Image, ImageHandle};
use crate::error::{Error, ErrorContext, Kind, Result};
use crate::host::Piece;
use crate::model::size::MIB;
use crate::operation::{Pool, Snapshots};
use crate::record::Formatted;

/// Bytes of the image that one message covers.
const RANGE: u64 = 4 * MIB;
/// Maximum number of readers at the same time.
const MAX_READERS: usize = 8;
/// How long a ticket is valid. It is checked when a reader begins.
const TICKET_SECONDS: u64 = 3600;
/// Maximum number of valid tickets: one for each reader and snapshot.
const MAX_TICKETS: usize = 10_000;

/// Proves that the router has granted a snapshot to a reader.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Ticket(pub [u8; 32]);

impl std::fmt::Debug for Ticket {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Ticket")
    }
}

/// A snapshot that is granted to a reader, and what its copy must know.
#[derive(Clone, Debug, PartialEq)]
pub struct Offer {
    pub ticket: Ticket,
    /// A number that is another one if the snapshot was deleted and created again.
    pub identity: u64,
    /// Size of the snapshot in bytes.
    pub size: u64,
    /// Length of its image in bytes.
    pub image_bytes: u64,
    /// Logical block size, which its copy must keep.
    pub block_size: u32,
    /// Its file system.
    pub formatted: Option<Formatted>,
}

/// A range of a snapshot.
#[derive(Clone, Debug, PartialEq)]
pub struct SentRange {
    pub offset: u64,
    pub length: u64,
    /// The data of the range; the rest of it reads as zeros. Empty if only the digest was wanted.
    pub pieces: Vec<Piece>,
    /// The digest of the data.
    pub digest: [u8; 32],
}

#[derive(Clone, Debug, PartialEq)]
struct Grant {
    snapshot_id: String,
    identity: u64,
    reader: String,
    /// Seconds since 1970.
    until: u64,
}

#[derive(Debug, Default)]
struct State {
    tickets: HashMap<Ticket, Grant>,
    /// The snapshot and the node of each reader.
    readers: Vec<(Uuid, String)>,
    /// Snapshots that are being deleted.
    deleting: HashSet<Uuid>,
}

/// The tickets and the readers of this node.
#[derive(Clone, Debug, Default)]
pub(in crate::operation) struct Lent(Arc<Mutex<State>>);

impl Lent {
    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A ticket for this grant. A valid one is used again, because a call that is repeated while a
    /// copy runs asks for one each time.
    fn grant(&self, grant: Grant, now: u64, new: impl FnOnce() -> Ticket) -> Result<Ticket> {
        let mut state = self.state();
        state.tickets.retain(|_, had| now < had.until);
        let same = |had: &Grant| {
            let until = grant.until;
            let had = Grant {
                until,
                ..had.clone()
            };
            had == grant
        };
        // One that is about to end would not reach its reader in time.
        let fresh = |had: &Grant| had.until >= now + TICKET_SECONDS / 2;
        let mut had = state.tickets.iter();
        if let Some((ticket, _)) = had.find(|(_, had)| same(had) && fresh(had)) {
            return Ok(*ticket);
        }
        if state.tickets.len() >= MAX_TICKETS {
            return Err(Error::pending(format!("{MAX_TICKETS} other copies")));
        }
        let ticket = new();
        state.tickets.insert(ticket, grant);
        Ok(ticket)
    }

    fn find(&self, ticket: &Ticket, now: u64, is_reader: &dyn Fn(&str) -> bool) -> Option<Grant> {
        let state = self.state();
        let grant = state.tickets.get(ticket)?;
        (now < grant.until && is_reader(&grant.reader)).then(|| grant.clone())
    }

    fn begin_read(&self, snapshot: Uuid, node: &str) -> Result<Reader> {
        let mut state = self.state();
        if state.deleting.contains(&snapshot) {
            return Err(Error::pending(format!("snapshot {snapshot}")));
        }
        if state.readers.len() >= MAX_READERS {
            let what = format!("{MAX_READERS} copies to other nodes (the limit of this node)");
            return Err(Error::pending(what));
        }
        let reader = (snapshot, node.to_string());
        state.readers.push(reader.clone());
        Ok(Reader {
            lent: self.clone(),
            reader,
        })
    }

    /// Refuses the deletion of snapshots that are being read. None of them is read until the result
    /// is dropped.
    pub(in crate::operation) fn begin_delete(
        &self,
        snapshots: impl IntoIterator<Item = Uuid>,
    ) -> Result<Deleting> {
        let mut state = self.state();
        let snapshots: Vec<Uuid> = snapshots.into_iter().collect();
        let mut readers = state.readers.iter();
        if let Some((uuid, node)) = readers.find(|(uuid, _)| snapshots.contains(uuid)) {
            let why = format!("is being copied to node {node}; it can be deleted after that");
            return Err(Error::refused(format!("snapshot {uuid}"), why));
        }
        // The caller has the locks of these snapshots, so nothing else is deleting them.
        state.deleting.extend(&snapshots);
        Ok(Deleting {
            lent: self.clone(),
            snapshots,
        })
    }
}

/// A reader of a snapshot, until it is dropped.
struct Reader {
    lent: Lent,
    reader: (Uuid, String),
}

impl Drop for Reader {
    fn drop(&mut self) {
        let mut state = self.lent.state();
        if let Some(at) = state.readers.iter().position(|one| *one == self.reader) {
            state.readers.swap_remove(at);
        }
    }
}

/// Snapshots that are being deleted, until it is dropped.
pub(in crate::operation) struct Deleting {
    lent: Lent,
    snapshots: Vec<Uuid>,
}

impl Drop for Deleting {
    fn drop(&mut self) {
        let mut state = self.lent.state();
        for snapshot in &self.snapshots {
            state.deleting.remove(snapshot);
        }
    }
}

/// A snapshot that is being read from its beginning or from an offset on.
pub struct Loan {
    pool: Arc<Pool>,
    image: ImageHandle,
    at: u64,
    wanted: Wanted,
    _reader: Reader,
}

impl Snapshots {
    /// Grants a snapshot to the agent of a node.
    pub fn offer(&self, snapshot_id: &str, reader: &str) -> Result<Offer> {
        let (pool, id, record) = self.pools.find_snapshot(snapshot_id)?;
        let image = pool.backend.open_image(Image::Snapshot(id.uuid))?;
        let now = self.host.now();
        let identity = record.incarnation.as_u64_pair().0;
        let grant = Grant {
            snapshot_id: snapshot_id.to_string(),
            identity,
            reader: reader.to_string(),
            until: now.saturating_add(TICKET_SECONDS),
        };
        let ticket = self.lent.grant(grant, now, || self.new_ticket())?;
        Ok(Offer {
            ticket,
            identity,
            size: record.size,
            image_bytes: image.bytes(),
            block_size: record.block_size,
            formatted: record.formatted,
        })
    }

    fn new_ticket(&self) -> Ticket {
        let mut ticket = [0; 32];
        for half in ticket.chunks_mut(16) {
            half.copy_from_slice(self.host.random_uuid().as_bytes());
        }
        Ticket(ticket)
    }

    /// Opens a granted snapshot for its reader. `is_reader` is whether the caller has proven to be
    /// the agent of a node.
    pub fn lend(
        &self,
        ticket: &Ticket,
        is_reader: &dyn Fn(&str) -> bool,
        (from, wanted): (u64, Wanted),
    ) -> Result<Loan> {
        let grant = self.lent.find(ticket, self.host.now(), is_reader);
        let grant = grant.ok_or_else(|| {
            let why = "is not one that this agent has issued to the caller and that is still valid; the router obtains a new one when the call is repeated";
            Error::refused("the ticket", why)
        })?;
        let (_, id, _) = self.pools.find_snapshot(&grant.snapshot_id)?;
        let reader = self.lent.begin_read(id.uuid, &grant.reader)?;
        // It cannot be deleted any more.
        let (pool, id, record) = self.pools.find_snapshot(&grant.snapshot_id)?;
        if record.incarnation.as_u64_pair().0 != grant.identity {
            return Err(Error::not_found(Kind::Snapshot, &grant.snapshot_id));
        }
        let image = pool.backend.open_image(Image::Snapshot(id.uuid))?;
        tracing::info!(snapshot = %id, reader = grant.reader, from, of = image.bytes(), "sending a snapshot");
        Ok(Loan {
            pool,
            image,
            at: from,
            wanted,
            _reader: reader,
        })
    }

    /// The next range of a loan, at a bounded rate; `None` at its end.
    pub fn read_loan(&self, loan: &mut Loan) -> Result<Option<SentRange>> {
        if self.pools.in_flight.is_stopping() {
            return Err(Error::Stopping);
        }
        let (offset, end) = (loan.at, loan.image.bytes());
        if offset >= end {
            return Ok(None);
        }
        let length = RANGE.min(end - offset);
        let next = self.copies.step([loan.pool.id(); 2], length);
        let pieces = loan.image.read(offset, length);
        let mut pieces = pieces.context(|| "read a snapshot for another node".into())?;
        let digest = digest(&pieces);
        if loan.wanted == Wanted::Digests {
            pieces.clear();
        }
        loan.at = offset + length;
        let sent: usize = pieces.iter().map(|piece| piece.bytes.len()).sum();
        self.lent_bytes.fetch_add(sent as u64, Ordering::Relaxed);
        self.host
            .pause(next.saturating_duration_since(Instant::now()));
        Ok(Some(SentRange {
            offset,
            length,
            pieces,
            digest,
        }))
    }

    /// Bytes sent to other nodes since the start.
    pub fn lent(&self) -> u64 {
        self.lent_bytes.load(Ordering::Relaxed)
    }
}
