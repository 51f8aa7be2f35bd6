//! VolumeMoves, with their progress, as their status has it.

use kube::api::{DynamicObject, ListParams};
use serde::Serialize;

use crate::cluster::object::{self, Fields};
use crate::cluster::{Cluster, Scope};
use crate::failure::Result;

/// A VolumeMove.
#[derive(Clone, Debug, Default, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Move {
    pub namespace: String,
    pub name: String,
    pub claim: String,
    pub phase: String,
    pub from: String,
    pub to: String,
    pub bytes_done: i64,
    pub bytes_total: i64,
    pub message: String,
}

impl Move {
    /// From its object.
    pub fn of(object: &DynamicObject) -> Move {
        let text = |pointer| object.text(pointer).to_string();
        Move {
            namespace: object.namespace().into(),
            name: object.name().into(),
            claim: text("/spec/claim"),
            phase: object.operation_phase().into(),
            from: text("/status/from/node"),
            to: text("/status/to/node"),
            bytes_done: object.number("/status/bytesDone"),
            bytes_total: object.number("/status/bytesTotal"),
            message: text("/status/message"),
        }
    }

    /// Nothing happens any more.
    pub fn has_ended(&self) -> bool {
        matches!(self.phase.as_str(), "Done" | "Aborted")
    }
}

/// The VolumeMoves of a scope.
pub async fn moves(cluster: &Cluster, scope: &Scope) -> Result<Vec<Move>> {
    let found = move_objects(cluster, scope).await?;
    Ok(found.iter().flatten().map(Move::of).collect())
}

/// The objects of the VolumeMoves of a scope. `None` if the user may not list them.
pub async fn move_objects(cluster: &Cluster, scope: &Scope) -> Result<Option<Vec<DynamicObject>>> {
    let all = ListParams::default();
    cluster.find(&object::MOVE, scope, &all).await
}
