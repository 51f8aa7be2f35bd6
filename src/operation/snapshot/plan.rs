//! Records of new snapshots, made before anything is created in a pool.

use std::sync::Arc;

use uuid::Uuid;

use super::members::by_pool;
use super::source::Source;
use crate::error::Error;
use crate::model::{GroupId, Level, SnapshotId, SnapshotParameters};
use crate::operation::blocking::CleanUp;
use crate::operation::{GroupMembership, Pool, SnapshotState, Snapshots, member_of};
use crate::record::SnapshotRecord;

/// The record of a snapshot that is being created, and its pool.
pub(in crate::operation) struct PreparedSnapshot {
    pub(in crate::operation) pool: Arc<Pool>,
    pub(in crate::operation) record: SnapshotRecord,
}

impl Snapshots {
    /// The record of a new snapshot that is not a member of a group.
    pub(in crate::operation) fn plan_single(
        &self,
        source: &Source,
        id: SnapshotId,
        name: &str,
        parameters: &SnapshotParameters,
        attempt: Uuid,
    ) -> SnapshotRecord {
        SnapshotRecord {
            min_level: Some(parameters.least()),
            ..self.plan_snapshot(source, id, name, attempt)
        }
    }

    /// The parts of the record that all new snapshots have.
    pub(in crate::operation) fn plan_snapshot(
        &self,
        source: &Source,
        id: SnapshotId,
        name: &str,
        attempt: Uuid,
    ) -> SnapshotRecord {
        let record = &source.record;
        SnapshotRecord {
            uuid: id.uuid,
            name: name.to_string(),
            incarnation: self.host.random_uuid(),
            state: SnapshotState::Preparing,
            attempt,
            source: record.uuid,
            source_incarnation: record.incarnation,
            size: record.size,
            block_size: record.block_size,
            allocation: record.allocation,
            formatted: record.formatted.clone(),
            capabilities: record.capabilities.clone(),
            wipe: record.wipe,
            lineage: None,
            image: 0,
            base: None,
            cut_at: 0,
            level: Level::Crash,
            min_level: None,
            reason: String::new(),
            group: None,
            copy: None,
            for_clone: false,
            foreign_bytes: None,
        }
    }

    /// The record of a new member of a group.
    pub(in crate::operation) fn plan_member(
        &self,
        source: &Source,
        group: GroupId,
        name: &str,
        membership: &GroupMembership,
        attempt: Uuid,
    ) -> SnapshotRecord {
        SnapshotRecord {
            group: Some(membership.clone()),
            ..self.plan_snapshot(source, member_of(group, source.id), name, attempt)
        }
    }

    /// Deletes snapshots of a failed attempt: the one that decides about all first, and then those of
    /// each pool together.
    pub(in crate::operation) fn undo_snapshots(
        &self,
        made: &[PreparedSnapshot],
        lead: Option<usize>,
        first: Error,
    ) -> Error {
        let _clean_up = CleanUp::after(&first);
        let each = made.iter().enumerate();
        let (leads, others): (Vec<_>, Vec<_>) = each.partition(|(at, _)| Some(*at) == lead);
        let of_pools = |part: Vec<(usize, &PreparedSnapshot)>| {
            by_pool(
                part.iter()
                    .map(|(_, one)| (one.pool.clone(), one.record.uuid)),
            )
        };
        let mut steps = of_pools(leads).into_iter().chain(of_pools(others));
        let undone = steps.try_for_each(|(pool, uuids)| pool.backend.snapshots.delete_all(&uuids));
        first.with_undo(undone)
    }
}
