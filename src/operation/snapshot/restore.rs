//! CreateVolume from a snapshot or a volume. The new volume is in the pool of its source by
//! default, and is independent of the source from the beginning.

use std::sync::Arc;

use super::foreign::FileContent;
use super::remote::{Purpose, RemoteSnapshot};
use super::source::Source;
use super::thick_space_watchdog::{ThickCopy, ThickSpaceWatchdog};
use crate::backend::Image;
use crate::cut::CutMember;
use crate::cut::retry::Subject;
use crate::error::{Error, Result};
use crate::model::size::image_bytes;
use crate::model::{
    AccessType, Allocation, Capability, FsType, SnapshotParameters, VolumeParameters, mkfs,
    mount_option,
};
use crate::operation::blocking::CleanUp;
use crate::operation::lock::{Key, LockGuard};
use crate::operation::pools::capacity::{admit_copy, minimum_size};
use crate::operation::{CreateVolume, Pool, Snapshots};
use crate::record::{ContentSource, Formatted, FormattedAs, SnapshotRecord, VolumeRecord};

/// The content of a new volume.
pub(in crate::operation) enum Content {
    /// A snapshot. The lock prevents its deletion.
    Snapshot {
        pool: Arc<Pool>,
        record: Box<SnapshotRecord>,
        _lock: LockGuard,
    },
    /// A volume, in use or not.
    Volume(Box<Source>),
    /// A snapshot of another node.
    Remote(Box<RemoteSnapshot>),
    /// A file of others, with which an image of the pool can share blocks.
    File(Box<FileContent>),
}

impl Content {
    /// Its pool, if it is on this node.
    pub(in crate::operation) fn pool(&self) -> Option<&Arc<Pool>> {
        match self {
            Content::Snapshot { pool, .. } => Some(pool),
            Content::Volume(source) => Some(&source.pool),
            Content::Remote(_) | Content::File(_) => None,
        }
    }

    fn size(&self) -> u64 {
        match self {
            Content::Snapshot { record, .. } => record.size,
            Content::Volume(source) => source.record.size,
            Content::Remote(remote) => remote.size(),
            Content::File(file) => file.size(),
        }
    }

    fn block_size(&self) -> u32 {
        match self {
            Content::Snapshot { record, .. } => record.block_size,
            Content::Volume(source) => source.record.block_size,
            Content::Remote(remote) => remote.offer.block_size,
            Content::File(file) => file.file.block_size(),
        }
    }

    fn formatted(&self) -> Option<Formatted> {
        let formatted = match self {
            Content::Snapshot { record, .. } => record.formatted.as_ref(),
            Content::Volume(source) => source.record.formatted.as_ref(),
            Content::Remote(remote) => remote.offer.formatted.as_ref(),
            // Whatever is on it is found at its first use, and never formatted.
            Content::File(_) => return Some(Formatted::raw()),
        };
        formatted.cloned()
    }

    /// Whether a volume in this pool can share blocks with it.
    pub(in crate::operation) fn shares_with(&self, pool: &Pool) -> bool {
        let is_same = self.pool().is_some_and(|own| own.id() == pool.id());
        let is_file = matches!(self, Content::File(_));
        (is_same || is_file) && pool.backend.facts.shares_blocks
    }

    /// A number that is another one if the object was deleted and created again.
    pub(in crate::operation) fn identity(&self) -> u64 {
        match self {
            Content::Snapshot { record, .. } => record.cut_at,
            Content::Volume(source) => source.record.incarnation.as_u64_pair().0,
            Content::Remote(remote) => remote.offer.identity,
            Content::File(file) => file.identity,
        }
    }

    /// Whether it can only be copied into a volume that has the content of its base.
    pub(super) fn has_only_differences(&self) -> bool {
        match self {
            Content::Remote(remote) => remote.is_archived && !remote.offer.bases.is_empty(),
            Content::Snapshot { .. } | Content::Volume(_) | Content::File(_) => false,
        }
    }

    /// What the record of an imported volume says about it.
    fn imported(&self) -> Option<u64> {
        match self {
            Content::Remote(remote) => remote.is_archived.then_some(remote.offer.identity),
            Content::File(file) => Some(file.identity),
            Content::Snapshot { .. } | Content::Volume(_) => None,
        }
    }

    /// Bytes of blocks that a volume will share with a file of others.
    fn foreign_bytes(&self) -> Option<u64> {
        match self {
            Content::File(file) => Some(file.file.allocated()),
            Content::Snapshot { .. } | Content::Volume(_) | Content::Remote(_) => None,
        }
    }

    /// Why a volume gets this content.
    pub(super) fn purpose(&self) -> Purpose {
        match self {
            Content::Snapshot { .. } | Content::Volume(_) | Content::File(_) => Purpose::Restore,
            Content::Remote(remote) => remote.purpose,
        }
    }

    /// The node whose agent sends it, if that is another one.
    pub(super) fn node(&self) -> Option<&str> {
        match self {
            Content::Remote(remote) if !remote.is_archived => Some(remote.source.node()),
            Content::Remote(_) | Content::Snapshot { .. } => None,
            Content::Volume(_) | Content::File(_) => None,
        }
    }

    /// Its image, if it is on this node.
    pub(super) fn image(&self) -> Option<(&Arc<Pool>, Image)> {
        match self {
            Content::Snapshot { pool, record, .. } => Some((pool, Image::Snapshot(record.uuid))),
            Content::Volume(source) => Some((&source.pool, Image::Volume(source.id.uuid))),
            Content::Remote(_) | Content::File(_) => None,
        }
    }
}

impl Snapshots {
    /// The source of a new volume, which must exist.
    pub(in crate::operation) fn content(&self, source: &ContentSource) -> Result<Content> {
        match source {
            ContentSource::Snapshot(snapshot_id) => {
                let (_, id, _) = self.pools.get_snapshot(snapshot_id)?;
                let lock = self.pools.locks.acquire(Key::Snapshot(id.uuid))?;
                let (pool, _, record) = self.pools.get_snapshot(snapshot_id)?;
                Ok(Content::Snapshot {
                    pool,
                    record: Box::new(record),
                    _lock: lock,
                })
            }
            ContentSource::Volume(volume_id) => {
                Ok(Content::Volume(Box::new(self.source(volume_id, None)?)))
            }
        }
    }

    /// The size of a volume with this content: what was requested, and at least the size of the
    /// source.
    pub(in crate::operation) fn size_from(
        &self,
        request: &CreateVolume,
        content: &Content,
    ) -> Result<u64> {
        let least = content.size().max(minimum_size(&request.capabilities));
        let (required, limit) = (request.capacity.required, request.capacity.limit);
        let size = required.max(least);
        if limit != 0 && size > limit {
            return Err(Error::OutOfRange {
                field: "capacity_range.limit_bytes".into(),
                problem: format!("{limit} is less than the {least} bytes that the source needs"),
            });
        }
        if required != 0 && required < content.size() {
            return Err(Error::OutOfRange {
                field: "capacity_range.required_bytes".into(),
                problem: format!(
                    "{required} is less than the {} bytes of the source; request at least as much",
                    content.size()
                ),
            });
        }
        Ok(size)
    }

    /// Completes the record of a volume with what it inherits. An error if the content does not
    /// match the requested use.
    pub(in crate::operation) fn inherit(
        &self,
        record: VolumeRecord,
        request: &CreateVolume,
        content: &Content,
    ) -> Result<VolumeRecord> {
        let block_size = content.block_size();
        if let Some(asked) = record.asked_block_size.filter(|asked| *asked != block_size) {
            return Err(Error::invalid(
                "parameters.blockSize",
                format!(
                    "{asked} does not match the block size of the source, {block_size}, which the copy must keep"
                ),
            ));
        }
        let formatted = content
            .formatted()
            .map(|formatted| fitting(&formatted, &request.capabilities))
            .transpose()?;
        Ok(VolumeRecord {
            block_size,
            formatted,
            content_source: request.content_source.clone(),
            imported: content.imported(),
            foreign_bytes: content.foreign_bytes(),
            ..record
        })
    }

    /// Creates a volume that shares the blocks of its content. If its blocks are to be written then,
    /// which `copy` in the record says, it is not complete yet.
    pub(in crate::operation) fn share(
        &self,
        pool: &Arc<Pool>,
        record: &VolumeRecord,
        content: &Content,
    ) -> Result<VolumeRecord> {
        match content {
            Content::Volume(source) => self.clone_volume(pool, record, source),
            Content::Snapshot { record: from, .. } => self.filled(pool, record, || {
                let copy = Image::Volume(record.uuid);
                self.clone_snapshot(pool, from, copy)
            }),
            Content::File(file) => self.filled(pool, record, || {
                let copy = Image::Volume(record.uuid);
                pool.backend.clone_file(file.file.as_ref(), copy)?;
                file.check_unchanged()
            }),
            Content::Remote(_) => Err(Error::bug("blocks are shared within a pool")),
        }
    }

    /// Clones a volume, in use or not, by a cut.
    fn clone_volume(
        &self,
        pool: &Arc<Pool>,
        record: &VolumeRecord,
        source: &Source,
    ) -> Result<VolumeRecord> {
        let ids = [source.text.clone()];
        let parameters = SnapshotParameters::default();
        let subject = Subject {
            name: &format!("volume {}", record.name),
            volumes: &ids,
            parameters: &parameters,
        };
        self.retry(&subject, |now| {
            let (locks, sources) = self.lock_sources(&ids, None)?;
            self.check_unchanged(source)?;
            let uses = self.uses_of(&sources)?;
            let mut locks = Some(locks);
            for source in &sources {
                source.pool.backend.abort_growth(source.record.uuid)?;
            }
            self.filled(pool, record, || {
                let copies = [Image::Volume(record.uuid)];
                let members = self.members(&sources, &uses, &copies)?;
                let mut watchdog =
                    ThickSpaceWatchdog::start(of_thick(pool, record, source, &members))?;
                let cut = self.cut(&members, now, &parameters);
                // The rest takes long for thick volumes.
                drop(locks.take());
                // `complete` would do this, too. But until it is done the watchdog may empty the
                // clone, which must not happen to a complete volume.
                let mut thick = watchdog.copies().iter();
                let apart = cut.and_then(|_| thick.try_for_each(ThickCopy::unshare));
                // If the watchdog has emptied the clone, any other failure is a consequence of
                // that.
                watchdog.stop().and(apart)
            })
        })
    }

    /// Prepares a volume, fills it, gives it an identity of its own, and completes it, unless its
    /// blocks are to be written.
    fn filled(
        &self,
        pool: &Arc<Pool>,
        record: &VolumeRecord,
        fill: impl FnOnce() -> Result<()>,
    ) -> Result<VolumeRecord> {
        // A volume that an earlier call left because its cleanup failed was never reported as
        // created.
        let ended = pool.backend.volumes.delete_unanswered(record.uuid);
        ended.map_err(Error::into_indeterminate)?;
        let intent = VolumeRecord {
            copy: None,
            ..record.clone()
        };
        self.prepare(pool, &intent)?;
        let filled = fill().and_then(|()| self.identify(pool, record));
        let made = filled.and_then(|record| match record.copy {
            Some(_) => pool.backend.begin_writing(&record),
            None => pool.backend.complete(&record),
        });
        made.map_err(|first| undo_volume(pool, record, first))
    }

    pub(in crate::operation) fn prepare(
        &self,
        pool: &Arc<Pool>,
        record: &VolumeRecord,
    ) -> Result<()> {
        let mut allocation = record.allocation;
        if let Some(ContentSource::Volume(source)) = &record.content_source
            && pool.backend.facts.shares_blocks
            // A copy shares no block, and its source may be on another node.
            && record.copy.is_none()
            && self.pools.get_volume(source)?.2.allocation == Allocation::Thick
        {
            // In the end the clone shares no block with a thick volume, so it needs all its blocks
            // now.
            allocation = Allocation::Thick;
        }
        let is_of_thick = pool.backend.has_thick_source(record)?;
        self.before_bases(pool, || {
            pool.backend.prepare(record, &|space| {
                admit_copy(pool, space, allocation, is_of_thick, record.size)
            })
        })
    }

    /// Gives a filled image an identity of its own.
    pub(super) fn identify(&self, pool: &Pool, record: &VolumeRecord) -> Result<VolumeRecord> {
        let mut record = record.clone();
        if let Some(formatted) = &mut record.formatted
            && formatted.kind == FormattedAs::Btrfs
            && formatted.complete
        {
            // Two btrfs with the same fsid cannot be mounted on one node. No process has used the
            // image yet: a crash here leaves an intent, and the volume is created again.
            formatted.uuid = self.host.random_uuid();
            let image = Image::Volume(record.uuid);
            pool.backend.renew_fs_id(image, formatted.uuid)?;
        }
        Ok(record)
    }

    /// The pool of a volume that has a source: that of the source if it is on this node, unless the
    /// class names another one.
    pub(in crate::operation) fn pool_from(
        &self,
        parameters: &VolumeParameters,
        content: &Content,
    ) -> Result<Arc<Pool>> {
        match (&parameters.pool, content.pool()) {
            (None, Some(pool)) => Ok(pool.clone()),
            (named, _) => self.pools.choose_pool(named.as_deref()),
        }
    }
}

/// The clone of a thick volume, for the watchdog; empty if the source is not thick.
fn of_thick(
    pool: &Arc<Pool>,
    record: &VolumeRecord,
    source: &Source,
    members: &[CutMember],
) -> Vec<ThickCopy> {
    let thick = source.record.allocation == Allocation::Thick;
    let copy = |member: &CutMember| ThickCopy {
        pool: pool.clone(),
        image: Image::Volume(record.uuid),
        bytes: image_bytes(source.record.size),
        emptied: member.emptied.clone(),
    };
    members.iter().filter(|_| thick).map(copy).collect()
}

/// Deletes a volume whose creation failed. A spare is hidden, and the cleanup frees its blocks: the
/// caller holds the lock of a fenced volume, whose revert may be aborted.
pub(super) fn undo_volume(pool: &Pool, record: &VolumeRecord, first: Error) -> Error {
    let _clean_up = CleanUp::after(&first);
    first.with_undo(match record.spare {
        Some(_) => pool.backend.hide_spare(record.uuid),
        None => pool.backend.volumes.delete(record.uuid),
    })
}

/// Returns the format that is recorded for the new volume, or an error if it does not match the
/// capabilities. A volume with a file system may be used as a block device. The content of a raw
/// device cannot be mounted, because it is unknown.
fn fitting(formatted: &Formatted, capabilities: &[Capability]) -> Result<Formatted> {
    let mut kinds = capabilities
        .iter()
        .map(|capability| &capability.access_type);
    let refuse = |wanted: &str| {
        Err(Error::invalid(
            "volume_capabilities",
            format!(
                "{wanted} does not match the source, which is formatted as {}",
                formatted.kind.as_str()
            ),
        ))
    };
    let Some(fs) = formatted.kind.fs() else {
        return match kinds.find(|kind| matches!(kind, AccessType::Mount { .. })) {
            Some(_) => refuse("access type mount"),
            None => Ok(formatted.clone()),
        };
    };
    let other = |kind: &&AccessType| kind.fs().is_some_and(|wanted| wanted != fs);
    let said = |kind: &AccessType| match kind {
        AccessType::Mount {
            fs_type: Some(fs), ..
        } => Some(*fs),
        AccessType::Mount { fs_type: None, .. } | AccessType::Block => None,
    };
    if let Some(wanted) = kinds.clone().find(other).and_then(said) {
        return refuse(wanted.name());
    }
    if kinds.any(|kind| matches!(kind, AccessType::Block)) {
        return Ok(Formatted::raw());
    }
    Ok(formatted.clone())
}

/// The options that a volume is mounted with. An xfs that is a copy, or that was created by its
/// user, may have the UUID of another one, and both may be mounted on one node. In a file system
/// that was created by its user, setuid and device files have no effect, and its own settings do
/// not decide what its errors do to the node. A volume of an earlier release may request harmful
/// options; it is mounted without them.
pub(in crate::operation) fn copy_options(
    record: &VolumeRecord,
    fs: FsType,
    given: &[String],
) -> Vec<String> {
    let found = record.formatted.as_ref().is_some_and(|it| it.found);
    let (mut options, mut harmful) = mount_option::harmless(given);
    let has = |key: &str| given.iter().any(|option| mount_option::key(option) == key);
    let mut add = |option: &str| options.push(option.to_string());
    if found {
        add("nosuid");
        add("nodev");
    }
    let panics = mkfs::without_error_policy(fs, &record.mkfs_options).1 && !has("errors");
    if panics {
        harmful.push("mkfs -e");
    }
    match fs {
        FsType::Ext4 if found || panics => add("errors=remount-ro"),
        FsType::Xfs if (found || record.content_source.is_some()) && !has("nouuid") => {
            add("nouuid");
        }
        FsType::Ext4 | FsType::Xfs | FsType::Btrfs => {}
    }
    if !harmful.is_empty() {
        tracing::warn!(
            volume = %record.uuid, options = harmful.join(", "),
            "mounting without options that stop the machine at an error or skip recovery"
        );
    }
    options
}

/// Describes a source in messages.
pub(in crate::operation) fn describe_source(source: &ContentSource) -> String {
    match source {
        ContentSource::Snapshot(id) => format!("snapshot {id}"),
        ContentSource::Volume(id) => format!("volume {id}"),
    }
}
