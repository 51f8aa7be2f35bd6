//! The members of a cut on this node, and the attempts of a cut.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use super::source::Source;
use crate::backend::Image;
use crate::cut::retry::{self, Clock, Subject};
use crate::cut::{self, Attempt, CutInterfaces, CutMember, HookTarget, Outcome, SpaceCheck, Use};
use crate::error::{Error, ErrorContext, Result, chain};
use crate::model::{SnapshotId, SnapshotParameters};
use crate::operation::pools::capacity::check_headroom;
use crate::operation::{Pool, Snapshots, Used, usage};
use crate::record::SnapshotRecord;

impl Snapshots {
    /// What the cut needs to know of each volume. `copies` are the prepared images into which the
    /// volumes are copied.
    pub(in crate::operation) fn members(
        &self,
        sources: &[Source],
        uses: &[Use],
        copies: &[Image],
    ) -> Result<Vec<CutMember>> {
        let budget = Arc::default();
        let each = sources.iter().zip(uses).zip(copies);
        each.map(|((source, in_use), copy)| {
            let image = Image::Volume(source.id.uuid);
            let copier = source.pool.backend.copier(image, *copy, &budget)?;
            let mapped = copier.mapped();
            let mapped = mapped.context(|| format!("open the device of {image}"))?;
            let is_raw = *in_use == Use::Raw && mapped.is_none();
            let unsuspendable_reason = is_raw.then(|| self.unsuspendable_reason(source));
            Ok(CutMember {
                target: HookTarget {
                    volume_id: source.text.clone(),
                    claim: source.record.claim.clone(),
                    node: None,
                },
                copier: copier.into(),
                in_use: in_use.clone(),
                unsuspendable_reason: unsuspendable_reason.transpose()?,
                emptied: Arc::default(),
            })
        })
        .collect()
    }

    /// Why a raw volume was published with a device that cannot be suspended, and what helps.
    fn unsuspendable_reason(&self, source: &Source) -> Result<String> {
        if !source.record.block_groups {
            return Ok("its class has blockGroups: \"false\"; unpublish it first".into());
        }
        let has_mapper = self.host.has_device_mapper();
        if !has_mapper.context(|| "open the device mapper".into())? {
            return Ok("its node has no device mapper; load the kernel module dm_mod and restart its pod, or unpublish it first".into());
        }
        let view = self.usage.view(&source.pool, &source.record)?;
        let pods: BTreeSet<&str> = view.uses().into_iter().flat_map(usage::pods_of).collect();
        let pods: Vec<&str> = pods.into_iter().collect();
        let which = match pods.is_empty() {
            true => "the pod that uses it".into(),
            false => format!("the pod with UID {}", pods.join(", and the one with UID ")),
        };
        Ok(format!(
            "its device was attached by an earlier release, or while its node had no device mapper; restart {which}"
        ))
    }

    /// A check of the free space in the pools of the members. The copies were admitted before the
    /// clones, and the pools may have filled up since.
    pub(in crate::operation) fn room(&self, members: &[CutMember]) -> Result<Arc<SpaceCheck>> {
        let mut pools: Vec<Arc<Pool>> = Vec::new();
        for member in members {
            let (pool, ..) = self
                .pools
                .get_volume_even_if_fenced(&member.target.volume_id)?;
            if !pools.iter().any(|one| Arc::ptr_eq(one, &pool)) {
                pools.push(pool);
            }
        }
        Ok(Arc::new(move || {
            pools.iter().try_for_each(|pool| check_headroom(pool))
        }))
    }

    /// Cuts the members into their prepared copies. The caller holds the locks of the sources.
    pub(in crate::operation) fn cut(
        &self,
        members: &[CutMember],
        now: &Attempt<'_>,
        parameters: &SnapshotParameters,
    ) -> Result<Outcome> {
        let attempt = cut::attempt(
            &self.interfaces,
            members,
            now,
            parameters,
            self.room(members)?,
        );
        self.cuts.count(&attempt);
        let mut outcome = attempt?;
        if !now.why.is_empty() {
            outcome.reason = now.why.to_string();
        }
        Ok(outcome)
    }

    /// Makes a prepared image the clone of a snapshot of the same pool.
    pub(in crate::operation) fn clone_snapshot(
        &self,
        pool: &Pool,
        from: &SnapshotRecord,
        copy: Image,
    ) -> Result<()> {
        let backend = &pool.backend;
        let copier = backend.copier(Image::Snapshot(from.uuid), copy, &Arc::default())?;
        let id = SnapshotId {
            pool: backend.record.id,
            uuid: from.uuid,
        };
        let freeze_timeout = SnapshotParameters::default().freeze_timeout;
        let freezer = self.interfaces.freezer.as_ref();
        let id = id.to_string();
        match cut::copy_unused(freezer, &id, &*copier, freeze_timeout) {
            // The caller deletes the copy, and a repeat of the call makes another one.
            Err(Error::CutLost { reason }) => Err(Error::Busy {
                subject: format!("snapshot {id}"),
                holder: reason,
            }),
            copied => copied.map(drop),
        }
    }

    /// Thaws file systems that a crash left frozen. It runs apart from the refresh of the pools,
    /// which waits for disks.
    pub fn sweep_freezes(&self) {
        sweep(&self.interfaces);
    }

    /// Repeats the attempts of a cut as its class allows ([`retry::retry`]).
    pub(in crate::operation) fn retry<T>(
        &self,
        subject: &Subject<'_>,
        once: impl FnMut(&Attempt<'_>) -> Result<T>,
    ) -> Result<T> {
        retry::retry(self, &self.backoffs, subject, once)
    }
}

/// Thaws file systems that a crash left frozen. A failure is tried again while the driver serves.
pub(in crate::operation) fn sweep(interfaces: &CutInterfaces) {
    match interfaces.freezer.sweep() {
        Ok(volumes) if volumes.is_empty() => {}
        Ok(volumes) => tracing::warn!(?volumes, "thawed file systems after a crash"),
        Err(error) => {
            tracing::error!(error = %chain(&error), "failed to thaw file systems after a crash");
        }
    }
}

/// A member, if it is in use.
pub(in crate::operation) fn used(member: &CutMember) -> Option<Used> {
    (member.in_use != Use::Unused).then(|| Used {
        volume_id: member.target.volume_id.clone(),
        claim: member.target.claim.clone(),
        unsuspendable_reason: member.unsuspendable_reason.clone(),
    })
}

impl Clock for Snapshots {
    fn now(&self) -> u64 {
        self.host.now()
    }

    fn sleep(&self, time: Duration) {
        self.host.pause(time);
    }

    fn is_stopping(&self) -> bool {
        self.pools.in_flight.is_stopping()
    }
}
