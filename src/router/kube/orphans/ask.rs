//! All volumes and snapshots of a driver, page by page.

use std::collections::BTreeMap;
use std::time::Duration;

use tonic::Request;
use tonic::metadata::AsciiMetadataValue;
use tonic::transport::Channel;

use super::{Stored, StoredSnapshot};
use crate::csi::controller_client::ControllerClient;
use crate::csi::{ListSnapshotsRequest, ListVolumesRequest};
use crate::model::{PoolId, VolumeId};
use crate::service::{ONLY_POOL, request::EPHEMERAL};

/// Entries of one page, which has a few hundred kB.
const PAGE_ENTRIES: i32 = 1000;
/// The maximum for one driver, so that a wrong list ends.
const MAX_ENTRIES: usize = 1_000_000;
/// The timeout of a page for a person who waits.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(60);

/// The ids of volumes, and the snapshots, of one pool or of all. An error message if not all of them
/// can be read.
pub(in crate::router::kube) async fn ask(
    mut client: ControllerClient<Channel>,
    pool: Option<PoolId>,
    max_wait: Duration,
) -> Result<(Vec<String>, Vec<StoredSnapshot>), String> {
    let pool = pool.and_then(|pool| pool.to_string().parse::<AsciiMetadataValue>().ok());
    let (mut volumes, mut snapshots) = (Vec::new(), Vec::new());
    let mut token = String::new();
    loop {
        let question = ListVolumesRequest {
            max_entries: PAGE_ENTRIES,
            starting_token: token.clone(),
        };
        let answer = client
            .list_volumes(of_pool(question, pool.as_ref(), max_wait))
            .await;
        let page = answer
            .map_err(|status| status.message().to_string())?
            .into_inner();
        let named = page.entries.into_iter().filter_map(|entry| entry.volume);
        let named = named.filter(|volume| !volume.volume_context.contains_key(EPHEMERAL));
        volumes.extend(named.map(|volume| volume.volume_id));
        token = next(&token, page.next_token, volumes.len())?;
        if token.is_empty() {
            break;
        }
    }
    loop {
        let question = ListSnapshotsRequest {
            max_entries: PAGE_ENTRIES,
            starting_token: token.clone(),
            ..ListSnapshotsRequest::default()
        };
        let answer = client
            .list_snapshots(of_pool(question, pool.as_ref(), max_wait))
            .await;
        let page = answer
            .map_err(|status| status.message().to_string())?
            .into_inner();
        let named = page.entries.into_iter().filter_map(|entry| entry.snapshot);
        snapshots.extend(named.map(|snapshot| StoredSnapshot {
            id: snapshot.snapshot_id,
            source: snapshot.source_volume_id,
            group: snapshot.group_snapshot_id.parse().ok(),
        }));
        token = next(&token, page.next_token, snapshots.len())?;
        if token.is_empty() {
            return Ok((volumes, snapshots));
        }
    }
}

/// Checks the token of the next page: ids ascend, so each token is greater than the one before.
fn next(before: &str, token: String, entries: usize) -> Result<String, String> {
    match entries > MAX_ENTRIES || (!token.is_empty() && token.as_str() <= before) {
        true => Err(format!("its list does not end after {entries} entries")),
        false => Ok(token),
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
