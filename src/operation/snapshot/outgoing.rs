//! Snapshots that agents of other nodes read.
//!
//! A reader needs a ticket, which the router obtains for one reader, one snapshot and one hour.
//! Tickets are kept in memory, so a restart ends them; the router then obtains others. While a
//! snapshot is read it is not deleted, nor is the snapshot to which it is compared.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

use super::grants::{Grant, Reader, TICKET_SECONDS};
use super::metadata::{RANGE_ALIGNMENT_BYTES, Side, Walk, are_of_one_volume};
use super::remote::{Checksum, Offer, SnapshotRange, Ticket, Wanted, cost, data};
use crate::backend::Image;
use crate::error::{Error, ErrorContext, Kind, Result};
use crate::host::Piece;
use crate::model::size::MIB;
use crate::operation::{Pool, Snapshots};
use crate::record::SnapshotRecord;

/// Bytes of the image that one message covers, or bytes of data of a message with differences.
const RANGE_BYTES: u64 = 4 * MIB;
/// Maximum number of bytes that are read for a message with differences. Those that are zeros are
/// not sent.
const MAX_READ_BYTES: u64 = 256 * MIB;

/// A snapshot that is being read from its beginning or from an offset on.
pub struct OutgoingRead {
    pool: Arc<Pool>,
    snapshot: Side,
    at: u64,
    wanted: Wanted,
    /// The base, and where the snapshot differs from it.
    differences: Option<(Side, Walk)>,
    _reader: Reader,
}

impl OutgoingRead {
    /// Length of the image that is read.
    pub(super) fn bytes(&self) -> u64 {
        self.snapshot.image.bytes()
    }
}

impl Snapshots {
    /// Grants a snapshot to the agent of a node, with those of the bases to which it can be compared.
    pub fn offer(&self, snapshot_id: &str, reader: &str, bases: &[String]) -> Result<Offer> {
        let (pool, id, record) = self.pools.get_snapshot(snapshot_id)?;
        let image = pool.backend.open_image(Image::Snapshot(id.uuid))?;
        let now = self.host.now();
        // Elsewhere, two snapshots have no block in common.
        let can_compare = pool.backend.facts.shares_blocks;
        let named = bases.iter().filter(|_| can_compare);
        let comparable = named.filter_map(|base| {
            // Without this one, the copy takes longer.
            let (_, _, found) = self.pools.get_snapshot_or_base(base).ok()?;
            are_of_one_volume(&found, &record).then(|| (identity(&found), base.clone()))
        });
        let grant = Grant {
            snapshot_id: snapshot_id.to_string(),
            identity: identity(&record),
            reader: reader.to_string(),
            bases: comparable.collect(),
            until: now.saturating_add(TICKET_SECONDS),
        };
        let bases = grant.bases.iter().map(|(identity, _)| *identity).collect();
        let ticket = self.grants.grant(grant, now, || self.new_ticket())?;
        Ok(Offer {
            ticket,
            identity: identity(&record),
            bases,
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
    pub fn open_granted(
        &self,
        ticket: &Ticket,
        is_reader: &dyn Fn(&str) -> bool,
        (from, wanted): (u64, Wanted),
    ) -> Result<OutgoingRead> {
        let grant = self.grants.find(ticket, self.host.now(), is_reader);
        let grant = grant.ok_or_else(|| {
            let why = "has expired, or was not issued to this caller; the router obtains a new one when the call is repeated";
            Error::refused("the ticket", why)
        })?;
        let base = match wanted {
            Wanted::Differences(base) => Some(granted_base(&grant, base, from)?),
            Wanted::Data | Wanted::Digests => None,
        };
        let uuid = |id: &str| Ok::<_, Error>(self.pools.get_snapshot_or_base(id)?.1.uuid);
        let mut uuids = vec![uuid(&grant.snapshot_id)?];
        if let Some(id) = base {
            uuids.push(uuid(id).map_err(|error| base_is_gone(id, &error))?);
        }
        let reader = self.grants.begin_read(uuids, &grant.reader)?;
        // They cannot be deleted any more.
        let (pool, snapshot) = self.granted(&grant.snapshot_id, grant.identity)?;
        let differences = match (base, wanted) {
            (Some(id), Wanted::Differences(identity)) => {
                let base = self.granted(id, identity);
                let (_, base) = base.map_err(|error| base_is_gone(id, &error))?;
                Some((base, Walk::new(from, snapshot.image.bytes())))
            }
            _ => None,
        };
        tracing::info!(
            snapshot = grant.snapshot_id,
            reader = grant.reader,
            from,
            of = snapshot.image.bytes(),
            ?wanted,
            "sending a snapshot"
        );
        Ok(OutgoingRead {
            pool,
            snapshot,
            at: from,
            wanted,
            differences,
            _reader: reader,
        })
    }

    /// The snapshot with an ID, unless another one has the ID by now.
    fn granted(&self, snapshot_id: &str, granted: u64) -> Result<(Arc<Pool>, Side)> {
        let (pool, id, record) = self.pools.get_snapshot_or_base(snapshot_id)?;
        if identity(&record) != granted {
            return Err(Error::not_found(Kind::Snapshot, snapshot_id));
        }
        let image = pool.backend.open_image(Image::Snapshot(id.uuid))?;
        Ok((pool, Side { record, image }))
    }

    /// The next range of a snapshot that is being read, at a bounded rate; `None` at its end. It has a checksum only if
    /// digests are wanted: where it goes decides which one it needs.
    pub fn read_next(&self, outgoing: &mut OutgoingRead) -> Result<Option<SnapshotRange>> {
        if self.pools.in_flight.is_stopping() {
            return Err(Error::Stopping);
        }
        let begun = Instant::now();
        let (offset, end) = (outgoing.at, outgoing.snapshot.image.bytes());
        if offset >= end {
            return Ok(None);
        }
        let pools = [outgoing.pool.id(); 2];
        let (mut sent, bytes) = match &mut outgoing.differences {
            Some((base, walk)) => {
                let sent = read_differences(&outgoing.snapshot, base, (offset, walk))?;
                let bytes = sent.cost();
                (sent, bytes)
            }
            None => {
                let length = RANGE_BYTES.min(end - offset);
                let sent = read_all(&outgoing.snapshot, (offset, length), outgoing.wanted)?;
                let bytes = cost(&sent.pieces, sent.length);
                (sent, bytes)
            }
        };
        let next = self.copies.step(begun, pools, bytes);
        if outgoing.wanted == Wanted::Digests {
            sent.pieces.clear();
        }
        outgoing.at = offset + sent.length;
        self.lent_bytes
            .fetch_add(data(&sent.pieces), Ordering::Relaxed);
        self.host
            .pause(next.saturating_duration_since(Instant::now()));
        Ok(Some(sent))
    }

    /// UUIDs of the snapshots that are being read.
    pub fn read_snapshots(&self) -> Vec<String> {
        self.grants.read_snapshots()
    }

    /// The number of copies to other nodes that are running.
    pub fn readers(&self) -> usize {
        self.grants.readers()
    }

    /// Bytes sent to other nodes since the start.
    pub fn sent_bytes(&self) -> u64 {
        self.lent_bytes.load(Ordering::Relaxed)
    }
}

/// A number that is another one if the snapshot was deleted and created again.
pub(in crate::operation) fn identity(record: &SnapshotRecord) -> u64 {
    record.incarnation.as_u64_pair().0
}

/// The ID of a base that was granted.
fn granted_base(grant: &Grant, identity: u64, from: u64) -> Result<&str> {
    if !from.is_multiple_of(RANGE_ALIGNMENT_BYTES) {
        let problem = format!("is not a multiple of {RANGE_ALIGNMENT_BYTES}");
        return Err(Error::invalid("from", problem));
    }
    let mut bases = grant.bases.iter();
    let base = bases.find(|(granted, _)| *granted == identity);
    let base = base.ok_or_else(|| Error::invalid("base_identity", "is not in the offer"))?;
    Ok(&base.1)
}

/// This is no final error of the copy: the next offer is made without this base.
fn base_is_gone(id: &str, error: &Error) -> Error {
    let why = format!("cannot be compared any more ({error}); repeat the call");
    Error::refused(format!("snapshot {id}"), why)
}

fn read(snapshot: &Side, offset: u64, length: u64) -> Result<Vec<Piece>> {
    let pieces = snapshot.image.read(offset, length);
    pieces.context(|| "read a snapshot for another node".into())
}

fn read_all(
    snapshot: &Side,
    (offset, length): (u64, u64),
    wanted: Wanted,
) -> Result<SnapshotRange> {
    let pieces = read(snapshot, offset, length)?;
    Ok(SnapshotRange {
        offset,
        length,
        checksum: (wanted == Wanted::Digests).then(|| Checksum::sha256(&[], &pieces)),
        pieces,
        changed: Vec::new(),
    })
}

/// Reads what differs from an offset on.
fn read_differences(
    snapshot: &Side,
    base: &Side,
    (offset, walk): (u64, &mut Walk),
) -> Result<SnapshotRange> {
    if walk.ranges.is_empty() && walk.at < walk.end {
        walk.step(Some(base), snapshot)?;
    }
    let (mut pieces, mut changed) = (Vec::new(), Vec::new());
    let (mut sent, mut total) = (0, 0);
    for (start, end) in &mut walk.ranges {
        let begin = *start;
        while *start < *end && sent < RANGE_BYTES && total < MAX_READ_BYTES {
            let length = (RANGE_BYTES - sent).min(*end - *start);
            let found = read(snapshot, *start, length)?;
            sent += data(&found);
            pieces.extend(found);
            total += length;
            *start += length;
        }
        if *start > begin {
            changed.push(begin..*start);
        }
    }
    walk.ranges.retain(|(start, end)| start < end);
    let next = walk.ranges.first().map_or(walk.at, |(start, _)| *start);
    Ok(SnapshotRange {
        offset,
        length: next - offset,
        checksum: None,
        pieces,
        changed,
    })
}
