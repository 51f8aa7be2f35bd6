//! Orders the steps of a VolumeMove from the agents that have its volumes.

use std::collections::HashMap;
use std::time::Duration;

use prost::Message;
use tonic::Code;
use uuid::Uuid;

use super::{Copied, MoveCopy, MovingVolumes, ROUNDS, TargetPool, snapshot_of};
use crate::agent::look_for_move_response::State;
use crate::agent::receive_request::Purpose;
use crate::agent::{
    DeleteMovedRequest, FenceRequest, LookForMoveRequest, LookForMoveResponse,
    SnapshotForMoveRequest, SnapshotForMoveResponse,
};
use crate::csi::volume_content_source::{SnapshotSource, Type};
use crate::csi::{
    CreateVolumeRequest, DeleteSnapshotRequest, DeleteVolumeRequest, VolumeContentSource,
};
use crate::error::{Error, Result};
use crate::model::id::NameKind;
use crate::model::{SnapshotId, VolumeId};
use crate::operation::{
    MoveContentStatus, MoveSnapshotStatus, MovingState, VolumeMoveStatus, snapshot_name,
};
use crate::router::Router;
use crate::router::agents::Agent;
use crate::router::call::within;
use crate::router::checked::{fence_uid, named};
use crate::router::create_volume::copy_between_nodes::{ReceiveFrom, Sent, peer_address};
use crate::router::resolve::answered;
use crate::router::route::Owner;
use crate::service::{Rpc, request};

/// How long one call for the last copy lasts. The copy continues afterwards, and the next call joins it.
const COPY_TIMEOUT: Duration = Duration::from_secs(20);
/// The same for a copy before the fence, for which no application waits.
const FILL_TIMEOUT: Duration = Duration::from_secs(8);
/// Every other request: an agent reads or writes a record, or cuts one volume.
const STEP_TIMEOUT: Duration = Duration::from_secs(60);

#[tonic::async_trait]
impl MovingVolumes for Router {
    fn targets(&self) -> Vec<TargetPool> {
        let agents = self.agents.all();
        let each = agents.iter().flat_map(|agent| self.pools_of(agent));
        each.collect()
    }

    async fn look(&self, volume: VolumeId, snapshots: &[SnapshotId]) -> Result<VolumeMoveStatus> {
        let Owner::Agent(agent) = self.owner(&volume.to_string()).await? else {
            return Ok(VolumeMoveStatus::default());
        };
        let asked = LookForMoveRequest {
            volume_id: volume.to_string(),
            snapshot_ids: snapshots.iter().map(ToString::to_string).collect(),
        };
        let mut client = agent.client().await?;
        let found = answered(&agent, client.look_for_move(within(asked, STEP_TIMEOUT))).await?;
        self.checked(&agent, seen(found))
    }

    async fn fence(&self, volume: VolumeId, move_uid: Uuid, lift: bool) -> Result<()> {
        let Owner::Agent(agent) = self.owner(&volume.to_string()).await? else {
            return Ok(());
        };
        let asked = FenceRequest {
            volume_id: volume.to_string(),
            move_uid: move_uid.to_string(),
            lift,
        };
        let mut client = agent.client().await?;
        answered(&agent, client.fence(within(asked, STEP_TIMEOUT))).await?;
        Ok(())
    }

    async fn snapshot(&self, copy: &MoveCopy, base: Option<u32>) -> Result<u64> {
        let source = self.agent_of(copy.source.pool).await?;
        let (message, changed) = self.snapshot_for(copy, base, &source).await?;
        let range = message.capacity_range.unwrap_or_default();
        let all = u64::try_from(range.required_bytes).unwrap_or(0);
        Ok(base.map_or(all, |_| changed))
    }

    async fn copy(&self, copy: &MoveCopy) -> Result<Copied> {
        let source = self.agent_of(copy.source.pool).await?;
        let target = self.agent_of(copy.target.pool).await?;
        let (message, _) = self.snapshot_for(copy, None, &source).await?;
        let (purpose, limit) = match copy.round {
            Some(_) => (Purpose::Fill, FILL_TIMEOUT),
            None => (Purpose::Move, COPY_TIMEOUT),
        };
        let call = self.call(Rpc::CreateVolume, &within((), limit));
        let asked = request::create_volume(&message, &self.topology_key());
        let asked = asked.map_err(|error| {
            let why = format!(
                "its description of volume {} is invalid: {error}",
                copy.source
            );
            self.refuse(&source, &why)
        })?;
        let id = |round| snapshot_of(copy.source, copy.move_uid, round).to_string();
        let others = ROUNDS
            .into_iter()
            .filter(|round| Some(*round) != copy.round);
        let from = ReceiveFrom {
            source: &Ok(source),
            what: Sent::Snapshot(id(copy.round)),
            bases: others.map(|round| id(Some(round))).collect(),
            purpose,
        };
        let received = self.receive(&call, &target, &message, &from).await;
        let created = match received {
            Err(Error::Forwarded { code, .. }) if is_running(code) => return Ok(Copied::Continues),
            received => received?,
        };
        let of = message.volume_content_source.as_ref();
        let checked = self.check_created_volume(&target, &asked, of, created);
        checked.await.map(|_| Copied::Complete)
    }

    async fn delete_source(&self, volume: VolumeId, move_uid: Uuid) -> Result<()> {
        let Owner::Agent(agent) = self.owner(&volume.to_string()).await? else {
            return Ok(());
        };
        let asked = DeleteMovedRequest {
            volume_id: volume.to_string(),
            move_uid: move_uid.to_string(),
        };
        let mut client = agent.client().await?;
        answered(&agent, client.delete_moved(within(asked, STEP_TIMEOUT))).await?;
        Ok(())
    }

    async fn delete_copy(&self, volume: VolumeId) -> Result<()> {
        let call = self.call(Rpc::DeleteVolume, &within((), STEP_TIMEOUT));
        let volume_id = volume.to_string();
        let Owner::Agent(agent) = self.owner(&volume_id).await? else {
            return Ok(());
        };
        let message = DeleteVolumeRequest {
            volume_id,
            ..DeleteVolumeRequest::default()
        };
        let ask = async |mut client: crate::csi::controller_client::ControllerClient<_>,
                         request| { client.delete_volume(request).await };
        call.forward(&agent, message, ask).await.map(drop)
    }

    async fn delete_snapshot(&self, snapshot: SnapshotId) -> Result<()> {
        let call = self.call(Rpc::DeleteSnapshot, &within((), STEP_TIMEOUT));
        let message = DeleteSnapshotRequest {
            snapshot_id: snapshot.to_string(),
            ..DeleteSnapshotRequest::default()
        };
        self.delete_snapshot_of_csi(&call, message).await.map(drop)
    }
}

impl Router {
    /// Lets the source take the snapshot of a copy, unless it exists. Returns the request for the copy,
    /// and the bytes in which the snapshot differs from its base.
    async fn snapshot_for(
        &self,
        copy: &MoveCopy,
        base: Option<u32>,
        source: &Agent,
    ) -> Result<(CreateVolumeRequest, u64)> {
        let asked = SnapshotForMoveRequest {
            volume_id: copy.source.to_string(),
            move_uid: copy.move_uid.to_string(),
            round: copy.round.unwrap_or(0),
            base_round: base.unwrap_or(0),
        };
        let mut client = source.client().await?;
        let made = client.snapshot_for_move(within(asked, STEP_TIMEOUT));
        let made = answered(source, made).await?;
        let changed = made.changed_bytes;
        Ok((self.checked(source, like(made, copy))?, changed))
    }

    fn pools_of(&self, agent: &Agent) -> Vec<TargetPool> {
        let seen = agent.seen();
        let Some(description) = &seen.description else {
            return Vec::new();
        };
        let owned = |id: crate::model::PoolId| {
            let owner = self.last_node(id);
            owner.is_none_or(|owner| owner == agent.node())
        };
        let pools = description.pools.iter().filter_map(|pool| {
            let id = pool.id.parse().ok()?;
            let problem = if pool.forgotten || !owned(id) {
                return None;
            } else if self.cluster.is_lost(id) {
                Some("it is marked as lost".to_string())
            } else if self.cluster.is_evacuated(id) {
                Some("it is being emptied".to_string())
            } else if let Some(problem) = &seen.problem {
                Some(problem.clone())
            } else if !pool.refusal.is_empty() {
                Some(pool.refusal.clone())
            } else {
                peer_address(agent).err().map(|error| error.to_string())
            };
            Some(TargetPool {
                id,
                name: pool.name.clone(),
                node: agent.node().to_string(),
                home: description.home.clone(),
                provisionable: u64::try_from(pool.promisable_bytes).unwrap_or(0),
                problem,
            })
        });
        pools.collect()
    }
}

/// Codes with which a call for a copy ends while the copy continues.
fn is_running(code: i32) -> bool {
    matches!(
        Code::from_i32(code),
        Code::Aborted | Code::DeadlineExceeded | Code::Cancelled
    )
}

/// The request for the copy, from the description of its source. The router decides on everything by
/// which an agent could affect another node or claim.
fn like(
    made: SnapshotForMoveResponse,
    copy: &MoveCopy,
) -> std::result::Result<CreateVolumeRequest, String> {
    let name = snapshot_name(copy.move_uid, copy.round);
    let snapshot = named(Some(&made.snapshot_id), NameKind::Snapshot, &name)?;
    if snapshot.pool != copy.source.pool {
        return Err(format!("snapshot {snapshot} is on another pool"));
    }
    let described = CreateVolumeRequest::decode(&*made.create);
    let described = described.map_err(|error| format!("it describes no volume: {error}"))?;
    let range = described.capacity_range.unwrap_or_default();
    let size = u64::try_from(range.required_bytes).unwrap_or(u64::MAX);
    if size > copy.max_bytes || size == 0 {
        let (source, most) = (copy.source, copy.max_bytes);
        return Err(format!(
            "volume {source} has {size} bytes, but its PersistentVolume has {most}"
        ));
    }
    let mut parameters: HashMap<String, String> = described
        .parameters
        .into_iter()
        .filter(|(key, _)| !key.starts_with("csi.storage.k8s.io/") && key != "restore")
        .collect();
    let mut set = |key: &str, value: &str| drop(parameters.insert(key.into(), value.into()));
    set("pool", &copy.pool);
    if let Some((namespace, claim)) = copy.claim.split_once('/') {
        set("csi.storage.k8s.io/pvc/namespace", namespace);
        set("csi.storage.k8s.io/pvc/name", claim);
    }
    // The same for every copy into the volume, so that one continues another.
    let source = SnapshotSource {
        snapshot_id: snapshot_of(copy.source, copy.move_uid, None).to_string(),
    };
    Ok(CreateVolumeRequest {
        name: copy.name.clone(),
        capacity_range: described.capacity_range,
        volume_capabilities: described.volume_capabilities,
        parameters,
        volume_content_source: Some(VolumeContentSource {
            r#type: Some(Type::Snapshot(source)),
        }),
        ..CreateVolumeRequest::default()
    })
}

fn seen(found: LookForMoveResponse) -> std::result::Result<VolumeMoveStatus, String> {
    let fenced = fence_uid(&found.fenced_by, "move")?;
    let lifted = fence_uid(&found.lifted_for, "move")?;
    let state = match found.state() {
        State::Absent => MovingState::Absent,
        State::Filling => MovingState::Filling,
        State::Ready => MovingState::Ready,
    };
    let snapshots = found.snapshots.into_iter();
    Ok(VolumeMoveStatus {
        state,
        size: found.size_bytes,
        copied: found.copied_bytes,
        fenced,
        lifted,
        user: Some(found.user).filter(|user| !user.is_empty()),
        content: (found.content_identity != 0).then_some(MoveContentStatus {
            identity: found.content_identity,
            is_whole: found.content_is_whole,
        }),
        snapshots: snapshots
            .map(|one| MoveSnapshotStatus {
                id: one.snapshot_id,
                is_ready: one.ready,
                identity: one.identity,
            })
            .collect(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::csi::CapacityRange;
    use crate::model::PoolId;

    fn copy() -> MoveCopy {
        let id = |n| VolumeId {
            pool: PoolId(Uuid::from_u128(n)),
            uuid: Uuid::from_u128(9),
        };
        MoveCopy {
            move_uid: Uuid::from_u128(7),
            source: id(1),
            name: "move-7".into(),
            target: id(2),
            pool: "ssd".into(),
            claim: "shop/data".into(),
            max_bytes: 100,
            round: None,
        }
    }

    fn described(copy: &MoveCopy, size: i64) -> SnapshotForMoveResponse {
        let key = "csi.storage.k8s.io/pvc/name".to_string();
        let parameters = [
            ("pool".to_string(), "own".to_string()),
            (key, "another".to_string()),
            ("restore".to_string(), "pod".to_string()),
            ("wipe".to_string(), "zero".to_string()),
        ];
        let create = CreateVolumeRequest {
            name: "another".into(),
            parameters: parameters.into(),
            capacity_range: Some(CapacityRange {
                required_bytes: size,
                limit_bytes: 0,
            }),
            ..CreateVolumeRequest::default()
        };
        SnapshotForMoveResponse {
            snapshot_id: snapshot_of(copy.source, copy.move_uid, copy.round).to_string(),
            create: create.encode_to_vec(),
            changed_bytes: 0,
        }
    }

    #[test]
    fn an_agent_does_not_decide_on_name_pool_claim_or_source_of_a_copy() {
        let copy = copy();
        let made = like(described(&copy, 100), &copy).unwrap();
        assert_eq!(made.name, "move-7");
        let of = |key: &str| made.parameters.get(key).map(String::as_str);
        assert_eq!(of("pool"), Some("ssd"));
        assert_eq!(of("csi.storage.k8s.io/pvc/name"), Some("data"));
        assert_eq!(of("csi.storage.k8s.io/pvc/namespace"), Some("shop"));
        assert_eq!((of("restore"), of("wipe")), (None, Some("zero")));
        let Some(Type::Snapshot(source)) = made.volume_content_source.unwrap().r#type else {
            panic!("it is a copy of a snapshot");
        };
        assert_eq!(
            source.snapshot_id,
            snapshot_of(copy.source, copy.move_uid, None).to_string()
        );
    }

    #[test]
    fn an_agent_that_describes_another_volume_is_refused() {
        let copy = copy();
        for size in [101, 0, -1] {
            assert!(like(described(&copy, size), &copy).is_err(), "{size}");
        }
        let mut other = described(&copy, 100);
        other.snapshot_id = SnapshotId {
            pool: copy.target.pool,
            ..snapshot_of(copy.source, copy.move_uid, None)
        }
        .to_string();
        assert!(like(other, &copy).is_err());
        let mut broken = described(&copy, 100);
        broken.create = vec![0xff; 9];
        assert!(like(broken, &copy).is_err());
        let fence = LookForMoveResponse {
            fenced_by: "no UUID".into(),
            ..LookForMoveResponse::default()
        };
        assert!(seen(fence).is_err());
    }
}
