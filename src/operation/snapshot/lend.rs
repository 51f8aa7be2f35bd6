//! Snapshots that agents of other nodes read.
//!
//! A reader needs a ticket, which the router obtains for one reader, one snapshot and one hour.
//! Tickets are kept in memory, so a restart ends them; the router then obtains others. While a
//! snapshot is read it is not deleted.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

use super::lent::{Grant, Reader, TICKET_SECONDS};
use super::remote::{Offer, SentRange, Ticket, Wanted, digest};
use crate::backend::{Image, ImageHandle};
use crate::error::{Error, ErrorContext, Kind, Result};
use crate::model::size::MIB;
use crate::operation::{Pool, Snapshots};

/// Bytes of the image that one message covers.
const RANGE: u64 = 4 * MIB;

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
