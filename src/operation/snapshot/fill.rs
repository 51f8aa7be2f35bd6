//! Volumes whose content is copied or shared: where blocks cannot be shared, from an image of this
//! node or from another node.

use std::sync::Arc;
use std::time::Instant;

use super::begun::{find_based, find_begun, is_filled, is_written};
use super::copies::Copying;
use super::copy::{Filling, Origin, begin_at};
use super::remote::{Purpose, Receiving, RemoteSnapshot, Wanted, cost};
use super::restore::{Content, undo_volume};
use super::running::{CopyKind, CopyOf};
use crate::backend::{Image, ImageHandle};
use crate::error::{Error, ErrorContext, HostError, Result};
use crate::model::VolumeId;
use crate::model::size::MIB;
use crate::operation::{Pool, Snapshots, Volume};
use crate::record::{ContentSource, CopyProgress, VolumeRecord};

/// Maximum length of a range that is read back at once.
const MAX_VERIFIED_BYTES: u64 = 16 * MIB;

/// The copy that fills a planned volume, or writes its blocks if it has no content.
pub(super) fn what_fills(pool: &Pool, record: &VolumeRecord, content: Option<&Content>) -> CopyOf {
    let is_of_volume = matches!(record.content_source, Some(ContentSource::Volume(_)));
    let purpose = content.map(Content::purpose);
    let kind = match purpose {
        _ if record.spare.is_some() => CopyKind::Revert,
        _ if record.imported.is_some() => CopyKind::Import,
        Some(Purpose::Fill | Purpose::Move) => CopyKind::Move,
        Some(Purpose::Restore) if is_of_volume => CopyKind::Clone,
        Some(Purpose::Restore) => CopyKind::Restore,
        None => CopyKind::Write,
    };
    CopyOf {
        kind,
        id: VolumeId {
            pool: pool.id(),
            uuid: record.spare.as_ref().map_or(record.uuid, |spare| spare.of),
        },
        name: record.name.clone(),
        claim: record.claim.clone(),
        source_node: content.and_then(Content::node).map(str::to_string),
    }
}

impl Snapshots {
    /// Creates the volume of a planned record, with the content. On an error nothing is left, or
    /// the error is [`Error::RollbackFailed`]. A crash leaves an intent, which a repeat or the next
    /// start cleans up.
    pub(in crate::operation) fn make_from(
        &self,
        pool: &Arc<Pool>,
        record: VolumeRecord,
        content: &Content,
    ) -> Result<Volume> {
        if !content.shares_with(pool) {
            return self.copy_volume(pool, record, content);
        }
        let made = self.share(pool, &record, content);
        made.map(|record| self.pools.volume(pool, &record))
    }

    /// Fills a volume where blocks cannot be shared. If a stop or a crash interrupted the copy, a
    /// repeat continues it if the source has not changed since.
    fn copy_volume(
        &self,
        pool: &Arc<Pool>,
        record: VolumeRecord,
        content: &Content,
    ) -> Result<Volume> {
        self.copies.ask(record.uuid, self.host.now());
        let of_volume = match content {
            Content::Snapshot { .. } | Content::Remote(_) | Content::File(_) => None,
            Content::Volume(source) => Some(source.as_ref()),
        };
        let pools = [content.pool().unwrap_or(pool).id(), pool.id()];
        let of = what_fills(pool, &record, Some(content));
        let copying = self.begin_copy(of, of_volume, pools)?;
        let opened = match content.image() {
            Some((of, image)) => Some(begin_at(of, image)?),
            None => None,
        };
        let remote = CopyProgress {
            copied: 0,
            source_modified: content.identity(),
            base: None,
        };
        let begin = opened.as_ref().map_or(remote, |(_, begin)| *begin);
        let begun = match (find_begun(pool, &record, begin.source_modified)?, content) {
            (None, Content::Remote(remote)) => find_based(pool, &record, &remote.offer)?,
            (begun, _) => begun,
        };
        let mut record = match begun {
            Some(begun) => begun,
            None if content.has_only_differences() => {
                let volume = format!("the content of volume {}", record.name);
                let why = "the archive has only the differences to another content; import that first, with the same options and --more";
                return Err(Error::unreachable(volume, why));
            }
            None => {
                let mut record = record;
                record.copy = Some(begin);
                let ended = pool.backend.volumes.delete_unanswered(record.uuid);
                ended.map_err(Error::into_indeterminate)?;
                self.prepare(pool, &record)?;
                record
            }
        };
        let source = opened.as_ref().map(|(source, _)| source);
        let copied = self.fill_from(pool, &mut record, &copying, (content, source));
        let done = copied.and_then(|()| self.end_copy(pool, record.clone(), content));
        match done {
            Ok(record) => Ok(self.pools.volume(pool, &record)),
            // What was copied stays for a repeat.
            Err(error @ (Error::Stopping | Error::Unreachable { .. })) => Err(error),
            Err(error @ Error::NotFound { .. }) if content.purpose() != Purpose::Restore => {
                Err(error)
            }
            Err(first) => Err(undo_volume(pool, &record, first)),
        }
    }

    /// Completes a volume with its whole content, or records which content it has if a later call
    /// continues.
    fn end_copy(
        &self,
        pool: &Pool,
        record: VolumeRecord,
        content: &Content,
    ) -> Result<VolumeRecord> {
        match content.purpose() {
            Purpose::Restore => {
                let record = self.identify(pool, &record)?;
                pool.backend.complete(&record)
            }
            // It is the same volume, so its file system keeps its identity.
            Purpose::Move => pool.backend.complete(&record),
            Purpose::Fill => {
                let length = pool.backend.find_length(Image::Volume(record.uuid))?;
                let copy = Some(CopyProgress {
                    copied: length.unwrap_or(0),
                    source_modified: content.identity(),
                    base: None,
                });
                let record = VolumeRecord { copy, ..record };
                pool.backend.update(&record)?;
                Ok(record)
            }
        }
    }

    /// Copies what is not copied yet according to the record.
    fn fill_from(
        &self,
        pool: &Pool,
        record: &mut VolumeRecord,
        copying: &Copying<'_>,
        (content, source): (&Content, Option<&ImageHandle>),
    ) -> Result<()> {
        let image = Image::Volume(record.uuid);
        let from = record.copy.unwrap_or(CopyProgress {
            copied: 0,
            source_modified: content.identity(),
            base: None,
        });
        let is_filled = is_filled(pool, record)?;
        if is_filled && content.purpose() == Purpose::Fill {
            return Ok(());
        }
        let origin = match (content, source) {
            (Content::Remote(_), _) if is_filled => None,
            (Content::Remote(remote), _) => {
                let receiving = Receiving::begin(remote, &from, &self.received_bytes)?;
                if from.base.is_some() {
                    // From here on the image is a mixture until all differences are copied.
                    pool.backend.update(record)?;
                }
                Some(Origin::Remote(receiving))
            }
            (_, source) => source.map(Origin::Image),
        };
        let bytes = origin.as_ref().map_or(0, Origin::bytes);
        pool.backend.lengthen(image, bytes)?;
        let target = pool.backend.open_image(image)?;
        let reserves = is_written(pool, record);
        let beyond = if reserves { target.bytes() } else { 0 };
        let filling = Filling {
            image,
            source: origin,
            target: &target,
            reserves,
            range: from.copied..bytes.max(beyond),
        };
        self.fill(copying, filling, |copied| {
            record.copy = Some(CopyProgress { copied, ..from });
            pool.backend.update(record)
        })?;
        match content {
            Content::Remote(remote) if remote.verify => self.verify_copy(copying, remote, &target),
            _ => Ok(()),
        }
    }

    /// Reads a copy back, and compares it with its source.
    pub(super) fn verify_copy(
        &self,
        copying: &Copying<'_>,
        remote: &RemoteSnapshot,
        target: &ImageHandle,
    ) -> Result<()> {
        let doing = || format!("verify the copy of snapshot {}", remote.id);
        let mut digests = remote.source.read(0, Wanted::Digests)?;
        let mut at = 0;
        while at < remote.offer.image_bytes {
            copying.check()?;
            if self.pools.in_flight.is_stopping() {
                return Err(Error::Stopping);
            }
            let begun = Instant::now();
            let range = digests.next()?;
            let range =
                range.ok_or_else(|| remote.failed("it did not send all digests of a snapshot"))?;
            let length = range.length;
            if range.offset != at || length == 0 || length > MAX_VERIFIED_BYTES {
                return Err(remote.failed("it sent digests of other ranges of a snapshot"));
            }
            let pieces = target.read(at, length).context(doing)?;
            let bytes = cost(&pieces, length);
            let next = self.copies.step(begun, copying.pools(), bytes);
            let digest = range.checksum;
            if digest.is_none_or(|digest| !digest.is_of(&[], &pieces)) {
                let what = format!("the range from {at} on differs from its source");
                return Err(HostError::unexpected("verify", "the copy", what)).context(doing);
            }
            at += length;
            self.host
                .pause(next.saturating_duration_since(Instant::now()));
        }
        Ok(())
    }
}
