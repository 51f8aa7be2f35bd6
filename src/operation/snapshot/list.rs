//! ListSnapshots.

use std::collections::BTreeSet;

use crate::error::{Error, Result};
use crate::model::SnapshotId;
use crate::operation::pools::lookup::PoolLookup;
use crate::operation::request::MAX_LISTED;
use crate::operation::{ListSnapshots, Snapshot, SnapshotPage, Snapshots};
use crate::record::{SnapshotRecord, SnapshotState};

impl Snapshots {
    /// ListSnapshots, in the order of IDs: all snapshots, those of one volume (which may no longer
    /// exist), or a single one. An ID in a pool that is not served is an error, never an empty
    /// list. Members of a group that is not completely committed are listed only if the request
    /// names their ID. The token is the last ID of the previous page.
    pub fn list_snapshots(&self, request: &ListSnapshots) -> Result<SnapshotPage> {
        let after = match request.starting_token.as_str() {
            "" => None,
            token => Some(token.parse::<SnapshotId>().map_err(|_| Error::BadToken {
                token: token.to_string(),
            })?),
        };
        let limit = match request.max_entries {
            0 => MAX_LISTED,
            entries => entries.min(MAX_LISTED),
        };
        // This precedes the listing: a group that is complete now has all its members in the list.
        let in_part = match request.snapshot_id.as_str() {
            "" => self.uncommitted_groups(),
            _ => BTreeSet::new(),
        };
        let mut snapshots = self.selected(request, after, limit + 1)?;
        snapshots.sort_by_key(|snapshot| snapshot.id);
        let next = snapshots.len() > limit;
        snapshots.truncate(limit);
        let token = snapshots.last().filter(|_| next);
        let next_token = token.map(|last| last.id.to_string()).unwrap_or_default();
        // This filter comes last, because the token is determined from all snapshots. So a page may
        // have fewer entries than the limit.
        snapshots.retain(|one| one.group.is_none_or(|group| !in_part.contains(&group.0)));
        Ok(SnapshotPage {
            snapshots,
            next_token,
        })
    }

    /// The snapshots after an ID that match the filters. There may be more than `most`; the caller
    /// truncates.
    fn selected(
        &self,
        request: &ListSnapshots,
        after: Option<SnapshotId>,
        most: usize,
    ) -> Result<Vec<Snapshot>> {
        let (of, one) = (&request.source_volume_id, &request.snapshot_id);
        let later = |snapshot: &Snapshot| after.is_none_or(|after| snapshot.id > after);
        if !one.is_empty() {
            let PoolLookup::Pool(pool, id) = self.pools.owner(one)? else {
                return Ok(Vec::new());
            };
            let found = pool.backend.snapshots.get(id.uuid)?;
            let found = found.filter(|record| record.state == SnapshotState::Ready);
            let found = found.filter(is_listed);
            let snapshot = found.map(|record| self.pools.snapshot(&pool, &record));
            let wanted = |snapshot: &Snapshot| {
                later(snapshot) && (of.is_empty() || snapshot.source_volume_id.to_string() == *of)
            };
            return Ok(snapshot.into_iter().filter(wanted).collect());
        }
        if !of.is_empty() {
            let PoolLookup::Pool(pool, id) = self.pools.owner(of)? else {
                return Ok(Vec::new());
            };
            let is_wanted = |record: &SnapshotRecord| record.source == id.uuid && is_listed(record);
            let mine = pool.backend.snapshots.ready_if(None, usize::MAX, is_wanted);
            let mine = mine.iter().map(|record| self.pools.snapshot(&pool, record));
            return Ok(mine.filter(later).collect());
        }
        let mut all = Vec::new();
        for pool in self.pools.to_list(request.pool)? {
            // Pools before that of the token are skipped; its own pool is listed from the token on.
            let from = match after {
                Some(after) if pool.id() < after.pool => continue,
                Some(after) if pool.id() == after.pool => Some(after.uuid),
                Some(_) | None => None,
            };
            let records = pool.backend.snapshots.ready_if(from, most, is_listed);
            all.extend(
                records
                    .iter()
                    .map(|record| self.pools.snapshot(&pool, record)),
            );
        }
        Ok(all)
    }
}

fn is_listed(record: &SnapshotRecord) -> bool {
    !record.for_clone
}
