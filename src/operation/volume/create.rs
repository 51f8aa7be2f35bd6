//! CreateVolume.
//!
//! A retry after any crash finds what the first attempt created, because the ID is derived from the
//! name. An existing volume is compared with the request before the free space is checked:
//! otherwise a retry after a lost response could fail for lack of space, and the volume would leak.

use std::sync::Arc;

use crate::backend::place::lvm::raw_block;
use crate::error::{Error, Kind, Mismatch, Result, chain};
use crate::model::id::NameKind;
use crate::model::{
    AccessType, Allocation, Capability, VolumeId, VolumeParameters, Wipe, mkfs, mount_option,
};
use crate::operation::lock::Key;
use crate::operation::pools::capacity::{admit, check_setup, minimum_size};
use crate::operation::pools::lookup::check_fence;
use crate::operation::pools::pool::Pool;
use crate::operation::snapshot::begun::is_written;
use crate::operation::snapshot::remote::{Purpose, RemoteSnapshot};
use crate::operation::snapshot::restore::{Content, describe_source};
use crate::operation::{CreateVolume, Volume, Volumes};
use crate::record::{ContentSource, VolumeRecord, VolumeState};

impl Volumes {
    /// Refuses what a pool cannot have now. It comes before anything is measured, which fails where the
    /// metadata of a thin pool cannot be read.
    fn check_pool(&self, pool: &Pool, request: &CreateVolume) -> Result<()> {
        check_setup(pool)?;
        let mut access = request.capabilities.iter().map(|one| &one.access_type);
        match access.any(|access| *access == AccessType::Block) {
            true => self.check_raw_block(pool),
            false => Ok(()),
        }
    }

    /// Refuses a raw block volume where LVM on the host might use what a tenant writes to it.
    pub(in crate::operation) fn check_raw_block(&self, pool: &Pool) -> Result<()> {
        let node_record = &self.pools.settings.node_record;
        raw_block::check(pool.backend.host(), node_record, &pool.definition)
    }

    /// CreateVolume. A crash leaves an incomplete volume, which the next start or a retry cleans
    /// up.
    pub fn create_volume(&self, request: &CreateVolume) -> Result<Volume> {
        self.create_from(request, false, || match &request.content_source {
            Some(source) => self.snapshots.content(source).map(Some),
            None => Ok(None),
        })
    }

    /// CreateVolume from a snapshot of another node, or with the reason why it cannot be read. What
    /// an earlier call has copied is continued, or deleted if the snapshot does not exist.
    pub fn receive_volume(
        &self,
        request: &CreateVolume,
        remote: Result<RemoteSnapshot>,
    ) -> Result<Volume> {
        let moved = |remote: &RemoteSnapshot| remote.purpose != Purpose::Restore;
        let is_moved = remote.as_ref().is_ok_and(moved);
        self.create_from(request, is_moved, || {
            Ok(Some(Content::Remote(Box::new(remote?))))
        })
    }

    pub(super) fn create_from(
        &self,
        request: &CreateVolume,
        is_moved: bool,
        find: impl FnOnce() -> Result<Option<Content>>,
    ) -> Result<Volume> {
        let _name = self.pools.locks.acquire(Key::Name(request.name.clone()))?;
        if let Some((pool, record)) = self.find_name(&request.name)? {
            check_fence(&request.name, &record, None)?;
            return match self.mismatch(&pool, &record, request) {
                None => Ok(self.pools.volume(&pool, &record)),
                Some(mismatch) => {
                    let name = format!("{:?}", request.name);
                    Err(Error::exists(Kind::Volume, name, mismatch))
                }
            };
        }
        let made = self.make(request, find);
        made.map_err(|error| match error {
            // A later snapshot continues a volume that moves.
            Error::NotFound { .. } if is_moved => error,
            error => self.end_begun(&request.name, error),
        })
    }

    /// Creates a volume whose name is locked, and that does not exist.
    fn make(
        &self,
        request: &CreateVolume,
        find: impl FnOnce() -> Result<Option<Content>>,
    ) -> Result<Volume> {
        let home = self.pools.home().to_string();
        if !request.requisite.is_empty() && !request.requisite.contains(&home) {
            return Err(Error::TopologyMismatch { home });
        }
        let content = find()?;
        let pool = match &content {
            Some(content) => self.snapshots.pool_from(&request.parameters, content)?,
            None => self.pools.choose_pool(request.parameters.pool.as_deref())?,
        };
        self.check_pool(&pool, request)?;
        let id = VolumeId::of_name(pool.id(), NameKind::Volume, &request.name);
        let _volume = self.pools.locks.acquire(Key::Volume(id.uuid))?;
        let size = match &content {
            Some(content) => self.snapshots.size_from(request, content)?,
            None => request
                .capacity
                .resolve(minimum_size(&request.capabilities))?,
        };
        let planned = self.plan(&pool, id, &request.name, size, &request.parameters);
        let record = VolumeRecord {
            capabilities: request.capabilities.clone(),
            ..planned.map_err(|error| unfit(&pool, content.as_ref(), error))?
        };
        for fs in request
            .capabilities
            .iter()
            .filter_map(|capability| capability.access_type.fs())
        {
            mkfs::check("parameters", fs, &request.parameters.mkfs_options)?;
        }
        check_new("parameters", "volume_capabilities", &record)?;
        let record = match &content {
            Some(content) => self.snapshots.inherit(record, request, content)?,
            None => record,
        };
        if let Some(content) = &content {
            fits_disk(&pool, &record, content)?;
        }
        let content = content.as_ref();
        if is_written(&pool, &record) && content.is_none_or(|it| it.shares_with(&pool)) {
            let record = self.snapshots.write_volume(&pool, record, content)?;
            return Ok(self.pools.volume(&pool, &record));
        }
        if let Some(content) = content {
            let made = self.snapshots.make_from(&pool, record, content);
            return made.map_err(|error| match error {
                Error::Host { ref source, .. } if source.is_too_large() => {
                    unfit(&pool, Some(content), error)
                }
                other => other,
            });
        }
        // The leftover of an attempt whose cleanup failed: no caller ever received its ID.
        let ended = pool.backend.volumes.delete_unanswered(id.uuid);
        ended.map_err(Error::into_indeterminate)?;
        let record = self.snapshots.before_bases(&pool, || {
            pool.backend.create(record.clone(), &|space| {
                admit(&pool, space, request.parameters.allocation, 0, size)
            })
        })?;
        Ok(self.pools.volume(&pool, &record))
    }

    /// After a final error the caller forgets the volume, so what an earlier call has begun to fill
    /// under this name is deleted first.
    pub(super) fn end_begun(&self, name: &str, error: Error) -> Error {
        if !error.is_final() {
            return error;
        }
        let ended = self.pools.serving().into_iter().try_for_each(|pool| {
            let uuid = VolumeId::of_name(pool.id(), NameKind::Volume, name).uuid;
            let _lock = self.pools.locks.acquire(Key::Volume(uuid))?;
            pool.backend.volumes.delete_unanswered(uuid)
        });
        error.with_undo(ended)
    }

    /// The record of a new volume, or an error if the pool does not support its parameters.
    pub(in crate::operation) fn plan(
        &self,
        pool: &Pool,
        id: VolumeId,
        name: &str,
        size: u64,
        parameters: &VolumeParameters,
    ) -> Result<VolumeRecord> {
        let refuse = |field: &str, value: &str, why: &str| {
            Err(Error::invalid(
                format!("parameters.{field}"),
                format!(
                    "{value:?} is not supported by pool {}: {why}",
                    pool.definition.name
                ),
            ))
        };
        if let (Allocation::Thick, Some(why)) = (parameters.allocation, pool.thick_refusal()) {
            return refuse("allocation", "thick", why);
        }
        if let (Wipe::Zero, Some(why)) = (parameters.wipe, pool.backend.facts.zeroing_refusal) {
            return refuse("wipe", "zero", why);
        }
        let least = pool.backend.facts.min_block_size;
        let block_size = parameters
            .block_size
            .unwrap_or(pool.backend.facts.default_block_size);
        if block_size < least {
            return refuse(
                "blockSize",
                &block_size.to_string(),
                &format!("the block size of its disk is {least} bytes"),
            );
        }
        Ok(VolumeRecord {
            uuid: id.uuid,
            name: name.to_string(),
            incarnation: self.host.random_uuid(),
            state: VolumeState::Creating,
            size,
            allocation: parameters.allocation,
            block_size,
            asked_block_size: parameters.block_size,
            mkfs_options: parameters.mkfs_options.clone(),
            wipe: parameters.wipe,
            created_wipe: parameters.wipe,
            block_groups: parameters.block_groups,
            capabilities: Vec::new(),
            formatted: None,
            ephemeral: false,
            last_stage: None,
            created_at: self.host.now(),
            content_source: None,
            claim: parameters.claim.clone(),
            copy: None,
            growth: None,
            lineage: None,
            image: 0,
            fenced: None,
            lifted: None,
            imported: None,
            foreign_bytes: None,
            reverting: None,
            reverted: None,
            spare: None,
        })
    }

    /// Finds a volume by name in all pools that are served on this node. A pool that is not served
    /// is skipped: the other pools remain usable, and a StorageClass always leads to the same pool.
    pub(super) fn find_name(&self, name: &str) -> Result<Option<(Arc<Pool>, VolumeRecord)>> {
        self.pools
            .find_named(NameKind::Volume, name, |backend| &backend.volumes)
    }

    /// The first difference between an existing volume and a request with its name, for
    /// ALREADY_EXISTS.
    fn mismatch(
        &self,
        pool: &Pool,
        record: &VolumeRecord,
        request: &CreateVolume,
    ) -> Option<Mismatch> {
        if !request.capacity.admits(record.size) {
            let required = request.capacity.required;
            let range = match request.capacity.limit {
                0 => format!("at least {required}"),
                limit => format!("{required} to {limit}"),
            };
            return Some(Mismatch {
                field: "capacity_bytes",
                found: record.size.to_string(),
                wanted: range,
            });
        }
        let home = self.pools.home().to_string();
        if !request.requisite.is_empty() && !request.requisite.contains(&home) {
            return Some(Mismatch {
                field: "accessible_topology",
                found: home,
                wanted: request.requisite.join(" or "),
            });
        }
        differing(&pool.definition.name, record, request)
    }
}

/// The first parameter that differs between an existing volume and a request.
fn differing(pool: &str, record: &VolumeRecord, request: &CreateVolume) -> Option<Mismatch> {
    let block_size =
        |size: Option<u32>| size.map_or("default of the pool".into(), |size| size.to_string());
    let source =
        |source: &Option<ContentSource>| source.as_ref().map_or("nothing".into(), describe_source);
    let wanted = &request.parameters;
    let capabilities = Capability::describe_difference(&record.capabilities, &request.capabilities);
    let fields = [
        (
            "parameters.pool",
            pool.to_string(),
            wanted.pool.clone().unwrap_or(pool.to_string()),
        ),
        (
            "parameters.allocation",
            record.allocation.as_str().into(),
            wanted.allocation.as_str().into(),
        ),
        (
            "parameters.blockSize",
            block_size(record.asked_block_size),
            block_size(wanted.block_size),
        ),
        (
            "parameters.mkfsOptions",
            record.mkfs_options.join(" "),
            wanted.mkfs_options.join(" "),
        ),
        (
            "parameters.wipe",
            record.created_wipe.as_str().into(),
            wanted.wipe.as_str().into(),
        ),
        (
            "parameters.blockGroups",
            record.block_groups.to_string(),
            wanted.block_groups.to_string(),
        ),
        ("volume_capabilities", capabilities.0, capabilities.1),
        (
            "volume_content_source",
            source(&record.content_source),
            source(&request.content_source),
        ),
    ];
    let mut fields = fields.into_iter();
    fields
        .find(|(_, found, wanted)| found != wanted)
        .map(|(field, found, wanted)| Mismatch {
            field,
            found,
            wanted,
        })
}

/// Refuses a copy whose block size the disk of its pool does not support: a copy keeps the block
/// size of its source, and may be in another pool.
fn fits_disk(pool: &Pool, record: &VolumeRecord, content: &Content) -> Result<()> {
    let (had, least) = (record.block_size, pool.backend.facts.min_block_size);
    if content.pool().is_some_and(|own| own.id() == pool.id()) || had >= least {
        return Ok(());
    }
    let name = &pool.definition.name;
    let problem = format!(
        "the block size of the source is {had} bytes, which the copy must keep, but the disk of pool {name} has a block size of {least} bytes"
    );
    Err(match content {
        Content::Remote(_) | Content::File(_) => {
            unfit(pool, Some(content), Error::invalid("blockSize", problem))
        }
        _ => Error::invalid(
            "parameters.pool",
            format!("{problem}; create the copy in the pool of its source"),
        ),
    })
}

/// What a pool cannot have is final for a volume of this node. A copy of a snapshot of another node
/// may be possible in the pool of a third one.
fn unfit(pool: &Pool, content: Option<&Content>, error: Error) -> Error {
    match content {
        Some(Content::Remote(_)) if error.is_final() => Error::Unfit {
            pool: pool.definition.name.clone(),
            reason: chain(&error),
        },
        _ => error,
    }
}

/// Refuses harmful options. Only new volumes are checked, because volumes of an earlier release may
/// have such options.
pub(in crate::operation) fn check_new(
    parameters: &str,
    capabilities: &str,
    record: &VolumeRecord,
) -> Result<()> {
    for capability in &record.capabilities {
        if let AccessType::Mount { mount_flags, .. } = &capability.access_type {
            mount_option::check_new(&format!("{capabilities}.mount.mount_flags"), mount_flags)?;
        }
        if let Some(fs) = capability.access_type.fs() {
            mkfs::check_new(parameters, fs, &record.mkfs_options)?;
        }
    }
    Ok(())
}
