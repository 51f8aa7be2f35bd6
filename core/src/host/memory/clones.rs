//! Copies of images: shared blocks, copies by ranges, and what makes a copy invalid.
//!
//! A copy contains what the image holds; data that a mounted file system has not written back is
//! missing from it. A copy that was made in pieces concurrently with writers, was interrupted, or
//! is not finished has a *flaw*: attaching it or copying from it is a violation.

use std::collections::HashSet;
use std::convert::Infallible;
use std::ops::Range;
use std::path::Path;

use nix::errno::Errno;
use uuid::Uuid;

use super::disk::{BLOCK, Copying, Data, Ino};
use super::freezer::Froze;
use super::machine::{Machine, Process};
use super::mounts::Shown;
use super::perform::Acted;
use crate::error::HostCause;
use crate::host::difference::Differences;
use crate::host::known::{Map, Memory};
use crate::host::{Effect, Extent, Known};
use crate::model::FsType;

const BESIDE_WRITERS: &str = "it was copied in pieces beside its writers";
const CUT_OFF: &str = "what made it was cut off";
pub(super) const UNFINISHED: &str = "its copy isn't finished";

/// Records of an image's map what the real host records: the whole map, or where it differs from
/// the recorded one.
fn note(known: &mut Memory, now: Vec<Extent>, size: u64) {
    known.set_extents(now.len() as u64);
    if !known.is_last {
        let mut map = known.map();
        now.iter().for_each(|run| map.see(run));
        return known.remember(map);
    }
    let now = now.into_iter().map(Ok::<_, Infallible>);
    let before = known.runs.iter().flat_map(Map::runs).map(Ok);
    let redone = Differences::new(now, before, 0, size).flatten();
    known.redone.extend(redone);
}

/// Address at which reserved blocks of images are reported: far from all others, and different for
/// each image.
const RESERVED_AT: u64 = 1 << 50;

impl Machine {
    /// Performs the effects that create copies.
    pub(super) fn act_on_copy(
        &mut self,
        process: Process,
        effect: &Effect<'_>,
    ) -> Result<Acted, HostCause> {
        match effect {
            Effect::CloneWhole { source, target } => self.clone_whole(process, source, target),
            Effect::ClonePreFreeze { source, target } => self.clone_ahead(process, source, target),
            Effect::CloneDelta {
                source,
                target,
                known,
            } => self.clone_rest(process, source, target, known),
            Effect::Unshare {
                path,
                offset,
                length,
            } => self.unshare(process, path, *offset, *length),
            Effect::CopyRange {
                source,
                target,
                offset,
                length,
            } => self.copy_range(process, source, target, *offset, *length),
            Effect::WriteRange {
                target,
                offset,
                length,
                pieces,
                zeros,
            } => self.write_range(process, target, (*offset, *length), (pieces, zeros)),
            Effect::RenewFsId { image, uuid } => self.renew_fs_id(process, image, *uuid),
            Effect::MakeLike { path, source } => {
                self.must_find(process, source)?;
                let slot = self.slot(process, path)?;
                self.disk.make_file(&slot)?;
                Ok(Acted::Plain)
            }
            other => Err(HostCause::Unexpected(format!(
                "{} copies nothing",
                other.name()
            ))),
        }
    }

    /// Whether an image cannot change: every device on it is idle, read-only or frozen.
    fn is_still(&self, ino: Ino) -> bool {
        let below = self.loops_on(ino);
        let above: Vec<u32> = below.iter().flat_map(|lower| self.above(*lower)).collect();
        below.into_iter().chain(above).all(|number| {
            let Some(dev) = self.loops.get(&number).filter(|dev| !dev.read_only) else {
                return true;
            };
            if self.is_suspended(number) {
                return true;
            }
            match self.supers.get(&number) {
                Some(found) => found.read_only || self.frozen.contains_key(&number),
                None => {
                    let bound = |shown: Shown| shown == Shown::Node(number);
                    !dev.is_foreign && !self.mounts.iter().any(|mounted| bound(mounted.shown))
                }
            }
        })
    }

    /// Whether a device could change its image, or show it to users: any loop device, but only a
    /// mapped device that is mounted or bound.
    pub(super) fn is_used(&self, number: u32) -> bool {
        let is_mapped = self
            .loops
            .get(&number)
            .is_some_and(|dev| dev.mapped.is_some());
        let shows = |shown: Shown| shown == Shown::Node(number) || shown == Shown::Fs(number);
        !is_mapped || self.mounts.iter().any(|mounted| shows(mounted.shown))
    }

    /// Whether the driver's guard has frozen the file system in an image.
    fn is_frozen_by_us(&self, ino: Ino) -> bool {
        let ours = |number| matches!(self.frozen.get(number), Some(Froze::Session(_)));
        self.loops_on(ino).iter().any(ours)
    }

    /// Addresses of the blocks that files other than this one have.
    pub(super) fn places_of_others(&self, ino: Ino) -> HashSet<u64> {
        let open = self.open_inodes();
        self.disk.places(open, |other| other != ino)
    }

    /// Whether the block of an image at an index is shared with another.
    pub(super) fn shares(&self, ino: Ino, index: usize) -> bool {
        let place = self
            .disk
            .file(ino)
            .ok()
            .and_then(|file| file.live.map.get(index));
        place.is_some_and(|place| self.places_of_others(ino).contains(place))
    }

    /// The two inodes of a copy; the violations of using them are recorded.
    fn ends(
        &mut self,
        process: Process,
        source: &Path,
        target: &Path,
    ) -> Result<(Ino, Ino), Errno> {
        let from = self.must_find(process, source)?;
        let to = self.must_find(process, target)?;
        let size = self.disk.file(from)?.live.size;
        self.disk.file(to)?;
        self.check_source(from, source)?;
        self.check_target(to, target);
        if from == to || size == 0 {
            return Err(Errno::EINVAL);
        }
        Ok((from, to))
    }

    /// The two inodes of a clone, if the file system supports it.
    fn clone_ends(
        &mut self,
        process: Process,
        source: &Path,
        target: &Path,
    ) -> Result<(Ino, Ino), Errno> {
        if !self.options.shares_blocks() {
            return Err(Errno::EOPNOTSUPP);
        }
        let ends = self.ends(process, source, target)?;
        // The map of a clone needs space, too.
        match self.available() < BLOCK {
            true => Err(Errno::ENOSPC),
            false => Ok(ends),
        }
    }

    /// Shares everything that is in the image at this moment.
    fn share(&mut self, from: Ino, to: Ino, flaw: Option<&'static str>) -> Result<u64, Errno> {
        let source = self.disk.file(from)?.live.clone();
        let cloned = runs(&source, from)
            .iter()
            .filter(|run| !run.unwritten)
            .count() as u64;
        let target = self.data_mut(to)?;
        target.share(&source);
        (target.size, target.flaw, target.copying) = (source.size, source.flaw.or(flaw), None);
        self.disk.changed(to, 0)?;
        Ok(cloned)
    }

    fn clone_whole(
        &mut self,
        process: Process,
        source: &Path,
        target: &Path,
    ) -> Result<Acted, HostCause> {
        let (from, to) = self.clone_ends(process, source, target)?;
        Ok(Acted::Cloned(self.share(from, to, None)?))
    }

    fn clone_ahead(
        &mut self,
        process: Process,
        source: &Path,
        target: &Path,
    ) -> Result<Acted, HostCause> {
        let (from, to) = self.clone_ends(process, source, target)?;
        if self.is_frozen_by_us(from) {
            self.violation(format!(
                "{} is cloned ahead while it's frozen",
                source.display()
            ));
        }
        let flaw = (!self.is_still(from)).then_some(BESIDE_WRITERS);
        Ok(Acted::Cloned(self.share(from, to, flaw)?))
    }

    fn clone_rest(
        &mut self,
        process: Process,
        source: &Path,
        target: &Path,
        known: &Known,
    ) -> Result<Acted, HostCause> {
        let (from, to) = self.clone_ends(process, source, target)?;
        let flaw = (!self.is_still(from)).then_some(BESIDE_WRITERS);
        let source = &self.disk.file(from)?.live;
        note(&mut known.lock(), runs(source, from), source.size);
        let before = self.disk.file(to)?.live.map.clone();
        self.share(from, to, flaw)?;
        let now = &self.disk.file(to)?.live.map;
        let differs = |(index, place): (usize, &u64)| before.get(index) != Some(place);
        let differing = now.iter().enumerate().filter(|block| differs(*block));
        Ok(Acted::Cloned(differing.count() as u64))
    }

    /// Gives the shared blocks of a range a place of their own; holes stay holes. It changes all or
    /// nothing.
    fn unshare(
        &mut self,
        process: Process,
        path: &Path,
        offset: u64,
        length: u64,
    ) -> Result<Acted, HostCause> {
        let ino = self.must_find(process, path)?;
        if !self.options.shares_blocks() {
            return Err(Errno::EOPNOTSUPP.into());
        }
        let others = self.places_of_others(ino);
        self.within_room(ino, |machine, before| {
            let end = offset.saturating_add(length);
            let blocks = within(before.map.len(), offset..end);
            let shared: Vec<usize> = blocks
                .filter(|index| others.contains(&before.map[*index]))
                .collect();
            machine.disk.place_again(ino, &shared)
        })?;
        Ok(Acted::Plain)
    }

    /// Changes a file. If the result does not fit on the disk, the file's previous content is
    /// restored.
    pub(super) fn within_room(
        &mut self,
        ino: Ino,
        change: impl FnOnce(&mut Machine, &Data) -> Result<(), Errno>,
    ) -> Result<(), Errno> {
        let (_, limit) = self.room_of(ino);
        let before = self.disk.file(ino)?.live.clone();
        change(self, &before)?;
        if self.room_of(ino).0 > limit {
            *self.data_mut(ino)? = before;
            return Err(Errno::ENOSPC);
        }
        Ok(())
    }

    fn copy_range(
        &mut self,
        process: Process,
        source: &Path,
        target: &Path,
        offset: u64,
        length: u64,
    ) -> Result<Acted, HostCause> {
        let (from, to) = self.ends(process, source, target)?;
        if self.is_frozen_by_us(from) {
            self.violation(format!("{} is copied while it's frozen", source.display()));
        }
        let original = self.disk.file(from)?.live.clone();
        let modified = self.is_still(from).then_some(original.modified);
        let end = offset.checked_add(length).ok_or(Errno::EINVAL)?;
        self.within_room(to, |machine, before| {
            if length == 0 || end > before.size {
                return Err(Errno::EINVAL);
            }
            let begun = Copying {
                source: from,
                modified,
                copied: 0,
            };
            let mut copying = before
                .copying
                .filter(|copying| offset > 0 && copying.source == from);
            let copying = copying.get_or_insert(begun);
            if copying.modified != modified {
                copying.modified = None;
            }
            if offset <= copying.copied {
                copying.copied = copying.copied.max(end);
            }
            let copying = *copying;
            let complete = copying.copied >= original.size;
            let data = machine.data_mut(to)?;
            data.copying = Some(copying);
            data.flaw = match (complete, copying.modified) {
                (false, _) => Some(UNFINISHED),
                (true, None) => Some(BESIDE_WRITERS),
                (true, Some(_)) => original.flaw,
            };
            if complete {
                data.content = original.content;
                data.map.clear();
            }
            machine.disk.changed(to, 0)
        })?;
        Ok(Acted::Plain)
    }

    fn renew_fs_id(
        &mut self,
        process: Process,
        image: &Path,
        uuid: Uuid,
    ) -> Result<Acted, HostCause> {
        let ino = self.must_find(process, image)?;
        if self
            .loops_on(ino)
            .iter()
            .any(|number| self.is_used(*number))
        {
            self.violation(format!(
                "{} gets a new fsid while it's attached",
                image.display()
            ));
            return Err(Errno::EBUSY.into());
        }
        let data = self.data_mut(ino)?;
        let flaw = data.flaw;
        let found = data
            .content
            .fs_mut()
            .filter(|found| found.fs == FsType::Btrfs);
        found.ok_or(Errno::EINVAL)?.uuid = uuid;
        if let Some(flaw) = flaw {
            self.violation(format!("{} gets a new fsid: {flaw}", image.display()));
        }
        let rewritten = usize::from(self.shares(ino, 0));
        self.disk.changed(ino, rewritten)?;
        Ok(Acted::Plain)
    }

    /// An effect was refused, or its process died: an effect that takes time may have been done in
    /// part.
    pub(super) fn cut_off(&mut self, process: Process, effect: &Effect<'_>) {
        let (path, flaw) = match effect {
            Effect::CloneWhole { target, .. }
            | Effect::ClonePreFreeze { target, .. }
            | Effect::CloneDelta { target, .. } => (target, CUT_OFF),
            Effect::CopyRange { target, .. } | Effect::WriteRange { target, .. } => {
                (target, UNFINISHED)
            }
            Effect::RenewFsId { image, .. } => (image, CUT_OFF),
            Effect::GrowUnmounted { device } => return self.cut_off_growth(device),
            Effect::SyncAll { paths } => return self.cut_off_sync(process, paths),
            Effect::WriteBlocks {
                device,
                offset,
                bytes,
            } => {
                // The kernel writes the pages of a request in any order.
                let torn = &bytes[..bytes.len() / 2];
                let _ = self.write_blocks(process, device, *offset as usize, torn);
                return;
            }
            _ => return,
        };
        if let Ok(Some(ino)) = self.find(process, path)
            && let Ok(data) = self.data_mut(ino)
        {
            data.flaw = Some(flaw);
        }
    }

    /// The map of an image.
    pub(super) fn map(&self, process: Process, path: &Path) -> Result<Vec<Extent>, HostCause> {
        Ok(self.map_and_size(process, path)?.0)
    }

    /// The map of an image, and its length.
    pub(super) fn map_and_size(
        &self,
        process: Process,
        path: &Path,
    ) -> Result<(Vec<Extent>, u64), HostCause> {
        let ino = self.must_find(process, path)?;
        let data = &self.disk.file(ino)?.live;
        Ok((runs(data, ino), data.size))
    }
}

/// Indices of the blocks that lie in a range of bytes.
pub(super) fn within(blocks: usize, bytes: Range<u64>) -> Range<usize> {
    let first = (bytes.start / BLOCK).min(blocks as u64);
    let last = bytes.end.div_ceil(BLOCK).clamp(first, blocks as u64);
    first as usize..last as usize
}

/// The map of a file: the blocks of the content from the first byte on, then those that are only
/// reserved.
fn runs(data: &Data, ino: Ino) -> Vec<Extent> {
    let mut runs: Vec<Extent> = Vec::new();
    for (index, place) in data.map.iter().enumerate() {
        let (logical, physical) = (index as u64 * BLOCK, place * BLOCK);
        match runs.last_mut() {
            Some(last) if last.physical + last.length == physical => last.length += BLOCK,
            Some(_) | None => runs.push(Extent {
                logical,
                physical,
                length: BLOCK,
                unwritten: false,
                opaque: false,
            }),
        }
    }
    let mapped = data.map.len() as u64 * BLOCK;
    if data.reserved > mapped {
        runs.push(Extent {
            logical: mapped,
            physical: RESERVED_AT + (ino << 40) + mapped,
            length: data.reserved - mapped,
            unwritten: true,
            opaque: false,
        });
    }
    runs
}
