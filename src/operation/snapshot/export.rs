//! Exports snapshots as an archive, for a backup program or another cluster.

use std::io::Write;

use super::archive::{ArchiveWriter, ArchivedGroup, ArchivedSnapshot, Manifest};
use super::metadata::are_of_one_volume;
use super::outgoing::identity;
use super::remote::Wanted;
use super::running::{CopyKind, CopyOf};
use crate::error::{Error, Kind, Result};
use crate::model::{SnapshotId, VolumeId};
use crate::operation::{Export, OutgoingRead, Pool, Snapshots};
use crate::record::{Formatted, SnapshotRecord};

/// The reader of an export in messages. No node has such a name.
const READER: &str = "(export)";

impl Snapshots {
    /// Writes an archive of snapshots: of one, or of members of one group. All of them, and their
    /// bases, are kept from deletion from before the first byte to the last one. It changes nothing.
    pub fn export(&self, request: &Export, to: &mut dyn Write) -> Result<()> {
        let mut bases = Vec::new();
        for id in &request.base_snapshot_ids {
            bases.push((id.as_str(), self.pools.get_snapshot_or_base(id)?.2, false));
        }
        let (mut members, mut reads, mut records) = (Vec::new(), Vec::new(), Vec::new());
        for id in &request.snapshot_ids {
            let (pool, _, record) = self.pools.get_snapshot(id)?;
            let mut same = bases.iter_mut();
            let base = same.find(|(_, base, _)| are_of_one_volume(base, &record));
            let base = base.map(|(id, _, is_used)| {
                *is_used = true;
                *id
            });
            let (member, outgoing, of) = self.member(&pool, (id, &record), base)?;
            members.push(member);
            reads.push((outgoing, of));
            records.push(record);
        }
        if let Some((id, ..)) = bases.iter().find(|(_, _, is_used)| !is_used) {
            let problem = format!("{id} is not a snapshot of the same volume as the exported one");
            return Err(Error::invalid("base_snapshot_id", problem));
        }
        let manifest = Manifest {
            group: group_of(&records)?,
            members,
        };
        let mut archive = ArchiveWriter::begin(to, &manifest)?;
        for (member, (mut outgoing, of)) in (0..).zip(reads) {
            let copying = self.copies.listed.begin(of);
            copying.starts(0, outgoing.bytes());
            while let Some(range) = self.read_next(&mut outgoing)? {
                archive.segment(member, &range)?;
                copying.reached(range.end());
            }
        }
        archive.end()
    }

    /// What the manifest says about a snapshot, its opened image, and the copy that exports it.
    fn member(
        &self,
        pool: &Pool,
        (id, record): (&str, &SnapshotRecord),
        base: Option<&str>,
    ) -> Result<(ArchivedSnapshot, OutgoingRead, CopyOf)> {
        let bases: Vec<String> = base.map(str::to_string).into_iter().collect();
        let offer = self.offer(id, READER, &bases)?;
        let wanted = match (base, offer.bases.first()) {
            (None, _) => Wanted::Data,
            (Some(_), Some(base)) => Wanted::Differences(*base),
            (Some(base), None) => {
                let name = &pool.definition.name;
                let why =
                    format!("pool {name} cannot compare it with {base}; export it without a base");
                return Err(Error::refused(format!("snapshot {id}"), why));
            }
        };
        if offer.identity != identity(record) {
            return Err(Error::not_found(Kind::Snapshot, id));
        }
        let outgoing = self.open_granted(&offer.ticket, &|_| true, (0, wanted))?;
        let volume = pool.backend.volumes.get(record.source)?;
        let volume = volume.filter(|volume| volume.incarnation == record.source_incarnation);
        let volume_id = VolumeId {
            pool: pool.id(),
            uuid: record.source,
        };
        let of = CopyOf {
            kind: CopyKind::Export,
            id: SnapshotId {
                pool: pool.id(),
                uuid: record.uuid,
            },
            name: String::new(),
            claim: volume.as_ref().and_then(|volume| volume.claim.clone()),
            source_node: None,
        };
        let member = ArchivedSnapshot {
            snapshot_id: id.to_string(),
            volume_id: volume_id.to_string(),
            name: volume.map_or_else(|| record.name.clone(), |volume| volume.name),
            pool: pool.definition.name.clone(),
            size: record.size,
            image_bytes: offer.image_bytes,
            block_size: record.block_size,
            allocation: record.allocation,
            wipe: record.wipe,
            formatted: record.formatted.clone().filter(is_whole),
            capabilities: record.capabilities.clone(),
            cut_at: record.cut_at,
            level: record.level,
            identity: offer.identity,
            base: base.and(offer.bases.first().copied()),
        };
        Ok((member, outgoing, of))
    }
}

fn is_whole(formatted: &Formatted) -> bool {
    formatted.complete
}

/// The group of several snapshots; an error unless all were cut at one moment.
fn group_of(records: &[SnapshotRecord]) -> Result<Option<ArchivedGroup>> {
    let Some(first) = records.first() else {
        return Err(Error::invalid("snapshot_id", "is missing"));
    };
    let is_member = |one: &SnapshotRecord| {
        let group = |record: &SnapshotRecord| record.group.as_ref().map(|of| of.id);
        group(one).is_some() && group(one) == group(first) && one.attempt == first.attempt
    };
    if records.len() > 1 && !records.iter().all(is_member) {
        let problem =
            "names several snapshots that are not members of one group; export them one by one";
        return Err(Error::invalid("snapshot_id", problem));
    }
    let group = first.group.as_ref();
    Ok(group.map(|of| ArchivedGroup {
        id: of.id.to_string(),
        members: of.members.clone(),
    }))
}
