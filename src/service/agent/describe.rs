//! Describe and Find.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tonic::Status;
use uuid::Uuid;

use crate::agent::describe_response::{Fence, RevertFence};
use crate::agent::find_request::Kind;
use crate::agent::image_usage::Growth;
use crate::agent::{self, DescribeResponse, FindRequest, FindResponse, Pool};
use crate::error::Error;
use crate::model::{GroupId, VolumeId};
use crate::operation::{
    Description, Driver, Forgotten, GrownVolume, ImageUsage, LongFreeze, NameLookup, NotGrown,
    PoolStatus, Presence,
};
use crate::service::agent::copies::running_copies;
use crate::service::reply::bytes;
use crate::service::{Rpc, Service, status};

/// A query of the pools takes milliseconds, unless a disk hangs. The router waits twice as long.
const POOL_TIMEOUT: Duration = Duration::from_secs(2);

/// Queries of this node's state. While a disk hangs, the last known state is returned; the hanging
/// query occupies one thread, however often the router asks.
#[derive(Clone, Default)]
pub(in crate::service) struct DescriptionCache {
    last: Arc<Mutex<Option<Arc<Description>>>>,
    refreshing: Arc<tokio::sync::Mutex<()>>,
}

impl DescriptionCache {
    fn last(&self) -> std::sync::MutexGuard<'_, Option<Arc<Description>>> {
        self.last.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The result of a new query, or the last one if the new query takes too long.
    async fn query(&self, driver: Arc<Driver>) -> Option<Arc<Description>> {
        let cache = self.clone();
        let query = async {
            let refreshing = cache.refreshing.clone().lock_owned().await;
            let described = tokio::task::spawn_blocking(move || {
                let _refreshing = refreshing;
                let description = Arc::new(driver.describe());
                *cache.last() = Some(description.clone());
                description
            });
            described.await.ok()
        };
        match tokio::time::timeout(POOL_TIMEOUT, query).await {
            Ok(Some(description)) => Some(description),
            Ok(None) | Err(_) => self.last().clone(),
        }
    }
}

impl Service {
    pub(super) async fn handle_describe(&self) -> Result<DescribeResponse, Status> {
        let Some(description) = self.descriptions.query(self.driver.clone()).await else {
            let hangs = Error::unreachable(
                "this node",
                "reading the state of its pools takes too long; a disk hangs",
            );
            return Err(status(Rpc::Probe, &hangs));
        };
        let settings = self.driver.pools.settings();
        let (home, home_problem) = match &description.home {
            Ok(home) => (home.to_string(), String::new()),
            Err(problem) => (String::new(), problem.clone()),
        };
        // A disk that has returned since is reported as it is now.
        let is_there = |had: &&Forgotten| description.pools.iter().any(|it| it.id == Some(had.id));
        let forgotten = description.forgotten.iter().filter(|had| !is_there(had));
        let forgotten = forgotten.map(forgotten_pool);
        Ok(DescribeResponse {
            node_name: settings.node_name.clone(),
            driver_name: settings.driver_name.clone(),
            version: env!("CARGO_PKG_VERSION").to_string(),
            home,
            home_problem,
            pools: description
                .pools
                .iter()
                .map(pool)
                .chain(forgotten)
                .collect(),
            missing: description.missing.clone(),
            unsettled_groups: groups(&description.groups_in_doubt),
            guard_alive: description.guard,
            busy_groups: groups(&description.busy_groups),
            not_grown: not_grown(&description.not_grown),
            peer_port: self.peer_port(),
            fences: description
                .fences
                .iter()
                .take(MAX_FENCES)
                .map(fence)
                .collect(),
            revert_fences: description
                .revert_fences
                .iter()
                .take(MAX_FENCES)
                .map(revert_fence)
                .collect(),
            long_freezes: description
                .long_freezes
                .iter()
                .take(MAX_LONG_FREEZES)
                .map(long_freeze)
                .collect(),
            read_snapshots: self.driver.snapshots.read_snapshots(),
            copies: running_copies(&self.driver),
        })
    }

    pub(super) async fn handle_find(&self, request: FindRequest) -> Result<FindResponse, Status> {
        let found = self
            .run(Rpc::CreateVolume, named(&request), move |driver, named| {
                driver.find_named(named, &request.name)
            })
            .await?;
        Ok(FindResponse {
            id: found.map(|id| id.to_string()).unwrap_or_default(),
        })
    }
}

/// What a name is looked up among.
pub(super) fn named(request: &FindRequest) -> Result<NameLookup, Error> {
    let pool = &request.pool;
    match request.kind() {
        Kind::Volume => Ok(NameLookup::Volume((!pool.is_empty()).then(|| pool.clone()))),
        Kind::Snapshot => Ok(NameLookup::Snapshot),
        Kind::Unknown => Err(Error::invalid(
            "kind",
            "is not a kind that this agent supports",
        )),
    }
}

/// Maximum number of changed devices of a pool that are named.
const MAX_CHANGED_DEVICES: usize = 8;

/// Maximum number of volumes that are reported as not grown.
const MAX_NOT_GROWN: usize = 64;

/// Maximum number of fenced volumes that are reported.
const MAX_FENCES: usize = 256;

/// Maximum number of freezes that are reported.
const MAX_LONG_FREEZES: usize = 64;

fn long_freeze(one: &LongFreeze) -> agent::describe_response::LongFreeze {
    agent::describe_response::LongFreeze {
        volume_id: one.volume_id.clone(),
        since: i64::try_from(one.since).unwrap_or(i64::MAX),
        until: i64::try_from(one.until).unwrap_or(i64::MAX),
        held: one.held,
    }
}

fn fence((volume, move_uid): &(VolumeId, Uuid)) -> Fence {
    Fence {
        volume_id: volume.to_string(),
        move_uid: move_uid.to_string(),
    }
}

fn revert_fence(fence: &crate::operation::RevertFence) -> RevertFence {
    RevertFence {
        volume_id: fence.volume.to_string(),
        revert_uid: fence.uid.to_string(),
        number: fence.number,
        switched: fence.is_switched,
        members: fence.members.count,
        members_digest: fence
            .members
            .digest
            .map(|it| it.to_string())
            .unwrap_or_default(),
    }
}

fn not_grown(volumes: &[NotGrown]) -> Vec<agent::NotGrown> {
    let each = volumes.iter().take(MAX_NOT_GROWN);
    each.map(|small| agent::NotGrown {
        volume_id: small.id.to_string(),
        reason: small.reason.clone(),
    })
    .collect()
}

fn groups(ids: &[Uuid]) -> Vec<String> {
    ids.iter().map(|id| GroupId(*id).to_string()).collect()
}

fn pool(status: &PoolStatus) -> Pool {
    let space = status.space.unwrap_or_default();
    let used = space.total.saturating_sub(space.available);
    let pool_fs = status.pool_fs.clone().unwrap_or_default();
    Pool {
        name: status.name.clone(),
        place: status.place.clone(),
        id: status.id.map(|id| id.to_string()).unwrap_or_default(),
        refusal: status.refusal.clone().unwrap_or_default(),
        total_bytes: bytes(space.total),
        available_bytes: bytes(space.available),
        promised_bytes: bytes(space.provisioned),
        promisable_bytes: bytes(status.provisionable.unwrap_or(0)),
        volumes: bytes(status.volumes),
        snapshots: bytes(status.snapshots),
        damaged: bytes(status.damaged),
        forgotten: false,
        changed_devices: changed(status),
        file_system: pool_fs.file_system,
        mount: pool_fs.mount,
        shares_blocks: status.shares_blocks,
        without_mount: pool_fs.without_mount.unwrap_or_default(),
        any_mount: status.any_mount,
        pods: status.pods.clone(),
        images: status
            .images
            .as_ref()
            .map(|images| image_usage(images, used)),
        presence: presence(status.presence).into(),
    }
}

fn presence(found: Presence) -> agent::pool::Presence {
    match found {
        Presence::Unknown => agent::pool::Presence::Unknown,
        Presence::Absent => agent::pool::Presence::Absent,
        Presence::OtherHome => agent::pool::Presence::OtherHome,
    }
}

/// What is not divided is limited to what is used.
fn image_usage(images: &ImageUsage, used: u64) -> agent::ImageUsage {
    let divided = images.exclusive + images.shared + images.snapshots;
    let grown = images.grown.as_ref().map(|volumes| Growth {
        volumes: volumes.iter().map(grown).collect(),
    });
    agent::ImageUsage {
        own_bytes: bytes(images.exclusive),
        shared_bytes: bytes(images.shared),
        snapshot_bytes: bytes(images.snapshots),
        undivided_bytes: bytes(images.undivided.min(used.saturating_sub(divided))),
        unmeasured_volumes: bytes(images.unmeasured),
        measured_at: bytes(images.measured_at),
        growth: grown,
    }
}

fn grown(one: &GrownVolume) -> agent::image_usage::Volume {
    agent::image_usage::Volume {
        volume_id: one.id.to_string(),
        grown_bytes: bytes(one.bytes),
        since: bytes(one.since),
    }
}

/// Messages about changed devices. Their number is limited, so that a pod cannot make the answer
/// long.
fn changed(status: &PoolStatus) -> Vec<String> {
    let each = status.changed.iter().take(MAX_CHANGED_DEVICES);
    each.map(|changed| format!("volume {}: {}", changed.uuid, changed.problem))
        .collect()
}

fn forgotten_pool(had: &Forgotten) -> Pool {
    Pool {
        name: had.name.clone(),
        place: had.place.clone(),
        id: had.id.to_string(),
        refusal: "it was forgotten".into(),
        forgotten: true,
        ..Pool::default()
    }
}
