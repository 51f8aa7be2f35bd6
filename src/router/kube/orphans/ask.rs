//! Asks a driver for all its volumes and snapshots, page by page, with limits on what a false list can
//! contain.

use std::collections::BTreeMap;
use std::time::Duration;

use tonic::Request;
use tonic::metadata::AsciiMetadataValue;
use tonic::transport::Channel;

use super::{Stored, StoredSnapshot};
use crate::csi::controller_client::ControllerClient;
use crate::csi::{ListSnapshotsRequest, ListVolumesRequest};
use crate::model::{PoolId, VolumeId};
use crate::router::checked;
use crate::service::{ONLY_POOL, request::EPHEMERAL};

/// Entries of one page, which has a few hundred kB.
const PAGE_ENTRIES: i32 = 1000;
/// Maximum number of volumes, and of snapshots, of one pool, so that a wrong list ends.
const MAX_ENTRIES: usize = 200_000;
/// The same for all pools of a driver or of a cluster.
const MAX_ENTRIES_OF_ALL: usize = 1_000_000;
/// The timeout of a page for a person who waits.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(60);

/// The ids of volumes, and the snapshots, of one pool or of all. An error message if not all of them
/// can be read.
pub(in crate::router::kube) async fn ask(
    mut client: ControllerClient<Channel>,
    pool: Option<PoolId>,
    max_wait: Duration,
) -> Result<(Vec<String>, Vec<StoredSnapshot>), String> {
    let only = pool.and_then(|pool| pool.to_string().parse::<AsciiMetadataValue>().ok());
    let (mut volumes, mut snapshots) = (Vec::new(), Vec::new());
    let mut pages = Pages::of(pool);
    while let Some(starting_token) = pages.next_token() {
        let question = ListVolumesRequest {
            max_entries: PAGE_ENTRIES,
            starting_token,
        };
        let answer = client
            .list_volumes(of_pool(question, only.as_ref(), max_wait))
            .await;
        let page = answer
            .map_err(|status| status.message().to_string())?
            .into_inner();
        let named = page.entries.into_iter().filter_map(|entry| entry.volume);
        let named: Vec<_> = named.collect();
        pages.take(named.iter().map(|it| &it.volume_id), &page.next_token)?;
        let named = named.into_iter();
        let named = named.filter(|volume| !volume.volume_context.contains_key(EPHEMERAL));
        volumes.extend(named.map(|volume| volume.volume_id));
    }
    let mut pages = Pages::of(pool);
    while let Some(starting_token) = pages.next_token() {
        let question = ListSnapshotsRequest {
            max_entries: PAGE_ENTRIES,
            starting_token,
            ..ListSnapshotsRequest::default()
        };
        let answer = client
            .list_snapshots(of_pool(question, only.as_ref(), max_wait))
            .await;
        let page = answer
            .map_err(|status| status.message().to_string())?
            .into_inner();
        let named = page.entries.into_iter().filter_map(|entry| entry.snapshot);
        let named: Vec<_> = named.collect();
        pages.take(named.iter().map(|it| &it.snapshot_id), &page.next_token)?;
        let each = named.into_iter().map(|snapshot| {
            let source = snapshot.source_volume_id.parse::<VolumeId>();
            let source = source.map_err(|_| "it names a source that is not a volume ID")?;
            Ok::<_, String>(StoredSnapshot {
                id: snapshot.snapshot_id,
                source: source.to_string(),
                group: snapshot.group_snapshot_id.parse().ok(),
            })
        });
        snapshots.extend(each.collect::<Result<Vec<_>, _>>()?);
    }
    Ok((volumes, snapshots))
}

/// The pages of one list. Its IDs ascend, so it ends.
struct Pages {
    pool: Option<PoolId>,
    last: Option<VolumeId>,
    entries: usize,
    is_complete: bool,
}

impl Pages {
    fn of(pool: Option<PoolId>) -> Pages {
        Pages {
            pool,
            last: None,
            entries: 0,
            is_complete: false,
        }
    }

    /// The token of the next page; `None` after the last one.
    fn next_token(&self) -> Option<String> {
        let token = self.last.map(|last| last.to_string());
        (!self.is_complete).then(|| token.unwrap_or_default())
    }

    fn take<'a>(
        &mut self,
        ids: impl Iterator<Item = &'a String>,
        next_token: &str,
    ) -> Result<(), String> {
        let ids: Vec<String> = ids.cloned().collect();
        self.is_complete = next_token.is_empty();
        let most = PAGE_ENTRIES as usize;
        self.last = checked::page(self.pool, self.last, most, (&ids, !self.is_complete))?;
        self.entries += ids.len();
        let most = match self.pool {
            Some(_) => MAX_ENTRIES,
            None => MAX_ENTRIES_OF_ALL,
        };
        match self.entries > most {
            true => Err(format!("it has more than {most} entries")),
            false => Ok(()),
        }
    }
}

fn of_pool<M>(message: M, pool: Option<&AsciiMetadataValue>, max_wait: Duration) -> Request<M> {
    let mut request = Request::new(message);
    request.set_timeout(max_wait);
    if let Some(pool) = pool {
        request.metadata_mut().insert(ONLY_POOL, pool.clone());
    }
    request
}

/// The contents of all pools of the driver at a connection.
pub(super) async fn behind(channel: Channel) -> Result<Vec<Stored>, String> {
    let client = ControllerClient::new(channel);
    let (volumes, snapshots) = ask(client, None, REQUEST_TIMEOUT).await?;
    let mut pools = BTreeMap::<PoolId, Stored>::new();
    for id in volumes {
        if let Some(pool) = pool_of(&mut pools, &id) {
            pool.volumes.push(id);
        }
    }
    for snapshot in snapshots {
        if let Some(pool) = pool_of(&mut pools, &snapshot.id) {
            pool.snapshots.push(snapshot);
        }
    }
    Ok(pools.into_values().collect())
}

fn pool_of<'a>(pools: &'a mut BTreeMap<PoolId, Stored>, id: &str) -> Option<&'a mut Stored> {
    let pool = id.parse::<VolumeId>().ok()?.pool;
    Some(pools.entry(pool).or_insert_with(|| Stored {
        pool,
        node: String::new(),
        volumes: Vec::new(),
        snapshots: Vec::new(),
    }))
}

#[cfg(test)]
mod tests;
