//! The hidden snapshot that the agent of a volume takes for a clone on another node.

use std::time::Duration;

use tonic::Code;

use crate::agent::SnapshotForCloneRequest;
use crate::error::{Error, Result, chain};
use crate::model::VolumeId;
use crate::operation::{CreateVolume, snapshot_id_for_clone};
use crate::router::Router;
use crate::router::agents::Agent;
use crate::router::call::Call;
use crate::router::resolve::answered;
use crate::router::route::Owner;

/// The pauses before the attempts to delete a snapshot.
const END_PAUSES: [Duration; 3] = [
    Duration::ZERO,
    Duration::from_millis(300),
    Duration::from_secs(1),
];
/// How long the answer about a clone waits for the deletion of its snapshot.
const END_TIMEOUT: Duration = Duration::from_secs(5);

/// A volume that is cloned on another node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(in crate::router) struct ForClone {
    pub(in crate::router) volume: VolumeId,
    /// The request name of the clone.
    pub(in crate::router) clone: String,
}

impl ForClone {
    /// The ID of its snapshot, whether or not it was taken.
    pub(super) fn snapshot_id(&self) -> String {
        snapshot_id_for_clone(&self.volume, &self.clone).to_string()
    }

    fn request(&self, delete: bool) -> SnapshotForCloneRequest {
        SnapshotForCloneRequest {
            volume_id: self.volume.to_string(),
            volume_name: self.clone.clone(),
            delete,
        }
    }
}

impl Router {
    /// Refuses a clone for which its pool has no room, before the file system of its source is frozen.
    pub(super) fn must_have_room_for(&self, agent: &Agent, asked: &CreateVolume) -> Result<()> {
        // A pool that is not reported is refused by its agent.
        let Some(pool) = agent.meant(asked.parameters.pool.as_deref()) else {
            return Ok(());
        };
        let (name, room, needed) = (pool.name, pool.promisable_bytes, asked.capacity.required);
        if u64::try_from(room).is_ok_and(|room| needed <= room) {
            return Ok(());
        }
        Err(Error::Forwarded {
            code: Code::ResourceExhausted as i32,
            message: format!("pool {name} has room for {room} bytes, and the clone needs {needed}"),
        })
    }

    /// Lets the agent of the volume take the snapshot, unless it exists.
    pub(super) async fn take_for_clone(
        &self,
        call: &Call<'_>,
        source: &Agent,
        it: &ForClone,
    ) -> Result<()> {
        let mut client = source.client().await?;
        let answer = client
            .snapshot_for_clone(call.request(it.request(false))?)
            .await;
        let answer = answer.map_err(|status| match status.code() {
            Code::Unimplemented => {
                source.unreachable("its release cannot send volumes to other nodes")
            }
            _ => named(source.error(&status), it, source),
        })?;
        let (wanted, id) = (it.snapshot_id(), answer.into_inner().snapshot_id);
        let verdict = match id == wanted {
            true => Ok(()),
            false => Err(format!("it names snapshot {id:?} instead of {wanted}")),
        };
        self.checked(source, verdict)
    }

    /// Deletes the snapshot, of which a reader may need a moment to end. If that fails, the agent of the
    /// volume deletes it later.
    pub(super) async fn end_for_clone(&self, it: &ForClone) {
        let attempts = async {
            for pause in END_PAUSES {
                tokio::time::sleep(pause).await;
                match self.delete_for_clone(it).await {
                    Ok(()) => return,
                    Err(error) => log_failure(it, &chain(&error).to_string()),
                }
            }
        };
        let ended = tokio::time::timeout(END_TIMEOUT, attempts).await;
        if ended.is_err() {
            log_failure(it, "there was no answer in time");
        }
    }

    async fn delete_for_clone(&self, it: &ForClone) -> Result<()> {
        let Owner::Agent(agent) = self.owner(&it.volume.to_string()).await? else {
            return Ok(());
        };
        let mut client = agent.client().await?;
        answered(&agent, client.snapshot_for_clone(it.request(true))).await?;
        Ok(())
    }
}

fn log_failure(it: &ForClone, error: &str) {
    let (volume, clone) = (it.volume.to_string(), &it.clone);
    tracing::warn!(
        volume,
        clone,
        error,
        "failed to delete the snapshot for a clone"
    );
}

/// The caller has asked for a volume on another node than the one that refuses.
fn named(error: Error, it: &ForClone, source: &Agent) -> Error {
    match error {
        Error::Forwarded { code, message } => {
            let (volume, node) = (it.volume, source.node());
            Error::Forwarded {
                code,
                message: format!("the snapshot of volume {volume} on node {node}: {message}"),
            }
        }
        error => error,
    }
}
