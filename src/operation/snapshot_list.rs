//! ListSnapshots.

use std::sync::Arc;

use super::list::PAGE;
use super::pool::Owner;
use super::{Driver, ListSnapshots, Pool, PoolState, Snapshot, SnapshotPage};
use crate::error::{Error, Result};
use crate::model::SnapshotId;
use crate::record::{SnapshotRecord, SnapshotState};

impl Driver {
    /// ListSnapshots, in the order of ids: all, those of one volume (which may be gone), or one.
    /// What an id names on a pool that isn't served is an error, never an empty list. The token is
    /// the last id of the page before.
    pub fn list_snapshots(&self, request: &ListSnapshots) -> Result<SnapshotPage> {
        let after = match request.starting_token.as_str() {
            "" => None,
            token => Some(token.parse::<SnapshotId>().map_err(|_| Error::BadToken {
                token: token.to_string(),
            })?),
        };
        let limit = match request.max_entries {
            0 => PAGE,
            entries => entries.min(PAGE),
        };
        let mut snapshots = self.selected(request)?;
        snapshots.sort_by_key(|snapshot| snapshot.id);
        snapshots.retain(|snapshot| after.is_none_or(|after| snapshot.id > after));
        let next = snapshots.len() > limit;
        snapshots.truncate(limit);
        let token = snapshots.last().filter(|_| next);
        let next_token = token.map(|last| last.id.to_string()).unwrap_or_default();
        Ok(SnapshotPage {
            snapshots,
            next_token,
        })
    }

    /// All that the filters let through.
    fn selected(&self, request: &ListSnapshots) -> Result<Vec<Snapshot>> {
        let (of, one) = (&request.source_volume_id, &request.snapshot_id);
        if !one.is_empty() {
            let Owner::Pool(pool, id) = self.owner(one)? else {
                return Ok(Vec::new());
            };
            let found = pool.backend.snapshot(id.uuid)?;
            let found = found.filter(|record| record.state == SnapshotState::Ready);
            let snapshot = found.map(|record| self.snapshot(&pool, &record));
            let wanted =
                |snapshot: &Snapshot| of.is_empty() || snapshot.source_volume_id.to_string() == *of;
            return Ok(snapshot.into_iter().filter(wanted).collect());
        }
        if !of.is_empty() {
            let Owner::Pool(pool, id) = self.owner(of)? else {
                return Ok(Vec::new());
            };
            return Ok(self.of_pool(&pool, |record| record.source == id.uuid));
        }
        let mut all = Vec::new();
        for state in self.states() {
            match state {
                PoolState::Serving(pool) => all.extend(self.of_pool(&pool, |_| true)),
                PoolState::Refused {
                    definition, why, ..
                } => {
                    return Err(Error::Unreachable {
                        what: format!("pool {}", definition.name),
                        reason: why,
                    });
                }
            }
        }
        Ok(all)
    }

    fn of_pool(&self, pool: &Arc<Pool>, wanted: impl Fn(&SnapshotRecord) -> bool) -> Vec<Snapshot> {
        let records = pool.backend.snapshots(None, usize::MAX);
        records
            .iter()
            .filter(|record| wanted(record))
            .map(|record| self.snapshot(pool, record))
            .collect()
    }
}
