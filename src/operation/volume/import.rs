//! Imports volumes from an archive of snapshots.
//!
//! The volumes are filled first and stay incomplete, so that no call sees them. They are completed
//! only when the whole archive was read and its last SHA-256 is right. What was filled before a crash
//! or before damage of the archive stays for an hour, and a repeat with the same archive reads
//! that part again without writing it.

use std::io::Read;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use uuid::Uuid;

use crate::error::{Error, Kind, Mismatch, Result};
use crate::model::id::NameKind;
use crate::model::{AccessMode, AccessType, Capability, CapacityRange, VolumeId, VolumeParameters};
use crate::operation::snapshot::archive::{ArchiveReader, ArchivedSnapshot};
use crate::operation::snapshot::begun::is_filled;
use crate::operation::{
    CreateVolume, Import, Offer, Pool, Purpose, Ranges, RemoteSnapshot, SnapshotRange,
    SnapshotSource, Ticket, Volume, Volumes, Wanted,
};
use crate::record::{CopyProgress, Formatted, FormattedAs, VolumeRecord, VolumeState};

/// Maximum length of a volume's name, as in CSI.
const MAX_NAME_BYTES: usize = 128;

type Archive = ArchiveReader<Box<dyn Read + Send>>;

/// An archive that is being imported.
struct Input {
    archive: Mutex<Archive>,
    /// The first error of the archive, which the copy that reads it does not return as it is.
    problem: Mutex<Option<Error>>,
    /// Called before each range.
    alive: Box<dyn Fn() + Send + Sync>,
}

impl Input {
    fn archive(&self) -> MutexGuard<'_, Archive> {
        self.archive.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn problem(&self) -> MutexGuard<'_, Option<Error>> {
        self.problem.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn range(&self, member: usize) -> Result<Option<SnapshotRange>> {
        (self.alive)();
        self.archive().range(member)
    }

    /// Reads and verifies what no volume needs of a member.
    fn skip(&self, member: usize) -> Result<()> {
        while self.range(member)?.is_some() {}
        Ok(())
    }

    /// The error of the archive, if there is one, in place of its consequence.
    fn explain(&self, error: Error) -> Error {
        self.problem().take().unwrap_or(error)
    }
}

/// A snapshot of the archive, as the source of a copy.
struct Member {
    input: Arc<Input>,
    member: usize,
    base: Option<u64>,
}

struct MemberRanges {
    input: Arc<Input>,
    member: usize,
    from: u64,
}

impl SnapshotSource for Member {
    fn node(&self) -> &str {
        "(archive)"
    }

    fn read(&self, from: u64, wanted: Wanted) -> Result<Box<dyn Ranges>> {
        let is_there = match self.base {
            Some(base) => wanted == Wanted::Differences(base),
            None => wanted == Wanted::Data,
        };
        if !is_there {
            return Err(Error::unreachable(
                "the archive",
                "it does not have this data",
            ));
        }
        Ok(Box::new(MemberRanges {
            input: self.input.clone(),
            member: self.member,
            from,
        }))
    }
}

impl MemberRanges {
    fn find(&mut self) -> Result<Option<SnapshotRange>> {
        loop {
            let range = self.input.range(self.member)?;
            let Some(range) = range else {
                return Ok(None);
            };
            if range.end() <= self.from {
                continue;
            }
            if range.offset < self.from {
                let problem = format!(
                    "has other segments than the one that was imported up to byte {} of a volume",
                    self.from
                );
                return Err(Error::invalid("archive", problem));
            }
            return Ok(Some(range));
        }
    }
}

impl Ranges for MemberRanges {
    fn next(&mut self) -> Result<Option<SnapshotRange>> {
        self.find().map_err(|error| {
            // Not a final error: what was copied before stays.
            let kept = Error::unreachable("the archive", error.to_string());
            *self.input.problem() = Some(error);
            kept
        })
    }
}

/// A volume that is to be imported.
pub(super) struct Planned {
    pub(super) create: CreateVolume,
    snapshot: ArchivedSnapshot,
    pub(super) uuid: Uuid,
    /// The volume, if an earlier call with the same content has completed it.
    pub(super) done: Option<Volume>,
}

impl Volumes {
    /// Creates the volumes of an archive; unless the request says that another archive follows, they
    /// are complete afterwards.
    pub fn import(&self, request: &Import, from: Box<dyn Read + Send>) -> Result<Vec<Volume>> {
        let archive = ArchiveReader::begin(from)?;
        let members = archive.manifest.members.clone();
        let count = members.len();
        let planned = members.into_iter();
        let planned = planned.map(|snapshot| self.plan_import(request, snapshot, count));
        let planned: Vec<Planned> = planned.collect::<Result<_>>()?;
        let uuids: Vec<Uuid> = planned.iter().map(|one| one.uuid).collect();
        let (snapshots, host) = (self.snapshots.clone(), self.host.clone());
        let input = Arc::new(Input {
            archive: Mutex::new(archive),
            problem: Mutex::default(),
            // A volume that is filled would be forgotten while a later one takes long.
            alive: Box::new(move || {
                let now = host.now();
                uuids
                    .iter()
                    .for_each(|uuid| snapshots.copies.ask(*uuid, now));
            }),
        });
        for (member, one) in planned.iter().enumerate() {
            if one.done.is_none() {
                let filled = self.fill_imported(&input, (member, one), Purpose::Fill);
                filled.map_err(|error| input.explain(error))?;
            }
            input.skip(member)?;
        }
        input.archive().end()?;
        let mut volumes = Vec::new();
        for (member, one) in planned.into_iter().enumerate() {
            volumes.push(match (request.more, one.done.clone()) {
                (_, Some(done)) => done,
                (true, None) => self.fill_imported(&input, (member, &one), Purpose::Fill)?,
                (false, None) => self.fill_imported(&input, (member, &one), Purpose::Restore)?,
            });
        }
        Ok(volumes)
    }

    /// Refuses a volume of this name that has another content, and one without the content to which
    /// the archive has the differences: what it has stays.
    pub(super) fn plan_import(
        &self,
        request: &Import,
        snapshot: ArchivedSnapshot,
        members: usize,
    ) -> Result<Planned> {
        let create = create(request, &snapshot, members)?;
        let pool = self.pools.choose_pool(create.parameters.pool.as_deref())?;
        let uuid = VolumeId::of_name(pool.id(), NameKind::Volume, &create.name).uuid;
        let found = pool.backend.volumes.get(uuid)?;
        let done = match &found {
            Some(record) if record.state == VolumeState::Ready => {
                check_content(record, snapshot.identity)?;
                Some(self.pools.volume(&pool, record))
            }
            Some(_) | None => None,
        };
        let size = create.capacity.required;
        if let (None, Some(record)) = (&done, &found)
            && snapshot.base.is_some()
            && record.size != size
        {
            let why = format!(
                "its import was begun with a size of {} bytes, not {size}; give the same size, and grow the volume later",
                record.size
            );
            return Err(Error::refused(format!("volume {}", create.name), why));
        }
        if let (None, Some(base)) = (&done, snapshot.base)
            && !continues(&pool, found.as_ref(), (base, snapshot.identity))?
        {
            let why = format!(
                "the archive has only the differences to content {base:016x}, which the volume does not have; import the archive with that content first, with --more"
            );
            return Err(Error::refused(format!("volume {}", create.name), why));
        }
        Ok(Planned {
            create,
            snapshot,
            uuid,
            done,
        })
    }

    fn fill_imported(
        &self,
        input: &Arc<Input>,
        (member, one): (usize, &Planned),
        purpose: Purpose,
    ) -> Result<Volume> {
        let snapshot = &one.snapshot;
        let source = Member {
            input: input.clone(),
            member,
            base: snapshot.base,
        };
        let offer = Offer {
            ticket: Ticket([0; 32]),
            identity: snapshot.identity,
            bases: snapshot.base.into_iter().collect(),
            size: snapshot.size,
            image_bytes: snapshot.image_bytes,
            block_size: snapshot.block_size,
            formatted: Some(formatted(snapshot)),
        };
        let remote = RemoteSnapshot {
            id: snapshot.snapshot_id.clone(),
            offer,
            source: Arc::new(source),
            purpose,
            verify: false,
            is_archived: true,
        };
        self.receive_volume(&one.create, Ok(remote))
    }
}

/// Refuses a complete volume that has another content.
pub(super) fn check_content(record: &VolumeRecord, identity: u64) -> Result<()> {
    if record.imported == Some(identity) {
        return Ok(());
    }
    let name = format!("{:?}", record.name);
    let mismatch = Mismatch::new("content", "another one", "that of the archive");
    Err(Error::exists(Kind::Volume, name, mismatch))
}

/// Whether an incomplete volume has the content of a base, or is being changed from it, or has been
/// already.
fn continues(
    pool: &Pool,
    record: Option<&VolumeRecord>,
    (base, identity): (u64, u64),
) -> Result<bool> {
    let Some((record, copy)) = record.and_then(|record| Some((record, record.copy?))) else {
        return Ok(false);
    };
    Ok(match copy.base {
        Some(other) => other == base && copy.source_modified == CopyProgress::beside(identity),
        None => [base, identity].contains(&copy.source_modified) && is_filled(pool, record)?,
    })
}

/// What the volume was formatted as. One that was never used counts as a raw device: whatever the
/// archive has, it is never formatted.
fn formatted(snapshot: &ArchivedSnapshot) -> Formatted {
    let known = snapshot.formatted.clone().filter(|it| it.complete);
    known.unwrap_or_else(Formatted::raw)
}

/// The request for a volume with the content of a snapshot.
fn create(request: &Import, snapshot: &ArchivedSnapshot, members: usize) -> Result<CreateVolume> {
    let is_raw = formatted(snapshot).kind == FormattedAs::Raw;
    let raw = Capability {
        access_type: AccessType::Block,
        access_mode: AccessMode::SingleNodeWriter,
    };
    let name = match (&request.name, members) {
        (Some(_), 2..) => {
            let problem = "is for an archive with one snapshot; use the prefix for several";
            return Err(Error::invalid("name", problem));
        }
        (Some(name), _) => name.clone(),
        (None, _) => format!("{}{}", request.prefix, snapshot.name),
    };
    if name.is_empty() || name.len() > MAX_NAME_BYTES || name.chars().any(char::is_control) {
        let problem = format!(
            "{name:?} is not valid; give 1 to {MAX_NAME_BYTES} bytes without control characters"
        );
        return Err(Error::invalid("name", problem));
    }
    Ok(CreateVolume {
        name,
        capacity: CapacityRange {
            required: request.size.unwrap_or(snapshot.size),
            limit: 0,
        },
        capabilities: match is_raw {
            true => vec![raw],
            false => snapshot.capabilities.clone(),
        },
        parameters: VolumeParameters {
            pool: Some(request.pool.clone().unwrap_or(snapshot.pool.clone())),
            allocation: snapshot.allocation,
            wipe: snapshot.wipe,
            ..VolumeParameters::default()
        },
        requisite: Vec::new(),
        content_source: None,
    })
}

#[cfg(test)]
mod tests;
