//! What a driver has, all pages of it.

use std::collections::BTreeMap;
use std::path::Path;
use std::time::Duration;

use tonic::Request;
use tonic::metadata::AsciiMetadataValue;
use tonic::transport::{Channel, Endpoint};

use super::Stored;
use crate::csi::controller_client::ControllerClient;
use crate::csi::{ListSnapshotsRequest, ListVolumesRequest};
use crate::error::{Error, Result, chain};
use crate::model::{PoolId, VolumeId};
use crate::service::{ONLY_POOL, request::EPHEMERAL};

/// Entries of one page: some hundred kB.
const PAGE: i32 = 1000;
/// For a person who waits.
const PATIENCE: Duration = Duration::from_secs(60);

/// Ids of volumes and of snapshots: of one pool, or of all. An error in words if not all of them
/// can be had.
pub(in crate::router::kube) async fn ask(
    mut client: ControllerClient<Channel>,
    pool: Option<PoolId>,
    patience: Duration,
) -> Result<(Vec<String>, Vec<String>), String> {
    let pool = pool.and_then(|pool| pool.to_string().parse::<AsciiMetadataValue>().ok());
    let (mut volumes, mut snapshots) = (Vec::new(), Vec::new());
    let mut token = String::new();
    loop {
        let question = ListVolumesRequest {
            max_entries: PAGE,
            starting_token: token,
        };
        let answer = client
            .list_volumes(of_pool(question, pool.as_ref(), patience))
            .await;
        let page = answer
            .map_err(|status| status.message().to_string())?
            .into_inner();
        let named = page.entries.into_iter().filter_map(|entry| entry.volume);
        let named = named.filter(|volume| !volume.volume_context.contains_key(EPHEMERAL));
        volumes.extend(named.map(|volume| volume.volume_id));
        token = page.next_token;
        if token.is_empty() {
            break;
        }
    }
    loop {
        let question = ListSnapshotsRequest {
            max_entries: PAGE,
            starting_token: token,
            ..ListSnapshotsRequest::default()
        };
        let answer = client
            .list_snapshots(of_pool(question, pool.as_ref(), patience))
            .await;
        let page = answer
            .map_err(|status| status.message().to_string())?
            .into_inner();
        let named = page.entries.into_iter().filter_map(|entry| entry.snapshot);
        snapshots.extend(named.map(|snapshot| snapshot.snapshot_id));
        token = page.next_token;
        if token.is_empty() {
            return Ok((volumes, snapshots));
        }
    }
}

fn of_pool<M>(message: M, pool: Option<&AsciiMetadataValue>, patience: Duration) -> Request<M> {
    let mut request = Request::new(message);
    request.set_timeout(patience);
    if let Some(pool) = pool {
        request.metadata_mut().insert(ONLY_POOL, pool.clone());
    }
    request
}

/// The same by pool, of the driver behind a socket.
pub(super) async fn behind(socket: &Path) -> Result<Vec<Stored>> {
    let unreachable = |reason: String| Error::Unreachable {
        what: format!("the driver at {}", socket.display()),
        reason,
    };
    let endpoint = Endpoint::from_shared(format!("unix://{}", socket.display()));
    let endpoint = endpoint.map_err(|error| unreachable(chain(&error)))?;
    let channel = endpoint.connect().await;
    let channel = channel.map_err(|error| unreachable(chain(&error)))?;
    let client = ControllerClient::new(channel);
    let (volumes, snapshots) = ask(client, None, PATIENCE).await.map_err(unreachable)?;
    let mut pools = BTreeMap::<PoolId, Stored>::new();
    let mut add = |id: String, to: fn(&mut Stored) -> &mut Vec<String>| {
        let Ok(parsed) = id.parse::<VolumeId>() else {
            return;
        };
        let pool = pools.entry(parsed.pool).or_insert_with(|| Stored {
            pool: parsed.pool,
            node: String::new(),
            volumes: Vec::new(),
            snapshots: Vec::new(),
        });
        to(pool).push(id);
    };
    volumes
        .into_iter()
        .for_each(|id| add(id, |stored| &mut stored.volumes));
    snapshots
        .into_iter()
        .for_each(|id| add(id, |stored| &mut stored.snapshots));
    Ok(pools.into_values().collect())
}
